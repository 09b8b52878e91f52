"""Leases in etcd v3: one client adapter, one reader thread, one lease-keeping thread."""

import os

# grpc reads these when it is first imported. Its warnings go to stderr behind
# the log's back, and its fork handlers get in the way of a daemon that forks
# short-lived tools but never uses grpc in a child.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
