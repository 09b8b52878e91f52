"""What traceroute(8) shows of a way through the overlay, from container to container."""

from __future__ import annotations

import socket
import struct

import pytest

from backends.udp.carrier import native_available
from tests.support import ipv4
from tests.support.netns import MakeNamespace, Namespace
from tests.support.paths import DataPath, connected

pytestmark = pytest.mark.kernel

HERE, THERE = "10.5.1.2", "10.5.2.2"
FIRST_PORT, MOST_HOPS = 33434, 8
LIMIT_S = 20

PUMP_HOPS = ["10.5.1.1", "10.5.0.0", "10.5.2.0", "10.5.2.0", THERE]
"""Each pump takes one from the TTL as upstream's does, beside its host; the near one answers with an address that is no
host's, for the host would not believe its own."""
KERNEL_HOPS = ["10.5.1.1", "10.5.2.0", THERE]


def container(make: MakeNamespace, host: Namespace, number: int) -> Namespace:
    """A namespace with 10.5.N.2 behind the host's 10.5.N.1."""
    space = make(f"pod{number}")
    host.ip(f"link add pod0 type veth peer name eth0 netns {space.name}")
    host.ip("link set pod0 up")
    host.ip(f"addr add 10.5.{number}.1/24 dev pod0")
    space.ip(f"addr add 10.5.{number}.2/24 dev eth0")
    space.ip("link set eth0 up")
    space.ip(f"route add default via 10.5.{number}.1")
    host.sysctl("net.ipv4.ip_forward", 1)
    for one in (host, space):
        one.sysctl("net.ipv4.icmp_ratelimit", 0)
    return space


def answer_about(listener: socket.socket, probe: bytes) -> tuple[int, int, str]:
    """Wait for the ICMP error that quotes these first bytes behind an IP header, or for the echo's reply."""
    while True:
        packet = listener.recv(2000)
        assert ipv4.ip_valid(packet)
        assert ipv4.ones_complement(packet[20:]) == 0
        found = packet[20], packet[21], socket.inet_ntoa(packet[12:16])
        quoted = packet[28:]
        if found[0] in {3, 11} and quoted[12:20] == socket.inet_aton(HERE) + socket.inet_aton(THERE):
            assert ipv4.ones_complement(quoted[:20]) == 0
            if quoted[20 : 20 + len(probe)] == probe:
                return found
        if found[0] == 0 and packet[24:28] == probe[4:8]:
            return found


def traced(space: Namespace, protocol: str) -> list[tuple[int, int, str]]:
    """Send probes with rising TTL until the target answers; return type, code and source of every answer."""
    hops = []
    kind = (socket.SOCK_DGRAM, 0) if protocol == "udp" else (socket.SOCK_RAW, socket.IPPROTO_ICMP)
    with (
        space.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as listener,
        space.socket(socket.AF_INET, *kind) as sender,
    ):
        listener.settimeout(LIMIT_S)
        sender.bind((HERE, 0))
        for ttl in range(1, MOST_HOPS + 1):
            sender.setsockopt(socket.IPPROTO_IP, socket.IP_TTL, ttl)
            if protocol == "udp":
                port = FIRST_PORT + ttl
                sender.sendto(bytes(32), (THERE, port))
                begins = struct.pack("!HH", sender.getsockname()[1], port)
            else:
                begins = struct.pack("!BBHHH", 8, 0, 0, 77, ttl)
                begins = begins[:2] + ipv4.ones_complement(begins).to_bytes(2, "big") + begins[4:]
                sender.sendto(begins, (THERE, 0))
            hops.append(answer_about(listener, begins))
            if hops[-1][0] != 11:
                return hops
    return hops


@pytest.mark.parametrize("protocol", ["udp", "icmp"])
@pytest.mark.parametrize(
    ("path", "hops"),
    [
        pytest.param(
            "native",
            PUMP_HOPS,
            marks=pytest.mark.skipif(not native_available(), reason="the native pump was not built"),
            id="native",
        ),
        pytest.param("python", PUMP_HOPS, id="python"),
        pytest.param("fou", KERNEL_HOPS, marks=pytest.mark.vm, id="fou"),
    ],
)
def test_U05_every_hop_answers(make_namespace: MakeNamespace, path: DataPath, hops: list[str], protocol: str) -> None:
    with connected(make_namespace, (path, path)) as (first, second):
        here = container(make_namespace, first.namespace, 1)
        container(make_namespace, second.namespace, 2)
        last = (3, 3) if protocol == "udp" else (0, 0)
        expected = [(11, 0, address) for address in hops[:-1]] + [(*last, hops[-1])]
        assert traced(here, protocol) == expected
