"""``python -m benchmarks.udp``: TCP between containers of two hosts, in turn by every data path (root, etcd, iperf3).

All labs are up at once and measured in turn, the first one differing by round;
medians are compared. ``--wire`` takes segmentation and checksum offload from
the links between the hosts, as a network has none once packets are on the
wire; without it large packets cross the links undivided.
"""

from __future__ import annotations

import argparse
import array
import fcntl
import socket
import statistics
import struct
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.measure import can_measure, throughput_bps, wait_for_answer
from flanneld.ctl.lab.netns import Namespace

ROOT = Path(__file__).parents[2]
SIOCETHTOOL = 0x8946
STXCSUM, SGSO, SGRO = 0x17, 0x24, 0x2C
"""linux/ethtool.h. Without checksums there is no segmentation either."""

_START = "import sys; sys.path.insert(0, {root!r}); {change}; from flanneld.__main__ import run; sys.exit(run())"
_PYTHON = "sys.modules['backends.udp._pump'] = None"
_PER_PACKET = (
    "from backends.udp import carrier as c; t, w = c.open_tun, c.open_wire; "
    "c.open_tun = lambda name, offloads: t(name); "
    "c.open_wire = lambda *a: (lambda x: (x.socket.setsockopt(17, 104, 0), type(x)(x.socket, False, False))[1])(w(*a))"
)


def command(change: str) -> tuple[str, ...]:
    """Return the command line of a daemon with a change made beforehand."""
    return (sys.executable, "-c", _START.format(root=str(ROOT), change=change))


@dataclass(slots=True)
class Variant:
    """A data path and what was measured of it."""

    name: str
    backend: str
    command: tuple[str, ...]
    bps: list[float] = field(default_factory=list)
    round_trip_ms: list[float] = field(default_factory=list)

    @property
    def median_bps(self) -> float:
        """Return the median throughput."""
        return statistics.median(self.bps)


def variants() -> list[Variant]:
    """Return what is compared. "Per packet" is the native loop with one packet per system call, as upstream's."""
    return [
        Variant("udp, native pump", "udp", command("pass")),
        Variant("udp, native, per packet", "udp", command(_PER_PACKET)),
        Variant("udp, pump in Python", "udp", command(_PYTHON)),
        Variant("vxlan", "vxlan", command("pass")),
    ]


def plain_link(namespace: Namespace, device: str) -> None:
    """Let a link take neither unfinished checksums nor packets to be cut, and merge what arrives, as a NIC does."""

    def change() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for what, value in ((STXCSUM, 0), (SGSO, 0), (SGRO, 1)):
                data = array.array("B", struct.pack("=II", what, value))
                fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP", device.encode(), data.buffer_info()[0]))

    namespace.call(change)


def build(ending: ExitStack, variant: Variant, wire: bool) -> Lab:
    """Return a lab of two hosts whose containers reach each other."""
    lab = ending.enter_context(Lab(2, backend=variant.backend, command=variant.command))
    for host in lab.hosts if wire else ():
        plain_link(host.namespace, "eth0")
        plain_link(lab.switch, f"{host.name}-eth0")
    first, second = (host.pod for host in lab.hosts)
    if not wait_for_answer(first, second, 4, 20):
        raise SystemExit(f"{variant.name}: the containers do not reach each other")
    return lab


def measure(lab: Lab, variant: Variant, seconds: int, reverse: bool) -> None:
    """Add one figure of each kind."""
    source, target = (host.pod for host in (reversed(lab.hosts) if reverse else lab.hosts))
    _, mean_ms = source.ping(target, count=5)
    bps = throughput_bps(source, target, seconds)
    if bps is None or mean_ms is None:
        raise SystemExit(f"{variant.name}: no figure")
    variant.bps.append(bps)
    variant.round_trip_ms.append(mean_ms)


def report(measured: list[Variant]) -> None:
    """Print medians, ranges and ratios."""
    names = [v.name for v in measured]
    print(f"\n{'':24} {'Gbit/s':>7} {'range':>13} {'RTT ms':>7}  " + "  ".join(f"/ {name}" for name in names[1:]))
    for v in measured:
        spread = f"{min(v.bps) / 1e9:.2f}-{max(v.bps) / 1e9:.2f}"
        ratios = "  ".join(f"{v.median_bps / other.median_bps:>{len(other.name) + 2}.2f}" for other in measured[1:])
        print(f"{v.name:24} {v.median_bps / 1e9:7.2f} {spread:>13} {statistics.median(v.round_trip_ms):7.3f}  {ratios}")


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.udp", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=2)
    parser.add_argument("--wire", action="store_true")
    options = parser.parse_args()
    if not can_measure():
        raise SystemExit("iperf3 is missing")
    measured = variants()
    with ExitStack() as ending:
        labs = [(build(ending, v, options.wire), v) for v in measured]
        for number in range(options.rounds):
            for lab, variant in labs[number % len(labs) :] + labs[: number % len(labs)]:
                measure(lab, variant, options.seconds, bool(number % 2))
            print(f"round {number + 1} of {options.rounds}", flush=True)
    report(measured)
    return 0


if __name__ == "__main__":
    sys.exit(main())
