"""Rules and tables as the text of iptables-save(8) and iptables-restore(8)."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import ip_network

from flanneld.traffic.rules import Rule
from subnet.errors import RuleError
from subnet.model import IPNetwork

_QUOTED = re.compile(r"[^A-Za-z0-9_.\-/=,:@+]")
_WORD = re.compile(r'"((?:\\.|[^"\\])*)"|(\S+)')
_ESCAPE = re.compile(r"\\(.)")
_UNCONDITIONAL = re.compile(r'(-m comment --comment ("(\\.|[^"\\])*"|\S+) )?-j (\S+)')
_INCOMPATIBLE = re.compile(r"^# Table `(\w+)' is incompatible", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Saved:
    """What one family's tables hold: table to chain to rule texts, all in order.

    A text is a line of iptables-save without its leading ``-A CHAIN``.
    """

    tables: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def chains(self, table: str) -> Mapping[str, tuple[str, ...]]:
        """Return the chains of a table, none if there is no such table."""
        return self.tables.get(table, {})


@dataclass(frozen=True, slots=True)
class TablePlan:
    """Changes to one table, made together or not at all, in the order of the fields.

    ``build``: chains of ours with their whole new content, made or emptied first.
    ``delete``: (chain, rule text), each the first that reads so.
    ``add``: (chain, position from 1 or None for the end, rule).
    ``drop``: chains of ours to empty and remove.
    ``summary``: the same for people, one line per change.
    """

    table: str
    build: tuple[tuple[str, tuple[Rule, ...]], ...] = ()
    delete: tuple[tuple[str, str], ...] = ()
    add: tuple[tuple[str, int | None, Rule], ...] = ()
    drop: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()


def rule_text(rule: Rule) -> str:
    """Return the rule exactly as iptables-save prints it, without ``-A CHAIN``."""
    return " ".join(_rule_words(rule))


def _rule_words(rule: Rule) -> Iterator[str]:
    yield from _range("-s", rule.source, rule.source_inverted)
    yield from _range("-d", rule.destination, rule.destination_inverted)
    if rule.mark is not None:
        yield f"-m mark --mark {rule.mark:#x}/{rule.mark:#x}"
    if rule.comment:
        yield f"-m comment --comment {_quote(rule.comment)}"
    yield f"-j {rule.target}"
    if rule.random_fully:
        yield "--random-fully"


def _range(option: str, network: IPNetwork | None, inverted: bool) -> Iterator[str]:
    if network is not None:
        yield f"! {option} {network}" if inverted else f"{option} {network}"


def _quote(text: str) -> str:
    if text and not _QUOTED.search(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


@lru_cache(maxsize=4096)
def parse_rule(text: str) -> Rule | None:
    """Return the rule a text of iptables-save stands for, None if it says anything else too."""
    try:
        return _Words(text).rule()
    except (ValueError, IndexError):
        return None


class _Words:
    """The words of one rule, read from left to right."""

    def __init__(self, text: str) -> None:
        self.words = [_ESCAPE.sub(r"\1", quoted) or plain for quoted, plain in _WORD.findall(text)][::-1]
        self.inverted = False

    def rule(self) -> Rule | None:
        found: dict[str, object] = {}
        while self.words:
            word = self.words.pop()
            if word == "!":
                self.inverted = True
                continue
            read = self._option(word)
            if read is None or found.keys() & read.keys():
                return None
            found.update(read)
        return Rule(**found) if "target" in found else None  # type: ignore[arg-type]

    def _option(self, word: str) -> dict[str, object] | None:
        inverted, self.inverted = self.inverted, False
        if word in {"-s", "-d"}:
            network = ip_network(self.words.pop())
            name = "source" if word == "-s" else "destination"
            return {name: network, f"{name}_inverted": inverted} if network.prefixlen else None
        if inverted:
            return None
        if word == "-m":
            return {} if self.words.pop() in {"mark", "comment"} else None
        if word == "--mark":
            value, _, mask = self.words.pop().partition("/")
            return {"mark": int(value, 0)} if int(mask or "0xffffffff", 0) == int(value, 0) else None
        if word == "--comment":
            return {"comment": self.words.pop()}
        if word == "-j":
            return {"target": self.words.pop()}
        return {"random_fully": True} if word == "--random-fully" else None


def target_of(text: str) -> str:
    """Return the chain or verdict a rule text ends in, '' if it has none."""
    words = iter(_WORD.findall(text))
    jump = next((word for _, word in words if word in {"-j", "-g"}), "")
    return next(words)[1] if jump else ""


def is_catch_all(text: str, verdicts: Collection[str] = ("REJECT", "DROP")) -> bool:
    """Whether no packet gets past this rule: one of the verdicts without any condition."""
    found = _UNCONDITIONAL.match(text)
    return found is not None and found[4] in verdicts


def parse_save(text: str) -> Saved:
    """Return what iptables-save printed. Counters, policies and remarks are left out.

    Raises RuleError when a table holds what iptables cannot show, since a diff
    against half a table would be wrong.
    """
    if found := _INCOMPATIBLE.search(text):
        raise RuleError(f"table {found[1]} holds rules made with nft that iptables cannot read")
    tables: dict[str, dict[str, list[str]]] = {}
    chains: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("*"):
            chains = tables.setdefault(line[1:].strip(), {})
        elif line.startswith(":"):
            chains.setdefault(line[1:].split()[0], [])
        elif line.startswith("-A "):
            _, chain, rule = f"{line} ".split(" ", 2)
            chains.setdefault(chain, []).append(rule.strip())
    return Saved({table: {name: tuple(rules) for name, rules in held.items()} for table, held in tables.items()})


def restore_text(plans: Iterable[TablePlan]) -> str:
    """Return the input for ``iptables-restore --noflush`` that carries the plans out.

    Each table's lines are one transaction. A chain line makes a chain or
    empties it, so it works whatever happened since the tables were read.
    """
    return "".join(f"{line}\n" for plan in plans for line in _restore_lines(plan))


def _restore_lines(plan: TablePlan) -> Iterator[str]:
    yield f"*{plan.table}"
    for chain in (*(name for name, _ in plan.build), *plan.drop):
        yield f":{chain} - [0:0]"
    for chain, rules in plan.build:
        for rule in rules:
            yield f"-A {chain} {rule_text(rule)}"
    for chain, text in plan.delete:
        yield f"-D {chain} {text}".rstrip()
    for chain, position, rule in plan.add:
        where = f"-A {chain}" if position is None else f"-I {chain} {position}"
        yield f"{where} {rule_text(rule)}"
    for chain in plan.drop:
        yield f"-X {chain}"
    yield "COMMIT"
