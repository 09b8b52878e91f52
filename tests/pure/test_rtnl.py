from __future__ import annotations

import struct
from dataclasses import replace
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.rtnl.ndmsg import ndmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from backends.dataplane.model import Change, Encap, FdbEntry, Neighbour, Route
from backends.dataplane.ports import HookSeen, LinkSeen, ObjectSeen
from backends.kernel import rtnl
from tests.support.netlink import reference

pytestmark = pytest.mark.pure

INDEX = 7
V4 = st.ip_addresses(v=4)
V6 = st.ip_addresses(v=6)
ANY = V4 | V6
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
UNICAST_MAC = st.binary(min_size=5, max_size=5).map(lambda raw: (b"\x02" + raw).hex(":"))


@st.composite
def routes(draw: st.DrawFn) -> Route:
    address = draw(ANY)
    length = draw(st.integers(1, address.max_prefixlen))
    gateway = draw(st.none() | (V4 if address.version == 4 else V6))
    metric = draw(st.none() | st.integers(1, 1 << 31).filter(lambda value: value != 1024))
    return Route(
        ip_network((address, length), strict=False),
        "",
        gateway,
        draw(st.booleans()),
        draw(st.sampled_from([3, 142])),
        metric,
        scope=draw(st.sampled_from(["global", "link"])) if address.version == 4 else "global",
    )


@given(ANY, MAC, st.booleans())
def test_neighbour_is_encoded_as_pyroute2_does(address: Any, mac: str, put: bool) -> None:
    change = Change("put" if put else "delete", Neighbour("x", address, mac))
    fields = {"family": 2 if address.version == 4 else 10, "ifindex": INDEX, "state": 0x80, "flags": 0, "ndm_type": 1}
    expected = reference(
        ndmsg,
        28 if put else 29,
        0x505 if put else 0x5,
        9,
        fields,
        [("NDA_DST", str(address)), ("NDA_LLADDR", mac)],
    )
    assert rtnl.encode(change, INDEX, 9) == expected


@given(ANY, MAC)
def test_fdb_entry_is_encoded_as_pyroute2_does(remote: Any, mac: str) -> None:
    expected = reference(
        ndmsg,
        28,
        0x505,
        3,
        {"family": 7, "ifindex": INDEX, "state": 0x80, "flags": 0x02, "ndm_type": 0},
        [("NDA_DST", str(remote)), ("NDA_LLADDR", mac)],
    )
    assert rtnl.encode(Change("put", FdbEntry("x", mac, remote)), INDEX, 3) == expected


@given(routes())
def test_route_is_encoded_as_pyroute2_does(route: Route) -> None:
    attrs: list[Any] = [("RTA_DST", str(route.destination.network_address))]
    if route.gateway is not None:
        attrs.append(("RTA_GATEWAY", str(route.gateway)))
    attrs.append(("RTA_OIF", INDEX))
    if route.metric is not None:
        attrs.append(("RTA_PRIORITY", route.metric))
    fields = {
        "family": 2 if route.family == 4 else 10,
        "dst_len": route.destination.prefixlen,
        "table": 254,
        "proto": route.protocol,
        "scope": {"global": 0, "link": 253}[route.scope],
        "type": 1,
        "flags": 4 if route.onlink else 0,
    }
    assert rtnl.encode(Change("put", route), INDEX, 1) == reference(rtmsg, 24, 0x505, 1, fields, attrs)


@given(routes())
def test_route_survives_the_way_through_the_wire(route: Route) -> None:
    buffer = rtnl.encode(Change("put", route), INDEX, 1)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_route(buffer, header) == (INDEX, route)


@given(st.ip_addresses(v=6), st.ip_addresses(v=6))
def test_route_with_an_outer_header_survives_the_way_through_the_wire(source: Any, destination: Any) -> None:
    route = Route(ip_network("fd05:0:0:2::/64"), "", encap=Encap(source, destination))
    buffer = rtnl.encode(Change("put", route), INDEX, 1)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_route(buffer, header) == (INDEX, route)


def test_outer_header_is_encoded_as_the_kernel_reads_it() -> None:
    # linux/lwtunnel.h: LWTUNNEL_IP6_DST 2, LWTUNNEL_IP6_SRC 3; rtnetlink.h: RTA_ENCAP 22 (nested), RTA_ENCAP_TYPE 21.
    encap = Encap(IPv6Address("2001:db8:1::1"), IPv6Address("2001:db8:1::2"))
    route = Route(ip_network("fd05:0:0:2::/64"), "", encap=encap)
    outer = struct.pack("=HH", 20, 2) + encap.destination.packed + struct.pack("=HH", 20, 3) + encap.source.packed
    expected = struct.pack("=HH", 44, 0x8000 | 22) + outer + struct.pack("=HHHxx", 6, 21, 4)
    assert rtnl.encode(Change("put", route), INDEX, 1).endswith(expected)


