"""WireGuard in a process, ``wireguard-go``, where the kernel has none.

It makes a TUN device, carries its packets, and listens at a socket named after
the device; the device and the process end together. Sockets are found by path,
so two network namespaces with a device of one name need a mount namespace each.
"""

from __future__ import annotations

import errno
import logging
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Final

from backends.dataplane.model import Change, Wireguard, WireguardPeer
from backends.kernel import wguapi
from backends.kernel.roaming import Peers, Roaming
from backends.kernel.sockets import Refusal, kernel_error
from subnet.errors import KernelError

log = logging.getLogger(__name__)

PROGRAM: Final = "wireguard-go"
SOCKETS: Final = Path("/var/run/wireguard")
START_S: Final = 5.0
"""For the program to make its device and go to the background."""
ANSWER_S: Final = 5.0
GONE: Final = frozenset({errno.ENOENT, errno.ECONNREFUSED, errno.ECONNRESET, errno.EPIPE})
"""What a socket says whose program has ended, or ends at this moment."""
RECEIVE_BYTES: Final = 1 << 16


def installed() -> str | None:
    """Return where the program is, None if it is nowhere."""
    return shutil.which(PROGRAM)


class WireguardGo:
    """The devices that ``wireguard-go`` holds, by name. Secrets never appear in errors.

    ``wall_clock`` returns Unix time, in which handshakes are dated.
    """

    def __init__(self, wall_clock: Callable[[], float]) -> None:
        self._wall_clock = wall_clock
        self._roaming = Roaming()

    def holds(self, device: str) -> bool:
        """Whether a program listens at the control socket of that name: one that was killed leaves it behind."""
        try:
            self._connect(device).close()
        except KernelError as error:
            return error.errno not in GONE
        return True

    def create(self, device: str, program: str) -> None:
        """Start the program, which makes the device, and leave it alone: it outlives this one. Raises KernelError."""
        what = f"{program} {device}"
        try:
            done = subprocess.run(
                [program, device],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
                start_new_session=True,
            )
        except (OSError, subprocess.TimeoutExpired) as cause:
            raise KernelError("start", what, getattr(cause, "errno", None) or errno.ETIMEDOUT, str(cause)) from cause
        if done.returncode:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise KernelError("start", what, errno.EIO, f"ended with {done.returncode}: {said}")
        # Once in the background it sets the MTU again, and answers after that.
        self._get(device)
        log.warning("the kernel has no WireGuard: %s carries the packets of %s, more slowly", program, device)

    def settings(self, index: int, device: str) -> Wireguard | None:
        """Return port and keys of a device, None if it is gone. Raises KernelError."""
        try:
            return wguapi.device(self._get(device))
        except KernelError as error:
            if error.errno in GONE:
                return None
            raise

    def configure(self, index: int, device: str, wanted: Wireguard) -> None:
        """Set private key and port; peers stay. Raises KernelError."""
        held = self.settings(index, device)
        if wanted.port and (held is None or held.port != wanted.port):
            # The program takes its port when the device goes up, and a failure would show in its own log only.
            _check_free(wanted.port, device)
        operation = f"set key and port {wanted.port} of"
        with closing(self._connect(device)) as channel:
            code = _exchange(channel, wguapi.set_device(wanted), operation, device).errno
        if code:
            raise kernel_error(operation, f"device {device}", code)

    def peers(self, index: int, device: str) -> Peers:
        """Return a device's peers, and those that do not answer. An endpoint that has moved shows as it was written."""
        return self._roaming.shown(index, wguapi.peers(self._get(device), device), self._wall_clock())

    def request(self, changes: Sequence[tuple[Change, int]]) -> list[Refusal]:
        """Make the changes of peers, each with its device's index; return those refused."""
        refused: list[Refusal] = []
        for position, (change, index) in enumerate(changes):
            peer = change.target
            if not isinstance(peer, WireguardPeer):
                raise TypeError(f"{peer} is no peer")
            try:
                with closing(self._connect(peer.device)) as channel:
                    text = wguapi.set_peer(change, self._roaming.to_write(index, peer))
                    code = _exchange(channel, text, change.verb, peer.device).errno
            except KernelError as error:
                code = error.errno
            if code:
                refused.append((position, code, ""))
        self._roaming.note(changes, refused)
        return refused

    def _socket(self, device: str) -> Path:
        return SOCKETS / f"{device}.sock"

    def _connect(self, device: str) -> socket.socket:
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        channel.settimeout(ANSWER_S)
        try:
            channel.connect(str(self._socket(device)))
        except OSError as cause:
            channel.close()
            raise kernel_error("reach", f"{PROGRAM} of device {device}", cause.errno or errno.ETIMEDOUT) from cause
        return channel

    def _get(self, device: str) -> wguapi.Answer:
        with closing(self._connect(device)) as channel:
            answer = _exchange(channel, wguapi.GET, "read", device)
        if answer.errno:
            raise kernel_error("read", f"device {device}", answer.errno)
        return answer


def _exchange(channel: socket.socket, operation: bytes, verb: str, device: str) -> wguapi.Answer:
    """Send one operation and return its answer, which ends with an empty line. Raises KernelError."""
    said = b""
    try:
        channel.sendall(operation)
        while not said.endswith(b"\n\n"):
            part = channel.recv(RECEIVE_BYTES)
            if not part:
                raise kernel_error(verb, f"device {device}", errno.ECONNRESET, f"{PROGRAM} hung up")
            said += part
        return wguapi.parse(said.decode().rstrip("\n"))
    except OSError as cause:
        raise kernel_error(verb, f"device {device}", cause.errno or errno.ETIMEDOUT, PROGRAM) from cause
    except ValueError as cause:
        raise KernelError(verb, f"device {device}", errno.EPROTO, f"what {PROGRAM} said {cause}") from cause


def _check_free(port: int, device: str) -> None:
    """Raise KernelError if somebody else listens on the port."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind(("", port))
            except OSError as cause:
                if cause.errno == errno.EADDRINUSE:
                    raise kernel_error(f"set port {port} of", f"device {device}", errno.EADDRINUSE) from cause
