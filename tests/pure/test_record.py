from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.dataplane.model import DesiredState, FdbEntry, Route
from backends.dataplane.packed import Entries, Key, Value
from backends.dataplane.record import Record, Sight
from backends.dataplane.table import WantedTable

pytestmark = pytest.mark.pure

DEVICE = "flannel.1"
BASE = DesiredState(frozenset({DEVICE}), "eth0", frozenset({ip_network("10.5.0.0/16")}))
MACS = [f"02:00:00:00:00:{n:02x}" for n in range(4)]


def _entry(mac: str, remote: int) -> FdbEntry:
    return FdbEntry(DEVICE, mac, ip_address(0xC0000200 + remote))


def _differing(table: WantedTable, there: Entries) -> Mapping[Key, Value | None]:
    sight = Sight(table.entries)
    sight.see(there)
    return sight.differing()


STEPS = st.lists(
    st.tuples(st.sampled_from(["want", "leave", "see", "write"]), st.integers(0, 3), st.integers(1, 3)), max_size=20
)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3)), max_size=4, unique_by=lambda pair: pair[0]), STEPS)
def test_it_tells_what_is_there_whatever_is_wanted_meanwhile(
    seen: list[tuple[int, int]], course: list[tuple[str, int, int]]
) -> None:
    table = WantedTable(BASE)
    there: Entries = table.packer.pack([_entry(MACS[n], remote) for n, remote in seen])
    for n, remote in seen[:2]:
        table.put_objects(f"peer {n}", (n, ""), [_entry(MACS[n], remote)])
    record = Record(table, _differing(table, there))
    keys = [table.packer.key(_entry(mac, 1)) for mac in MACS]
    for what, n, remote in course:
        key = keys[n]
        if what == "want":
            table.put_objects(f"peer {n}", (n, ""), [_entry(MACS[n], remote)])
        elif what == "leave":
            table.remove(f"peer {n}")
        elif what == "see":
            held = table.packer.pack([_entry(MACS[n], remote)] if remote > 1 else [])
            there.pop(key, None)
            there |= held
            record.saw([key], held)
        elif key in table.entries:
            there[key] = table.entries[key]
            record.wrote([key])
        assert record.entries(keys) == there
        assert [record.get(each) for each in keys] == [there.get(each) for each in keys]
        assert record.unlike >= {k for k in keys if there.get(k) != table.entries.get(k)}


def test_nothing_is_kept_of_what_is_as_wanted() -> None:
    table = WantedTable(BASE)
    entries = [_entry(mac, n) for n, mac in enumerate(MACS, 1)]
    table.put_objects("peer", (1, ""), entries)
    foreign = Route(ip_network("172.16.0.0/16"), "eth0", ip_address("192.0.2.254"))
    record = Record(table, _differing(table, table.packer.pack([*entries, foreign])))
    assert record.unlike == {table.packer.key(foreign)}
    assert list(record.foreign_routes()) == [foreign]
    assert table.dirty == set()
