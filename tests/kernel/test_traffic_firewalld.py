"""The real firewalld beside our rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.firewalld import Firewalld, missing
from tests.support.netns import Namespace
from tests.support.traffic import GOLDEN, GOLDEN_NATIVE, POLICY, SEED, Keeper, NativeTables, Tables, in_time

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(bool(missing()), reason=missing() or "is there"),
    pytest.mark.usefixtures("undisturbed"),
]

REPAIR_S, LEGACY_RESYNC_S = 0.3, 1.0
REJECT = "filter -A FORWARD -j REJECT --reject-with icmp-host-prohibited"
REJECT6 = "filter -A FORWARD -j REJECT --reject-with icmp6-adm-prohibited"


@pytest.fixture(autouse=True)
def lock_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "xtables.lock"))


@pytest.fixture(params=["nft", "legacy"])
def tables(request: pytest.FixtureRequest, namespace: Namespace) -> Tables:
    return Tables(namespace, request.param)


@pytest.fixture
def firewalld(tables: Tables, tmp_path: Path) -> Iterator[Firewalld]:
    with Firewalld(tables.namespace, tmp_path, "iptables", legacy=tables.variant == "legacy") as running:
        yield running


def ours_in_force(tables: Tables) -> list[list[str]]:
    """Return our rules of both families, of one only if its forward jump stands before firewalld's last word."""
    found: list[list[str]] = []
    for family, reject in ((4, REJECT), (6, REJECT6)):
        rules = tables.rules(4 if family == 4 else 6)
        jump = GOLDEN[4][0]
        hidden = jump in rules and reject in rules and rules.index(jump) > rules.index(reject)
        found.append([] if hidden else [rule for rule in rules if "flannel" in rule.lower()])
    return found


def test_F02_F15_firewalld_reloads_completely_and_ends(tables: Tables, firewalld: Firewalld) -> None:
    assert REJECT in tables.rules()
    nft = tables.variant == "nft"
    promised_s = REPAIR_S if nft else LEGACY_RESYNC_S + REPAIR_S
    with Keeper(tables.namespace, 300.0 if nft else LEGACY_RESYNC_S) as keeper:
        keeper.want(POLICY)
        assert ours_in_force(tables) == [GOLDEN[4], GOLDEN[6]]
        for how in ("--complete-reload", "--reload", "--complete-reload"):
            # Somebody else's rule tells that all tables really were flushed.
            tables.iptables(f"-w {SEED}")
            firewalld.command(how)
            in_time(promised_s, lambda: ours_in_force(tables), [GOLDEN[4], GOLDEN[6]])
            assert not [rule for rule in tables.rules() if "10.9.0.0/16" in rule]
            assert REJECT in tables.rules()
        firewalld.stop()
        in_time(promised_s, lambda: ours_in_force(tables), [GOLDEN[4], GOLDEN[6]])
        assert REJECT not in tables.rules()


def test_F02_firewalld_with_nftables_leaves_tables_of_ours_alone(namespace: Namespace, tmp_path: Path) -> None:
    tables = NativeTables(namespace)
    golden = [GOLDEN_NATIVE[4], GOLDEN_NATIVE[6]]
    with Firewalld(namespace, tmp_path, "nftables") as firewalld, Keeper(namespace, 300.0) as keeper:
        keeper.want(replace(POLICY, nftables=True))
        forks = keeper.keeper.runner.forks
        for _ in range(2):
            firewalld.command("--complete-reload")
            assert "table inet firewalld" in namespace.run("nft", "list", "tables")
            assert [tables.ours(4), tables.ours(6)] == golden
        firewalld.stop()
        assert [tables.ours(4), tables.ours(6)] == golden
        assert keeper.keeper.runner.forks == forks
