"""The few chains that matter among a legacy table, from the bytes in which the kernel gives it.

The kernel only gives whole tables. Finding a chain and the jumps to it in them
takes a search for its name and its place; only its own rules are read.

Source: linux/netfilter_ipv4/ip_tables.h, linux/netfilter_ipv6/ip6_tables.h,
linux/netfilter/x_tables.h; the layout of a table is that of libiptc.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from flanneld.traffic.entry import decode, sizes
from flanneld.traffic.look import Look
from flanneld.traffic.render import Saved
from flanneld.traffic.rules import RuleSet
from subnet.errors import KernelError
from subnet.model import Family

_LEVEL: Mapping[Family, int] = {4: socket.SOL_IP, 6: 41}
_SOCKET: Mapping[Family, int] = {4: socket.AF_INET, 6: socket.AF_INET6}
_GET_INFO, _GET_ENTRIES = 64, 65
_INFO = struct.Struct("@32sI5I5III")
_NAME_BYTES = 32
_ENTRIES_HEAD = struct.Struct("@32sI4x")
_TARGET = struct.Struct("@H29sB")
_VERDICT = struct.Struct("@i")
_ERROR_BYTES, _STANDARD_BYTES = 64, 40
_VERDICTS = {-1: "DROP", -2: "ACCEPT", -4: "QUEUE", -5: "RETURN"}
_HOOKS: Mapping[str, int] = {"FORWARD": 2, "POSTROUTING": 4}
_TRIES = 3

_libc = ctypes.CDLL(None, use_errno=True)


class _Entry(NamedTuple):
    """Where an entry, its target and the next entry begin, and the name of its target, empty for a verdict."""

    at: int
    target: int
    end: int
    name: bytes


@dataclass(frozen=True, slots=True)
class Table:
    """A table as the kernel gives it; per hook the places of its first rule and of its policy."""

    family: Family
    data: bytes
    hook_entry: tuple[int, ...]
    underflow: tuple[int, ...]

    def look(self, rules: RuleSet) -> Look:
        """Return our chain and its hook. Raises ValueError if the bytes make no sense."""
        hook = _HOOKS[rules.hook]
        entries = self._entries(self.hook_entry[hook])
        in_hook = takewhile(lambda entry: entry.at < self.underflow[hook], entries)
        chains = {rules.hook: tuple(map(self._text, in_hook))}
        jumps: dict[str, int] = {}
        if (first := self._first_rule(rules.chain)) is not None:
            *ours, _ = takewhile(lambda entry: entry.name != b"ERROR", self._entries(first))
            chains[rules.chain] = tuple(map(self._text, ours))
            jump = _TARGET.pack(_STANDARD_BYTES, b"", 0) + _VERDICT.pack(first)
            jumps[rules.chain] = len(re.findall(re.escape(jump), self.data))
        return Look(chains, jumps)

    def _first_rule(self, chain: str) -> int | None:
        """Return where a chain of ours begins: behind an entry that bears its name."""
        name = _TARGET.pack(_ERROR_BYTES, b"ERROR", 0) + chain.encode() + b"\0"
        # Among so many zeros, a regular expression is several times faster than find.
        found = re.search(re.escape(name), self.data)
        return found.start() + _ERROR_BYTES if found else None

    def _entries(self, at: int) -> Iterator[_Entry]:
        """Yield what stands from here on; the last of a chain is no rule, and after it comes one named ERROR."""
        while True:
            target, following = sizes(self.data, at, self.family)
            if not 0 < target < following <= len(self.data) - at:
                raise ValueError(f"entry at {at} has no size")
            _, name, _ = _TARGET.unpack_from(self.data, at + target)
            yield _Entry(at, at + target, at + following, name.split(b"\0", 1)[0])
            at += following

    def _text(self, entry: _Entry) -> str:
        return decode(self.data[entry.at : entry.end], self._target(entry), self.family)

    def _target(self, entry: _Entry) -> str:
        """Return what libiptc calls an entry's target."""
        if entry.name:
            return entry.name.decode(errors="replace")
        (verdict,) = _VERDICT.unpack_from(self.data, entry.target + _TARGET.size)
        if verdict < 0:
            return _VERDICTS.get(verdict, "")
        return "" if verdict == entry.end else self._chain_before(verdict)

    def _chain_before(self, first: int) -> str:
        start = first - _ERROR_BYTES + _TARGET.size
        return self.data[start:first].split(b"\0", 1)[0].decode(errors="replace")


def read_chains(family: Family, wanted: Sequence[RuleSet], tables: frozenset[str]) -> Saved | None:
    """Return the chains of ``wanted`` and those that jump to them, None if only the whole tables can tell.

    ``tables`` are those that exist: asking for another would make it. Looks at
    the network namespace of the calling thread. Raises KernelError.
    """
    held: dict[str, Mapping[str, tuple[str, ...]]] = {}
    for rules in wanted:
        if rules.table not in tables:
            continue
        table = read_table(family, rules.table)
        try:
            look = table.look(rules) if table is not None else None
        except (ValueError, struct.error):
            return None
        if look is None or not look.tells_all(rules, understood=True):
            return None
        held[rules.table] = look.chains
    return Saved(held)


def read_table(family: Family, name: str) -> Table | None:
    """Return a table, None if others keep changing it meanwhile. Raises KernelError."""
    try:
        sock = socket.socket(_SOCKET[family], socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.IPPROTO_RAW)
    except OSError as e:
        raise KernelError("read", f"table {name}", e.errno or 0, str(e)) from e
    with closing(sock):
        for _ in range(_TRIES):
            head = name.encode().ljust(_NAME_BYTES, b"\0")
            info = _INFO.unpack(head + _ask(sock, family, _GET_INFO, head, _INFO.size - len(head)))
            size = info[-1]
            head = _ENTRIES_HEAD.pack(name.encode(), size)
            try:
                data = _ask(sock, family, _GET_ENTRIES, head, size)
            except KernelError as e:
                if e.errno == errno.EAGAIN:
                    continue
                raise
            return Table(family, data, info[2:7], info[7:12])
    return None


def _ask(sock: socket.socket, family: Family, option: int, head: bytes, size: int) -> bytes:
    """Return what getsockopt(2) puts behind ``head``, up to ``size`` bytes; Python's own does not take a head."""
    buffer = ctypes.create_string_buffer(len(head) + size)
    ctypes.memmove(buffer, head, len(head))
    length = ctypes.c_uint(len(buffer))
    if _libc.getsockopt(sock.fileno(), _LEVEL[family], option, buffer, ctypes.byref(length)):
        code = ctypes.get_errno()
        raise KernelError("read", f"legacy table of IPv{family}", code, os.strerror(code))
    return ctypes.string_at(ctypes.addressof(buffer) + len(head), length.value - len(head))
