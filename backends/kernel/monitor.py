"""Listens to the kernel's notifications and hands them on.

Changes made through our own sockets are not even delivered where the kernel
tells whose they are; the others are recognised by the reader's record.
"""

from __future__ import annotations

import array
import errno
import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from backends.dataplane.ports import KernelEvent, Overflow
from backends.kernel import nexthops, rtnl

log = logging.getLogger(__name__)

RTMGRP_LINK, RTMGRP_NEIGH, RTMGRP_TC = 0x1, 0x4, 0x8
RTMGRP_IPV4_IFADDR, RTMGRP_IPV4_ROUTE = 0x10, 0x40
RTMGRP_IPV6_IFADDR, RTMGRP_IPV6_ROUTE = 0x100, 0x400
RTMGRP_NEXTHOP = 1 << 31
"""Bit of RTNLGRP_NEXTHOP, 32; a kernel that has no such group passes it over."""
GROUPS = (
    RTMGRP_LINK
    | RTMGRP_NEIGH
    | RTMGRP_TC
    | RTMGRP_IPV4_IFADDR
    | RTMGRP_IPV4_ROUTE
    | RTMGRP_IPV6_IFADDR
    | RTMGRP_IPV6_ROUTE
    | RTMGRP_NEXTHOP
)
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 8 << 20
"""Room for about ten thousand notifications of 832 bytes each."""

SO_ATTACH_FILTER = 26
BPF_LOAD_WORD, BPF_JUMP_IF_EQUAL, BPF_RETURN = 0x20, 0x15, 0x06
"""linux/bpf_common.h: BPF_LD | BPF_W | BPF_ABS, BPF_JMP | BPF_JEQ | BPF_K, BPF_RET | BPF_K."""
PORT_AT = 12
"""Where a netlink header has the port id of whoever caused the message."""

Deliver = Callable[[Sequence[KernelEvent]], None]


class Monitor:
    """A thread that delivers kernel events in the order in which they happened."""

    def __init__(self, deliver: Deliver, own_ports: frozenset[int] = frozenset(), groups: int = GROUPS) -> None:
        self._deliver, self._own_ports = deliver, own_ports
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
        except PermissionError:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        if own_ports:
            # Where it cannot be had, messages are passed over here.
            with suppress(OSError):
                _keep_out(self._socket, own_ports)
        self._socket.bind((0, groups))
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.thread = threading.Thread(target=self._run, name="kernel-monitor", daemon=True)

    def start(self) -> None:
        """Begin to listen. The socket is bound already: what happens meanwhile is not lost."""
        self.thread.start()

    def close(self) -> None:
        """End the thread."""
        with suppress(OSError):
            os.write(self._wake_write, b"x")
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(1)

    def _run(self) -> None:
        with self._socket:
            while True:
                readable, _, _ = select.select([self._socket.fileno(), self._wake_read], [], [])
                if self._wake_read in readable:
                    return
                self._take()

    def _take(self) -> None:
        # Not in the loop, where the last events, maybe thousands, would be kept until the next come.
        if events := self._read():
            self._deliver(events)

    def _read(self) -> list[KernelEvent]:
        """Take everything that waits, so that a burst is delivered as one.

        Once some of it was lost the rest says nothing that is not looked at
        anyway, and is passed over: what comes too fast must not pile up here.
        """
        events: list[KernelEvent] = []
        lost = False
        while True:
            try:
                buffer = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return [Overflow()] if lost else events
            except OSError as cause:
                if cause.errno != errno.ENOBUFS:
                    raise
                log.debug("kernel notifications were lost")
                lost = True
                events.clear()
                continue
            for header in () if lost else rtnl.messages(buffer):
                if header.port and header.port in self._own_ports:
                    continue
                # Of an object that goes: the routes that named it are gone without a word.
                lost = lost or nexthops.was_ours(buffer, header)
                event = rtnl.decode_event(buffer, header)
                if event is not None:
                    events.append(event)


def _keep_out(listener: socket.socket, ports: frozenset[int]) -> None:
    """Have the kernel not deliver what these ports cause (socket(7), SO_ATTACH_FILTER). Raises OSError."""
    code = [(BPF_LOAD_WORD, 0, 0, PORT_AT)]
    for left, port in zip(range(len(ports), 0, -1), sorted(ports), strict=True):
        # Behind the comparisons left stands the answer for all others. Words are loaded in network order.
        code.append((BPF_JUMP_IF_EQUAL, left, 0, socket.htonl(port)))
    code += [(BPF_RETURN, 0, 0, 0xFFFFFFFF), (BPF_RETURN, 0, 0, 0)]
    program = array.array("B", b"".join(struct.pack("=HBBI", *step) for step in code))
    listener.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HP", len(code), program.buffer_info()[0]))
