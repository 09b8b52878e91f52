from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.errors import LeaseDataError
from subnet.model import Json, LeaseAttrs, Subnets
from subnet.wire import (
    decode_attrs,
    encode_attrs,
    is_unicast_mac,
    parse_mac,
    parse_subnet_key,
    subnet_key,
    unknown_members,
)

pytestmark = pytest.mark.pure

IP = IPv4Address("192.168.64.3")
IP6 = IPv6Address("fd00::3")
VTEP = {"VNI": 1, "VtepMAC": "c6:d2:32:6f:8f:44"}
VTEP6 = {"VNI": 1, "VtepMAC": "be:9a:00:11:22:33"}

KEYS = [
    ("10.5.52.0-24", Subnets(IPv4Network("10.5.52.0/24"))),
    ("10.5.85.0-24&fd05:0:0:b::-64", Subnets(IPv4Network("10.5.85.0/24"), IPv6Network("fd05:0:0:b::/64"))),
    ("0.0.0.0-0&fd05:0:0:b::-64", Subnets(None, IPv6Network("fd05:0:0:b::/64"))),
    ("10.5.0.2-31&fd05::2-127", Subnets(IPv4Network("10.5.0.2/31"), IPv6Network("fd05::2/127"))),
]

VALUES = [
    (
        b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"vxlan",'
        b'"BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"}}',
        LeaseAttrs(IP, None, "vxlan", VTEP),
    ),
    (
        b'{"PublicIP":"192.168.64.3","PublicIPv6":"fd00::3","BackendType":"vxlan",'
        b'"BackendData":{"VNI":1,"VtepMAC":"c6:d2:32:6f:8f:44"},'
        b'"BackendV6Data":{"VNI":1,"VtepMAC":"be:9a:00:11:22:33"}}',
        LeaseAttrs(IP, IP6, "vxlan", VTEP, VTEP6),
    ),
    (b'{"PublicIP":"192.168.64.3","PublicIPv6":null}', LeaseAttrs(IP)),
    (b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"host-gw"}', LeaseAttrs(IP, None, "host-gw")),
    (
        b'{"PublicIP":"192.168.64.3","PublicIPv6":"fd00::3","BackendType":"host-gw"}',
        LeaseAttrs(IP, IP6, "host-gw"),
    ),
    (b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"ipip"}', LeaseAttrs(IP, None, "ipip")),
    (
        b'{"PublicIP":"10.0.0.5","PublicIPv6":"fd00::5","BackendType":"wireguard",'
        b'"BackendData":{"PublicKey":"8Rz=","Port":51820},"BackendV6Data":{"PublicKey":"8Rz=","Port":51821}}',
        LeaseAttrs(
            IPv4Address("10.0.0.5"),
            IPv6Address("fd00::5"),
            "wireguard",
            {"PublicKey": "8Rz=", "Port": 51820},
            {"PublicKey": "8Rz=", "Port": 51821},
        ),
    ),
    (
        b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"extension","BackendData":"out put"}',
        LeaseAttrs(IP, None, "extension", "out put"),
    ),
    (
        b'{"PublicIP":"0.0.0.0","PublicIPv6":"fd00::3","BackendType":"vxlan",'
        b'"BackendV6Data":{"VNI":1,"VtepMAC":"be:9a:00:11:22:33"}}',
        LeaseAttrs(None, IP6, "vxlan", None, VTEP6),
    ),
    (b'{"PublicIP":"0.0.0.0","PublicIPv6":null}', LeaseAttrs()),
]


@pytest.mark.parametrize(("key", "subnets"), KEYS)
def test_keys(key: str, subnets: Subnets) -> None:
    assert subnet_key(subnets) == key
    assert parse_subnet_key(key) == subnets


@pytest.mark.parametrize(
    "key",
    [
        *("", "config", "10.5.52.0", "10.5.52.0/24", "10.5.52.0-", "10.5.52.0-24-", "x10.5.52.0-24", "10.5.52.0-24x"),
        *("10.5.52.0-24 ", "10.5.52.0-24\n", "10.5.52.0-32", "10.5.52.0-33", "10.5.52.1-24", "10.5x52.0-24", "-24"),
        *("10.5.052.0-24", "10.5.52.0-024", "10.5.256.0-24", "10.5.52.0-٢٤", "10.5.0.0-0", "0.0.0.0-0", "10.5.52-24"),
        *("10.5.52.0-24&", "10.5.52.0-24&fd05::", "10.5.52.0-24&fd05::-128", "10.5.52.0-24&fd05::1-64", "&fd05::-64"),
        *(
            "10.5.52.0-24&FD05::-64",
            "10.5.52.0-24&fd05:0::-64",
            "10.5.52.0-24&fd05:::-64",
            "fd05::-64",
            "0.0.0.0-0&::-0",
        ),
        *("10.5.52.0-24&10.5.53.0-24", "a/10.5.52.0-24", "10.5.52.0-24/a", "0.0.0.0-1&fd05::-0"),
    ],
)
def test_other_keys_are_refused_by_name(key: str) -> None:
    with pytest.raises(LeaseDataError) as caught:
        parse_subnet_key(key)
    assert str(caught.value).startswith(f"lease key {json.dumps(key)}: ")


