from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dataplane.model import Change, FdbEntry, Neighbour, Route
from backends.dataplane.packed import route_key
from backends.kernel import bulk, nexthops, rtnl
from tests.support.netlink import Nexthop, NexthopRoute, reference

pytestmark = pytest.mark.pure

INDEX = 7
V4, V6 = st.ip_addresses(v=4), st.ip_addresses(v=6)
RAW_MAC = st.binary(min_size=6, max_size=6)


def _encoded(target: Any) -> bytes:
    """The message that is sent alone, compared with pyroute2's elsewhere; here without its acknowledgement."""
    return rtnl.unacknowledged(rtnl.encode(Change("put", target), INDEX, 0))


@given(V4 | V6, RAW_MAC)
def test_templates_give_the_same_bytes(address: Any, mac: bytes) -> None:
    text = mac.hex(":")
    assert bulk.neighbour(INDEX, address.packed, mac) == _encoded(Neighbour("x", address, text))
    assert bulk.fdb_entry(INDEX, mac, address.packed) == _encoded(FdbEntry("x", text, address))


@given(V4 | V6, st.data(), st.booleans(), st.sampled_from([3, 142]))
def test_template_of_a_gateway_route_gives_the_same_bytes(
    address: Any, data: st.DataObject, onlink: bool, protocol: int
) -> None:
    length = data.draw(st.integers(1, address.max_prefixlen))
    gateway = data.draw(V4 if address.version == 4 else V6)
    route = Route(ip_network((address, length), strict=False), "x", gateway, onlink, protocol)
    raw = route.destination.network_address.packed
    assert bulk.gateway_route(INDEX, raw, length, gateway.packed, route) == _encoded(route)


@given(V4, st.integers(1, 32), st.integers(1, (1 << 32) - 1))
def test_route_through_an_object_is_encoded_as_pyroute2_does(address: Any, length: int, number: int) -> None:
    fields = {"family": 2, "dst_len": length, "table": 254, "proto": 3, "scope": 0, "type": 1, "flags": 0}
    expected = reference(NexthopRoute, 24, 0x501, 0, fields, [("RTA_DST", str(address)), ("RTA_NH_ID", number)])
    assert bulk.nexthop_route(address.packed, length, number, 3) == expected
    fields |= {"proto": 0, "scope": 255, "type": 0}
    expected = reference(NexthopRoute, 25, 0x1, 0, fields, [("RTA_DST", str(address)), ("RTA_NH_ID", number)])
    assert nexthops.delete_route(address.packed, length, number) == expected


@given(V4, st.integers(1, (1 << 32) - 1), st.integers(1, 1 << 20))
def test_object_is_encoded_as_pyroute2_does(gateway: Any, number: int, index: int) -> None:
    attrs = [("NHA_ID", number), ("NHA_OIF", index), ("NHA_GATEWAY", str(gateway))]
    fields = {"family": 2, "protocol": 142, "flags": 4}
    message = nexthops.create(number, nexthops.hop_of(index, gateway.packed))
    assert message == reference(Nexthop, 104, 0x401, 0, fields, attrs)
    assert nexthops.delete(number) == reference(Nexthop, 105, 0x1, 0, {}, [("NHA_ID", number)])
    assert nexthops.dump() == reference(Nexthop, 106, 0x301, 0, {}, [])


@given(st.lists(st.tuples(st.integers(1, 1 << 32), V4), min_size=1, max_size=12, unique_by=lambda pair: pair[0]))
def test_objects_survive_the_way_through_the_wire(objects: list[tuple[int, Any]]) -> None:
    wanted = {number % (1 << 32): nexthops.hop_of(INDEX, gateway.packed) for number, gateway in objects}
    buffer = b"".join(nexthops.create(number, hop) for number, hop in wanted.items())
    assert nexthops.decode([buffer]) == wanted


