"""The few chains that matter among the nft variant's tables, read without a process and without the rules of others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from flanneld.traffic.look import Look
from flanneld.traffic.nfnetlink import GET_CHAIN, GET_RULE, GET_TABLE, Questions, text_attribute
from flanneld.traffic.nft_entry import decode, opaque
from flanneld.traffic.render import Saved
from flanneld.traffic.rules import RuleSet
from subnet.model import Family

_PROTOCOL: Mapping[Family, int] = {4: 2, 6: 10}
_TABLE, _CHAIN_OF_RULE, _EXPRESSIONS, _USER_DATA = 1, 2, 4, 7
_NAME, _USE = 3, 6


def table_exists(protocol: int, name: str) -> bool:
    """Whether there is such a table. Looks at the network namespace of the calling thread. Raises KernelError."""
    with closing(Questions()) as questions:
        return bool(questions.ask(GET_TABLE, protocol, text_attribute(_TABLE, name)))


def read_chains(family: Family, wanted: Sequence[RuleSet], *, understood: bool) -> Saved | None:
    """Return the chains of ``wanted`` and those that jump to them, None if only the whole tables can tell.

    ``understood``: rules of ours as the installed iptables writes them have been
    read before. Looks at the network namespace of the calling thread. Raises
    KernelError.
    """
    with closing(Questions()) as questions:
        before = questions.generation()
        looks = [(rules, _look(questions, family, rules)) for rules in wanted]
        if before is None or questions.generation() != before:
            return None
    if not all(look.tells_all(rules, understood=understood) for rules, look in looks):
        return None
    return Saved({rules.table: look.chains for rules, look in looks})


def _look(questions: Questions, family: Family, rules: RuleSet) -> Look:
    chains: dict[str, tuple[str, ...]] = {}
    jumps: dict[str, int] = {}
    for name in (rules.chain, rules.hook):
        table = text_attribute(_TABLE, rules.table)
        for said in questions.ask(GET_CHAIN, _PROTOCOL[family], table + text_attribute(_NAME, name)):
            chains[name] = _rules(questions, family, table, name)
            # The kernel counts a chain's rules and the jumps to it together.
            jumps[name] = int.from_bytes(said[_USE], "big") - len(chains[name])
    return Look(chains, jumps)


def _rules(questions: Questions, family: Family, table: bytes, chain: str) -> tuple[str, ...]:
    body = table + text_attribute(_CHAIN_OF_RULE, chain)
    answer = questions.ask(GET_RULE, _PROTOCOL[family], body, dump=True)
    # Kernels before 4.12 answer with the rules of all chains.
    mine = (said for said in answer if said[_CHAIN_OF_RULE].rstrip(b"\0").decode() == chain)
    return tuple(_text(said, family) for said in mine)


def _text(said: Mapping[int, bytes], family: Family) -> str:
    # A comment may stand beside the expressions: nft puts it there, and so did iptables 1.8.0 to 1.8.2.
    return opaque(said[_EXPRESSIONS]) if _USER_DATA in said else decode(said[_EXPRESSIONS], family)
