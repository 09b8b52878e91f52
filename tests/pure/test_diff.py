from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dataplane.diff import apply_changes, blocked_routes, diff, foreign_addresses, leftover_links
from backends.dataplane.model import (
    PROTO_FLANNEL,
    PROTO_KERNEL,
    Address,
    DesiredState,
    Endpoint,
    FdbEntry,
    Ipip,
    IpsecPolicy,
    KeptTun,
    Link,
    Neighbour,
    ObservedState,
    Route,
    Vxlan,
    Wireguard,
    WireguardPeer,
    blackhole,
)
from subnet.model import IPNetwork

pytestmark = pytest.mark.pure

NETWORK = ip_network("10.5.0.0/16")
DEVICE = "flannel.1"


def _route(text: str, device: str = DEVICE, via: str | None = None, **more: object) -> Route:
    gateway = ip_address(via) if via else None
    return Route(ip_network(text), device, gateway, **more)  # type: ignore[arg-type]


def _desired(**parts: object) -> DesiredState:
    return DesiredState(frozenset({DEVICE}), "eth0", frozenset({NETWORK}), **parts)  # type: ignore[arg-type]


devices = st.sampled_from([DEVICE, "eth0", "docker0"])
numbers = st.integers(0, 5)
macs = numbers.map(lambda n: f"02:00:00:00:00:0{n}")
neighbours = st.builds(lambda d, n, m: Neighbour(d, ip_address(f"10.5.{n}.0"), m), st.just(DEVICE), numbers, macs)
fdb = st.builds(lambda m, n: FdbEntry(DEVICE, m, ip_address(f"192.0.2.{n}")), macs, numbers)
addresses = st.builds(
    lambda d, n: Address(d, ip_interface(f"10.{4 + n % 2}.{n}.0/32")), st.sampled_from([DEVICE, "eth0"]), numbers
)
routes = st.builds(
    lambda d, n, onlink, proto, via: _route(
        f"10.{4 + n % 2}.{n}.0/24", d, f"10.5.{n}.0" if via else None, onlink=onlink, protocol=proto
    ),
    devices,
    numbers,
    st.booleans(),
    st.sampled_from([PROTO_KERNEL, 3, PROTO_FLANNEL]),
    st.booleans(),
)


def _networks(n: int) -> tuple[IPNetwork, ...]:
    return (ip_network(f"10.5.{n}.0/24"),)


def _unique(items: st.SearchStrategy[object]) -> st.SearchStrategy[frozenset[object]]:
    return st.lists(items, unique_by=lambda item: item.key, max_size=6).map(frozenset)  # type: ignore[attr-defined]


peers = st.builds(
    lambda k, e, n: WireguardPeer(DEVICE, f"K{k}", Endpoint(ip_address(f"192.0.2.{e}"), 51820), _networks(n)),
    numbers,
    numbers,
    numbers,
)
policies = st.builds(
    lambda n, r: IpsecPolicy("out", ip_network("10.5.1.0/24"), _networks(n)[0], ip_address("192.0.2.1"), r),
    numbers,
    numbers.map(lambda n: ip_address(f"192.0.2.{n}")),
)
observed_states = st.builds(
    ObservedState,
    st.frozensets(addresses),
    _unique(neighbours),
    st.frozensets(fdb),
    st.frozensets(routes),
    _unique(peers),
    _unique(policies),
)
desired_states = st.builds(
    lambda a, n, f, r, p, i: _desired(addresses=a, neighbours=n, fdb=f, routes=r, peers=p, policies=i),
    st.frozensets(addresses.filter(lambda a: a.device == DEVICE), max_size=1),
    _unique(neighbours),
    _unique(fdb),
    _unique(routes.filter(lambda r: r.device == DEVICE and r.protocol == 3)),
    _unique(peers),
    _unique(policies),
)


