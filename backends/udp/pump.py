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
RECEIVED_AT_ONCE: Final = 16
SEGMENTS: Final = 64
"""Datagrams in one message (UDP_MAX_SEGMENTS of kernels before 6.9)."""
ORDINARY: Final = 0x45
"""First byte of an IPv4 packet without options."""
PAUSE_S: Final = 0.01

_FULL = frozenset({errno.EAGAIN, errno.ENOBUFS})
_UNSEGMENTED = frozenset({errno.EMSGSIZE, errno.EINVAL, errno.EIO, errno.EOPNOTSUPP})
"""Refusals of a message of many datagrams that a single one may not meet: larger than the link
takes, or a link or policy that cannot cut."""
_SIZE = struct.Struct("=H")
_INT = struct.Struct("=i")


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
        self._arena = memoryview(bytearray(ARENA_BYTES))
        self._datagrams = memoryview(bytearray(LARGEST_BYTES))
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
        hop_of, runs = self._state[0].hop, dict[int, _Run]()
        glance, mend, mended = packet.GLANCE.unpack_from, packet.TTL.pack_into, packet.mended
        at, ordinary = 0, self._ordinary
        while at + LARGEST_BYTES <= ARENA_BYTES:
            room = self._arena[at:]
            try:
                length = os.readv(self._tun, (room,))
            except BlockingIOError:
                break
            at += length
            one = room[:length]
            # Almost every packet is whole, without options, and on its way to a peer.
            if length >= packet.HEADER_BYTES:
                first, total, ttl, protocol, value, destination = glance(one)
                if first == ordinary and total == length and ttl > 1 and (hop := hop_of(destination)):
                    mend(one, packet.TTL_AT, ttl - 1, protocol, mended(value))
                    run = runs.get(hop)
                    if run is not None and length == run.size and len(run.packets) < run.room and not run.ended:
                        run.packets.append(one)
                    else:
                        self._enqueue(hop, one, runs)
                    continue
            self._examine_outward(one, runs)
        for hop, run in runs.items():
            self._send(hop, run)
        return at > 0

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
        glance, mend, mended = packet.GLANCE.unpack_from, packet.TTL.pack_into, packet.mended
        delivered, ordinary = 0, self._ordinary
        for at in range(0, len(received) or 1, size):
            one = received[at : at + size]
            length = len(one)
            if length >= packet.HEADER_BYTES:
                first, total, ttl, protocol, value, _ = glance(one)
                # A wrong checksum stays wrong, and the kernel drops the packet for it.
                if first == ordinary and total == length and ttl > 1:
                    mend(one, packet.TTL_AT, ttl - 1, protocol, mended(value))
                    delivered += self._write(one)
                    continue
            delivered += self._examine_inward(one)
        self._count["rx_packets"] += delivered
        self._count["rx_writes"] += delivered
        self._count["rx_bytes"] += len(received)

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
            if error.errno in DEVICE_GONE:
                raise
            # The device is down, or the kernel finds fault with the packet.
            self._count["rx_dropped"] += 1
            return False
        return True

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
