from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from flanneld.ctl.lab.etcd import Etcd
from flanneld.ctl.lab.hosts import Host
from tests.support.expected import device
from tests.support.site import Network, Site, cpu_s, lacks, lossless, peer_value, settle

pytestmark = pytest.mark.system


def lines(host: Host) -> int:
    return len(host.daemon.log().splitlines())


def log_from(host: Host, first: int) -> list[str]:
    return host.daemon.log().splitlines()[first:]


def status(host: Host) -> str:
    return host.daemon.notify.status


@contextlib.contextmanager
def compacted_while_cut_off(network: Network, host: Host) -> Iterator[None]:
    """Cut, let history pass and be forgotten, heal; what the block does happens in between."""
    network.cut_from_etcd(host)
    for n in range(100):
        network.etcd.put("/elsewhere/x", str(n))
    yield
    network.etcd.compact()
    network.heal()


# -- the connection ----------------------------------------------------------------------


def test_E01_E03_two_compactions_while_cut_off(network: Network) -> None:
    a, b = network.cluster(2)
    network.peer(202)
    network.settled()
    own = network.etcd.get(network.key(a)), network.etcd.lease_id(network.key(a))
    started = lines(a)
    with lossless((a, b), (b, a)):
        with compacted_while_cut_off(network, a):
            network.peer(207)
            network.forget("10.5.202.0-24")
        network.settled(10, hosts=[a])
        episode = log_from(a, started)
        assert len(episode) <= 10, episode
        with compacted_while_cut_off(network, a):
            network.peer(208)
        network.settled(10, hosts=[a])
        # The watch goes on from the new revision.
        network.peer(209)
        network.settled(3)
    assert (network.etcd.get(network.key(a)), network.etcd.lease_id(network.key(a))) == own
    removed = [line for line in log_from(a, started) if network.subnet(a).partition("/")[0] in line]
    assert removed == []


def test_E04_etcd_down_for_a_minute(network: Network, site: Site) -> None:
    a, b = network.cluster(2)
    cpu_before, started = [cpu_s(h.daemon) for h in (a, b)], [lines(h) for h in (a, b)]
    with lossless((a, b), (b, a)):
        site.lab.etcd.stop()
        try:
            settle("STATUS", lacks(lambda: a.daemon.notify.status, "subnet ", "192.0.2.254:2379"), 10)
            time.sleep(60)
            cpu = [cpu_s(h.daemon) - before for h, before in zip((a, b), cpu_before, strict=True)]
            logged = [log_from(h, first) for h, first in zip((a, b), started, strict=True)]
        finally:
            site.lab.etcd.start()
        network.peer(205)
        network.settled(10)
    assert max(cpu) < 2, cpu
    for said in logged:
        assert 1 <= len(said) <= 2, said
        assert "192.0.2.254:2379" in said[0]
        assert "WARNING" in said[0]
    settle("log of the return", lacks(a.daemon.log, "answers again"), 5)
    settle("STATUS", lambda: "192.0.2.254:2379" in a.daemon.notify.status, 5)


def test_frozen_etcd_disturbs_nobody(network: Network, site: Site) -> None:
    a, b = network.cluster(2)
    pids = a.daemon.pid, b.daemon.pid
    with lossless((a, b), (b, a)):
        site.lab.etcd.freeze()
        try:
            a.namespace.ip("route add 10.5.99.0/24 dev flannel.1")
            settle("stray route is gone", lambda: "10.5.99.0/24" in a.run("ip", "route"), 1)
            time.sleep(1.5)
        finally:
            site.lab.etcd.thaw()
        network.settled()
    assert (a.daemon.pid, b.daemon.pid) == pids


FAILURES = {
    "E18-closed-port": ("http://192.0.2.254:1", ("192.0.2.254:1", "connection refused")),
    "E18-nobody-there": ("http://192.0.2.253:2379", ("192.0.2.253:2379",)),
    "E18-unknown-name": ("http://nosuch.invalid:2379", ("nosuch.invalid", "cannot be resolved")),
    "E12-no-tls": ("https://192.0.2.254:2379", ("192.0.2.254:2379", "TLS")),
}


def test_E16_silent_connection_is_noticed_and_E18_each_failure_has_its_own_words(network: Network) -> None:
    a, b = network.cluster(2)
    with lossless((a, b), (b, a)):
        network.freeze_connections(a)
        frozen_at = time.monotonic()
        network.peer(204)
        # What the noticing takes is used for the daemons that never get through.
        failures_have_their_own_words(network)
        network.settled(30 - (time.monotonic() - frozen_at), hosts=[a, b])


