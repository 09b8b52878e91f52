"""``python -m benchmarks``: measure, print the tables, and write them to a file if asked to."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from pathlib import Path

from benchmarks.machine import compile_daemon, describe
from benchmarks.rounds import FEW, MANY, Bench, Figures, throughput
from benchmarks.table import Row, render
from flanneld import __version__
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.measure import can_measure

_BATCH, _BARE = "ip and bridge -batch", "bare interpreter"
COSTS = (
    Row("exec to READY, no peers", "ready 0 s", "interpreter starts and ends", "interpreter start s"),
    *(Row(f"exec to {n} leases in the kernel", f"ready {n} s", _BATCH, f"batch {n} s") for n in (FEW, MANY)),
    *(Row(f"the same less a start without peers, {n}", f"net {n} s", _BATCH, f"batch {n} s") for n in (FEW, MANY)),
    Row(f"restart, {MANY} leases still in the kernel", f"restart {MANY} s", "start without peers", "ready 0 s"),
    Row("processor time to READY, no peers", "ready 0 cpu s"),
    *(Row(f"processor time to READY, {n} leases", f"ready {n} cpu s", _BATCH, f"batch {n} cpu s") for n in (FEW, MANY)),
    *(
        Row(f"resident memory, {n} peers", f"rss {n} MiB", _BARE, "interpreter rss MiB", unit="MiB", digits=1)
        for n in (0, FEW, MANY)
    ),
    *(Row(f"processor time per idle minute, {n} peers", f"cpu {n} s") for n in (0, FEW)),
)
TRAFFIC = (
    Row("one TCP connection between containers", "tunnel bps", "between their hosts", "underlay bps", 1e-9, "Gbit/s"),
)


def main(argv: list[str]) -> int:
    """Run the benchmarks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure what the daemon costs (root, etcd)."
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--idle", type=float, default=20.0, metavar="SECONDS", help="how long idleness is watched")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("needs root: network namespaces are made")
    compile_daemon()
    load_before = os.getloadavg()[0]
    text = _report(_costs(options.rounds, options.idle), _traffic(options.rounds), options.idle, load_before)
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    return 0


def _costs(rounds: int, idle_s: float) -> list[Figures]:
    found = []
    with Lab(1, start=False) as lab:
        bench = Bench(lab, idle_s)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
            figures = bench.round(number)
            net = {f"net {count} s": figures[f"ready {count} s"] - figures["ready 0 s"] for count in (FEW, MANY)}
            found.append(figures | net)
    return found


def _traffic(rounds: int) -> list[Figures]:
    if not can_measure():
        return []
    with Lab(2) as lab:
        return [throughput(lab, 2) for _ in range(rounds)]


def _report(costs: list[Figures], traffic: list[Figures], idle_s: float, load_before: float) -> str:
    parts = [
        "# Results",
        f"flanneld {__version__}, etcd mode, vxlan, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. {describe()};"
        f" load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.",
        f"Medians of {len(costs)} rounds. Each round measures daemon and reference next to each other; a ratio is the"
        " median of the rounds' own ratios. Etcd, hosts and tools share the machine. Where its load average says that"
        " others do too, processor times tell more than times that passed.",
        render(COSTS, costs),
        "- exec to READY: from the start of the process to READY=1 on its notification socket. With leases, routes,"
        " neighbours and FDB entries are read back with ip(8) and bridge(8) right after it, and have to be all there.\n"
        "- ip and bridge -batch: the same entries on a fresh device, three processes, without etcd.\n"
        f"- idle: {idle_s:g} s were watched and scaled to a minute; both daemons at once.\n"
        "- memory: VmRSS, after the idle time; with the most peers, at READY.",
    ]
    if traffic:
        parts += [render(TRAFFIC, traffic), "iperf3, 2 s each, over veth pairs and a bridge, all on one machine."]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
