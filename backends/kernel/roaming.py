"""Which endpoint of a WireGuard peer is wrong, which has only moved, and which peer does not answer.

A device sends to where a peer's last genuine datagram came from, and so follows
a peer behind a changing NAT; the endpoint that the peer's lease tells is where
that began. Putting it back would cut off a peer that works.
What cannot be decrypted is not answered: to a wrong key or preshared key only
silence bears witness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from backends.dataplane.model import Change, Endpoint, WireguardPeer
from backends.kernel.sockets import Refusal
from backends.kernel.wgnl import PeerSeen

Peers: TypeAlias = tuple[frozenset[WireguardPeer], frozenset[WireguardPeer]]
"""All peers of a device, and those that do not answer."""

SESSION_S = 180.0
"""Life of a session: a peer that sends has shaken hands within this time (WireGuard protocol, REJECT_AFTER_TIME)."""


PATIENCE_S = 15.0
"""In which three handshakes are tried (REKEY_TIMEOUT is 5 s): a peer that answers none of them will not answer."""


@dataclass(slots=True)
class _Memory:
    written: Endpoint | None = None
    """None: written by nobody, or by an earlier run."""
    sent_bytes: int = 0
    works: bool = False
    """Whether the endpoint that was last seen is in use: nothing to be replaced on a guess."""
    unanswered_s: float | None = None
    """Unix time since which it is sent to without having shaken hands."""

    def silent(self, now_s: float) -> bool:
        return self.unanswered_s is not None and now_s - self.unanswered_s >= PATIENCE_S


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
            if not alive:
                found[key].unanswered_s = now_s if lost and earlier.unanswered_s is None else earlier.unanswered_s
            counted.append(actual if written is None else written)
        self._memory = found
        return counted

    def shown(self, index: int, peers: Collection[PeerSeen], now_s: float) -> Peers:
        """Return the peers of a device, each with the endpoint that counts, and those of them that do not answer."""
        endpoints = self.observe(index, peers, now_s)
        shown = [replace(seen.peer, endpoint=e) for seen, e in zip(peers, endpoints, strict=True)]
        return frozenset(shown), frozenset(p for p in shown if self._memory[index, p.public_key].silent(now_s))

    def to_write(self, index: int, peer: WireguardPeer) -> bool:
        """Whether a put of this peer is to set its endpoint."""
        memory = self._memory.get((index, peer.public_key), _Memory())
        if memory.written is None:
            return not memory.works
        return memory.written != peer.endpoint

    def note(self, changes: Sequence[tuple[Change, int]], refused: Iterable[Refusal]) -> None:
        """Remember the changes of peers, each with its device's index, that were not refused."""
        failed = {position for position, _, _ in refused}
        for position, (change, index) in enumerate(changes):
            if position not in failed and isinstance(change.target, WireguardPeer):
                (self.wrote if change.verb == "put" else self.forget)(index, change.target)

    def wrote(self, index: int, peer: WireguardPeer) -> None:
        """A put of this peer succeeded."""
        self._memory.setdefault((index, peer.public_key), _Memory()).written = peer.endpoint

    def forget(self, index: int, peer: WireguardPeer) -> None:
        """The peer was deleted."""
        self._memory.pop((index, peer.public_key), None)
