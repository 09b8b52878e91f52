"""``python -m benchmarks.rules``: what keeping the traffic rules costs, and how soon they are repaired (root)."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from benchmarks.rules.ways import POLICY, WAYS, Place, Way, place
from flanneld import __version__
from flanneld.traffic.detect import open_host
from flanneld.traffic.runner import Runner
from subnet.clock import SystemClock

FOREIGN = (0, 20_000)
RESYNC_S = 5.0
"""The default of ``--iptables-resync``."""
_LOOKS = 20


def main(argv: list[str]) -> int:
    """Run the benchmarks; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rules", description="Measure the traffic rules (root).")
    parser.add_argument("--repairs", type=int, default=60, help="how often rules are damaged, per line of the table")
    parser.add_argument("--idle", type=float, default=30.0, metavar="SECONDS", help="how long idleness is watched")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        parser.error("needs root: network namespaces are made")
    load_before = os.getloadavg()[0]
    rows = [_measure(way, foreign, options.repairs, options.idle) for way in WAYS for foreign in FOREIGN]
    text = _report(rows, options.repairs, options.idle, load_before)
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    return 0


def _measure(way: Way, foreign: int, repairs: int, idle_s: float) -> tuple[str, ...]:
    print(f"{way.title}, {foreign} rules of others", file=sys.stderr)
    # A legacy variant repairs when it looks: as often as may be, so that the repair is measured and not the wait.
    with place(way, foreign, RESYNC_S if way.variant == "nft" else 1.0) as there:
        repaired = sorted(there.repair_s() for _ in range(repairs))
    with place(way, foreign, RESYNC_S) as there:
        look_s = _look_s(there)
        read_s = _seconds(lambda: there.run(way.read))
        cpu_s, forks = _idle(there, idle_s)
    return (
        way.title,
        str(foreign),
        f"{median(repaired):.3f} s",
        f"{repaired[-1]:.3f} s",
        f"{look_s * 1000:.2f} ms",
        f"{read_s * 1000:.1f} ms",
        f"{cpu_s * 60 / idle_s:.3f} s",
        str(forks),
    )


def _look_s(there: Place) -> float:
    """Return the median time of a look at one family that finds nothing to do."""

    def body() -> float:
        host = open_host(there.way.nftables, Runner(), SystemClock())
        try:
            return median(_seconds(lambda: host.enforcer.converge(POLICY, 4)) for _ in range(_LOOKS))
        finally:
            if host.watch is not None:
                host.watch.close()

    return there.namespace.call(body)


def _seconds(function: object) -> float:
    began = time.perf_counter()
    function()  # type: ignore[operator]
    return time.perf_counter() - began


def _idle(there: Place, idle_s: float) -> tuple[float, int]:
    """Return the processor seconds of this process, in which nothing but the keeper runs, and how many it forked."""
    time.sleep(1.0)
    cpu_s, forks = time.process_time(), there.keeper.runner.forks
    time.sleep(idle_s)
    return time.process_time() - cpu_s, there.keeper.runner.forks - forks


def _report(rows: list[tuple[str, ...]], repairs: int, idle_s: float, load_before: float) -> str:
    head = (
        "way",
        "rules of others",
        "repair, median",
        "repair, worst",
        "look",
        "program reads",
        "idle minute",
        "forks",
    )
    lines = [head, tuple("---" for _ in head), *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    table = "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
    return f"""\
# Results: traffic rules

flanneld {__version__}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. {describe()}; load average {load_before:.1f} \
before, {os.getloadavg()[0]:.1f} after.

{table}

- repair: {repairs} times our chain was emptied, from the end of the program that did so until another program, \
started over and over, shows it whole. Legacy tables give no notice: there it is the period of --iptables-resync, \
1 s for this, and what the repair takes.
- look: one family compared and found right, median of {_LOOKS}; beside it what the way's own program needs to print \
the rules.
- idle minute: processor time with both families and --iptables-resync={RESYNC_S:g}, {idle_s:g} s scaled to a minute; \
forks are those of these seconds.
"""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
