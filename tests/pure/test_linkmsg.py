from __future__ import annotations

import struct
from ipaddress import ip_address, ip_interface
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroute2.netlink.rtnl.ifaddrmsg import ifaddrmsg
from pyroute2.netlink.rtnl.ifinfmsg import ifinfmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg

from backends.dataplane.model import Address, Ip6Tunnel, Ipip, KeptTun, Link, LinkSpec, Vxlan
from backends.kernel import linkmsg, rtnl
from tests.support.netlink import reference

pytestmark = pytest.mark.pure

V4, V6 = st.ip_addresses(v=4), st.ip_addresses(v=6)
MAC = st.binary(min_size=6, max_size=6).map(lambda raw: raw.hex(":"))
END = st.none() | st.ip_addresses(network="192.0.2.0/24")
IPIPS = st.builds(Ipip, local=END, remote=END, fou_port=st.integers(0, 65535))
VXLANS = st.builds(
    Vxlan,
    vni=st.integers(0, (1 << 24) - 1),
    port=st.integers(0, 65535),
    local=st.none() | V4 | V6,
    lower_index=st.integers(1, 1 << 20),
    learning=st.booleans(),
    gbp=st.booleans(),
)


def _header(buffer: bytes) -> rtnl.Header:
    (header,) = rtnl.messages(buffer)
    return header


def _decoded(cls: Any, buffer: bytes) -> Any:
    message = cls(buffer)
    message.decode()
    return message


def _nested(found: Any) -> dict[str, Any]:
    return dict(found["attrs"])


def test_questions_are_asked_as_pyroute2_does() -> None:
    assert linkmsg.dump_links() == reference(ifinfmsg, 18, 0x301, 0, {}, [])
    assert linkmsg.dump_links(7) == reference(ifinfmsg, 18, 0x1, 0, {"index": 7}, [])
    assert linkmsg.dump_addresses() == reference(ifaddrmsg, 22, 0x301, 0, {}, [])


@given(V4 | V6)
def test_way_is_asked_for_as_pyroute2_does(target: Any) -> None:
    fields = {"family": 2 if target.version == 4 else 10, "dst_len": target.max_prefixlen}
    assert linkmsg.get_route(target) == reference(rtmsg, 26, 0x1, 0, fields, [("RTA_DST", str(target))])


@given(V4 | V6, st.integers(0, 128), st.booleans(), st.sampled_from(["", "lo:flannel"]))
def test_address_is_encoded_as_pyroute2_does(ip: Any, length: int, put: bool, label: str) -> None:
    length = min(length, ip.max_prefixlen)
    expected = reference(
        ifaddrmsg,
        20 if put else 21,
        0x605 if put else 0x5,
        3,
        {"family": 2 if ip.version == 4 else 10, "prefixlen": length, "index": 7},
        [("IFA_LOCAL", str(ip)), ("IFA_ADDRESS", str(ip)), *([("IFA_LABEL", label)] if label else [])],
    )
    address = Address("", ip_interface((ip, length)), label=label)
    assert linkmsg.address_change(put, 7, address, 3) == expected


@given(V4 | V6, st.integers(0, 128))
def test_address_survives_the_way_through_the_wire(ip: Any, length: int) -> None:
    address = Address("", ip_interface((ip, min(length, ip.max_prefixlen))))
    buffer = linkmsg.address_change(True, 7, address, 3)
    assert linkmsg.decode_address(buffer, _header(buffer)) == (7, address)


@given(st.none() | st.booleans(), st.none() | st.integers(68, 65535), st.none() | MAC)
def test_change_of_a_device_is_encoded_as_pyroute2_does(up: bool | None, mtu: int | None, mac: str | None) -> None:
    attrs = [("IFLA_MTU", mtu)] if mtu is not None else []
    attrs += [("IFLA_ADDRESS", mac)] if mac is not None else []  # type: ignore[list-item]
    fields = {"index": 7, "flags": 1 if up else 0, "change": 0 if up is None else 1}
    expected = reference(ifinfmsg, 16, 0x5, 2, fields, attrs)
    assert linkmsg.link_change(7, 2, up=up, mtu_bytes=mtu, mac=mac) == expected


