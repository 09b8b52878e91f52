"""Other programs that write rules, replayed with the commands they use."""

from __future__ import annotations

import fcntl
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path

import pytest

from flanneld.traffic import detect
from flanneld.traffic.ports import Variant
from flanneld.traffic.vtep_rules import VtepFilter
from subnet.errors import RuleError
from tests.support.netns import Namespace
from tests.support.traffic import (
    GOLDEN,
    GOLDEN_NATIVE,
    POLICY,
    Keeper,
    NativeTables,
    Tables,
    until,
)

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("undisturbed")]

RESYNC_S: dict[Variant, float] = {"nft": 300.0, "legacy": 1.0}
ONLY_V4 = replace(POLICY, v6=None)


@pytest.fixture
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "xtables.lock"
    monkeypatch.setenv("XTABLES_LOCKFILE", str(path))
    return path


@pytest.fixture(params=["nft", "legacy"])
def tables(request: pytest.FixtureRequest, namespace: Namespace, lock_file: Path) -> Tables:
    made = Tables(namespace, request.param)
    made.iptables("-N DOCKER-USER")
    return made


@pytest.fixture
def keeper(tables: Tables) -> Iterator[Keeper]:
    with Keeper(tables.namespace, RESYNC_S[tables.variant]) as running:
        running.want(ONLY_V4)
        yield running


def run(tables: Tables, script: str) -> None:
    for line in script.strip().splitlines():
        tables.iptables(f"-w {line}")


def others(tables: Tables) -> list[str]:
    return [line for line in tables.lines() if "flannel" not in line.lower()]


DOCKER = """
-t nat -N DOCKER
-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-t nat -A POSTROUTING -s 172.17.0.0/16 ! -o docker0 -j MASQUERADE
-N DOCKER
-N DOCKER-ISOLATION-STAGE-1
-P FORWARD DROP
-I FORWARD -o docker0 -j DOCKER
-I FORWARD -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-I FORWARD -i docker0 ! -o docker0 -j ACCEPT
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-USER
"""
DOCKER_AGAIN = """
-D FORWARD -j DOCKER-USER
-F DOCKER-USER
-X DOCKER-USER
-N DOCKER-USER
-A DOCKER-USER -j RETURN
-I FORWARD -j DOCKER-USER
-t nat -F DOCKER
-t nat -D PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-t nat -A PREROUTING -m addrtype --dst-type LOCAL -j DOCKER
-D FORWARD -j DOCKER-ISOLATION-STAGE-1
-F DOCKER-ISOLATION-STAGE-1
-I FORWARD -j DOCKER-ISOLATION-STAGE-1
"""


def test_F01_docker_starts_and_reloads(tables: Tables, keeper: Keeper) -> None:
    run(tables, DOCKER)
    time.sleep(0.5)
    run(tables, DOCKER_AGAIN)
    theirs = others(tables)
    assert "filter :FORWARD DROP" in theirs
    until(tables.ours, GOLDEN[4])
    time.sleep(1.2)
    assert others(tables) == theirs


FIREWALLD = """
-P INPUT DROP
-P FORWARD DROP
-P OUTPUT DROP
-F
-X
-t nat -F
-t nat -X
-N FORWARD_direct
-N FORWARD_IN_ZONES
-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED,DNAT -j ACCEPT
-A FORWARD -i lo -j ACCEPT
-A FORWARD -j FORWARD_direct
-A FORWARD -j FORWARD_IN_ZONES
-A FORWARD -m conntrack --ctstate INVALID -j DROP
-A FORWARD -j REJECT --reject-with icmp-host-prohibited
-t nat -N POSTROUTING_direct
-t nat -A POSTROUTING -j POSTROUTING_direct
-P INPUT ACCEPT
-P FORWARD ACCEPT
-P OUTPUT ACCEPT
"""


def forward(tables: Tables) -> list[str]:
    return [line.split(" ", 3)[3] for line in tables.rules() if line.startswith("filter -A FORWARD ")]


def test_F02_F15_firewalld_reloads_completely(tables: Tables) -> None:
    run(tables, FIREWALLD)
    with Keeper(tables.namespace, RESYNC_S[tables.variant]) as keeper:
        keeper.want(ONLY_V4)
        for _ in range(2):
            until(tables.ours, GOLDEN[4])
            jump = forward(tables).index('-m comment --comment "flanneld forward" -j FLANNEL-FWD')
            assert forward(tables)[jump + 1 :] == ["-j REJECT --reject-with icmp-host-prohibited"]
            theirs = others(tables)
            run(tables, FIREWALLD)
            until(tables.ours, GOLDEN[4])
            assert others(tables) == theirs


KUBE = """\
*nat
:KUBE-SERVICES - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-SVC-A - [0:0]
-A KUBE-POSTROUTING -m mark ! --mark 0x4000/0x4000 -j RETURN
-A KUBE-POSTROUTING -j MARK --xor-mark 0x4000
-A KUBE-POSTROUTING -j MASQUERADE --random-fully
-A KUBE-SERVICES -d 10.96.0.{n}/32 -p tcp -m tcp --dport 443 -j KUBE-SVC-A
COMMIT
*filter
:KUBE-FORWARD - [0:0]
-A KUBE-FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
COMMIT
"""


