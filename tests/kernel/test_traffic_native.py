from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from flanneld.traffic.nftables import Nft, NftConverger
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.runner import Runner
from subnet.clock import SystemClock
from subnet.model import FAMILIES
from subnet.report import Reporter
from tests.support.netns import Namespace
from tests.support.traffic import (
    GOLDEN,
    GOLDEN_NATIVE,
    POLICY,
    SEED,
    SEEDED,
    Keeper,
    NativeTables,
    Tables,
    until,
)

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("undisturbed")]

NATIVE = replace(POLICY, nftables=True)
# Repaired on notification: with this period nothing else can have done it.
NEVER_S = 300.0


@pytest.fixture
def tables(namespace: Namespace) -> NativeTables:
    return NativeTables(namespace)


def only(directory: Path, *programs: str) -> None:
    """Make a directory for PATH that has these programs."""
    directory.mkdir(exist_ok=True)
    for program in programs:
        found = shutil.which(program)
        assert found is not None
        (directory / program).symlink_to(found)


def test_F02_L43_tables_come_back_when_they_are_changed(tables: NativeTables) -> None:
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
        for damage in (
            "flush ruleset",
            "delete table ip flannel-ipv4",
            "flush chain ip6 flannel-ipv6 postrtg",
            "insert rule ip flannel-ipv4 forward drop",
            "add set ip flannel-ipv4 stray { type ipv4_addr; }",
        ):
            tables.nft(damage)
            until(lambda: [tables.ours(4), tables.ours(6)], [GOLDEN_NATIVE[4], GOLDEN_NATIVE[6]])


def test_F04_at_rest_no_program_runs(tables: NativeTables) -> None:
    with Keeper(tables.namespace, 1.0) as keeper:
        keeper.want(NATIVE)
        before = keeper.keeper.runner.forks
        time.sleep(1.5)
        assert keeper.keeper.runner.forks == before


def test_no_program_runs_to_learn_that_there_is_no_table(tables: NativeTables) -> None:
    runner = Runner()
    converger = NftConverger(Nft(runner), Reporter(logging.getLogger(), SystemClock()))
    with tables.namespace.inside():
        assert not any(converger.converge(NATIVE.nothing(), family) for family in FAMILIES)
        assert runner.forks == 0
        tables.nft("add table ip flannel-ipv4")
        assert converger.converge(NATIVE.nothing(), 4)
    assert "flannel-ipv4" not in tables.namespace.run("nft", "list", "tables")


