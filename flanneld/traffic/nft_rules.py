"""Nftables mode: which tables of our own this node wants, their text, and what nft lists. Pure.

Tables, chains, rules and comments are upstream's (pkg/trafficmngr/nftables/nftables.go),
and one chain more: with upstream's rules a packet from the host to a pod of
another host is not masqueraded in this mode, but is with iptables.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_network
from typing import Any

from flanneld.traffic.rules import KUBE_PROXY_MARK, MULTICAST, Pair, Rule, TrafficPolicy, exempt
from subnet.errors import RuleError
from subnet.model import Family, IPNetwork

IP: Mapping[Family, str] = {4: "ip", 6: "ip6"}
"""What nft calls the family, of tables and in matches alike."""

_SRCNAT, _FILTER = 100, 0
_VERDICTS = {"return": "RETURN", "accept": "ACCEPT", "drop": "DROP"}


@dataclass(frozen=True, slots=True)
class Hook:
    """Where a base chain is called; the policy is always accept."""

    type: str
    hook: str
    priority: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A base chain and its whole content in order."""

    name: str
    at: Hook
    rules: tuple[Rule, ...]
    comment: str


@dataclass(frozen=True, slots=True)
class Held:
    """What a table holds: chain to rules (None: says more than ``Rule`` can), and hooks of base chains.

    ``strange``: there is something in it that is neither chain nor rule, or it has flags.
    """

    chains: Mapping[str, tuple[Rule | None, ...]] = field(default_factory=dict)
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    strange: bool = False


@dataclass(frozen=True, slots=True)
class Dialect:
    """What kernel and nft take: comments of tables and chains, masquerade fully-random."""

    comments: bool = True
    fully_random: bool = True


DIALECTS = tuple(Dialect(comments, fully) for fully in (True, False) for comments in (True, False))
"""Best first."""


def table_name(policy: TrafficPolicy, family: Family) -> str:
    """Return the name of one family's table."""
    return f"{policy.table_prefix}-ipv{family}"


def decide(policy: TrafficPolicy, family: Family) -> tuple[Chain, ...]:
    """Return the wanted chains of one family's table, none if there should be no table."""
    pair = policy.pair(family)
    if pair is None:
        return ()
    chains: list[Chain] = []
    if policy.masquerade:
        comment = "chain to manage traffic masquerading by flannel"
        at = Hook("nat", "postrouting", _SRCNAT)
        chains.append(Chain("postrtg", at, tuple(_masquerade(policy, pair, family)), comment))
        # Behind upstream's chain, which lets these packets pass undecided, and behind everybody
        # else's, like the jump that iptables mode appends.
        at = Hook("nat", "postrouting", _SRCNAT + 1)
        comment = "chain to masquerade traffic of the host to pods of other hosts"
        chains.append(Chain("hostrtg", at, tuple(_masquerade_host(policy, pair)), comment))
    if policy.forward:
        accept = (Rule("ACCEPT", source=pair.network), Rule("ACCEPT", destination=pair.network))
        at = Hook("filter", "forward", _FILTER)
        chains.append(Chain("forward", at, accept, "chain to accept flannel traffic"))
    return tuple(chains)


def _masquerade(policy: TrafficPolicy, pair: Pair, family: Family) -> Iterator[Rule]:
    network, subnet, fully = pair.network, pair.subnet, policy.random_fully
    yield Rule("RETURN", mark=KUBE_PROXY_MARK, mark_exact=True)
    yield Rule("RETURN", source=subnet, destination=network)
    yield Rule("RETURN", source=network, destination=subnet)
    yield Rule("RETURN", source=subnet, source_inverted=True, destination=network)
    for excluded in exempt(policy, family):
        yield Rule("RETURN", source=network, destination=excluded)
    yield Rule(
        "MASQUERADE", source=network, destination=MULTICAST[family], destination_inverted=True, random_fully=fully
    )
    yield Rule("MASQUERADE", source=network, source_inverted=True, destination=network, random_fully=fully)


def _masquerade_host(policy: TrafficPolicy, pair: Pair) -> Iterator[Rule]:
    yield Rule("RETURN", mark=KUBE_PROXY_MARK)
    yield Rule("RETURN", destination=pair.subnet)
    yield Rule(
        "MASQUERADE",
        source=pair.network,
        source_inverted=True,
        destination=pair.network,
        random_fully=policy.random_fully,
    )


def in_dialect(chains: Iterable[Chain], dialect: Dialect) -> tuple[Chain, ...]:
    """Return the chains as they can be had."""
    return tuple(
        replace(
            chain,
            comment=chain.comment if dialect.comments else "",
            rules=tuple(replace(r, random_fully=r.random_fully and dialect.fully_random) for r in chain.rules),
        )
        for chain in chains
    )


# -- text for nft -f ------------------------------------------------------
# Not JSON: nft up to 1.0.6 at least drops the comments of tables and chains there without a word.


def build_text(family: Family, table: str, chains: Iterable[Chain]) -> str:
    """Return what makes the table hold exactly the chains, whatever it holds; it cannot fail for what it holds."""
    wanted = tuple(chains)
    comment = f' {{ comment "rules for {table}"; }}' if any(chain.comment for chain in wanted) else ""
    where = f"{IP[family]} {table}"
    lines = [f"add table {where}", f"delete table {where}", f"add table {where}{comment}"]
    for chain in wanted:
        lines += _fill(family, table, chain)
    return "".join(f"{line}\n" for line in lines)


