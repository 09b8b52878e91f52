from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from backends.dataplane.model import FdbEntry, KernelObject, Neighbour, Route
from backends.dataplane.packed import Entries, Packer, route_key
from backends.kernel import rtnl, survey
from tests.support.netlink import reference

pytestmark = pytest.mark.pure

DEVICE, INDEX, OTHER = "flannel.1", 7, 3
NAMES = {INDEX: DEVICE, OTHER: "eth0"}
DONE = rtnl.message(3, 2, 5, bytes(4))
V4, V6 = st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str)
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
UNICAST = st.binary(min_size=5, max_size=5).map(lambda raw: (b"\x02" + raw).hex(":"))


def _neighbour(family: int, state: int, dst: str, mac: str, index: int = INDEX) -> bytes:
    """A neighbour or FDB entry as the kernel shows it, written by pyroute2."""
    cacheinfo = {"ndm_confirmed": 1, "ndm_used": hash(mac) & 0xFFFF, "ndm_updated": 2, "ndm_refcnt": 0}
    attrs = [("NDA_DST", dst), ("NDA_LLADDR", mac)]
    if family == 7:
        attrs.reverse()
    attrs.append(("NDA_CACHEINFO", cacheinfo))  # type: ignore[arg-type]
    fields = {"family": family, "ifindex": index, "state": state, "flags": 2 if family == 7 else 0, "ndm_type": 1}
    return reference(ndmsg, 28, 2, 5, fields, attrs)


def _read(reader: Any, packer: Packer, buffers: list[bytes]) -> list[KernelObject]:
    """Return what a reader finds, as objects; whatever way it goes, buffer by buffer or message by message."""
    entries: Entries = reader(packer, buffers)
    return [target for key, value in entries.items() for target in packer.targets(key, value)]


def _neighbours(packer: Packer, buffers: list[bytes]) -> Entries:
    return survey.neighbours(packer, DEVICE, INDEX, buffers)


ENTRY = st.tuples(st.sampled_from([2, 7]), st.sampled_from([0x80, 0x80, 0x80, 0x02]), V4 | V6, UNICAST | MAC)


@given(st.lists(ENTRY, max_size=12, unique_by=(lambda e: e[2], lambda e: e[3])), st.booleans())
def test_neighbours_and_fdb_entries_are_those_that_pyroute2_wrote(
    listed: list[tuple[int, int, str, str]], together: bool
) -> None:
    expected: list[KernelObject] = []
    messages = []
    for kind, state, dst, mac in listed:
        family = kind if kind == 7 else 2 if "." in dst else 10
        messages.append(_neighbour(family, state, dst, mac))
        flooding = int(mac[:2], 16) & 1 or mac == "00:00:00:00:00:00"
        if state & 0x80 and not (family == 7 and flooding):
            target = FdbEntry(DEVICE, mac, ip_address(dst)) if family == 7 else Neighbour(DEVICE, ip_address(dst), mac)
            expected.append(target)
    buffers = [b"".join(messages) + DONE] if together else [*messages, DONE]
    assert set(_read(_neighbours, Packer([DEVICE]), buffers)) == set(expected)


@given(st.integers(4, 40), st.sampled_from([2, 7]), st.integers(0, 39))
def test_like_entries_of_another_device_are_not_taken_along(count: int, family: int, at: int) -> None:
    messages = [
        _neighbour(family, 0x80, f"10.5.{n}.0", f"02:00:00:00:00:{n:02x}", OTHER if n == at else INDEX)
        for n in range(count)
    ]
    found = _read(_neighbours, Packer([DEVICE]), [b"".join(messages) + DONE])
    assert len(found) == count - (at < count)


def _route(family: int, dst: str, length: int, attrs: list[Any], **fields: int) -> bytes:
    values = {"family": family, "dst_len": length, "table": 254, "proto": 3, "scope": 0, "type": 1, "flags": 4}
    return reference(rtmsg, 24, 2, 5, values | fields, [("RTA_TABLE", 254), ("RTA_DST", dst), *attrs])


def _onlink(n: int) -> bytes:
    base = f"10.5.{n}.0"
    return _route(2, base, 24, [("RTA_GATEWAY", base), ("RTA_OIF", INDEX)])


