"""What the traffic rules cost."""