def test_F08_nftables_mode_needs_nft_alone(
    tables: NativeTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(tmp_path / "bin", "nft", "ip")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
    assert tables.ours() == GOLDEN_NATIVE[4]
    assert not [r for r in caplog.records if "bridge" in r.message or "iptables" in r.message]


def test_F09_without_iptables_nft_is_taken(
    tables: NativeTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    only(tmp_path / "bin", "nft", "ip")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with Keeper(tables.namespace, NEVER_S) as keeper, caplog.at_level("INFO"):
        keeper.want(POLICY)
        assert isinstance(keeper.hosts[0].enforcer, NftConverger)
    assert tables.ours() == GOLDEN_NATIVE[4]
    assert "traffic rules go to nftables: no iptables program found" in caplog.messages


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_L41_a_switch_of_mode_takes_the_former_rules_away(tables: NativeTables, variant: str) -> None:
    there = Tables(tables.namespace, "nft" if variant == "nft" else "legacy")
    there.iptables(SEED)
    with Keeper(tables.namespace, NEVER_S) as keeper:
        for _ in range(2):
            keeper.want(POLICY)
            assert (there.ours(), tables.ours()) == (GOLDEN[4], [])
            assert (there.ours(6), tables.ours(6)) == (GOLDEN[6], [])
            keeper.want(NATIVE)
            assert (there.ours(), tables.ours()) == ([], GOLDEN_NATIVE[4])
            assert (there.ours(6), tables.ours(6)) == ([], GOLDEN_NATIVE[6])
            assert there.rules() == [SEEDED]
            assert not [line for line in there.lines() if "FLANNEL" in line]


def test_L41_a_switch_of_mode_over_a_restart(tables: NativeTables) -> None:
    there = Tables(tables.namespace, "nft")
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(POLICY)
    there.iptables("-t nat -F POSTROUTING")
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
        assert [line for line in there.lines() if "FLANNEL" in line] == []
        assert tables.ours() == GOLDEN_NATIVE[4]


def test_tables_of_upstream_are_taken_over(tables: NativeTables) -> None:
    text = "".join(f"add rule ip flannel-ipv4 {line}\n" for line in GOLDEN_NATIVE[4] if line.startswith("postrtg ip"))
    tables.nft(
        "add table ip flannel-ipv4\n"
        "add chain ip flannel-ipv4 postrtg { type nat hook postrouting priority 100; policy accept; }\n" + text
    )
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
        assert tables.ours() == GOLDEN_NATIVE[4]


def test_comments_are_those_of_upstream(tables: NativeTables) -> None:
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
    for family in ("4", "6"):
        listing = tables.namespace.run("nft", "list", "table", "ip6" if family == "6" else "ip", f"flannel-ipv{family}")
        comments = [line.split('"')[1] for line in listing.splitlines() if "comment" in line]
        assert comments[0] == f"rules for flannel-ipv{family}"
        assert {
            "chain to manage traffic masquerading by flannel",
            "chain to accept flannel traffic",
        } <= set(comments)


REFUSING = """\
#!/bin/sh
text=$(cat)
case "$text" in *"{word}"*) echo "Error: {word} not supported" >&2; exit 1;; esac
echo "$text" | exec {nft} "$@"
"""


@pytest.mark.parametrize("word", ["comment", "fully-random"])
def test_F10_what_the_host_refuses_is_left_out(
    tables: NativeTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    script = tmp_path / "nft"
    script.write_text(REFUSING.format(word=word, nft=shutil.which("nft")))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
        forks = keeper.keeper.runner.forks
        keeper.want(replace(NATIVE, masquerade=False))
        assert keeper.keeper.runner.forks - forks == 6  # two families: look, change, look
        keeper.want(NATIVE)
        if word == "fully-random":
            assert tables.ours() == [line.removesuffix(" fully-random") for line in GOLDEN_NATIVE[4]]
        else:
            assert tables.ours() == GOLDEN_NATIVE[4]


@pytest.mark.parametrize("way", ["legacy", "nft", "native"])
def test_cleanup_on_exit(tables: NativeTables, way: str) -> None:
    there = Tables(tables.namespace, "legacy" if way == "legacy" else "nft")
    there.iptables(SEED)
    with Keeper(tables.namespace, NEVER_S, cleanup_on_exit=True) as keeper:
        keeper.want(NATIVE if way == "native" else POLICY)
        assert tables.ours() + there.ours()
    assert tables.ours() == there.ours() == tables.ours(6) == there.ours(6) == []
    assert not [line for line in there.lines() if "FLANNEL" in line]
    assert there.rules() == [SEEDED]


def test_without_cleanup_the_rules_stay(tables: NativeTables) -> None:
    with Keeper(tables.namespace, NEVER_S) as keeper:
        keeper.want(NATIVE)
    assert tables.ours() == GOLDEN_NATIVE[4]


def test_cleanup_before_any_policy_ends_too(tables: NativeTables) -> None:
    with Keeper(tables.namespace, NEVER_S, cleanup_on_exit=True):
        pass
    assert tables.ours() == []


def test_managed_sysctls(tables: NativeTables) -> None:
    names = ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding")
    for name in names:
        tables.namespace.sysctl(name, 0)
    for manage, expected in ((False, "0"), (True, "1")):
        with Keeper(tables.namespace, NEVER_S, manage_sysctls=manage) as keeper:
            keeper.want(NATIVE)
        values = [tables.namespace.run("cat", f"/proc/sys/{name.replace('.', '/')}").strip() for name in names]
        assert values == [expected, expected]


def test_a_variant_that_changes_under_way(
    tables: NativeTables, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nft, legacy = Tables(tables.namespace, "nft"), Tables(tables.namespace, "legacy")
    chosen = tmp_path / "iptables"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    def choose(variant: str) -> None:
        target = shutil.which(f"iptables-{variant}")
        assert target is not None
        (tmp_path / "new").symlink_to(target)
        (tmp_path / "new").rename(chosen)

    choose("nft")
    with Keeper(tables.namespace, 1.0) as keeper:
        keeper.want(POLICY)
        assert (nft.ours(), legacy.ours()) == (GOLDEN[4], [])
        choose("legacy")
        legacy.iptables(SEED)
        until(lambda: (nft.ours(), legacy.ours()), ([], GOLDEN[4]))
        legacy.iptables("-t nat -F FLANNEL-POSTRTG")
        until(legacy.ours, GOLDEN[4])
        choose("nft")
        legacy.iptables("-t nat -D POSTROUTING -s 10.9.0.0/16 -j MASQUERADE")
        until(lambda: (nft.ours(), legacy.ours()), (GOLDEN[4], []))


@pytest.mark.parametrize("way", ["legacy", "nft", "native"])
def test_L47_several_daemons_do_not_disturb_each_other(tables: NativeTables, way: str) -> None:
    there = Tables(tables.namespace, "legacy" if way == "legacy" else "nft")
    there.iptables(SEED)
    first = NATIVE if way == "native" else POLICY
    second = replace(first, chain_prefix="BLUE", table_prefix="blue", v6=None)
    with Keeper(tables.namespace, 1.0) as one, Keeper(tables.namespace, 1.0, cleanup_on_exit=True) as two:
        one.want(first)
        two.want(second)
        time.sleep(1.2)
        before = one.keeper.runner.forks, two.keeper.runner.forks
        lines = there.lines(), tables.ours(), NativeTables(tables.namespace, "blue").ours()
        time.sleep(2.2)
        assert (one.keeper.runner.forks, two.keeper.runner.forks) == before
        assert (there.lines(), tables.ours(), NativeTables(tables.namespace, "blue").ours()) == lines
        two.keeper.close()
        mine = [line for line in there.ours() if "BLUE" in line]
        assert mine == NativeTables(tables.namespace, "blue").ours() == []
        assert tables.ours() + there.ours() == (GOLDEN_NATIVE[4] if way == "native" else GOLDEN[4])


def test_a_policy_that_wants_nothing_makes_no_table(namespace: Namespace) -> None:
    with Keeper(namespace, NEVER_S) as keeper:
        keeper.want(TrafficPolicy(nftables=True))
    assert namespace.run("nft", "list", "ruleset").strip() == ""
