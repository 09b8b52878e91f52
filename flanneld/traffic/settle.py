"""One host's rules, from whatever state they are in to the wanted one, and what was learned of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from flanneld.traffic.converge import Converger
from flanneld.traffic.detect import Host
from flanneld.traffic.diff import diff
from flanneld.traffic.nft_tables import remove_nft_tables
from flanneld.traffic.ports import Firewall
from flanneld.traffic.rules import TrafficPolicy, decide
from flanneld.traffic.runner import Runner
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

    def __init__(self, host: Host, runner: Runner, reporter: Reporter) -> None:
        self.host, self.runner, self.reporter = host, runner, reporter
        self._converger = Converger(host.firewall, reporter)
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
            return self._converger.converge(policy, family)
        if not self.host.firewall.covers(family):
            return False
        try:
            changed = self._converger.converge(policy, family)
        except RuleError as e:
            # A family that is off must not keep the other one from working.
            self.reporter.problem(f"off IPv{family}", f"IPv{family} is off, but old rules cannot be removed: {e}")
            return False
        self.reporter.solved(f"off IPv{family}", f"IPv{family} is off and cleared of old rules")
        return changed

    def _current_generation(self) -> int | None:
        return self.host.watch.generation() if self.host.watch is not None else None

    def _clear_leftovers(self, policy: TrafficPolicy) -> None:
        """Remove what earlier runs wrote elsewhere, now that the rules of this run work."""
        try:
            if self.host.other is not None:
                remove_rules(self.host.other, policy)
            remove_nft_tables(self.runner)
        except RuleError as e:
            log.warning("rules of an earlier run stay: %s", e)


def remove_rules(firewall: Firewall, policy: TrafficPolicy) -> None:
    """Remove every rule of this policy, both families. Raises RuleError."""
    for family in FAMILIES:
        if not firewall.covers(family):
            continue
        plans = diff(firewall.read(family), decide(policy.nothing(), family))
        if plans:
            firewall.apply(family, plans)
        for line in (line for plan in plans for line in plan.summary):
            log.info("%s (IPv%s, %s)", line, family, firewall.name)
