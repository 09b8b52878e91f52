from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from flanneld.traffic import detect
from flanneld.traffic.commands import CommandFirewall
from flanneld.traffic.converge import Converger
from flanneld.traffic.detect import Host, open_host
from flanneld.traffic.diff import diff
from flanneld.traffic.legacy import LegacyFirewall
from flanneld.traffic.ports import Firewall, Variant
from flanneld.traffic.rules import decide
from flanneld.traffic.runner import Runner
from flanneld.traffic.watch import NftWatch
from subnet.clock import SystemClock
from subnet.errors import RuleError
from tests.support.netns import Namespace
from tests.support.traffic import GOLDEN, POLICY, SEED, Keeper, Tables

pytestmark = pytest.mark.kernel

POLICY_WITHOUT_RANDOM = replace(POLICY, random_fully=False)


def look(namespace: Namespace, runner: Runner | None = None, *, nftables: bool = False) -> Host:
    def inside() -> Host:
        namespace.enter()
        return open_host(nftables, runner or Runner(), SystemClock())

    with ThreadPoolExecutor(1) as thread:
        host = thread.submit(inside).result()
    if host.watch is not None:
        host.watch.close()
    return host


def firewall_of(host: Host) -> Firewall:
    assert isinstance(host.enforcer, Converger)
    return host.enforcer.firewall


def variant_of(host: Host) -> Variant:
    return "legacy" if isinstance(firewall_of(host), LegacyFirewall) else "nft"


@pytest.mark.parametrize(
    ("nft", "legacy", "expected"),
    [
        ((), (), "nft"),
        ((SEED,), (), "nft"),
        ((), (SEED,), "legacy"),
        ((SEED, SEED), ("-N DOCKER", SEED), "legacy"),
        (("-N KUBE-SERVICES",), (SEED, SEED), "nft"),
    ],
    ids=["neither", "nft", "legacy", "docker in legacy", "kube in nft"],
)
def test_F09_variant(namespace: Namespace, nft: tuple[str, ...], legacy: tuple[str, ...], expected: Variant) -> None:
    for command in nft:
        Tables(namespace, "nft").iptables(command)
    for command in legacy:
        Tables(namespace, "legacy").iptables(command)
    host = look(namespace)
    assert variant_of(host) == expected
    others = [other for other in host.others if isinstance(other, Converger)]
    assert bool(others) == (expected == "legacy" or bool(legacy))
    assert host.why


def test_F09_looking_makes_no_table(namespace: Namespace) -> None:
    look(namespace)
    assert namespace.run("nft", "list", "ruleset").strip() == ""
    assert namespace.run("cat", "/proc/net/ip_tables_names", check=False) == ""


def test_F09_no_iptables(namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuleError, match="neither iptables nor nft"):
        look(namespace)


@pytest.mark.parametrize("variant", ["nft", "legacy"])
def test_F09_rules_of_ours_in_the_other_variant_go(namespace: Namespace, variant: Variant) -> None:
    there, elsewhere = Tables(namespace, variant), Tables(namespace, "legacy" if variant == "nft" else "nft")
    text = "".join(f"{line.split(' ', 1)[1]}\n" for line in GOLDEN[4] if line.startswith("nat"))
    program = f"iptables-{elsewhere.variant}-restore"
    namespace.run(program, "--noflush", text=f"*nat\n:FLANNEL-POSTRTG - [0:0]\n{text}COMMIT\n")
    elsewhere.iptables("-A INPUT -s 10.9.0.0/16 -j ACCEPT")
    for _ in range(2):
        there.iptables(SEED)
    with Keeper(namespace, 300.0) as keeper:
        keeper.want(POLICY)
        assert there.ours() == GOLDEN[4]
        assert elsewhere.rules() == ["filter -A INPUT -s 10.9.0.0/16 -j ACCEPT"]