def failures_have_their_own_words(network: Network) -> None:
    hosts = {name: network.host(f"--etcd-endpoints={url}") for name, (url, _) in FAILURES.items()}
    for host in hosts.values():
        host.daemon.start()
    told = {}
    for name, host in hosts.items():
        words = FAILURES[name][1]
        settle(name, lacks(partial(status, host), "not ready", *words), 15)
        settle(name, lacks(host.daemon.log, *words), 5)
        told[name] = host.daemon.notify.status
    assert len(set(told.values())) == len(FAILURES)


def test_E18_store_out_of_space_is_waited_out(network: Network) -> None:
    (a,) = network.cluster(1)
    key = network.key(a)
    before = network.etcd.get(key)
    alarm = {"memberID": 0, "alarm": "NOSPACE"}
    network.etcd.call("maintenance/alarm", alarm | {"action": "ACTIVATE"})
    try:
        network.etcd.delete(key)
        settle("the reason", lacks(a.daemon.log, "WARNING", "space"), 5)
        assert a.daemon.pid is not None
        assert device(a)["up"]
    finally:
        network.etcd.call("maintenance/alarm", alarm | {"action": "DEACTIVATE"})
    settle("lease", lambda: "" if network.etcd.get(key) == before else network.etcd.leases(), 15)


# -- the own lease -----------------------------------------------------------------------


def test_E08_own_key_deleted_by_hand(network: Network) -> None:
    a, b = network.cluster(2)
    key = network.key(a)
    value, granted = network.etcd.get(key), 86400
    with lossless((a, b), (b, a)):
        network.etcd.delete(key)
        settle("key", lambda: "" if network.etcd.get(key) == value else "missing", 5)
        assert granted - 60 <= network.etcd.ttl_s(key) <= granted
        # Deleted, and put back by somebody else, within a second.
        network.etcd.delete(key)
        network.etcd.put(key, value or "", ttl_s=granted)
        settle("key", lambda: "" if network.etcd.get(key) == value else "missing", 5)
        network.settled()
    settle("log", lacks(a.daemon.log, "WARNING", key, "was deleted or has expired"), 2)
    assert len(network.etcd.leases()) == 2
    assert network.etcd.lease_id(key) != 0


def test_E08_daemon_frozen_until_its_lease_expired(network: Network) -> None:
    a, b = network.cluster(2)
    key = network.key(a)
    value = network.etcd.get(key)
    # The peer drops what is not leased any more: only this direction can be without loss.
    with lossless((a, b)):
        a.daemon.signal(signal.SIGSTOP)
        network.etcd.revoke(key)
        time.sleep(0.5)
        assert network.etcd.get(key) is None
        a.daemon.signal(signal.SIGCONT)
        settle("key", lambda: "" if network.etcd.get(key) == value else "missing", 5)


def test_E08_subnet_taken_by_another_meanwhile(network: Network) -> None:
    a, b = network.host(), network.host()
    network.start(a, b)
    key, old = network.key(a), network.subnet(a)
    a.daemon.signal(signal.SIGSTOP)
    network.etcd.revoke(key)
    network.etcd.forge(old.replace("/", "-"), peer_value(9))
    theirs = network.etcd.get(key)
    a.daemon.signal(signal.SIGCONT)
    settle("another subnet", lambda: "" if network.subnet(a) not in ("", old) else old, 5)
    assert network.etcd.get(key) == theirs
    assert network.lease(a)["PublicIP"] == a.address
    assert network.keys_of(a) == [network.subnet(a).replace("/", "-")]
    errors = [line for line in a.daemon.log().splitlines() if " ERROR " in line]
    assert [e for e in errors if a.address in e and "198.51.100.9" in e]
    network.settled()


def test_on_lease_lost_exit_ends_with_1(network: Network) -> None:
    a = network.host("--on-lease-lost=exit", ready=True)
    key = network.key(a)
    network.etcd.delete(key)
    assert a.daemon.wait_exit(5) == 1
    assert network.etcd.get(key) is None
    assert [line for line in a.daemon.log().splitlines() if " ERROR " in line and key in line]


# -- other nodes' leases -----------------------------------------------------------------


