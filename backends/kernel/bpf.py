"""Maps and programs of the kernel's virtual machine through bpf(2), without libbpf (linux/bpf.h).

Both live as long as a descriptor of them, or an attachment, does.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import islice
from typing import Final

from subnet.errors import KernelError

log = logging.getLogger(__name__)

MAP_CREATE, MAP_LOOKUP_ELEM, MAP_UPDATE_ELEM, MAP_DELETE_ELEM, PROG_LOAD = 0, 1, 2, 3, 5
OBJ_GET_INFO_BY_FD, MAP_FREEZE, MAP_UPDATE_BATCH = 15, 22, 26
PROG_TYPE_SCHED_CLS: Final = 3
F_NO_PREALLOC, F_RDONLY_PROG = 1 << 0, 1 << 7
PSEUDO_MAP_FD, PSEUDO_MAP_VALUE = 1, 2
INSTRUCTION_BYTES: Final = 8
BATCH: Final = 4096
"""Entries per call."""
PROCESSORS: Final = 8192
"""More than any kernel is built for (CONFIG_NR_CPUS)."""
LOG_BYTES: Final = 1 << 20
ATTEMPTS: Final = 5
"""A load that a signal interrupts is to be repeated (EAGAIN)."""
LICENSE: Final = b"GPL\0"
"""Of the programs alone, which are under this project's licence as well: the kernel lends fib_lookup to no other."""

NUMBERS: Final[Mapping[str, int]] = {
    "x86_64": 321,
    "aarch64": 280,
    "riscv64": 280,
    "loongarch64": 280,
    "ppc64le": 361,
    "ppc64": 361,
    "s390x": 351,
    "armv7l": 386,
    "armv8l": 386,
    "i686": 357,
}
"""The system call's number by machine (asm/unistd.h)."""

_NO_BATCH: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP, 524})
"""What a kernel without batches for a map says (524: ENOTSUPP, which has no name here)."""
_REASONS: Final = {
    errno.EPERM: "not permitted; the process needs the capabilities CAP_BPF and CAP_NET_ADMIN, and a "
    "system call filter that lets bpf(2) pass",
    errno.EACCES: "refused by the kernel, which takes it with the capability CAP_PERFMON only if it is an older one",
    errno.ENOSYS: "the kernel has no bpf(2)",
}

_CREATE = struct.Struct("=IIIIIII16s")
_ELEMENT = struct.Struct("=IxxxxQQQ")
_BATCH = struct.Struct("=QQQQIIQQ")
_LOAD = struct.Struct("=IIQQIIQII16s")
_INFO = struct.Struct("=IIQ")
_FD = struct.Struct("=I")
_INSTRUCTION = struct.Struct("=BBhi")
_ID_AT: Final = 4
"""Of the id in struct bpf_prog_info."""


class MapKind(IntEnum):
    """Of what is used here (enum bpf_map_type)."""

    HASH = 1
    ARRAY = 2
    PERCPU_ARRAY = 6
    LPM_TRIE = 11


@dataclass(frozen=True, slots=True)
class Bytecode:
    """A compiled program.

    ``maps``: which map the instruction at an index loads; ``values``: of which it loads the only value.
    """

    code: bytes
    maps: Mapping[int, str]
    values: Mapping[int, str]


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def call_number(machine: str, pointer_bytes: int) -> int:
    """Return the system call's number, 0 if it is not known: another kind of process on that machine has another."""
    number = NUMBERS.get(machine, 0)
    return number if pointer_bytes == (4 if machine in ("armv7l", "armv8l", "i686") else 8) else 0


def _bpf(command: int, attributes: bytes) -> int:
    """Make the call. Raises OSError."""
    number = call_number(platform.machine(), struct.calcsize("P"))
    if not number:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    words = (ctypes.c_long(number), ctypes.c_long(command), buffer, ctypes.c_ulong(len(attributes)))
    found = int(_libc().syscall(*words))
    if found < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return found


def _error(operation: str, target: object, cause: OSError, more: str = "") -> KernelError:
    code = cause.errno or 0
    reason = _REASONS.get(code, os.strerror(code).lower())
    return KernelError(operation, target, code, f"{reason}: {more}" if more else reason)


