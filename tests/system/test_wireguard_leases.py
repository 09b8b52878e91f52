from __future__ import annotations

import base64
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import FamilyChoice
from flanneld.ctl.lab.tools import poll
from tests.support import wireguard
from tests.support.drawn import drawn
from tests.support.wireguard import Peer
from tests.support.wireguard_lab import (
    PSK,
    READY_S,
    V4,
    V6,
    WAIT_S,
    answer,
    answers,
    config,
    laboratory,
    peers,
    public_key,
    subnets,
    wanted,
    whole,
)

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with laboratory() as built:
        yield built


@pytest.mark.parametrize(("families", "mode"), [("v4", "ipv4"), ("v6", "separate"), ("v6", "ipv6"), ("dual", "auto")])
def test_W05_daemons_of_every_family_reach_each_other(families: FamilyChoice, mode: str) -> None:
    with laboratory(families, Mode=mode) as lab:
        numbers = {"v4": [4], "v6": [6], "dual": [4, 6]}[families]
        poll("every answer", lambda: answers(lab, *numbers) == {2}, WAIT_S)
        for host in lab.hosts:
            device = V6 if (families, mode) == ("v6", "separate") else V4
            assert [name for name in host.namespace.links() if name.startswith("flannel")] == [device]
            assert len(peers(host, device)) == 2


def test_the_operators_laboratory_finds_no_fault() -> None:
    if not wireguard.possible():
        pytest.skip("neither the kernel has WireGuard nor is wireguard-go installed")
    words = ("lab", "--backend=wireguard", "--family=dual", "--hosts=2", "--seconds=0", f"--timeout={READY_S:g}")
    done = subprocess.run(
        [sys.executable, "-m", "flanneld.ctl", *words], capture_output=True, text=True, check=False, timeout=READY_S * 2
    )
    assert done.returncode == 0, done.stdout
    assert "Every container reaches every other" in done.stdout


def test_a_wrong_key_or_psk_isolates_that_host_alone_and_is_told(lab: Lab) -> None:
    first, second, third = lab.hosts
    poll("every peer", lambda: whole(lab), WAIT_S)
    key, wrong = public_key(lab, third), base64.b64encode(b"w" * 32).decode()
    third.daemon.stop(30)
    for host in (first, second):
        wireguard.put_peer(third, V4, public_key(lab, host), psk=wrong)
    wireguard.set_device(third, V6, wrong, 51821)
    for device in (V4, V6):
        # Sessions go with the peer, which is back at once, and would have lasted three minutes more.
        wireguard.remove_peer(first, device, key)
        wireguard.remove_peer(third, device, public_key(lab, first))
    for host in (first, second):
        wireguard.put_peer(third, V4, public_key(lab, host), [subnets(host)[0]], wrong)
    poll("the peer", lambda: whole(lab, first), WAIT_S)
    networks = subnets(third)

    def told() -> bool:
        assert answer(first, third) == [0, 0]
        log = first.daemon.log()
        return all(re.search(f"for {network} does not answer", log) for network in networks)

    poll("its report", told, WAIT_S)
    assert answer(first, second) == answer(second, first) == [1, 1]
    assert not re.search(f"for ({'|'.join(subnets(second))}) does not", first.daemon.log())
    third.daemon.start()
    third.daemon.wait_ready(READY_S)
    poll("answers", lambda: answer(first, third) == answer(third, first) == [1, 1], WAIT_S)
    poll("its end", lambda: all(re.search(f"for {n} answers", first.daemon.log()) for n in networks), WAIT_S)


