"""The link attributes of each kind of tunnel, in pyroute2's words (linux/if_link.h, linux/if_tunnel.h)."""

from __future__ import annotations

from ipaddress import IPv4Address, ip_address
from typing import Any

from backends.dataplane.model import Ip6Tunnel, Ipip, Tunnel, Vxlan, Wireguard

IPPROTO_IPV6 = 41
ENCAP_FOU, ENCAP_CSUM = 1, 1
"""TUNNEL_ENCAP_FOU, TUNNEL_ENCAP_FLAG_CSUM (linux/if_tunnel.h)."""


def options(tunnel: Tunnel) -> dict[str, Any]:
    """Return what makes the device. What is 0 here would otherwise be the kernel's choice."""
    match tunnel:
        case Vxlan():
            return {"kind": tunnel.kind, **_vxlan_options(tunnel)}
        case Ipip():
            values = {"ipip_ttl": 0, "ipip_tos": 0, "ipip_pmtudisc": 0, **_fou_options(tunnel.fou_port)}
            ends = {"ipip_local": tunnel.local, "ipip_remote": tunnel.remote}
            return {"kind": tunnel.kind, **values, **{name: str(end) for name, end in ends.items() if end is not None}}
        case Ip6Tunnel():
            # The protocol keeps it to IPv6 inside IPv6; any would be taken otherwise.
            metadata = {"ip6tnl_collect_metadata": True} if tunnel.external else {}
            return {"kind": tunnel.kind, "ip6tnl_proto": IPPROTO_IPV6, **metadata}
        case Wireguard():
            return {"kind": tunnel.kind}


def _fou_options(port: int) -> dict[str, int]:
    if not port:
        return {}
    # With a checksum outside, as a socket sends: without one receivers do not merge datagrams. The TTL stays that of
    # the inner header: with one of its own the kernel would forbid fragmentation of every packet.
    encap = {"ipip_encap_type": ENCAP_FOU, "ipip_encap_flags": ENCAP_CSUM}
    return {**encap, "ipip_encap_sport": port, "ipip_encap_dport": port}


def _vxlan_options(vxlan: Vxlan) -> dict[str, Any]:
    values: dict[str, Any] = {
        "vxlan_id": vxlan.vni,
        "vxlan_link": vxlan.lower_index,
        "vxlan_ttl": 0,
        "vxlan_tos": 0,
        "vxlan_learning": int(vxlan.learning),
        "vxlan_proxy": 0,
        "vxlan_rsc": 0,
        "vxlan_l2miss": 0,
        "vxlan_l3miss": 0,
        "vxlan_udp_zero_csum6_tx": 0,
        "vxlan_udp_zero_csum6_rx": 0,
    }
    if vxlan.local is not None:
        values["vxlan_local" if vxlan.local.version == 4 else "vxlan_local6"] = str(vxlan.local)
    if vxlan.gbp:
        values["vxlan_gbp"] = True
    if vxlan.port:
        values["vxlan_port"] = vxlan.port
    return values


def parse(kind: str, data: Any) -> Tunnel | None:
    """Return what makes an existing device, None for kinds that no backend makes."""
    if data is None:
        return None
    match kind:
        case Vxlan.kind:
            return _parse_vxlan(data)
        case Ipip.kind:
            fou = data.get_attr("IFLA_IPIP_ENCAP_TYPE") == ENCAP_FOU
            port = data.get_attr("IFLA_IPIP_ENCAP_DPORT") if fou else 0
            return Ipip(_end(data.get_attr("IFLA_IPIP_LOCAL")), _end(data.get_attr("IFLA_IPIP_REMOTE")), port)
        case Ip6Tunnel.kind:
            return Ip6Tunnel(data.get_attr("IFLA_IP6TNL_COLLECT_METADATA") is not None)
        case _:
            return None


def _end(text: str | None) -> IPv4Address | None:
    """An end of a tunnel; all zero is how the kernel writes that any will do."""
    address = IPv4Address(text or 0)
    return None if address.is_unspecified else address


def _parse_vxlan(data: Any) -> Vxlan:
    local = data.get_attr("IFLA_VXLAN_LOCAL") or data.get_attr("IFLA_VXLAN_LOCAL6")
    group = data.get_attr("IFLA_VXLAN_GROUP") or data.get_attr("IFLA_VXLAN_GROUP6")
    return Vxlan(
        vni=data.get_attr("IFLA_VXLAN_ID") or 0,
        port=data.get_attr("IFLA_VXLAN_PORT") or 0,
        local=ip_address(local) if local else None,
        lower_index=data.get_attr("IFLA_VXLAN_LINK") or 0,
        learning=bool(data.get_attr("IFLA_VXLAN_LEARNING")),
        gbp=data.get_attr("IFLA_VXLAN_GBP") is not None,
        multicast=bool(group),
        l2miss=bool(data.get_attr("IFLA_VXLAN_L2MISS")),
    )
