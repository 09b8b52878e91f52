from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from backends.ipsec.charon import find
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.netns import pids
from flanneld.ctl.lab.tools import poll

pytestmark = [pytest.mark.system, pytest.mark.vm]

WAIT_S = 120.0
"""The guest is an emulated machine."""
READY_S = 300.0
PSK = "a secret that all hosts of the cluster know, and nobody else; it has ninety-six characters or more"
MARKER = b"plain text that nobody may see"


def config(psk: str = PSK, **options: Any) -> dict[str, Any]:
    return {"Network": "10.5.0.0/16", "Backend": {"Type": "ipsec", "PSK": psk, **options}}


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    if find() is None:
        pytest.skip("strongSwan's charon is not installed")
    with Lab(3, config=config(), flags=["--resync-period=5"], ready_timeout_s=READY_S) as built:
        poll("every answer", lambda: answers(built) == {2}, WAIT_S)
        yield built


def subnet(host: Host) -> str:
    return str(host.gateways()[0].network)


def own(host: Host) -> str:
    return subnet(host).split("/")[0]


def answers(lab: Lab) -> set[int]:
    return {a.pod.ping(b.pod, count=2)[0] for a, b in itertools.permutations(lab.hosts, 2)}


def answer(source: Host, target: Host) -> bool:
    return source.pod.ping(target.pod, count=1)[0] == 1


def policies(host: Host) -> set[str]:
    """The policies of host's kernel but for those of charon's own sockets, one line each."""
    text = host.run("ip", "xfrm", "policy").replace("\n\t", " ").replace(" ptype main", "")
    lines = (" ".join(line.split()) for line in text.splitlines())
    return {line for line in lines if " socket " not in line}


def wanted(lab: Lab, host: Host, *others: Host) -> set[str]:
    found = set()
    for peer in others or lab.hosts:
        if peer is not host:
            here, there = f"{subnet(host)} {host.address}".split(), f"{subnet(peer)} {peer.address}".split()
            for direction, (a, b) in {"out": (here, there), "in": (there, here), "fwd": (there, here)}.items():
                form = f"tmpl src {a[1]} dst {b[1]} proto esp reqid 11 mode tunnel"
                found.add(f"src {a[0]} dst {b[0]} dir {direction} priority 0 {form}")
    return found


def associations(host: Host) -> set[tuple[str, str]]:
    """Source and destination of the kernel's associations; acquisitions under way, with SPI 0, do not count."""
    text = host.run("ip", "xfrm", "state")
    return set(re.findall(r"src (\S+) dst (\S+)\n\tproto esp spi 0x(?!00000000)", text))


def whole(lab: Lab, host: Host) -> bool:
    routes = {r["dst"]: r.get("prefsrc") for r in host.namespace.routes(4) if r.get("protocol") == "142"}
    expected = {subnet(peer): own(host) for peer in lab.hosts if peer is not host}
    address = f"{own(host)}/32" in host.namespace.addresses("lo")
    return policies(host) == wanted(lab, host) and routes == expected and address


def charon(host: Host) -> int:
    """The process id of the host's charon."""
    return int((host.daemon.directory / "run" / "charon.pid").read_text())


def test_hosts_are_set_up_as_documented(lab: Lab) -> None:
    poll("every policy", lambda: all(whole(lab, host) for host in lab.hosts), WAIT_S)
    leases = lab.etcd.leases()
    for number, host in enumerate(lab.hosts, 1):
        assert host.subnet_env()["FLANNEL_MTU"] == "1423"
        assert leases[subnet(host).replace("/", "-")] == {
            "PublicIP": f"192.0.2.{number}",
            "PublicIPv6": None,
            "BackendType": "ipsec",
        }
        assert [name for name in host.namespace.links() if name.startswith("flannel")] == []
        assert PSK not in host.daemon.log()


def test_everything_between_hosts_is_esp_also_from_the_hosts_themselves(lab: Lab) -> None:
    capture = lab.directory / "capture"
    first, second, third = lab.hosts
    sniffer = lab.switch.spawn("tcpdump", "--immediate-mode", "-Uni", "br0", "-w", str(capture))
    try:
        poll("the capture", capture.exists, WAIT_S)
        assert answers(lab) == {2}
        words = ("ping", "-c", "2", "-p", MARKER[:16].hex())
        assert " 0% packet loss" in first.pod.namespace.run(*words, second.pod.address())
        assert " 0% packet loss" in first.run(*words, third.pod.address())
        assert " 0% packet loss" in second.pod.namespace.run(*words, own(first))
    finally:
        sniffer.send_signal(signal.SIGINT)
        sniffer.wait(30)
    assert MARKER[:16] not in capture.read_bytes()
    assert lab.switch.run("tcpdump", "-nr", str(capture), "icmp or net 10.5.0.0/16") == ""
    between = "ip and not host 192.0.2.254"
    plain = f"{between} and not esp and not udp port 500 and not udp port 4500"
    assert lab.switch.run("tcpdump", "-nr", str(capture), plain) == ""
    assert " ESP(" in lab.switch.run("tcpdump", "-nr", str(capture), between)


