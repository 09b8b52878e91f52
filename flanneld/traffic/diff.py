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


def diff(saved: Saved, wanted: Iterable[RuleSet], *, delete: bool = True) -> tuple[TablePlan, ...]:
    """Return the changes that make the tables hold what is wanted, none if they do.

    A deletion fails when somebody else was faster, and its whole transaction
    with it. Without ``delete`` the plan has none and so cannot lose that race;
    what is surplus then waits for the next round.
    """
    plans = (_table_plan(saved.chains(rules.table), rules, delete) for rules in wanted)
    return tuple(plan for plan in plans if plan.summary)


def hidden_jumps(saved: Saved, wanted: Iterable[RuleSet]) -> list[str]:
    """Return one sentence for each jump that no packet reaches because of a catch-all before it."""
    return [
        f"the jump to {rules.chain} in {rules.hook} stands behind a rule that rejects everything"
        for rules in wanted
        if rules.rules and _is_hidden(saved.chains(rules.table).get(rules.hook, ()), rules.jump)
    ]


def _table_plan(chains: Chains, rules: RuleSet, delete: bool) -> TablePlan:
    surplus = _Surplus.find(chains, rules) if delete else _Surplus()
    hook = _without(chains.get(rules.hook, ()), [text for chain, text in surplus.texts if chain == rules.hook])
    jump_missing = bool(rules.rules) and not any(parse_rule(text) == rules.jump for text in hook)
    content = _content_summary(chains.get(rules.chain), rules)
    drop = delete and not rules.rules and rules.chain in chains
    summary = [content] if content else []
    if jump_missing:
        summary.append(f"added jump from {rules.hook} to {rules.chain} in {rules.table}")
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
        add=((rules.hook, _place(hook), rules.jump),) if jump_missing else (),
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
        if chain == rules.hook and rules.rules and (kept := _kept_jump(texts, rules.jump)) is not None:
            # Deletion takes the first that reads so, hence of equal ones the last is kept.
            jumps.remove(texts[kept])
        yield from ((chain, text) for text in jumps)


def _kept_jump(hook: tuple[str, ...], jump: Rule) -> int | None:
    """Return where the jump stands that is to stay: the last one, None if all have to go.

    A single one stays even where no packet reaches it: who put a catch-all
    before it did so on purpose. Of several, that one is no choice.
    """
    places = [i for i, text in enumerate(hook) if parse_rule(text) == jump]
    if len(places) > 1 and any(is_catch_all(text) for text in hook[: places[-1]]):
        return None
    return places[-1] if places else None


def _is_hidden(hook: tuple[str, ...], jump: Rule) -> bool:
    kept = _kept_jump(hook, jump)
    return kept is not None and any(is_catch_all(text) for text in hook[:kept])


def _place(hook: tuple[str, ...]) -> int | None:
    """Return where a new jump goes: before the rule nothing gets past, else to the end (None)."""
    return next((i for i, text in enumerate(hook, 1) if is_catch_all(text)), None)


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
