"""Make one family's tables hold what is wanted: read, diff, apply."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flanneld.traffic.diff import diff
from flanneld.traffic.lock import LockHeld
from flanneld.traffic.ports import Firewall
from flanneld.traffic.render import TablePlan
from flanneld.traffic.rules import RuleSet, TrafficPolicy, decide
from subnet.errors import RuleError
from subnet.model import Family
from subnet.report import Reporter

log = logging.getLogger(__name__)

_TABLES = frozenset({"nat", "filter"})
_HOOKS = frozenset({"POSTROUTING", "FORWARD"})


@dataclass
class Converger:
    """Keeps one variant's rules, and what has been learned about it: whether it takes --random-fully."""

    firewall: Firewall
    reporter: Reporter
    random_fully: bool = True

    @property
    def name(self) -> str:
        """Return how people call the variant."""
        return self.firewall.name

    def covers(self, family: Family) -> bool:
        """Whether the tools for this family are there."""
        return self.firewall.covers(family)

    def interested(self, policy: TrafficPolicy, table: str, chain: str | None) -> bool:
        """Whether news can be about rules of ours: our chains, and those that jump to them."""
        if table not in _TABLES or chain is None:
            return False
        return not chain or chain in _HOOKS or chain.startswith(policy.chain_prefix)

    def converge(self, policy: TrafficPolicy, family: Family) -> bool:
        """Change what differs and return whether anything did. Raises RuleError.

        A batch may fail because another program was faster; what follows it
        cannot fail for that reason.
        """
        wanted = self._decide(policy, family)
        plans = diff(self.firewall.look(family, wanted), wanted)
        if not plans:
            self.reporter.solved(f"batch IPv{family}", f"IPv{family} rules are as wanted after a failed batch")
            return False
        try:
            self._apply(plans, family)
        except LockHeld:
            raise
        except RuleError as e:
            self.reporter.problem(f"batch IPv{family}", str(e))
            self._learn(e)
            wanted = self._decide(policy, family)
            plans = diff(self.firewall.look(family, wanted), wanted, delete=False)
            if not plans:
                raise
            self._apply(plans, family)
        return True

    def _decide(self, policy: TrafficPolicy, family: Family) -> tuple[RuleSet, ...]:
        fully = policy.random_fully and self.random_fully and self.firewall.random_fully
        return decide(replace(policy, random_fully=fully), family)

    def _apply(self, plans: Sequence[TablePlan], family: Family) -> None:
        self.firewall.apply(family, plans)
        for plan in plans:
            for line in plan.summary:
                log.info("%s (IPv%s)", line, family)

    def _learn(self, error: RuleError) -> None:
        if self.random_fully and "--random-fully" in str(error):
            self.random_fully = False
            log.warning(
                "%s refuses --random-fully: source ports of masqueraded packets are less random", self.firewall.name
            )
