"""Every fault is repaired in time: 0.3 s after it where the kernel gives notice, else one period and as much.

What is measured is a promise: a program that shows the rules, started before the time is over, has to show them whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from flanneld.traffic.ports import Variant
from tests.support.netns import Namespace
from tests.support.traffic import (
    GOLDEN,
    GOLDEN_NATIVE,
    POLICY,
    SEED,
    Keeper,
    NativeTables,
    Tables,
    in_time,
    until,
)

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("undisturbed")]

REPAIR_S = 0.3
# With this period, only a notification can have been the reason for a repair.
NEVER_S = 300.0
LEGACY_RESYNC_S = 1.0
RESYNC_S: dict[Variant, float] = {"nft": NEVER_S, "legacy": LEGACY_RESYNC_S}
IN_TIME_S: dict[Variant, float] = {"nft": REPAIR_S, "legacy": LEGACY_RESYNC_S + REPAIR_S}
FOREIGN = 20_000


@pytest.fixture(params=["nft", "legacy"])
def tables(
    request: pytest.FixtureRequest, namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Tables:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    made = Tables(namespace, request.param)
    made.iptables(SEED)
    return made


@pytest.fixture
def keeper(tables: Tables) -> Iterator[Keeper]:
    with Keeper(tables.namespace, RESYNC_S[tables.variant]) as running:
        running.want(POLICY)
        yield running


def restore(tables: Tables, text: str, *options: str) -> None:
    wait = ["-w"] if tables.variant == "legacy" else []
    tables.namespace.run(f"iptables-{tables.variant}-restore", *wait, *options, text=text)


def others(tables: Tables) -> list[str]:
    return [line for line in tables.lines() if "flannel" not in line.lower()]


MASQ, FWD = '-m comment --comment "flanneld masq"', '-m comment --comment "flanneld forward"'

AT_ONCE = {
    "order": f"""\
*nat
-D FLANNEL-POSTRTG 2
-A FLANNEL-POSTRTG -s 10.5.7.0/24 -d 10.5.0.0/16 {MASQ} -j RETURN
COMMIT""",
    "duplicate rule": f"*filter\n-A FLANNEL-FWD -s 10.5.0.0/16 {FWD} -j ACCEPT\nCOMMIT",
    "duplicate jump": f"*nat\n-A POSTROUTING {MASQ} -j FLANNEL-POSTRTG\nCOMMIT",
    "stray rule": "*nat\n-I FLANNEL-POSTRTG -p tcp -j RETURN\nCOMMIT",
    "stray jump": "*filter\n-A INPUT -s 10.8.0.0/16 -g FLANNEL-FWD\nCOMMIT",
    "missing rule": "*nat\n-D FLANNEL-POSTRTG 6\nCOMMIT",
    "missing jump": f"*nat\n-D POSTROUTING {MASQ} -j FLANNEL-POSTRTG\nCOMMIT",
    "empty chain": "*filter\n-F FLANNEL-FWD\nCOMMIT",
    "half-written": f"""\