@given(observed_states, desired_states)
def test_applying_the_difference_gives_the_desired_state(observed: ObservedState, desired: DesiredState) -> None:
    held = observed
    for _ in range(8):
        changes = diff(held, desired)
        if not changes:
            break
        held = apply_changes(held, changes)
    assert diff(held, desired) == ()
    assert desired.addresses <= held.addresses
    assert desired.neighbours == held.neighbours
    assert desired.fdb == held.fdb
    assert desired.peers == held.peers
    assert desired.policies == held.policies
    assert desired.routes - blocked_routes(held, desired).keys() <= held.routes


def _free(wanted: frozenset[WireguardPeer], observed: ObservedState) -> frozenset[WireguardPeer]:
    """Peers whose networks no other has: putting one takes them away from it."""
    held = {network for peer in observed.peers for network in peer.allowed}
    return frozenset(peer for peer in wanted if not held & set(peer.allowed))


@given(observed_states, desired_states)
def test_additive_state_fills_gaps_and_touches_nothing_else(observed: ObservedState, desired: DesiredState) -> None:
    desired = replace(desired, additive=True)
    held = apply_changes(observed, diff(observed, desired))
    assert diff(held, desired) == ()
    for before, after, wanted in (
        (observed.addresses, held.addresses, desired.addresses),
        (observed.neighbours, held.neighbours, desired.neighbours),
        (observed.fdb, held.fdb, desired.fdb),
        (observed.peers, held.peers, _free(desired.peers, observed)),
        (observed.policies, held.policies, desired.policies),
        (observed.routes, held.routes, desired.routes - blocked_routes(observed, desired).keys()),
    ):
        assert before <= after <= before | wanted
        assert {one.key for one in wanted} <= {one.key for one in after}


@given(observed_states, desired_states)
def test_what_is_not_ours_survives(observed: ObservedState, desired: DesiredState) -> None:
    wanted_keys = {route.key for route in desired.routes}
    foreign = {
        r
        for r in observed.routes
        if (r.device == "docker0" and r.key not in wanted_keys) or (r.protocol == PROTO_KERNEL and r.device != DEVICE)
    }
    theirs = {a for a in observed.addresses if a.device != DEVICE or a.interface.ip not in NETWORK}
    held = apply_changes(observed, diff(observed, desired))
    assert foreign <= held.routes
    assert theirs <= held.addresses


def test_additions_come_in_the_order_that_never_points_at_nothing() -> None:
    desired = _desired(
        addresses=frozenset({Address(DEVICE, ip_interface("10.5.1.0/32"))}),
        neighbours=frozenset({Neighbour(DEVICE, ip_address("10.5.2.0"), "02:00:00:00:00:02")}),
        fdb=frozenset({FdbEntry(DEVICE, "02:00:00:00:00:02", ip_address("192.0.2.2"))}),
        routes=frozenset({_route("10.5.2.0/24", via="10.5.2.0", onlink=True)}),
        peers=frozenset({WireguardPeer(DEVICE, "K", None, _networks(2))}),
    )
    added = diff(ObservedState(), desired)
    assert [type(c.target) for c in added] == [Address, Neighbour, FdbEntry, WireguardPeer, Route]
    held = apply_changes(ObservedState(), added)
    removed = diff(held, _desired())
    assert [type(c.target) for c in removed] == [Route, WireguardPeer, FdbEntry, Neighbour, Address]


def test_K06_changed_mac_leaves_no_old_fdb_entry() -> None:
    gateway, remote = ip_address("10.5.2.0"), ip_address("192.0.2.2")
    old = ObservedState(
        neighbours=frozenset({Neighbour(DEVICE, gateway, "02:00:00:00:00:02")}),
        fdb=frozenset({FdbEntry(DEVICE, "02:00:00:00:00:02", remote)}),
    )
    desired = _desired(
        neighbours=frozenset({Neighbour(DEVICE, gateway, "02:00:00:00:00:0a")}),
        fdb=frozenset({FdbEntry(DEVICE, "02:00:00:00:00:0a", remote)}),
    )
    assert [str(c) for c in diff(old, desired)] == [
        "neigh 10.5.2.0 lladdr 02:00:00:00:00:0a dev flannel.1 added",
        "fdb 02:00:00:00:00:0a dev flannel.1 dst 192.0.2.2 added",
        "fdb 02:00:00:00:00:02 dev flannel.1 dst 192.0.2.2 removed",
    ]