def test_damage_is_repaired_and_stale_policies_go(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    ends = f"src {subnet(first)} dst {subnet(second)}"
    first.run("ip", *f"xfrm policy delete {ends} dir out".split())
    form = "tmpl src 192.0.2.1 dst 192.0.2.99 proto esp reqid 11 mode tunnel"
    first.run("ip", *f"xfrm policy add src {subnet(first)} dst 10.5.250.0/24 dir out {form}".split())
    first.run("ip", *f"route del {subnet(second)}".split())
    first.run("ip", *f"addr del {own(first)}/32 dev lo".split())
    poll("repair", lambda: whole(lab, first), WAIT_S)
    poll("an answer", lambda: answer(first, second), WAIT_S)


def test_charon_that_dies_is_started_again_with_all_connections(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    before = charon(first)
    os.kill(before, signal.SIGKILL)
    poll("another", lambda: charon(first) != before, WAIT_S)
    poll("new associations", lambda: "ESTABLISHED" in sas(first) and sas(first).count("INSTALLED") >= 2, WAIT_S)
    poll("an answer", lambda: answer(first, second) and answer(second, first), WAIT_S)
    assert "charon ended" in first.daemon.log()


def sas(host: Host) -> str:
    """What charon says of its associations, through strongSwan's own tool."""
    return host.run("swanctl", "--list-sas", "--uri", f"unix://{host.daemon.directory}/run/charon.vici", check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_restart_loses_at_most_the_negotiation(lab: Lab, number: signal.Signals) -> None:
    first, second = lab.hosts[:2]
    process = charon(first)
    poll("an answer", lambda: answer(first, second), WAIT_S)
    with ExitStack() as running:
        flow = running.enter_context(
            Flow(first.pod.namespace, second.pod.namespace, second.pod.address(), rate_per_s=20)
        )
        poll("datagrams", flow.flowing, WAIT_S)
        mark = flow.sent
        first.daemon.signal(number)
        first.daemon.wait_exit(30)
        if number == signal.SIGTERM:
            assert policies(first) == set()
            assert process not in pids(first.namespace.name)
        else:
            assert policies(first) == wanted(lab, first)
        first.daemon.start()
        first.daemon.wait_ready(READY_S)
        poll("datagrams again", flow.flowing, WAIT_S)
        late = flow.sent
        poll("more", lambda: flow.sent > late + 20, WAIT_S)
    assert flow.lost(late) == 0
    if number == signal.SIGKILL:
        assert charon(first) == process
        assert flow.lost(mark) == 0
    poll("every policy", lambda: whole(lab, first), WAIT_S)
    poll("an answer", lambda: answer(second, first), WAIT_S)


def test_a_wrong_psk_isolates_that_host_alone_and_is_told(lab: Lab) -> None:
    first, second, third = lab.hosts
    third.daemon.stop(30)
    lab.etcd.configure(config("another " + PSK))
    third.daemon.start()
    third.daemon.wait_ready(READY_S)
    report = f"no IPsec association with {third.address} for {subnet(third)}"
    poll("its report", lambda: report in first.daemon.log(), WAIT_S)
    assert not answer(first, third)
    assert answer(first, second)
    assert answer(second, first)
    assert f"no IPsec association with {second.address}" not in first.daemon.log()
    third.daemon.stop(30)
    lab.etcd.configure(config())
    third.daemon.start()
    third.daemon.wait_ready(READY_S)
    poll("an answer", lambda: answer(first, third) and answer(third, first), WAIT_S)


def test_a_lease_that_goes_takes_policies_and_associations_along(lab: Lab) -> None:
    first, second, third = lab.hosts
    third.daemon.stop(30)
    lab.etcd.delete(f"{lab.etcd.prefix}/subnets/{subnet(third).replace('/', '-')}")
    poll("the end of its policies", lambda: policies(first) == wanted(lab, first, second), WAIT_S)
    ends = {(first.address, third.address), (third.address, first.address)}
    poll("the end of its associations", lambda: not associations(first) & ends, WAIT_S)
    assert answer(first, second)
    assert subnet(third) not in first.run("ip", "route")


def test_B12_another_backend_finds_no_policy_of_a_run_that_was_killed(lab: Lab) -> None:
    (host,) = lab.hosts[:1]
    host.daemon.kill()
    assert policies(host)
    os.kill(charon(host), signal.SIGKILL)
    lab.etcd.configure({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    host.daemon.start()
    host.daemon.wait_ready(READY_S)
    poll("the end of all policies", lambda: policies(host) == set(), WAIT_S)
    assert f"{own(host)}/32" not in host.namespace.addresses("lo")
