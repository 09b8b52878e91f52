"""Rules as the bytes the legacy kernel interface speaks, native byte order.

Source: linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h,
linux/netfilter/x_tables.h, xt_mark.h, xt_comment.h, nf_nat.h. Doing this here
needs neither the extension libraries nor python-iptables' way of asking them,
which takes the process's standard output away for a moment.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network, ip_network
from typing import Final

from flanneld.traffic.look import OPAQUE
from flanneld.traffic.render import rule_text
from flanneld.traffic.rules import Rule
from subnet.model import Family, IPNetwork

_ALIGN: Final = struct.calcsize("@BQ") - struct.calcsize("@Q")
_EXTENSION = struct.Struct("@H29sB")
_VERDICT = struct.Struct("@i")
_MARK = struct.Struct("@IIB")
_COMMENT = struct.Struct("256s")
_COUNTERS_BYTES: Final = 16

_INVERT_SOURCE: Final = 0x08
_INVERT_DESTINATION: Final = 0x10
_RANDOM_FULLY: Final = 0x10
_MARK_REVISION: Final = 1
_FLAGS: Final = 3
_TARGET_OFFSET: Final = 6
"""Places among the values of ``_Layout.rest``; the length of the entry follows the latter."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How one family's entry begins, and how it writes the range of MASQUERADE."""

    addresses: struct.Struct
    rest: struct.Struct
    goto: int
    masquerade: struct.Struct

    @property
    def header_bytes(self) -> int:
        size = self.addresses.size + self.rest.size
        return _aligned(size) + _COUNTERS_BYTES


# ``rest``: interface names and masks (64 bytes), protocol, [tos,] flags, invflags, nfcache,
# target_offset, next_offset, comefrom.
_LAYOUTS: dict[Family, _Layout] = {
    4: _Layout(struct.Struct("@4s4s4s4s"), struct.Struct("@64sH0sBBIHHI"), 0x02, struct.Struct("@II4s4sHH")),
    6: _Layout(struct.Struct("@16s16s16s16s"), struct.Struct("@64sH1sBB3xIHHI"), 0x04, struct.Struct("@I16s16sHH")),
}


def encode(rule: Rule, family: Family) -> bytes:
    """Return the entry for libiptc, which resolves the name of the target itself."""
    layout = _LAYOUTS[family]
    matches = b"".join(_matches(rule))
    target = _target(rule, family)
    offset = layout.header_bytes + len(matches)
    size = 4 if family == 4 else 16
    source, source_mask = _address(rule.source, size)
    destination, destination_mask = _address(rule.destination, size)
    inverted = _INVERT_SOURCE * rule.source_inverted | _INVERT_DESTINATION * rule.destination_inverted
    head = layout.addresses.pack(source, destination, source_mask, destination_mask)
    head += layout.rest.pack(b"", 0, b"", 0, inverted, 0, offset, offset + len(target), 0)
    return head.ljust(layout.header_bytes, b"\0") + matches + target


def decode(entry: bytes, target: str, family: Family) -> str:
    """Return the entry as iptables-save prints it if it says only what ``Rule`` can say.

    Any other reads ``-m opaque -j TARGET``, or ``-m opaque`` without a target,
    whatever it says: those that have to go are jumps to our chains, and then all
    that read so have to.
    ``target`` is the name libiptc gives.
    """
    end = _LAYOUTS[family].header_bytes
    return _decode(entry[: end - _COUNTERS_BYTES] + bytes(_COUNTERS_BYTES) + entry[end:], target, family)


@lru_cache(maxsize=1024)
def _decode(entry: bytes, target: str, family: Family) -> str:
    layout = _LAYOUTS[family]
    rule = _decode_rule(entry, target, layout)
    if rule is not None:
        return rule_text(rule)
    if not target:
        return OPAQUE
    flags = layout.rest.unpack_from(entry, layout.addresses.size)[_FLAGS]
    return f"{OPAQUE} {'-g' if flags & layout.goto else '-j'} {target}"


def sizes(table: bytes, at: int, family: Family) -> tuple[int, int]:
    """Return how far into the entry at this place its target stands, and how long it is."""
    layout = _LAYOUTS[family]
    values = layout.rest.unpack_from(table, at + layout.addresses.size)
    return values[_TARGET_OFFSET], values[_TARGET_OFFSET + 1]


def for_deletion(entry: bytes, target: str, family: Family) -> bytes:
    """Return an entry that was read in the form libiptc wants it in: with the target's name, which the kernel omits."""
    offset, _ = sizes(entry, 0, family)
    size, _, revision = _EXTENSION.unpack_from(entry, offset)
    return entry[:offset] + _EXTENSION.pack(size, target.encode(), revision) + entry[offset + _EXTENSION.size :]


