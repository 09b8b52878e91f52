"""``python -m benchmarks.kube``: what Kubernetes mode and the CNI plugin cost (root)."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.kube.cni import CALLS, Plugins
from benchmarks.kube.decode import WAYS
from benchmarks.kube.nodes import OWN, pages
from benchmarks.leases import absent, peers
from benchmarks.machine import cpu_s, describe, rss_mib
from benchmarks.table import Row, render
from flanneld import __version__
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import SWITCH_V4

FEW, MANY = 10, 5000
ROOT = Path(__file__).parents[2]
READY_TIMEOUT_S = 180.0
Figures = dict[str, float]

_MODELS, _JSON = "Kubernetes client's models", "json.loads"
LISTS = (
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
DAEMON = (
    Row(f"exec to READY, {MANY} nodes in the kernel", f"ready {MANY} s", f"{FEW} nodes", f"ready {FEW} s"),
    Row("the same, processor time", f"ready {MANY} cpu s", f"{FEW} nodes", f"ready {FEW} cpu s"),
    Row("resident memory", f"ready {MANY} MiB", f"{FEW} nodes", f"ready {FEW} MiB", unit="MiB", digits=1),
    Row("greatest memory", f"ready {MANY} peak MiB", f"{FEW} nodes", f"ready {FEW} peak MiB", unit="MiB", digits=1),
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
        ready_s = host.daemon.wait_ready(READY_TIMEOUT_S) - began
        pid = host.daemon.pid
        if pid is None:
            raise AssertionError(host.daemon.tail())
        figures = {"s": ready_s, "cpu s": cpu_s(pid), "MiB": rss_mib(pid), "peak MiB": rss_mib(pid, "VmHWM")}
        missing = absent(host.namespace, peers(count))
        if missing:
            raise AssertionError(f"{missing} of {3 * count} entries are missing at READY")
    return {f"ready {count} {name}": value for name, value in figures.items()}


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
        "- to leases: pages are read from files, in a process of its own for each way; all keep what they made.\n"
        "- memory: the greatest above that before the first page.\n"
        "- listed by the manager: libraries are loaded, the API server is connected, pages fetched and understood."
        " Bytes read alone: the same client, and nothing is made of them.\n"
        "- update: a watch event with another public address, until the change is posted.",
        render(DAEMON, rounds),
        "A whole daemon, vxlan. Routes, neighbours and FDB entries are read back with ip(8) and bridge(8) right after"
        " READY, and have to be all there.",
        render(cni, rounds),
        f"From exec to exit, in a network namespace of its own; each round has the median of {CALLS} calls.",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
