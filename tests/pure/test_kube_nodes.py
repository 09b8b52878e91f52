from __future__ import annotations

import json
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network, IPv6Network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet.config import parse_network_config
from subnet.errors import DatastoreError
from subnet.kube.nodes import NodeBook, NoSubnet, lease_of, own_subnets
from subnet.kube.records import Node, NodePage, decode, lines
from subnet.leaseset import LeaseSet
from subnet.manager import LeasesChanged, LeasesListed
from subnet.model import Lease, LeaseAttrs, NetworkConfig, Subnets
from tests.support.kube import PREFIX, make_node, node_annotations

pytestmark = pytest.mark.pure

V4, V6 = "10.5.1.0/24", "fd05:0:0:1::/64"
NETWORKS = {"Network": "10.5.0.0/16", "IPv6Network": "fd05::/48"}


def config(*families: int) -> NetworkConfig:
    text = json.dumps({**NETWORKS, "EnableIPv4": 4 in families, "EnableIPv6": 6 in families})
    return parse_network_config(text, "test", check_pools=False)


def node(cidrs: list[str], told: dict[str, Any] | None = None, **spec: Any) -> Node:
    made = make_node("n2", cidrs, told)
    made["spec"] |= spec
    made["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"
    return decode(json.dumps(made).encode(), Node)


@pytest.mark.parametrize("order", [[V4, V6], [V6, V4]])
@pytest.mark.parametrize("families", [(4,), (6,), (4, 6)])
def test_K08_any_order_of_pod_cidrs(order: list[str], families: tuple[int, ...]) -> None:
    expected = Subnets(IPv4Network(V4) if 4 in families else None, IPv6Network(V6) if 6 in families else None)
    assert own_subnets("n1", order, config(*families)) == expected


@pytest.mark.parametrize(
    ("spec", "cidrs"),
    [
        ({"podCIDR": V6, "podCIDRs": []}, (V6,)),
        ({"podCIDR": V6, "podCIDRs": None}, (V6,)),
        ({"podCIDR": "", "podCIDRs": [V4]}, (V4,)),
        ({"podCIDR": V4, "podCIDRs": [V6, V4]}, (V6, V4)),
        ({"podCIDR": None}, ()),
        ({}, ()),
    ],
)
def test_K08_either_field(spec: dict[str, Any], cidrs: tuple[str, ...]) -> None:
    assert node([], None, **spec).spec.cidrs == cidrs


@pytest.mark.parametrize(
    ("cidrs", "families", "waiting", "words"),
    [
        ([], (4,), True, ["n1", "spec.podCIDRs", "spec.podCIDR", "--allocate-node-cidrs", "--cluster-cidr"]),
        ([V4, V6, "10.5.2.0/24"], (4,), False, [V4, V6, "10.5.2.0/24"]),
        (["10.6.1.0/24"], (4,), False, ["10.6.1.0/24", "10.5.0.0/16"]),
        (["10.0.0.0/8"], (4,), False, ["10.0.0.0/8", "10.5.0.0/16"]),
        ([V4, "fd99::/64"], (4, 6), False, ["fd99::/64", "fd05::/48"]),
        ([V4], (4, 6), False, ["IPv6", V4]),
        ([V6], (4,), False, ["IPv4", V6]),
        (["banana"], (4,), False, ["banana"]),
        (["10.5.1.0"], (4,), False, ["10.5.1.0", "prefix length"]),
    ],
    ids=["K01", "K08 three", "C07", "C07 wider", "C07 IPv6", "K09", "K09 IPv6", "not a CIDR", "no length"],
)
def test_own_subnet_refused(cidrs: list[str], families: tuple[int, ...], waiting: bool, words: list[str]) -> None:
    with pytest.raises(NoSubnet) as caught:
        own_subnets("n1", cidrs, config(*families))
    assert caught.value.waiting is waiting
    for word in words:
        assert word in str(caught.value)


def test_the_other_familys_cidr_may_be_outside() -> None:
    assert own_subnets("n1", [V4, "fd99::/64"], config(4)) == Subnets(IPv4Network(V4))


def test_a_peer() -> None:
    told = node_annotations("192.0.2.2", "02:00:00:00:00:02")
    lease, problem = lease_of(node(["10.5.2.0/24"], told), PREFIX, (4,))
    assert problem == ""
    assert lease == Lease(
        Subnets(IPv4Network("10.5.2.0/24")),
        LeaseAttrs(IPv4Address("192.0.2.2"), None, "vxlan", {"VNI": 1, "VtepMAC": "02:00:00:00:00:02"}),
        key="n2",
        revision=1767225600,
    )


@pytest.mark.parametrize(
    "told", [{}, {PREFIX + "kube-subnet-manager": "false"}, {"other.example/kube-subnet-manager": "true"}]
)
def test_unmanaged_nodes_are_no_peers_and_no_news(told: dict[str, str]) -> None:
    assert lease_of(node(["10.5.2.0/24"], told), PREFIX, (4,)) == (None, "")


BOTH = node_annotations("192.0.2.2", "02:00:00:00:00:02", "2001:db8::2", "02:00:00:00:06:02")


@pytest.mark.parametrize(
    ("cidrs", "change", "has", "words"),
    [
        ([V4, V6], {}, {4, 6}, []),
        ([V4], {}, {4}, ["IPv6 pod CIDR"]),
        ([V6], {}, {6}, ["IPv4 pod CIDR"]),
        ([V6, "banana"], {}, {6}, ["banana"]),
        ([], {}, set(), ["IPv4 pod CIDR", "IPv6 pod CIDR"]),
        ([V4, V6], {"public-ipv6": ""}, {4}, ["public-ipv6"]),
        ([V4, V6], {"public-ip": "x"}, {6}, ["public-ip", '"x"']),
        ([V4, V6], {"backend-data": "{"}, {6}, ["backend-data"]),
    ],
)
def test_K09_deficient_peers_get_the_family_they_have(
    cidrs: list[str], change: dict[str, str], has: set[int], words: list[str]
) -> None:
    told = BOTH | {PREFIX + name: text for name, text in change.items()}
    lease, problem = lease_of(node(cidrs, told), PREFIX, (4, 6))
    found = set() if lease is None else {f for f in (4, 6) if lease.subnets.of(f)}
    assert found == has
    assert bool(problem) == bool(words)
    for word in words:
        assert word in problem


def test_a_page_survives_an_odd_node() -> None:
    good = make_node("n2", ["10.5.2.0/24"], node_annotations("192.0.2.2"))
    page = {
        "metadata": {"resourceVersion": "7", "continue": "t"},
        "items": [{"metadata": {"annotations": {"a": 1}}}, good],
    }
    found = decode(json.dumps(page).encode(), NodePage)
    assert (found.metadata.resource_version, found.metadata.continue_) == ("7", "t")
    items = found.items or []
    with pytest.raises(DatastoreError, match="Node"):
        decode(items[0], Node)
    assert decode(items[1], Node).metadata.name == "n2"


@pytest.mark.parametrize("created", [None, "", "yesterday"])
def test_age_unknown(created: str | None) -> None:
    made = {"metadata": {"name": "n", "creationTimestamp": created}}
    assert decode(json.dumps(made).encode(), Node).metadata.created_s == 0


@given(
    st.lists(st.binary(min_size=1).filter(lambda b: b"\n" not in b)),
    st.integers(1, 7),
    st.binary().filter(lambda b: b"\n" not in b),
)
def test_lines_come_whole_however_they_are_cut(whole: list[bytes], size: int, tail: bytes) -> None:
    stream = b"".join(line + b"\n" for line in whole) + tail
    blocks = [stream[i : i + size] for i in range(0, len(stream), size)]
    assert list(lines(blocks)) == whole


LEASES = st.builds(
    lambda name, number, age, mac: Lease(
        Subnets(IPv4Network((0x0A050000 + number * 256, 24))), LeaseAttrs(backend_data=mac), f"n{name}", revision=age
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(1, 2),
)


def known(events: Iterable[object], first: tuple[Lease, ...]) -> set[Lease]:
    leases = LeaseSet()
    leases.listed(LeasesListed(first, 1))
    for number, changes in enumerate(events, 2):
        leases.changed(LeasesChanged(changes, number))  # type: ignore[arg-type]
    return set(leases.all())


@given(st.lists(LEASES, unique_by=lambda lease: lease.key), st.lists(st.one_of(LEASES, st.integers(1, 4))))
def test_events_and_list_agree(first: list[Lease], steps: list[Lease | int]) -> None:
    book = NodeBook()
    listed = book.replace(first)
    nodes = {lease.key: lease for lease in first}
    events = []
    for step in steps:
        if isinstance(step, Lease):
            nodes[step.key] = step
            events.append(book.put(step.key, step))
        else:
            nodes.pop(f"n{step}", None)
            events.append(book.put(f"n{step}", None))
    assert known(events, listed) == set(NodeBook().replace(nodes.values()))


def test_of_two_nodes_with_one_pod_cidr_the_older_has_it_and_the_other_inherits() -> None:
    subnets = Subnets(IPv4Network("10.5.2.0/24"))
    old, new = Lease(subnets, LeaseAttrs(), "old", revision=1), Lease(subnets, LeaseAttrs(), "new", revision=2)
    book = NodeBook()
    assert book.replace([new, old]) == (old,)
    assert book.put("old", None) == (new,)
    assert book.put("old", old) == (old,)
    assert book.put("new", None) == ()
    assert book.put("old", None) == (subnets,)


def test_equal_content_is_no_change() -> None:
    lease = Lease(Subnets(IPv4Network("10.5.2.0/24")), LeaseAttrs(backend_data={"VNI": 1}), "n2")
    book = NodeBook()
    book.replace([lease])
    assert book.put("n2", Lease(lease.subnets, LeaseAttrs(backend_data={"VNI": 1}), "n2")) == ()
