from __future__ import annotations

import fcntl
import itertools
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path

import pytest

from flanneld.traffic.converge import Converger
from flanneld.traffic.ports import Variant
from flanneld.traffic.rules import Pair, TrafficPolicy
from tests.support.netns import Namespace
from tests.support.traffic import GOLDEN, POLICY, SEED, SEEDED, V4, Keeper, Tables, until

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("undisturbed")]

OLD = Pair(ip_network("10.4.0.0/16"), ip_network("10.4.1.0/24"))
# The nft variant repairs on notification: with this period nothing else can have done it.
RESYNC_S: dict[Variant, float] = {"nft": 300.0, "legacy": 1.0}


@pytest.fixture(params=["nft", "legacy"])
def tables(request: pytest.FixtureRequest, namespace: Namespace, lock_file: Path) -> Tables:
    made = Tables(namespace, request.param)
    made.iptables(SEED)
    return made


@pytest.fixture
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    return path


@pytest.fixture
def keeper(tables: Tables) -> Iterator[Keeper]:
    with Keeper(tables.namespace, RESYNC_S[tables.variant]) as running:
        yield running


def test_rules_are_exactly_those_of_upstream(tables: Tables, keeper: Keeper) -> None:
    tables.iptables("-A FORWARD -s 172.16.0.0/12 -j DROP")
    tables.iptables("-P FORWARD DROP")
    tables.iptables("-A FORWARD -s fc00:9::/32 -j DROP", 6)
    before = {family: tables.lines(family) for family in (4, 6)}
    keeper.want(POLICY)
    assert tables.ours(4) == GOLDEN[4]
    assert tables.ours(6) == GOLDEN[6]
    for family, lines in before.items():
        after = tables.lines(4 if family == 4 else 6)
        assert [line for line in after if line in lines] == lines
    other = Tables(tables.namespace, "legacy" if tables.variant == "nft" else "nft")
    assert other.lines() == []


DAMAGE = [
    "-F;-t nat -F;-X;-t nat -X",
    "-t nat -F FLANNEL-POSTRTG",
    "-t nat -F POSTROUTING",
    "-F FORWARD",
    "-F FLANNEL-FWD",
    "-t nat -D FLANNEL-POSTRTG 3",
    "-D FLANNEL-FWD 1",
    "-t nat -F;-t nat -X",
    "-F FORWARD;-F FLANNEL-FWD;-X FLANNEL-FWD",
    "-t nat -I FLANNEL-POSTRTG -j ACCEPT",
    "-A FORWARD -j FLANNEL-FWD;-A INPUT -s 10.8.0.0/16 -g FLANNEL-FWD",
    "-A INPUT -s 10.8.0.0/16 -g FLANNEL-FWD",
    "-I FORWARD -p udp -j FLANNEL-FWD",
]


def test_F01_F02_damage_is_repaired(tables: Tables, keeper: Keeper) -> None:
    policy = replace(POLICY, v6=None)
    tables.iptables("-P FORWARD DROP")
    keeper.want(policy)
    for script in DAMAGE:
        for command in script.split(";"):
            # On a busy machine the repair may come between two commands, and the second then fails.
            tables.iptables(command, check=False)
        until(tables.ours, GOLDEN[4])
    if tables.variant == "nft":
        tables.namespace.run("nft", "flush", "ruleset")
        until(tables.ours, GOLDEN[4])
    else:
        assert "filter :FORWARD DROP" in tables.lines()


def test_F04_at_rest_no_program_runs(tables: Tables) -> None:
    chain = "".join(f"-A OTHERS -s 10.9.{i // 250}.{i % 250} -j ACCEPT\n" for i in range(1000))
    restore = f"iptables-{tables.variant}-restore"
    tables.namespace.run(restore, "--noflush", text=f"*filter\n:OTHERS - [0:0]\n{chain}COMMIT\n")
    with Keeper(tables.namespace, resync_s=1.0) as keeper:
        keeper.want(POLICY)
        before = keeper.keeper.runner.forks
        time.sleep(1.5)
        assert keeper.keeper.runner.forks == before
        tables.iptables("-A OTHERS -s 10.10.0.1 -j ACCEPT")
        time.sleep(1.5)
        assert keeper.keeper.runner.forks - before <= 2


