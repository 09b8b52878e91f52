"""Ports on which the kernel takes IPv4 packets out of UDP datagrams: "foo over UDP" (ip-fou(8), linux/fou.h)."""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import Final

from backends.kernel.genl import NETLINK_GENERIC, attributes_of, number_of, request
from backends.kernel.rtnl import AF_INET, DUMP_FLAGS, NLM_F_ACK, NLM_F_REQUEST, attribute
from backends.kernel.sockets import NetlinkSocket, kernel_error
from subnet.errors import KernelError

VERSION: Final = 1
FOU_CMD_ADD, FOU_CMD_DEL, FOU_CMD_GET = 1, 2, 3
FOU_ATTR_PORT, FOU_ATTR_AF, FOU_ATTR_IPPROTO, FOU_ATTR_TYPE, FOU_ATTR_LOCAL_V4 = 1, 2, 3, 4, 6
FOU_ENCAP_DIRECT: Final = 1
IPPROTO_IPIP: Final = 4

GONE: Final = frozenset({errno.EINVAL, errno.ENOENT})
"""What the kernel answers to the removal of a port that is not there, by its version."""

_PORT = struct.Struct("!H")


@dataclass(frozen=True, slots=True)
class FouPort:
    """Where IPv4 packets in UDP arrive. ``local`` 0.0.0.0: at every address."""

    local: IPv4Address
    port: int

    def __str__(self) -> str:
        return f"fou port {self.port} local {self.local} ipproto {IPPROTO_IPIP}"

    def covers(self, other: FouPort) -> bool:
        """Whether what is meant for the other port arrives here."""
        return self.port == other.port and (self.local.is_unspecified or self.local == other.local)


def ports() -> frozenset[FouPort]:
    """Return the ports of this network namespace that take IPv4 packets; none if the kernel has no FOU."""
    with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
        family = _family(channel)
        if not family:
            return frozenset()
        answers = channel.dump(request(family, VERSION, DUMP_FLAGS, 0, FOU_CMD_GET), "fou ports")
        found = (_decode(attributes_of(*answer)) for answer in answers)
        return frozenset(port for port in found if port is not None)


def add(port: FouPort) -> None:
    """Open a port; one that is open is success. Raises KernelError, with the remedy where there is one."""
    if port in ports():
        return
    with _channel(port) as (channel, family):
        _change(channel, family, FOU_CMD_ADD, port, "open")


def remove(port: FouPort) -> None:
    """Close a port; one that is not open is success. Raises KernelError."""
    with _channel(port) as (channel, family):
        _change(channel, family, FOU_CMD_DEL, port, "close")


@contextmanager
def _channel(port: FouPort) -> Iterator[tuple[NetlinkSocket, int]]:
    with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
        family = _family(channel)
        if not family:
            raise KernelError("open", port, errno.EOPNOTSUPP, "the kernel has no FOU; load it with: modprobe fou")
        yield channel, family


def _family(channel: NetlinkSocket) -> int:
    """Return the protocol's number; 0: the module is not loaded, and nothing loads it by itself."""
    return number_of(channel, "fou")


def _encode(port: FouPort) -> bytes:
    numbers = ((FOU_ATTR_AF, AF_INET), (FOU_ATTR_IPPROTO, IPPROTO_IPIP), (FOU_ATTR_TYPE, FOU_ENCAP_DIRECT))
    body = attribute(FOU_ATTR_PORT, _PORT.pack(port.port))
    body += b"".join(attribute(kind, bytes([value])) for kind, value in numbers)
    return body if port.local.is_unspecified else body + attribute(FOU_ATTR_LOCAL_V4, port.local.packed)


def _decode(said: dict[int, bytes]) -> FouPort | None:
    """Return the port, None for one of another family, protocol or header."""
    wanted = ((FOU_ATTR_AF, AF_INET), (FOU_ATTR_IPPROTO, IPPROTO_IPIP), (FOU_ATTR_TYPE, FOU_ENCAP_DIRECT))
    if FOU_ATTR_PORT not in said or any(said.get(kind) != bytes([value]) for kind, value in wanted):
        return None
    local = said.get(FOU_ATTR_LOCAL_V4, bytes(4))
    return FouPort(IPv4Address(local), int(_PORT.unpack(said[FOU_ATTR_PORT])[0]))


def _change(channel: NetlinkSocket, family: int, command: int, port: FouPort, verb: str) -> None:
    flags, body = NLM_F_REQUEST | NLM_F_ACK, _encode(port)
    expected = frozenset[int]() if command == FOU_CMD_ADD else GONE
    for _, code, text in channel.request([lambda sequence: request(family, VERSION, flags, sequence, command, body)]):
        if code == errno.EADDRINUSE:
            raise KernelError(verb, port, code, "the port is taken, perhaps by another flanneld")
        if code not in expected:
            raise kernel_error(verb, port, code, text)
