"""flannelctl, the operators' tool."""
