"""The pump in Python, for hosts where the native one was not built.

Correct first; one message per run of equal packets (UDP_SEGMENT, UDP_GRO)
keeps it usable.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping
from ipaddress import IPv4Address, IPv6Address
from typing import Final, Protocol

from backends.kernel.tun import Tun
from backends.udp import packet, packet6
from backends.udp.api import COUNTERS, DEVICE_GONE, ICMP_PER_SECOND, SEND_WAIT_MS, Forwarding
from backends.udp.routes import Table
from backends.udp.wire import SOL_UDP, UDP_GRO, UDP_SEGMENT, Wire

ARENA_BYTES: Final = 256 << 10
LARGEST_BYTES: Final = 65535
LEAST_ROOM_BYTES: Final = 2048
SIZES_REMEMBERED: Final = 64
RECEIVED_AT_ONCE: Final = 16
SEGMENTS: Final = 64
"""Datagrams in one message (UDP_MAX_SEGMENTS of kernels before 6.9)."""
ORDINARY: Final = 0x45
"""First byte of an IPv4 packet without options."""
GLANCE: Final = struct.Struct("!BxHxxxxIxxxxI")
"""First byte, total length, the word of TTL, protocol and checksum, destination."""
WORD: Final = struct.Struct("!I")
WORD_AT: Final = 8
LIVES: Final = 0x02000000
"""The least such word whose TTL may lose one."""
AGES: Final = 0x00FFFF00
"""What is taken from the word: one from the TTL, while the checksum grows by 0x0100 (``packet.mended``)."""
CARRIES: Final = 0xFEFF
"""The least checksum that overflows then; 0xFFFF less is the same with its end-around carry."""
PAUSE_S: Final = 0.01

_FULL = frozenset({errno.EAGAIN, errno.ENOBUFS})
_UNSEGMENTED = frozenset({errno.EMSGSIZE, errno.EINVAL, errno.EIO, errno.EOPNOTSUPP})
"""Refusals of a message of many datagrams that a single one may not meet: larger than the link
takes, or a link or policy that cannot cut."""
_SIZE = struct.Struct("=H")
_INT = struct.Struct("=i")


def _slots(mtu_bytes: int) -> list[tuple[tuple[memoryview], memoryview, memoryview]]:
    """Return where the packets of a burst are read to: what readv(2) wants, the room, and a packet of full size."""
    each = max(mtu_bytes, LEAST_ROOM_BYTES)
    arena = memoryview(bytearray(max(ARENA_BYTES, each)))
    rooms = [arena[at : at + each] for at in range(0, len(arena) - each + 1, each)]
    return [((room,), room, room[:mtu_bytes]) for room in rooms]


class _Format(Protocol):
    """What differs between the families: the modules ``packet`` and ``packet6``."""

    def parse(self, packet: packet.Buffer, /) -> packet.Header | None: ...
    def decrement_ttl(self, packet: bytearray | memoryview, /) -> None: ...
    def may_answer(self, packet: packet.Buffer, header: packet.Header, /) -> bool: ...
    def icmp_error(
        self,
        kind: tuple[int, int],
        offender: packet.Buffer,
        header: packet.Header,
        source: int,
        mtu_bytes: int = 0,
        /,
    ) -> bytes: ...


_FORMAT: Final[Mapping[int, _Format]] = {4: packet, 6: packet6}


class _Run:
    """Packets to one next hop, all of one size but for the last, which may be shorter."""

    __slots__ = ("ended", "packets", "room", "size")

    def __init__(self, first: memoryview) -> None:
        self.size = len(first)
        self.room = min(SEGMENTS, packet.MAX_DATAGRAM_BYTES // self.size)
        """How many of full size fit into one message."""
        self.packets = [first]
        self.ended = False

    @property
    def bytes(self) -> int:
        """Return the length of all packets together."""
        return self.size * (len(self.packets) - 1) + len(self.packets[-1])

    def take(self, one: memoryview) -> bool:
        """Append a packet if it may follow."""
        size = len(one)
        if self.ended or size > self.size or len(self.packets) == SEGMENTS:
            return False
        if self.bytes + size > packet.MAX_DATAGRAM_BYTES:
            return False
        self.packets.append(one)
        self.ended = size < self.size
        return True


class PythonPump:
    """A ``Pump`` of the socket's family. TUN and socket stay the caller's, the TUN without vnet header; ``port`` is
    that of every peer.
    """

    def __init__(
        self, tun: Tun, wire: Wire, port: int, mtu_bytes: int, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._tun, self._wire, self._port, self._mtu_bytes = tun.fd, wire, port, mtu_bytes
        self._ip = _FORMAT[wire.family]
        self._address = IPv4Address if wire.family == 4 else IPv6Address
        self._ordinary = ORDINARY if wire.family == 4 else -1
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopped = False
        self._state = (Table(), Forwarding())
        self._senders: frozenset[str] | None = None
        self._count = dict.fromkeys(COUNTERS, 0)
        self._hops: dict[int, tuple[str, int]] = {}
        self._slots = _slots(mtu_bytes)
        self._datagrams = memoryview(bytearray(LARGEST_BYTES))
        self._cut: dict[int, list[memoryview]] = {}
        self._limit = _Limit(now)

    def __del__(self) -> None:
        os.close(self._wake)

    def run(self) -> None:
        """Carry packets; return after ``stop``."""
        poller = select.poll()
        for fd in (self._tun, self._wire.socket.fileno(), self._wake):
            poller.register(fd, select.POLLIN)
        while not self._stopped:
            moved = self._outward()
            if not self._inward() and not moved:
                for fd, _ in poller.poll():
                    if fd == self._wake:
                        os.eventfd_read(self._wake)

    def stop(self) -> None:
        """Let ``run`` return at once."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)

    def forward(self, forwarding: Forwarding) -> None:
        """Replace routes and addresses."""
        peers = forwarding.peers
        self._senders = None if peers is None else frozenset(str(self._address(peer)) for peer in peers)
        self._state = (Table(forwarding.ranges), forwarding)

    def stats(self) -> Mapping[str, int]:
        """Return the counters."""
        return dict(self._count)

    # -- TUN to socket ----------------------------------------------------

    def _outward(self) -> bool:
        """Send what waits at the TUN, up to one arena full; return whether there was anything."""
        tun, readv, glance, mend = self._tun, os.readv, GLANCE.unpack_from, WORD.pack_into
        hop_of, runs = self._state[0].hop, dict[int, _Run]()
        ordinary, usual_bytes, moved = self._ordinary, self._mtu_bytes, False
        for buffers, room, usual in self._slots:
            try:
                length = readv(tun, buffers)
            except BlockingIOError:
                break
            moved = True
            one = usual if length == usual_bytes else room[:length]
            # Almost every packet is whole, without options, and on its way to a peer.
            first, total, word, destination = glance(room)
            if first == ordinary and total == length >= packet.HEADER_BYTES and word >= LIVES:
                hop = hop_of(destination)
                if hop:
                    word -= AGES if word & 0xFFFF < CARRIES else AGES + 0xFFFF
                    mend(one, WORD_AT, word)
                    run = runs.get(hop)
                    if run is not None and length == run.size and len(run.packets) < run.room and not run.ended:
                        run.packets.append(one)
                    else:
                        self._enqueue(hop, one, runs)
                    continue
            self._examine_outward(one, runs)
        for hop, run in runs.items():
            self._send(hop, run)
        return moved

    def _examine_outward(self, one: memoryview, runs: dict[int, _Run]) -> None:
        header = self._ip.parse(one)
        if header is None:
            self._count["malformed"] += 1
            return
        hop = self._state[0].hop(header.destination)
        if not hop:
            self._count["no_route"] += 1
            self._answer(packet.NET_UNREACHABLE, one, header, True)
        elif header.ttl <= 1:
            self._count["ttl_exceeded"] += 1
            self._answer(packet.TIME_EXCEEDED, one, header, True)
        else:
            self._ip.decrement_ttl(one)
            self._enqueue(hop, one[: header.total_bytes], runs)

    def _enqueue(self, hop: int, one: memoryview, runs: dict[int, _Run]) -> None:
        run = runs.get(hop)
        if run is None:
            runs[hop] = _Run(one)
        elif not run.take(one):
            self._send(hop, run)
            runs[hop] = _Run(one)

    def _send(self, hop: int, run: _Run) -> None:
        if len(run.packets) > 1 and self._wire.gso:
            control = [(SOL_UDP, UDP_SEGMENT, _SIZE.pack(run.size))]
            code = self._send_message(run.packets, control, hop)
            if not code:
                self._sent(len(run.packets), run.bytes)
                return
            if code not in _UNSEGMENTED:
                self._count["tx_dropped"] += len(run.packets)
                return
        for one in run.packets:
            code = self._send_message([one], [], hop)
            if not code:
                self._sent(1, len(one))
            elif code == errno.EMSGSIZE:
                self._too_big(one)
            else:
                self._count["tx_dropped"] += 1

    def _sent(self, packets: int, size: int) -> None:
        self._count["tx_packets"] += packets
        self._count["tx_bytes"] += size
        self._count["tx_messages"] += 1

    def _send_message(self, parts: list[memoryview], control: list[tuple[int, int, bytes]], hop: int) -> int:
        """Send one message; return 0 or the errno of the refusal."""
        target = self._hops.get(hop)
        if target is None:
            target = self._hops[hop] = (str(self._address(hop)), self._port)
        for attempt in range(2):
            try:
                self._wire.socket.sendmsg(parts, control, 0, target)
            except OSError as error:
                code = error.errno or errno.EIO
                if code not in _FULL or attempt:
                    return code
                poller = select.poll()
                poller.register(self._wire.socket, select.POLLOUT)
                poller.poll(SEND_WAIT_MS)
            else:
                break
        return 0

    def _too_big(self, one: memoryview) -> None:
        self._count["too_big"] += 1
        header = self._ip.parse(one)
        if header is not None and header.unfragmentable:
            mtu_bytes = min(self._mtu_bytes, packet.MAX_DATAGRAM_BYTES)
            self._answer(packet.FRAGMENTATION_NEEDED, one, header, True, mtu_bytes)

    # -- socket to TUN ----------------------------------------------------

    def _inward(self) -> bool:
        """Deliver what waits at the socket, up to a burst; return whether there was anything."""
        for received in range(RECEIVED_AT_ONCE):
            try:
                length, control, _, sender = self._wire.socket.recvmsg_into(
                    [self._datagrams], socket.CMSG_SPACE(_INT.size), socket.MSG_DONTWAIT
                )
            except BlockingIOError:
                return received > 0
            except OSError:
                # Out of memory, say. A readable socket that cannot be read must not become a busy loop.
                select.select([self._wake], [], [], PAUSE_S)
                return received > 0
            size = _segment_bytes(control) or length or 1
            if self._senders is None or sender[0] in self._senders:
                self._take_inward(self._datagrams[:length], size)
            else:
                self._count["unknown_sender"] += -(-length // size) or 1
        return True

    def _take_inward(self, received: memoryview, size: int) -> None:
        """Deliver the datagrams of one reception, each of ``size`` but for the last."""
        tun, write, glance, mend = self._tun, os.write, GLANCE.unpack_from, WORD.pack_into
        delivered, ordinary = 0, self._ordinary
        for one in self._datagrams_of(received, size):
            length = len(one)
            if length >= packet.HEADER_BYTES:
                first, total, word, _ = glance(one)
                # A wrong checksum stays wrong, and the kernel drops the packet for it.
                if first == ordinary and total == length and word >= LIVES:
                    word -= AGES if word & 0xFFFF < CARRIES else AGES + 0xFFFF
                    mend(one, WORD_AT, word)
                    try:
                        write(tun, one)
                    except OSError as error:
                        self._refused(error)
                    else:
                        delivered += 1
                    continue
            delivered += self._examine_inward(one)
        self._count["rx_packets"] += delivered
        self._count["rx_writes"] += delivered
        self._count["rx_bytes"] += len(received)

    def _datagrams_of(self, received: memoryview, size: int) -> list[memoryview]:
        """Return the datagrams of a reception. Most are as long as those before, and where those were."""
        whole, rest = divmod(len(received), size)
        cut = self._cut.get(size)
        if cut is None:
            if len(self._cut) >= SIZES_REMEMBERED:
                self._cut.clear()
            cut = [self._datagrams[at : at + size] for at in range(0, LARGEST_BYTES - size + 1, size)][:SEGMENTS]
            self._cut[size] = cut
        found = cut[:whole]
        if rest or not whole:
            found.append(received[whole * size :])
        return found

    def _examine_inward(self, one: memoryview) -> bool:
        header = self._ip.parse(one)
        if header is None:
            self._count["malformed"] += 1
            return False
        if header.ttl <= 1:
            self._count["ttl_exceeded"] += 1
            self._answer(packet.TIME_EXCEEDED, one, header, False)
            return False
        self._ip.decrement_ttl(one)
        return self._write(one[: header.total_bytes])

    def _write(self, one: packet.Buffer) -> bool:
        try:
            os.write(self._tun, one)
        except OSError as error:
            self._refused(error)
            return False
        return True

    def _refused(self, error: OSError) -> None:
        """Count a packet that was not written: the device is down, or the kernel finds fault with the packet."""
        if error.errno in DEVICE_GONE:
            raise error
        self._count["rx_dropped"] += 1

    # -- ICMP errors ------------------------------------------------------

    def _answer(
        self, kind: tuple[int, int], one: memoryview, header: packet.Header, local: bool, mtu_bytes: int = 0
    ) -> None:
        """Send an ICMP error; ``local``: the sender is on this side of the TUN."""
        forwarding = self._state[1]
        source = forwarding.overlay if local else forwarding.own
        if source and self._ip.may_answer(one, header) and self._limit.grants():
            error = self._ip.icmp_error(kind, one, header, source, mtu_bytes)
            self._count["icmp_sent"] += self._write(error) if local else self._reply(error)

    def _reply(self, error: bytes) -> bool:
        """Send an ICMP error to a remote sender, through the tunnel."""
        header = self._ip.parse(error)
        hop = self._state[0].hop(header.destination) if header is not None else 0
        return bool(hop) and not self._send_message([memoryview(error)], [], hop)


class _Limit:
    """A token bucket: ICMP_PER_SECOND on average, a tenth of it at once."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._tokens = ICMP_PER_SECOND / 10
        self._filled_at = now()

    def grants(self) -> bool:
        """Whether one more may be sent now."""
        now = self._now()
        self._tokens = min(ICMP_PER_SECOND / 10, self._tokens + (now - self._filled_at) * ICMP_PER_SECOND)
        self._filled_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


def _segment_bytes(control: list[tuple[int, int, bytes]]) -> int:
    """Return the size of the datagrams in a reception, 0 if it is a single one."""
    for level, kind, data in control:
        if level == SOL_UDP and kind == UDP_GRO:
            return int(_INT.unpack(data)[0])
    return 0
