"""WireGuard devices and their peers, through generic netlink (linux/wireguard.h)."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import closing

from backends.dataplane.model import Change, Wireguard, WireguardPeer
from backends.kernel import wgnl
from backends.kernel.genl import NETLINK_GENERIC, number_of
from backends.kernel.roaming import Peers, Roaming
from backends.kernel.sockets import Encode, NetlinkSocket, Refusal, kernel_error
from subnet.errors import KernelError

NO_WIREGUARD = "the kernel has no WireGuard"


class WireguardDevices:
    """The devices of one network namespace, by index. Secrets never appear in errors.

    Sockets are short-lived: nothing is asked on a host without such devices.
    ``wall_clock`` returns Unix time, in which the kernel dates handshakes.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._roaming = Roaming()

    def settings(self, index: int, device: str) -> Wireguard | None:
        """Return port and keys of a device, None if it is gone. Raises KernelError."""
        with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
            family = number_of(channel, wgnl.FAMILY_NAME)
            try:
                answer = channel.first(wgnl.get_device(family, index), f"WireGuard device {device}") if family else None
            except KernelError as error:
                if error.errno != errno.ENODEV:
                    raise
                answer = None
        return wgnl.decode_device(*answer) if answer is not None else None

    def configure(self, index: int, device: str, wanted: Wireguard) -> None:
        """Set private key and port; peers stay. Raises KernelError."""
        with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
            family = _needed(channel, device)
            refused = channel.request([lambda sequence: wgnl.set_device(family, sequence, index, wanted)])
        for _, code, text in refused:
            raise kernel_error(f"set key and port {wanted.port} of", f"device {device}", code, text)

    def peers(self, index: int, device: str) -> Peers:
        """Return a device's peers, and those that do not answer. An endpoint that has moved shows as it was written."""
        with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
            family = _needed(channel, device)
            dump = channel.dump(wgnl.get_device(family, index), f"peers of {device}")
        return self._roaming.shown(index, wgnl.decode_peers(dump, device), self._wall_clock())

    def request(self, changes: Sequence[tuple[Change, int]]) -> list[Refusal]:
        """Make the changes of peers, at most a batch, each with its device's index; return those refused."""
        with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
            family = number_of(channel, wgnl.FAMILY_NAME)
            if not family:
                return [(position, errno.EOPNOTSUPP, NO_WIREGUARD) for position in range(len(changes))]
            refused = channel.request([self._encoder(family, change, index) for change, index in changes])
        self._roaming.note(changes, refused)
        return refused

    def _encoder(self, family: int, change: Change, index: int) -> Encode:
        peer = change.target
        with_endpoint = isinstance(peer, WireguardPeer) and self._roaming.to_write(index, peer)
        return lambda sequence: wgnl.set_peer(family, sequence, index, change, with_endpoint)


def _needed(channel: NetlinkSocket, device: str) -> int:
    family = number_of(channel, wgnl.FAMILY_NAME)
    if not family:
        raise kernel_error("find", f"WireGuard of device {device}", errno.EOPNOTSUPP, NO_WIREGUARD)
    return family