def test_hostile_and_malformed_leases_beside_good_ones(network: Network) -> None:
    a, b = network.cluster(2)
    own = network.subnet(a).rsplit(".", 1)[0]
    good = network.peer(201)
    network.settled()
    multicast_mac = {"VNI": 1, "VtepMAC": "33:33:00:00:00:01"}
    hostile = {
        "10.99.1.0-24": peer_value(1),
        f"{own}.128-25": peer_value(2),
        "192.0.2.0-24": peer_value(3),
        "10.5.0.0-16": peer_value(4),
        "0.0.0.0-1": peer_value(5),
        "10.5.211.0-24": peer_value(6, PublicIP="224.0.0.5"),
        "10.5.212.0-24": peer_value(7, BackendData=multicast_mac),
        "10.5.213.0-24": peer_value(8, PublicIP="10.5.213.7"),
        "10.5.214.0-24": peer_value(9, PublicIP="127.0.0.1"),
        "10.5.215.0-24": peer_value(10, PublicIP="0.0.0.0"),
        "10.5.216.0-24": peer_value(11, BackendData={"VNI": 1}),
        "10.5.217.0-24": peer_value(12, BackendData=None),
        "10.5.201.0-25": peer_value(13),
    }
    unreadable = {
        "10.5.221.0-24": "{",
        "10.5.222.0-24": "[]",
        "10.5.223.0-24": '{"PublicIP":"nonsense","BackendType":"vxlan"}',
        "not-a-subnet": "{}",
        "10.5.224.0-33": '{"PublicIP":"198.51.100.14"}',
        "10.5.225.0": '{"PublicIP":"198.51.100.15"}',
    }
    odd = [*hostile, *unreadable]
    routes = a.run("ip", "route")
    with lossless((a, b), (b, a)):
        for key, value in hostile.items():
            network.etcd.forge(key, value)
        for key, text in unreadable.items():
            network.raw(key, text)
        late = network.peer(203)
        for host in (a, b):
            settle("good peers and no other", partial(network.difference, host, odd), 5)
        for key in odd:
            settle(f"warning of {key}", partial(unmentioned, a, key), 5)
        now = set(a.run("ip", "route").splitlines())
        assert {r for r in now - set(routes.splitlines()) if "10.5.203.0/24" not in r} == set()
        for key in odd:
            network.forget(key)
        network.forget(late)
        network.settled(5)
    assert good in network.etcd.leases()


def unmentioned(host: Host, key: str) -> str:
    warnings = [line for line in host.daemon.log().splitlines() if " WARNING " in line and f"/{key}" in line]
    return "" if warnings else "none"


def test_second_cluster_with_authentication(site: Site, make_network: Callable[..., Network]) -> None:
    network = make_network()
    namespace = site.lab.namespace("auth")
    site.lab.plug(namespace, "auth-eth0", "eth0")
    namespace.ip("addr add 192.0.2.251/24 dev eth0")
    etcd = Etcd(namespace, "192.0.2.251", site.lab.directory / "auth")
    etcd.start()
    try:
        etcd.configure({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
        ctl = ("etcdctl", "--endpoints=http://127.0.0.1:2379")
        for words in (
            "user add root:r",
            "user grant-role root root",
            "user add fl:secret-word",
            "role add fl",
            "role grant-permission --prefix=true fl readwrite /coreos.com/network",
            "user grant-role fl fl",
            "auth enable",
        ):
            namespace.run(*ctl, *words.split())
        store = (f"--etcd-endpoints={etcd.url}", "--etcd-prefix=/coreos.com/network")
        hosts = {
            "right": network.host(*store, "--etcd-username=fl", "--etcd-password=secret-word"),
            "wrong": network.host(*store, "--etcd-username=fl", "--etcd-password=guessed-word"),
            "absent": network.host(*store),
            "elsewhere": network.host(
                store[0], "--etcd-prefix=/other", "--etcd-username=fl", "--etcd-password=secret-word"
            ),
        }
        for host in hosts.values():
            host.daemon.start()
        hosts["right"].daemon.wait_ready()
        for name, word in (("wrong", "password"), ("absent", "user"), ("elsewhere", "permission")):
            host = hosts[name]
            settle(name, lacks(partial(status, host), "not ready", word), 10)
        texts = "".join(h.daemon.log(all_runs=True) + h.daemon.notify.status for h in hosts.values())
        assert "secret-word" not in texts
        assert "guessed-word" not in texts
    finally:
        etcd.stop()
