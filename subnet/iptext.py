"""Addresses and networks as text, by the rules of Go's net.ParseIP and net.ParseCIDR."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from ipaddress import AddressValueError, IPv4Address, IPv4Network, IPv6Address, IPv6Network

from subnet.model import IPAddress, IPNetwork, Subnets

_PREFIX_LEN = re.compile("0*[0-9]{1,3}")


def pack_ipv4(text: str) -> bytes:
    """Return the four bytes of an IPv4 address. Raises ValueError with the reason."""
    try:
        # inet_pton(3) has the same rules, and leases come in thousands.
        return socket.inet_pton(socket.AF_INET, text)
    except OSError:
        return parse_ip(text).packed


def parse_ip(text: str) -> IPAddress:
    """Return the address. Raises ValueError with the reason, leading zeros and zones included."""
    try:
        # inet_pton(3) has the same rules, and leases come in thousands.
        return IPv4Address(socket.inet_pton(socket.AF_INET, text))
    except OSError:
        pass
    if "%" in text:
        raise ValueError("an address must not have a zone")
    try:
        return IPv6Address(text) if ":" in text else IPv4Address(text)
    except AddressValueError as error:
        raise ValueError(f"not an IP address: {error}") from error


def parse_cidr(text: str) -> IPNetwork:
    """Return the network; host bits are dropped. Raises ValueError with the reason."""
    address_text, slash, length = text.partition("/")
    if not slash:
        raise ValueError("not a CIDR: no prefix length")
    address = parse_ip(address_text)
    if not _PREFIX_LEN.fullmatch(length) or int(length) > address.max_prefixlen:
        raise ValueError(f"not a CIDR: the prefix length must be 0 to {address.max_prefixlen}")
    return network_of(address, int(length))


def network_of(address: IPAddress, prefix_len: int) -> IPNetwork:
    """Return the network of the given length around the address."""
    if isinstance(address, IPv4Address):
        return IPv4Network((address, prefix_len), strict=False)
    return IPv6Network((address, prefix_len), strict=False)


def network_at(value: int, prefix_len: int, version: int) -> IPNetwork:
    """Return the network whose address has the given integer value. Raises ValueError if host bits are set."""
    if version == 4:
        return IPv4Network((value, prefix_len))
    return IPv6Network((value, prefix_len))


def span_of(network: IPNetwork) -> tuple[int, int]:
    """Return the first and the last address as integers.

    Networks keep what they are asked for (broadcast address, number of
    addresses), which for thousands of leases takes time and memory.
    """
    first = int(network.network_address)
    return first, first + (1 << network.max_prefixlen - network.prefixlen) - 1


def as_subnets(networks: Iterable[IPNetwork]) -> Subnets:
    """Return the pair of the first network of each family."""
    v4: IPv4Network | None = None
    v6: IPv6Network | None = None
    for network in networks:
        if isinstance(network, IPv4Network):
            v4 = v4 or network
        else:
            v6 = v6 or network
    return Subnets(v4, v6)
