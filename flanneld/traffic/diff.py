"""From what the tables hold to what they should hold. Pure.

Ours are: the content of our chains, every jump to them, and the flat rules
that versions without chains left behind. Nothing else is named in a plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from flanneld.traffic.render import Saved, TablePlan, is_catch_all, parse_rule, target_of
from flanneld.traffic.rules import Rule, RuleSet

Chains = Mapping[str, tuple[str, ...]]

_LAST_WORDS: Mapping[str, frozenset[str]] = {"nat": frozenset({"ACCEPT"}), "filter": frozenset({"REJECT", "DROP"})}
"""Without a condition, these keep packets from a jump behind them that does something else."""


def diff(saved: Saved, wanted: Iterable[RuleSet], *, delete: bool = True) -> tuple[TablePlan, ...]:
    """Return the changes that make the tables hold what is wanted, none if they do.

    A deletion fails when somebody else was faster, and its whole transaction
    with it. Without ``delete`` the plan has none and so cannot lose that race;
    what is surplus then waits for the next round.
    """
    plans = (_table_plan(saved.chains(rules.table), rules, delete) for rules in wanted)
    return tuple(plan for plan in plans if plan.summary)


def _table_plan(chains: Chains, rules: RuleSet, delete: bool) -> TablePlan:
    surplus = _Surplus.find(chains, rules) if delete else _Surplus()
    hook = _without(chains.get(rules.hook, ()), [text for chain, text in surplus.texts if chain == rules.hook])
    jump_missing = bool(rules.rules) and not any(parse_rule(text) == rules.jump for text in hook)
    content = _content_summary(chains.get(rules.chain), rules)
    drop = delete and not rules.rules and rules.chain in chains
    summary = [content] if content else []
    if jump_missing:
        summary.append(f"added jump from {rules.hook} to {rules.chain} in {rules.table}{_before(hook, rules)}")
    summary.extend(surplus.summary)
    if drop:
        summary.append(f"removed chain {rules.chain} from {rules.table}")
    # The chain is built anew with every repair of its table, so that the jump finds its target
    # even if the chain was removed after it was read.
    build = ((rules.chain, rules.rules),) if rules.rules and summary else ()
    return TablePlan(
        table=rules.table,
        build=build,
        delete=surplus.texts,
        add=((rules.hook, _place(hook, rules), rules.jump),) if jump_missing else (),
        drop=(rules.chain,) if drop else (),
        summary=tuple(summary),
    )


def _content_summary(have: tuple[str, ...] | None, rules: RuleSet) -> str:
    """Say what is wrong with the content of our chain, '' if nothing is."""
    if not rules.rules:
        return ""
    if have is None:
        return f"created chain {rules.chain} in {rules.table}: {_count(len(rules.rules))}"
    present = [parse_rule(text) for text in have]
    if present == list(rules.rules):
        return ""
    has, wants = Counter[Rule | None](present), Counter[Rule | None](rules.rules)
    missing, extra = (wants - has).total(), (has - wants).total()
    wrong = [f"{_count(n)} {what}" for n, what in ((missing, "missing"), (extra, "too many")) if n]
    return f"repaired chain {rules.chain} in {rules.table}: {', '.join(wrong) or 'rules out of order'}"


@dataclass(frozen=True, slots=True)
class _Surplus:
    """Rules of ours that have to go: (chain, text) each, and lines for people."""

    texts: tuple[tuple[str, str], ...] = ()
    summary: tuple[str, ...] = ()

    @classmethod
    def find(cls, chains: Chains, rules: RuleSet) -> _Surplus:
        jumps = list(_surplus_jumps(chains, rules))
        flat = [(rules.hook, text) for text in chains.get(rules.hook, ()) if _without_random(text) in rules.obsolete]
        summary = [f"removed jump from {chain} to {rules.chain} in {rules.table}" for chain, _ in jumps]
        summary += [f"removed rule of an earlier version from {chain} in {rules.table}: {text}" for chain, text in flat]
        return cls((*jumps, *flat), tuple(summary))


def _surplus_jumps(chains: Chains, rules: RuleSet) -> Iterator[tuple[str, str]]:
    """Yield all jumps to our chain but the one good one, which stays where it stands."""
    for chain, texts in chains.items():
        if chain == rules.chain:
            continue
        jumps = [text for text in texts if rules.chain in text and target_of(text) == rules.chain]
        if chain == rules.hook and rules.rules and (kept := _kept_jump(texts, rules)) is not None:
            # Deletion takes the first that reads so, hence of equal ones the last is kept.
            jumps.remove(texts[kept])
        yield from ((chain, text) for text in jumps)


def _kept_jump(hook: tuple[str, ...], rules: RuleSet) -> int | None:
    """Return where the jump stands that is to stay: the last one, None if all have to go.

    One that no packet reaches is of no use; a new one then goes to its place.
    """
    places = [i for i, text in enumerate(hook) if parse_rule(text) == rules.jump]
    end = _end(hook, rules)
    return places[-1] if places and (end is None or places[-1] < end) else None


def _end(hook: tuple[str, ...], rules: RuleSet) -> int | None:
    """Return the place of the rule nothing gets past, None if there is none."""
    return next((i for i, text in enumerate(hook) if is_catch_all(text, _LAST_WORDS[rules.table])), None)


def _place(hook: tuple[str, ...], rules: RuleSet) -> int | None:
    """Return where a new jump goes, from 1: before the rule nothing gets past, else to the end (None)."""
    end = _end(hook, rules)
    return None if end is None else end + 1


def _before(hook: tuple[str, ...], rules: RuleSet) -> str:
    end = _end(hook, rules)
    return "" if end is None else f", before the rule {hook[end]}"


def _without(texts: tuple[str, ...], gone: list[str]) -> tuple[str, ...]:
    left = list(texts)
    for text in gone:
        left.remove(text)
    return tuple(left)


def _without_random(text: str) -> Rule | None:
    rule = parse_rule(text)
    return replace(rule, random_fully=False) if rule else None


def _count(n: int) -> str:
    return f"{n} rule" if n == 1 else f"{n} rules"
