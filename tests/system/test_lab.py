from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.ctl.lab import Lab, netns, traces
from flanneld.ctl.lab.errors import LabError
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.measure import throughput_bps
from flanneld.ctl.lab.state import missing, observe, peer_leases
from flanneld.ctl.lab.tools import poll, run
from tests.support.echoes import all_answer

ROOT = Path(__file__).parents[2]
READY_S = 300
"""One of the demonstrations runs in the emulated guest."""
NODE = (sys.executable, str(ROOT / "tests" / "support" / "vxlan_node.py"))

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, command=NODE) as built:
        yield built


def faults(lab: Lab) -> list[str]:
    leases = peer_leases(lab.etcd.leases())
    own = {host.name: frozenset(g.network for g in host.gateways()) for host in lab.hosts}
    return [gap for host in lab.hosts for gap in missing(observe(host), own[host.name], leases)]


def test_hosts_hold_state_for_each_other(lab: Lab) -> None:
    poll("every entry", lambda: not faults(lab), timeout_s=10)
    assert set(lab.etcd.leases()) == {"10.5.1.0-24", "10.5.2.0-24"}
    assert {h.subnet_env()["FLANNEL_SUBNET"] for h in lab.hosts} == {"10.5.1.1/24", "10.5.2.1/24"}
    assert lab.hosts[0].daemon.notify.status == "up"
    assert "192.0.2.1 has 10.5.1.0/24" in lab.hosts[0].daemon.log()


def test_containers_reach_each_other_with_full_packets(lab: Lab) -> None:
    first, second = (h.pod for h in lab.hosts)
    all_answer(lab.hosts)
    answers, mean_ms = first.ping(second)
    assert answers == 3
    assert mean_ms is not None
    assert first.namespace.ping(second.address(), payload_bytes=1450 - 27, dont_fragment=True, count=1)[0] == 0
    if shutil.which("iperf3"):
        assert (throughput_bps(first, second, seconds=1) or 0) > 1e6


def test_a_missing_entry_is_named(lab: Lab) -> None:
    poll("every entry", lambda: not faults(lab), timeout_s=10)
    lab.hosts[0].daemon.signal(signal.SIGSTOP)
    try:
        lab.hosts[0].run("ip", "route", "del", "10.5.2.0/24")
        lab.hosts[0].run("ip", "neigh", "flush", "nud", "permanent", "dev", "flannel.1")
        lab.hosts[0].run("bridge", "fdb", "del", "02:00:00:00:01:02", "dev", "flannel.1")
        mac = "02:00:00:00:01:02"
        assert faults(lab) == ["route 10.5.2.0/24", f"neigh 10.5.2.0 lladdr {mac}", f"fdb {mac} dst 192.0.2.2"]
    finally:
        lab.hosts[0].daemon.signal(signal.SIGCONT)
    poll("every entry", lambda: not faults(lab), timeout_s=10)


def test_a_flow_counts_what_is_lost(lab: Lab) -> None:
    first, second = (h.pod for h in lab.hosts)
    with Flow(first.namespace, second.namespace, second.address()) as flow:
        poll("datagrams", flow.flowing, timeout_s=10)
        lab.cut(lab.hosts[1])
        poll("nothing", lambda: not flow.flowing(), timeout_s=10)
        lab.cut(lab.hosts[1], connected=True)
        poll("datagrams", flow.flowing, timeout_s=10)
        mark = flow.sent
        poll("more", lambda: flow.sent > mark + 20, timeout_s=10)
    assert 0.4 < flow.outage_s() < 20
    assert flow.lost() > 50
    assert flow.lost(mark) == 0


def test_daemons_end_and_start_again(lab: Lab) -> None:
    daemon = lab.hosts[1].daemon
    daemon.kill()
    assert daemon.exit_code == -signal.SIGKILL
    assert daemon.pid is None
    daemon.start()
    assert daemon.wait_ready() <= time.monotonic()
    daemon.restart()
    assert daemon.runs == 3
    assert daemon.log(all_runs=True).count("has 10.5.2.0/24") == 3


