"""What the daemon keeps after very many changes: the entries that the leases ask for, and nothing else."""

from __future__ import annotations

import base64
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.lab.hosts import Host
from tests.support.site import Network, peer_value

pytestmark = pytest.mark.system

PEERS = range(200, 250)
SMALL = {"Network": "10.5.0.0/16", "SubnetLen": 28, "SubnetMin": "10.5.0.16", "SubnetMax": "10.5.15.240"}
ALLOWED = {"KiB": 10 * 1024, "descriptors": 2, "threads": 4}
"""What may be more afterwards: gRPC's threads come and go in small numbers, what leaks does so by the thousand."""


@dataclass(frozen=True)
class Footprint:
    """What a process holds: resident memory, descriptors, threads."""

    rss_kib: int
    descriptors: int
    threads: int


def footprint(host: Host) -> Footprint:
    process = Path(f"/proc/{host.daemon.pid}")
    fields = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    descriptors = len(os.listdir(process / "fd"))
    return Footprint(int(fields["VmRSS"].split()[0]), descriptors, int(fields["Threads"]))


def grown(before: Footprint, now: Footprint) -> list[str]:
    """Return what there is more of than is allowed."""
    more = {
        "KiB": now.rss_kib - before.rss_kib,
        "descriptors": now.descriptors - before.descriptors,
        "threads": now.threads - before.threads,
    }
    return [f"{count} {what} more" for what, count in more.items() if count > ALLOWED[what]]


def value(number: int, turn: int) -> dict[str, Any]:
    """Return a peer's value: the same in most turns, with another MAC in each tenth."""
    data = {"VNI": 1, "VtepMAC": f"02:00:00:00:{turn // 10 % 256:02x}:{number:02x}"}
    return peer_value(number, BackendData=data)


def rewrite(network: Network, turn: int) -> None:
    network.etcd.forge_many({f"10.5.{n}.0-24": value(n, turn) for n in PEERS})


def remove(network: Network) -> None:
    ends = [f"{network.etcd.prefix}/subnets/10.5.{n}" for n in (PEERS[0], PEERS[-1] + 1)]
    key, range_end = (base64.b64encode(end.encode()).decode() for end in ends)
    assert int(network.etcd.call("kv/deleterange", {"key": key, "range_end": range_end})["deleted"]) == len(PEERS)


def test_P01_lease_events_by_the_hundred_thousand_leave_nothing_in_memory(network: Network) -> None:
    a = network.host(ready=True)
    for turn in range(200):
        rewrite(network, turn)
    remove(network)
    rewrite(network, 0)
    network.settled(60)
    before = footprint(a)
    for turn in range(2_000):
        rewrite(network, turn)
    network.settled(60)
    for turn in range(200):
        remove(network)
        rewrite(network, turn)
    network.settled(60)
    assert grown(before, footprint(a)) == []
    assert a.daemon.runs == 1


def small(number: int, turn: int) -> tuple[str, dict[str, Any]]:
    """Return key and value of one of many peers with 16 addresses each, its MAC another one each turn."""
    subnet = IPv4Address("10.5.16.0") + 16 * number
    data = {"VNI": 1, "VtepMAC": f"02:00:00:{turn:02x}:{number >> 8:02x}:{number & 255:02x}"}
    return f"{subnet}-28", peer_value(1, PublicIP=str(IPv4Address("198.18.0.0") + number), BackendData=data)


def test_P03_changes_during_the_first_programming_all_arrive(make_network: Callable[..., Network]) -> None:
    network = make_network({**SMALL, "Backend": {"Type": "vxlan"}})
    network.etcd.forge_many(dict(small(n, 0) for n in range(2_000)))
    a = network.host()
    a.daemon.start()
    # From before it lists until it is ready: some come in between.
    for turn in itertools.count(1):
        first = turn * 50 % 1_900
        network.etcd.forge_many(dict(small(n, turn % 256) for n in range(first, first + 100)))
        if a.daemon.notify.ready:
            break
        assert turn < 20_000, a.daemon.log()
    network.settled(60)
    assert a.daemon.log().count("WARN") == 0
