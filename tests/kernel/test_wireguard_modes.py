"""Every family and every mode between three hosts, without daemons."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_network

import pytest

from backends import wgkeys
from backends.api import ExternalInterface, Setting
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.diff import diff
from backends.dataplane.model import Endpoint
from backends.kernel.netlink import NetlinkKernel
from backends.wireguard import WireguardBackend
from subnet.config import parse_network_config
from subnet.model import FAMILIES, Family, Lease, LeaseAttrs, Subnets
from tests.support.netns import Namespace, veth

pytestmark = [pytest.mark.kernel, pytest.mark.vm]

NETWORKS = {
    "v4": '"Network":"10.5.0.0/16"',
    "v6": '"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48"',
    "dual": '"Network":"10.5.0.0/16","EnableIPv6":true,"IPv6Network":"fd05::/48"',
}
POSSIBLE = [
    *itertools.product(("v4",), ("separate", "auto", "ipv4")),
    *itertools.product(("v6",), ("separate", "auto", "ipv6")),
    *itertools.product(("dual",), ("separate", "auto", "ipv4", "ipv6")),
]
SEPARATE = {"v4": {51820}, "v6": {51821}, "dual": {51820, 51821}}
MARKER = b"plain text that nobody may see"
PORT, WAIT_S = 5000, 60.0
HEADERS: dict[Family, int] = {4: 28, 6: 48}
ETH_P_ALL, ETH_P_IP, ETH_P_IPV6 = 3, 0x0800, 0x86DD
IPPROTO_ICMPV6 = 58


@dataclass
class Node:
    """A host with the backend on it."""

    namespace: Namespace
    number: int
    kernel: NetlinkKernel
    backend: WireguardBackend
    subnets: Subnets
    attrs: LeaseAttrs

    @classmethod
    def of(cls, namespace: Namespace, kernel: NetlinkKernel, number: int, families: str, mode: str) -> Node:
        text = f'{{{NETWORKS[families]},"Backend":{{"Type":"wireguard","Mode":"{mode}"}}}}'
        config = parse_network_config(text, "test")
        v4 = IPv4Address(f"192.0.2.{number}") if families != "v6" else None
        v6 = IPv6Address(f"2001:db8:1::{number}") if families != "v4" else None
        subnets = Subnets(
            ip_network(f"10.5.{number}.0/24") if v4 else None,  # type: ignore[arg-type]
            ip_network(f"fd05:0:0:{number}::/64") if v6 else None,  # type: ignore[arg-type]
        )
        with namespace.inside():
            interface = ExternalInterface("eth0", kernel.links()["eth0"].index, 1500, v4, v6, v4, v6)
            setting = Setting(config, interface, frozenset({ip_network("10.5.0.0/16"), ip_network("fd05::/48")}))
            backend = WireguardBackend(setting, wgkeys.clamped(number.to_bytes(32, "big")))
            attrs = backend.attrs(DeviceKeeper(kernel).ensure(backend.links({}, binding=False)))
        return cls(namespace, number, kernel, backend, subnets, attrs)

    @property
    def lease(self) -> Lease:
        return Lease(self.subnets, self.attrs, f"n{self.number}", revision=self.number)

    @property
    def devices(self) -> list[str]:
        return [spec.name for spec in self.backend.links({}, binding=False)]

    def converge(self, peers: Sequence[Node]) -> int:
        desired = self.backend.desired(self.subnets, [p.lease for p in peers if p is not self], lambda _: False)
        assert desired.problems == ()
        with self.namespace.inside():
            changes = diff(self.kernel.observe(desired.devices), desired)
            assert self.kernel.apply(changes) == []
        return len(changes)

    def endpoints(self) -> set[Endpoint | None]:
        with self.namespace.inside():
            return {peer.endpoint for peer in self.kernel.observe(self.devices).peers}

    def address(self, family: Family) -> str | None:
        subnet = self.subnets.of(family)
        return str(subnet.network_address) if subnet is not None else None

    def close(self) -> None:
        with self.namespace.inside():
            for device in self.devices:
                self.kernel.delete_link(device)


@pytest.fixture(scope="module")
def hub() -> Iterator[Namespace]:
    with Namespace("hub") as namespace:
        namespace.ip("link add br0 type bridge")
        namespace.ip("link set br0 up promisc on")
        yield namespace


@pytest.fixture(scope="module")
def hosts(_netns_possible: None, hub: Namespace) -> Iterator[list[tuple[Namespace, NetlinkKernel]]]:
    with ExitStack() as made:
        spaces = [made.enter_context(Namespace(f"n{number}")) for number in (1, 2, 3)]
        for number, space in enumerate(spaces, 1):
            veth(hub, space, f"p{number}", "eth0")
            hub.ip(f"link set p{number} master br0")
            space.ip(f"addr add 192.0.2.{number}/24 dev eth0")
            space.ip(f"addr add 2001:db8:1::{number}/64 dev eth0 nodad")
        kernels = []
        for space in spaces:
            with space.inside():
                kernels.append(made.enter_context(closing(NetlinkKernel())))
        yield list(zip(spaces, kernels, strict=True))


@contextmanager
def captured(namespace: Namespace) -> Iterator[list[bytes]]:
    """Collect the frames that a bridge sees."""
    frames: list[bytes] = []
    done = threading.Event()
    with closing(namespace.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))) as sniffer:
        sniffer.bind(("br0", 0))
        sniffer.settimeout(0.2)

        def collect() -> None:
            while not done.is_set():
                with suppress(TimeoutError):
                    frames.append(sniffer.recv(1 << 16))

        thread = threading.Thread(target=collect, name="sniffer")
        thread.start()
        try:
            yield frames
        finally:
            done.set()
            thread.join()


def ports(frame: bytes) -> set[int] | None:
    """Return the UDP ports of a packet, None for what hosts say to find each other. Raises for all else."""
    kind = int.from_bytes(frame[12:14], "big")
    if kind == ETH_P_IP:
        protocol, start = frame[23], 14 + 4 * (frame[14] & 0xF)
    elif kind == ETH_P_IPV6:
        protocol, start = frame[20], 54
        if protocol in {0, IPPROTO_ICMPV6}:  # neighbour discovery, listener reports
            return None
    else:
        assert kind == 0x0806  # ARP
        return None
    assert protocol == socket.IPPROTO_UDP
    return {int.from_bytes(frame[at : at + 2], "big") for at in (start, start + 2)}


def everybody_hears_everybody(nodes: Sequence[Node], family: Family) -> bool:
    """Whether full packets that may not be fragmented arrive from every node at every other."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    level, option = (socket.IPPROTO_IP, 10) if family == 4 else (socket.IPPROTO_IPV6, 23)  # IP(V6)_MTU_DISCOVER
    missing = {(a.number, b.number) for a, b in itertools.permutations(nodes, 2)}
    with ExitStack() as opened:
        ends = {node.number: opened.enter_context(closing(node.namespace.socket(kind))) for node in nodes}
        for node in nodes:
            ends[node.number].bind((node.address(family), PORT))
            ends[node.number].setsockopt(level, option, 2)  # always
            ends[node.number].settimeout(0.2)
        end = time.monotonic() + WAIT_S
        while missing and time.monotonic() < end:
            for source, target in missing:
                payload = (MARKER + bytes([source])).ljust(1420 - HEADERS[family], b".")
                ends[source].sendto(payload, (nodes[target - 1].address(family), PORT))
            for number, receiver in ends.items():
                with suppress(TimeoutError):
                    while True:
                        missing -= {(receiver.recv(2000)[len(MARKER)], number)}
    return not missing


