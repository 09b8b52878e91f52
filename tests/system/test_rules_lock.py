"""Another program holds the xtables lock for long: rules wait for it, and nothing else does."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import pytest

from flanneld.ctl.lab.hosts import Host
from tests.support.site import Network, answer, lossless, readyz, settle

pytestmark = pytest.mark.system

HELD_S = 20.0
PORT = 18381
FLAGS = ("--ip-masq", "--iptables-resync=1", "--healthz-ip=127.0.0.1", f"--healthz-port={PORT}")


def rules(host: Host) -> list[str]:
    lines = host.run("iptables-legacy-save").splitlines()
    return sorted(line for line in lines if line.startswith("-A") and "flanneld" in line)


def test_F04_the_lock_is_held_for_twenty_seconds(
    network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Who damages the rules below does not wait for the daemon's lock.
    monkeypatch.setenv("XTABLES_LOCKFILE", str(tmp_path / "others.lock"))
    held = tmp_path / "xtables.lock"
    hosts = [network.host(*FLAGS, env={"XTABLES_LOCKFILE": str(held)}) for _ in range(2)]
    for host in hosts:
        host.run("iptables-legacy", "-w", "-t", "nat", "-A", "POSTROUTING", "-s", "10.9.0.0/16", "-j", "MASQUERADE")
    network.start(*hosts)
    for host in hosts:
        network.lab.add_pod(host)
    network.settled()
    victim, other = hosts
    whole = rules(victim)
    assert sum("-j MASQUERADE" in rule for rule in whole) == 2
    with lossless((victim, other)), held.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = time.monotonic() + HELD_S
        victim.run("iptables-legacy", "-w", "-t", "nat", "-F", "FLANNEL-POSTRTG")
        damaged = rules(victim)
        settle("the reason", lambda: str(held) not in readyz(victim, PORT)[1], 5)
        number = 0
        while time.monotonic() < end:
            number += 1
            network.peer(number)
            network.settled(within_s=3)
            assert str(held) in readyz(victim, PORT)[1]
            assert answer(victim, PORT, "/healthz")[0] == 200
            assert rules(victim) == damaged
            time.sleep(0.5)
        assert number > 10
    settle("the rules", lambda: set(whole) ^ set(rules(victim)), 2.5)
    assert rules(victim) == whole
    settle("no reason", lambda: str(held) in readyz(victim, PORT)[1], 5)
