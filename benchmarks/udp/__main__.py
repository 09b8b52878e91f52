"""``python -m benchmarks.udp``: what every data path carries, beside a plain pump (root, gcc, iperf3).

All pairs of hosts are up at once and measured in turn, the first one differing
by round, and in alternating directions; medians are compared. Two kinds of
cable: ``full`` is a veth as it comes, which large packets cross undivided, and
``nic`` cuts and merges in the kernel as a NIC without tunnel offloads would.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import sys
import tempfile
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.machine import describe
from benchmarks.udp.pairs import Pair, Variant, build
from flanneld import __version__

VARIANTS = (
    Variant("bare", "bare"),
    Variant("vxlan", "vxlan"),
    Variant("plain", "plain"),
    Variant("native", "native"),
    Variant("python", "python"),
    Variant("bpf", "bpf"),
    Variant("native", "plain"),
    Variant("python", "plain"),
)
PATHS = ("bare", "vxlan", "plain", "native", "python", "bpf")
BETWEEN = tuple(Variant(path, path, containers=True) for path in ("vxlan", "plain", "native", "python", "bpf"))
ROUTED = tuple(Variant(path, path, more) for more in (5_000, 50_000) for path in ("plain", "native"))

LEGEND = """\
- plain: one packet per system call, a list of routes searched from its beginning, the system's own socket buffers, in
  C, as upstream's proxy is built (`benchmarks/udp/plain.c`). Two paths in a name: the first host has one, the second
  the other.
- Between containers: each behind a bridge of its host, whose rules are those that the daemon keeps, with masquerade.
- bpf: both ends are programs, which do without finished checksums; beside other peers such cables are refused.
- TCP: iperf3, cubic, directions in turn. CPU: all processors of the machine, senders and receivers included.
- 64-byte packets: one flow, at most 256 under way. Round trip: UDP, one packet at a time.
- Everything shares the machine's cores. A figure that hangs on how fast a sleeping core wakes, such as the round trip,
  varies between runs more than within one.
"""

Figures = dict[str, list[float]]
METRICS = (
    ("TCP, 1 stream", "Gbit/s", 2),
    ("TCP, 4 streams", "Gbit/s", 2),
    ("CPU, 1 stream", "s/GB", 2),
    ("64-byte packets", "k/s", 0),
    ("round trip, median", "µs", 0),
    ("round trip, 99 %", "µs", 0),
)
TCP = METRICS[:3]


def measure(pair: Pair, figures: Figures, seconds: int, reverse: bool) -> None:
    """Add one figure of each kind; between containers, of TCP alone."""
    bps, cpu = pair.tcp(1, seconds, reverse)
    figures["TCP, 1 stream"].append(bps / 1e9)
    figures["CPU, 1 stream"].append(cpu)
    figures["TCP, 4 streams"].append(pair.tcp(4, seconds, reverse)[0] / 1e9)
    if pair.variant.containers:
        return
    figures["64-byte packets"].append(pair.small(seconds / 2) / 1e3)
    typical, late = pair.round_trip(seconds / 2)
    figures["round trip, median"].append(typical)
    figures["round trip, 99 %"].append(late)


def run(
    link: str, rounds: int, seconds: int, paths: Collection[str]
) -> tuple[dict[Variant, Figures], dict[Variant, list[float]]]:
    """Return the figures of one kind of cable, and packets per second to two hosts with many routes."""
    variants = [v for v in (*VARIANTS, *BETWEEN) if {v.first, v.second} <= {"plain", *paths}]
    routes = ROUTED if link == "full" and "native" in paths else ()
    found = {v: {name: list[float]() for name, _, _ in METRICS} for v in variants}
    routed = {v: list[float]() for v in (Variant("plain", "plain"), Variant("native", "native"), *ROUTED) if routes}
    with ExitStack() as ending:
        tools = Path(ending.enter_context(tempfile.TemporaryDirectory()))
        build(tools)
        pairs = []
        for number, variant in enumerate((*variants, *routes)):
            pair = Pair(variant, tools, link == "nic")
            pair.start(ending, f"{link}{number}")
            pairs.append(pair)
        for number in range(rounds):
            for pair in pairs[number % len(pairs) :] + pairs[: number % len(pairs)]:
                if pair.variant in found:
                    measure(pair, found[pair.variant], seconds, bool(number % 2))
                if pair.variant in routed:
                    routed[pair.variant].append(pair.small(seconds / 2, 2) / 1e3)
            print(f"{link}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found, routed


def table(found: dict[Variant, Figures], *, containers: bool = False) -> str:
    """Return a Markdown table: medians and ranges, and how they compare with the plain pump's, round by round.

    Its rows are the variants between hosts, or those between ``containers``.
    """
    plain, metrics = found[Variant("plain", "plain", containers=containers)], TCP if containers else METRICS
    lines = ["| path | " + " | ".join(f"{name}, {unit} | ÷ plain" for name, unit, _ in metrics) + " |"]
    lines.append("|---" * (1 + 2 * len(metrics)) + "|")
    for variant, figures in found.items():
        if variant.containers != containers:
            continue
        cells = [variant.name]
        for name, _, digits in metrics:
            values = figures[name]
            cells.append(f"{median(values):.{digits}f} ({min(values):.{digits}f}–{max(values):.{digits}f})")
            ratios = [value / reference for value, reference in zip(values, plain[name], strict=True)]
            cells.append(f"{median(ratios):.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def against(found: dict[Variant, Figures], path: str, reference: str) -> str:
    """Return how a path compares with another one: medians of the rounds' own ratios."""
    first, second = found[Variant(path, path)], found[Variant(reference, reference)]
    parts = []
    for name, _, _ in METRICS:
        ratio = median(value / other for value, other in zip(first[name], second[name], strict=True))
        parts.append(f"{name} {ratio:.2f}")
    return f"{path} ÷ {reference}: {'; '.join(parts)}."


