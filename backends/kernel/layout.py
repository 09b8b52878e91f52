"""Dumps of like messages, read by the buffer instead of one by one.

A table of ten thousand entries of ours comes as buffers of messages that
differ in a few fields only. Where every message of a buffer has the layout of
the first, and all else in them is equal, the fields that differ are unpacked
in one go. Pure; source: netlink(7), rtnetlink(7).
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from dataclasses import dataclass

from backends.kernel.rtnl import NLMSG_DONE

_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_DONE_BYTES = _HEADER.size + 4
_FLAGS_AT = 6
_SAME = bytes((1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1))
"""Length, kind and sequence number of a header."""
LEAST = 4
"""Fewer messages are not worth the trouble."""


@dataclass(frozen=True, slots=True)
class Run:
    """A buffer of messages of one length, kind and sequence number.

    ``stride`` is the distance between them, ``size`` where they end, ``flags``
    what their low flag bytes are. ``done``: behind them stands the dump's end.
    """

    stride: int
    size: int
    kind: int
    sequence: int
    flags: frozenset[int]
    done: bool


def run_of(buffer: bytes) -> Run | None:
    """Return what the messages of a buffer have in common, None if they are not alike."""
    if len(buffer) < _HEADER.size:
        return None
    length, kind, _, sequence, _ = _HEADER.unpack_from(buffer)
    stride = (length + 3) & ~3
    done = _ends(buffer)
    size = len(buffer) - (_DONE_BYTES if done else 0)
    if length < _HEADER.size or not size or size % stride:
        return None
    if not _alike(buffer, size, stride, _SAME):
        return None
    return Run(stride, size, kind, sequence, frozenset(buffer[_FLAGS_AT:size:stride]), done)


def columns(
    buffer: bytes, body_bytes: int, varying: Collection[int], ignored: Collection[int]
) -> tuple[tuple[int, ...], list[tuple[bytes, ...]]] | None:
    """Return the attributes of types ``varying`` of all messages, None if the messages are not alike.

    That is, the attributes' types in their order, and a tuple of their values
    per message. ``body_bytes`` is the length of the fixed part behind the
    header. What attributes of types ``ignored`` hold may differ, and is passed over.
    """
    run = run_of(buffer)
    if run is None or run.size < LEAST * run.stride:
        return None
    fields = _fields(buffer, _HEADER.unpack_from(buffer)[0], body_bytes)
    if fields is None:
        return None
    form, constant, kinds, at = ["="], bytearray(b"\1" * run.stride), [], 0
    for kind, start, end in fields:
        if kind in varying:
            form.append(f"{start - at}x{end - start}s")
            kinds.append(kind)
            at = end
        if kind in varying or kind in ignored:
            constant[start:end] = bytes(end - start)
    form.append(f"{run.stride - at}x")
    if not _alike(buffer, run.size, run.stride, constant):
        return None
    return tuple(kinds), list(struct.Struct("".join(form)).iter_unpack(memoryview(buffer)[: run.size]))


def _ends(buffer: bytes) -> bool:
    """Whether the last message says that the dump ends."""
    if len(buffer) < _DONE_BYTES:
        return False
    length, kind, *_ = _HEADER.unpack_from(buffer, len(buffer) - _DONE_BYTES)
    return (length, kind) == (_DONE_BYTES, NLMSG_DONE)


def _fields(buffer: bytes, end: int, body_bytes: int) -> list[tuple[int, int, int]] | None:
    """Return type, start and end of the first message's attributes, None if they do not fill it."""
    found = []
    at = _HEADER.size + body_bytes
    while at < end:
        if at + _ATTRIBUTE.size > end:
            return None
        length, kind = _ATTRIBUTE.unpack_from(buffer, at)
        if length < _ATTRIBUTE.size or at + length > end:
            return None
        found.append((kind, at + _ATTRIBUTE.size, at + length))
        at += (length + 3) & ~3
    return found


def _alike(buffer: bytes, size: int, stride: int, marked: bytes | bytearray) -> bool:
    """Whether every message agrees with the first at the marked bytes."""
    count = size // stride
    return all(buffer[at:size:stride] == buffer[at : at + 1] * count for at, mark in enumerate(marked) if mark)
