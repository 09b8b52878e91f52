"""``python -m benchmarks.kube``: what Kubernetes mode and the CNI plugin cost (root)."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kube.cni import CALLS, Plugins
from benchmarks.kube.decode import WAYS
from benchmarks.kube.nodes import OWN, pages
from benchmarks.leases import absent, peers
from benchmarks.machine import compile_daemon, cpu_s, describe, rss_mib
from benchmarks.table import Row, render
from flanneld import __version__
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4

FEW, MANY = 10, 5000
ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 180.0
UPDATES = 100
UPDATE_EACH_S = 0.03
UPDATE_TIMEOUT_S = 10.0
RTMGRP_NEIGH = 4  # linux/rtnetlink.h
Figures = dict[str, float]

_MODELS, _JSON = "Kubernetes client's models", "json.loads"
LISTS = (
    Row(f"{MANY} nodes decoded, processor time", "fields s", _MODELS, "models s", digits=3),
    Row(f"{MANY} nodes decoded, memory", "fields MiB", _MODELS, "models MiB", unit="MiB", digits=1),
    Row(f"{MANY} nodes to leases, processor time", "leases s", _MODELS, "models s", digits=3),
    Row(f"{MANY} nodes to leases, processor time", "leases s", _JSON, "json s", digits=3),
    Row(f"{MANY} nodes to leases, memory", "leases MiB", _MODELS, "models MiB", unit="MiB", digits=1),
    Row(f"{MANY} nodes to leases, memory", "leases MiB", _JSON, "json MiB", unit="MiB", digits=1),
    Row(f"{MANY} nodes listed by the manager", f"manager {MANY} s", "bytes read alone", "bytes s"),
    Row("the same, processor time", f"manager {MANY} cpu s", "bytes read alone", "bytes cpu s"),
    Row(
        f"processor time per update, {MANY} nodes",
        f"manager {MANY} update s",
        f"{FEW} nodes",
        f"manager {FEW} update s",
        1000,
        "ms",
    ),
)


def _both(title: str, name: str, **options: Any) -> Row:
    """Return the row of a figure that a daemon with many and one with few nodes have."""
    return Row(title, f"ready {MANY} {name}", f"{FEW} nodes", f"ready {FEW} {name}", **options)


DAEMON = (
    _both(f"exec to READY, {MANY} nodes in the kernel", "s"),
    _both("of this: exec to the first request", "start s"),
    Row("of this: pages fetched and understood", f"ready {MANY} list s"),
    _both("of this: last page to READY, kernel programmed", "kernel s"),
    _both("processor time to READY", "cpu s"),
    _both("resident memory", "MiB", unit="MiB", digits=1),
    _both("greatest memory", "peak MiB", unit="MiB", digits=1),
    _both("changed node until it is in the kernel", "update s", scale=1000, unit="ms", digits=1),
    _both(f"the slowest of {UPDATES}", "slowest s", scale=1000, unit="ms", digits=1),
    _both("processor time for one, whole daemon", "update cpu s", scale=1000, unit="ms"),
)
CNI = (
    Row("plugin, VERSION", "cni version s", "its interpreter", "cni interpreter s", 1000, "ms", 1),
    Row("plugin, ADD, delegate that does nothing", "cni idle s", "delegate alone", "cni idle alone s", 1000, "ms", 1),
    Row("plugin, ADD, delegate bridge", "cni add s", "bridge alone", "cni add alone s", 1000, "ms", 1),
    Row("plugin, DEL, delegate bridge", "cni del s", "bridge alone", "cni del alone s", 1000, "ms", 1),
)


def child(*command: str) -> Figures:
    """Run a module of this package and return the figures it prints."""
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command}: {done.stderr}")
    found: Figures = json.loads(done.stdout.splitlines()[-1])
    return found


@contextmanager
def server(address: str, count: int, *inside: str) -> Iterator[str]:
    """Yield the URL of an API server with the own node and ``count`` peers; ``inside`` is a command to run it by."""
    command = [*inside, sys.executable, "-m", "benchmarks.kube.server", address, str(count)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        if process.stdout is None:
            raise AssertionError("it was asked for")
        try:
            yield f"http://{address}:{int(process.stdout.readline())}"
        finally:
            process.kill()


def lists(directory: Path) -> Figures:
    """Return what reading the list costs, in several ways."""
    found: Figures = {}
    for way in WAYS:
        figures = child("benchmarks.kube.decode", way, str(directory))
        if figures["kept"] != MANY + 1:
            raise AssertionError(f"{way}: {figures['kept']:g} nodes")
        found |= {f"{way} {unit}": figures[unit] for unit in ("s", "MiB")}
    for count in (FEW, MANY):
        with server("127.0.0.1", count) as url:
            figures = child("benchmarks.kube.manager", "manager", url)
            found |= {f"manager {count} {name}": value for name, value in figures.items()}
            if count == MANY:
                found |= {
                    f"bytes {name}": value for name, value in child("benchmarks.kube.manager", "bytes", url).items()
                }
    return found


def daemon(lab: Lab, directory: Path, count: int) -> Figures:
    """Return what a whole daemon costs until it is ready; entries missing then are a fault."""
    with server(SWITCH_V4, count, *lab.switch.argv()) as url, a_host(lab, directory, url) as host:
        began = time.monotonic()
        host.daemon.start()
        ready_at = host.daemon.wait_ready(READY_TIMEOUT_S)
        pid = host.daemon.pid
        if pid is None:
            raise AssertionError(host.daemon.tail())
        figures = {"cpu s": cpu_s(pid), "MiB": rss_mib(pid), "peak MiB": rss_mib(pid, "VmHWM")}
        first, last = ask(lab, url, "listed")
        figures |= {
            "s": ready_at - began,
            "start s": first - began,
            "list s": last - first,
            "kernel s": ready_at - last,
        }
        missing = absent(host.namespace, peers(count))
        if missing:
            raise AssertionError(f"{missing} of {3 * count} entries are missing at READY")
        figures |= updates(lab, host, url, pid)
    return {f"ready {count} {name}": value for name, value in figures.items()}


def ask(lab: Lab, url: str, what: str) -> Any:
    """Return what the server on the switch answers."""

    def body() -> Any:
        with urllib.request.urlopen(f"{url}/{what}", timeout=READY_TIMEOUT_S) as answer:  # noqa: S310 - our own server
            return json.load(answer)

    return lab.switch.call(body)


def updates(lab: Lab, host: Host, url: str, pid: int) -> Figures:
    """Return how long changes of nodes take, one at a time, until the kernel tells of the new FDB entry."""
    took_s, used_s = [], cpu_s(pid)
    kernel = host.namespace.call(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE))
    with kernel:
        kernel.bind((0, RTMGRP_NEIGH))
        kernel.settimeout(UPDATE_TIMEOUT_S)
        for _ in range(UPDATES):
            time.sleep(UPDATE_EACH_S)
            began = time.monotonic()
            (address,) = ask(lab, url, "updates/1")
            while socket.inet_aton(address) not in kernel.recv(65536):
                pass
            took_s.append(time.monotonic() - began)
    used_s = (cpu_s(pid) - used_s) / UPDATES
    return {"update s": median(took_s), "slowest s": max(took_s), "update cpu s": used_s}


@contextmanager
def a_host(lab: Lab, directory: Path, url: str) -> Iterator[Host]:
    """Yield a host whose daemon takes its subnets from the API server."""
    config: dict[str, Any] = {"Network": "10.0.0.0/8", "Backend": {"Type": "vxlan"}}
    path = directory / "net-conf.json"
    path.write_text(json.dumps(config))
    flags = "--kube-subnet-mgr", f"--kube-api-url={url}", f"--net-config-path={path}"
    host = lab.add_host(flags=flags, env={"NODE_NAME": OWN})
    try:
        yield host
    finally:
        if host.daemon.pid is not None:
            host.daemon.kill()
        host.namespace.delete()
        lab.hosts.remove(host)


def main(argv: list[str]) -> int:
    """Run the benchmarks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kube", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("needs root: network namespaces are made")
    compile_daemon()
    load_before = os.getloadavg()[0]
    rounds: list[Figures] = []
    with tempfile.TemporaryDirectory() as scratch, Lab(1, start=False) as lab:
        directories = {name: Path(scratch) / name for name in ("pages", "cni", "daemon")}
        for directory in directories.values():
            directory.mkdir()
        for number, page in enumerate(pages(MANY)):
            (directories["pages"] / f"{number:03}").write_bytes(page)
        size_mb = sum(path.stat().st_size for path in directories["pages"].iterdir()) / 1e6
        plugins = Plugins(lab, directories["cni"])
        for number in range(options.rounds):
            print(f"round {number + 1} of {options.rounds}", file=sys.stderr)
            figures = lists(directories["pages"]) | plugins.figures()
            for count in (FEW, MANY) if number % 2 else (MANY, FEW):
                figures |= daemon(lab, directories["daemon"], count)
            rounds.append(figures)
    text = report(rounds, size_mb, load_before)
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    return 0


