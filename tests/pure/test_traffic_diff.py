from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_network

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flanneld.traffic.diff import diff
from flanneld.traffic.render import Saved, parse_rule, restore_text, rule_text
from flanneld.traffic.rules import Pair, TrafficPolicy, decide
from tests.support.restore import BUILT_IN, RestoreError, Tables, restore

pytestmark = pytest.mark.pure

PAIR = Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24"))
OLD = Pair(ip_network("10.4.0.0/16"), ip_network("10.4.1.0/24"))
POLICY = TrafficPolicy(PAIR, masquerade=True, previous=(OLD,))
WANTED = decide(POLICY, 4)
OURS = {rules.table: (rules.chain, rules.hook) for rules in WANTED}
JUMPS = {rules.table: rule_text(rules.jump) for rules in WANTED}

FOREIGN = [
    "-s 10.9.0.0/16 -j MASQUERADE",
    "-s 10.5.0.0/16 -d 10.77.0.0/16 -j RETURN",
    '-s 10.99.0.0/16 ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE',
    "-s 10.77.0.0/16 -d 10.5.7.0/24 -j RETURN",
    "-p tcp -m tcp --dport 80 -j ACCEPT",
    "-i docker0 -j DROP",
    '-m comment --comment "not -j FLANNEL-FWD" -j ACCEPT',
]
CATCH_ALL = ["-j REJECT --reject-with icmp-host-prohibited", "-j DROP"]
ACCEPT_ALL = "-m comment --comment everything -j ACCEPT"
THEIRS = {*FOREIGN, *CATCH_ALL, ACCEPT_ALL, "-j KUBE-X"}


def saved(tables: Tables) -> Saved:
    return Saved({t: {c: tuple(rules) for c, rules in chains.items()} for t, chains in tables.items()})


def repaired(tables: Tables, policy: TrafficPolicy = POLICY) -> Tables:
    return restore(tables, restore_text(diff(saved(tables), decide(policy, 4))))


def intact() -> Tables:
    return repaired({})


def foreign(tables: Tables) -> dict[tuple[str, str], list[str]]:
    kept = {}
    for table, chains in tables.items():
        for chain, rules in chains.items():
            if chain != OURS[table][0]:
                kept[table, chain] = [r for r in rules if r in THEIRS]
    return {key: rules for key, rules in kept.items() if rules}


def old_flat_rules() -> dict[str, list[str]]:
    return {rules.table: [rule_text(r) for r in sorted(rules.obsolete, key=repr)] for rules in WANTED}


@st.composite
def damaged(draw: st.DrawFn) -> Tables:
    tables: Tables = {}
    for table, (chain, hook) in OURS.items():
        if draw(st.booleans()):
            good = [rule_text(r) for rules in WANTED if rules.table == table for r in rules.rules]
            ours = draw(st.lists(st.sampled_from([*good, *FOREIGN[:2]]), max_size=9)) if draw(st.booleans()) else good
            have_chain = draw(st.booleans())
            jumps = [JUMPS[table], f"-j {chain}", f"-s 10.8.0.0/16 -g {chain}"] if have_chain else []
            anything = st.lists(
                st.sampled_from(
                    [*FOREIGN, *CATCH_ALL, ACCEPT_ALL, "-j KUBE-X", *old_flat_rules()[table], *jumps, *jumps]
                ),
                max_size=8,
            )
            tables[table] = {name: draw(anything) for name in BUILT_IN[table]}
            tables[table]["KUBE-X"] = [r for r in draw(anything) if r != "-j KUBE-X"]
            if have_chain:
                tables[table][chain] = ours
            assert hook in tables[table]
    return tables


@settings(max_examples=60, deadline=None)
@given(damaged())
def test_one_repair_is_enough_and_others_rules_stay(before: Tables) -> None:
    after = repaired(before)
    assert diff(saved(after), WANTED) == ()
    assert foreign(after) == foreign(before)
    for rules in WANTED:
        chains = after[rules.table]
        assert chains[rules.chain] == [rule_text(r) for r in rules.rules]
        everywhere = [r for texts in chains.values() for r in texts if rules.chain in r and r not in FOREIGN]
        assert everywhere == [JUMPS[rules.table]]
        assert JUMPS[rules.table] in chains[rules.hook]


