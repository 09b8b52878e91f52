"""Rules as the bytes in which iptables-nft puts them into the kernel. Pure.

Source: linux/netfilter/nf_tables.h; which expressions there are is what
``nft --debug=netlink list ruleset`` shows of rules of iptables 1.8.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Network, IPv6Network, ip_network

from flanneld.traffic.entry import decode_masquerade, decode_match
from flanneld.traffic.look import OPAQUE
from flanneld.traffic.nfnetlink import attribute_list, attributes
from flanneld.traffic.render import rule_text
from flanneld.traffic.rules import Rule
from subnet.model import Family

_NAME, _DATA = 1, 2
_VALUE, _VERDICT = 1, 2
_CODE, _CHAIN = 1, 2
_JUMP, _GOTO = -3, -4
_VERDICTS = {0: "DROP", 1: "ACCEPT", -5: "RETURN"}
_JUMPS = tuple(struct.pack("=HH", 8, _CODE) + struct.pack(">i", code) for code in (_JUMP, _GOTO))
_NETWORK_HEADER, _MARK = 1, 3
_EQUAL, _NOT_EQUAL = 0, 1
_PLACES: Mapping[tuple[Family, int], str] = {
    (4, 12): "source",
    (4, 16): "destination",
    (6, 8): "source",
    (6, 24): "destination",
}
_RANDOM_FULLY = 0x10

Attributes = Mapping[int, bytes]


def decode(expressions: bytes, family: Family) -> str:
    """Return the rule as iptables-save prints it if it says only what ``Rule`` can say.

    Any other is ``opaque``.
    """
    reading = _Reading(family)
    try:
        for _, expression in attribute_list(expressions):
            parts = attributes(expression)
            name = parts[_NAME].rstrip(b"\0").decode()
            _READERS[name](reading, attributes(parts.get(_DATA, b"")))
        return rule_text(Rule(**reading.found))  # type: ignore[arg-type]
    except (KeyError, TypeError, ValueError, struct.error):
        return opaque(expressions)


def opaque(expressions: bytes) -> str:
    """Return ``-m opaque -j CHAIN`` if the rule leads to a chain, else ``-m opaque``."""
    target = next(iter(jumps(expressions)), "")
    return f"{OPAQUE} -j {target}" if target else OPAQUE


def jumps(expressions: bytes) -> Iterator[str]:
    """Yield the chains that the rule jumps or goes to, found without reading all of it."""
    for pattern in _JUMPS:
        if (at := expressions.find(pattern)) >= 0:
            kind, value = next(attribute_list(expressions[at + len(pattern) :]), (0, b""))
            if kind == _CHAIN:
                yield value.rstrip(b"\0").decode(errors="replace")


@dataclass
class _Reading:
    """What has been read: register to what was loaded into it and its mask, and fields of ``Rule``."""

    family: Family
    loaded: dict[bytes, tuple[str, bytes]] = field(default_factory=dict)
    found: dict[str, object] = field(default_factory=dict)

    def note(self, **fields: object) -> None:
        """Add fields; each is said once, and a target ends the rule."""
        if self.found.keys() & fields.keys() or "target" in self.found:
            raise ValueError("said twice")
        self.found.update(fields)


def _read_payload(reading: _Reading, said: Attributes) -> None:
    register, base, offset, length = said[1], *(_number(said[kind]) for kind in (2, 3, 4))
    if base != _NETWORK_HEADER:
        raise ValueError("another header")
    reading.loaded[register] = _PLACES[reading.family, offset], b"\xff" * length


def _read_meta(reading: _Reading, said: Attributes) -> None:
    if _number(said[2]) != _MARK:
        raise ValueError("another property")
    reading.loaded[said[1]] = "mark", b"\xff" * 4


def _read_bitwise(reading: _Reading, said: Attributes) -> None:
    what, mask = reading.loaded.pop(said[1])
    new = attributes(said[4])[_VALUE]
    if len(new) != len(mask) or any(attributes(said[5])[_VALUE]) or _number(said.get(6, bytes(4))):
        raise ValueError("more than a mask")
    reading.loaded[said[2]] = what, new


def _read_cmp(reading: _Reading, said: Attributes) -> None:
    what, mask = reading.loaded.pop(said[1])
    operation, value = _number(said[2]), attributes(said[3])[_VALUE]
    if operation not in {_EQUAL, _NOT_EQUAL} or len(value) != len(mask):
        raise ValueError("another comparison")
    if what == "mark":
        if operation != _EQUAL or value != mask:
            raise ValueError("another mark")
        reading.note(mark=int.from_bytes(value, sys.byteorder))
        return
    size = 4 if reading.family == 4 else 16
    ones = int.from_bytes(mask.ljust(size, b"\0"), "big").bit_count()
    network: IPv4Network | IPv6Network = ip_network((value.ljust(size, b"\0"), ones))
    if network.netmask.packed != mask.ljust(size, b"\0"):
        raise ValueError("a mask with holes")
    reading.note(**{what: network, f"{what}_inverted": operation == _NOT_EQUAL})


def _read_match(reading: _Reading, said: Attributes) -> None:
    name = said[1].rstrip(b"\0").decode()
    reading.note(**decode_match(name, _number(said[2]), said[3]))


def _read_target(reading: _Reading, said: Attributes) -> None:
    name = said[1].rstrip(b"\0").decode()
    if name == "MASQUERADE":
        reading.note(target=name, random_fully=decode_masquerade(said[3], reading.family))
    elif name == "REJECT":
        reading.note(target=name)
    else:
        raise ValueError(name)


def _read_masq(reading: _Reading, said: Attributes) -> None:
    flags = _number(said.get(1, bytes(4)))
    if set(said) - {1} or flags not in {0, _RANDOM_FULLY}:
        raise ValueError("a range")
    reading.note(target="MASQUERADE", random_fully=bool(flags))


def _read_immediate(reading: _Reading, said: Attributes) -> None:
    verdict = attributes(attributes(said[2])[_VERDICT])
    code = int.from_bytes(verdict[_CODE], "big", signed=True)
    if code == _JUMP:
        reading.note(target=verdict[_CHAIN].rstrip(b"\0").decode())
    else:
        reading.note(target=_VERDICTS[code])


_READERS: Mapping[str, Callable[[_Reading, Attributes], None]] = {
    "payload": _read_payload,
    "meta": _read_meta,
    "bitwise": _read_bitwise,
    "cmp": _read_cmp,
    "match": _read_match,
    "target": _read_target,
    "masq": _read_masq,
    "immediate": _read_immediate,
    "reject": lambda reading, _: reading.note(target="REJECT"),
    "counter": lambda *_: None,
}


def _number(value: bytes) -> int:
    return int.from_bytes(value, "big")
