from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll

pytestmark = [pytest.mark.system, pytest.mark.vm]

WAIT_S = 120.0
"""The guest is an emulated machine."""
READY_S = 300.0
V4, V6 = "flannel.ipip", "flannel-v6.ipip"


def config(**options: Any) -> dict[str, Any]:
    networks = {"Network": "10.5.0.0/16", "EnableIPv6": True, "IPv6Network": "fd05::/48"}
    return networks | {"Backend": {"Type": "ipip", **options}}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(3, family="dual", config=config(), ready_timeout_s=READY_S) as built:
        yield built


def subnets(host: Host) -> tuple[str, str]:
    return str(host.gateways()[0].network), str(host.gateways()[1].network)


def routes(host: Host, family: int) -> dict[str, tuple[str, ...]]:
    """Routes to peers: destination to what says where packets go. As text: in JSON, encap repeats the key dst."""
    found = {}
    for line in host.run("ip", f"-{family}", "route", "show").splitlines():
        destination, *words = line.split()
        if destination.startswith(("10.5.", "fd05:")) and "kernel" not in words:
            said = dict(itertools.pairwise(words))
            way = said.get("via") or f"ip6 {said.get('src')} {said.get('dst')}"
            found[destination] = (
                said["dev"],
                way,
                said.get("proto", "boot"),
                *(["onlink"] if "onlink" in words else []),
            )
    return found


def wanted(lab: Lab, host: Host, family: int, direct: bool) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for peer in lab.hosts:
        if peer is not host and peer.v4 and peer.v6 and host.v6:
            remote = str(peer.v4.ip if family == 4 else peer.v6.ip)
            destination = subnets(peer)[family == 6]
            if direct:
                found[destination] = ("eth0", remote, "142", "onlink")
            elif family == 4:
                found[destination] = (V4, remote, "boot", "onlink")
            else:
                found[destination] = (V6, f"ip6 {host.v6.ip} {remote}", "boot")
    return found


def whole(lab: Lab, direct: bool = False) -> bool:
    return all(routes(h, f) == wanted(lab, h, f, direct) for h in lab.hosts for f in (4, 6))


def answers(lab: Lab) -> dict[tuple[str, str, int], int]:
    pairs = itertools.product(itertools.permutations(lab.hosts, 2), (4, 6))
    return {(a.name, b.name, f): a.pod.ping(b.pod, f, count=2)[0] for (a, b), f in pairs}


def test_devices_are_the_documented_ones(lab: Lab) -> None:
    for host in lab.hosts:
        assert host.v4 is not None
        link = host.namespace.link(V4)
        assert link is not None
        data = link["linkinfo"]["info_data"]
        assert (link["linkinfo"]["info_kind"], data["local"], data["remote"]) == ("ipip", str(host.v4.ip), "any")
        assert (data["ttl"], data.get("tos", "0x0"), data["pmtudisc"]) == (0, "0x0", False)
        assert (link["mtu"], link.get("txqlen", 0), link["link"]) == (1480, 0, None)
        assert "UP" in link["flags"]
        v4, v6 = (network.split("/")[0] for network in subnets(host))
        assert f"{v4}/32" in host.namespace.addresses(V4)
        link6 = host.namespace.link(V6)
        assert link6 is not None
        assert (link6["linkinfo"]["info_kind"], link6["linkinfo"]["info_data"]["external"]) == ("ip6tnl", True)
        assert (link6["linkinfo"]["info_data"]["proto"], link6["mtu"], link6.get("txqlen", 0)) == ("ip6ip6", 1460, 0)
        assert f"{v6}/128" in host.namespace.addresses(V6)
        assert host.subnet_env()["FLANNEL_MTU"] == "1460"


def test_lease_has_addresses_and_no_data(lab: Lab) -> None:
    found = sorted(lab.etcd.leases().values(), key=lambda value: str(value["PublicIP"]))
    assert found == [
        {"PublicIP": f"192.0.2.{n}", "PublicIPv6": f"2001:db8:1::{n}", "BackendType": "ipip"} for n in (1, 2, 3)
    ]


def test_everybody_reaches_everybody_with_full_packets(lab: Lab) -> None:
    poll("every route", lambda: whole(lab), WAIT_S)
    poll("every answer", lambda: set(answers(lab).values()) == {2}, WAIT_S)


