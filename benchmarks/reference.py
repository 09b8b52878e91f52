"""The yardsticks: a bare interpreter, and iproute2 that writes the same kernel entries in batches."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from benchmarks.leases import Peer
from benchmarks.machine import rss_mib
from flanneld.ctl.lab.netns import Namespace
from flanneld.ctl.lab.tools import run


def interpreter_start_s() -> float:
    """Return the seconds that an interpreter takes to start and end."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    return time.monotonic() - began


def interpreter_rss_mib() -> float:
    """Return the resident memory of an interpreter that has loaded nothing, in MiB."""
    code = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        if process.stdin is None or process.stdout is None:
            raise AssertionError("both were asked for")
        process.stdout.readline()
        found = rss_mib(process.pid)
        process.stdin.close()
    return found


def batch_s(namespace: Namespace, peers: list[Peer]) -> tuple[float, float]:
    """Have ``ip -batch`` and ``bridge -batch`` write the peers' entries on a new device.

    Returns the seconds that passed, and the processor seconds that the three processes used.
    """
    namespace.ip(
        "link add flannel.1 type vxlan id 1 dev eth0 dstport 8472 nolearning",
        "addr add 10.200.1.0/32 dev flannel.1",
        "link set flannel.1 up",
    )
    neighbours = "".join(f"neigh replace {p.base} lladdr {p.mac} dev flannel.1 nud permanent\n" for p in peers)
    fdb = "".join(f"fdb replace {p.mac} dev flannel.1 dst {p.public_ip} self permanent\n" for p in peers)
    routes = "".join(f"route replace {p.base}/24 via {p.base} dev flannel.1 onlink\n" for p in peers)
    began, used = time.monotonic(), _children_s()
    run("ip", "-n", namespace.name, "-batch", "-", stdin=neighbours, timeout_s=120)
    run("bridge", "-n", namespace.name, "-batch", "-", stdin=fdb, timeout_s=120)
    run("ip", "-n", namespace.name, "-batch", "-", stdin=routes, timeout_s=120)
    return time.monotonic() - began, _children_s() - used


def _children_s() -> float:
    times = os.times()
    return times.children_user + times.children_system
