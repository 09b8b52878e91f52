from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from flanneld.traffic import vtep_rules
from flanneld.traffic.nft_rules import (
    DIALECTS,
    Dialect,
    Held,
    build_text,
    decide,
    differences,
    in_dialect,
    parse_table,
    repair_text,
    rule_text,
)
from flanneld.traffic.rules import Pair, Rule, TrafficPolicy
from flanneld.traffic.vtep_rules import HeldFilter, VtepFilter
from subnet.errors import RuleError
from subnet.model import Family

pytestmark = pytest.mark.pure

POLICY = TrafficPolicy(
    Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24")),
    Pair(ip_network("fc00:5::/48"), ip_network("fc00:5:0:7::/64")),
    masquerade=True,
    nftables=True,
)
TABLE = "flannel-ipv4"
CHAINS = decide(POLICY, 4)


def held(*, without: str = "", **chains: tuple[Rule | None, ...]) -> Held:
    return Held(
        {c.name: c.rules for c in CHAINS if c.name != without} | chains,
        {c.name: c.at for c in CHAINS if c.name != without},
    )


@pytest.mark.parametrize(
    ("family", "ip", "network", "subnet", "multicast"),
    [
        (4, "ip", "10.5.0.0/16", "10.5.7.0/24", "224.0.0.0/4"),
        (6, "ip6", "fc00:5::/48", "fc00:5:0:7::/64", "ff00::/8"),
    ],
)
def test_text_is_that_of_upstream(family: Family, ip: str, network: str, subnet: str, multicast: str) -> None:
    table = f"flannel-ipv{family}"
    text = build_text(family, table, decide(POLICY, family))
    lines = text.splitlines()
    assert lines[:3] == [
        f"add table {ip} {table}",
        f"delete table {ip} {table}",
        f'add table {ip} {table} {{ comment "rules for {table}"; }}',
    ]
    masq, forward = f"add rule {ip} {table} postrtg ", f"add rule {ip} {table} forward "
    assert [line.removeprefix(masq) for line in lines if line.startswith(masq)] == [
        "meta mark 0x4000 return",
        f"{ip} saddr {subnet} {ip} daddr {network} return",
        f"{ip} saddr {network} {ip} daddr {subnet} return",
        f"{ip} saddr != {subnet} {ip} daddr {network} return",
        f"{ip} saddr {network} {ip} daddr != {multicast} masquerade fully-random",
        f"{ip} saddr != {network} {ip} daddr {network} masquerade fully-random",
    ]
    assert [line.removeprefix(forward) for line in lines if line.startswith(forward)] == [
        f"{ip} saddr {network} accept",
        f"{ip} daddr {network} accept",
    ]
    assert (
        f"add chain {ip} {table} postrtg {{ type nat hook postrouting priority 100; policy accept; "
        'comment "chain to manage traffic masquerading by flannel"; }'
    ) in lines
    assert (
        f"add chain {ip} {table} forward {{ type filter hook forward priority 0; policy accept; "
        'comment "chain to accept flannel traffic"; }'
    ) in lines


def test_L45_the_host_is_masqueraded_to_remote_pods_as_with_iptables() -> None:
    (chain,) = [c for c in CHAINS if c.name == "hostrtg"]
    postrtg = CHAINS[0]
    assert chain.at.priority > postrtg.at.priority
    assert [rule_text(rule) for rule in chain.rules] == [
        "meta mark & 0x4000 == 0x4000 return",
        "ip daddr 10.5.7.0/24 return",
        "ip saddr != 10.5.0.0/16 ip daddr 10.5.0.0/16 masquerade fully-random",
    ]


@pytest.mark.parametrize(
    ("policy", "chains"),
    [
        (POLICY, ["postrtg", "hostrtg", "forward"]),
        (replace(POLICY, masquerade=False), ["forward"]),
        (replace(POLICY, forward=False), ["postrtg", "hostrtg"]),
        (replace(POLICY, masquerade=False, forward=False), []),
        (replace(POLICY, v4=None), []),
        (POLICY.nothing(), []),
    ],
)
def test_only_what_is_asked_for_is_there(policy: TrafficPolicy, chains: list[str]) -> None:
    assert [chain.name for chain in decide(policy, 4)] == chains


