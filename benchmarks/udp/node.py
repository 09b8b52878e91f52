"""One end of a measured path: ``python -m benchmarks.udp.node``, inside its namespace.

Arguments: number of the host, data path, further routes, the built plain pump.
Says ``ready`` and carries until standard input ends.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import ExitStack
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

from backends.kernel.netlink import NetlinkKernel
from backends.kernel.tun import open_tun
from backends.udp.bpf.carrier import BpfCarrier, BpfSpec
from backends.udp.carrier import CarrierSpec, UdpCarrier
from subnet.model import Lease, LeaseAttrs, Subnets

NETWORK = IPv4Network("10.0.0.0/8")
PORT, MTU_BYTES = 8285, 1472


def underlay(number: int) -> IPv4Address:
    """Return the address of a host on the link."""
    return IPv4Address(f"192.0.2.{number}")


def subnet(number: int) -> IPv4Network:
    """Return a host's subnet; the second host has 2 and 3."""
    return IPv4Network(f"10.0.{number}.0/24")


def table(number: int, more: int) -> dict[IPv4Network, IPv4Address]:
    """Return where subnets are: ``more`` that nobody sends to, and, behind these, those of the other host."""
    routes = {
        IPv4Network((int(NETWORK.network_address) + (n + 256 << 8), 24)): IPv4Address(int(underlay(10)) + n % 200)
        for n in range(more)
    }
    for other in (2, 3) if number == 1 else (1,):
        routes[subnet(other)] = underlay(3 - number)
    return routes


def main(number: int, path: str, more: int, plain: str) -> None:
    """Carry until standard input ends."""
    with ExitStack() as ending:
        device = _plain(ending, number, more, plain) if path == "plain" else _own(ending, number, more, path)
        for command in (
            f"addr add {subnet(number).network_address}/32 dev {device}",
            f"route add {NETWORK} dev {device}",
            "addr add 10.0.3.1/32 dev lo" if number == 2 else "link set lo up",
        ):
            subprocess.run(["ip", *command.split()], check=True)
        print("ready", flush=True)
        sys.stdin.read()


def _carrier(number: int, path: str) -> UdpCarrier:
    if path != "bpf":
        return UdpCarrier(CarrierSpec(underlay(number), PORT, MTU_BYTES, NETWORK), native=path == "native")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    index = socket.if_nametoindex("eth0")
    spec = BpfSpec(underlay(number), PORT, MTU_BYTES, NETWORK, kept=True, external="eth0", external_index=index)
    # A cable that finishes no packets is refused elsewhere. Here both ends are programs, which do without.
    return BpfCarrier(spec, unfinished=lambda _: "")


def _own(ending: ExitStack, number: int, more: int, path: str) -> str:
    carrier = _carrier(number, path)
    ending.callback(carrier.close)
    kernel = NetlinkKernel()
    ending.callback(kernel.close)
    carrier.ensure(kernel)
    peers = [Lease(Subnets(network), LeaseAttrs(hop), str(network)) for network, hop in table(number, more).items()]
    carrier.carry(Subnets(subnet(number)), peers)
    return carrier.device


def _plain(ending: ExitStack, number: int, more: int, program: str) -> str:
    tun, wire = open_tun("flannel%d"), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    wire.bind((str(underlay(number)), PORT))  # with the system's own buffers, which upstream leaves as they are
    subprocess.run(["ip", "link", "set", tun.name, "mtu", str(MTU_BYTES), "up"], check=True)
    argv = [program, str(tun.fd), str(wire.fileno()), str(PORT)]
    pump = subprocess.Popen(argv, stdin=subprocess.PIPE, text=True, pass_fds=(tun.fd, wire.fileno()))
    ending.callback(pump.wait)
    if pump.stdin is None:
        raise RuntimeError("no standard input")
    ending.callback(pump.stdin.close)
    lines = (f"{n.network_address} {n.prefixlen} {hop}\n" for n, hop in table(number, more).items())
    pump.stdin.write("".join(lines) + "\n")
    pump.stdin.flush()
    return tun.name


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4])
