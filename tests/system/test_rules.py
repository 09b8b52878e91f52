from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from functools import partial

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.lab import network_config
from flanneld.ctl.lab.tools import poll
from tests.support.drawn import drawn
from tests.support.site import lacks, settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

FLAGS = ("--ip-masq", "--ip-blackhole-route", "--vtep-filter", "--iptables-resync=1", "--resync-period=1")
CONFIG = drawn(network_config(family="dual"))


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(2, family="dual", config=CONFIG | {"EnableNFTables": True}, flags=FLAGS) as built:
        yield built


def tables(host: Host) -> list[str]:
    return sorted(line.removeprefix("table ") for line in host.run("nft", "list", "tables").splitlines())


def blackholes(host: Host) -> list[str]:
    routes = [host.run("ip", f"-{family}", "route", "show", "type", "blackhole") for family in (4, 6)]
    return [line.split()[1] for line in "".join(routes).splitlines()]


def subnets(host: Host) -> list[str]:
    return [str(gateway.network) for gateway in host.gateways()]


def answers(host: Host, other: Host, family: int) -> bool:
    return host.pod.ping(other.pod, family, count=1)[0] == 1


OURS = ["inet flannel-vtep", "ip flannel-ipv4", "ip6 flannel-ipv6"]


def test_nftables_mode_with_all_options(lab: Lab) -> None:
    for host, other in lab.pairs():
        assert tables(host) == OURS
        listing = partial(host.run, "nft", "list", "table", "inet", "flannel-vtep")
        settle("the other host in the filter", lacks(listing, other.address), 10)
        assert host.address not in listing()
        assert sorted(blackholes(host)) == sorted(subnets(host))
        for family in (4, 6):
            poll("an answer", partial(answers, host, other, family), timeout_s=10)


def test_S15_the_filter_follows_leases(lab: Lab) -> None:
    host = lab.hosts[0]
    value = {
        "PublicIP": "192.0.2.77",
        "BackendType": "vxlan",
        "BackendData": {"VNI": 1, "VtepMAC": "02:00:00:00:00:77"},
    }
    lab.etcd.forge("10.5.200.0-24", value)

    def known() -> bool:
        return "192.0.2.77" in host.run("nft", "list", "table", "inet", "flannel-vtep")

    poll("the new host", known, timeout_s=10)
    lab.etcd.delete("/coreos.com/network/subnets/10.5.200.0-24")
    poll("the host gone", lambda: not known(), timeout_s=10)


def test_L49_the_blackhole_comes_back(lab: Lab) -> None:
    host = lab.hosts[0]
    before = blackholes(host)
    for subnet in before:
        host.run("ip", "-6" if ":" in subnet else "-4", "route", "del", "blackhole", subnet)
    poll("both", lambda: blackholes(host) == before, timeout_s=10)


def test_the_mode_is_switched_under_way(lab: Lab) -> None:
    host = lab.hosts[0]
    lab.etcd.configure(CONFIG)

    def jumps() -> int:
        return sum(host.run(f"{program}-save").count("-j FLANNEL-") for program in ("iptables", "ip6tables"))

    poll("rules of iptables", jumps, timeout_s=10)
    poll("no table of ours", lambda: OURS[1] not in tables(host) and OURS[2] not in tables(host), timeout_s=10)
    assert jumps() == 4
    lab.etcd.configure(CONFIG | {"EnableNFTables": True})
    poll("the tables", lambda: set(OURS) <= set(tables(host)) and not jumps(), timeout_s=10)
    assert "restart" not in host.daemon.log()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_cleanup_on_exit_within_two_seconds(lab: Lab, number: signal.Signals) -> None:
    host = lab.hosts[0]
    host.daemon.restart("--cleanup-on-exit")
    poll("the tables", lambda: set(OURS) <= set(tables(host)), timeout_s=10)
    began = time.monotonic()
    host.daemon.signal(number)
    assert host.daemon.wait_exit() == 0
    assert time.monotonic() - began < 2
    assert not set(OURS) & set(tables(host))
    host.daemon.start()
    host.daemon.wait_ready()


def test_what_is_switched_off_goes_at_the_next_start(lab: Lab) -> None:
    host = lab.hosts[1]
    host.daemon.stop()
    host.daemon.flags = tuple(flag for flag in host.daemon.flags if flag not in FLAGS)
    host.daemon.start()
    host.daemon.wait_ready()
    poll("the filter gone", lambda: OURS[0] not in tables(host), timeout_s=10)
    poll("the blackholes gone", lambda: not blackholes(host), timeout_s=10)
    assert "masquerade" not in host.run("nft", "list", "table", "ip", "flannel-ipv4")


def test_S15_without_nft_the_daemon_says_so(lab: Lab) -> None:
    host = lab.hosts[1]
    lab.etcd.configure(CONFIG)
    directory = host.daemon.directory / "bin"
    directory.mkdir()
    variants = (f"ip{six}tables-nft-{action}" for six in ("", "6") for action in ("save", "restore"))
    for program in ("ip", "iptables", *variants):
        found = shutil.which(program)
        assert found is not None
        (directory / program).symlink_to(found)
    host.daemon.stop()
    host.daemon.env["PATH"] = str(directory)
    host.daemon.start("--vtep-filter")
    poll("the reason", lambda: "--vtep-filter needs nft" in (host.daemon.notify.status or ""), timeout_s=10)
    assert host.daemon.pid is not None
