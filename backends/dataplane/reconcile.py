"""Observe, compare, apply, note failures: the only place that changes what peers need."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from backends.dataplane.diff import apply_changes, blocked_routes, diff
from backends.dataplane.model import Change, DesiredState, KernelObject, ObservedState, Route
from backends.dataplane.ports import Failure, Kernel, KernelEvent, ObjectSeen, Overflow
from subnet.report import Reporter

log = logging.getLogger(__name__)

VERBOSE_CHANGES = 20
"""Beyond so many changes at once they are counted, and listed at debug level only."""

PASSES = 3


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
    """Keeps the kernel at the desired state.

    Between comparisons it trusts its own record of what the kernel holds, so
    that an event costs no dump; ``doubt`` makes the next convergence look.
    """

    def __init__(self, kernel: Kernel, reporter: Reporter) -> None:
        self._kernel, self._reporter = kernel, reporter
        self._held: ObservedState | None = None
        self._held_keys: frozenset[object] | None = None
        self._indexes: dict[int, str] = {}
        self._devices: frozenset[str] = frozenset()
        self._route_keys: frozenset[object] = frozenset()

    def doubt(self) -> None:
        """Forget the record; the next convergence observes the kernel."""
        self._held = None

    @property
    def doubtful(self) -> bool:
        """Whether the next convergence will observe the kernel."""
        return self._held is None

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
        if self._held is None or not isinstance(event, ObjectSeen):
            return False
        target = replace(event.target, device=self._indexes.get(event.index, ""))
        if isinstance(target, Route) and target.device not in self._devices:
            # Routes of other devices come and go in thousands; only those at the place of ours matter.
            return target.key in self._route_keys and self._holds(target, event.gone) == event.gone
        return target.device != "" and self._holds(target, event.gone) == event.gone

    def _holds(self, target: KernelObject, gone: bool) -> bool:
        """Whether the record has what an event tells of. What is gone is known by its key:
        the kernel strips an entry (its MAC, say) before it removes it."""
        held = self._held
        if held is None:
            return False
        parts = (held.addresses, held.neighbours, held.fdb, held.routes)
        if not gone:
            return any(target in part for part in parts)
        if self._held_keys is None:
            self._held_keys = frozenset((type(one), one.key) for part in parts for one in part)
        return (type(target), target.key) in self._held_keys

    def converge(self, desired: DesiredState) -> Outcome:
        """Bring the kernel to ``desired``. Raises KernelError only if it cannot be observed."""
        if desired.devices != self._devices:
            self._devices = desired.devices
            self.doubt()
        self._route_keys = frozenset(route.key for route in desired.routes)
        held = self._held if self._held is not None else self._kernel.observe(desired.devices)
        self._held = None  # an exception on the way leaves doubt
        problems = dict(desired.problems)
        changed = 0
        failures: list[Failure] = []
        for _ in range(PASSES):
            changes = diff(held, desired)
            failed = {str(f.change.target) for f in failures}
            changes = tuple(c for c in changes if str(c.target) not in failed)
            if not changes:
                break
            new_failures = self._kernel.apply(changes)
            refused = {f.change for f in new_failures}
            done = [c for c in changes if c not in refused]
            _log_changes(done)
            changed += len(done)
            failures += new_failures
            held = apply_changes(held, done)
        blocked = blocked_routes(held, desired)
        for wanted, theirs in blocked.items():
            problems[str(wanted)] = f"{wanted}: {theirs.destination} is a network of device {theirs.device}"
        for failure in failures:
            problems[str(failure.change.target)] = _explain(failure, held, desired)
        self._report(problems)
        self._held, self._held_keys = held, None
        return Outcome(changed, problems, bool(failures or blocked))

    def _report(self, problems: dict[str, str]) -> None:
        for topic, text in problems.items():
            self._reporter.problem(topic, text)
        self._reporter.forget_except(set(problems))


def _log_changes(changes: Iterable[Change]) -> None:
    listed = list(changes)
    level = logging.INFO if len(listed) <= VERBOSE_CHANGES else logging.DEBUG
    for change in listed:
        log.log(level, "%s", change)
    if level == logging.DEBUG:
        added = sum(change.verb == "put" for change in listed)
        log.info("%d kernel entries added, %d removed", added, len(listed) - added)


def _explain(failure: Failure, held: ObservedState, desired: DesiredState) -> str:
    """The kernel's refusal, with the local network that overlaps a refused route, if there is one."""
    target, text = failure.change.target, str(failure.error)
    if isinstance(target, Route):
        for other in sorted(held.routes, key=str):
            same = other.destination.version == target.destination.version
            if (
                same
                and other.device not in desired.devices
                and other.destination.prefixlen > 0
                and (other.destination.overlaps(target.destination))
            ):
                return f"{text}; it overlaps {other.destination} of device {other.device}"
    return text
