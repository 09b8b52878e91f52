"""What the udp backend carries by each data path, beside a plain pump, vxlan and the bare link."""