def test_F12_excluded_destinations_return_before_masquerade() -> None:
    policy = replace(POLICY, masq_exclude=(ip_network("10.8.0.0/16"), ip_network("fc00:8::/48")))
    texts = [rule_text(rule) for rule in decide(policy, 4)[0].rules]
    assert texts[4:6] == [
        "ip saddr 10.5.0.0/16 ip daddr 10.8.0.0/16 return",
        "ip saddr 10.5.0.0/16 ip daddr != 224.0.0.0/4 masquerade fully-random",
    ]


def test_F10_what_is_refused_is_left_out() -> None:
    assert DIALECTS[0] == Dialect()
    text = build_text(4, TABLE, in_dialect(CHAINS, Dialect(comments=False, fully_random=False)))
    assert "comment" not in text
    assert "fully-random" not in text
    assert text.count("masquerade") == 3
    plain = build_text(4, TABLE, decide(replace(POLICY, random_fully=False), 4))
    assert "fully-random" not in plain


def test_F14_no_accept_in_nat() -> None:
    assert {rule.target for chain in CHAINS if chain.at.type == "nat" for rule in chain.rules} == {
        "RETURN",
        "MASQUERADE",
    }


def test_nothing_to_do() -> None:
    assert repair_text(4, TABLE, held(), CHAINS) == ""
    assert differences(held(), CHAINS) == []


def test_a_chain_with_wrong_content_is_refilled_in_place() -> None:
    text = repair_text(4, TABLE, held(forward=(None, *CHAINS[2].rules)), CHAINS)
    assert text.startswith(f"flush chain ip {TABLE} forward\n")
    assert "postrtg" not in text
    assert "delete" not in text
    assert differences(held(forward=(None,)), CHAINS) == ["chain forward repaired"]


def test_a_missing_chain_is_added_and_an_unknown_one_goes() -> None:
    before = held(without="postrtg", stray=())
    lines = repair_text(4, TABLE, before, CHAINS).splitlines()
    assert lines[0].startswith(f"add chain ip {TABLE} postrtg ")
    assert lines[-2:] == [f"flush chain ip {TABLE} stray", f"delete chain ip {TABLE} stray"]
    assert differences(before, CHAINS) == ["chain postrtg added", "chain stray removed"]


@pytest.mark.parametrize(
    "before",
    [
        replace(held(), strange=True),
        replace(held(), hooks={}),
        replace(held(), hooks={**held().hooks, "postrtg": replace(CHAINS[0].at, priority=99)}),
    ],
    ids=["a set", "no hook", "another priority"],
)
def test_what_cannot_be_corrected_in_place_is_built_anew(before: Held) -> None:
    assert repair_text(4, TABLE, before, CHAINS) == build_text(4, TABLE, CHAINS)
    assert differences(before, CHAINS)


def payload(field: str, right: object, op: str = "==") -> dict[str, object]:
    return {"match": {"op": op, "left": {"payload": {"protocol": "ip", "field": field}}, "right": right}}


NETWORK = {"prefix": {"addr": "10.5.0.0", "len": 16}}
MARK = {"meta": {"key": "mark"}}