@pytest.mark.parametrize("text", ["fd00:0:0:0::/64", "fd00::/64", "FD00::/64", "FD00:0000:0:0:0:0:0:0/64"])
def test_I07_every_spelling_of_a_subnet_gives_the_one_key_that_leads_back_to_it(text: str) -> None:
    for v4, first in ((IPv4Network("10.5.1.0/24"), "10.5.1.0-24"), (None, "0.0.0.0-0")):
        subnets = Subnets(v4, IPv6Network(text))
        assert subnet_key(subnets) == f"{first}&fd00::-64"
        assert parse_subnet_key(subnet_key(subnets)) == subnets


@pytest.mark.parametrize(("value", "attrs"), VALUES)
def test_golden_values(value: bytes, attrs: LeaseAttrs) -> None:
    assert encode_attrs(attrs) == value
    assert decode_attrs(value) == attrs


def test_strings_are_escaped_as_go_does() -> None:
    data = '<a>&"\\\n\t\x01\u2028\u2029é\U0001f600\x7f'
    assert encode_attrs(LeaseAttrs(IP, None, "extension", data)) == (
        b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"extension","BackendData":"'
        rb"\u003ca\u003e\u0026\"\\\n\t\u0001\u2028\u2029"
        b'\xc3\xa9\xf0\x9f\x98\x80\x7f"}'
    )


def test_lone_surrogates_become_valid_json() -> None:
    value = encode_attrs(decode_attrs(rb'{"PublicIP":"1.2.3.4","BackendData":"\ud800"}'))
    assert value == rb'{"PublicIP":"1.2.3.4","PublicIPv6":null,"BackendData":"\ufffd"}'


@pytest.mark.parametrize(
    ("value", "attrs"),
    [
        (b'{"PublicIP":"192.168.64.3"}', LeaseAttrs(IP)),
        (b"{}", LeaseAttrs()),
        (
            b'{"publicip":"192.168.64.3","backendtype":"vxlan","backenddata":{"vtepmac":"c6:d2:32:6f:8f:44"}}',
            LeaseAttrs(IP, None, "vxlan", {"vtepmac": "c6:d2:32:6f:8f:44"}),
        ),
        (
            b' { "PublicIP" : "192.168.64.3" , "BackendType" : "vxlan" , "BackendData" : {} } ',
            LeaseAttrs(IP, None, "vxlan", {}),
        ),
        (
            b'{"PublicIP":"192.168.64.3","BackendType":"vxlan","BackendData":null,"BackendV6Data":null}',
            LeaseAttrs(IP, None, "vxlan"),
        ),
        (b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":null,"Extra":{"x":[1]}}', LeaseAttrs(IP)),
        (b'{"PublicIP":"10.0.0.1","PUBLICIP":"192.168.64.3"}', LeaseAttrs(IP)),
        (b'{"PublicIP":"0.0.0.0","PublicIPv6":"FD00::0003"}', LeaseAttrs(None, IP6)),
    ],
)
def test_D04_values_of_other_versions_are_understood(value: bytes, attrs: LeaseAttrs) -> None:
    assert decode_attrs(value) == attrs


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (b'{"PublicIP":""}', 'PublicIP ""'),
        (b'{"PublicIP":"x"}', 'PublicIP "x"'),
        (b'{"PublicIP":"192.0.2.01"}', 'PublicIP "192.0.2.01"'),
        (b'{"PublicIP":"fd00::1"}', 'PublicIP "fd00::1"'),
        (b'{"publicip":1}', "PublicIP 1"),
        (b'{"PublicIP":["192.0.2.1"]}', "PublicIP "),
        (b'{"PublicIPv6":"192.0.2.1"}', 'PublicIPv6 "192.0.2.1"'),
        (b'{"PublicIPv6":"fe80::1%eth0"}', 'PublicIPv6 "fe80::1%eth0"'),
        (b'{"BackendType":1}', "BackendType 1"),
        (b'{"BackendType":{}}', "BackendType {}"),
        (b"[]", "lease value []"),
        (b"null", "lease value null"),
        (b'"x"', 'lease value "x"'),
        (b"", "lease value: invalid JSON"),
        (b"hello", "lease value: invalid JSON"),
        (b'{"PublicIP":"192.0.2.1"} x', "lease value: invalid JSON"),
        (b'{"BackendData":NaN}', "lease value: invalid JSON"),
        (b'{"BackendData":1e999}', "lease value: invalid JSON"),
        (b"[" * 100_000, "lease value: invalid JSON"),
        (b"\x80\xff", "lease value: invalid JSON"),
    ],
)
def test_bad_values_are_refused_by_name(value: bytes, named: str) -> None:
    with pytest.raises(LeaseDataError) as caught:
        decode_attrs(value)
    assert str(caught.value).startswith(named)


