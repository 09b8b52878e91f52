"""The wanted kernel state, kept by peer, so that one peer's change costs one peer's work."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
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

Key: TypeAlias = tuple[type, tuple[object, ...]]
"""Kind of an object and what the kernel replaces by: two objects of one key cannot both be there."""


def key_of(target: KernelObject) -> Key:
    """Return the key of an object."""
    return type(target), target.key


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


@dataclass(frozen=True, slots=True, order=True)
class _Claim:
    """A peer's wish for its entries: the older peer (``rank``) wins what two of them want."""

    rank: tuple[int, str]
    name: str


class WantedTable:
    """Base state plus the entries of every peer.

    A peer gets all its entries or none: one whose entry another, older peer
    holds under the same key (two nodes that announce one MAC, say) waits until
    that one goes. ``dirty`` holds the keys touched since ``clean``.
    """

    def __init__(self, base: DesiredState) -> None:
        self.base = base
        self._shared = frozenset(objects_of(base))
        self.dirty: set[Key] = set()
        self.objects: dict[Key, KernelObject] = {}
        self._entries: dict[str, tuple[_Claim, tuple[KernelObject, ...], tuple[tuple[str, str], ...]]] = {}
        self._claims: dict[Key, set[_Claim]] = {}
        self._problems: dict[str, tuple[tuple[str, str], ...]] = {}
        for target in objects_of(base):
            self._set(key_of(target), target)

    def clean(self) -> None:
        """Forget what was touched: it has been dealt with."""
        self.dirty.clear()

    def put(self, name: str, rank: tuple[int, str], state: DesiredState) -> None:
        """Set the entries of peer ``name``: those of ``state`` that the base has not.

        ``rank`` orders peers by age: revision and key of the lease.
        """
        entries = tuple(t for t in objects_of(state) if t not in self._shared and not isinstance(t, Address))
        claim = _Claim(rank, name)
        if self._entries.get(name) == (claim, entries, state.problems):
            return
        keys = self._detach(name)
        self._entries[name] = claim, entries, state.problems
        if state.problems:
            self._problems[name] = state.problems
        by_key = {key_of(target): target for target in entries}
        alone = True
        for key in by_key:
            claims = self._claims.setdefault(key, set())
            claims.add(claim)
            alone = alone and len(claims) == 1
        if alone and not any(key in self._claims for key in keys - by_key.keys()):
            # Nobody else wants any of this: the usual case.
            for key in keys | by_key.keys():
                self._set(key, by_key.get(key))
        else:
            self._settle(keys | by_key.keys())

    def remove(self, name: str) -> None:
        """Remove the entries of a peer; one that is not there is fine."""
        self._settle(self._detach(name))

    def _detach(self, name: str) -> set[Key]:
        """Withdraw a peer's wishes; return the keys that may be free now."""
        self._problems.pop(name, None)
        if name not in self._entries:
            return set()
        claim, entries, _ = self._entries.pop(name)
        keys = {key_of(target) for target in entries}
        for key in keys:
            self._claims[key].discard(claim)
            if not self._claims[key]:
                del self._claims[key]
        return keys

    @property
    def problems(self) -> dict[str, str]:
        """Return what cannot be wanted, with the reason."""
        found = dict(self.base.problems)
        for listed in self._problems.values():
            found.update(listed)
        return found

    def desired(self, keys: Collection[Key] | None = None) -> DesiredState:
        """Return the wanted state, of ``keys`` only if they are given."""
        if keys is None:
            return restricted(self.base, self.objects.values())
        return restricted(self.base, (self.objects[key] for key in keys if key in self.objects))

    def _settle(self, keys: set[Key]) -> None:
        """Decide anew for every peer whose fate hangs on one of these keys, the oldest first."""
        concerned = self._component(keys)
        holder: dict[Key, tuple[_Claim, KernelObject]] = {}
        touched = set(keys)
        for claim in sorted(concerned):
            _, entries, problems = self._entries[claim.name]
            by_key = {key_of(target): target for target in entries}
            touched |= by_key.keys()
            taken = [key for key in by_key if key in holder]
            if taken:
                rival, target = holder[taken[0]]
                text = f"{claim.name} skipped: {_named(target)} is the one of {rival.name}, an older lease"
                problems = (*problems, (claim.name, text))
            else:
                holder.update({key: (claim, target) for key, target in by_key.items()})
            if problems:
                self._problems[claim.name] = problems
            else:
                self._problems.pop(claim.name, None)
        for key in touched:
            self._set(key, holder[key][1] if key in holder else None)

    def _component(self, keys: set[Key]) -> set[_Claim]:
        """Return the peers that want one of the keys, or a key of such a peer, and so on."""
        concerned: set[_Claim] = set()
        seen: set[Key] = set()
        ahead = list(keys)
        while ahead:
            key = ahead.pop()
            if key in seen:
                continue
            seen.add(key)
            for claim in self._claims.get(key, ()):
                if claim not in concerned:
                    concerned.add(claim)
                    ahead += [key_of(target) for target in self._entries[claim.name][1]]
        return concerned

    def _set(self, key: Key, target: KernelObject | None) -> None:
        if self.objects.get(key) == target:
            return
        if target is None:
            del self.objects[key]
        else:
            self.objects[key] = target
        self.dirty.add(key)


def _named(target: KernelObject) -> str:
    match target:
        case FdbEntry():
            return f"VtepMAC {target.mac}"
        case WireguardPeer():
            return f"PublicKey {target.public_key}"
        case _:
            return str(target)
