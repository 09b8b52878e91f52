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
from ipaddress import IPv4Network
from pathlib import Path

from benchmarks.udp.link import NIC, switch
from benchmarks.udp.node import MTU_BYTES, NETWORK, subnet, underlay
from flanneld.ctl.lab.netns import Namespace
from flanneld.traffic import rules
from flanneld.traffic.detect import open_host
from flanneld.traffic.runner import Runner
from subnet.clock import SystemClock

ROOT = Path(__file__).parents[2]
VXLAN, VXLAN_MTU_BYTES = "type vxlan id 1 dstport 8472 nolearning noudpcsum", 1450
ATTEMPTS = 50


def build(directory: Path) -> None:
    """Compile the plain pump and the source of small packets."""
    for name in ("plain", "traffic"):
        source = Path(__file__).parent / f"{name}.c"
        subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", str(source), "-o", directory / name], check=True)


@dataclass(frozen=True, slots=True)
class Variant:
    """Which paths the ends take (``benchmarks.udp.__main__.PATHS``), further routes, and what the ends are."""

    first: str
    second: str
    more: int = 0
    containers: bool = False

    @property
    def name(self) -> str:
        """Return what it is called in the table."""
        ends = self.first if self.first == self.second else f"{self.first} with {self.second}"
        return f"{ends}, {self.more} routes" if self.more else ends


@dataclass
class Pair:
    """Both hosts of a variant, up. ``ends`` are those that talk; the second one answers at ``addresses``."""

    variant: Variant
    tools: Path
    nic: bool
    spaces: list[Namespace] = field(default_factory=list)
    ends: list[Namespace] = field(default_factory=list)
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
        self.ends, self.addresses = self.spaces, [str(subnet(2).network_address), "10.0.3.1"]
        if self.variant.first == "bare":
            self.addresses = [str(underlay(2))]
        if self.variant.containers:
            self.ends, self.addresses = [self._container(ending, number) for number in (1, 2)], [str(subnet(2)[2])]
        for _ in range(ATTEMPTS):
            with suppress(Exception):
                if self.ends[0].ping(self.addresses[0], count=1)[0]:
                    return
            time.sleep(0.1)
        raise SystemExit(f"{self.variant.name}: no answer")

    def _path(self, ending: ExitStack, number: int, path: str) -> None:
        space, other, mac = self.spaces[number - 1], 3 - number, "02:00:00:00:00:0"
        if path == "bare":
            return
        if path == "vxlan":
            space.ip(
                f"link add flannel.1 address {mac}{number} {VXLAN} local {underlay(number)} dev eth0",
                f"link set flannel.1 mtu {VXLAN_MTU_BYTES}",
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

    def _container(self, ending: ExitStack, number: int) -> Namespace:
        """Put one behind a host, at a bridge as the CNI plugins make it, and the rules that a daemon keeps there."""
        host, network = self.spaces[number - 1], subnet(number)
        mtu_bytes = VXLAN_MTU_BYTES if self.variant.first == "vxlan" else MTU_BYTES
        container = Namespace(f"{host.name}c")
        ending.callback(container.delete)
        host.ip(
            f"link add cni0 mtu {mtu_bytes} type bridge",
            "link set cni0 up",
            f"addr add {network[1]}/24 dev cni0",
            f"link add veth0 mtu {mtu_bytes} type veth peer name eth0 mtu {mtu_bytes} netns {container.name}",
            "link set veth0 master cni0 up",
        )
        container.ip("link set eth0 up", f"addr add {network[2]}/24 dev eth0", f"route add default via {network[1]}")
        host.call(lambda: _write_rules(network))
        return container

    def tcp(self, streams: int, seconds: int, reverse: bool) -> tuple[float, float]:
        """Return bits per second, and processor seconds of the whole machine per 10^9 bytes."""
        first, second = self.ends
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
        first, second = self.ends
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
        first, second = self.ends
        tool = str(self.tools / "traffic")
        echo = subprocess.Popen(second.argv(tool, "echo", self.addresses[0]))
        try:
            time.sleep(0.05)
            median, late = first.run(tool, "ping", str(seconds), self.addresses[0]).split()
            return float(median), float(late)
        finally:
            echo.kill()
            echo.wait()


def _write_rules(network: IPv4Network) -> None:
    """Write them in the namespace of the calling thread."""
    host = open_host(False, Runner(), SystemClock())
    host.enforcer.converge(rules.TrafficPolicy(rules.Pair(NETWORK, network), masquerade=True), 4)
    if host.watch is not None:
        host.watch.close()


def busy_s() -> float:
    """Return how long all processors have worked (/proc/stat, proc(5))."""
    fields = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK")
