from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dataplane.model import Address, DesiredState, FdbEntry, Neighbour, Route
from backends.dataplane.table import WantedTable, objects_of

pytestmark = pytest.mark.pure

DEVICE = "flannel.1"
BASE = DesiredState(
    frozenset({DEVICE}),
    "eth0",
    frozenset({ip_network("10.5.0.0/16")}),
    frozenset({Address(DEVICE, ip_interface("10.5.1.0/32"))}),
)


def _peer(n: int, *macs: str, host: int = 0) -> DesiredState:
    """What a lease of 10.5.n.0/24 leads to; its host is 192.0.2.n unless another is given."""
    gateway = ip_address(f"10.5.{n}.0")
    return DesiredState(
        BASE.devices,
        BASE.underlay,
        BASE.networks,
        BASE.addresses,
        frozenset({Neighbour(DEVICE, gateway, macs[0])}),
        frozenset(FdbEntry(DEVICE, mac, ip_address(f"192.0.2.{host or n}")) for mac in macs),
        frozenset({Route(ip_network(f"10.5.{n}.0/24"), DEVICE, gateway, onlink=True)}),
    )


A, B, C = "02:00:00:00:00:0a", "02:00:00:00:00:0b", "02:00:00:00:00:0c"


def _routes(table: WantedTable) -> set[str]:
    return {str(route.destination) for route in table.desired().routes}


def test_base_and_peers_make_the_wanted_state() -> None:
    table = WantedTable(BASE)
    table.put("two", (1, "k2"), _peer(2, A))
    table.put("three", (2, "k3"), _peer(3, B))
    desired = table.desired()
    assert desired.addresses == BASE.addresses
    assert _routes(table) == {"10.5.2.0/24", "10.5.3.0/24"}
    table.remove("two")
    table.remove("two")
    assert _routes(table) == {"10.5.3.0/24"}


def test_only_what_a_change_touches_is_dirty() -> None:
    table = WantedTable(BASE)
    table.put("two", (1, "k2"), _peer(2, A))
    table.put("three", (2, "k3"), _peer(3, B))
    table.clean()
    table.put("three", (2, "k3"), _peer(3, B))
    assert table.dirty == set()
    table.put("three", (9, "k3"), _peer(3, C))
    new = _peer(3, C)
    (old,) = _peer(3, B).fdb
    assert table.dirty == {table.packer.key(target) for target in (*objects_of(new)[1:-1], old)}
    assert objects_of(table.desired(table.dirty)) == [*new.neighbours, *new.fdb]


def test_of_two_peers_with_one_mac_the_older_is_kept() -> None:
    table = WantedTable(BASE)
    table.put("newer", (9, "k2"), _peer(2, A))
    table.put("older", (4, "k3"), _peer(3, A))
    assert _routes(table) == {"10.5.3.0/24"}
    assert table.problems == {"newer": f"newer skipped: VtepMAC {A} is the one of older, an older lease"}
    table.remove("older")
    assert _routes(table) == {"10.5.2.0/24"}
    assert table.problems == {}


def test_a_host_with_two_subnets_has_both_and_keeps_what_is_left() -> None:
    table = WantedTable(BASE)
    table.put("before", (1, "k2"), _peer(2, A))
    table.put("now", (9, "k3"), _peer(3, A, host=2))
    assert _routes(table) == {"10.5.2.0/24", "10.5.3.0/24"}
    assert table.problems == {}
    table.clean()
    table.remove("before")
    assert _routes(table) == {"10.5.3.0/24"}
    assert table.desired().fdb == _peer(2, A).fdb
    alone = replace(_peer(2, A), fdb=frozenset(), addresses=frozenset())
    assert table.dirty == {table.packer.key(target) for target in objects_of(alone)}
    table.put("other", (3, "k4"), _peer(4, A))
    assert _routes(table) == {"10.5.4.0/24"}
    assert table.problems == {"now": f"now skipped: VtepMAC {A} is the one of other, an older lease"}


def test_who_lost_elsewhere_keeps_nobody_out() -> None:
    table = WantedTable(BASE)
    table.put("first", (1, ""), _peer(2, A))
    table.put("second", (2, ""), _peer(3, A, B))
    table.put("third", (3, ""), _peer(4, B))
    assert _routes(table) == {"10.5.2.0/24", "10.5.4.0/24"}
    table.remove("first")
    assert _routes(table) == {"10.5.3.0/24"}


def test_problems_of_a_peer_come_and_go_with_it() -> None:
    table = WantedTable(BASE)
    empty = DesiredState(BASE.devices, "eth0", BASE.networks, problems=(("k2", "no MAC"),))
    table.put("two", (1, ""), empty)
    assert table.problems == {"k2": "no MAC"}
    table.put("two", (2, ""), _peer(2, A))
    assert table.problems == {}
    table.put("two", (3, ""), empty)
    table.remove("two")
    assert table.problems == {}


puts = st.tuples(
    st.integers(2, 6),
    st.integers(0, 3),
    st.lists(st.sampled_from([A, B, C]), min_size=1, max_size=2, unique=True),
    st.sampled_from([0, 2]),
)


@given(st.lists(puts | st.integers(2, 6), max_size=15))
def test_V21_a_course_of_changes_ends_where_building_anew_does(
    course: list[tuple[int, int, list[str], int] | int],
) -> None:
    table = WantedTable(BASE)
    held: dict[int, tuple[int, list[str], int]] = {}
    for step in course:
        if isinstance(step, int):
            held.pop(step, None)
            table.remove(str(step))
        else:
            n, rank, macs, host = step
            held[n] = rank, macs, host
            table.put(str(n), (rank, str(n)), _peer(n, *macs, host=host))
    anew = WantedTable(BASE)
    for n in sorted(held, reverse=True):
        rank, macs, host = held[n]
        anew.put(str(n), (rank, str(n)), _peer(n, *macs, host=host))
    assert table.desired() == anew.desired()
    assert table.problems == anew.problems
    keys = [table.packer.key(target) for target in objects_of(table.desired())]
    assert len(keys) == len(set(keys))
