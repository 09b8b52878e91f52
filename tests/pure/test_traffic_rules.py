from __future__ import annotations

from ipaddress import IPv4Network, IPv6Network, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.traffic.render import is_catch_all, parse_rule, parse_save, restore_text, rule_text, target_of
from flanneld.traffic.rules import Pair, Rule, RuleSet, TrafficPolicy, decide, exempt
from subnet.errors import RuleError
from subnet.model import Family

pytestmark = pytest.mark.pure

V4 = Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24"))
V6 = Pair(ip_network("fc00:5::/48"), ip_network("fc00:5:0:7::/64"))

MASQ4 = """\
-m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-s 10.5.7.0/24 -d 10.5.0.0/16 -m comment --comment "flanneld masq" -j RETURN
-s 10.5.0.0/16 -d 10.5.7.0/24 -m comment --comment "flanneld masq" -j RETURN
! -s 10.5.0.0/16 -d 10.5.7.0/24 -m comment --comment "flanneld masq" -j RETURN
-s 10.5.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
! -s 10.5.0.0/16 -d 10.5.0.0/16 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
""".splitlines()

MASQ6 = """\
-m mark --mark 0x4000/0x4000 -m comment --comment "flanneld masq" -j RETURN
-s fc00:5:0:7::/64 -d fc00:5::/48 -m comment --comment "flanneld masq" -j RETURN
-s fc00:5::/48 -d fc00:5:0:7::/64 -m comment --comment "flanneld masq" -j RETURN
! -s fc00:5::/48 -d fc00:5:0:7::/64 -m comment --comment "flanneld masq" -j RETURN
-s fc00:5::/48 ! -d ff00::/8 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
! -s fc00:5::/48 -d fc00:5::/48 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
""".splitlines()


def sets(policy: TrafficPolicy, family: Family = 4) -> dict[str, RuleSet]:
    return {rules.table: rules for rules in decide(policy, family)}


def texts(rules: RuleSet) -> list[str]:
    return [rule_text(rule) for rule in rules.rules]


@pytest.mark.parametrize(("family", "expected"), [(4, MASQ4), (6, MASQ6)])
def test_masquerade_rules_read_as_upstream(family: Family, expected: list[str]) -> None:
    nat = sets(TrafficPolicy(V4, V6, masquerade=True), family)["nat"]
    assert (nat.hook, nat.chain) == ("POSTROUTING", "FLANNEL-POSTRTG")
    assert texts(nat) == expected
    assert rule_text(nat.jump) == '-m comment --comment "flanneld masq" -j FLANNEL-POSTRTG'


def test_forward_rules_read_as_upstream() -> None:
    filter_ = sets(TrafficPolicy(V4))["filter"]
    assert (filter_.hook, filter_.chain) == ("FORWARD", "FLANNEL-FWD")
    assert texts(filter_) == [
        '-s 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT',
        '-d 10.5.0.0/16 -m comment --comment "flanneld forward" -j ACCEPT',
    ]
    assert rule_text(filter_.jump) == '-m comment --comment "flanneld forward" -j FLANNEL-FWD'


def test_random_fully_can_be_left_out() -> None:
    nat = sets(TrafficPolicy(V4, masquerade=True, random_fully=False))["nat"]
    assert texts(nat) == [text.replace(" --random-fully", "") for text in MASQ4]


@pytest.mark.parametrize(
    ("policy", "family", "with_rules"),
    [
        (TrafficPolicy(V4), 4, {"filter"}),
        (TrafficPolicy(V4, masquerade=True, forward=False), 4, {"nat"}),
        (TrafficPolicy(V4, forward=False), 4, set()),
        (TrafficPolicy(V4, masquerade=True), 6, set()),
        (TrafficPolicy(V4, V6, masquerade=True).nothing(), 4, set()),
        (TrafficPolicy(V4, V6, masquerade=True).nothing(), 6, set()),
    ],
)
def test_L39_what_is_off_has_no_rules(policy: TrafficPolicy, family: Family, with_rules: set[str]) -> None:
    assert {rules.table for rules in decide(policy, family) if rules.rules} == with_rules


def test_excluded_destinations_keep_the_address_of_the_pod() -> None:
    excluded = (ip_network("172.16.0.0/12"), ip_network("fc00:9::/32"))
    policy = TrafficPolicy(V4, V6, masquerade=True, masq_exclude=excluded)
    added4 = '-s 10.5.0.0/16 -d 172.16.0.0/12 -m comment --comment "flanneld masq" -j RETURN'
    added6 = '-s fc00:5::/48 -d fc00:9::/32 -m comment --comment "flanneld masq" -j RETURN'
    assert texts(sets(policy)["nat"]) == [*MASQ4[:4], added4, *MASQ4[4:]]
    assert texts(sets(policy, 6)["nat"]) == [*MASQ6[:4], added6, *MASQ6[4:]]