class Map:
    """A map and its descriptor. All methods raise KernelError."""

    def __init__(self, name: str, kind: MapKind, sizes: tuple[int, int], entries: int, flags: int = 0) -> None:
        """``sizes``: of a key and of a value, in bytes."""
        self.name, self._value_bytes = name, sizes[1]
        attributes = _CREATE.pack(kind, *sizes, entries, flags, 0, 0, name.encode())
        try:
            self.fd = _bpf(MAP_CREATE, attributes)
        except OSError as cause:
            raise _error("create", self, cause) from cause
        self._batches = True

    def __str__(self) -> str:
        return f"bpf map {self.name}"

    def close(self) -> None:
        """Close the descriptor; programs go on with theirs."""
        os.close(self.fd)

    def freeze(self) -> None:
        """Let nobody change it from outside any more."""
        try:
            _bpf(MAP_FREEZE, _FD.pack(self.fd))
        except OSError as cause:
            raise _error("freeze", self, cause) from cause

    def put(self, entries: Mapping[bytes, bytes]) -> None:
        """Write entries, new ones and such that are there."""
        left = iter(entries)
        while part := list(islice(left, BATCH)):
            keys, values = b"".join(part), b"".join(entries[key] for key in part)
            try:
                self._batches = self._batches and self._put_together(keys, values, len(part))
                if not self._batches:
                    for key in part:
                        self._one(MAP_UPDATE_ELEM, key, entries[key])
            except OSError as cause:
                raise _error("write to", self, cause) from cause

    def _put_together(self, keys: bytes, values: bytes, count: int) -> bool:
        """Write many entries at once; return whether the kernel can do that with such a map. Raises OSError."""
        key_buffer, value_buffer = (ctypes.create_string_buffer(raw, len(raw)) for raw in (keys, values))
        where = ctypes.addressof(key_buffer), ctypes.addressof(value_buffer)
        try:
            _bpf(MAP_UPDATE_BATCH, _BATCH.pack(0, 0, *where, count, self.fd, 0, 0))
        except OSError as cause:
            if cause.errno not in _NO_BATCH:
                raise
            log.debug("%s is written entry by entry: the kernel has no batches for it", self)
            return False
        return True

    def remove(self, keys: Iterable[bytes]) -> None:
        """Remove entries; one that is not there is success."""
        try:
            for key in keys:
                with suppress(FileNotFoundError):
                    self._one(MAP_DELETE_ELEM, key)
        except OSError as cause:
            raise _error("remove from", self, cause) from cause

    def _one(self, command: int, key: bytes, value: bytes = b"") -> None:
        """Do something with one entry. Raises OSError."""
        key_buffer, value_buffer = (ctypes.create_string_buffer(raw, len(raw) or 1) for raw in (key, value))
        value_at = ctypes.addressof(value_buffer) if value else 0
        _bpf(command, _ELEMENT.pack(self.fd, ctypes.addressof(key_buffer), value_at, 0))

    def summed(self, key: bytes, form: struct.Struct) -> tuple[int, ...]:
        """Return the sums over all processors of the numbers of a value, which is a multiple of 8 bytes long."""
        holder = ctypes.create_string_buffer(key, len(key))
        values = ctypes.create_string_buffer(self._value_bytes * PROCESSORS)
        attributes = _ELEMENT.pack(self.fd, ctypes.addressof(holder), ctypes.addressof(values), 0)
        try:
            _bpf(MAP_LOOKUP_ELEM, attributes)
        except OSError as cause:
            raise _error("read", self, cause) from cause
        return tuple(sum(column) for column in zip(*form.iter_unpack(values), strict=True))


@dataclass(frozen=True, slots=True)
class Program:
    """A loaded program: its descriptor, and the number by which the kernel shows it."""

    fd: int
    number: int

    def close(self) -> None:
        """Close the descriptor; where it is attached it goes on."""
        os.close(self.fd)


def linked(program: Bytecode, maps: Mapping[str, int]) -> bytes:
    """Return the code with the descriptors of its maps. Pure."""
    code = bytearray(program.code)
    for places, pseudo in ((program.maps, PSEUDO_MAP_FD), (program.values, PSEUDO_MAP_VALUE)):
        for index, name in places.items():
            at = index * INSTRUCTION_BYTES
            operation, registers, offset, _ = _INSTRUCTION.unpack_from(code, at)
            # The destination is the lower half on little-endian machines.
            registers = registers & 0x0F | pseudo << 4 if sys.byteorder == "little" else registers & 0xF0 | pseudo
            _INSTRUCTION.pack_into(code, at, operation, registers, offset, maps[name])
    return bytes(code)


def load(name: str, program: Bytecode, maps: Sequence[Map]) -> Program:
    """Load a classifier for tc. Raises KernelError with the verifier's last words."""
    code = linked(program, {one.name: one.fd for one in maps})
    try:
        fd = _load(name, code, None)
    except OSError as cause:
        if cause.errno not in (errno.EINVAL, errno.EACCES, errno.E2BIG):
            raise _error("load", f"bpf program {name}", cause) from cause
        raise _error("load", f"bpf program {name}", cause, _verifier_says(name, code)) from cause
    try:
        info = ctypes.create_string_buffer(_ID_AT + 4)
        _bpf(OBJ_GET_INFO_BY_FD, _INFO.pack(fd, len(info), ctypes.addressof(info)))
        return Program(fd, int(_FD.unpack_from(info, _ID_AT)[0]))
    except OSError as cause:
        os.close(fd)
        raise _error("read", f"bpf program {name}", cause) from cause


def _load(name: str, code: bytes, words: ctypes.Array[ctypes.c_char] | None) -> int:
    holder = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(LICENSE, len(LICENSE))
    spoken = (0, 0, 0) if words is None else (1, len(words), ctypes.addressof(words))
    where = ctypes.addressof(holder), ctypes.addressof(licence)
    count = len(code) // INSTRUCTION_BYTES
    attributes = _LOAD.pack(PROG_TYPE_SCHED_CLS, count, *where, *spoken, 0, 0, name.encode())
    for _ in range(ATTEMPTS - 1):
        with suppress(BlockingIOError):
            return _bpf(PROG_LOAD, attributes)
    return _bpf(PROG_LOAD, attributes)


def _verifier_says(name: str, code: bytes) -> str:
    """Have a refused program refused once more, with reasons; return the last ones."""
    words = ctypes.create_string_buffer(LOG_BYTES)
    with suppress(OSError):
        os.close(_load(name, code, words))
    lines = [line for line in words.value.decode(errors="replace").splitlines() if line]
    log.debug("the verifier on %s:\n%s", name, "\n".join(lines))
    reasons = [line for line in lines if not line.startswith("processed ")]
    return f"the verifier says: {' / '.join(reasons[-3:])}" if reasons else "the verifier says nothing"