def test_D04_unknown_members_survive_a_rewrite() -> None:
    value = b'{"Zone":"a","publicip":"192.168.64.3","Extra":{"x":[1,null]},"BACKENDTYPE":"vxlan"}'
    extra = unknown_members(value)
    assert extra == {"Zone": "a", "Extra": {"x": [1, None]}}
    assert encode_attrs(decode_attrs(value), extra=extra) == (
        b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"BackendType":"vxlan","Zone":"a","Extra":{"x":[1,null]}}'
    )


def test_D04_extra_members_never_shadow_ours() -> None:
    extra: dict[str, Json] = {"publicip": "1.1.1.1", "BackendV6Data": {}, "k": 1}
    assert encode_attrs(LeaseAttrs(IP), extra=extra) == b'{"PublicIP":"192.168.64.3","PublicIPv6":null,"k":1}'


def test_a_value_that_is_no_json_is_never_written() -> None:
    with pytest.raises(ValueError, match="JSON"):
        encode_attrs(LeaseAttrs(IP, None, "vxlan", {"VNI": float("nan")}))


@pytest.mark.parametrize(
    "text", ["02:00:00:ab:00:14", "02-00-00-AB-00-14", "0200.00ab.0014", "02:00:00:AB:00:14", "0200.00AB.0014"]
)
def test_mac_spellings(text: str) -> None:
    assert parse_mac(text) == "02:00:00:ab:00:14"


@pytest.mark.parametrize(
    "text",
    [
        *("", "02:00:00:00:00", "02:00:00:00:00:14:15", "02:00:00:00:00:14:15:16", "2:0:0:0:0:14", "02:00-00:00:00:14"),
        *(
            "020000000014",
            "0200.0000",
            "0200:0000:0014",
            "0g:00:00:00:00:14",
            " 02:00:00:00:00:14",
            "02:00:00:00:00:14\n",
        ),
    ],
)
def test_bad_macs_are_refused_by_name(text: str) -> None:
    with pytest.raises(LeaseDataError) as caught:
        parse_mac(text)
    assert str(caught.value).startswith(f"MAC address {json.dumps(text)}: ")


@pytest.mark.parametrize(
    ("mac", "unicast"),
    [
        ("02:00:00:00:00:14", True),
        ("00:00:00:00:00:01", True),
        ("fe:ff:ff:ff:ff:ff", True),
        ("01:00:5e:00:00:01", False),
        ("33:33:00:00:00:01", False),
        ("ff:ff:ff:ff:ff:ff", False),
        ("00:00:00:00:00:00", False),
    ],
)
def test_unicast_macs(mac: str, unicast: bool) -> None:
    assert is_unicast_mac(mac) is unicast


v4_networks = st.builds(
    lambda value, length: IPv4Network((value, length), strict=False), st.integers(2**24, 2**32 - 1), st.integers(8, 31)
)
v6_networks = st.builds(
    lambda value, length: IPv6Network((value, length), strict=False),
    st.integers(0x2000 << 112, 2**128 - 1),
    st.integers(16, 127),
)
pairs = (
    st.builds(Subnets, v4_networks)
    | st.builds(Subnets, v4_networks, v6_networks)
    | st.builds(Subnets, st.none(), v6_networks)
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
attributes = st.builds(
    LeaseAttrs,
    st.none() | st.ip_addresses(v=4).filter(lambda address: address != IPv4Address(0)),
    st.none() | st.ip_addresses(v=6),
    st.text(max_size=10),
    json_values,
    json_values,
)


@given(pairs)
@settings(max_examples=200, deadline=None)
def test_key_round_trip(subnets: Subnets) -> None:
    assert parse_subnet_key(subnet_key(subnets)) == subnets


@given(attributes, st.dictionaries(st.text(max_size=4), json_values, max_size=3))
@settings(max_examples=150, deadline=None)
def test_value_round_trip(attrs: LeaseAttrs, extra: dict[str, Json]) -> None:
    value = encode_attrs(attrs, extra=extra)
    assert decode_attrs(value) == attrs
    assert unknown_members(value) == extra
    assert not set(value) & set(b"<>&")


@given(st.binary(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_attributes_or_refused(value: bytes) -> None:
    try:
        attrs = decode_attrs(value)
    except LeaseDataError:
        return
    assert isinstance(json.loads(value), dict)
    assert isinstance(attrs, LeaseAttrs)
