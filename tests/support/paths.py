"""Hosts whose packets take any of the data paths, and what is sent between them to compare."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import IPv4Address
from typing import Literal, Protocol, TypeAlias

import pytest

from backends.api import ExternalInterface, Setting
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.diff import diff
from backends.kernel.ethtool import set_tx_checksum
from backends.kernel.netlink import NetlinkKernel
from backends.udp.bpf.carrier import BpfCarrier, BpfSpec
from backends.udp.fou import DEVICE, FouBackend
from subnet.config import parse_network_config
from subnet.model import Lease, Subnets
from tests.support.netns import MakeNamespace, Namespace, veth
from tests.support.overlay import NETWORK, PORT, Node, peer, stream, subnet
from tests.support.plain_pump import PlainPump

DataPath: TypeAlias = Literal["native", "python", "fou", "bpf", "plain"]
KERNEL: frozenset[DataPath] = frozenset({"fou", "bpf"})
"""Those that leave checksums and segments to the link."""
MTU_BYTES = 1500
IN_GUEST = os.environ.get("FLANNELD_GUEST") == "1"


class End(Protocol):
    """A host of the overlay."""

    namespace: Namespace
    underlay: str
    overlay: str


class FouNode:
    """Host N as ``Node``, its packets carried by the kernel."""

    def __init__(self, namespace: Namespace, number: int) -> None:
        self.namespace, self.number = namespace, number
        self.underlay, self.overlay = f"192.0.2.{number}", f"10.5.{number}.0"
        namespace.ip(f"addr add {self.underlay}/24 dev eth0")

    def up(self, *numbers: int) -> None:
        """Have device, port, address and routes."""
        text = f'{{"Network":"{NETWORK}","Backend":{{"Type":"udp","DataPath":"fou","Port":{PORT}}}}}'
        local = IPv4Address(self.underlay)
        interface = ExternalInterface("eth0", 2, MTU_BYTES, local, public_v4=local)
        backend = FouBackend(Setting(parse_network_config(text, "test"), interface, frozenset({NETWORK})))
        with self.namespace.inside():
            kernel = NetlinkKernel()
            try:
                DeviceKeeper(kernel).ensure(backend.links({}, False))
                backend.carrier(None, lambda: None).ensure(kernel)
                own = Subnets(subnet(self.number))
                desired = backend.desired(own, [peer(number) for number in numbers], lambda _: False)
                assert kernel.apply(diff(kernel.observe({DEVICE}), desired)) == []
            finally:
                kernel.close()


class BpfNode(Node):
    """Host N whose packets programs carry; ``native`` is the pump for what they pass on."""

    def __init__(self, namespace: Namespace, number: int, native: bool | None = None, unknown: bool = False) -> None:
        super().__init__(namespace, number, native=False)
        # Where a host does not forward, the way to a peer cannot be looked up.
        namespace.sysctl("net.ipv4.ip_forward", 1)
        (link,) = namespace.ip_json("link show dev eth0")
        self.spec = BpfSpec(
            IPv4Address(self.underlay),
            PORT,
            link["mtu"] - 28,
            NETWORK,
            unknown,
            kept=True,
            external="eth0",
            external_index=link["ifindex"],
        )
        self.native = native
        self.carrier = BpfCarrier(self.spec, native=native)

    def know(self, *peers: Lease) -> None:
        with self.namespace.inside():
            super().know(*peers)

    def programs(self) -> dict[str, list[int]]:
        """Return the numbers of the programs at each place, as tc(8) shows them."""
        found = {}
        for place in ("dev flannel0 egress", "dev eth0 ingress"):
            said = self.namespace.run("tc", "-j", "filter", "show", *place.split(), check=False) or "[]"
            found[place] = [f["options"]["prog"]["id"] for f in json.loads(said) if "prog" in f.get("options", {})]
        return found


class PlainNode:
    """Host N as ``Node``, with the pump that does one packet at a time."""

    def __init__(self, namespace: Namespace, number: int) -> None:
        self.namespace, self.number = namespace, number
        self.underlay, self.overlay = f"192.0.2.{number}", f"10.5.{number}.0"
        namespace.ip(f"addr add {self.underlay}/24 dev eth0")
        self.pump = PlainPump(namespace, self.underlay, PORT, MTU_BYTES - 28)

    def up(self, *numbers: int) -> None:
        """Have address and route, and know the others."""
        namespace, device = self.namespace, self.pump.device
        namespace.ip(f"link set {device} mtu {MTU_BYTES - 28} up")
        namespace.ip(f"addr add {self.overlay}/32 dev {device}")
        namespace.ip(f"route add {NETWORK} dev {device}")
        self.pump.know({subnet(number): IPv4Address(f"192.0.2.{number}") for number in numbers})


def finish_packets(namespace: Namespace, device: str = "eth0") -> None:
    """Let a veth be handed whole packets only, as a wire gets them (``ethtool -K ... tx off``)."""
    with namespace.inside():
        assert set_tx_checksum(device, False) is False


@contextmanager
def connected(make: MakeNamespace, paths: tuple[DataPath, DataPath]) -> Iterator[tuple[End, End]]:
    """Two hosts on one cable that know each other; the cable is handed whole packets where the kernel carries."""
    spaces = make("a"), make("b")
    veth(*spaces)
    with ExitStack() as ending:
        ends: list[End] = []
        for number, (space, path) in enumerate(zip(spaces, paths, strict=True), 1):
            other = 3 - number
            if KERNEL & {*paths}:
                finish_packets(space)
            if path == "fou":
                fou = FouNode(space, number)
                fou.up(other)
                ends.append(fou)
            elif path == "plain":
                plain = PlainNode(space, number)
                ending.callback(plain.pump.close)
                plain.up(other)
                ends.append(plain)
            else:
                node = BpfNode(space, number) if path == "bpf" else Node(space, number, path == "native")
                ending.callback(_close, node)
                node.up(peer(other))
                ends.append(node)
        yield ends[0], ends[1]


def only_finished_packets_arrive(source: End, target: End) -> None:
    """Show that a datagram is lost on a link that is handed unfinished checksums, and arrives once it is not."""
    with source.namespace.socket() as sender, target.namespace.socket() as receiver:
        receiver.bind((target.overlay, 4000))
        receiver.settimeout(2)
        sender.sendto(b"with a checksum to be finished", (target.overlay, 4000))
        with pytest.raises(TimeoutError):
            receiver.recv(100)
        finish_packets(source.namespace)
        receiver.settimeout(20)
        sender.sendto(b"with a finished checksum", (target.overlay, 4000))
        assert receiver.recv(100) == b"with a finished checksum"


def _close(node: Node) -> None:
    # The carrier that it has then: a test may have put another in its place.
    node.carrier.close()


def family_of(end: End) -> int:
    """Return the address family of what a host sends through the overlay."""
    return socket.AF_INET6 if ":" in end.overlay else socket.AF_INET


def streams(source: End, target: End, count: int, size: int, port: int = 5101) -> None:
    """Send random bytes through TCP connections at once; every one has to arrive intact."""
    failures: list[BaseException] = []

    def one(number: int) -> None:
        server = target.namespace.socket(family_of(target), socket.SOCK_STREAM)
        client = source.namespace.socket(family_of(target), socket.SOCK_STREAM)
        try:
            stream(server, client, (target.overlay, port + number), size)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=one, args=(number,), name=f"test-stream-{number}") for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


SIZES = (1, 18, 64, 64, 64, 65, 500, 1400, 1400, 1444, 1444, 1444, 999, 2, 2000, 4000)
"""Payloads in turn: runs of equal ones, odd ones, full ones, and two that need fragments."""


def mixed_datagrams(source: End, target: End, count: int, port: int = 4100) -> None:
    """Send datagrams of many sizes, a burst at a time; every one has to arrive intact and in order."""
    family = family_of(target)
    with source.namespace.socket(family) as sender, target.namespace.socket(family) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
        receiver.bind((target.overlay, port))
        receiver.settimeout(20)
        block = os.urandom(8192)
        for begin in range(0, count, len(SIZES)):
            sent = []
            for number in range(begin, min(begin + len(SIZES), count)):
                payload = number.to_bytes(4, "big") + block[number % 4096 :][: SIZES[number % len(SIZES)]]
                sender.sendto(payload, (target.overlay, port))
                sent.append(payload)
            assert [receiver.recv(9000) for _ in sent] == sent


@contextmanager
def datagrams_beside(source: End, target: End, port: int = 4200) -> Iterator[None]:
    """Send datagrams of many sizes for the length of the block. Beside other traffic some may be lost; what arrives is
    intact and in order.
    """
    family, block = family_of(target), os.urandom(8192)
    ended, wrong, arrived = threading.Event(), list[str](), itertools.count()

    def payload(number: int) -> bytes:
        return number.to_bytes(4, "big") + block[number % 4096 :][: SIZES[number % len(SIZES)]]

    def send() -> None:
        for number in itertools.count():
            if number % len(SIZES) == 0 and ended.wait(0.002):
                break
            with suppress(OSError):  # the device's queue is full
                sender.sendto(payload(number), (target.overlay, port))

    def receive() -> None:
        last = -1
        while True:
            try:
                got = receiver.recv(9000)
            except TimeoutError:
                if ended.is_set():
                    return
                continue
            number = int.from_bytes(got[:4], "big")
            if number <= last or got != payload(number):
                wrong.append(f"{len(got)} bytes with number {number} after {last}")
            last = number
            next(arrived)

    with source.namespace.socket(family) as sender, target.namespace.socket(family) as receiver:
        receiver.setsockopt(socket.SOL_SOCKET, 33, 1 << 22)  # SO_RCVBUFFORCE
        receiver.bind((target.overlay, port))
        receiver.settimeout(1)
        threads = [threading.Thread(target=one, name=f"test-{one.__name__}") for one in (send, receive)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            ended.set()
            for thread in threads:
                thread.join()
    assert wrong == []
    assert next(arrived) > 0


def bad_checksums(end: End) -> dict[str, int]:
    """What the kernel refused for its checksum, by protocol (InCsumErrors); none: empty."""
    found = {}
    for line in end.namespace.run("cat", "/proc/net/snmp6").splitlines():
        name, value = line.split()
        if name.endswith("InCsumErrors") and int(value):
            found[name] = int(value)
    lines = [line.split() for line in end.namespace.run("cat", "/proc/net/snmp").splitlines()]
    for names, values in zip(lines[::2], lines[1::2], strict=True):
        said = dict(zip(names[1:], map(int, values[1:]), strict=True))
        if said.get("InCsumErrors"):
            found[names[0]] = said["InCsumErrors"]
    return found