def report(rounds: list[Figures], size_mb: float, load_before: float) -> str:
    """Return the tables."""
    cni = [row for row in CNI if row.name in rounds[0]]
    parts = [
        "# Results: Kubernetes mode",
        f"flanneld {__version__}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. {describe()};"
        f" load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.",
        f"Medians of {len(rounds)} rounds. Each round measures both sides next to each other; a ratio is the median of"
        " the rounds' own ratios. API server, hosts and tools share the machine: where its load average says that"
        " others do too, processor times tell more than times that passed.",
        f"The list of {MANY} nodes has {size_mb:.1f} MB, in pages of 500.",
        render(LISTS, rounds),
        "- decoded, to leases: pages are read from files, in a process of its own for each way; all keep what they"
        " made.\n"
        "- memory: the greatest above that before the first page.\n"
        "- listed by the manager: libraries are loaded, the API server is connected, pages fetched and understood."
        " Bytes read alone: the same client, and nothing is made of them.\n"
        "- update: a watch event with another public address, until the change is posted.",
        render(DAEMON, rounds),
        "A whole daemon, vxlan. Routes, neighbours and FDB entries are read back with ip(8) and bridge(8) right after"
        " READY, and have to be all there. A changed node has another public address: the time is from the request that"
        " makes the server tell it to the kernel's notification of the FDB entry.",
        render(cni, rounds),
        f"From exec to exit, in a network namespace of its own; each round has the median of {CALLS} calls.",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
