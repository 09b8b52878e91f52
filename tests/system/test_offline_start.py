from __future__ import annotations

import http.client
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.state import missing, observe, peer_leases
from flanneld.ctl.lab.tools import poll
from tests.support.drawn import CONFIG

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

HEALTH_PORT = 8081
DEGRADED = "started from cached state of 20"


@pytest.fixture
def lab() -> Iterator[Lab]:
    with Lab(2, config=CONFIG, start=False) as built:
        for host in built.hosts:
            host.daemon.flags += (
                "--offline-start",
                f"--state-file={host.daemon.directory}/state/state.json",
                "--healthz-ip=127.0.0.1",
                f"--healthz-port={HEALTH_PORT}",
            )
        built.etcd.forge("10.5.77.0-24", peer(77))
        built.start()
        for host in built.hosts:
            poll("all entries", lambda: not gaps(host, built.etcd.leases()), timeout_s=20)  # noqa: B023
        yield built


def peer(n: int) -> dict[str, Any]:
    data = {"VNI": 1, "VtepMAC": f"02:00:00:00:00:{n:02x}"}
    return {"PublicIP": f"192.0.2.{n}", "PublicIPv6": None, "BackendType": "vxlan", "BackendData": data}


def gaps(host: Host, leases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    own = frozenset(g.network for g in host.gateways())
    return missing(observe(host), own, peer_leases(leases))


def routes(host: Host) -> set[str]:
    return {str(route["dst"]) for route in observe(host).routes}


def mac(host: Host) -> str:
    return str(observe(host).devices["flannel.1"]["address"])


def readyz(host: Host) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", HEALTH_PORT, timeout=5)
    connection.sock = host.namespace.connect("127.0.0.1", HEALTH_PORT, 5)
    try:
        connection.request("GET", "/readyz?verbose")
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def reboot(host: Host) -> None:
    """Leave what a disk would keep; the daemon is stopped already."""
    host.namespace.ip("link del flannel.1")
    host.daemon.subnet_file.unlink()


def own_key(host: Host) -> str:
    return str(host.gateways()[0].network).replace("/", "-")


def test_a_host_boots_without_etcd_and_catches_up_later(lab: Lab) -> None:
    host, other = lab.hosts
    env, device_mac, leases = host.subnet_env(), mac(host), lab.etcd.leases()
    host.daemon.stop()
    lab.etcd.delete(f"{lab.etcd.prefix}/subnets/10.5.77.0-24")
    lab.etcd.forge("10.5.88.0-24", peer(88))
    lab.etcd.stop()
    reboot(host)

    host.daemon.start()
    host.daemon.wait_ready()
    assert host.subnet_env() == env
    assert mac(host) == device_mac
    assert gaps(host, leases) == []
    assert DEGRADED in host.daemon.notify.status
    status, text = readyz(host)
    assert status == 200
    assert text.startswith(f"flanneld is ready: {DEGRADED}")
    assert f"{lab.etcd.address}:2379" in text
    assert host.pod.ping(other.pod)[0] == 3
    # A restart while the store is still away: the kernel holds everything, and keeps it.
    host.daemon.restart()
    assert gaps(host, leases) == []

    lab.etcd.start()
    poll("the new peer", lambda: not gaps(host, lab.etcd.leases()), timeout_s=20)
    poll("the old peer's end", lambda: "10.5.77.0/24" not in routes(host), timeout_s=20)
    poll("an end of the degradation", lambda: DEGRADED not in host.daemon.notify.status, timeout_s=20)
    assert readyz(host) == (200, "flanneld is ready")
    assert host.subnet_env() == env
    poll("the own lease", lambda: "lease 10.5." in host.daemon.log(), timeout_s=20)
    value = lab.etcd.leases()[own_key(host)]
    assert (value["PublicIP"], value["BackendData"]["VtepMAC"]) == (host.address, device_mac)
    assert "Traceback" not in host.daemon.log(all_runs=True)


def test_a_subnet_that_was_taken_meanwhile_is_left_to_the_other_host(lab: Lab) -> None:
    host = lab.hosts[0]
    before, key = host.subnet_env()["FLANNEL_SUBNET"], own_key(host)
    host.daemon.stop()
    lab.etcd.forge(key, peer(66))
    lab.etcd.stop()
    reboot(host)
    host.daemon.start()
    host.daemon.wait_ready()
    assert host.subnet_env()["FLANNEL_SUBNET"] == before

    host.namespace.ip("link del cni0")  # containers keep the old subnet until they are made anew
    lab.etcd.start()
    poll("another subnet", lambda: host.subnet_env()["FLANNEL_SUBNET"] != before, timeout_s=20)
    poll("every entry", lambda: not gaps(host, lab.etcd.leases()), timeout_s=20)
    assert lab.etcd.leases()[key]["PublicIP"] == "192.0.2.66"
    assert lab.etcd.leases()[own_key(host)]["PublicIP"] == host.address
    poll("the state", lambda: remembered(host) == own_key(host), timeout_s=20)


def test_without_a_state_it_waits_for_etcd(lab: Lab) -> None:
    host = lab.hosts[0]
    host.daemon.stop()
    lab.etcd.stop()
    (host.daemon.directory / "state" / "state.json").write_bytes(b'{"version":1,"data')
    host.daemon.start()
    poll("a reason", lambda: "waiting for the network config: " in host.daemon.notify.status, timeout_s=20)
    assert "invalid JSON" in host.daemon.log()
    lab.etcd.start()
    host.daemon.wait_ready()
    poll("a whole state", lambda: remembered(host) == own_key(host), timeout_s=20)


def remembered(host: Host) -> str:
    """Return the key of the own lease in the state file."""
    own = json.loads((host.daemon.directory / "state" / "state.json").read_bytes())["own"]
    return str(own["subnet"]) if own else ""
