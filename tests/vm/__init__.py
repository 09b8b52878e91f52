"""A virtual machine with Debian's stock kernel, for tests of what the machine's own kernel may lack.

The guest has no disk: it sees the host's root file system, read-only, and tests
run there with the interpreter and the libraries of the host.
"""
