"""Peers without hosts, as many as wanted, and whether a kernel holds them all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flanneld.ctl.lab.netns import Namespace

CONFIG: Mapping[str, Any] = {
    "Network": "10.0.0.0/8",
    "SubnetLen": 24,
    "SubnetMin": "10.248.0.0",
    "SubnetMax": "10.254.0.0",
    "Backend": {"Type": "vxlan"},
}
"""Own subnets come from a part of the network where no peer is."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A vxlan lease; ``base`` is the first address of its /24."""

    base: str
    public_ip: str
    mac: str

    @property
    def lease(self) -> tuple[str, dict[str, Any]]:
        """Return the last part of the key, and the value."""
        data = {"VNI": 1, "VtepMAC": self.mac}
        value = {"PublicIP": self.public_ip, "PublicIPv6": None, "BackendType": "vxlan", "BackendData": data}
        return f"{self.base}-24", value


def peers(count: int) -> list[Peer]:
    """Return that many different peers, at most 60 000."""
    return [
        Peer(
            f"10.{10 + n // 256}.{n % 256}.0",
            f"198.18.{n // 250}.{n % 250 + 1}",
            f"02:00:01:00:{n >> 8:02x}:{n & 255:02x}",
        )
        for n in range(count)
    ]


def absent(namespace: Namespace, wanted: list[Peer]) -> int:
    """Return how many of the peers' routes, neighbours and FDB entries ip(8) and bridge(8) do not find."""
    routes = {r["dst"] for r in namespace.show("route show table main dev flannel.1")}
    neighbours = {(n["dst"], n.get("lladdr")) for n in namespace.neighbours("flannel.1")}
    fdb = {(e["mac"], e["dst"]) for e in namespace.fdb("flannel.1")}
    return sum(
        (f"{p.base}/24" not in routes) + ((p.base, p.mac) not in neighbours) + ((p.mac, p.public_ip) not in fdb)
        for p in wanted
    )
