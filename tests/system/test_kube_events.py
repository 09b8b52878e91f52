"""What becomes of a node, becomes of its entries in the kernel, in each family by itself."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest

from flanneld.ctl.lab.hosts import Host
from tests.support.kube import PREFIX, KubeApi, Object, node_annotations
from tests.support.kube_lab import kube_lab
from tests.support.kube_node import DUAL
from tests.support.site import settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

V4, V6 = "192.0.2.9", "2001:db8:1::9"
MAC4, MAC6 = "02:00:00:00:00:09", "02:00:00:06:00:09"
CIDRS = ("10.5.9.0/24", "fd05:0:0:9::/64")


@pytest.fixture(scope="module")
def api_and_host() -> Iterator[tuple[KubeApi, Host]]:
    with kube_lab(1, DUAL) as (lab, api):
        (host,) = lab.hosts
        host.daemon.start()
        host.daemon.wait_ready()
        yield api, host


def entries(host: Host, family: int) -> set[tuple[str, ...]]:
    """Routes, neighbours and FDB entries of the family's device, of subnets that are not the own one."""
    namespace, device = host.namespace, "flannel.1" if family == 4 else "flannel-v6.1"
    routes = namespace.show(f"-{family} route show table main dev {device}")
    return {
        *(("route", r["dst"], r["gateway"]) for r in routes if "gateway" in r),
        *(("neigh", n["dst"], n["lladdr"]) for n in namespace.neighbours(device, family)),
        *(("fdb", e["mac"], e["dst"]) for e in namespace.fdb(device)),
    }


def wanted(cidr: str, public: str, mac: str) -> set[tuple[str, ...]]:
    base = cidr.partition("/")[0]
    return {("route", cidr, base), ("neigh", base, mac), ("fdb", mac, public)}


def told(v4: str = V4, mac4: str = MAC4, v6: str = V6, mac6: str = MAC6) -> Object:
    return node_annotations(v4, mac4, v6, mac6)


def both(
    v4: str = V4, mac4: str = MAC4, v6: str = V6, mac6: str = MAC6, cidrs: tuple[str, str] = CIDRS
) -> dict[int, set[tuple[str, ...]]]:
    return {4: wanted(cidrs[0], v4, mac4), 6: wanted(cidrs[1], v6, mac6)}


NOTHING: dict[int, set[tuple[str, ...]]] = {4: set(), 6: set()}


def test_a_node_s_life(api_and_host: tuple[KubeApi, Host]) -> None:
    api, host = api_and_host

    def becomes(what: str, expected: dict[int, set[tuple[str, ...]]]) -> None:
        took_s = settle(
            what, lambda: [entries(host, f) ^ expected[f] for f in (4, 6) if entries(host, f) != expected[f]], 10
        )
        print(f"{what}: {took_s * 1000:.0f} ms")

    becomes("nobody", NOTHING)
    api.node("n9", CIDRS, told())
    becomes("added", both())
    mac = "02:00:00:00:99:09"
    api.change("n9", told(mac4=mac))
    becomes("another MAC", both(mac4=mac))
    api.change("n9", told(v4="192.0.2.99", mac4=mac))
    becomes("another address", both(v4="192.0.2.99", mac4=mac))
    # A comparison that stops at the first family would take this for no change.
    api.change("n9", told(v4="192.0.2.99", mac4=mac, v6="2001:db8:1::99"))
    becomes("another IPv6 address", both(v4="192.0.2.99", mac4=mac, v6="2001:db8:1::99"))
    api.change("n9", told(v4="192.0.2.99", mac4=mac, v6="2001:db8:1::99", mac6="02:00:00:06:99:09"))
    becomes("another IPv6 MAC", both("192.0.2.99", mac, "2001:db8:1::99", "02:00:00:06:99:09"))
    api.delete("n9")
    becomes("deleted", NOTHING)
    api.node("n9", CIDRS, told(v4="192.0.2.100"))
    becomes("made again elsewhere", both(v4="192.0.2.100"))
    moved = ("10.5.10.0/24", "fd05:0:0:a::/64")
    api.delete("n9")
    api.node("n9", moved, told())
    becomes("made again with other pod CIDRs", both(cidrs=moved))
    api.delete("n9")
    becomes("deleted again", NOTHING)


def test_family_that_a_node_loses_and_gets_again(api_and_host: tuple[KubeApi, Host]) -> None:
    api, host = api_and_host
    api.node("n9", CIDRS, told())

    def of(family: int) -> list[set[tuple[str, ...]]]:
        return [found for f in (4, 6) if (found := entries(host, f) ^ (both()[f] if f != family else set()))]

    settle("both", lambda: of(0), 10)
    for family, names in ((6, ("public-ipv6", "backend-v6-data")), (4, ("public-ip", "backend-data"))):
        api.change("n9", {PREFIX + name: None for name in names})
        settle(f"IPv{family} lost", lambda f=family: of(f), 10)  # type: ignore[misc]
        api.change("n9", told())
        settle(f"IPv{family} again", lambda: of(0), 10)
    api.change("n9", {PREFIX + "kube-subnet-manager": "false"})
    settle("no longer managed", lambda: [found for f in (4, 6) if (found := entries(host, f))], 10)
    api.delete("n9")
