"""Backend ``udp``: packets pass through a process, one plain IPv4 packet per UDP datagram."""
