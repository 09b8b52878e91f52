"""Adapters that speak to the Linux kernel."""
