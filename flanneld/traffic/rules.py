"""Which traffic rules this node wants, as values. Nothing here knows how they are written.

Rules, their order and their comments are upstream's (pkg/trafficmngr/iptables/iptables.go).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from ipaddress import ip_network

from subnet.model import Family, IPNetwork

KUBE_PROXY_MARK = 0x4000
"""Set by kube-proxy on packets that it masquerades itself; tested with itself as mask."""

MASQ_COMMENT = "flanneld masq"
FORWARD_COMMENT = "flanneld forward"

MULTICAST: dict[Family, IPNetwork] = {4: ip_network("224.0.0.0/4"), 6: ip_network("ff00::/8")}


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule: what it matches, and the chain or verdict it ends in.

    ``mark`` is compared as ``packet mark & mark == mark``, with ``mark_exact`` as a whole.
    ``random_fully`` only makes sense with the target MASQUERADE.
    """

    target: str
    source: IPNetwork | None = None
    source_inverted: bool = False
    destination: IPNetwork | None = None
    destination_inverted: bool = False
    mark: int | None = None
    mark_exact: bool = False
    comment: str = ""
    random_fully: bool = False


@dataclass(frozen=True, slots=True)
class Pair:
    """A cluster network and the subnet that this node holds of it, of one family."""

    network: IPNetwork
    subnet: IPNetwork


@dataclass(frozen=True, slots=True)
class TrafficPolicy:
    """What the operator asked for. A family without a pair is off: it gets no rules.

    ``previous`` are the pairs of earlier runs. ``masq_exclude`` are destinations
    that pods reach with their own address. ``nftables``: in nftables mode, with
    tables of our own. ``chain_prefix`` and, in nftables mode, ``table_prefix``
    keep several daemons on one host apart.
    """

    v4: Pair | None = None
    v6: Pair | None = None
    masquerade: bool = False
    forward: bool = True
    random_fully: bool = True
    previous: tuple[Pair, ...] = ()
    masq_exclude: tuple[IPNetwork, ...] = ()
    nftables: bool = False
    chain_prefix: str = "FLANNEL"
    table_prefix: str = "flannel"

    def pair(self, family: Family) -> Pair | None:
        """Return network and subnet of one family, None if the family is off."""
        return self.v4 if family == 4 else self.v6

    def nothing(self) -> TrafficPolicy:
        """Return the policy under which every rule of this one has to go."""
        pairs = tuple(pair for pair in (self.v4, self.v6) if pair is not None)
        return replace(self, v4=None, v6=None, previous=(*self.previous, *pairs))


@dataclass(frozen=True, slots=True)
class RuleSet:
    """One chain of ours, the jump to it from a built-in chain, and what it replaces.

    ``rules`` is its whole content in order; empty: chain and jump must not exist.
    ``obsolete`` are rules that versions without a chain of their own left in
    ``hook``; they are compared without ``random_fully``.
    """

    table: str
    chain: str
    hook: str
    jump: Rule
    rules: tuple[Rule, ...]
    obsolete: frozenset[Rule]


@lru_cache(maxsize=16)
def decide(policy: TrafficPolicy, family: Family) -> tuple[RuleSet, ...]:
    """Return the wanted content of both our chains in one family.

    Remembered: it is asked with every look, and the answer stays for weeks.
    """
    pair = policy.pair(family)
    masq = policy.chain_prefix + "-POSTRTG"
    forward = policy.chain_prefix + "-FWD"
    return (
        RuleSet(
            table="nat",
            chain=masq,
            hook="POSTROUTING",
            jump=Rule(masq, comment=MASQ_COMMENT),
            rules=_masquerade(policy, pair, family) if pair and policy.masquerade else (),
            obsolete=frozenset(_flat_masquerade(policy, family)),
        ),
        RuleSet(
            table="filter",
            chain=forward,
            hook="FORWARD",
            jump=Rule(forward, comment=FORWARD_COMMENT),
            rules=_accept(pair.network, FORWARD_COMMENT) if pair and policy.forward else (),
            obsolete=frozenset(_flat_forward(policy, family)),
        ),
    )


def exempt(policy: TrafficPolicy, family: Family) -> tuple[IPNetwork | None, ...]:
    """Return the destinations not to masquerade, None for all of them: neither tool prints a match of everything."""
    return tuple(x if x.prefixlen else None for x in policy.masq_exclude if x.version == family)


def _masquerade(policy: TrafficPolicy, pair: Pair, family: Family) -> tuple[Rule, ...]:
    network, subnet, comment = pair.network, pair.subnet, MASQ_COMMENT
    fully = policy.random_fully
    return (
        Rule("RETURN", mark=KUBE_PROXY_MARK, comment=comment),
        Rule("RETURN", source=subnet, destination=network, comment=comment),
        Rule("RETURN", source=network, destination=subnet, comment=comment),
        Rule("RETURN", source=network, source_inverted=True, destination=subnet, comment=comment),
        *(Rule("RETURN", source=network, destination=x, comment=comment) for x in exempt(policy, family)),
        Rule(
            "MASQUERADE",
            source=network,
            destination=MULTICAST[family],
            destination_inverted=True,
            comment=comment,
            random_fully=fully,
        ),
        Rule(
            "MASQUERADE",
            source=network,
            source_inverted=True,
            destination=network,
            comment=comment,
            random_fully=fully,
        ),
    )


def _accept(network: IPNetwork, comment: str) -> tuple[Rule, ...]:
    return (
        Rule("ACCEPT", source=network, comment=comment),
        Rule("ACCEPT", destination=network, comment=comment),
    )


def _known_pairs(policy: TrafficPolicy, family: Family) -> Iterator[Pair]:
    for pair in (policy.pair(family), *policy.previous):
        if pair is not None and pair.network.version == family and pair.network.prefixlen:
            yield pair


def _flat_masquerade(policy: TrafficPolicy, family: Family) -> Iterator[Rule]:
    """Yield what versions up to v0.20 put straight into POSTROUTING."""
    for pair in _known_pairs(policy, family):
        chained = _masquerade(replace(policy, random_fully=False, masq_exclude=()), pair, family)
        yield from chained
        # A bare mark rule names no range of ours: only with the comment is it known to be ours.
        yield from (replace(rule, comment="") for rule in chained if rule.mark is None)
        for comment in ("", MASQ_COMMENT):
            for target in ("RETURN", "ACCEPT"):
                yield Rule(target, source=pair.network, destination=pair.network, comment=comment)


def _flat_forward(policy: TrafficPolicy, family: Family) -> Iterator[Rule]:
    """Yield what versions up to v0.20 put straight into FORWARD.

    Bare ones are taken for ours only while our chain accepts the same traffic:
    who switches forward rules off may have written them by hand.
    """
    for pair in _known_pairs(policy, family):
        yield from _accept(pair.network, FORWARD_COMMENT)
        if policy.forward:
            yield from _accept(pair.network, "")
