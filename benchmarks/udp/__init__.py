"""What the udp backend carries, against its own fall-backs and against vxlan."""
