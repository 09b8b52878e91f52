"""UDP datagrams with sequence numbers: how many were lost, and for how long."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

from flanneld.ctl.lab.netns import Namespace

_SEQUENCE = struct.Struct("!Q")


class Flow:
    """A steady one-way flow between two namespaces; starts at once, use as a context manager.

    ``stop`` (or leaving the context) ends it; the figures are final then.
    """

    def __init__(
        self,
        source: Namespace,
        destination: Namespace,
        address: str,
        *,
        rate_per_s: float = 200,
        size_bytes: int = 64,
        port: int = 4000,
    ) -> None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self.rate_per_s, self.size_bytes = rate_per_s, max(size_bytes, _SEQUENCE.size)
        self.target = (address, port)
        self.sent_at: list[float] = []
        self.received_at: dict[int, float] = {}
        self._stop = threading.Event()
        self._receiver = destination.open_socket(family, socket.SOCK_DGRAM)
        self._receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self._receiver.bind(self.target)
        self._receiver.settimeout(0.2)
        self._sender = source.open_socket(family, socket.SOCK_DGRAM)
        self._threads = [
            threading.Thread(target=body, name=f"flow-{name}-{address}", daemon=True)
            for name, body in (("receive", self._receive), ("send", self._send))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Flow:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def sent(self) -> int:
        """Return how many datagrams were sent; a mark for ``lost`` and ``outage_s``."""
        return len(self.sent_at)

    def flowing(self, within_s: float = 0.5) -> bool:
        """Whether a datagram arrived in the last ``within_s``."""
        newest = max(self.received_at.copy().values(), default=0.0)
        return time.monotonic() - newest < within_s

    def stop(self) -> None:
        """End the flow and wait for the last datagrams."""
        if self._stop.is_set():
            return
        self._stop.set()
        for thread in reversed(self._threads):
            thread.join()
        self._receiver.close()
        self._sender.close()

    def lost(self, first: int = 0) -> int:
        """Return how many datagrams, from number ``first`` on, did not arrive."""
        return sum(n not in self.received_at for n in range(first, self.sent))

    def outage_s(self, first: int = 0) -> float:
        """Return the longest time, from number ``first`` on, in which everything sent was lost."""
        longest, since = 0.0, None
        for number in range(first, self.sent):
            at = self.sent_at[number]
            if number not in self.received_at:
                since = at if since is None else since
                longest = max(longest, at - since + 1 / self.rate_per_s)
            else:
                since = None
        return longest

    def _send(self) -> None:
        began, number = time.monotonic(), 0
        while not self._stop.wait(max(0.0, began + number / self.rate_per_s - time.monotonic())):
            self.sent_at.append(time.monotonic())
            # No route is a lost datagram like any other.
            with contextlib.suppress(OSError):
                self._sender.sendto(_SEQUENCE.pack(number).ljust(self.size_bytes, b"."), self.target)
            number += 1

    def _receive(self) -> None:
        while True:
            try:
                data = self._receiver.recv(65536)
            except TimeoutError:
                if self._stop.is_set():
                    return
                continue
            if len(data) >= _SEQUENCE.size:
                self.received_at.setdefault(_SEQUENCE.unpack_from(data)[0], time.monotonic())