@settings(max_examples=50, deadline=None)
@given(damaged(), st.sampled_from(["masquerade", "forward", "all"]))
def test_L39_what_is_switched_off_goes_completely(before: Tables, off: str) -> None:
    policy = POLICY.nothing() if off == "all" else replace(POLICY, **{off: False})  # type: ignore[arg-type]
    after = repaired(before, policy)
    assert diff(saved(after), decide(policy, 4)) == ()
    assert foreign(after) == foreign(before)
    for rules in decide(policy, 4):
        if not rules.rules:
            chains = after.get(rules.table, {})
            assert rules.chain not in chains
            assert not [r for texts in chains.values() for r in texts if rules.chain in r and r not in FOREIGN]


@settings(max_examples=50, deadline=None)
@given(damaged(), damaged())
def test_F13_a_plan_without_deletions_fits_whatever_others_did_meanwhile(seen: Tables, there: Tables) -> None:
    text = restore_text(diff(saved(seen), WANTED, delete=False))
    after = restore(there, text)
    assert foreign(after) == foreign(there)


def test_F13_a_plan_with_deletions_may_come_too_late() -> None:
    seen = intact()
    seen["filter"]["FORWARD"].append("-j FLANNEL-FWD")
    with pytest.raises(RestoreError):
        restore(intact(), restore_text(diff(saved(seen), WANTED)))


def test_nothing_to_do_is_no_plan() -> None:
    assert diff(saved(intact()), WANTED) == ()


def test_missing_jumps_go_to_the_end() -> None:
    tables = intact()
    tables["nat"]["POSTROUTING"] = FOREIGN[:2]
    assert repaired(tables)["nat"]["POSTROUTING"] == [*FOREIGN[:2], JUMPS["nat"]]


def test_an_existing_jump_stays_where_it_is() -> None:
    tables = intact()
    tables["filter"]["FORWARD"] = [JUMPS["filter"], *FOREIGN]
    tables["filter"]["FLANNEL-FWD"] = []
    assert repaired(tables)["filter"]["FORWARD"] == [JUMPS["filter"], *FOREIGN]


@pytest.mark.parametrize("catch_all", CATCH_ALL)
def test_F15_a_new_jump_goes_before_a_rule_that_rejects_everything(catch_all: str) -> None:
    tables: Tables = {"filter": {"INPUT": [], "FORWARD": [FOREIGN[4], catch_all, FOREIGN[5]], "OUTPUT": []}}
    after = repaired(tables)["filter"]["FORWARD"]
    assert after == [FOREIGN[4], JUMPS["filter"], catch_all, FOREIGN[5]]


@pytest.mark.parametrize("catch_all", CATCH_ALL)
def test_F15_a_jump_that_stands_behind_is_moved(catch_all: str) -> None:
    tables = intact()
    tables["filter"]["FORWARD"] = [FOREIGN[4], catch_all, FOREIGN[5], JUMPS["filter"]]
    assert repaired(tables)["filter"]["FORWARD"] == [FOREIGN[4], JUMPS["filter"], catch_all, FOREIGN[5]]
    (plan,) = diff(saved(tables), WANTED)
    assert catch_all in plan.summary[0]


def test_F15_masquerade_goes_before_a_rule_that_accepts_everything() -> None:
    tables = intact()
    tables["nat"]["POSTROUTING"] = [FOREIGN[0], "-j ACCEPT", JUMPS["nat"]]
    tables["filter"]["FORWARD"] = ["-j ACCEPT", JUMPS["filter"]]
    after = repaired(tables)
    assert after["nat"]["POSTROUTING"] == [FOREIGN[0], JUMPS["nat"], "-j ACCEPT"]
    assert after["filter"]["FORWARD"] == ["-j ACCEPT", JUMPS["filter"]]