def test_legacy_without_libiptc_uses_the_programs(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuleError("no library")

    monkeypatch.setattr(detect, "load_iptc", missing)
    tables = Tables(namespace, "legacy")
    tables.iptables(SEED)
    with Keeper(namespace, 300.0) as keeper:
        keeper.want(POLICY)
        assert isinstance(firewall_of(keeper.hosts[0]), CommandFirewall)
    assert tables.ours() == GOLDEN[4]
    assert tables.ours(6) == GOLDEN[6]


FAKE = """\
#!/bin/sh
[ "$1" = --version ] && echo "iptables v{version}" && exit 0
case $0 in *-save) exit 0;; esac
[ "$*" = "--noflush{wait}" ] || {{ echo "unknown option $*" >&2; exit 2; }}
/bin/cat >{out}
{refuse}
"""


@pytest.mark.parametrize(
    ("version", "suffix", "wait", "fully"),
    [
        ("1.4.7", "", "", False),
        ("1.6.1", "", "", False),
        ("1.6.2", "", " --wait=1", True),
        ("1.8.9", " (legacy)", " --wait=1", True),
        ("1.8.9", " (nf_tables)", "", True),
    ],
)
def test_F10_options_fit_the_installed_version(
    namespace: Namespace,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    suffix: str,
    wait: str,
    fully: bool,
) -> None:
    def missing() -> None:
        raise RuleError("no library")

    monkeypatch.setattr(detect, "load_iptc", missing)
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "lock"))
    out = tmp_path / "restored"
    refuse = "" if fully else f"! /bin/grep -q random-fully {out}"
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    for name in ("iptables", "iptables-save", "iptables-restore"):
        script = bin_dir / name
        script.write_text(FAKE.format(version=version + suffix, wait=wait, out=out, refuse=refuse))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_dir))
    firewall = firewall_of(look(namespace))
    assert firewall.random_fully is fully
    assert not firewall.covers(6)
    policy = POLICY if fully else POLICY_WITHOUT_RANDOM
    firewall.apply(4, diff(firewall.read(4), decide(policy, 4)))
    assert ("--random-fully" in out.read_text()) is fully
    assert out.read_text().count("COMMIT") == 2


def test_errors_of_the_programs_show_the_offending_line(namespace: Namespace) -> None:
    Tables(namespace, "nft").iptables("-A FORWARD -j ACCEPT")
    host = look(namespace)
    plans = diff(firewall_of(host).read(4), decide(POLICY, 4))
    late = [*plans]
    late[1] = late[1].__class__(table="filter", delete=(("FORWARD", "-s 10.8.0.0/16 -j ACCEPT"),), summary=("x",))

    def inside() -> None:
        namespace.enter()
        firewall_of(host).apply(4, late)

    with ThreadPoolExecutor(1) as thread, pytest.raises(RuleError, match=r"is: -D FORWARD -s 10\.8\.0\.0/16 -j ACCEPT"):
        thread.submit(inside).result()


def interest(table: str, chain: str | None) -> bool:
    return table == "filter" and chain in {"", "FLANNEL-FWD"}


def test_watch_tells_changes_near_our_rules_from_others(namespace: Namespace) -> None:
    tables = Tables(namespace, "nft")
    tables.iptables("-N OTHER")
    tables.iptables("-N FLANNEL-FWD")
    with namespace.inside():
        watch = NftWatch()
    try:
        first = watch.generation()
        assert first is not None
        assert watch.generation() == first
        tables.iptables("-A OTHER -j ACCEPT")
        assert watch.generation() != first
        assert watch.drain(interest) is False
        tables.iptables("-A FLANNEL-FWD -j ACCEPT")
        assert watch.drain(interest) is True
        assert watch.drain(interest) is False
        namespace.run("nft", "flush", "ruleset")
        assert watch.drain(interest) is True
    finally:
        watch.close()


def test_watch_takes_lost_notifications_for_a_change(namespace: Namespace) -> None:
    tables = Tables(namespace, "nft")
    tables.iptables("-N OTHER")
    with namespace.inside():
        watch = NftWatch()
    try:
        lines = "".join(f"-A OTHER -s 10.9.{i // 250}.{i % 250} -j ACCEPT\n" for i in range(3000))
        namespace.run("iptables-nft-restore", "--noflush", text=f"*filter\n{lines}COMMIT\n")
        assert watch.drain(interest) is True
        assert watch.drain(interest) is False
    finally:
        watch.close()


def test_programs_are_found_on_the_path_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.fspath(tmp_path))
    assert Runner().find("sh", "iptables") is None