@given(VXLANS, MAC)
def test_vxlan_device_is_asked_for_in_words_that_pyroute2_reads(vxlan: Vxlan, mac: str) -> None:
    buffer = linkmsg.link_create(LinkSpec("flannel.1", 4, vxlan, 1450, mac), 9)
    message = _decoded(ifinfmsg, buffer)
    assert (message["header"]["type"], message["header"]["flags"]) == (16, 0x605)
    attrs = _nested(message)
    assert (attrs["IFLA_IFNAME"], attrs["IFLA_MTU"], attrs["IFLA_TXQLEN"], attrs["IFLA_ADDRESS"]) == (
        "flannel.1",
        1450,
        0,
        mac,
    )
    info = _nested(attrs["IFLA_LINKINFO"])
    assert info["IFLA_INFO_KIND"] == "vxlan"
    data = _nested(info["IFLA_INFO_DATA"])
    zeros = ("TTL", "TOS", "PROXY", "RSC", "L2MISS", "L3MISS", "UDP_ZERO_CSUM6_TX", "UDP_ZERO_CSUM6_RX")
    expected: dict[str, object] = {f"IFLA_VXLAN_{name}": 0 for name in zeros}
    expected |= {
        "IFLA_VXLAN_ID": vxlan.vni,
        "IFLA_VXLAN_LINK": vxlan.lower_index,
        "IFLA_VXLAN_LEARNING": int(vxlan.learning),
    }
    if vxlan.local is not None:
        name = "IFLA_VXLAN_LOCAL" if vxlan.local.version == 4 else "IFLA_VXLAN_LOCAL6"
        expected[name] = vxlan.local
        data[name] = ip_address(data[name])  # there is more than one text for an IPv4-mapped address
    if vxlan.port:
        expected["IFLA_VXLAN_PORT"] = vxlan.port
    assert data.pop("IFLA_VXLAN_GBP", None) is (True if vxlan.gbp else None)
    assert data == expected


@given(VXLANS, MAC)
def test_vxlan_device_survives_the_way_through_the_wire(vxlan: Vxlan, mac: str) -> None:
    buffer = linkmsg.link_create(LinkSpec("flannel.1", 4, vxlan, 1450, mac), 9)
    assert linkmsg.decode_link(buffer, _header(buffer)) == Link("flannel.1", 0, "vxlan", mac, 1450, False, vxlan)


def _asked_for(spec: LinkSpec) -> tuple[str, dict[str, Any]]:
    """Return kind and data of the device that a request names, in pyroute2's words."""
    message = _decoded(ifinfmsg, linkmsg.link_create(spec, 9))
    assert (message["header"]["type"], message["header"]["flags"]) == (16, 0x605)
    attrs = _nested(message)
    info = _nested(attrs.pop("IFLA_LINKINFO"))
    assert attrs == {"IFLA_IFNAME": spec.name, "IFLA_MTU": spec.mtu_bytes, "IFLA_TXQLEN": 0}
    return info["IFLA_INFO_KIND"], _nested(info["IFLA_INFO_DATA"])


@given(IPIPS)
def test_ipip_device_is_asked_for_in_words_that_pyroute2_reads(ipip: Ipip) -> None:
    expected: dict[str, object] = dict.fromkeys((f"IFLA_IPIP_{name}" for name in ("TTL", "TOS", "PMTUDISC")), 0)
    if ipip.local is not None:
        expected["IFLA_IPIP_LOCAL"] = str(ipip.local)
    if ipip.remote is not None:
        expected["IFLA_IPIP_REMOTE"] = str(ipip.remote)
    if ipip.fou_port:
        expected |= {"IFLA_IPIP_ENCAP_TYPE": 1, "IFLA_IPIP_ENCAP_FLAGS": 1}
        expected |= {"IFLA_IPIP_ENCAP_SPORT": ipip.fou_port, "IFLA_IPIP_ENCAP_DPORT": ipip.fou_port}
    assert _asked_for(LinkSpec("flannel.ipip", 4, ipip, 1480)) == ("ipip", expected)


@given(IPIPS)
def test_ipip_device_survives_the_way_through_the_wire(ipip: Ipip) -> None:
    buffer = linkmsg.link_create(LinkSpec("flannel.ipip", 4, ipip, 1480), 9)
    assert linkmsg.decode_link(buffer, _header(buffer)) == Link("flannel.ipip", 0, "ipip", "", 1480, False, ipip)


@pytest.mark.parametrize("external", [True, False])
def test_ipv6_tunnel_is_asked_for_in_words_that_pyroute2_reads(external: bool) -> None:
    spec = LinkSpec("flannel-v6.ipip", 6, Ip6Tunnel(external), 1460)
    metadata = {"IFLA_IP6TNL_COLLECT_METADATA": True} if external else {}
    assert _asked_for(spec) == ("ip6tnl", {"IFLA_IP6TNL_PROTO": 41, **metadata})
    buffer = linkmsg.link_create(spec, 9)
    assert linkmsg.decode_link(buffer, _header(buffer)).tunnel == spec.tunnel


