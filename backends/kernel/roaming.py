"""Which endpoint of a WireGuard peer is wrong, and which has only moved.

A device sends to where a peer's last genuine datagram came from, and so follows
a peer behind a changing NAT; the endpoint that the peer's lease tells is where
that began. Putting it back would cut off a peer that works.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from backends.dataplane.model import Endpoint, WireguardPeer
from backends.kernel.wgnl import PeerSeen

SESSION_S = 180.0
"""Life of a session: a peer that sends has shaken hands within this time (WireGuard protocol, REJECT_AFTER_TIME)."""


@dataclass(slots=True)
class _Memory:
    written: Endpoint | None = None
    """None: written by nobody, or by an earlier run."""
    sent_bytes: int = 0
    works: bool = False
    """Whether the endpoint that was last seen is in use: nothing to be replaced on a guess."""


class Roaming:
    """Remembers the endpoints written, by device index and public key."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, str], _Memory] = {}

    def observe(self, index: int, peers: Iterable[PeerSeen], now_s: float) -> list[Endpoint | None]:
        """Return for each peer of a device the endpoint that counts; forget peers that are gone.

        It is the one that was written as long as the one in use works or
        nothing is known against it, else the one in use. ``now_s`` is Unix time.
        """
        before, found = self._memory, {key: memory for key, memory in self._memory.items() if key[0] != index}
        counted: list[Endpoint | None] = []
        for seen in peers:
            key, actual = (index, seen.peer.public_key), seen.peer.endpoint
            earlier = before.get(key, _Memory(sent_bytes=seen.sent_bytes))
            alive = now_s - seen.handshake_s < SESSION_S
            # Idle peers do not shake hands; one that is sent to and has not for so long does not hear us.
            lost = not alive and seen.sent_bytes > earlier.sent_bytes
            written = None if lost or actual is None else earlier.written
            found[key] = _Memory(written, seen.sent_bytes, alive and actual is not None)
            counted.append(actual if written is None else written)
        self._memory = found
        return counted

    def to_write(self, index: int, peer: WireguardPeer) -> bool:
        """Whether a put of this peer is to set its endpoint."""
        memory = self._memory.get((index, peer.public_key), _Memory())
        if memory.written is None:
            return not memory.works
        return memory.written != peer.endpoint

    def wrote(self, index: int, peer: WireguardPeer) -> None:
        """A put of this peer succeeded."""
        self._memory.setdefault((index, peer.public_key), _Memory()).written = peer.endpoint

    def forget(self, index: int, peer: WireguardPeer) -> None:
        """The peer was deleted."""
        self._memory.pop((index, peer.public_key), None)
