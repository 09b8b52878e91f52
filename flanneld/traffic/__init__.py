"""Traffic rules: masquerade and forward."""