def restore(tables: Tables, text: str, *options: str) -> None:
    wait = ["-w"] if tables.variant == "legacy" else []
    tables.namespace.run(f"iptables-{tables.variant}-restore", *wait, *options, text=text)


def test_F13_kube_proxy_synchronises(tables: Tables, keeper: Keeper) -> None:
    restore(tables, KUBE.format(n=1), "--noflush", "--counters")
    tables.iptables("-w -t nat -I POSTROUTING -j KUBE-POSTROUTING")
    time.sleep(0.5)
    until(tables.ours, GOLDEN[4])
    before = keeper.keeper.runner.forks
    for n in range(10):
        restore(tables, KUBE.format(n=n), "--noflush", "--counters")
    time.sleep(0.5)
    # Its chains are none of our business: not even a look is due.
    assert keeper.keeper.runner.forks - before <= 2
    assert tables.ours() == GOLDEN[4]
    assert "nat -A POSTROUTING -j KUBE-POSTROUTING" in tables.rules()


def test_F02_whole_tables_are_restored_from_a_file(tables: Tables, keeper: Keeper) -> None:
    run(tables, "-t nat -A POSTROUTING -s 10.9.0.0/16 -j MASQUERADE")
    saved = "\n".join(
        line for line in tables.namespace.run(f"iptables-{tables.variant}-save").splitlines() if "FLANNEL" not in line
    )
    restore(tables, f"{saved}\n")
    until(tables.ours, GOLDEN[4])
    assert "nat -A POSTROUTING -s 10.9.0.0/16 -j MASQUERADE" in tables.rules()


HELD_S = 20.0
VTEPS = VtepFilter("eth0", 8472, frozenset({ip_address("192.0.2.2")}))


@pytest.mark.parametrize("restore_only", [False, True], ids=["libiptc", "programs"])
@pytest.mark.parametrize("tables", ["legacy"], indirect=True)
def test_F04_a_lock_held_for_twenty_seconds(
    tables: Tables,
    restore_only: bool,
    *,
    lock_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is said once; the filter of tunnelled packets follows the leases meanwhile; the rules come right after it."""
    if restore_only:
        monkeypatch.setattr(detect, "load_iptc", without_library)
    with Keeper(tables.namespace, RESYNC_S["legacy"], vtep_filter=True) as keeper:
        keeper.keeper.want_filter(VTEPS)
        keeper.want(ONLY_V4)
        with lock_file.open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            end = time.monotonic() + HELD_S
            keeper.keeper.want(replace(ONLY_V4, masquerade=False))
            state = keeper.states.get(timeout=10)
            assert not state.ok
            assert "xtables.lock" in state.problem or "xtables lock" in state.problem
            for number in itertools.count(10):
                if time.monotonic() > end:
                    break
                address = f"192.0.2.{number}"
                keeper.keeper.want_filter(replace(VTEPS, peers=frozenset({ip_address(address)})))
                until(lambda there=address: there in listed_vteps(tables), True)  # type: ignore[misc]
                assert tables.ours() == GOLDEN[4]
                time.sleep(2)
            assert number > 12
            assert keeper.states.empty()
        until(tables.ours, GOLDEN[4][:3])
        assert keeper.states.get(timeout=10).ok
    assert len([r for r in caplog.records if "xtables" in r.message and "trying again" in r.message]) == 1


def without_library() -> None:
    raise RuleError("no library")


def listed_vteps(tables: Tables) -> str:
    return tables.namespace.run("nft", "list", "table", "inet", "flannel-vtep", check=False)


FOREIGN = 20_000


def fill(tables: Tables, count: int) -> None:
    lines = "".join(f"-A OTHERS -s 10.{16 + n // 65536}.{n // 256 % 256}.{n % 256} -j ACCEPT\n" for n in range(count))
    restore(tables, f"*filter\n:OTHERS - [0:0]\n{lines}COMMIT\n", "--noflush")


def test_F04_twenty_thousand_rules_of_others(tables: Tables, keeper: Keeper) -> None:
    fill(tables, FOREIGN)
    until(tables.ours, GOLDEN[4])
    before = keeper.keeper.runner.forks
    tables.iptables("-w -t nat -F FLANNEL-POSTRTG")
    until(tables.ours, GOLDEN[4])
    time.sleep(1.0)
    # A look, a change, a look; and one more look for the filling if it was not yet over.
    assert keeper.keeper.runner.forks - before <= 4
    assert sum("OTHERS" in rule for rule in tables.rules()) == FOREIGN


def test_F04_nftables_mode_does_not_read_the_rules_of_others(namespace: Namespace) -> None:
    fill(Tables(namespace, "nft"), FOREIGN)
    tables = NativeTables(namespace)
    with Keeper(namespace, 300.0) as keeper:
        keeper.want(replace(ONLY_V4, nftables=True))
        tables.nft("flush chain ip flannel-ipv4 postrtg")
        until(tables.ours, GOLDEN_NATIVE[4])