def test_outer_header_of_another_kind_is_not_taken_for_ours() -> None:
    route = Route(ip_network("fd05:0:0:2::/64"), "", encap=Encap(IPv6Address(1), IPv6Address(2)))
    buffer = bytearray(rtnl.encode(Change("put", route), INDEX, 1))
    struct.pack_into("=H", buffer, len(buffer) - 4, 5)  # LWTUNNEL_ENCAP_SEG6
    (header,) = rtnl.messages(bytes(buffer))
    assert rtnl.decode_route(bytes(buffer), header) == (INDEX, replace(route, encap=None))


@given(ANY, UNICAST_MAC)
def test_entries_survive_the_way_through_the_wire(address: Any, mac: str) -> None:
    for entry in (Neighbour("", address, mac), FdbEntry("", mac, address)):
        buffer = rtnl.encode(Change("put", entry), INDEX, 1)
        (header,) = rtnl.messages(buffer)
        assert rtnl.decode_neighbour(buffer, header) == (INDEX, entry, True)
        assert rtnl.decode_event(buffer, header) == ObjectSeen(entry, INDEX, False)


@pytest.mark.parametrize(
    "mac", ["00:00:00:00:00:00", "33:33:00:00:00:01", "01:00:5e:00:00:01"], ids=lambda m: f"V13-{m}"
)
def test_flooding_entries_of_the_kernel_are_not_seen(mac: str) -> None:
    buffer = rtnl.encode(Change("put", FdbEntry("", mac, ip_address("192.0.2.9"))), INDEX, 1)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_neighbour(buffer, header) is None
    assert rtnl.decode_event(buffer, header) is None


def test_entry_without_remote_is_not_seen() -> None:
    body = struct.pack("=BBHiHBB", 7, 0, 0, INDEX, 0x80, 2, 0) + struct.pack("=HH6sxx", 10, 2, b"\x02" + b"\0" * 5)
    buffer = rtnl.message(28, 0, 1, body)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_neighbour(buffer, header) is None


def test_entry_that_lost_its_permanence_counts_as_gone() -> None:
    entry = Neighbour("", ip_address("10.5.2.0"), "02:00:00:00:00:02")
    whole = bytearray(rtnl.encode(Change("put", entry), INDEX, 1))
    struct.pack_into("=H", whole, 16 + 8, 0x02)  # NUD_REACHABLE
    buffer = bytes(whole)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_event(buffer, header) == ObjectSeen(entry, INDEX, True)


def test_link_notification() -> None:
    body = struct.pack("=BBHiII", 0, 0, 1, 12, 0x1043, 0) + struct.pack("=HH", 14, 3) + b"flannel.1\0\0\0"
    buffer = rtnl.message(17, 0, 0, body)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_event(buffer, header) == LinkSeen("flannel.1", 12, True)


@pytest.mark.parametrize("kind", [37, 45], ids=["RTM_DELQDISC", "RTM_DELTFILTER"])
def test_removal_of_what_is_attached_to_a_device_is_seen(kind: int) -> None:
    buffer = rtnl.message(kind, 0, 0, struct.pack("=BxxxiIII", 0, 12, 0x142, 0xFFFFFFF2, 0))
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_event(buffer, header) == HookSeen(12)


def test_multipath_route_shows_its_first_next_hop() -> None:
    hops = b"".join(
        struct.pack("=HBBi", 16, 0, 0, index) + struct.pack("=HH", 8, 5) + ip_address(gateway).packed
        for index, gateway in ((3, "192.0.2.254"), (4, "198.51.100.254"))
    )
    body = struct.pack("=BBBBBBBBI", 2, 0, 0, 0, 254, 3, 0, 1, 0) + struct.pack("=HH", 4 + len(hops), 9) + hops
    buffer = rtnl.message(24, 0, 0, body)
    (header,) = rtnl.messages(buffer)
    decoded = rtnl.decode_route(buffer, header)
    assert decoded == (3, Route(ip_network("0.0.0.0/0"), "", ip_address("192.0.2.254"), type="multipath"))


def test_route_of_another_table_is_not_seen() -> None:
    body = struct.pack("=BBBBBBBBI", 2, 24, 0, 0, 0, 3, 0, 1, 0)
    body += struct.pack("=HH4s", 8, 1, ip_address("10.5.2.0").packed) + struct.pack("=HHI", 8, 4, 3)
    body += struct.pack("=HHI", 8, 15, 1000)
    buffer = rtnl.message(24, 0, 0, body)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_route(buffer, header) is None


@given(st.binary(max_size=200))
def test_garbage_never_breaks_the_reader(garbage: bytes) -> None:
    for header in rtnl.messages(garbage):
        assert header.end <= len(garbage)


def test_refusal_carries_the_kernels_words() -> None:
    words = b"Nexthop has invalid gateway\0"
    body = struct.pack("=i", -101) + b"\0" * 16 + struct.pack("=HH", 4 + len(words), 1) + words
    buffer = rtnl.message(2, 0x200 | 0x100, 5, body)
    (header,) = rtnl.messages(buffer)
    assert rtnl.decode_error(buffer, header) == (101, "Nexthop has invalid gateway")
