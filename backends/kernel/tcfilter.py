"""Programs at the way in and out of devices: clsact and its bpf classifier (tc(8), tc-bpf(8), linux/pkt_cls.h).

An attached program outlives the process. Writing one over another loses no packet.
"""

from __future__ import annotations

import errno
import socket
import struct
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final

from backends.kernel.rtnl import (
    DELETE_FLAGS,
    DUMP_FLAGS,
    NLA_F_NESTED,
    NLM_F_ACK,
    NLM_F_CREATE,
    NLM_F_REQUEST,
    RTM_DELQDISC,
    RTM_DELTFILTER,
    attribute,
    attributes,
    message,
)
from backends.kernel.sockets import Encode, NetlinkSocket, kernel_error
from subnet.errors import KernelError

RTM_NEWQDISC, RTM_GETQDISC, RTM_NEWTFILTER, RTM_GETTFILTER = 36, 38, 44, 46
NLM_F_EXCL: Final = 0x200
CREATE_FLAGS: Final = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE
CLSACT_HANDLE, CLSACT_PARENT = 0xFFFF0000, 0xFFFFFFF1
IN, OUT = 0xFFFFFFF2, 0xFFFFFFF3
"""TC_H_CLSACT with TC_H_MIN_INGRESS or TC_H_MIN_EGRESS."""
TCA_KIND, TCA_OPTIONS = 1, 2
TCA_BPF_FD, TCA_BPF_NAME, TCA_BPF_FLAGS, TCA_BPF_ID = 6, 7, 8, 11
ACT_DIRECT: Final = 1
KIND: Final = b"bpf\0"
HOOKS: Final = frozenset({b"clsact\0", b"ingress\0"})
"""What filters are attached to; the second is older and has a way in only."""
ETH_P_IP: Final = 0x0800
PRIORITY, HANDLE = 142, 0x142
"""Our place among a device's filters."""
PREFIX: Final = "flanneld-"

_TCMSG = struct.Struct("=BxxxiIII")
_U32 = struct.Struct("=I")
_ABSENT: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.EINVAL, errno.EOPNOTSUPP})
"""What the kernel answers to the removal of a filter that is not there, by what else is not."""


@dataclass(frozen=True, slots=True)
class Hook:
    """The way into a device, or the way out of it (``egress``)."""

    index: int
    egress: bool

    def __str__(self) -> str:
        return f"{'egress' if self.egress else 'ingress'} of device index {self.index}"


@dataclass(frozen=True, slots=True)
class Attached:
    """A program of ours at a device. ``program`` is the number by which the kernel shows it."""

    hook: Hook
    name: str
    program: int

    def __str__(self) -> str:
        return f"tc filter {self.name} at {self.hook}"


def attached() -> tuple[Attached, ...]:
    """Return all programs of ours in this network namespace. Raises KernelError."""
    with closing(NetlinkSocket(socket.NETLINK_ROUTE)) as channel:
        found: list[Attached] = []
        for index in sorted(_hooked(channel)):
            for egress in (False, True):
                hook = Hook(index, egress)
                request = message(RTM_GETTFILTER, DUMP_FLAGS, 0, _place(hook))
                for buffer, header in channel.dump(request, f"tc filters at {hook}"):
                    body = attributes(buffer, header.start + _TCMSG.size, header.end)
                    one = _decode(hook, body)
                    if one is not None:
                        found.append(one)
        return tuple(found)


def _hooked(channel: NetlinkSocket) -> set[int]:
    """Return the devices that filters may be attached to."""
    found = set()
    for buffer, header in channel.dump(message(RTM_GETQDISC, DUMP_FLAGS, 0, _TCMSG.pack(0, 0, 0, 0, 0)), "qdiscs"):
        if attributes(buffer, header.start + _TCMSG.size, header.end).get(TCA_KIND) in HOOKS:
            found.add(int(_TCMSG.unpack_from(buffer, header.start)[1]))
    return found


def _decode(hook: Hook, body: dict[int, bytes]) -> Attached | None:
    raw = body.get(TCA_OPTIONS, b"")
    options = attributes(raw, 0, len(raw))
    name = options.get(TCA_BPF_NAME, b"").rstrip(b"\0").decode(errors="replace")
    if body.get(TCA_KIND) != KIND or not name.startswith(PREFIX) or TCA_BPF_ID not in options:
        return None
    return Attached(hook, name, int(_U32.unpack(options[TCA_BPF_ID])[0]))


def attach(hook: Hook, name: str, fd: int, number: int) -> Attached:
    """Put a loaded program, its descriptor and its number, where one of ours may be already.

    It takes the other's place at once. Raises KernelError.
    """
    options = attribute(TCA_BPF_FD, _U32.pack(fd)) + attribute(TCA_BPF_NAME, (PREFIX + name).encode() + b"\0")
    options += attribute(TCA_BPF_FLAGS, _U32.pack(ACT_DIRECT))
    body = _place(hook, PRIORITY, HANDLE) + attribute(TCA_KIND, KIND) + attribute(TCA_OPTIONS | NLA_F_NESTED, options)
    made = Attached(hook, PREFIX + name, number)
    with closing(NetlinkSocket(socket.NETLINK_ROUTE)) as channel:
        if hook.index not in _hooked(channel):
            room = partial(message, RTM_NEWQDISC, CREATE_FLAGS | NLM_F_EXCL, body=_clsact(hook.index))
            _request(channel, "make room for", made, room, "sch_ingress")
        _request(channel, "attach", made, partial(message, RTM_NEWTFILTER, CREATE_FLAGS, body=body), "cls_bpf")
    return made


def detach(one: Attached) -> None:
    """Remove a program, and what it was attached to if nothing else is; what is not there is success.

    Raises KernelError.
    """
    body = _place(one.hook, PRIORITY, HANDLE) + attribute(TCA_KIND, KIND)
    with closing(NetlinkSocket(socket.NETLINK_ROUTE)) as channel:
        _request(channel, "remove", one, partial(message, RTM_DELTFILTER, DELETE_FLAGS, body=body))
        if not _used(channel, one.hook.index):
            room = partial(message, RTM_DELQDISC, DELETE_FLAGS, body=_clsact(one.hook.index))
            _request(channel, "remove room of", one, room)


def _used(channel: NetlinkSocket, index: int) -> bool:
    """Whether anything is attached to a device."""
    requests = (message(RTM_GETTFILTER, DUMP_FLAGS, 0, _place(Hook(index, egress))) for egress in (False, True))
    return any(channel.dump(request, f"tc filters of device index {index}") for request in requests)


def _place(hook: Hook, priority: int = 0, handle: int = 0) -> bytes:
    protocol = socket.htons(ETH_P_IP) if priority else 0
    return _TCMSG.pack(0, hook.index, handle, OUT if hook.egress else IN, priority << 16 | protocol)


def _clsact(index: int) -> bytes:
    return _TCMSG.pack(0, index, CLSACT_HANDLE, CLSACT_PARENT, 0) + attribute(TCA_KIND, b"clsact\0")


def _request(channel: NetlinkSocket, verb: str, what: Attached, encode: Encode, module: str = "") -> None:
    """Make one request. Without ``module`` it is a removal, which succeeds if nothing is there. Raises KernelError."""
    for _, code, text in channel.request([encode]):
        if module and code in (errno.ENOENT, errno.EOPNOTSUPP):
            raise KernelError(verb, what, code, f"the kernel has no {module}; load it with: modprobe {module}")
        if module or code not in _ABSENT:
            raise kernel_error(verb, what, code, text)
