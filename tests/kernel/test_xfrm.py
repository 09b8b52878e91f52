from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from backends.dataplane.diff import diff
from backends.dataplane.model import (
    LOOPBACK,
    OWN_LABEL,
    PROTO_FLANNEL,
    Address,
    Change,
    DesiredState,
    IpsecPolicy,
    Route,
)
from backends.kernel.netlink import NetlinkKernel
from backends.kernel.xfrm import remove_associations
from tests.support.netns import Namespace

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

MANY = 300
NETWORKS = frozenset({ip_network("10.5.0.0/16")})
OUT = IpsecPolicy(
    "out", ip_network("10.5.1.0/24"), ip_network("10.5.2.0/24"), ip_address("192.0.2.1"), ip_address("192.0.2.2")
)
FORM = "tmpl src {} dst {} proto esp reqid 11 mode tunnel"


def back(direction: str) -> IpsecPolicy:
    return IpsecPolicy(direction, OUT.destination, OUT.source, OUT.outer_destination, OUT.outer_source)  # type: ignore[arg-type]


@pytest.fixture
def kernel(namespace: Namespace) -> Iterator[NetlinkKernel]:
    with namespace.inside():
        adapter = NetlinkKernel()
        yield adapter
        adapter.close()


def desired(*policies: IpsecPolicy, **parts: frozenset[Route] | frozenset[Address]) -> DesiredState:
    return DesiredState(frozenset(), "eth0", NETWORKS, policies=frozenset(policies), **parts)  # type: ignore[arg-type]


def converge(kernel: NetlinkKernel, wanted: DesiredState) -> int:
    changes = diff(kernel.observe([]), wanted)
    assert kernel.apply(changes) == []
    assert diff(kernel.observe([]), wanted) == ()
    return len(changes)


def shown(namespace: Namespace) -> set[str]:
    """Each policy in one line, as ip-xfrm(8) shows it."""
    text = namespace.ip("xfrm policy").replace("\n\t", " ").replace(" ptype main", "")
    return {" ".join(line.split()) for line in text.splitlines()}


def test_policies_are_those_that_upstream_makes(namespace: Namespace, kernel: NetlinkKernel) -> None:
    assert converge(kernel, desired(OUT, back("in"), back("fwd"))) == 3
    form = f"src 10.5.1.0/24 dst 10.5.2.0/24 dir out priority 0 {FORM.format('192.0.2.1', '192.0.2.2')}"
    reverse = f"src 10.5.2.0/24 dst 10.5.1.0/24 dir {{}} priority 0 {FORM.format('192.0.2.2', '192.0.2.1')}"
    assert shown(namespace) == {form, reverse.format("in"), reverse.format("fwd")}
    masks = namespace.ip("-s xfrm policy")
    assert masks.count("enc-mask ffffffff auth-mask ffffffff comp-mask ffffffff") == 3
    assert masks.count("limit: soft (INF)(bytes), hard (INF)(bytes)") == 3
    assert masks.count("expire add: soft 0(sec), hard 0(sec)") == 3


def test_W10_policies_that_are_there_are_taken_over_or_updated_in_place_and_stale_ones_go(
    namespace: Namespace, kernel: NetlinkKernel
) -> None:
    ends = "src 10.5.1.0/24 dst 10.5.2.0/24"
    namespace.ip(f"xfrm policy add {ends} dir out {FORM.format('192.0.2.1', '192.0.2.2')}")
    namespace.ip(f"xfrm policy add src 10.5.2.0/24 dst 10.5.1.0/24 dir in {FORM.format('192.0.2.9', '192.0.2.1')}")
    namespace.ip("xfrm policy add src 10.5.2.0/24 dst 10.5.1.0/24 dir fwd action block priority 7")
    namespace.ip(f"xfrm policy add src 10.5.1.0/24 dst 10.5.9.0/24 dir out {FORM.format('192.0.2.1', '192.0.2.9')}")
    foreign = [
        f"xfrm policy add src 10.7.1.0/24 dst 10.7.2.0/24 dir out {FORM.format('192.0.2.1', '192.0.2.2')}",
        "xfrm policy add src 10.5.1.0/24 dst 10.5.8.0/24 dir out priority 9 "
        "tmpl src 192.0.2.1 dst 192.0.2.8 proto esp reqid 7 mode tunnel",
        f"xfrm policy add src 10.5.1.0/24 dst 10.5.7.0/24 proto tcp dir out {FORM.format('192.0.2.1', '192.0.2.7')}",
    ]
    for command in foreign:
        namespace.ip(command)
    assert converge(kernel, desired(OUT, back("in"), back("fwd"))) == 3
    assert len(shown(namespace)) == 3 + len(foreign)
    assert converge(kernel, desired()) == 3
    assert len(shown(namespace)) == len(foreign)


def test_deleting_what_is_gone_is_success_and_many_go_in_batches(kernel: NetlinkKernel) -> None:
    assert kernel.apply([Change("delete", OUT)]) == []
    many = [replace(OUT, destination=ip_network(f"10.5.{n >> 4}.{(n & 15) << 4}/28")) for n in range(32, 32 + MANY)]
    assert kernel.apply([Change("put", policy) for policy in many]) == []
    assert kernel.observe([]).policies == frozenset(many)
    assert converge(kernel, desired()) == MANY


@pytest.mark.vm
def test_associations_with_a_peer_are_removed_and_no_others(namespace: Namespace) -> None:
    namespace.ip("link add eth0 type veth peer name far0")
    here = ip_address("192.0.2.1")
    for number, (source, destination, reqid) in enumerate([(1, 2, 11), (2, 1, 11), (1, 3, 11), (1, 2, 12)], 1):
        namespace.ip(
            f"xfrm state add src 192.0.2.{source} dst 192.0.2.{destination} proto esp spi {number} reqid {reqid} "
            f"mode tunnel aead rfc4106(gcm(aes)) 0x{'01' * 20} 128"
        )

    def left() -> list[str]:
        return sorted(re.findall(r"spi 0x0*(\d)", namespace.ip("xfrm state")))

    with namespace.inside():
        remove_associations(here, ip_address("192.0.2.2"))
        assert left() == ["3", "4"]
        remove_associations(here)
        remove_associations(here)
    assert left() == ["4"]


def test_the_hosts_own_address_is_marked_and_goes_with_the_mark(namespace: Namespace, kernel: NetlinkKernel) -> None:
    namespace.ip("link add eth0 type veth peer name far0")
    namespace.ip("link set eth0 up")
    namespace.ip("addr add 192.0.2.1/24 dev eth0")
    namespace.ip("addr add 10.5.8.8/32 dev lo")
    own = ip_address("10.5.1.0")
    address = Address(LOOPBACK, ip_interface("10.5.1.0/32"), label=OWN_LABEL)
    route = Route(OUT.destination, "eth0", protocol=PROTO_FLANNEL, source=own, scope="link")
    wanted = desired(OUT, addresses=frozenset({address}), routes=frozenset({route}))
    assert converge(kernel, wanted) == 3
    assert "inet 10.5.1.0/32 scope global lo:flannel" in namespace.ip("addr show dev lo")
    assert namespace.ip("route show proto 142").startswith("10.5.2.0/24 dev eth0 scope link src 10.5.1.0")
    assert kernel.lookup(ip_address("10.5.2.7")).source == own
    assert converge(kernel, desired()) == 3
    left = namespace.ip("addr show dev lo")
    assert "10.5.8.8/32" in left
    assert "10.5.1.0" not in left