def test_routes_on_the_external_interface_are_told_apart_by_protocol_and_place() -> None:
    ours = _route("10.5.9.0/24", "eth0", "192.0.2.9", protocol=PROTO_FLANNEL)
    left_by_go = _route("10.5.8.0/24", "eth0", "192.0.2.8")
    elsewhere = _route("10.7.1.0/24", "eth0", "192.0.2.254")
    static = _route("10.5.7.0/24", "eth0", "192.0.2.7", protocol=4)
    on_other_device = _route("10.5.250.0/24", "other0")
    whole_network = _route("10.5.0.0/16", "eth0", "192.0.2.254")
    held = ObservedState(
        routes=frozenset(
            {
                ours,
                left_by_go,
                elsewhere,
                static,
                on_other_device,
                whole_network,
                _route("0.0.0.0/0", "eth0", "192.0.2.254"),
            }
        )
    )
    assert {c.target for c in diff(held, _desired())} == {ours, left_by_go}


def test_V10_network_of_a_local_bridge_is_not_replaced() -> None:
    bridge = _route("10.5.2.0/24", "docker0", protocol=PROTO_KERNEL, source=ip_address("10.5.2.1"))
    wanted = _route("10.5.2.0/24", via="10.5.2.0", onlink=True)
    held = ObservedState(routes=frozenset({bridge}))
    desired = _desired(routes=frozenset({wanted}))
    assert diff(held, desired) == ()
    assert blocked_routes(held, desired) == {wanted: bridge}


def test_H02_route_of_another_kind_at_our_place_is_replaced() -> None:
    wanted = _route("10.5.2.0/24", via="10.5.2.0", onlink=True)
    theirs = _route("10.5.2.0/24", "eth0", "192.0.2.254", protocol=4)
    held = ObservedState(routes=frozenset({theirs}))
    changes = diff(held, _desired(routes=frozenset({wanted})))
    assert [str(c) for c in changes] == ["route 10.5.2.0/24 via 10.5.2.0 dev flannel.1 onlink added"]


def test_H02_ipv6_route_through_another_device_goes_before_ours_comes() -> None:
    wanted = _route("fd05:0:0:2::/64", via="fd05:0:0:2::", onlink=True)
    theirs = _route("fd05:0:0:2::/64", "eth0", "2001:db8:1::fe", protocol=4)
    changes = diff(ObservedState(routes=frozenset({theirs})), _desired(routes=frozenset({wanted})))
    assert [(c.verb, c.target) for c in changes] == [("delete", theirs), ("put", wanted)]


def test_V11_stale_flannel_address_goes_and_foreign_one_stays() -> None:
    stale, foreign, wanted = (
        Address(DEVICE, ip_interface(text)) for text in ("10.5.99.0/32", "192.168.1.125/24", "10.5.1.0/32")
    )
    desired = _desired(addresses=frozenset({wanted}))
    changes = diff(ObservedState(addresses=frozenset({stale, foreign})), desired)
    assert [str(c) for c in changes] == [
        "address 10.5.1.0/32 dev flannel.1 added",
        "address 10.5.99.0/32 dev flannel.1 removed",
    ]
    elsewhere = Address("eth0", ip_interface("192.168.1.126/24"))
    assert foreign_addresses({stale, foreign, wanted, elsewhere}, desired) == (foreign,)


def _tunnel(name: str, index: int, vni: int) -> Link:
    return Link(name, index, "vxlan", "02:00:00:00:00:01", 1450, True, Vxlan(vni, 8472, None, 2))


