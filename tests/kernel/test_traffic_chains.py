"""Chains read one by one, compared with what the variant's own program prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from flanneld.traffic import legacy_chains, nft_chains
from flanneld.traffic.legacy import existing_tables
from flanneld.traffic.render import Saved, parse_save
from flanneld.traffic.rules import decide
from subnet.model import FAMILIES, Family
from tests.support.netns import Namespace
from tests.support.traffic import GOLDEN, POLICY, SEED, Keeper, Tables

pytestmark = pytest.mark.kernel

OURS = {"nat": {"POSTROUTING", "FLANNEL-POSTRTG"}, "filter": {"FORWARD", "FLANNEL-FWD"}}


@pytest.fixture(params=["nft", "legacy"])
def tables(
    request: pytest.FixtureRequest, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Tables:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    made = Tables(namespace, request.param)
    made.iptables(SEED)
    with Keeper(namespace, 300.0) as keeper:
        keeper.want(POLICY)
    return made


def looked(tables: Tables, family: Family = 4, *, understood: bool = False) -> Saved | None:
    wanted = decide(POLICY, family)
    with tables.namespace.inside():
        if tables.variant == "nft":
            return nft_chains.read_chains(family, wanted, understood=understood)
        return legacy_chains.read_chains(family, wanted, existing_tables(family))


def printed(tables: Tables, family: Family = 4) -> dict[str, dict[str, tuple[str, ...]]]:
    saved = parse_save(tables.namespace.run(f"{'ip6' if family == 6 else 'ip'}tables-{tables.variant}-save"))
    return {
        table: {name: rules for name, rules in saved.chains(table).items() if name in chains}
        for table, chains in OURS.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_read_as_iptables_prints_them(tables: Tables, family: Family) -> None:
    assert tables.ours(family) == GOLDEN[family]
    others = "-s 10.8.0.0/16 -j ACCEPT" if family == 4 else "-s fc00:8::/32 -j ACCEPT"
    tables.iptables(f"-I FORWARD {others}", family)
    saved = looked(tables, family)
    assert saved is not None
    assert saved.tables == printed(tables, family)


def test_without_tables_there_are_no_chains_and_none_are_made(namespace: Namespace) -> None:
    with namespace.inside():
        assert nft_chains.read_chains(4, decide(POLICY, 4), understood=False) == Saved({"nat": {}, "filter": {}})
        assert legacy_chains.read_chains(4, decide(POLICY, 4), existing_tables(4)) == Saved()
        assert existing_tables(4) == frozenset()


def test_rules_of_others_are_not_read(tables: Tables) -> None:
    before = looked(tables)
    lines = "".join(f"-A OTHERS -s 10.9.{n // 250}.{n % 250} -j ACCEPT\n" for n in range(1000))
    text = f"*filter\n:OTHERS - [0:0]\n:ANOTHER - [0:0]\n{lines}-A OTHERS -j ANOTHER\nCOMMIT\n"
    tables.namespace.run(f"iptables-{tables.variant}-restore", "--noflush", text=text)
    assert looked(tables) == before


def test_rules_of_others_in_the_hooks_keep_their_places(tables: Tables) -> None:
    tables.iptables("-N OTHERS")
    tables.iptables("-I FORWARD -p tcp --dport 80 -j OTHERS")
    tables.iptables("-A FORWARD -j OTHERS")
    tables.iptables("-A FORWARD")
    tables.iptables("-A FORWARD -j REJECT --reject-with icmp-host-prohibited")
    saved = looked(tables)
    assert saved is not None
    first, ours, plain, counting, last = saved.chains("filter")["FORWARD"]
    assert first == "-m opaque -j OTHERS"
    assert ours == printed(tables)["filter"]["FORWARD"][1]
    assert plain == "-j OTHERS"
    assert "-m opaque" in counting
    assert last.startswith("-j REJECT")


@pytest.mark.parametrize(
    "damage",
    [
        "-A INPUT -j FLANNEL-FWD",
        "-A INPUT -s 10.8.0.0/16 -g FLANNEL-FWD",
        "-I FORWARD -p udp -j FLANNEL-FWD",
    ],
)
def test_what_cannot_be_seen_this_way_is_left_to_a_whole_reading(tables: Tables, damage: str) -> None:
    assert looked(tables, understood=True) is not None
    tables.iptables(damage)
    assert looked(tables, understood=True) is None


def test_a_rule_in_our_chain_that_cannot_be_read_is_somebody_elses_once_ours_could_be(tables: Tables) -> None:
    tables.iptables("-t nat -A FLANNEL-POSTRTG -p tcp -j RETURN")
    assert (looked(tables) is None) == (tables.variant == "nft")
    saved = looked(tables, understood=True)
    assert saved is not None
    *ours, stray = saved.chains("nat")["FLANNEL-POSTRTG"]
    assert (*ours,) == printed(tables)["nat"]["FLANNEL-POSTRTG"][:-1]
    assert stray.startswith("-m opaque")


@pytest.mark.parametrize(
    "damage",
    [
        "-t nat -D FLANNEL-POSTRTG 3",
        "-t nat -F FLANNEL-POSTRTG",
        "-t nat -F POSTROUTING",
        "-t nat -A FLANNEL-POSTRTG -s 10.8.0.0/16 -j RETURN",
        "-t nat -A POSTROUTING -m comment --comment x -j FLANNEL-POSTRTG",
        "-A FORWARD -j FLANNEL-FWD",
        "-F FORWARD;-F FLANNEL-FWD;-X FLANNEL-FWD",
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_has_to_be_repaired_is_seen(tables: Tables, damage: str, family: Family) -> None:
    for command in damage.split(";"):
        tables.iptables(command if family == 4 else command.replace("10.8.0.0/16", "fc00:8::/32"), family)
    saved = looked(tables, family)
    assert saved is not None
    assert saved.tables == printed(tables, family)
    other: Family = 6 if family == 4 else 4
    untouched = looked(tables, other)
    assert untouched is not None
    assert untouched.tables == printed(tables, other)


def test_a_comment_that_is_none_of_the_expressions_is_left_to_a_whole_reading(namespace: Namespace) -> None:
    # So iptables 1.8.0 to 1.8.2 wrote them.
    for command in (
        "add table ip filter",
        "add chain ip filter FLANNEL-FWD",
        "add chain ip filter FORWARD { type filter hook forward priority filter; }",
        'add rule ip filter FORWARD counter jump FLANNEL-FWD comment "flanneld forward"',
        'add rule ip filter FLANNEL-FWD ip saddr 10.5.0.0/16 counter accept comment "flanneld forward"',
    ):
        namespace.run("nft", command)
    with namespace.inside():
        assert nft_chains.read_chains(4, decide(POLICY, 4), understood=False) is None
