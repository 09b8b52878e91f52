"""The wanted kernel state, kept by peer, so that one peer's change costs one peer's work."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Set
from dataclasses import replace
from typing import TypeAlias

from backends.dataplane.model import (
    Address,
    DesiredState,
    FdbEntry,
    IpsecPolicy,
    KernelObject,
    Neighbour,
    Route,
    WireguardPeer,
)
from backends.dataplane.packed import Entries, Key, Packer, Value

Problems: TypeAlias = tuple[tuple[str, str], ...]
Name: TypeAlias = Hashable
"""Of a peer; what is told of it, too."""


def objects_of(state: DesiredState) -> list[KernelObject]:
    """Return everything a state wants."""
    return [*state.addresses, *state.neighbours, *state.fdb, *state.peers, *state.policies, *state.routes]


def restricted(template: DesiredState, targets: Iterable[KernelObject]) -> DesiredState:
    """Return the template with these objects and no others."""
    listed = list(targets)
    return replace(
        template,
        addresses=frozenset(t for t in listed if isinstance(t, Address)),
        neighbours=frozenset(t for t in listed if isinstance(t, Neighbour)),
        fdb=frozenset(t for t in listed if isinstance(t, FdbEntry)),
        routes=frozenset(t for t in listed if isinstance(t, Route)),
        peers=frozenset(t for t in listed if isinstance(t, WireguardPeer)),
        policies=frozenset(t for t in listed if isinstance(t, IpsecPolicy)),
    )


Rank: TypeAlias = tuple[int, str]
Peer: TypeAlias = tuple[int, str, *tuple[Key, ...]]
"""Revision and key of the lease, and the keys of what is wanted for it. Of two peers that want one, the older wins."""


class WantedTable:
    """Base state plus the entries of every peer.

    A peer gets all its entries or none: one for which another, older peer holds
    another entry under the same key (two nodes that announce one MAC, say)
    waits until that one goes. Equal entries are shared: a node that moved to
    another subnet has two leases for a while.
    """

    def __init__(self, base: DesiredState) -> None:
        self.base = base
        self.packer = Packer(base.devices)
        self.entries: Entries = {}
        """All that is wanted. One value per key."""
        self._before: dict[Key, Value | None] = {}
        """What was wanted at the last ``clean``, of the keys touched since; None: nothing."""
        self._peers: dict[Name, Peer] = {}
        self._waiting: dict[Name, Entries] = {}
        """What the peers want that cannot have it now."""
        self._claims: dict[Key, Name | frozenset[Name]] = {}
        """Who wants a key: one, as a rule."""
        self._problems: dict[Name, Problems] = {}
        """Of each peer's own entries."""
        self._losses: dict[Name, Problems] = {}
        """Why peers wait."""
        for target in objects_of(base):
            self._set(*self.packer.learnt(target))
        self._shared = dict(self.entries)

    @property
    def dirty(self) -> Set[Key]:
        """Return the keys touched since ``clean``."""
        return self._before.keys()

    def before(self, key: Key) -> Value | None:
        """Return what was wanted when the key was last clean, None for nothing."""
        return self._before[key] if key in self._before else self.entries.get(key)

    def clean(self) -> None:
        """Forget what was touched: it has been dealt with."""
        self._before = {}

    def settle(self, keys: Collection[Key]) -> None:
        """Forget that these keys were touched."""
        if len(keys) < len(self._before):
            for key in keys:
                self._before.pop(key, None)
        else:
            self._before = {key: value for key, value in self._before.items() if key not in keys}

    def put(self, name: Name, rank: Rank, state: DesiredState) -> None:
        """Set the entries of peer ``name``: those of ``state`` that the base has not.

        ``rank`` orders peers by age: revision and key of the lease.
        """
        self.put_objects(name, rank, objects_of(state), state.problems)

    def put_objects(self, name: Name, rank: Rank, targets: Iterable[KernelObject], problems: Problems = ()) -> None:
        """Do what ``put`` does, for who has no state at hand."""
        wanted = self._packed(targets)
        earlier = self._peers.get(name)
        if earlier is None and self._claims.keys().isdisjoint(wanted):
            # New, and nobody else wants any of this: the usual case.
            self._peers[name] = _peer(rank, wanted)
            self._claims.update(dict.fromkeys(wanted, name))
            for key in wanted:
                self._before.setdefault(key, self.entries.get(key))
            self.entries.update(wanted)
            if problems:
                self._problems[name] = problems
            return
        same = earlier is not None and earlier[:2] == rank and wanted == self._wish(name, earlier)
        if same and self._problems.get(name, ()) == problems:
            return
        keys = self._detach(name)
        self._peers[name] = _peer(rank, wanted)
        if problems:
            self._problems[name] = problems
        gone = keys - wanted.keys()
        if self._claim(name, wanted) or any(key in self._claims for key in gone):
            self._waiting[name] = wanted
            self._settle(keys | wanted.keys())
            return
        for key in gone:
            self._unset(key)
        for key, value in wanted.items():
            self._set(key, value)

    def remove(self, name: Name) -> None:
        """Remove the entries of a peer; one that is not there is fine."""
        self._settle(self._detach(name))

    @property
    def problems(self) -> dict[str, str]:
        """Return what cannot be wanted, with the reason."""
        found = dict(self.base.problems)
        for listed in (*self._problems.values(), *self._losses.values()):
            found.update(listed)
        return found

    def desired(self, keys: Collection[Key] | None = None) -> DesiredState:
        """Return the wanted state, of ``keys`` only if they are given."""
        chosen = self.entries if keys is None else [key for key in keys if key in self.entries]
        return restricted(self.base, (self.target(key) for key in chosen))

    def target(self, key: Key) -> KernelObject:
        """Return the wanted object of a key. Raises KeyError if there is none."""
        return self.packer.targets(key, self.entries[key])[0]

    def _packed(self, targets: Iterable[KernelObject]) -> Entries:
        learnt, shared = self.packer.learnt, self._shared
        wanted: Entries = dict(learnt(target) for target in targets if not isinstance(target, Address))
        return {key: value for key, value in wanted.items() if shared.get(key) != value} if shared else wanted

    def _wish(self, name: Name, peer: Peer) -> Entries:
        return self._waiting[name] if name in self._waiting else {key: self.entries[key] for key in peer[2:]}

    def _claim(self, name: Name, keys: Iterable[Key]) -> bool:
        """Note who wants the keys; return whether somebody else wants one of them."""
        contested = False
        for key in keys:
            others = self._claims.get(key)
            if others is None:
                self._claims[key] = name
                continue
            contested = True
            self._claims[key] = frozenset({others, name} if not isinstance(others, frozenset) else others | {name})
        return contested

    def _detach(self, name: Name) -> set[Key]:
        """Withdraw a peer's wishes; return the keys that may be free now."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return set()
        self._problems.pop(name, None)
        self._losses.pop(name, None)
        self._waiting.pop(name, None)
        for key in peer[2:]:
            claims = self._claims.pop(key)
            if isinstance(claims, frozenset):
                rest = claims - {name}
                self._claims[key] = next(iter(rest)) if len(rest) == 1 else rest
        return set(peer[2:])

    def _claimants(self, key: Key) -> Collection[Name]:
        claims = self._claims.get(key, frozenset())
        return (claims,) if not isinstance(claims, frozenset) else claims

    def _settle(self, keys: set[Key]) -> None:
        """Decide anew for every peer whose fate hangs on one of these keys, the oldest first."""
        concerned = {name: self._wish(name, self._peers[name]) for name in self._component(keys)}
        held: dict[Key, tuple[Name, Value]] = {}
        touched = set(keys)
        for name in sorted(concerned, key=lambda name: (*self._peers[name][:2], str(name))):
            wish = concerned[name]
            touched |= wish.keys()
            taken = next((key for key, value in wish.items() if key in held and held[key][1] != value), None)
            self._losses.pop(name, None)
            self._waiting.pop(name, None)
            if taken is not None:
                rival = held[taken][0]
                what = _named(self.packer.targets(taken, held[taken][1])[0])
                self._losses[name] = ((str(name), f"{name} skipped: {what} is the one of {rival}, an older lease"),)
                self._waiting[name] = dict(wish)
            else:
                held.update({key: (name, value) for key, value in wish.items()})
        for key in touched:
            if key in held:
                self._set(key, held[key][1])
            else:
                self._unset(key)

    def _component(self, keys: set[Key]) -> set[Name]:
        """Return the peers that want one of the keys, or a key of such a peer, and so on."""
        concerned: set[Name] = set()
        seen: set[Key] = set()
        ahead = list(keys)
        while ahead:
            key = ahead.pop()
            if key in seen:
                continue
            seen.add(key)
            for name in self._claimants(key):
                if name not in concerned:
                    concerned.add(name)
                    ahead += self._peers[name][2:]
        return concerned

    def _set(self, key: Key, value: Value) -> None:
        held = self.entries.get(key)
        if held != value:
            self._before.setdefault(key, held)
            self.entries[key] = value

    def _unset(self, key: Key) -> None:
        if key in self._shared:
            self._set(key, self._shared[key])
        elif (held := self.entries.pop(key, None)) is not None:
            self._before.setdefault(key, held)


def _peer(rank: Rank, keys: Iterable[Key]) -> Peer:
    revision, lease = rank
    return revision, lease, *keys


def _named(target: KernelObject) -> str:
    match target:
        case FdbEntry():
            return f"VtepMAC {target.mac}"
        case WireguardPeer():
            return f"PublicKey {target.public_key}"
        case _:
            return str(target)