*nat
-D POSTROUTING {MASQ} -j FLANNEL-POSTRTG
-F FLANNEL-POSTRTG
-A FLANNEL-POSTRTG -s 10.5.7.0/24 -d 10.5.0.0/16 {MASQ} -j RETURN
COMMIT
*filter
-D FORWARD {FWD} -j FLANNEL-FWD
-F FLANNEL-FWD
-X FLANNEL-FWD
COMMIT""",
    "insertion": "*filter\n-I FORWARD -j REJECT\nCOMMIT\n*nat\n-I POSTROUTING -j ACCEPT\nCOMMIT",
    "rules of an earlier version": f"*filter\n-A FORWARD -s 10.5.0.0/16 {FWD} -j ACCEPT\nCOMMIT",
}


@pytest.mark.parametrize("fault", AT_ONCE)
def test_a_fault_that_happens_at_once(tables: Tables, keeper: Keeper, fault: str) -> None:
    restore(tables, f"{AT_ONCE[fault]}\n", "--noflush")
    theirs = others(tables)
    in_time(IN_TIME_S[tables.variant], lambda: jump_first(tables), (GOLDEN[4], GOLDEN[6]))
    assert others(tables) == theirs
    assert ("insertion" in fault) == any(line.endswith("POSTROUTING -j ACCEPT") for line in theirs)


def jump_first(tables: Tables) -> tuple[list[str], list[str]]:
    """Return our rules of both families, those of IPv4 only while their jumps stand before what lets nothing past."""
    rules = tables.rules()
    for last, jump in (("filter -A FORWARD -j REJECT", GOLDEN[4][0]), ("nat -A POSTROUTING -j ACCEPT", GOLDEN[4][3])):
        places = [i for i, rule in enumerate(rules) if rule.startswith(last)]
        if places and (jump not in rules or rules.index(jump) > places[0]):
            return [], []
    return [rule for rule in rules if "flannel" in rule.lower()], tables.ours(6)


DOCKER = """\
-t nat -N DOCKER
-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-N DOCKER
-N DOCKER-USER
-N DOCKER-ISOLATION-STAGE-1
-P FORWARD DROP
-I FORWARD -o docker0 -j DOCKER
-I FORWARD -i docker0 ! -o docker0 -j ACCEPT
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-USER"""
DOCKER_AGAIN = """\
-D FORWARD -j DOCKER-USER
-F DOCKER-USER
-X DOCKER-USER
-N DOCKER-USER
-I FORWARD -j DOCKER-USER
-t nat -F DOCKER
-D FORWARD -j DOCKER-ISOLATION-STAGE-1
-F DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
-F FORWARD
-I FORWARD -j DOCKER-USER"""
FIREWALLD = """\
-P INPUT DROP
-P FORWARD DROP
-F
-X
-t nat -F
-t nat -X
-N FORWARD_direct
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT
-A FORWARD -j FORWARD_direct
-A FORWARD -j REJECT --reject-with icmp-host-prohibited
-t nat -N POSTROUTING_direct
-t nat -A POSTROUTING -j POSTROUTING_direct
-P INPUT ACCEPT
-P FORWARD ACCEPT"""

STEP_BY_STEP = {
    "Docker starts": [DOCKER],
    "Docker reloads": [DOCKER, DOCKER_AGAIN],
    "firewalld reloads": [FIREWALLD] * 2,
}


@pytest.mark.parametrize("fault", STEP_BY_STEP)
def test_F01_F02_F15_a_program_that_writes_step_by_step(tables: Tables, keeper: Keeper, fault: str) -> None:
    for script in STEP_BY_STEP[fault]:
        for command in script.splitlines():
            tables.iptables(f"-w {command}")
        theirs = others(tables)
        in_time(IN_TIME_S[tables.variant], lambda: jump_first(tables), (GOLDEN[4], GOLDEN[6]))
        assert others(tables) == theirs
    assert ("filter :FORWARD DROP" in others(tables)) == fault.startswith("Docker")


KUBE = """\
*nat
:KUBE-POSTROUTING - [0:0]
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-A FORWARD -j KUBE-FORWARD
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
"""


def test_F13_whole_tables_are_restored(tables: Tables, keeper: Keeper) -> None:
    restore(tables, KUBE)
    theirs = others(tables)
    assert "nat -A POSTROUTING -j KUBE-POSTROUTING" in theirs
    in_time(IN_TIME_S[tables.variant], tables.ours, GOLDEN[4])
    assert others(tables) == theirs


@pytest.mark.parametrize("tables", ["nft"], indirect=True)
def test_F02_the_whole_ruleset_is_flushed(tables: Tables, keeper: Keeper) -> None:
    for _ in range(3):
        tables.namespace.run("nft", "flush", "ruleset")
        in_time(REPAIR_S, lambda: (tables.ours(4), tables.ours(6)), (GOLDEN[4], GOLDEN[6]))


def test_F04_among_twenty_thousand_rules_of_others(tables: Tables) -> None:
    lines = "".join(f"-A OTHERS -s 10.{16 + n // 65536}.{n // 256 % 256}.{n % 256} -j ACCEPT\n" for n in range(FOREIGN))
    restore(tables, f"*filter\n:OTHERS - [0:0]\n{lines}COMMIT\n", "--noflush")
    with Keeper(tables.namespace, RESYNC_S[tables.variant]) as keeper:
        keeper.want(POLICY)

        def chain() -> str:
            program = f"iptables-{tables.variant}"
            listings = (
                tables.namespace.run(program, "-w", *where.split(), check=False)
                for where in ("-S FLANNEL-FWD", "-t nat -S FLANNEL-POSTRTG", "-t nat -S POSTROUTING")
            )
            return "".join(listings)

        whole = chain()
        assert whole.count("flanneld masq") == 7
        for fault in ("half-written", "order", "duplicate jump", "stray rule"):
            restore(tables, f"{AT_ONCE[fault]}\n", "--noflush")
            in_time(IN_TIME_S[tables.variant], chain, whole)
    assert sum("OTHERS" in rule for rule in tables.rules()) == FOREIGN
    assert tables.ours() == GOLDEN[4]


NATIVE = {
    "order": "delete table ip flannel-ipv4\n"
    "add table ip flannel-ipv4\n"
    "add chain ip flannel-ipv4 postrtg { type nat hook postrouting priority 100; policy accept; }\n"
    + "".join(
        f"add rule ip flannel-ipv4 {line}\n"
        for line in sorted(line for line in GOLDEN_NATIVE[4] if line.startswith("postrtg ip"))
    ),
    "duplicate rule": "add rule ip flannel-ipv4 forward ip daddr 10.5.0.0/16 accept",
    "stray rule": "insert rule ip flannel-ipv4 postrtg return",
    "stray chain": "add chain ip flannel-ipv4 stray\nadd rule ip flannel-ipv4 forward jump stray",
    "stray set": "add set ip flannel-ipv4 stray { type ipv4_addr; }",
    "half-written": "flush chain ip flannel-ipv4 postrtg\ndelete chain ip flannel-ipv4 hostrtg",
    "chain gone": "delete chain ip flannel-ipv4 forward",
    "table gone": "delete table ip flannel-ipv4",
    "tables gone": "flush ruleset",
    "asleep": "add table ip flannel-ipv4 { flags dormant; }",
    "policy": "add chain ip flannel-ipv4 forward { policy drop; }",
}


@pytest.mark.parametrize("fault", NATIVE)
@pytest.mark.parametrize("crowded", [False, True], ids=["alone", "crowded"])
def test_L43_a_fault_in_nftables_mode(namespace: Namespace, fault: str, crowded: bool) -> None:
    tables = NativeTables(namespace)
    if crowded:
        rules = "".join(f"add rule ip others c ip saddr 10.{n // 256 % 256}.{n % 256}.1 accept\n" for n in range(2000))
        tables.nft(f"add table ip others\nadd chain ip others c\n{rules}")
    with Keeper(namespace, NEVER_S) as keeper:
        keeper.want(replace(POLICY, nftables=True))
        assert (tables.ours(4), tables.ours(6)) == (GOLDEN_NATIVE[4], GOLDEN_NATIVE[6])

        def all_of_ours() -> list[list[str]]:
            # Flags, sets and empty chains are in the whole listing only, where chains may come in another order
            # and those that others made have no comment.
            listings = (
                namespace.run("nft", "list", "table", *name.split(), check=False).splitlines()
                for name in ("ip flannel-ipv4", "ip6 flannel-ipv6")
            )
            lines = (sorted(line for line in listing if "comment" not in line) for listing in listings)
            return [tables.ours(4), tables.ours(6), *lines]

        whole = all_of_ours()
        tables.nft(NATIVE[fault])
        in_time(REPAIR_S, all_of_ours, whole)


def test_the_variant_changes(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    nft, legacy = Tables(namespace, "nft"), Tables(namespace, "legacy")

    def choose(variant: str) -> None:
        program = shutil.which(f"iptables-{variant}")
        assert program is not None
        (tmp_path / "new").symlink_to(program)
        (tmp_path / "new").rename(tmp_path / "iptables")

    choose("nft")
    with Keeper(namespace, LEGACY_RESYNC_S) as keeper:
        keeper.want(POLICY)
        assert (nft.ours(), legacy.ours()) == (GOLDEN[4], [])
        choose("legacy")
        in_time(2 * LEGACY_RESYNC_S, lambda: (nft.ours(), legacy.ours()), ([], GOLDEN[4]))
        until(lambda: (nft.ours(6), legacy.ours(6)), ([], GOLDEN[6]))
