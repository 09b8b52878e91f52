from __future__ import annotations

import base64
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.tools import poll
from tests.conftest import IN_GUEST
from tests.support import wireguard
from tests.support.wireguard_lab import (
    PSK,
    READY_S,
    V4,
    V6,
    WAIT_S,
    answer,
    answers,
    laboratory,
    public_key,
    subnets,
    whole,
)

pytestmark = [pytest.mark.system, pytest.mark.stock]

MARKER = b"plain text that nobody may see"


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with laboratory() as built:
        yield built


def test_hosts_are_set_up_as_documented(lab: Lab) -> None:
    poll("every peer", lambda: whole(lab), WAIT_S)
    leases = lab.etcd.leases()
    for number, host in enumerate(lab.hosts, 1):
        assert host.subnet_env()["FLANNEL_MTU"] == "1420"
        key = Path(host.daemon.directory / "wgkey")
        assert key.stat().st_mode & 0o777 == 0o400
        (route,) = [r for r in host.namespace.routes(4) if r["dst"] == "10.5.0.0/16"]
        assert (route["scope"], route["protocol"], route.get("gateway")) == ("link", "boot", None)
        lease = leases["&".join(network.replace("/", "-") for network in subnets(host))]
        data = {"PublicKey": public_key(lab, host)}
        assert lease == {
            "PublicIP": f"192.0.2.{number}",
            "PublicIPv6": f"2001:db8:1::{number}",
            "BackendType": "wireguard",
            "BackendData": data | {"Port": 51820},
            "BackendV6Data": data | {"Port": 51821},
        }
        for secret in (PSK, key.read_text()):
            assert secret not in host.daemon.log(all_runs=True)
        substitute = "wireguard-go carries the packets of flannel-wg" in host.daemon.log()
        assert substitute == wireguard.in_process(host, V4)
    assert len({value["BackendData"]["PublicKey"] for value in leases.values()}) == 3


def test_everybody_reaches_everybody_with_full_packets_and_nothing_shows(lab: Lab) -> None:
    capture = lab.directory / "capture"
    first, second = lab.hosts[:2]
    sniffer = lab.switch.spawn("tcpdump", "--immediate-mode", "-Uni", "br0", "-w", str(capture))
    try:
        poll("the capture", capture.exists, WAIT_S)
        poll("every answer", lambda: answers(lab, 4, 6) == {2}, WAIT_S)
        for family in (4, 6):
            words = ("ping", "-c", "2", "-p", MARKER[:16].hex(), second.pod.address(family))
            assert " 0% packet loss" in first.pod.namespace.run(*words)
    finally:
        sniffer.send_signal(signal.SIGINT)
        sniffer.wait(30)
    assert MARKER[:16] not in capture.read_bytes()
    inner = lab.switch.run("tcpdump", "-nr", str(capture), "icmp or net 10.5.0.0/16 or net fd05::/48")
    assert inner == ""
    # pcap-filter(7): "and" and "or" bind alike.
    between = "(host 192.0.2.1 and host 192.0.2.2) or (host 2001:db8:1::1 and host 2001:db8:1::2)"
    outer = lab.switch.run("tcpdump", "-nr", str(capture), f"({between}) and not arp and not icmp6").splitlines()
    ports = [set(re.findall(r"\.(\d+)(?= >|: UDP)", line)) for line in outer]
    assert {frozenset(pair) for pair in ports} == {frozenset({"51820"}), frozenset({"51821"})}


# An end that was asked for differs in nothing that the kernel does: that costs the guest nothing.
@pytest.mark.parametrize("number", [signal.SIGKILL] if IN_GUEST else [signal.SIGTERM, signal.SIGKILL])
def test_W07_a_restart_loses_nothing(lab: Lab, number: signal.Signals) -> None:
    first, second = lab.hosts[:2]
    source, destination = first.pod.namespace, second.pod.namespace
    poll("answers", lambda: answer(first, second) == [1, 1], WAIT_S)
    with ExitStack() as running:
        flows = [Flow(source, destination, second.pod.address(f), rate_per_s=20, port=4000 + f) for f in (4, 6)]
        for flow in flows:
            running.enter_context(flow)
            poll("datagrams", flow.flowing, WAIT_S)
        marks = [flow.sent for flow in flows]
        first.daemon.signal(number)
        first.daemon.wait_exit(30)
        assert whole(lab, first)
        first.daemon.start()
        first.daemon.wait_ready(READY_S)
        poll("more", lambda: all(f.sent > mark + 20 for f, mark in zip(flows, marks, strict=True)), WAIT_S)
    assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]
    assert whole(lab, first)
    assert not re.search("created|corrected|added|removed", first.daemon.log())


DAMAGE = {
    "devices": [f"link del {V4}", f"link set {V6} down"],
    "routes, address and MTU": [
        "route del 10.5.0.0/16",
        "route del fd05::/48",
        f"addr flush dev {V4} scope global",
        f"link set {V6} mtu 1300",
        "route add {v4} via 192.0.2.254 dev eth0",
    ],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_repaired_on_notification(lab: Lab, damage: list[str]) -> None:
    first, second = lab.hosts[:2]
    poll("every peer", lambda: whole(lab, first), WAIT_S)
    first.namespace.ip(*(command.format(v4=subnets(second)[0]) for command in damage))
    poll("repair", lambda: whole(lab, first), WAIT_S)
    poll("answers", lambda: answer(first, second) == [1, 1], WAIT_S)
    assert subnets(second)[0] not in first.run("ip", "-4", "route")


def test_peers_keys_and_ports_are_repaired_by_comparison(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    poll("every peer", lambda: whole(lab, first), WAIT_S)
    links = [first.namespace.link(device) for device in (V4, V6)]
    wireguard.remove_peer(first, V4, public_key(lab, second))
    wireguard.set_device(first, V6, base64.b64encode(b"x" * 32).decode(), 50000)
    wireguard.put_peer(first, V4, base64.b64encode(b"y" * 32).decode(), ["10.5.0.0/17"])
    poll("repair", lambda: whole(lab, first), WAIT_S)
    assert [first.namespace.link(device) for device in (V4, V6)] == links
    poll("answers", lambda: answer(first, second) == [1, 1], WAIT_S)
