"""The programs of data path bpf: what they are told, loaded, and attached to both devices."""

from __future__ import annotations

import logging
import struct
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

from backends.kernel import bpf, tcfilter
from backends.kernel.bpf import Map, MapKind, Program
from backends.kernel.tcfilter import Attached, Hook
from backends.udp.bpf.bytecode import PROGRAMS
from subnet.errors import KernelError
from subnet.model import IPAddress, IPNetwork

log = logging.getLogger(__name__)

MOST_LEASES, MOST_PEERS = 1 << 20, 1 << 16
"""A trie takes room as it grows; a hash has 16 bytes for each possible peer from the beginning."""
COUNTERS: Final = ("bpf_tx_packets", "bpf_tx_bytes", "bpf_rx_packets", "bpf_rx_bytes")

_SETTINGS = struct.Struct("=4sIII2sH")
_PREFIX = struct.Struct("=I4s")
_KEY = struct.Struct("=I")
_COUNT = struct.Struct("=QQ")


@dataclass(frozen=True, slots=True)
class Settings:
    """What the programs are told once: the local end, both devices by index, the TUN's MTU.

    ``allow_unknown``: datagrams are taken from addresses that are no peer's, too.
    """

    local: IPv4Address
    port: int
    external: int
    tun: int
    mtu_bytes: int
    allow_unknown: bool

    def packed(self) -> bytes:
        """Return them as the programs read them (``datapath.c``)."""
        port = self.port.to_bytes(2, "big")
        return _SETTINGS.pack(self.local.packed, self.external, self.tun, self.mtu_bytes, port, int(self.allow_unknown))

    def hooks(self) -> dict[str, Hook]:
        """Return where each program belongs."""
        return {"decap": Hook(self.external, False), "encap": Hook(self.tun, True)}


def lease_entries(table: Mapping[IPNetwork, IPAddress]) -> dict[bytes, bytes]:
    """Return the entries that say which subnet is behind which address."""
    return {_PREFIX.pack(n.prefixlen, n.network_address.packed): hop.packed for n, hop in table.items()}


def peer_entries(table: Mapping[IPNetwork, IPAddress]) -> dict[bytes, bytes]:
    """Return the entries that say which addresses datagrams are taken from."""
    return {hop.packed: b"\1" for hop in table.values()}


class Kept:
    """A map, and what it holds: only what differs is written."""

    def __init__(self, held: Map) -> None:
        self.map = held
        self._entries: dict[bytes, bytes] = {}

    def put(self, wanted: Mapping[bytes, bytes]) -> None:
        """Write what is new or other. Raises KernelError."""
        differing = {key: value for key, value in wanted.items() if self._entries.get(key) != value}
        if differing:
            self.map.put(differing)
            self._entries |= differing

    def drop_except(self, wanted: Mapping[bytes, bytes]) -> None:
        """Remove what is not wanted. Raises KernelError."""
        gone = [key for key in self._entries if key not in wanted]
        if gone:
            self.map.remove(gone)
            for key in gone:
                del self._entries[key]


class Programs:
    """Maps and programs of one overlay. Attached ones go on when this is closed."""

    def __init__(self) -> None:
        """Make the maps. Raises KernelError."""
        self._made: list[Map] = []
        self._settings: Settings | None = None
        self._loaded: dict[str, Program] = {}
        try:
            self._leases = Kept(self._map("leases", MapKind.LPM_TRIE, (_PREFIX.size, 4), MOST_LEASES))
            self._peers = Kept(self._map("peers", MapKind.HASH, (4, 1), MOST_PEERS))
            self._counts = self._map("counts", MapKind.PERCPU_ARRAY, (_KEY.size, _COUNT.size), 2)
        except KernelError:
            self.close()
            raise

    def _map(self, name: str, kind: MapKind, sizes: tuple[int, int], entries: int) -> Map:
        flags = bpf.F_NO_PREALLOC if kind in (MapKind.LPM_TRIE, MapKind.HASH) else 0
        made = Map(name, kind, sizes, entries, flags)
        self._made.append(made)
        return made

    def load(self, settings: Settings) -> None:
        """Have programs for these settings; those attached stay until ``attach``. Raises KernelError."""
        if settings == self._settings:
            return
        told = Map("settings", MapKind.ARRAY, (_KEY.size, _SETTINGS.size), 1, bpf.F_RDONLY_PROG)
        made: dict[str, Program] = {}
        try:
            told.put({_KEY.pack(0): settings.packed()})
            # The verifier takes what cannot change for constants.
            told.freeze()
            for name, code in PROGRAMS[sys.byteorder].items():
                made[name] = bpf.load(name, code, (*self._made, told))
        except KernelError:
            _close(made.values())
            raise
        finally:
            told.close()
        _close(self._loaded.values())
        self._settings, self._loaded = settings, made

    def know(self, table: Mapping[IPNetwork, IPAddress]) -> None:
        """Say which subnet is behind which address. Raises KernelError."""
        leases, peers = lease_entries(table), peer_entries(table)
        self._peers.put(peers)
        self._leases.put(leases)
        self._leases.drop_except(leases)
        self._peers.drop_except(peers)

    def at_work(self) -> bool:
        """Whether programs, those of an earlier run perhaps, are where they belong. Raises KernelError."""
        return self._settings is not None and self._hooks() <= {one.hook for one in tcfilter.attached()}

    def attach(self) -> list[Attached]:
        """Have the programs where they belong, in place of earlier ones; return what was not there.

        Raises KernelError.
        """
        if self._settings is None:
            return []
        there = {one.hook: one.program for one in tcfilter.attached()}
        # First the way in: who is sent to may answer at once.
        return [
            tcfilter.attach(hook, name, self._loaded[name].fd, self._loaded[name].number)
            for name, hook in self._settings.hooks().items()
            if there.get(hook) != self._loaded[name].number
        ]

    def detach(self) -> None:
        """Remove what is attached to both devices. Raises KernelError."""
        for one in tcfilter.attached():
            if one.hook in self._hooks():
                tcfilter.detach(one)

    def _hooks(self) -> set[Hook]:
        return set(self._settings.hooks().values()) if self._settings is not None else set()

    def stats(self) -> dict[str, int]:
        """Return what was carried since the maps were made. Raises KernelError."""
        numbers = [number for which in (0, 1) for number in self._counts.summed(_KEY.pack(which), _COUNT)]
        return dict(zip(COUNTERS, numbers, strict=True))

    def close(self) -> None:
        """Close all descriptors."""
        _close(self._loaded.values())
        _close(self._made)
        self._loaded, self._made, self._settings = {}, [], None


def _close(what: Iterable[Map | Program]) -> None:
    for one in what:
        with suppress(OSError):
            one.close()
