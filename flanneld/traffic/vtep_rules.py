"""The filter of tunnelled packets: its nftables table, as text and as nft lists it. Pure.

The kernel's VXLAN socket and its IP-in-IP devices take packets on every address
of the host from anybody; with this table only those of known hosts on the
external interface.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any

from subnet.errors import RuleError
from subnet.model import FAMILIES, Family, IPAddress

_SET: Mapping[Family, str] = {4: "peers4", 6: "peers6"}
_TYPE: Mapping[Family, str] = {4: "ipv4_addr", 6: "ipv6_addr"}
_IP: Mapping[Family, str] = {4: "ip", 6: "ip6"}
_IP_IN_IP: Mapping[Family, int] = {4: 4, 6: 41}
"""Protocol numbers of packets inside packets of their own family (RFC 2003, RFC 2473)."""
_CHAIN = "input"
_PER_COMMAND = 500
"""Addresses of one command: nft reads lines of any length, people do not."""


@dataclass(frozen=True, slots=True)
class VtepFilter:
    """Accept UDP ``port`` on ``device`` from ``peers``, and from nobody else on any device.

    With ``ip_in_ip`` it is not a port but the families whose packets carry
    packets of the same family.
    """

    device: str
    port: int
    peers: frozenset[IPAddress]
    ip_in_ip: tuple[Family, ...] = ()

    def __str__(self) -> str:
        what = "packets in packets" if self.ip_in_ip else f"UDP port {self.port}"
        return f"{what} taken from {len(self.peers)} hosts on {self.device} only"


@dataclass(frozen=True, slots=True)
class HeldFilter:
    """What the table holds: expressions of the rules of its chain, and the elements of its sets."""

    rules: tuple[object, ...] = ()
    peers: frozenset[IPAddress] = frozenset()
    sound: bool = True
    """Whether there is exactly one chain at its place and both sets, and nothing else."""


def build_text(table: str, wanted: VtepFilter) -> str:
    """Return what makes the table hold exactly the filter, whatever it holds."""
    lines = [f"add table inet {table}", f"delete table inet {table}", f"add table inet {table}"]
    lines += [f"add set inet {table} {_SET[f]} {{ type {_TYPE[f]}; }}" for f in FAMILIES]
    at = "type filter hook input priority 0; policy accept;"
    lines.append(f"add chain inet {table} {_CHAIN} {{ {at} }}")
    mine, port = f"add rule inet {table} {_CHAIN}", f"udp dport {wanted.port}"
    for f in wanted.ip_in_ip or FAMILIES:
        kind = f"meta l4proto {_IP_IN_IP[f]}" if wanted.ip_in_ip else port
        lines.append(f'{mine} {kind} iifname "{wanted.device}" {_IP[f]} saddr @{_SET[f]} accept')
    # IPv6 inside IPv4 has the number of IPv6 inside IPv6 and is somebody else's.
    drops = [f"meta nfproto ipv{f} meta l4proto {_IP_IN_IP[f]}" for f in wanted.ip_in_ip] or [port]
    lines += [f"{mine} {kind} drop" for kind in drops]
    lines += _elements("add", table, wanted.peers)
    return "".join(f"{line}\n" for line in lines)


def repair_text(table: str, held: HeldFilter, wanted: VtepFilter) -> str:
    """Return what corrects the table, '' if nothing has to be: addresses one by one, all else by building it anew."""
    if not held.sound or held.rules != rule_expressions(wanted):
        return build_text(table, wanted)
    lines = [
        *_elements("add", table, wanted.peers - held.peers),
        *_elements("delete", table, held.peers - wanted.peers),
    ]
    return "".join(f"{line}\n" for line in lines)


def _elements(verb: str, table: str, addresses: Iterable[IPAddress]) -> Iterator[str]:
    for family in FAMILIES:
        texts = [str(address) for address in sorted(a for a in addresses if a.version == family)]
        for start in range(0, len(texts), _PER_COMMAND):
            yield f"{verb} element inet {table} {_SET[family]} {{ {', '.join(texts[start : start + _PER_COMMAND])} }}"


def rule_expressions(wanted: VtepFilter) -> tuple[object, ...]:
    """Return the rules as nft lists them, protocols as numbers (libnftables-json(5))."""
    port = _match({"payload": {"protocol": "udp", "field": "dport"}}, wanted.port)
    device = _match({"meta": {"key": "iifname"}}, wanted.device)
    kind = {f: _match(_L4PROTO, _IP_IN_IP[f]) if wanted.ip_in_ip else port for f in FAMILIES}
    accepting = (
        [kind[f], device, _match({"payload": {"protocol": _IP[f], "field": "saddr"}}, f"@{_SET[f]}"), {"accept": None}]
        for f in wanted.ip_in_ip or FAMILIES
    )
    drops = [[_match({"meta": {"key": "nfproto"}}, f"ipv{f}"), kind[f]] for f in wanted.ip_in_ip] or [[port]]
    return (*accepting, *([*what, {"drop": None}] for what in drops))


_L4PROTO = {"meta": {"key": "l4proto"}}


def _match(left: object, right: object) -> object:
    return {"match": {"op": "==", "left": left, "right": right}}


@dataclass
class _Listing:
    rules: list[object] = field(default_factory=list)
    peers: set[IPAddress] = field(default_factory=set)
    sets: set[str] = field(default_factory=set)
    chains: list[tuple[object, ...]] = field(default_factory=list)
    strange: bool = False


def parse_table(listing: Mapping[str, Any]) -> HeldFilter:
    """Return what ``nft -j list table`` says. Raises RuleError if it is no such listing."""
    seen = _Listing()
    try:
        for item in listing["nftables"]:
            ((kind, said),) = item.items()
            _take(seen, kind, said)
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise RuleError(f"nft lists what cannot be read: {e!r}") from e
    place = (_CHAIN, "filter", "input", 0, "accept")
    sound = seen.chains == [place] and seen.sets == set(_SET.values()) and not seen.strange
    return HeldFilter(tuple(seen.rules), frozenset(seen.peers), sound)


def _take(seen: _Listing, kind: str, said: Any) -> None:
    if kind == "chain":
        seen.chains.append(tuple(said.get(key) for key in ("name", "type", "hook", "prio", "policy")))
    elif kind == "rule":
        seen.rules.append(said["expr"])
    elif kind == "set":
        seen.sets.add(said["name"])
        # An element with a time-out or a comment is an object; then the table is not as we made it.
        elements = said.get("elem", [])
        seen.peers |= {ip_address(element) for element in elements if isinstance(element, str)}
        seen.strange |= not all(isinstance(element, str) for element in elements)
    else:
        seen.strange |= kind not in {"metainfo", "table"} or "flags" in said
