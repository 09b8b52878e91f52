"""Observe, compare, apply, note failures: the only place that changes what peers need."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from backends.dataplane.diff import apply_changes, blocked_routes, diff
from backends.dataplane.model import (
    Change,
    DesiredState,
    KernelObject,
    ObservedState,
    Route,
    WireguardPeer,
)
from backends.dataplane.packed import FDB, NEIGHBOUR, ROUTE, Entries, Key, observed_state, packed_state
from backends.dataplane.ports import Failure, Kernel, KernelEvent, ObjectSeen, Overflow
from backends.dataplane.record import Record, Sight
from backends.dataplane.table import WantedTable
from subnet.report import Reporter

log = logging.getLogger(__name__)

VERBOSE_CHANGES = 20
"""Beyond so many changes at once they are counted, and listed at debug level only."""

PASSES = 3
SILENCE = "does not answer: keys or PSK differ, or UDP does not get through"
MANY = 64
"""So many new entries are written without a look at each of them."""
PUT_ORDER = (NEIGHBOUR, FDB, ROUTE)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one convergence did.

    ``problems`` maps what is in trouble to the reason. ``refused``: the kernel
    did not take everything, so another attempt may help.
    """

    changed: int
    problems: dict[str, str]
    refused: bool


class Reconciler:
    """Keeps the kernel at the wanted state.

    Between comparisons it trusts its own record of what the kernel holds, so
    that a change costs no dump and only its own work; ``doubt`` makes the next
    convergence look at everything.
    """

    def __init__(self, kernel: Kernel, reporter: Reporter) -> None:
        self._kernel, self._reporter = kernel, reporter
        self._record: Record | None = None
        """None: it is in doubt."""
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
        packer = self._table.packer
        key, value = packer.entry(target)
        held = self._record.get(key)
        if event.gone:
            # It is known by its key alone: the kernel strips an entry (its MAC, say) before it removes it.
            agrees = held is None
        else:
            # Equal bytes, as a rule; an object if its shape was learnt later than the other was packed.
            agrees = held is not None and (held == value or target in packer.targets(key, held))
        if isinstance(target, Route) and target.device not in self._table.base.devices:
            # Routes of other devices come and go in thousands; only those at the place of ours matter.
            return key in self._table.entries and not agrees
        return target.device != "" and not agrees

    def converge(self, table: WantedTable) -> Outcome:
        """Bring the kernel to what the table wants. Raises KernelError only if it cannot be observed.

        Another table than last time is compared whole.
        """
        if table is not self._table:
            self._table = table
            self.doubt()
        record, self._record = self._record, None  # an exception on the way leaves doubt
        if record is None:
            sight = Sight(table.entries)
            silent = self._kernel.survey(table.base.devices, table.packer, sight.see)
            record = Record(table, sight.differing())
            self._failed.clear()
            self._hear(table, silent)
            keys = record.unlike
        else:
            keys = table.dirty | self._failed.keys()
        for key in keys:
            self._failed.pop(key, None)
        done, written = self._put_many(table, record, keys)
        changed = written + self._change(table, record, keys - done)
        self._record = record
        problems = {
            **table.problems,
            **{str(table.target(k)): text for k, text in self._failed.items() if k in table.entries},
            **{str(p): f"{p} {SILENCE}" for key, p in self._silent.items() if key in table.entries},
        }
        self._report(problems)
        return Outcome(changed, problems, bool(self._failed))

    def _put_many(self, table: WantedTable, record: Record, keys: set[Key]) -> tuple[set[Key], int]:
        """Write what is new and in nobody's place, without looking at each.

        Returns the keys that are done with, and the number of entries written.
        """
        wanted = table.entries
        packed = [key for key in keys if isinstance(key, bytes) and isinstance(wanted.get(key), bytes)]
        absent = sorted(key for key in packed if record.get(key) is None)
        new: Entries = {key: wanted[key] for kind in PUT_ORDER for key in absent if key[:1] == kind}
        if len(new) < MANY:
            return set(), 0
        failures = self._kernel.put(new, table.packer)
        refused = {table.packer.key(failure.change.target): failure for failure in failures}
        self._note_failures(table, record, refused.values())
        written = new.keys() - refused.keys() if refused else new.keys()
        record.wrote(written)
        record.saw(refused.keys(), {})
        log.info("%d kernel entries added", len(written))
        return set(new), len(written)

    def _change(self, table: WantedTable, record: Record, keys: set[Key]) -> int:
        """Make everything right at these keys; return the number of changes."""
        packer, desired = table.packer, table.desired(keys)
        before = observed_state(packer, record.entries(keys))
        after, failures, changed = self._apply(before, desired)
        self._note_failures(table, record, failures)
        for wanted, theirs in blocked_routes(after, desired).items():
            text = f"{wanted}: {theirs.destination} is a network of device {theirs.device}"
            self._failed[packer.key(wanted)] = text
        held = packed_state(after, packer)
        record.saw(keys | held.keys(), held)
        return changed

    def _apply(self, held: ObservedState, desired: DesiredState) -> tuple[ObservedState, list[Failure], int]:
        failures: list[Failure] = []
        changed = 0
        for _ in range(PASSES):
            failed = {_place(f.change.target) for f in failures}
            changes = [c for c in diff(held, desired) if _place(c.target) not in failed]
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

    def _hear(self, table: WantedTable, silent: Iterable[WireguardPeer]) -> None:
        """Note which peers do not answer, and tell of those that do again."""
        before, self._silent = self._silent, {table.packer.key(peer): peer for peer in silent}
        for key in before.keys() - self._silent.keys():
            self._reporter.solved(str(before[key]), f"{before[key]} answers")

    def _note_failures(self, table: WantedTable, record: Record, failures: Iterable[Failure]) -> None:
        for failure in failures:
            text = _explain(failure, record, table.base.devices)
            self._failed[table.packer.key(failure.change.target)] = text

    def _report(self, problems: Mapping[str, str]) -> None:
        for topic, text in problems.items():
            self._reporter.problem(topic, text)
        self._reporter.forget_except(set(problems))


def _place(target: KernelObject) -> tuple[type, tuple[object, ...]]:
    return type(target), target.key


def _log_changes(changes: list[Change]) -> None:
    level = logging.INFO if len(changes) <= VERBOSE_CHANGES else logging.DEBUG
    if log.isEnabledFor(level):
        for change in changes:
            log.log(level, "%s", change)
    if level == logging.DEBUG:
        added = sum(change.verb == "put" for change in changes)
        log.info("%d kernel entries added, %d removed", added, len(changes) - added)


def _explain(failure: Failure, record: Record, ours: frozenset[str]) -> str:
    """The kernel's refusal, with the local network that overlaps a refused route, if there is one."""
    target, text = failure.change.target, str(failure.error)
    if not isinstance(target, Route):
        return text
    for other in sorted(record.foreign_routes(), key=str):
        same = other.destination.version == target.destination.version
        if (
            same
            and other.device not in ours
            and other.destination.prefixlen > 0
            and other.destination.overlaps(target.destination)
        ):
            return f"{text}; it overlaps {other.destination} of device {other.device}"
    return text