def test_C11_device_of_an_earlier_vni_is_recognised_by_its_address() -> None:
    links = {
        link.name: link
        for link in (
            _tunnel("flannel.1", 3, 1),
            _tunnel("flannel.2", 4, 2),
            _tunnel("flannel.9", 5, 9),
            _tunnel("vxlan7", 6, 7),
            Link("flannel.8", 7, "bridge", "", 1500, True),
            Link("flannel.ipip", 8, "ipip", "", 1480, True, Ipip(None)),
            Link("flannel.fou", 12, "ipip", "", 1472, True, Ipip(None, fou_port=8285)),
            Link("flannel0", 13, "tun", "", 1472, True, KeptTun()),
            Link("flannel1", 14, "tun", "", 1472, True),
            Link("tun0", 15, "tun", "", 1472, True, KeptTun()),
            Link("tunl0", 9, "ipip", "", 1480, True, Ipip(None)),
            Link("flannel-wg", 10, "wireguard", "", 1420, True, Wireguard(51820, "")),
            Link("wg0", 11, "wireguard", "", 1420, True, Wireguard(51821, "")),
        )
    }
    held = [
        Address("flannel.1", ip_interface("10.5.1.0/32")),
        Address("flannel.2", ip_interface("10.5.1.0/32")),
        Address("flannel.9", ip_interface("10.99.1.0/32")),
        Address("vxlan7", ip_interface("10.5.1.0/32")),
        Address("flannel.8", ip_interface("10.5.1.0/32")),
        Address("flannel.ipip", ip_interface("10.5.1.0/32")),
        Address("flannel.fou", ip_interface("10.5.1.0/32")),
        Address("flannel0", ip_interface("10.5.1.0/32")),
        Address("flannel1", ip_interface("10.5.1.0/32")),
        Address("tun0", ip_interface("10.5.1.0/32")),
        Address("tunl0", ip_interface("10.5.1.0/32")),
        Address("flannel-wg", ip_interface("10.5.1.0/32")),
        Address("wg0", ip_interface("10.5.1.0/32")),
    ]
    gone = ("flannel-wg", "flannel.2", "flannel.fou", "flannel.ipip", "flannel0")
    assert leftover_links(links, held, _desired()) == gone


OWN = ip_network("10.5.7.0/24")


def test_L49_a_blackhole_coexists_with_a_connected_network() -> None:
    connected = _route("10.5.7.0/24", "cni0", protocol=PROTO_KERNEL)
    desired = _desired(routes=frozenset({blackhole(OWN)}))
    (change,) = diff(ObservedState(routes=frozenset({connected})), desired)
    assert (change.verb, change.target) == ("put", blackhole(OWN))
    assert blocked_routes(ObservedState(routes=frozenset({connected})), desired) == {}
    assert blackhole(OWN).key != connected.key


@pytest.mark.parametrize(
    ("route", "goes"),
    [
        (blackhole(OWN), True),
        (blackhole(ip_network("10.6.7.0/24")), False),
        (replace(blackhole(OWN), metric=None), False),
        (replace(blackhole(OWN), protocol=3), False),
        (replace(blackhole(OWN), type="unreachable"), False),
        (blackhole(NETWORK), False),
    ],
    ids=["ours", "another network", "another metric", "another protocol", "another type", "the whole network"],
)
def test_L49_only_a_blackhole_of_ours_is_removed(route: Route, goes: bool) -> None:
    changes = diff(ObservedState(routes=frozenset({route})), _desired())
    assert [change.target for change in changes] == ([route] if goes else [])


def test_L49_the_old_blackhole_goes_after_the_new_one_came() -> None:
    new = blackhole(ip_network("10.5.8.0/24"))
    observed = ObservedState(routes=frozenset({blackhole(OWN)}))
    changes = diff(observed, _desired(routes=frozenset({new})))
    assert [(c.verb, c.target) for c in changes] == [("put", new), ("delete", blackhole(OWN))]