@pytest.mark.parametrize(
    ("expressions", "expected"),
    [
        ([payload("saddr", NETWORK), {"accept": None}], Rule("ACCEPT", source=ip_network("10.5.0.0/16"))),
        (
            [payload("daddr", "10.5.7.9", "!="), {"return": None}],
            Rule("RETURN", destination=ip_network("10.5.7.9/32"), destination_inverted=True),
        ),
        (
            [{"match": {"op": "==", "left": MARK, "right": 0x4000}}, {"return": None}],
            Rule("RETURN", mark=0x4000, mark_exact=True),
        ),
        (
            [{"match": {"op": "==", "left": {"&": [MARK, 0x4000]}, "right": 0x4000}}, {"return": None}],
            Rule("RETURN", mark=0x4000),
        ),
        ([{"match": {"op": "==", "left": {"&": [MARK, 0xFFFF]}, "right": 0x4000}}, {"return": None}], None),
        ([{"masquerade": None}], Rule("MASQUERADE")),
        ([{"masquerade": {"flags": "fully-random"}}], Rule("MASQUERADE", random_fully=True)),
        ([{"masquerade": {"flags": ["fully-random"]}}], Rule("MASQUERADE", random_fully=True)),
        ([{"masquerade": {"flags": ["random"]}}], None),
        ([{"masquerade": {"port": 1024}}], None),
        ([{"counter": {"packets": 0, "bytes": 0}}, {"accept": None}], None),
        ([payload("saddr", NETWORK), payload("saddr", NETWORK), {"accept": None}], None),
        ([{"accept": None}, {"accept": None}], None),
        ([{"jump": {"target": "x"}}], None),
        ([payload("saddr", NETWORK)], None),
        ([payload("protocol", 6), {"accept": None}], None),
    ],
)
def test_rules_as_nft_lists_them(expressions: list[object], expected: Rule | None) -> None:
    listing = {"nftables": [{"rule": {"chain": "c", "expr": expressions}}]}
    assert parse_table(listing).chains == {"c": (expected,)}


def test_a_rule_with_a_comment_is_not_ours() -> None:
    listing = {"nftables": [{"rule": {"chain": "c", "expr": [{"accept": None}], "comment": "x"}}]}
    assert parse_table(listing).chains == {"c": (None,)}


def test_a_chain_with_another_policy_is_not_at_its_place() -> None:
    chain = {"name": "postrtg", "type": "nat", "hook": "postrouting", "prio": 100, "policy": "drop"}
    assert parse_table({"nftables": [{"chain": chain}]}).hooks == {}


@pytest.mark.parametrize("listing", [{}, {"nftables": [1]}, {"nftables": [{"chain": {}}]}, {"nftables": 7}])
def test_what_is_no_listing_is_refused(listing: dict[str, Any]) -> None:
    with pytest.raises(RuleError):
        parse_table(listing)
    with pytest.raises(RuleError):
        vtep_rules.parse_table(listing | {"nftables": [{"set": {}}]})


PEERS = frozenset({ip_address("192.0.2.2"), ip_address("192.0.2.3"), ip_address("2001:db8::2")})
FILTER = VtepFilter("eth1", 8472, PEERS)
GOOD = HeldFilter(vtep_rules.rule_expressions(FILTER), PEERS)


def test_S15_only_addresses_that_changed_are_named() -> None:
    assert vtep_rules.repair_text("t", GOOD, FILTER) == ""
    moved = replace(FILTER, peers=PEERS - {ip_address("192.0.2.3")} | {ip_address("2001:db8::3")})
    assert vtep_rules.repair_text("t", GOOD, moved).splitlines() == [
        "add element inet t peers6 { 2001:db8::3 }",
        "delete element inet t peers4 { 192.0.2.3 }",
    ]


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        (replace(GOOD, sound=False), FILTER),
        (replace(GOOD, rules=GOOD.rules[1:]), FILTER),
        (GOOD, replace(FILTER, port=4789)),
        (GOOD, replace(FILTER, device="eth0")),
        (GOOD, replace(FILTER, ip_in_ip=(4,))),
    ],
)
def test_S15_all_else_is_built_anew(before: HeldFilter, wanted: VtepFilter) -> None:
    assert vtep_rules.repair_text("t", before, wanted) == vtep_rules.build_text("t", wanted)


def test_S15_thousands_of_hosts_are_named_in_short_commands() -> None:
    many = replace(FILTER, peers=frozenset(ip_address("192.0.2.0") + n for n in range(1200)))
    lines = [line for line in vtep_rules.build_text("t", many).splitlines() if "element" in line]
    assert len(lines) == 3
    assert sum(line.count("192.0.") for line in lines) == 1200
