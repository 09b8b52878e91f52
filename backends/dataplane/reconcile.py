"""Observe, compare, apply, note failures: the only place that changes what peers need."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from backends.dataplane.diff import apply_changes, blocked_routes, diff
from backends.dataplane.model import (
    Address,
    Change,
    DesiredState,
    FdbEntry,
    IpsecPolicy,
    KernelObject,
    Neighbour,
    ObservedState,
    Route,
    WireguardPeer,
)
from backends.dataplane.ports import Failure, Kernel, KernelEvent, ObjectSeen, Overflow
from backends.dataplane.table import Key, WantedTable, key_of
from subnet.report import Reporter

log = logging.getLogger(__name__)

VERBOSE_CHANGES = 20
"""Beyond so many changes at once they are counted, and listed at debug level only."""

PASSES = 3
SILENCE = "does not answer: keys or PSK differ, or UDP does not get through"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one convergence did.

    ``problems`` maps what is in trouble to the reason. ``refused``: the kernel
    did not take everything, so another attempt may help.
    """

    changed: int
    problems: dict[str, str]
    refused: bool


class _Record:
    """What the kernel holds, by key. More than one object of a key is somebody's doing, and gets repaired."""

    def __init__(self, observed: ObservedState) -> None:
        self._held: dict[Key, tuple[KernelObject, ...]] = {}
        self._store(_parts(observed))

    def _store(self, targets: Iterable[KernelObject]) -> None:
        for target in targets:
            key = key_of(target)
            self._held[key] = (*self._held.get(key, ()), target)

    def holds(self, target: KernelObject, gone: bool) -> bool:
        """Whether the record has what an event tells of. What is gone is known by its key alone:
        the kernel strips an entry (its MAC, say) before it removes it."""
        held = self._held.get(key_of(target), ())
        return bool(held) if gone else target in held

    def state(self, keys: Iterable[Key] | None = None) -> ObservedState:
        """Return what is held, of ``keys`` only if they are given."""
        listed = self._held.values() if keys is None else (self._held.get(key, ()) for key in keys)
        targets = [target for held in listed for target in held]
        return ObservedState(
            frozenset(t for t in targets if isinstance(t, Address)),
            frozenset(t for t in targets if isinstance(t, Neighbour)),
            frozenset(t for t in targets if isinstance(t, FdbEntry)),
            frozenset(t for t in targets if isinstance(t, Route)),
            frozenset(t for t in targets if isinstance(t, WireguardPeer)),
            frozenset(t for t in targets if isinstance(t, IpsecPolicy)),
        )

    def replace(self, keys: Iterable[Key], state: ObservedState) -> None:
        """Set what is held of these keys."""
        for key in keys:
            self._held.pop(key, None)
        self._store(_parts(state))


