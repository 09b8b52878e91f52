"""API servers that are away, silent or forgetful: no datagram between containers is lost, and no change is missed."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from tests.support.kube import PREFIX, KubeApi, node_annotations
from tests.support.kube_lab import cidrs, kube_lab
from tests.support.kube_node import DUAL
from tests.support.site import lossless, settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
    pytest.mark.timeout(240),
]

AWAY_S = 60.0
STORM_S = 15.0
SILENCE_S = 90.0
"""Without a byte for so long, with a bookmark due each minute, a watch is dead."""
HOSTS = 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[Lab, KubeApi]]:
    with kube_lab(HOSTS, DUAL) as (lab, api):
        lab.start()
        yield lab, api


def told(number: int, mac: int = 0) -> dict[str, str]:
    end = f"{number:02x}"
    return node_annotations(
        f"192.0.2.{number}", f"02:00:00:00:{mac:02x}:{end}", f"2001:db8:1::{end}", f"02:00:00:06:{mac:02x}:{end}"
    )


def add(api: KubeApi, number: int) -> None:
    api.node(f"p{number}", cidrs(number, DUAL), told(number))


def peers(host: Host) -> set[tuple[str, str]]:
    """Subnet and MAC of every peer that has no host, by IPv4."""
    neighbours = host.namespace.neighbours("flannel.1")
    return {(n["dst"], n["lladdr"]) for n in neighbours if n["lladdr"].startswith("02:00:00:00:")}


def differs(lab: Lab, *wanted: tuple[int, int]) -> list[set[tuple[str, str]]]:
    """What hosts have or lack of the peers with these numbers and MACs."""
    expected = {(f"10.5.{number}.0", f"02:00:00:00:{mac:02x}:{number:02x}") for number, mac in wanted}
    return [found for host in lab.hosts if (found := peers(host) ^ expected)]


def refusals(lab: Lab) -> int:
    """How many connections the switch has refused: it sent a reset for each (snmp counters, RFC 4022)."""
    names, values = (
        line.split()[1:] for line in lab.switch.run("cat", "/proc/net/snmp").splitlines() if line.startswith("Tcp:")
    )
    return int(values[names.index("OutRsts")])


def both_ways(lab: Lab) -> tuple[tuple[Host, Host], tuple[Host, Host]]:
    first, second = lab.hosts
    return (first, second), (second, first)


def test_server_away_for_a_minute(cluster: tuple[Lab, KubeApi]) -> None:
    lab, api = cluster
    for number in (21, 22):
        add(api, number)
    settle("peers", lambda: differs(lab, (21, 0), (22, 0)), 10)
    with lossless(*both_ways(lab)):
        api.stop()
        before, asked = refusals(lab), len(api.requests)
        api.delete("p21")
        api.change("p22", told(22, mac=5))
        add(api, 23)
        api.forget()
        time.sleep(AWAY_S)
        attempts = refusals(lab) - before
        assert all(host.daemon.pid for host in lab.hosts)
        assert differs(lab, (21, 0), (22, 0)) == []
        api.start()
        settle("what happened meanwhile", lambda: differs(lab, (22, 5), (23, 0)), 10)
    print(f"{attempts} attempts in {AWAY_S:g} s by {HOSTS} daemons")
    assert HOSTS <= attempts <= HOSTS * AWAY_S
    assert len(api.asked("list", asked)) <= 2 * HOSTS
    api.delete("p22")
    api.delete("p23")
    settle("no peers", lambda: differs(lab), 10)


def test_versions_are_forgotten_again_and_again(cluster: tuple[Lab, KubeApi]) -> None:
    lab, api = cluster
    with lossless(*both_ways(lab)):
        asked, ends, turn = len(api.requests), time.monotonic() + STORM_S, 0
        while time.monotonic() < ends:
            # Each time the own version is too old before the next event, in the stream and for new watches alike.
            api.forget()
            api.cut_watches()
            turn += 1
            if turn == 50:
                add(api, 24)
            time.sleep(0.1)
        seen = [request.verb for request in api.requests[asked:]]
        api.change("p24", {PREFIX + "public-ip": "192.0.2.99"})
        settle("peer of the storm", lambda: differs(lab, (24, 0)), 15)
        for host in lab.hosts:
            settle(
                "address",
                lambda h=host: not any(e["dst"] == "192.0.2.99" for e in h.namespace.fdb("flannel.1")),  # type: ignore[misc]
                15,
            )
    print(f"{len(seen)} requests in {STORM_S:g} s by {HOSTS} daemons, of these {seen.count('list')} lists")
    assert HOSTS <= seen.count("list") <= 12 * HOSTS
    assert len(seen) <= 3 * STORM_S * HOSTS
    api.delete("p24")
    settle("no peers", lambda: differs(lab), 15)


def test_watch_that_is_silent(cluster: tuple[Lab, KubeApi]) -> None:
    lab, api = cluster
    with lossless(*both_ways(lab)):
        asked = len(api.requests)
        api.freeze()
        add(api, 25)
        settle("peer", lambda: differs(lab, (25, 0)), SILENCE_S + 20)
        seen = [request.verb for request in api.requests[asked:]]
    # Taken up where it broke off: nothing is listed.
    assert seen == ["watch"] * HOSTS
    api.delete("p25")
    settle("no peers", lambda: differs(lab), 10)
