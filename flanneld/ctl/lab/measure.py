"""What containers see of each other: answers, round trip, throughput."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flanneld.ctl.lab.errors import LabError
from flanneld.ctl.lab.hosts import Host, Pod
from flanneld.ctl.lab.lab import Lab
from flanneld.ctl.lab.netns import Namespace
from flanneld.ctl.lab.tools import SYSTEM_PATH, poll

PINGS = 3
_MAX_MEASURED_PAIRS = 12


@dataclass(frozen=True, slots=True)
class Reach:
    """One direction between two containers. ``mtu_bytes`` is the size of the packets sent, undivided."""

    source: Host
    target: Host
    family: int
    mtu_bytes: int
    answers: int
    round_trip_ms: float | None

    @property
    def complete(self) -> bool:
        """Whether every packet was answered."""
        return self.answers == PINGS


def reach(lab: Lab, timeout_s: float) -> Iterator[Reach]:
    """Ping every pair of containers. All first answers together may take ``timeout_s``: peers learn of each other."""
    end = time.monotonic() + timeout_s
    for source, target in lab.pairs():
        for address in target.pod.addresses:
            family = address.version
            wait_for_answer(source.pod, target.pod, family, end - time.monotonic())
            answers, mean_ms = source.pod.ping(target.pod, family, PINGS)
            yield Reach(source, target, family, source.pod.mtu_bytes, answers, mean_ms)


def wait_for_answer(source: Pod, target: Pod, family: int, timeout_s: float) -> bool:
    """Wait for a first answer, however small; return whether it came. One attempt is made in any case."""
    try:
        return poll("an answer", lambda: source.namespace.ping(target.address(family), count=1)[0] > 0, timeout_s)
    except LabError:
        return False


def measured_pairs(lab: Lab) -> list[tuple[Host, Host]]:
    """Return which pairs the throughput is measured for: all in a small lab, a ring in a large one."""
    pairs = list(lab.pairs())
    if len(pairs) <= _MAX_MEASURED_PAIRS:
        return pairs
    hosts = [h for h in lab.hosts if h.pods]
    return list(zip(hosts, hosts[1:] + hosts[:1], strict=True))


def can_measure() -> bool:
    """Whether iperf3 is installed."""
    return shutil.which("iperf3") is not None or shutil.which("iperf3", path=SYSTEM_PATH) is not None


def throughput_bps(source: Pod, target: Pod, seconds: int) -> float | None:
    """Return what one TCP connection between containers carries in bits per second, None if none comes about."""
    address = target.address(source.addresses[0].version)
    return carried_bps(source.namespace, target.namespace, address, seconds)


def carried_bps(source: Namespace, target: Namespace, address: str, seconds: int) -> float | None:
    """Return what one TCP connection to an address of ``target`` carries in bits per second (iperf3(1)), or None."""
    server = target.spawn("iperf3", "--server", "--one-off", "--bind", address)
    try:
        argv = ("iperf3", "--json", "--client", address, "--time", str(seconds), "--connect-timeout", "2000")

        def attempt() -> float | None:
            # The server needs a moment; a refused connection says nothing about the network.
            return parse_iperf(source.run(*argv, check=False, timeout_s=seconds + 15))

        return poll("throughput", attempt, timeout_s=3)
    except LabError:
        return None
    finally:
        server.kill()
        server.wait()


def parse_iperf(text: str) -> float | None:
    """Read iperf3's JSON: received bits per second, None if it reports an error."""
    try:
        found = json.loads(text)
        return None if "error" in found else float(found["end"]["sum_received"]["bits_per_second"])
    except (ValueError, KeyError):
        return None