def repair_text(family: Family, table: str, held: Held, chains: Iterable[Chain]) -> str:
    """Return what corrects the chains that differ, '' if none does.

    Chains stay where they are: a packet meets either the old content of one or
    the new. Something that only a new table can correct has it made anew.
    """
    wanted = {chain.name: chain for chain in chains}
    misplaced = any(held.hooks.get(name) != chain.at for name, chain in wanted.items() if name in held.chains)
    if held.strange or misplaced:
        return build_text(family, table, wanted.values())
    lines: list[str] = []
    for name, chain in wanted.items():
        if held.chains.get(name) != chain.rules:
            lines += [] if name not in held.chains else [f"flush chain {IP[family]} {table} {name}"]
            lines += _fill(family, table, chain)
    surplus = [name for name in held.chains if name not in wanted]
    for verb in ("flush", "delete"):
        lines += [f"{verb} chain {IP[family]} {table} {name}" for name in surplus]
    return "".join(f"{line}\n" for line in lines)


def delete_text(family: Family, table: str) -> str:
    """Return what removes the table; it must exist."""
    return f"delete table {IP[family]} {table}\n"


def differences(held: Held | None, chains: Iterable[Chain]) -> list[str]:
    """Return one phrase for people per chain that is not as wanted."""
    found = held or Held()
    wanted = {chain.name: chain for chain in chains}
    said: list[str] = []
    for name, chain in wanted.items():
        if name not in found.chains:
            said.append(f"chain {name} added")
        elif found.hooks.get(name) != chain.at or found.chains[name] != chain.rules:
            said.append(f"chain {name} repaired")
    said += [f"chain {name} removed" for name in found.chains if name not in wanted]
    return said + (["unknown objects removed"] if found.strange else [])


def _fill(family: Family, table: str, chain: Chain) -> Iterator[str]:
    where = f"{IP[family]} {table} {chain.name}"
    at = f"type {chain.at.type} hook {chain.at.hook} priority {chain.at.priority}; policy accept;"
    comment = f' comment "{chain.comment}";' if chain.comment else ""
    yield f"add chain {where} {{ {at}{comment} }}"
    for rule in chain.rules:
        yield f"add rule {where} {rule_text(rule)}"


def rule_text(rule: Rule) -> str:
    """Return the rule as nft reads it."""
    return " ".join(_rule_words(rule))


def _rule_words(rule: Rule) -> Iterator[str]:
    if rule.mark is not None:
        yield f"meta mark {rule.mark:#x}" if rule.mark_exact else f"meta mark & {rule.mark:#x} == {rule.mark:#x}"
    for name, network, inverted in (
        ("saddr", rule.source, rule.source_inverted),
        ("daddr", rule.destination, rule.destination_inverted),
    ):
        if network is not None:
            yield f"{'ip' if network.version == 4 else 'ip6'} {name} {'!= ' if inverted else ''}{network}"
    yield rule.target.lower()
    if rule.random_fully:
        yield "fully-random"


# -- what nft -j lists (libnftables-json(5)) ------------------------------


def parse_table(listing: Mapping[str, Any]) -> Held:
    """Return what ``nft -j list table`` says. Raises RuleError if it is no such listing."""
    chains: dict[str, list[Rule | None]] = {}
    hooks: dict[str, Hook] = {}
    strange = False
    try:
        for item in listing["nftables"]:
            ((kind, said),) = item.items()
            if kind == "chain":
                chains.setdefault(said["name"], [])
                if "hook" in said and said.get("policy") == "accept":
                    hooks[said["name"]] = Hook(said["type"], said["hook"], said["prio"])
            elif kind == "rule":
                chains.setdefault(said["chain"], []).append(_parse_rule(said))
            else:
                strange |= kind not in {"metainfo", "table"} or "flags" in said
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise RuleError(f"nft lists what cannot be read: {e!r}") from e
    return Held({name: tuple(rules) for name, rules in chains.items()}, hooks, strange)


def _parse_rule(said: Mapping[str, Any]) -> Rule | None:
    if "comment" in said:
        return None
    found: dict[str, Any] = {}
    try:
        for expression in said["expr"]:
            ((kind, value),) = expression.items()
            read = _parse_match(value) if kind == "match" else _parse_verdict(kind, value)
            if "target" in found or found.keys() & read.keys():
                return None
            found.update(read)
        return Rule(**found)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _parse_match(said: Mapping[str, Any]) -> dict[str, Any]:
    left, right, inverted = said["left"], said["right"], {"==": False, "!=": True}[said["op"]]
    if "payload" in left:
        name = {"saddr": "source", "daddr": "destination"}[left["payload"]["field"]]
        return {name: _parse_network(right), f"{name}_inverted": inverted}
    mark = {"meta": {"key": "mark"}}
    if left == mark and not inverted:
        return {"mark": right, "mark_exact": True}
    if left == {"&": [mark, right]} and not inverted:
        return {"mark": right}
    raise ValueError("a match that is none of ours")


def _parse_network(said: Any) -> IPNetwork:
    if isinstance(said, str):
        return ip_network(said)
    return ip_network((said["prefix"]["addr"], said["prefix"]["len"]))


def _parse_verdict(kind: str, said: Any) -> dict[str, Any]:
    if kind != "masquerade":
        return {"target": _VERDICTS[kind]}
    flags = (said or {}).get("flags", [])
    if set(said or {}) - {"flags"} or flags not in ([], "fully-random", ["fully-random"]):
        raise ValueError("a masquerade that is none of ours")
    return {"target": "MASQUERADE", "random_fully": bool(flags)}