def test_L39_switching_off_removes_rules(tables: Tables, keeper: Keeper) -> None:
    seeded = tables.rules()
    keeper.want(POLICY)
    keeper.want(replace(POLICY, masquerade=False))
    assert tables.ours() == GOLDEN[4][:3]
    keeper.want(replace(POLICY, forward=False, v6=None))
    assert tables.ours() == GOLDEN[4][3:]
    assert tables.ours(6) == []
    keeper.want(POLICY.nothing())
    assert tables.rules() == seeded
    assert not [line for line in tables.lines() if "FLANNEL" in line]


PARTS = [
    "-t nat -F POSTROUTING",
    "-t nat -F FLANNEL-POSTRTG",
    "-F FLANNEL-FWD",
    "-F FORWARD;-F FLANNEL-FWD;-X FLANNEL-FWD",
]


def test_F05_whatever_is_missing_the_rest_goes(tables: Tables) -> None:
    for script in PARTS:
        with Keeper(tables.namespace, 300.0) as first:
            first.want(POLICY)
        for command in script.split(";"):
            tables.iptables(command)
        if "-F POSTROUTING" in script:
            tables.iptables(SEED)
        with Keeper(tables.namespace, 300.0) as second:
            second.want(POLICY.nothing())
        assert [line for line in tables.lines() if "FLANNEL" in line] == []


def test_F05_each_rule_in_turn_may_be_missing_when_the_subnet_changes(tables: Tables) -> None:
    with Keeper(tables.namespace, 300.0) as first:
        first.want(POLICY)
    pair = V4
    for number, rule in enumerate(GOLDEN[4]):
        table, line = rule.replace(str(V4.subnet), str(pair.subnet)).split(" -A ", 1)
        text = f"*{table}\n-D {line}\nCOMMIT\n"
        tables.namespace.run(f"iptables-{tables.variant}-restore", "--noflush", text=text)
        moved = Pair(V4.network, ip_network(f"10.5.{100 + number}.0/24"))
        with Keeper(tables.namespace, 300.0) as second:
            second.want(replace(POLICY, v4=moved, previous=(pair,)))
        pair = moved
        assert tables.ours() == [line.replace(str(V4.subnet), str(pair.subnet)) for line in GOLDEN[4]]
    assert tables.ours(6) == GOLDEN[6]


FLAT = """\
-s {n} -d {n} {c} -j RETURN
-s {n} ! -d 224.0.0.0/4 {c} -j MASQUERADE --random-fully
! -s {n} -d {p} {c} -j RETURN
! -s {n} -d {n} {c} -j MASQUERADE"""


def test_F16_flat_rules_of_earlier_versions_go(tables: Tables, keeper: Keeper) -> None:
    stay = ["-s 10.77.0.0/16 -d 10.4.1.0/24 -j RETURN", "-s 10.99.0.0/16 ! -d 224.0.0.0/4 -j MASQUERADE"]
    flat = [
        rule.format(n=pair.network, p=pair.subnet, c=comment)
        for pair in (V4, OLD)
        for comment in ("", '-m comment --comment "flanneld masq"')
        for rule in FLAT.splitlines()
    ]
    text = "".join(f"-A POSTROUTING {rule}\n" for rule in [stay[0], *flat, stay[1]])
    tables.namespace.run(f"iptables-{tables.variant}-restore", "--noflush", text=f"*nat\n{text}COMMIT\n")
    keeper.want(replace(POLICY, previous=(OLD,)))
    hook = [rule for rule in tables.rules() if rule.startswith("nat -A POSTROUTING")]
    assert hook == [SEEDED, *(f"nat -A POSTROUTING {rule}" for rule in stay), GOLDEN[4][3]]


