"""Lease keys and values, byte for byte as Go nodes write them.

One key that Go cannot parse, or one value that is not JSON, makes every Go
node of the cluster drop all its peers: nothing else may be written.
Source: upstream pkg/subnet/subnet.go and pkg/subnet/etcd/registry.go.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from sys import intern
from typing import TypeVar

from subnet.errors import LeaseDataError
from subnet.gojson import JsonError, dumps, folded, loads, show, unknown
from subnet.iptext import pack_ipv4, parse_ip
from subnet.model import Json, LeaseAttrs, Subnets

_NO_V4 = "0.0.0.0-0"
"""How a key without an IPv4 subnet says so."""
_UNSET_V4 = IPv4Address(0)
_NUMBER = "(?:0|[1-9][0-9]*)"
_KEY = re.compile(
    rf"(?P<v4>{_NUMBER}\.{_NUMBER}\.{_NUMBER}\.{_NUMBER})-(?P<len4>{_NUMBER})"
    rf"(?:&(?P<v6>[a-f0-9:]+)-(?P<len6>{_NUMBER}))?"
)
_LONGEST_V4, _LONGEST_V6 = 31, 127
_MEMBERS = ("PublicIP", "PublicIPv6", "BackendType", "BackendData", "BackendV6Data")
_HEX2 = "[0-9a-fA-F]{2}"
_HEX4 = "[0-9a-fA-F]{4}"
_MAC = re.compile(rf"{_HEX2}(:{_HEX2}){{5}}|{_HEX2}(-{_HEX2}){{5}}|{_HEX4}(\.{_HEX4}){{2}}")

_PLAIN_MAC = re.compile("[0-9a-f]{2}(:[0-9a-f]{2}){5}")

_Address = TypeVar("_Address", IPv4Address, IPv6Address)


def subnet_key(subnets: Subnets) -> str:
    """Return the last part of a lease's key, such as ``10.5.85.0-24&fd05:0:0:b::-64``."""
    v4 = _NO_V4 if subnets.v4 is None else _key_part(subnets.v4)
    return v4 if subnets.v6 is None else f"{v4}&{_key_part(subnets.v6)}"


def parse_subnet_key(text: str) -> Subnets:
    """Return the subnets that the last part of a key names. Raises LeaseDataError.

    Only the spelling that subnet_key gives is accepted, so that no two keys
    are about one subnet. IPv4 lengths go up to 31 bits, IPv6 up to 127.
    """
    match = _KEY.fullmatch(text)
    if match is None:
        raise LeaseDataError(f"lease key {show(text)}: is not of the form 10.5.1.0-24 or 10.5.1.0-24&fd05::-64")
    try:
        no_v4 = match["v6"] and f"{match['v4']}-{match['len4']}" == _NO_V4
        v4 = None if no_v4 else IPv4Network((pack_ipv4(match["v4"]), int(match["len4"])))
        v6 = IPv6Network((IPv6Address(match["v6"]).packed, int(match["len6"]))) if match["v6"] else None
    except ValueError as error:
        raise LeaseDataError(f"lease key {show(text)}: {error}") from error
    for network, longest in ((v4, _LONGEST_V4), (v6, _LONGEST_V6)):
        if network is not None and not 0 < network.prefixlen <= longest:
            raise LeaseDataError(f"lease key {show(text)}: the length of {network} must be 1 to {longest}")
    subnets = Subnets(v4, v6)
    if v6 is not None and subnet_key(subnets) != text:
        raise LeaseDataError(f"lease key {show(text)}: must be spelt {show(subnet_key(subnets))}")
    return subnets


def encode_attrs(attrs: LeaseAttrs, *, extra: Mapping[str, Json] | None = None) -> bytes:
    """Return the value of a lease key: compact JSON in upstream's order, ``extra`` members last.

    Extra members that are spelt like one of ours, in any case, are left out.
    """
    record: dict[str, Json] = {
        "PublicIP": str(attrs.public_ip or _UNSET_V4),
        "PublicIPv6": None if attrs.public_ipv6 is None else str(attrs.public_ipv6),
    }
    if attrs.backend_type:
        record["BackendType"] = attrs.backend_type
    if attrs.backend_data is not None:
        record["BackendData"] = attrs.backend_data
    if attrs.backend_v6_data is not None:
        record["BackendV6Data"] = attrs.backend_v6_data
    return dumps(record | unknown(extra or {}, _MEMBERS))


def decode_attrs(value: bytes) -> LeaseAttrs:
    """Return what a lease value says; absent and null members are unset. Raises LeaseDataError.

    A PublicIP of 0.0.0.0 is how a node says that it has none.
    """
    record = folded(_object(value), _MEMBERS)
    public_ip = _address(record, "PublicIP", IPv4Address)
    backend_type = record.get("BackendType")
    if not isinstance(backend_type, str | None):
        raise LeaseDataError(f"BackendType {show(backend_type)}: must be a string")
    return LeaseAttrs(
        public_ip=None if public_ip == _UNSET_V4 else public_ip,
        public_ipv6=_address(record, "PublicIPv6", IPv6Address),
        backend_type=intern(backend_type) if backend_type else "",
        backend_data=_frugal(record.get("BackendData")),
        backend_v6_data=_frugal(record.get("BackendV6Data")),
    )


def _frugal(data: Json) -> Json:
    """Names of members are few, and values come in thousands: one name need not be kept with each."""
    return {intern(name): value for name, value in data.items()} if isinstance(data, dict) else data


def unknown_members(value: bytes) -> dict[str, Json]:
    """Return the members of a lease value that flannel does not know. Raises LeaseDataError.

    They are to be kept when a node rewrites its own record.
    """
    return unknown(_object(value), _MEMBERS)


def parse_mac(text: str) -> str:
    """Return a 48-bit MAC address in lower case with colons. Raises LeaseDataError.

    Takes ``02:00:00:00:00:14``, ``02-00-00-00-00-14`` and ``0200.0000.0014`` in any case.
    """
    if _PLAIN_MAC.fullmatch(text) is not None:
        return text
    if _MAC.fullmatch(text) is None:
        raise LeaseDataError(f"MAC address {show(text)}: is not six bytes in colon, hyphen or dotted form")
    return bytes.fromhex(re.sub("[:.-]", "", text)).hex(":")


def is_unicast_mac(mac: str) -> bool:
    """Whether a MAC address in colon form can belong to one device: not a group address, not all zero."""
    return mac[1] in "02468ace" and mac != "00:00:00:00:00:00"


def _key_part(network: IPv4Network | IPv6Network) -> str:
    return f"{network.network_address}-{network.prefixlen}"


def _object(value: bytes) -> dict[str, Json]:
    try:
        record = loads(value)
    except JsonError as error:
        raise LeaseDataError(f"lease value: {error}") from error
    if not isinstance(record, dict):
        raise LeaseDataError(f"lease value {show(record)}: must be a JSON object")
    return record


def _address(record: Mapping[str, Json], name: str, kind: type[_Address]) -> _Address | None:
    value = record.get(name)
    if value is None:
        return None
    try:
        address = parse_ip(value) if isinstance(value, str) else None
    except ValueError as error:
        raise LeaseDataError(f"{name} {show(value)}: {error}") from error
    if not isinstance(address, kind):
        raise LeaseDataError(f"{name} {show(value)}: must be an IPv{kind(0).version} address in a string")
    return address
