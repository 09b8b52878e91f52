from __future__ import annotations

from ipaddress import ip_address, ip_interface, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dataplane.model import METRIC, Address, Encap, FdbEntry, KernelObject, Neighbour, ObservedState, Route
from backends.dataplane.packed import Entries, Key, Packer, Value, observed_state, packed_state
from backends.dataplane.record import Sight
from subnet.model import FAMILIES, Family

pytestmark = pytest.mark.pure

DEVICES = ("flannel.1", "flannel-v6.1")
V4, V6 = st.ip_addresses(v=4), st.ip_addresses(v=6)
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
DEVICE = st.sampled_from([*DEVICES, "eth0"])


@st.composite
def routes(draw: st.DrawFn) -> Route:
    version: Family = draw(st.sampled_from(FAMILIES))
    address = V4 if version == 4 else V6
    metric = draw(st.none() | st.integers(0, (1 << 32) - 1))
    return Route(
        ip_network((draw(address), draw(st.integers(0, 32 if version == 4 else 128))), strict=False),
        draw(DEVICE),
        draw(st.none() | address),
        draw(st.booleans()),
        draw(st.sampled_from([2, 3, 142])),
        None if metric == METRIC[version] else metric,
        draw(st.sampled_from(["unicast", "blackhole"])),
        draw(st.none() | address),
        draw(st.none() | st.builds(Encap, V6, V6)) if version == 6 else None,
        draw(st.sampled_from(["global", "link"])),
    )


OBJECTS = (
    st.builds(Neighbour, DEVICE, V4 | V6, MAC)
    | st.builds(FdbEntry, DEVICE, MAC, V4 | V6)
    | st.builds(Address, DEVICE, (V4 | V6).map(ip_interface))
    | routes()
)


def _differing(wanted: Entries, parts: list[Entries]) -> dict[Key, Value | None]:
    sight = Sight(wanted)
    for part in parts:
        sight.see(part)
    return sight.differing()


def _packer(known: list[KernelObject]) -> Packer:
    packer = Packer(DEVICES)
    for target in known:
        if isinstance(target, Route):
            packer.learn(target)
    return packer


@given(OBJECTS, st.lists(OBJECTS, max_size=5))
def test_object_comes_back_as_it_was(target: KernelObject, known: list[KernelObject]) -> None:
    packer = _packer(known)
    assert packer.targets(*packer.entry(target)) == (target,)
    packer = _packer([target])
    assert packer.targets(*packer.entry(target)) == (target,)


@given(OBJECTS, OBJECTS, st.booleans())
def test_keys_are_equal_where_the_kernel_replaces(one: KernelObject, other: KernelObject, learnt: bool) -> None:
    packer = _packer([one, other] if learnt else [])
    same_place = (type(one), one.key) == (type(other), other.key)
    assert (packer.key(one) == packer.key(other)) is same_place
    assert (packer.entry(one) == packer.entry(other)) is (one == other)


@given(st.lists(OBJECTS, max_size=8, unique=True))
def test_state_comes_back_as_it_was(targets: list[KernelObject]) -> None:
    packer = _packer(targets[:4])
    entries = packer.pack(targets)
    state = observed_state(packer, entries)
    assert {*state.addresses, *state.neighbours, *state.fdb, *state.routes} == set(targets)
    assert observed_state(packer, packed_state(state, packer)) == state


def test_what_our_devices_hold_takes_bytes_and_the_rest_stays_as_it_is() -> None:
    gateway = ip_address("10.5.2.0")
    tunnel = Route(ip_network("10.5.2.0/24"), "flannel.1", gateway, onlink=True)
    packer = _packer([tunnel])
    for target in (Neighbour("flannel.1", gateway, "02:00:00:00:00:02"), tunnel):
        assert isinstance(packer.key(target), bytes)
        assert isinstance(packer.entry(target)[1], bytes)
    elsewhere = Route(ip_network("172.16.0.0/16"), "eth0", ip_address("192.0.2.254"))
    assert packer.entry(elsewhere)[1] == elsewhere
    assert packer.targets(b"", elsewhere) == (elsewhere,)


@given(st.lists(OBJECTS, max_size=6, unique=True), st.lists(OBJECTS, max_size=6, unique=True))
def test_keys_that_differ_are_those_at_which_something_is_to_be_done(
    held: list[KernelObject], wanted: list[KernelObject]
) -> None:
    packer = _packer(wanted)
    there, here = packer.pack(held), packer.pack(wanted)
    expected = {
        key
        for key in there.keys() | here.keys()
        if {t for t in held if packer.key(t) == key} != {t for t in wanted if packer.key(t) == key}
    }
    several = {key for key, value in (there | here).items() if isinstance(value, tuple)}
    # Part by part, one of which may be all: what is told is the same.
    for parts in ([there], [{key: value} for key, value in there.items()]):
        found = _differing(here, parts)
        assert found.keys() - several == expected - several
        assert found == {key: there.get(key) for key in found}
    assert _differing(here, [here]) == {}


def test_two_objects_of_one_key_are_both_seen() -> None:
    packer = Packer(DEVICES)
    entries = [FdbEntry("flannel.1", "02:00:00:00:00:02", ip_address(f"192.0.2.{n}")) for n in (2, 3)]
    held = packer.pack(entries)
    assert observed_state(packer, held) == ObservedState(fdb=frozenset(entries))
    assert _differing(packer.pack(entries[:1]), [held]).keys() == {packer.key(entries[0])}
