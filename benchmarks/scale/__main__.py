"""``python -m benchmarks.scale``: measure, print the table of goals, and write it to a file if asked to."""

from __future__ import annotations

import argparse
import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.machine import compile_daemon, describe
from benchmarks.scale.goals import REFERENCE, Goal, render
from benchmarks.scale.measure import BURST, FEW, MANY, MOST, WRITERS, Bench, Figures, comparison, yardstick
from flanneld import __version__
from flanneld.ctl.lab import Lab

YARDSTICK_MS = 210
GOALS = (
    Goal("exec to READY, empty cluster", "ready 0 s", 320, "ms", 1000, 0),
    Goal(f"{FEW} leases in the kernel from exec", f"start {FEW} s", 0.6),
    Goal(f"{MANY} leases in the kernel from exec", f"start {MANY} s", 1.2),
    Goal(f"that for {MANY}, and an empty start, beside {FEW}", f"growth to {MANY}", 12, "times", 1, 1),
    Goal(f"that for {MOST}, and an empty start, beside {MANY}", f"growth to {MOST}", 6, "times", 1, 1),
    Goal(f"burst of {BURST} leases by {WRITERS} writers, beside the writers' own time", "burst ratio", 1.1, "times"),
    *(Goal(f"from a put's answer to its route, {n} peers", f"route {n} s", 2, "ms", 1000, 1) for n in (FEW, MANY)),
    Goal(f"restart with {MANY} leases, READY", "restart s", 1.2),
    Goal(f"restart with {MANY} leases, entries touched", "restart touches", 0, "", 1, 0),
    Goal("resident memory, idle, no peers", "rss 0 MiB", 52, "MiB", 1, 1),
    Goal(f"resident memory, idle, {MANY} peers", f"rss {MANY} MiB", 66, "MiB", 1, 1),
    Goal("processor time per idle minute with rules, no peers", "idle 0 s", 0.05),
    Goal(f"processor time per idle minute with rules, {MANY} peers", f"idle {MANY} s", 0.05),
    Goal(f"processor time of a full comparison, {MANY} peers", "comparison cpu s", 60, "ms", 1000, 0),
)


def main(argv: list[str]) -> int:
    """Run the benchmarks; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale",
        description="Measure what thousands of peers cost (root, etcd). REFERENCE_FLANNELD=COMMAND is measured beside.",
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--largest", type=int, default=1, help=f"in how many of the rounds {MOST} leases are")
    parser.add_argument("--idle", type=float, default=20.0, metavar="SECONDS", help="how long idleness is watched")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("needs root: network namespaces are made")
    reference = shlex.split(os.environ.get("REFERENCE_FLANNELD", ""))
    compile_daemon()
    load_before = os.getloadavg()[0]
    rounds = _measure(options.rounds, options.largest, options.idle, reference)
    text = _report(rounds, options.idle, load_before, bool(reference))
    sys.stdout.write(text)
    if options.output is not None:
        options.output.write_text(text)
    return 0


def _measure(rounds: int, largest: int, idle_s: float, reference: Sequence[str]) -> list[Figures]:
    found = []
    sizes = (0, FEW, MANY, *((MOST,) if largest else ()))
    with Lab(1, start=False) as lab:
        bench = Bench(lab, sizes, idle_s)
        for number in range(rounds):
            sys.stderr.write(f"round {number + 1} of {rounds}\n")
            commands: list[tuple[str, Sequence[str]]] = [("", ())]
            if reference:
                commands.append((REFERENCE, reference))
            figures = comparison(lab, MANY) | yardstick()
            for prefix, command in commands if number % 2 else reversed(commands):
                measured = bench.round(command, largest=number < largest)
                figures |= {prefix + name: value for name, value in measured.items()}
            found.append(figures)
    return found


def _report(rounds: list[Figures], idle_s: float, load_before: float, reference: bool) -> str:
    beside = " A ratio is the median of the rounds' own ratios; which daemon comes first changes." if reference else ""
    yard_s = median(figures["yardstick s"] for figures in rounds)
    parts = [
        "# Many peers",
        f"flanneld {__version__}, etcd mode, vxlan, --ip-masq, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}."
        f" {describe()}; load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after.",
        f"Medians of {len(rounds)} rounds. Etcd, writers and tools share the machine with the daemon.{beside} How fast"
        f" the machine was: an interpreter loaded etcd3 and pyroute2 in {yard_s * 1000:.0f} ms; where the goals were"
        f" set, in {YARDSTICK_MS} ms.",
        render(GOALS, rounds),
        "- exec: with byte code, as after an installation.\n"
        "- exec to the kernel: from the start of the process until it is ready, and routes, neighbours and FDB entries"
        " are all read back.\n"
        f"- {MANY} beside {FEW}: ten times as many leases may take twelve times as long; {MOST} in few rounds.\n"
        "- burst, put: as the kernel's notifications tell; etcd is spoken to through its JSON gateway.\n"
        f"- idle: {idle_s:g} s were watched and scaled to a minute, children included.\n"
        "- comparison: in an interpreter of its own, the least of five.",
    ]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
