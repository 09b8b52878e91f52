"""Two hosts on one cable whose packets take the same or two different paths, and what is measured between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.udp.link import NIC, switch
from benchmarks.udp.node import subnet, underlay
from flanneld.ctl.lab.netns import Namespace

ROOT = Path(__file__).parents[2]
VXLAN = "type vxlan id 1 dstport 8472 nolearning noudpcsum"
ATTEMPTS = 50


def build(directory: Path) -> None:
    """Compile the plain pump and the source of small packets."""
    for name in ("plain", "traffic"):
        source = Path(__file__).parent / f"{name}.c"
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(source), "-o", directory / name], check=True)


@dataclass(frozen=True, slots=True)
class Variant:
    """Which paths the ends take (``benchmarks.udp.__main__.PATHS``), and further routes."""

    first: str
    second: str
    more: int = 0

    @property
    def name(self) -> str:
        """Return what it is called in the table."""
        ends = self.first if self.first == self.second else f"{self.first} with {self.second}"
        return f"{ends}, {self.more} routes" if self.more else ends


@dataclass
class Pair:
    """Both hosts of a variant, up. ``addresses`` are those that the second one answers at."""

    variant: Variant
    tools: Path
    nic: bool
    spaces: list[Namespace] = field(default_factory=list)
    addresses: Sequence[str] = ()

    def start(self, ending: ExitStack, label: str) -> None:
        """Make hosts, cable and paths; everything goes with ``ending``."""
        self.spaces = [Namespace(f"fl-bench-{os.getpid()}-{label}{n}") for n in (1, 2)]
        for space in self.spaces:
            ending.callback(space.delete)
        first, second = self.spaces
        first.ip(f"link add eth0 type veth peer name eth0 netns {second.name}")
        for number, space in enumerate(self.spaces, 1):
            space.ip("link set lo up", "link set eth0 up", f"addr add {underlay(number)}/24 dev eth0")
            if self.nic:
                space.call(lambda: switch("eth0", NIC))
        for number, path in enumerate((self.variant.first, self.variant.second), 1):
            self._path(ending, number, path)
        self.addresses = [str(subnet(2).network_address), "10.0.3.1"]
        if self.variant.first == "bare":
            self.addresses = [str(underlay(2))]
        for _ in range(ATTEMPTS):
            with suppress(Exception):
                if first.ping(self.addresses[0], count=1)[0]:
                    return
            time.sleep(0.1)
        raise SystemExit(f"{self.variant.name}: no answer")

    def _path(self, ending: ExitStack, number: int, path: str) -> None:
        space, other, mac = self.spaces[number - 1], 3 - number, "02:00:00:00:00:0"
        if path == "bare":
            return
        if path == "vxlan":
            space.ip(
                f"link add flannel.1 address {mac}{number} mtu 1450 {VXLAN} local {underlay(number)} dev eth0",
                "link set flannel.1 up",
                f"addr add {subnet(number).network_address}/32 dev flannel.1",
                f"neigh add {subnet(other).network_address} lladdr {mac}{other} dev flannel.1 nud permanent",
                f"route add {subnet(other)} via {subnet(other).network_address} dev flannel.1 onlink",
            )
            remote = ("dst", str(underlay(other)), "self", "permanent")
            space.run("bridge", "fdb", "add", f"{mac}{other}", "dev", "flannel.1", *remote)
            return
        argv = [sys.executable, "-m", "benchmarks.udp.node", str(number), path]
        node = subprocess.Popen(
            space.argv(*argv, str(self.variant.more if number == 1 else 0), str(self.tools / "plain")),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        ending.callback(node.wait)
        if node.stdin is None or node.stdout is None:
            raise SystemExit("no pipe")
        ending.callback(node.stdin.close)
        if node.stdout.readline().strip() != "ready":
            raise SystemExit(f"{self.variant.name}: host {number} does not start")

    def tcp(self, streams: int, seconds: int, reverse: bool) -> tuple[float, float]:
        """Return bits per second, and processor seconds of the whole machine per 10^9 bytes."""
        first, second = self.spaces
        address = self.addresses[0]
        server = subprocess.Popen(second.argv("iperf3", "-s", "-1", "-B", address), stdout=subprocess.DEVNULL)
        try:
            busy = busy_s()
            argv = ["iperf3", "-c", address, "-J", "-C", "cubic", "-P", str(streams), "-t", str(seconds)]
            for _ in range(ATTEMPTS):
                done = subprocess.run(
                    first.argv(*argv, *(["-R"] if reverse else [])), capture_output=True, text=True, check=False
                )
                said = json.loads(done.stdout or "{}")
                if "error" not in said and done.returncode == 0:
                    received = said["end"]["sum_received"]
                    return received["bits_per_second"], (busy_s() - busy) / (received["bytes"] / 1e9)
                time.sleep(0.05)
                busy = busy_s()
        finally:
            server.kill()
            server.wait()
        raise SystemExit(f"{self.variant.name}: iperf3 fails: {said.get('error')}")

    def small(self, seconds: float, targets: int = 1) -> float:
        """Return how many 64-byte packets arrive in a second."""
        first, second = self.spaces
        addresses = ",".join(self.addresses[:targets])
        tool = str(self.tools / "traffic")
        receiver = subprocess.Popen(second.argv(tool, "receive", addresses, str(underlay(1))))
        try:
            return float(first.run(tool, "send", str(seconds), str(underlay(1)), addresses))
        finally:
            receiver.kill()
            receiver.wait()

    def round_trip(self, seconds: float) -> tuple[float, float]:
        """Return median and 99th percentile in microseconds."""
        first, second = self.spaces
        tool = str(self.tools / "traffic")
        echo = subprocess.Popen(second.argv(tool, "echo", self.addresses[0]))
        try:
            time.sleep(0.05)
            median, late = first.run(tool, "ping", str(seconds), self.addresses[0]).split()
            return float(median), float(late)
        finally:
            echo.kill()
            echo.wait()


def busy_s() -> float:
    """Return how long all processors have worked (/proc/stat, proc(5))."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
