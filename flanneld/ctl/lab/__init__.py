"""A flannel network in network namespaces: for demonstrations and for the system tests."""

from flanneld.ctl.lab.lab import Lab

__all__ = ["Lab"]
