"""One host's rules, from whatever state they are in to the wanted one, and what was learned of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flanneld.traffic.detect import Host
from flanneld.traffic.ports import Enforcer
from flanneld.traffic.rules import TrafficPolicy
from subnet.errors import RuleError
from subnet.model import FAMILIES, Family
from subnet.report import Reporter

log = logging.getLogger(__name__)

_ROUNDS = 3
"""How often rules may differ again right after a repair before it counts as a problem."""


def families_on(policy: TrafficPolicy) -> list[Family]:
    """Return the families that get rules."""
    return [f for f in FAMILIES if policy.pair(f) is not None and (policy.masquerade or policy.forward)]


class Settler:
    """Repairs until a look finds nothing to repair; does not look where nothing can have changed."""

    def __init__(self, host: Host, reporter: Reporter) -> None:
        self.host, self.reporter = host, reporter
        self._settled: TrafficPolicy | None = None
        self._generation: int | None = None

    def settle(self, policy: TrafficPolicy) -> None:
        """Bring the policy into force. Raises RuleError, also if another program undoes it at once."""
        fresh = policy != self._settled
        if not fresh and self._generation is not None and self._generation == self._current_generation():
            return
        families = FAMILIES if fresh else tuple(families_on(policy))
        for _ in range(_ROUNDS):
            generation = self._current_generation()
            if not self._round(policy, families):
                self._generation = generation
                if self._settled is None:
                    self._clear_leftovers(policy)
                self._settled = policy
                return
        raise RuleError("rules differ again right after their repair: another program keeps changing them")

    def _round(self, policy: TrafficPolicy, families: Iterable[Family]) -> bool:
        """Converge each family, also when another fails; return whether any changed."""
        changed, failed = False, []
        for family in families:
            try:
                changed |= self._converge(policy, family)
            except RuleError as e:
                failed.append(e)
        if failed:
            raise failed[0]
        return changed

    def _converge(self, policy: TrafficPolicy, family: Family) -> bool:
        if family in families_on(policy):
            return self.host.enforcer.converge(policy, family)
        if not self.host.enforcer.covers(family):
            return False
        try:
            changed = self.host.enforcer.converge(policy, family)
        except RuleError as e:
            # A family that is off must not keep the other one from working.
            self.reporter.problem(f"off IPv{family}", f"IPv{family} is off, but old rules cannot be removed: {e}")
            return False
        self.reporter.solved(f"off IPv{family}", f"IPv{family} is off and cleared of old rules")
        return changed

    def _current_generation(self) -> int | None:
        return self.host.watch.generation() if self.host.watch is not None else None

    def _clear_leftovers(self, policy: TrafficPolicy) -> None:
        """Remove what earlier runs wrote in other ways, now that the rules of this run work."""
        for other in self.host.others:
            clear(other, policy)


def clear(enforcer: Enforcer, policy: TrafficPolicy) -> None:
    """Remove every rule of this policy that was written this way; what cannot be removed is only reported."""
    for family in FAMILIES:
        if not enforcer.covers(family):
            continue
        try:
            enforcer.converge(policy.nothing(), family)
        except RuleError as e:
            log.warning("IPv%s rules of an earlier run stay in %s: %s", family, enforcer.name, e)
