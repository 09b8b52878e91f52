"""The nft variant's chains read one by one, compared with what iptables-nft-save prints."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flanneld.traffic.nft_chains import read_chains
from flanneld.traffic.render import Saved, parse_save
from flanneld.traffic.rules import decide
from subnet.model import FAMILIES, Family
from tests.support.netns import Namespace
from tests.support.traffic import GOLDEN, POLICY, Keeper, Tables

pytestmark = pytest.mark.kernel

HOOKS = {"nat": "POSTROUTING", "filter": "FORWARD"}


@pytest.fixture
def tables(namespace: Namespace) -> Tables:
    made = Tables(namespace, "nft")
    with Keeper(namespace, 300.0) as keeper:
        keeper.want(POLICY)
    return made


def looked(tables: Tables, family: Family = 4) -> Saved | None:
    with tables.namespace.inside():
        return read_chains(family, decide(POLICY, family))


def printed(tables: Tables, family: Family = 4) -> dict[str, dict[str, tuple[str, ...]]]:
    saved = parse_save(tables.namespace.run(f"{'ip6' if family == 6 else 'ip'}tables-nft-save"))
    return {
        table: {name: rules for name, rules in saved.chains(table).items() if name in {hook, *ours}}
        for (table, hook), ours in zip(HOOKS.items(), (["FLANNEL-POSTRTG"], ["FLANNEL-FWD"]), strict=True)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_read_as_iptables_prints_them(tables: Tables, family: Family) -> None:
    assert tables.ours(family) == GOLDEN[family]
    others = "-s 10.8.0.0/16 -j ACCEPT" if family == 4 else "-s fc00:8::/32 -j ACCEPT"
    tables.iptables(f"-I FORWARD {others}", family)
    saved = looked(tables, family)
    assert saved is not None
    assert saved.tables == printed(tables, family)


def test_without_tables_there_are_no_chains(namespace: Namespace) -> None:
    with namespace.inside():
        assert read_chains(4, decide(POLICY, 4)) == Saved({"nat": {}, "filter": {}})


def test_rules_of_others_are_not_looked_at(tables: Tables) -> None:
    before = looked(tables)
    lines = "".join(f"-A OTHERS -s 10.9.{n // 250}.{n % 250} -j ACCEPT\n" for n in range(1000))
    tables.namespace.run("iptables-nft-restore", "--noflush", text=f"*filter\n:OTHERS - [0:0]\n{lines}COMMIT\n")
    assert looked(tables) == before


def test_rules_of_others_in_the_hooks_keep_their_places(tables: Tables) -> None:
    tables.iptables("-I FORWARD -p tcp --dport 80 -j DROP")
    tables.iptables("-A FORWARD -j REJECT --reject-with icmp-host-prohibited")
    saved = looked(tables)
    assert saved is not None
    first, ours, last = saved.chains("filter")["FORWARD"]
    assert first == "-m opaque"
    assert ours == printed(tables)["filter"]["FORWARD"][1]
    assert last.startswith("-j REJECT")


@pytest.mark.parametrize(
    "damage",
    [
        "-t nat -A FLANNEL-POSTRTG -p tcp -j RETURN",
        "-A INPUT -j FLANNEL-FWD",
        "-A INPUT -s 10.8.0.0/16 -g FLANNEL-FWD",
        "-I FORWARD -p udp -j FLANNEL-FWD",
    ],
)
def test_what_cannot_be_seen_this_way_is_left_to_the_program(tables: Tables, damage: str) -> None:
    assert looked(tables) is not None
    tables.iptables(damage)
    assert looked(tables) is None


@pytest.mark.parametrize(
    "damage",
    [
        "-t nat -D FLANNEL-POSTRTG 3",
        "-t nat -A FLANNEL-POSTRTG -s 10.8.0.0/16 -j RETURN",
        "-t nat -A POSTROUTING -m comment --comment x -j FLANNEL-POSTRTG",
        "-A FORWARD -j FLANNEL-FWD",
        "-F FORWARD",
    ],
)
def test_what_has_to_be_repaired_is_seen(tables: Tables, damage: str) -> None:
    tables.iptables(damage)
    saved = looked(tables)
    assert saved is not None
    assert saved.tables == printed(tables)


def test_a_family_is_looked_at_on_its_own(tables: Tables) -> None:
    tables.iptables("-F FLANNEL-FWD", 6)
    saved = looked(tables)
    assert saved is not None
    assert saved.tables == printed(tables)
    with tables.namespace.inside():
        six = read_chains(6, decide(replace(POLICY, v4=None), 6))
    assert six is not None
    assert six.chains("filter")["FLANNEL-FWD"] == ()