@pytest.mark.parametrize(("families", "mode"), POSSIBLE)
def test_W05_three_hosts_reach_each_other_with_full_packets_and_nothing_shows(
    hub: Namespace, hosts: list[tuple[Namespace, NetlinkKernel]], families: str, mode: str
) -> None:
    with ExitStack() as running:
        nodes = [Node.of(*host, number, families, mode) for number, host in enumerate(hosts, 1)]
        for node in nodes:
            running.callback(node.close)
        for node in nodes:
            assert node.converge(nodes) > 0
            assert node.converge(nodes) == 0
        with captured(hub) as frames:
            for family in FAMILIES:
                if nodes[0].address(family) is not None:
                    assert everybody_hears_everybody(nodes, family)
        assert [frame for frame in frames if MARKER in frame] == []
        seen = {port for frame in frames for port in ports(frame) or ()}
        assert seen == (SEPARATE[families] if mode == "separate" else {51820})
        both = {"separate": {4, 6}, "auto": {4}, "ipv4": {4}, "ipv6": {6}}
        for node in nodes:
            used = {endpoint.address.version for endpoint in node.endpoints() if endpoint is not None}
            assert used == {"v4": {4}, "v6": {6}, "dual": both[mode]}[families]
            assert node.converge(nodes) == 0