def _expected(n: int) -> Route:
    return Route(ip_network(f"10.5.{n}.0/24"), DEVICE, ip_address(f"10.5.{n}.0"), onlink=True)


def _routes(packer: Packer, buffers: list[bytes]) -> Entries:
    return survey.routes(packer, NAMES, buffers, {})


ODD: list[tuple[bytes, Route | None]] = [
    (_route(2, "172.16.0.0", 16, [("RTA_GATEWAY", "192.0.2.254"), ("RTA_OIF", OTHER)], flags=0),
     Route(ip_network("172.16.0.0/16"), "eth0", ip_address("192.0.2.254"))),
    (_route(2, "10.9.0.0", 24, [("RTA_GATEWAY", "10.9.0.0"), ("RTA_OIF", INDEX)], proto=142),
     Route(ip_network("10.9.0.0/24"), DEVICE, ip_address("10.9.0.0"), onlink=True, protocol=142)),
    (_route(2, "10.9.1.0", 25, [("RTA_GATEWAY", "10.9.1.0"), ("RTA_OIF", INDEX)]),
     Route(ip_network("10.9.1.0/25"), DEVICE, ip_address("10.9.1.0"), onlink=True)),
    (_route(2, "10.9.2.0", 24, [("RTA_PRIORITY", 5), ("RTA_GATEWAY", "10.9.2.0"), ("RTA_OIF", INDEX)]),
     Route(ip_network("10.9.2.0/24"), DEVICE, ip_address("10.9.2.0"), onlink=True, metric=5)),
    (reference(rtmsg, 24, 2, 5, {"family": 2, "dst_len": 24, "table": 100, "type": 1, "proto": 3, "flags": 4},
               [("RTA_TABLE", 100), ("RTA_DST", "10.9.3.0"), ("RTA_GATEWAY", "10.9.3.0"), ("RTA_OIF", INDEX)]), None),
]  # fmt: skip


@given(
    st.integers(0, 30), st.lists(st.tuples(st.integers(0, len(ODD) - 1), st.integers(0, 30)), unique_by=lambda o: o[0])
)
def test_routes_are_those_that_pyroute2_wrote(count: int, odd: list[tuple[int, int]]) -> None:
    messages, expected = [_onlink(n) for n in range(count)], {_expected(n) for n in range(count)}
    for which, at in odd:
        message, route = ODD[which]
        messages.insert(at, message)
        expected |= {route} if route is not None else set()
    packer = Packer([DEVICE])
    packer.learn(_expected(1))
    found = _read(_routes, packer, [b"".join(messages) + DONE])
    assert set(found) == expected
    assert len(found) == len(expected)


def test_objects_that_routes_name_are_told() -> None:
    numbered = [
        rtnl.message(24, 2, 5, _onlink(n)[16:36] + rtnl.attribute(1, bytes((10, 5, n, 0)))
                     + rtnl.attribute(30, (1_420_000_000 + n).to_bytes(4, "little"))
                     + rtnl.attribute(5, bytes((10, 5, n, 0))) + rtnl.attribute(4, INDEX.to_bytes(4, "little")))
        for n in range(8)
    ]  # fmt: skip
    packer, used_by = Packer([DEVICE]), dict[bytes, int]()
    packer.learn(_expected(1))
    entries = survey.routes(packer, NAMES, [b"".join(numbered) + DONE], used_by)
    assert used_by == {route_key(bytes((10, 5, n, 0)), 24): 1_420_000_000 + n for n in range(8)}
    assert entries == packer.pack([_expected(n) for n in range(8)])
    one_by_one = dict[bytes, int]()
    survey.routes(packer, NAMES, numbered, one_by_one)
    assert one_by_one == used_by


@given(st.lists(st.binary(max_size=120), max_size=3), st.integers(0, 200))
def test_garbage_is_no_fault(garbage: list[bytes], cut: int) -> None:
    whole = b"".join(_onlink(n) for n in range(6))
    buffers = [*(rtnl.message(24, 0, 5, bytes(12) + one) for one in garbage), whole[:cut], whole[: len(whole) - cut]]
    packer = Packer([DEVICE])
    survey.routes(packer, NAMES, buffers, {})
    survey.neighbours(packer, DEVICE, INDEX, [rtnl.message(28, 0, 5, bytes(12) + one) for one in garbage])
    survey.default_routes(NAMES, buffers)