def routes_table(routed: dict[Variant, list[float]]) -> str:
    """Return a Markdown table of packets per second to two hosts in turn, by the number of routes."""
    lines = ["| routes | plain, k/s | native, k/s | native ÷ plain |", "|---|---|---|---|"]
    for more in (0, 5_000, 50_000):
        plain, native = (routed[Variant(path, path, more)] for path in ("plain", "native"))
        ratio = median(n / p for n, p in zip(native, plain, strict=True))
        lines.append(f"| {more} | {median(plain):.0f} | {median(native):.0f} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.udp", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--link", choices=("full", "nic", "both"), default="both")
    parser.add_argument("--paths", default=",".join(PATHS), help="data paths to measure beside plain, with commas")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the result there, too")
    options = parser.parse_args()
    paths = options.paths.split(",")
    if not {*paths} <= {*PATHS}:
        parser.error(f"--paths: {options.paths}: there are {', '.join(PATHS)}")
    missing = [tool for tool in ("gcc", "iperf3") if shutil.which(tool) is None]
    if missing or os.geteuid() != 0:
        parser.error(f"missing: {', '.join(missing)}" if missing else "needs root: network namespaces are made")
    before = os.getloadavg()[0]
    parts = []
    for link in ("full", "nic") if options.link == "both" else (options.link,):
        found, routed = run(link, options.rounds, options.seconds, paths)
        parts += [f"## Cable `{link}`", table(found)]
        if {"bpf", "vxlan"} <= {*paths}:
            parts.append(against(found, "bpf", "vxlan"))
        parts += ["Between containers:", table(found, containers=True)]
        if routed:
            parts += ["64-byte packets to two hosts in turn, by the number of further routes:", routes_table(routed)]
    head = [
        "# Results of the udp backend",
        f"flanneld {__version__}, {datetime.datetime.now(datetime.UTC):%Y-%m-%d}. {describe()};"
        f" load average {before:.1f} before, {os.getloadavg()[0]:.1f} after. Medians of {options.rounds} rounds, with"
        " ranges; a ratio is the median of the rounds' own ratios.",
    ]
    text = "\n\n".join([*head, *parts, LEGEND])
    print(text, end="")
    if options.output is not None:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