class Reconciler:
    """Keeps the kernel at the wanted state.

    Between comparisons it trusts its own record of what the kernel holds, so
    that a change costs no dump and only its own work; ``doubt`` makes the next
    convergence look at everything.
    """

    def __init__(self, kernel: Kernel, reporter: Reporter) -> None:
        self._kernel, self._reporter = kernel, reporter
        self._record: _Record | None = None
        self._indexes: dict[int, str] = {}
        self._table: WantedTable | None = None
        self._failed: dict[Key, str] = {}
        self._silent: dict[Key, WireguardPeer] = {}

    def doubt(self) -> None:
        """Forget the record; the next convergence observes the kernel."""
        self._record = None

    @property
    def doubtful(self) -> bool:
        """Whether the next convergence will observe the kernel."""
        return self._record is None

    def know_devices(self, indexes: Mapping[int, str]) -> None:
        """Tell which device indexes events mean; a changed index voids the record."""
        if indexes != self._indexes:
            self._indexes = dict(indexes)
            self.doubt()

    def contradicted(self, event: KernelEvent) -> bool:
        """Whether a notification says that the kernel no longer holds what the record says.

        Our own changes come back as notifications too, and agree with the record.
        """
        if isinstance(event, Overflow):
            return True
        if self._record is None or self._table is None or not isinstance(event, ObjectSeen):
            return False
        target = replace(event.target, device=self._indexes.get(event.index, ""))
        if isinstance(target, Route) and target.device not in self._table.base.devices:
            # Routes of other devices come and go in thousands; only those at the place of ours matter.
            return key_of(target) in self._table.objects and self._record.holds(target, event.gone) == event.gone
        return target.device != "" and self._record.holds(target, event.gone) == event.gone

    def converge(self, table: WantedTable) -> Outcome:
        """Bring the kernel to what the table wants. Raises KernelError only if it cannot be observed.

        Another table than last time is compared whole.
        """
        if table is not self._table:
            self._table = table
            self.doubt()
        keys = None
        if self._record is None:
            observed = self._kernel.observe(table.base.devices)
            record = _Record(observed)
            self._failed.clear()
            self._hear(observed.silent)
        else:
            record, keys = self._record, table.dirty | self._failed.keys()
        self._record = None  # an exception on the way leaves doubt
        desired = table.desired(keys)
        before = record.state(keys)
        after, failures, changed = self._apply(before, desired)
        blocked = blocked_routes(after, desired)
        for key in self._failed.keys() if keys is None else keys:
            self._failed.pop(key, None)
        for failure in failures:
            self._failed[key_of(failure.change.target)] = _explain(failure, record, desired)
        for wanted, theirs in blocked.items():
            self._failed[key_of(wanted)] = f"{wanted}: {theirs.destination} is a network of device {theirs.device}"
        record.replace({key_of(t) for t in (*_parts(before), *_parts(after))} | set(keys or ()), after)
        table.clean()
        self._record = record
        problems = {
            **table.problems,
            **{str(table.objects[k]): text for k, text in self._failed.items() if k in table.objects},
            **{str(p): f"{p} {SILENCE}" for key, p in self._silent.items() if key in table.objects},
        }
        self._report(problems)
        return Outcome(changed, problems, bool(self._failed))

    def _apply(self, held: ObservedState, desired: DesiredState) -> tuple[ObservedState, list[Failure], int]:
        failures: list[Failure] = []
        changed = 0
        for _ in range(PASSES):
            failed = {key_of(f.change.target) for f in failures}
            changes = [c for c in diff(held, desired) if key_of(c.target) not in failed]
            if not changes:
                break
            new_failures = self._kernel.apply(changes)
            refused = {f.change for f in new_failures}
            done = [c for c in changes if c not in refused]
            _log_changes(done)
            changed += len(done)
            failures += new_failures
            held = apply_changes(held, done)
        return held, failures, changed

    def _hear(self, silent: Iterable[WireguardPeer]) -> None:
        """Note which peers do not answer, and tell of those that do again."""
        before, self._silent = self._silent, {key_of(peer): peer for peer in silent}
        for key in before.keys() - self._silent.keys():
            self._reporter.solved(str(before[key]), f"{before[key]} answers")

    def _report(self, problems: Mapping[str, str]) -> None:
        for topic, text in problems.items():
            self._reporter.problem(topic, text)
        self._reporter.forget_except(set(problems))


def _parts(state: ObservedState) -> list[KernelObject]:
    return [*state.addresses, *state.neighbours, *state.fdb, *state.peers, *state.policies, *state.routes]


def _log_changes(changes: list[Change]) -> None:
    level = logging.INFO if len(changes) <= VERBOSE_CHANGES else logging.DEBUG
    if log.isEnabledFor(level):
        for change in changes:
            log.log(level, "%s", change)
    if level == logging.DEBUG:
        added = sum(change.verb == "put" for change in changes)
        log.info("%d kernel entries added, %d removed", added, len(changes) - added)


def _explain(failure: Failure, record: _Record, desired: DesiredState) -> str:
    """The kernel's refusal, with the local network that overlaps a refused route, if there is one."""
    target, text = failure.change.target, str(failure.error)
    if isinstance(target, Route):
        for other in sorted(record.state().routes, key=str):
            same = other.destination.version == target.destination.version
            if (
                same
                and other.device not in desired.devices
                and other.destination.prefixlen > 0
                and other.destination.overlaps(target.destination)
            ):
                return f"{text}; it overlaps {other.destination} of device {other.device}"
    return text
