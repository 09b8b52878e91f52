"""What the tests of the wireguard backend share: a laboratory of three hosts, and what they have to hold there."""

from __future__ import annotations

import base64
import itertools
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import FamilyChoice
from tests.support import wireguard
from tests.support.drawn import drawn
from tests.support.wireguard import Peer

WAIT_S = 120.0
"""The guest is an emulated machine."""
READY_S = 300.0
V4, V6 = "flannel-wg", "flannel-wg-v6"
PSK = base64.b64encode(b"a shared secret of 32 bytes, so.").decode()


def config(families: FamilyChoice = "dual", **options: Any) -> dict[str, Any]:
    v4 = {"Network": "10.5.0.0/16"} if families != "v6" else {"EnableIPv4": False}
    v6 = {"EnableIPv6": True, "IPv6Network": "fd05::/48"} if families != "v4" else {}
    return drawn(v4 | v6 | {"Backend": {"Type": "wireguard", "PSK": PSK, **options}})


def laboratory(families: FamilyChoice = "dual", **options: Any) -> Lab:
    """Return three hosts that compare often; skips where nothing has WireGuard."""
    if not wireguard.possible():
        pytest.skip("neither the kernel has WireGuard nor is wireguard-go installed")
    settings = config(families, **options)
    return Lab(3, family=families, config=settings, flags=["--resync-period=5"], ready_timeout_s=READY_S)


def subnets(host: Host) -> list[str]:
    return [str(gateway.network) for gateway in host.gateways()]


def peers(host: Host, device: str) -> dict[str, Peer]:
    found = wireguard.read(host, device)
    return found.peers if found is not None else {}


def public_key(lab: Lab, host: Host) -> str:
    (value,) = (v for v in lab.etcd.leases().values() if host.address in {v["PublicIP"], v["PublicIPv6"]})
    return str((value.get("BackendData") or value["BackendV6Data"])["PublicKey"])


def wanted(lab: Lab, host: Host, family: int) -> dict[str, Peer]:
    found: dict[str, Peer] = {}
    for peer in lab.hosts:
        remote = peer.v4 if family == 4 else peer.v6
        if peer is not host and remote is not None:
            place = f"{remote.ip} {51820 if family == 4 else 51821}"
            found[public_key(lab, peer)] = Peer(place, (subnets(peer)[family == 6],), 0, PSK)
    return found


def whole(lab: Lab, *hosts: Host) -> bool:
    """Whether devices, peers and routes of the hosts, of all if none is named, are as wanted."""
    return all(_whole(lab, host) for host in hosts or lab.hosts)


def _whole(lab: Lab, host: Host) -> bool:
    links = host.namespace.links()
    for family, name, network, port in ((4, V4, "10.5.0.0/16", 51820), (6, V6, "fd05::/48", 51821)):
        link = links.get(name, {})
        routes = [r["dev"] for r in host.namespace.routes(family) if r["dst"] == network]
        if "UP" not in link.get("flags", ()) or link["mtu"] != 1420 or routes != [name]:
            return False
        own = subnets(host)[family == 6].split("/")[0]
        if f"{own}/{32 if family == 4 else 128}" not in host.namespace.addresses(name):
            return False
        device = wireguard.read(host, name)
        key = (host.daemon.directory / "wgkey").read_text()
        if device is None or (device.private_key, device.port) != (key, port):
            return False
        if device.peers != wanted(lab, host, family):
            return False
    return True


def answers(lab: Lab, *families: int) -> set[int]:
    pairs = itertools.product(itertools.permutations(lab.hosts, 2), families)
    return {a.pod.ping(b.pod, family, count=2)[0] for (a, b), family in pairs}


def answer(source: Host, target: Host, *families: int) -> list[int]:
    return [source.pod.ping(target.pod, family, count=1)[0] for family in families or (4, 6)]