def test_W01_a_peer_with_a_new_key_replaces_the_old_one(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    key = second.daemon.directory / "wgkey"
    before = public_key(lab, second)
    second.daemon.stop(30)
    key.unlink()
    second.daemon.start()
    second.daemon.wait_ready(READY_S)
    poll("the new key", lambda: public_key(lab, second) != before and whole(lab), WAIT_S)
    assert before not in peers(first, V4)
    poll("answers", lambda: answer(first, second) == [1, 1], WAIT_S)


def test_leases_of_upstream_of_old_nodes_of_thieves_and_of_nobody(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    keys = [base64.b64encode(bytes([n]) * 32).decode() for n in range(5)]
    own, theirs = public_key(lab, first), subnets(second)[0]
    forged: list[str] = []

    def forge(name: str, public: str, data: dict[str, Any]) -> None:
        value = {"PublicIP": public, "PublicIPv6": None, "BackendType": "wireguard", "BackendData": data}
        lab.etcd.forge(name, value)
        forged.append(name)

    forge("10.5.201.0-24", "192.0.2.99", {"PublicKey": keys[1], "Port": 51999})
    forge("10.5.202.0-24", "192.0.2.99", {"publickey": keys[2]})
    forge("10.5.203.0-24", "192.0.2.98", {"PublicKey": "!"})
    forge("10.5.204.0-24", "192.0.2.97", {"PublicKey": own, "Port": 51820})
    forge("10.5.205.0-24", "192.0.2.96", {"PublicKey": keys[1], "Port": 51820})
    forge(theirs.replace("/", "-"), "192.0.2.95", {"PublicKey": keys[4], "Port": 51820})
    expected = wanted(lab, first, 4) | {
        keys[1]: Peer("192.0.2.99 51999", ("10.5.201.0/24",), 0, PSK),
        keys[2]: Peer("192.0.2.99 51820", ("10.5.202.0/24",), 0, PSK),
    }
    poll("its peers", lambda: peers(first, V4) == expected, WAIT_S)
    reasons = ("is not base64", "is our own", "an older lease", f"{theirs}: overlaps")
    poll("reasons", lambda: all(text in first.daemon.log() for text in reasons), WAIT_S)
    assert peers(first, V4) == expected
    for name in forged:
        lab.etcd.delete(f"{lab.etcd.prefix}/subnets/{name}")
    poll("their end", lambda: whole(lab, first), WAIT_S)


def test_options_that_can_change_under_way_are_followed_without_a_word_of_the_secret(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    other = base64.b64encode(b"another secret of 32 bytes, yes.").decode()
    lab.etcd.configure(config(PSK=other, PersistentKeepaliveInterval=25, MTU=1400))

    def followed(host: Host) -> bool:
        found = [(peer.keepalive_s, peer.psk) for peer in peers(host, V4).values()]
        return found == [(25, other)] * 2 and (host.namespace.link(V4) or {}).get("mtu") == 1320

    poll("the new options", lambda: all(followed(host) for host in lab.hosts), WAIT_S)
    poll("an answer", lambda: first.pod.namespace.ping(second.pod.address(), count=1)[0] == 1, WAIT_S)
    for secret in (PSK, other):
        assert not [host for host in lab.hosts if secret in host.daemon.log(all_runs=True)]


def gone(host: Host, device: str) -> bool:
    return host.namespace.link(device) is None


def test_B12_what_another_backend_left_is_removed() -> None:
    networks = drawn({"Network": "10.5.0.0/16"})
    with Lab(1, config=config("v4"), start=False) as lab:
        (host,) = lab.hosts
        data = {"PublicKey": base64.b64encode(b"k" * 32).decode(), "Port": 51820}
        lab.etcd.forge("10.5.200.0-24", {"PublicIP": "192.0.2.99", "BackendType": "wireguard", "BackendData": data})
        device = {"vxlan": "flannel.1", "wireguard": V4}
        for backend, other in (("wireguard", "vxlan"), ("vxlan", "wireguard"), ("wireguard", "vxlan")):
            host.run("ip", "route", "replace", "10.5.201.0/24", "via", "192.0.2.254", "dev", "eth0", "proto", "142")
            lab.etcd.configure(networks | {"Backend": {"Type": backend}})
            host.daemon.start()
            host.daemon.wait_ready(READY_S)
            poll("the end of the other", partial(gone, host, device[other]), WAIT_S)
            assert not gone(host, device[backend])
            routes = {route["dst"]: route["dev"] for route in host.namespace.routes() if "10.5." in route["dst"]}
            assert routes == ({"10.5.0.0/16": V4} if backend == "wireguard" else {})
            assert host.daemon.stop(30) == 0