def test_chain_prefix_keeps_daemons_apart() -> None:
    chains = {(r.chain, r.jump.target) for r in decide(TrafficPolicy(V4, chain_prefix="RED"), 4)}
    assert chains == {("RED-POSTRTG", "RED-POSTRTG"), ("RED-FWD", "RED-FWD")}


networks = st.one_of(
    st.none(),
    st.tuples(st.integers(0, 2**32 - 1), st.integers(1, 32)).map(lambda t: ip_network(t, strict=False)),
    st.tuples(st.integers(0, 2**128 - 1), st.integers(1, 128)).map(lambda t: ip_network(t, strict=False)),
)


@st.composite
def any_rule(draw: st.DrawFn) -> Rule:
    source, destination = draw(networks), draw(networks)
    target = draw(st.sampled_from(["ACCEPT", "RETURN", "MASQUERADE", "FLANNEL-FWD"]))
    return Rule(
        target,
        source=source,
        source_inverted=source is not None and draw(st.booleans()),
        destination=destination,
        destination_inverted=destination is not None and draw(st.booleans()),
        mark=draw(st.one_of(st.none(), st.integers(1, 2**32 - 1))),
        comment=draw(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=20)),
        random_fully=target == "MASQUERADE" and draw(st.booleans()),
    )


@given(any_rule())
def test_rule_text_parses_back(rule: Rule) -> None:
    text = rule_text(rule)
    assert parse_rule(text) == rule
    assert target_of(text) == rule.target


@pytest.mark.parametrize(
    "text",
    [
        "-s 10.5.0.0/16 -p tcp -j ACCEPT",
        "-s 10.5.0.0/16 -o eth0 -j MASQUERADE",
        "-s 10.5.0.0/16 -j MASQUERADE --to-ports 1024-2048",
        "-m mark --mark 0x4000/0xffff -j RETURN",
        "-m mark ! --mark 0x4000/0x4000 -j RETURN",
        "-g FLANNEL-FWD",
        "-s 10.5.0.0/16",
        "-j",
        "",
    ],
)
def test_a_rule_that_says_anything_else_is_not_taken_for_ours(text: str) -> None:
    assert parse_rule(text) is None


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("-i eth0 -g FLANNEL-FWD", "FLANNEL-FWD"),
        ('-m comment --comment "to -j FLANNEL-FWD" -j ACCEPT', "ACCEPT"),
        ('-j LOG --log-prefix "x -j FLANNEL-FWD"', "LOG"),
        (r'-m comment --comment "a \" -j X" -j Y', "Y"),
        ("-s 10.5.0.0/16", ""),
    ],
)
def test_target_of(text: str, target: str) -> None:
    assert target_of(text) == target


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("-j REJECT --reject-with icmp-host-prohibited", True),
        ("-j DROP", True),
        ('-m comment --comment "the end" -j DROP', True),
        ("-i eth0 -j DROP", False),
        ("-m conntrack --ctstate INVALID -j DROP", False),
        ("-j DROPPED", False),
        ("-j DROP-INVALID", False),
        ("-j ACCEPT", False),
    ],
)
def test_F15_catch_all(text: str, expected: bool) -> None:
    assert is_catch_all(text) is expected


SAVED = """\
# Generated by iptables-nft-save v1.8.9 (nf_tables) on Mon Jan  1 00:00:00 2024
*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [12:345]
:FLANNEL-POSTRTG - [0:0]
-A POSTROUTING -m comment --comment "flanneld masq" -j FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -s 10.5.0.0/16 -j RETURN
-A FLANNEL-POSTRTG
COMMIT
# Completed
"""


def test_save_output_keeps_order_and_drops_counters() -> None:
    assert parse_save(SAVED).tables == {
        "nat": {
            "PREROUTING": (),
            "POSTROUTING": ('-m comment --comment "flanneld masq" -j FLANNEL-POSTRTG',),
            "FLANNEL-POSTRTG": ("-s 10.5.0.0/16 -j RETURN", ""),
        }
    }


def test_a_table_that_iptables_cannot_show_is_an_error() -> None:
    with pytest.raises(RuleError, match="nat"):
        parse_save("# Table `nat' is incompatible, use 'nft' tool.\n")


def test_no_plan_is_no_text() -> None:
    assert restore_text(()) == ""


def test_I08_an_exemption_of_everything_is_a_rule_without_destination() -> None:
    everything = (IPv4Network("0.0.0.0/0"), IPv6Network("::/0"), IPv4Network("10.8.0.0/16"))
    policy = TrafficPolicy(masquerade=True, masq_exclude=everything)
    assert exempt(policy, 4) == (None, IPv4Network("10.8.0.0/16"))
    assert exempt(policy, 6) == (None,)
