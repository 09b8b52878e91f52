"""What a look at a few chains can tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flanneld.traffic.render import target_of
from flanneld.traffic.rules import RuleSet

OPAQUE = "-m opaque"
"""How a rule begins that says more than ``Rule`` can."""


def is_opaque(text: str) -> bool:
    """Whether a text does not say all that the rule does."""
    return text.startswith(OPAQUE)


@dataclass(frozen=True, slots=True)
class Look:
    """Some chains of one table. ``jumps``: how many jumps to a chain there are in all of the table."""

    chains: Mapping[str, tuple[str, ...]]
    jumps: Mapping[str, int]

    def tells_all(self, rules: RuleSet, *, understood: bool) -> bool:
        """Whether a difference from ``rules`` can be decided on this look alone.

        Not if a jump to us says more than could be read, or if chains that were
        not looked at jump to ours. A rule of our chain that cannot be read is
        somebody else's if it is ``understood`` how our rules are written here,
        and then only has to go; else it may be ours.
        """
        ours, hook = self.chains.get(rules.chain, ()), self.chains.get(rules.hook, ())
        here = [text for text in hook if target_of(text) == rules.chain]
        matters = here if understood else [*ours, *here]
        return not any(is_opaque(text) for text in matters) and self.jumps.get(rules.chain, 0) == len(here)
