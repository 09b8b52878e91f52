"""The few chains that matter among the nft variant's tables, read without a process and without the rules of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from flanneld.traffic.nfnetlink import GET_CHAIN, GET_RULE, Questions, text_attribute
from flanneld.traffic.nft_entry import decode, is_opaque
from flanneld.traffic.render import Saved, target_of
from flanneld.traffic.rules import RuleSet
from subnet.model import Family

_PROTOCOL: Mapping[Family, int] = {4: 2, 6: 10}
_TABLE, _CHAIN_OF_RULE, _EXPRESSIONS = 1, 2, 4
_NAME, _USE = 3, 6


@dataclass(frozen=True, slots=True)
class Look:
    """Chains of one table. ``uses``: rules of a chain and jumps to it, together, as the kernel counts them."""

    chains: Mapping[str, tuple[str, ...]]
    uses: Mapping[str, int]

    def tells_all(self, rules: RuleSet) -> bool:
        """Whether a difference from ``rules`` can be decided on this look alone.

        Not if a rule of ours or a jump to us says more than could be read, or
        if chains that were not looked at jump to ours.
        """
        ours, hook = self.chains.get(rules.chain, ()), self.chains.get(rules.hook, ())
        here = [text for text in hook if target_of(text) == rules.chain]
        if any(is_opaque(text) for text in (*ours, *here)):
            return False
        return self.uses.get(rules.chain, 0) == len(ours) + len(here)


def read_chains(family: Family, wanted: Sequence[RuleSet]) -> Saved | None:
    """Return the chains of ``wanted`` and those that jump to them, None if only the whole tables can tell.

    Looks at the network namespace of the calling thread. Raises KernelError.
    """
    with closing(Questions()) as questions:
        before = questions.generation()
        looks = [(rules, _look(questions, family, rules)) for rules in wanted]
        if before is None or questions.generation() != before:
            return None
    if not all(look.tells_all(rules) for rules, look in looks):
        return None
    return Saved({rules.table: look.chains for rules, look in looks})


def _look(questions: Questions, family: Family, rules: RuleSet) -> Look:
    chains: dict[str, tuple[str, ...]] = {}
    uses: dict[str, int] = {}
    for name in (rules.chain, rules.hook):
        table = text_attribute(_TABLE, rules.table)
        for said in questions.ask(GET_CHAIN, _PROTOCOL[family], table + text_attribute(_NAME, name)):
            uses[name] = int.from_bytes(said[_USE], "big")
            chains[name] = _rules(questions, family, table, name)
    return Look(chains, uses)


def _rules(questions: Questions, family: Family, table: bytes, chain: str) -> tuple[str, ...]:
    body = table + text_attribute(_CHAIN_OF_RULE, chain)
    answer = questions.ask(GET_RULE, _PROTOCOL[family], body, dump=True)
    # Kernels before 4.12 answer with the rules of all chains.
    mine = (said for said in answer if said[_CHAIN_OF_RULE].rstrip(b"\0").decode() == chain)
    return tuple(decode(said[_EXPRESSIONS], family) for said in mine)