def test_a_peer_of_upstream_is_reached_over_ipv4_and_its_end_leaves_nothing(lab: Lab) -> None:
    host = lab.hosts[0]
    lab.etcd.forge("10.5.200.0-24", {"PublicIP": "192.0.2.99", "PublicIPv6": None, "BackendType": "ipip"})
    poll("its route", lambda: routes(host, 4).get("10.5.200.0/24") == (V4, "192.0.2.99", "boot", "onlink"), WAIT_S)
    lab.etcd.delete(f"{lab.etcd.prefix}/subnets/10.5.200.0-24")
    poll("its end", lambda: whole(lab), WAIT_S)


DAMAGE = {
    "device": f"link del {V4}",
    "IPv6 device": f"link del {V6}",
    "device down": f"link set {V4} down",
    "MTU": f"link set {V4} mtu 1300",
    "route": "route del {v4}",
    "IPv6 route": "-6 route del {v6}",
    "route elsewhere": "route replace {v4} via 192.0.2.254 dev eth0",
    "outer header": "-6 route replace {v6} encap ip6 src 2001:db8:1::1 dst 2001:db8:1::99 dev " + V6,
    "address": f"addr flush dev {V4} scope global",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_repaired(lab: Lab, damage: str) -> None:
    first, second = lab.hosts[:2]
    v4, v6 = subnets(second)
    before = [{k: v for k, v in (first.namespace.link(d) or {}).items() if k in ("mtu", "linkinfo")} for d in (V4, V6)]
    first.run("ip", *damage.format(v4=v4, v6=v6).split())

    def repaired() -> bool:
        links = [first.namespace.link(d) or {} for d in (V4, V6)]
        own = [f"{network.split('/')[0]}/{bits}" for network, bits in zip(subnets(first), (32, 128), strict=True)]
        return (
            whole(lab)
            and [{k: v for k, v in link.items() if k in ("mtu", "linkinfo")} for link in links] == before
            and all("UP" in link["flags"] for link in links)
            and all(a in first.namespace.addresses(d) for a, d in zip(own, (V4, V6), strict=True))
        )

    poll("repair", repaired, WAIT_S)
    poll("answers", lambda: [first.pod.ping(second.pod, f, count=1)[0] for f in (4, 6)] == [1, 1], WAIT_S)


def test_restart_does_not_interrupt(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    with Flow(first.pod.namespace, second.pod.namespace, second.pod.address(6), rate_per_s=20) as flow:
        poll("datagrams", flow.flowing, WAIT_S)
        mark = flow.sent
        first.daemon.restart(timeout_s=READY_S)
        poll("more", lambda: flow.sent > mark + 20, WAIT_S)
    assert flow.lost(mark) == 0


def test_direct_routing_goes_through_the_peers_themselves_and_back(lab: Lab) -> None:
    lab.etcd.configure(config(DirectRouting=True))
    try:
        poll("direct routes", lambda: whole(lab, direct=True), WAIT_S)
        poll("every answer", lambda: set(answers(lab).values()) == {2}, WAIT_S)
    finally:
        lab.etcd.configure(config())
    poll("tunnel routes", lambda: whole(lab), WAIT_S)


def test_W08_devices_of_others_and_of_other_backends() -> None:
    single = {"Network": "10.5.0.0/16", "Backend": {"Type": "ipip"}}
    with Lab(1, config=single, start=False) as lab:
        (host,) = lab.hosts
        host.namespace.ip(f"link add {V4} type dummy")
        host.daemon.start()
        reason = f"device {V4}: it is of kind dummy, not ipip; remove it: ip link delete {V4}"
        poll("the reason", lambda: reason in host.daemon.notify.status, READY_S)
        # Replaced by one without local address, beside the kernel's fallback device.
        host.namespace.ip(f"link del {V4}", "link set tunl0 up", f"link add {V4} type ipip local any dev eth0")
        host.daemon.wait_ready(READY_S)
        link = host.namespace.link(V4)
        assert link is not None
        assert (link["linkinfo"]["info_data"]["local"], link["mtu"]) == ("192.0.2.1", 1480)
        assert host.subnet_env()["FLANNEL_MTU"] == "1480"
        assert host.namespace.link("tunl0") is not None
        assert host.daemon.stop() == 0
        lab.etcd.configure({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
        host.daemon.start()
        host.daemon.wait_ready(READY_S)
        poll("the end of the earlier device", lambda: host.namespace.link(V4) is None, WAIT_S)
        assert host.namespace.link("flannel.1") is not None
        assert host.namespace.link("tunl0") is not None
