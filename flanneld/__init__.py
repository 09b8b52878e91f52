"""The daemon: joins leases, backends, traffic rules and the host."""

__version__ = "0.1.0"