def test_rules_follow_the_subnet(tables: Tables, keeper: Keeper) -> None:
    keeper.want(POLICY)
    moved = Pair(V4.network, ip_network("10.5.8.0/24"))
    keeper.want(replace(POLICY, v4=moved, previous=(V4,)))
    assert tables.ours() == [rule.replace("10.5.7.0", "10.5.8.0") for rule in GOLDEN[4]]


def test_F13_a_writer_in_between_never_makes_two_batches_fail_in_a_row(
    tables: Tables, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper.want(POLICY)
    enforcer = keeper.hosts[0].enforcer
    assert isinstance(enforcer, Converger)
    firewall = enforcer.firewall
    results: list[bool] = []
    apply = firewall.apply

    def recorded(*arguments: object) -> None:
        results.append(False)
        apply(*arguments)  # type: ignore[arg-type]
        results[-1] = True

    monkeypatch.setattr(firewall, "apply", recorded)
    done = threading.Event()

    def disturb() -> None:
        jump = ["-m", "comment", "--comment", "flanneld masq", "-j", "FLANNEL-POSTRTG"]
        while not done.is_set():
            for action in ("-D", "-A", "-A"):
                program = f"iptables-{tables.variant}"
                tables.namespace.run(program, "-w", "-t", "nat", action, "POSTROUTING", *jump, check=False)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        until(lambda: sum(results) >= 4, True)
    finally:
        done.set()
        disturber.join()
    until(tables.ours, GOLDEN[4])
    assert (False, False) not in list(itertools.pairwise(results))


@pytest.mark.parametrize("tables", ["legacy"], indirect=True)
def test_F04_a_held_lock_delays_rules_and_nothing_else(tables: Tables, keeper: Keeper, lock_file: Path) -> None:
    with lock_file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        before = time.monotonic()
        keeper.keeper.want(POLICY)
        assert time.monotonic() - before < 0.5
        time.sleep(0.5)
        assert tables.ours() == []
        assert keeper.states.empty()
    until(tables.ours, GOLDEN[4])


@pytest.mark.parametrize("tables", ["legacy"], indirect=True)
def test_close_does_not_wait_for_the_lock(tables: Tables, keeper: Keeper, lock_file: Path) -> None:
    with lock_file.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        keeper.keeper.want(POLICY)
        time.sleep(0.5)
        keeper.keeper.close()
        assert not _alive(keeper)


@pytest.mark.parametrize("tables", ["nft"], indirect=True)
def test_close_ends_a_program_that_hangs(
    tables: Tables, keeper: Keeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    script = tmp_path / "iptables-nft-save"
    script.write_text(f"#!/bin/sh\nsleep 600 & echo $! >{started}.new; mv {started}.new {started}; wait\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    keeper.keeper.want(POLICY)
    until(started.exists, True)
    keeper.keeper.close()
    assert not _alive(keeper)
    until(lambda: Path(f"/proc/{started.read_text().strip()}/cmdline").exists(), False)


def _alive(keeper: Keeper) -> bool:
    thread = keeper.keeper._thread
    assert thread is not None
    return thread.is_alive()


@pytest.mark.parametrize("tables", ["nft"], indirect=True)
def test_tables_of_nftables_mode_go(tables: Tables, keeper: Keeper) -> None:
    for name in ("ip flannel-ipv4", "ip6 flannel-ipv6", "ip flannel-ipv4-other"):
        tables.namespace.run("nft", "add", "table", *name.split())
    keeper.want(POLICY)
    listed = tables.namespace.run("nft", "list", "tables")
    assert [line for line in listed.splitlines() if "flannel" in line] == ["table ip flannel-ipv4-other"]


def test_a_policy_that_wants_nothing_makes_no_table(namespace: Namespace) -> None:
    with Keeper(namespace, 300.0) as keeper:
        keeper.want(TrafficPolicy())
    assert namespace.run("nft", "list", "ruleset").strip() == ""
