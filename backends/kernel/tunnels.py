"""Makes the less usual devices, through pyroute2 (linux/if_link.h, linux/if_tunnel.h)."""

from __future__ import annotations

from typing import Any

import pyroute2
from pyroute2.netlink.exceptions import NetlinkError

from backends.dataplane.model import Ip6Tunnel, Ipip, LinkSpec, Tunnel
from backends.kernel.sockets import kernel_error

IPPROTO_IPV6 = 41
ENCAP_FOU, ENCAP_CSUM = 1, 1
"""TUNNEL_ENCAP_FOU, TUNNEL_ENCAP_FLAG_CSUM (linux/if_tunnel.h)."""


def create(spec: LinkSpec) -> None:
    """Create the device, down and without addresses. Raises KernelError."""
    values: dict[str, Any] = {"ifname": spec.name, "mtu": spec.mtu_bytes, "txqlen": 0}
    if spec.mac:
        values["address"] = spec.mac
    try:
        with pyroute2.IPRoute() as ipr:
            ipr.link("add", **values, **options(spec.tunnel))
    except NetlinkError as cause:
        words = str(cause.extra_code) if getattr(cause, "extra_code", None) else ""
        raise kernel_error("create", f"device {spec.name}", int(cause.code), words) from cause
    except OSError as cause:
        raise kernel_error("create", f"device {spec.name}", cause.errno or 0) from cause


def options(tunnel: Tunnel) -> dict[str, Any]:
    """Return what makes the device. What is 0 here would otherwise be the kernel's choice."""
    match tunnel:
        case Ipip():
            values = {"ipip_ttl": 0, "ipip_tos": 0, "ipip_pmtudisc": 0, **_fou_options(tunnel.fou_port)}
            ends = {"ipip_local": tunnel.local, "ipip_remote": tunnel.remote}
            return {"kind": tunnel.kind, **values, **{name: str(end) for name, end in ends.items() if end is not None}}
        case Ip6Tunnel():
            # The protocol keeps it to IPv6 inside IPv6; any would be taken otherwise.
            metadata = {"ip6tnl_collect_metadata": True} if tunnel.external else {}
            return {"kind": tunnel.kind, "ip6tnl_proto": IPPROTO_IPV6, **metadata}
        case _:
            return {"kind": tunnel.kind}


def _fou_options(port: int) -> dict[str, int]:
    if not port:
        return {}
    # With a checksum outside, as a socket sends: without one receivers do not merge datagrams. The TTL stays that of
    # the inner header: with one of its own the kernel would forbid fragmentation of every packet.
    encap = {"ipip_encap_type": ENCAP_FOU, "ipip_encap_flags": ENCAP_CSUM}
    return {**encap, "ipip_encap_sport": port, "ipip_encap_dport": port}