def test_F15_of_several_jumps_a_useful_one_stays() -> None:
    tables = intact()
    tables["filter"]["FORWARD"] = [JUMPS["filter"], "-j DROP", JUMPS["filter"]]
    assert repaired(tables)["filter"]["FORWARD"] == [JUMPS["filter"], "-j DROP"]


FLAT = {
    "v0.11": """\
-s {n} -d {n} -j RETURN
-s {n} ! -d 224.0.0.0/4 -j MASQUERADE
! -s {n} -d {p} -j RETURN
! -s {n} -d {n} -j MASQUERADE""",
    "v0.11 random": """\
-s {n} -d {n} -j RETURN
-s {n} ! -d 224.0.0.0/4 -j MASQUERADE --random-fully
! -s {n} -d {p} -j RETURN
! -s {n} -d {n} -j MASQUERADE --random-fully""",
    "v0.19": """\
-s {n} -d {n} -m comment --comment "flanneld masq" -j RETURN
-s {n} ! -d 224.0.0.0/4 -m comment --comment "flanneld masq" -j MASQUERADE --random-fully
! -s {n} -d {p} -m comment --comment "flanneld masq" -j RETURN
! -s {n} -d {n} -m comment --comment "flanneld masq" -j MASQUERADE --random-fully""",
}


@pytest.mark.parametrize("pair", [PAIR, OLD], ids=["current", "previous"])
@pytest.mark.parametrize("style", FLAT)
@pytest.mark.parametrize("masquerade", [True, False])
def test_F16_flat_rules_of_older_versions_go(style: str, pair: Pair, masquerade: bool) -> None:
    flat = FLAT[style].format(n=pair.network, p=pair.subnet).splitlines()
    tables = intact()
    tables["nat"]["POSTROUTING"] = [FOREIGN[0], *flat, FOREIGN[2], JUMPS["nat"], FOREIGN[3]]
    after = repaired(tables, replace(POLICY, masquerade=masquerade))["nat"]["POSTROUTING"]
    assert [r for r in after if r != JUMPS["nat"]] == [FOREIGN[0], FOREIGN[2], FOREIGN[3]]


@pytest.mark.parametrize("style", FLAT)
def test_F16_flat_rules_of_other_ranges_stay(style: str) -> None:
    look_alikes = FLAT[style].format(n="10.99.0.0/16", p="10.99.1.0/24").splitlines()
    tables = intact()
    tables["nat"]["POSTROUTING"].extend(look_alikes)
    assert repaired(tables) == tables


def test_F16_bare_accepts_stay_when_forward_rules_are_off() -> None:
    bare = ["-s 10.5.0.0/16 -j ACCEPT", "-d 10.5.0.0/16 -j ACCEPT"]
    ours = [f'{r.split(" -j ")[0]} -m comment --comment "flanneld forward" -j ACCEPT' for r in bare]
    tables: Tables = {"filter": {"INPUT": [], "FORWARD": [*bare, *ours], "OUTPUT": []}}
    assert repaired(tables)["filter"]["FORWARD"] == [JUMPS["filter"]]
    assert repaired(tables, replace(POLICY, forward=False))["filter"]["FORWARD"] == bare


def test_F05_every_part_may_be_missing_when_all_has_to_go() -> None:
    for table, (chain, hook) in OURS.items():
        tables = intact()
        tables[table][hook] = []
        assert not diff(saved(repaired(tables, POLICY.nothing())), decide(POLICY.nothing(), 4))
        del tables[table][chain]
        assert not diff(saved(repaired(tables, POLICY.nothing())), decide(POLICY.nothing(), 4))


def test_the_chain_is_rebuilt_in_one_transaction() -> None:
    tables = intact()
    del tables["nat"]["FLANNEL-POSTRTG"][2]
    (plan,) = diff(saved(tables), WANTED)
    lines = restore_text([plan]).splitlines()
    assert lines[:2] == ["*nat", ":FLANNEL-POSTRTG - [0:0]"]
    assert [parse_rule(line.split(" ", 2)[2]) for line in lines[2:8]] == list(WANTED[0].rules)
    assert lines[8:] == ["COMMIT"]
    assert plan.summary == ("repaired chain FLANNEL-POSTRTG in nat: 1 rule missing",)