def _decode_rule(entry: bytes, target: str, layout: _Layout) -> Rule | None:
    source, destination, source_mask, destination_mask = layout.addresses.unpack_from(entry)
    interfaces, protocol, tos, flags, inverted, _, target_offset, _, _ = layout.rest.unpack_from(
        entry, layout.addresses.size
    )
    plain = not any(interfaces) and not protocol and not any(tos) and not flags
    if not plain or inverted & ~(_INVERT_SOURCE | _INVERT_DESTINATION):
        return None
    try:
        found: dict[str, object] = {
            "source": _network(source, source_mask),
            "source_inverted": bool(inverted & _INVERT_SOURCE),
            "destination": _network(destination, destination_mask),
            "destination_inverted": bool(inverted & _INVERT_DESTINATION),
        }
        for name, revision, data in _extensions(entry[layout.header_bytes : target_offset]):
            found.update(decode_match(name, revision, data))
        found.update(_decode_target(entry[target_offset:], target, layout))
    except ValueError:
        return None
    return Rule(**found)  # type: ignore[arg-type]


def decode_match(name: str, revision: int, data: bytes) -> dict[str, object]:
    """Return the fields of ``Rule`` that a match extension says. Raises ValueError if it says anything else."""
    if name == "comment" and revision == 0:
        return {"comment": _until_nul(data)}
    if name == "mark" and revision == _MARK_REVISION:
        mark, mask, inverted = _MARK.unpack_from(data)
        if mark == mask and not inverted:
            return {"mark": mark}
    raise ValueError(name)


def _decode_target(extension: bytes, target: str, layout: _Layout) -> dict[str, object]:
    ((name, _, data),) = _extensions(extension)
    if name == "MASQUERADE":
        return {"target": name, "random_fully": _fully(data, layout)}
    # A standard target has no name of its own here; without a verdict it only counts packets.
    if name not in {"", "REJECT"} or not target:
        raise ValueError(name)
    return {"target": target}


def decode_masquerade(data: bytes, family: Family) -> bool:
    """Return whether a MASQUERADE with these data is --random-fully. Raises ValueError if it says anything else."""
    return _fully(data, _LAYOUTS[family])


def _fully(data: bytes, layout: _Layout) -> bool:
    for fully in (False, True):
        if data[: layout.masquerade.size] == _masquerade_range(fully, layout):
            return fully
    raise ValueError("a range")


def _masquerade_range(fully: bool, layout: _Layout) -> bytes:
    flags = _RANDOM_FULLY if fully else 0
    if layout.masquerade.size == 20:
        return layout.masquerade.pack(1, flags, b"", b"", 0, 0)
    return layout.masquerade.pack(flags, b"", b"", 0, 0)


def _matches(rule: Rule) -> Iterator[bytes]:
    if rule.mark is not None:
        yield _extension("mark", _MARK_REVISION, _MARK.pack(rule.mark, rule.mark, 0))
    if rule.comment:
        yield _extension("comment", 0, _COMMENT.pack(rule.comment.encode()))


def _target(rule: Rule, family: Family) -> bytes:
    if rule.target == "MASQUERADE":
        return _extension(rule.target, 0, _masquerade_range(rule.random_fully, _LAYOUTS[family]))
    return _extension(rule.target, 0, _VERDICT.pack(0))


def _extension(name: str, revision: int, data: bytes) -> bytes:
    size = _aligned(_EXTENSION.size + len(data))
    return (_EXTENSION.pack(size, name.encode(), revision) + data).ljust(size, b"\0")


def _extensions(data: bytes) -> Iterator[tuple[str, int, bytes]]:
    while data:
        size, name, revision = _EXTENSION.unpack_from(data)
        if size < _EXTENSION.size:
            raise ValueError("size of an extension")
        yield _until_nul(name), revision, data[_EXTENSION.size : size]
        data = data[size:]


def _address(network: IPNetwork | None, size: int) -> tuple[bytes, bytes]:
    if network is None:
        return bytes(size), bytes(size)
    return network.network_address.packed, network.netmask.packed


def _network(address: bytes, mask: bytes) -> IPNetwork | None:
    if not any(mask):
        return None
    ones = int.from_bytes(mask, "big").bit_count()
    network: IPv4Network | IPv6Network = ip_network((address, ones))
    if network.netmask.packed != mask:
        raise ValueError("a mask with holes")
    return network


def _until_nul(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode(errors="replace")


def _aligned(size: int) -> int:
    return (size + _ALIGN - 1) // _ALIGN * _ALIGN