def _link(kind: str, data: list[Any], flags: int = 0) -> Link:
    details: list[Any] = [("IFLA_INFO_DATA", {"attrs": data})] if kind != "dummy" else []
    info = {"attrs": [("IFLA_INFO_KIND", kind), *details]}
    attrs = [("IFLA_IFNAME", "x0"), ("IFLA_LINKINFO", info)]
    buffer = reference(ifinfmsg, 16, 0, 0, {"index": 9, "flags": flags}, attrs)
    return linkmsg.decode_link(buffer, _header(buffer))


def test_ipip_device_is_understood() -> None:
    local = ("IFLA_IPIP_LOCAL", "192.0.2.1")
    assert _link("ipip", [local, ("IFLA_IPIP_REMOTE", "0.0.0.0")]).tunnel == Ipip(ip_address("192.0.2.1"))  # type: ignore[arg-type]
    remote = ("IFLA_IPIP_REMOTE", "192.0.2.2")
    both = Ipip(ip_address("192.0.2.1"), ip_address("192.0.2.2"))  # type: ignore[arg-type]
    assert _link("ipip", [local, remote]).tunnel == both
    udp = [("IFLA_IPIP_ENCAP_TYPE", 1), ("IFLA_IPIP_ENCAP_SPORT", 8285), ("IFLA_IPIP_ENCAP_DPORT", 8285)]
    assert _link("ipip", [local, *udp]).tunnel == Ipip(ip_address("192.0.2.1"), fou_port=8285)  # type: ignore[arg-type]


def test_external_ipv6_tunnel_is_understood() -> None:
    assert _link("ip6tnl", [("IFLA_IP6TNL_COLLECT_METADATA", True)]).tunnel == Ip6Tunnel(True)
    assert _link("ip6tnl", []).tunnel == Ip6Tunnel(False)


@pytest.mark.parametrize(
    ("mode", "persistent", "expected"),
    [(1, 1, KeptTun()), (1, 0, None), (2, 1, None)],
    ids=["kept", "goes with its reader", "tap"],
)
def test_a_tun_device_that_outlives_its_reader_is_told_from_others(
    mode: int, persistent: int, expected: KeptTun | None
) -> None:
    # linux/if_link.h: IFLA_TUN_TYPE 3, IFLA_TUN_PERSIST 6.
    data = rtnl.attribute(3, bytes([mode])) + rtnl.attribute(6, bytes([persistent]))
    info = rtnl.attribute(1, b"tun\0") + rtnl.attribute(2, data)
    body = struct.pack("=BBHiII", 0, 0, 65534, 7, 0x1, 0) + rtnl.attribute(3, b"flannel0\0") + rtnl.attribute(18, info)
    buffer = rtnl.message(16, 0, 1, body)
    link = linkmsg.decode_link(buffer, _header(buffer))
    assert (link.name, link.kind, link.tunnel) == ("flannel0", "tun", expected)


def test_multicast_and_misses_of_a_vxlan_device_are_seen() -> None:
    tunnel = _link("vxlan", [("IFLA_VXLAN_GROUP", "239.1.1.1"), ("IFLA_VXLAN_L2MISS", 1)]).tunnel
    assert isinstance(tunnel, Vxlan)
    assert (tunnel.multicast, tunnel.l2miss) == (True, True)


@pytest.mark.parametrize(("flags", "expected"), [(0x1, (1, 0, 0)), (0x8, (0, 1, 0)), (0x10, (0, 0, 1))])
def test_flags_of_a_device(flags: int, expected: tuple[bool, bool, bool]) -> None:
    link = _link("dummy", [], flags)
    assert (link.up, link.loopback, link.point_to_point) == expected
    assert (link.kind, link.tunnel) == ("dummy", None)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (0x80, (False, False, False, False)),
        (0x00, (True, False, False, False)),
        (0x81, (False, True, False, False)),
        (0xA0, (False, False, True, False)),
        (0xC0, (False, False, False, True)),
    ],
)
def test_flags_of_an_address(flags: int, expected: tuple[bool, ...]) -> None:
    attrs = [("IFA_LOCAL", "192.0.2.1"), ("IFA_FLAGS", flags), ("IFA_LABEL", "lo:flannel")]
    fields = {"family": 2, "prefixlen": 24, "scope": 253, "index": 3}
    buffer = reference(ifaddrmsg, 20, 0, 0, fields, attrs)
    decoded = linkmsg.decode_address(buffer, _header(buffer))
    assert decoded is not None
    index, address = decoded
    assert (index, str(address.interface), address.scope) == (3, "192.0.2.1/24", "link")
    assert address.label == "lo:flannel"
    assert (address.dynamic, address.temporary, address.deprecated, address.tentative) == expected


@given(st.binary(max_size=400))
def test_garbage_is_no_fault(garbage: bytes) -> None:
    body = b"\0" * 16 + garbage
    header = rtnl.Header(16, 0, 0, 0, 0, len(body))
    linkmsg.decode_link(body, header)