def test_objects_of_others_have_no_hop_of_ours() -> None:
    base = {"family": 2, "protocol": 142, "flags": 4}
    attrs = [("NHA_ID", 1), ("NHA_OIF", INDEX), ("NHA_GATEWAY", "10.5.2.0")]
    messages = [
        reference(Nexthop, 104, 0, 0, base | {"protocol": 3}, attrs),
        reference(Nexthop, 104, 0, 0, base | {"flags": 0}, [("NHA_ID", 2), *attrs[1:]]),
        reference(Nexthop, 104, 0, 0, base | {"family": 0}, [("NHA_ID", 3), ("NHA_BLACKHOLE", None)]),
    ]
    assert nexthops.decode(messages) == {1: b"", 2: b"", 3: b""}


def _notification(kind: int, number: int) -> bool:
    buffer = reference(Nexthop, kind, 0, 0, {"family": 2}, [("NHA_ID", number)])
    (header,) = rtnl.messages(buffer)
    return nexthops.was_ours(buffer, header)


def test_only_what_happens_to_our_objects_is_noticed() -> None:
    assert _notification(104, nexthops.FIRST_ID)
    assert _notification(105, nexthops.LAST_ID)
    assert not _notification(105, 1)
    assert not _notification(105, nexthops.LAST_ID + 1)
    assert not _notification(28, nexthops.FIRST_ID)


A, B, C = (route_key(ip_address(f"10.5.{n}.0").packed, 24) for n in (1, 2, 3))
ONE, TWO = (nexthops.hop_of(INDEX, ip_address(f"10.5.{n}.0").packed) for n in (1, 2))
FIRST = nexthops.FIRST_ID


def test_object_is_made_once_and_goes_with_its_route() -> None:
    hops = nexthops.Nexthops()
    assert hops.put(A, ONE) == (FIRST, True, 0)
    assert hops.put(A, ONE) == (FIRST, False, 0)
    assert hops.put(B, ONE) == (FIRST + 1, True, 0)
    assert hops.forget(A) == FIRST
    assert hops.forget(A) == 0
    assert hops.forget(B) == FIRST + 1
    assert len(hops) == 0


def test_route_that_moves_leaves_its_object() -> None:
    hops = nexthops.Nexthops()
    hops.put(A, ONE)
    assert hops.put(A, TWO) == (FIRST + 1, True, FIRST)
    number, new, idle = hops.put(B, ONE)
    assert (new, idle) == (True, 0)
    assert number != FIRST + 1


def test_object_that_several_routes_name_is_left_to_whoever_made_it_so() -> None:
    hops = nexthops.Nexthops()
    assert hops.load({FIRST: ONE}, {A: FIRST, B: FIRST}) == []
    assert hops.forget(A) == 0
    assert hops.put(A, ONE) == (FIRST + 1, True, 0)


def test_objects_of_an_earlier_run_are_kept_unless_nothing_uses_them() -> None:
    hops = nexthops.Nexthops()
    found = {FIRST: ONE, FIRST + 1: TWO, 5: b"", FIRST + 2: b""}
    assert hops.load(found, {A: FIRST, C: 5}) == [FIRST + 1]
    assert hops.put(A, ONE) == (FIRST, False, 0)
    number, new, idle = hops.put(B, TWO)
    assert (new, idle) == (True, 0)
    assert number not in {FIRST, 5, FIRST + 2}


@given(st.lists(st.tuples(st.sampled_from([A, B, C]), st.sampled_from([ONE, TWO, None])), max_size=20))
def test_no_object_goes_while_a_route_names_it_and_none_stays_without(course: list[tuple[bytes, bytes | None]]) -> None:
    hops, objects, named = nexthops.Nexthops(), dict[int, bytes](), dict[bytes, int]()
    for route, hop in course:
        if hop is None:
            idle = hops.forget(route)
            assert idle == named.pop(route, 0)
        else:
            number, new, idle = hops.put(route, hop)
            assert new is (number not in objects)
            objects.setdefault(number, hop)
            assert objects[number] == hop
            named[route] = number
        if idle:
            del objects[idle]
        assert set(named.values()) == set(objects)
        assert hops.load(objects, named) == []


@given(st.binary(max_size=120))
def test_garbage_is_no_fault(garbage: bytes) -> None:
    nexthops.users([garbage])
    nexthops.decode([rtnl.message(104, 0, 0, bytes(8) + garbage)])
