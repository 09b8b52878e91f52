"""Makes WireGuard devices, through pyroute2 (linux/if_link.h)."""

from __future__ import annotations

import pyroute2
from pyroute2.netlink.exceptions import NetlinkError

from backends.dataplane.model import LinkSpec
from backends.kernel.sockets import kernel_error


def create(spec: LinkSpec) -> None:
    """Create the device, down and without addresses. Raises KernelError."""
    try:
        with pyroute2.IPRoute() as ipr:
            ipr.link("add", ifname=spec.name, mtu=spec.mtu_bytes, txqlen=0, kind=spec.tunnel.kind)
    except NetlinkError as cause:
        words = str(cause.extra_code) if getattr(cause, "extra_code", None) else ""
        raise kernel_error("create", f"device {spec.name}", int(cause.code), words) from cause
    except OSError as cause:
        raise kernel_error("create", f"device {spec.name}", cause.errno or 0) from cause