def test_the_store_forgets_fails_and_returns(lab: Lab) -> None:
    etcd = lab.etcd
    revision = etcd.put("/elsewhere/a", "ä")
    assert etcd.get("/elsewhere/a") == "ä"
    assert etcd.ttl_s("/elsewhere/a") == -1
    etcd.put("/elsewhere/b", "1", ttl_s=100)
    assert 90 <= etcd.ttl_s("/elsewhere/b") <= 100
    assert list(etcd.list("/elsewhere/")) == ["/elsewhere/a", "/elsewhere/b"]
    etcd.revoke("/elsewhere/b")
    assert etcd.get("/elsewhere/b") is None
    etcd.compact()
    with pytest.raises(LabError, match="compacted"):
        etcd.call("kv/range", {"key": "YQ==", "revision": revision})
    etcd.stop()
    with pytest.raises(OSError, match="refused"):
        etcd.put("/elsewhere/a", "2")
    etcd.start()
    assert etcd.get("/elsewhere/a") == "ä"
    assert etcd.delete("/elsewhere/a")
    for host in lab.hosts:
        if host.daemon.pid is None:  # this stand-in does not survive its store
            host.daemon.start()
            host.daemon.wait_ready()


def test_a_daemon_that_ends_is_reported_with_its_log() -> None:
    with (
        pytest.raises(LabError, match=r"h1: the daemon ended with 3:\n  no such luck"),
        Lab(1, command=("sh", "-c", "echo no such luck; exit 3")) as lab,
    ):
        assert not lab
    assert not traces.find(f"{traces.STEM}{os.getpid()}.")[1:]


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def start(*flags: str) -> subprocess.Popen[str]:
    daemon = " ".join(NODE)
    argv = [sys.executable, "-m", "flanneld.ctl", "lab", "--hosts", "1", "--daemon", daemon, *flags]
    return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def left_of(pid: int) -> list[traces.Trace]:
    return [t for t in traces.find(f"{traces.STEM}{pid}") if t.prefix == f"{traces.STEM}{pid}"]


def wait_until_up(tool: subprocess.Popen[str]) -> None:
    assert tool.stdout is not None
    for line in tool.stdout:
        if "waiting for flanneld" in line:
            return
    pytest.fail("the lab did not get as far as its daemons")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_remove_everything(number: signal.Signals) -> None:
    with start() as tool:
        wait_until_up(tool)
        tool.send_signal(number)
        assert tool.wait(30) == 128 + number
    assert left_of(tool.pid) == []
    assert netns.names(f"{traces.STEM}{tool.pid}-") == []


def test_the_next_run_removes_what_a_killed_one_left() -> None:
    with start() as tool:
        wait_until_up(tool)
        tool.kill()
    (trace,) = left_of(tool.pid)
    inside = [pid for name in trace.namespaces for pid in netns.pids(name)]
    assert trace.namespaces
    assert trace.directories
    assert inside
    assert not trace.alive
    with start("--seconds", "0") as following:
        assert following.wait(60) == 0
    assert left_of(tool.pid) == []
    assert not [pid for pid in inside if runs(pid)]


def test_a_kept_lab_stays_until_it_is_cleaned() -> None:
    with start("--seconds", "0", "--keep") as tool:
        output, _ = tool.communicate(timeout=60)
    prefix = f"{traces.STEM}{tool.pid}"
    try:
        assert tool.returncode == 0
        assert f"ip netns exec {prefix}-h1 bash" in output
        assert traces.sweep(prefix) == []
        assert run("ip", "-n", f"{prefix}-h1", "addr", "show", "flannel.1").count("10.5.1.0/32") == 1
    finally:
        assert traces.sweep(prefix, kept=True) == [prefix]
    assert netns.names(prefix) == []


@pytest.mark.parametrize(
    ("backend", "family"),
    [
        *(("vxlan", family) for family in ("v4", "v6", "dual")),
        *(("host-gw", family) for family in ("v4", "v6", "dual")),
        ("vxlan --option DirectRouting=true", "dual"),
        ("udp", "v4"),
        pytest.param("ipip", "dual", marks=pytest.mark.vm),
    ],
)
def test_the_demonstration_holds_with_the_real_daemon(backend: str, family: str) -> None:
    argv = [sys.executable, "-m", "flanneld.ctl", "lab", "--hosts", "2", "--seconds", "0", "--timeout", str(READY_S)]
    argv += ["--backend", *backend.split(), "--family", family]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=2 * READY_S, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert "Every container reaches every other; no entry is missing." in done.stdout
    connections = 4 if family == "dual" else 2
    assert done.stdout.count("3 of 3") == connections
    direct = backend == "host-gw" or "DirectRouting" in backend
    assert done.stdout.count(" dev eth0 proto 142") == (connections if direct else 0)
