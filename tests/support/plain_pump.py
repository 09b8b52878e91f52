"""A pump as upstream's (proxy_amd64.c): one packet per read, one per send, no offload of any kind.

The peer that every data path has to get along with. It shares no code with them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import IPv4Address, IPv4Network

from backends.kernel.tun import open_tun
from tests.support.netns import Namespace


class PlainPump:
    """Carries between a TUN and a socket of a namespace, in a thread, until closed."""

    def __init__(self, namespace: Namespace, local: str, port: int, mtu_bytes: int) -> None:
        self._socket = namespace.socket()
        self._socket.bind((local, port))
        self._socket.setblocking(False)
        with namespace.inside():
            self._tun = open_tun("flannel%d")
        self.device, self._port, self._mtu_bytes = self._tun.name, port, mtu_bytes
        self._routes: Mapping[IPv4Network, IPv4Address] = {}
        self._wake = os.eventfd(0)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="test-plain-pump")
        self._thread.start()

    def know(self, routes: Mapping[IPv4Network, IPv4Address]) -> None:
        """Replace the routes."""
        self._routes = dict(routes)

    def close(self) -> None:
        """End it; the TUN goes with it."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(10)
        self._socket.close()
        self._tun.close()
        os.close(self._wake)

    def _run(self) -> None:
        poller = select.poll()
        for fd in (self._tun.fd, self._socket.fileno(), self._wake):
            poller.register(fd, select.POLLIN)
        while not self._stopped:
            poller.poll()
            while self._outward() | self._inward():
                pass

    def _outward(self) -> bool:
        try:
            packet = bytearray(os.read(self._tun.fd, self._mtu_bytes))
        except BlockingIOError:
            return False
        if packet[0] >> 4 == 4 and len(packet) >= 20 and self._aged(packet):
            destination = IPv4Address(bytes(packet[16:20]))
            hop = next((hop for subnet, hop in self._routes.items() if destination in subnet), None)
            if hop is not None:
                with suppress(OSError):  # lost, as with upstream's
                    self._socket.sendto(packet, (str(hop), self._port))
        return True

    def _inward(self) -> bool:
        try:
            packet = bytearray(self._socket.recv(self._mtu_bytes, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return False
        if len(packet) >= 20 and self._aged(packet):
            with suppress(OSError):  # the kernel finds fault with it
                os.write(self._tun.fd, packet)
        return True

    @staticmethod
    def _aged(packet: bytearray) -> bool:
        """Take one from the TTL, and mend the checksum (RFC 1624 s3); whether the packet lives on."""
        packet[8] -= 1 if packet[8] else 0
        total = int.from_bytes(packet[10:12], "big") + 0x0100
        packet[10:12] = ((total & 0xFFFF) + (total >> 16)).to_bytes(2, "big")
        return packet[8] > 0
