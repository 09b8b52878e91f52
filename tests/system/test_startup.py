from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from flanneld.ctl.lab.hosts import Daemon, Host
from flanneld.ctl.lab.lab import SWITCH_V4
from tests.support.drawn import CONFIG
from tests.support.expected import device, rules
from tests.support.site import Network, Site, cpu_s, lacks, peer_value, readyz, settle, stays

pytestmark = pytest.mark.system

PORT = 8081
WAITS = ("--healthz-ip=127.0.0.1", f"--healthz-port={PORT}")
NO_STORE = "http://192.0.2.254:1"


def status(host: Host) -> str:
    return host.daemon.notify.status


def loud(host: Host) -> str:
    """The log's warnings and errors."""
    return "\n".join(line for line in host.daemon.log().splitlines() if " WARNING " in line or " ERROR " in line)


def untouched(network: Network, host: Host) -> list[str]:
    """What a daemon that waits, or refuses to start, must not have made."""
    found = [f"device {name}" for name in host.namespace.links() if name.startswith("flannel")]
    return found + rules(host) + list(network.etcd.leases()) + list(host.subnet_env())


def tells_why_it_waits(host: Host, *words: str) -> None:
    settle("STATUS", lacks(lambda: host.daemon.notify.status, "not ready: ", *words), 10)
    settle("/readyz", lacks(lambda: readyz(host, PORT)[1], "not ready", *words), 5)
    settle("log", lacks(partial(loud, host), *words), 5)
    assert readyz(host, PORT)[0] == 503
    assert not host.daemon.notify.ready


# -- waiting ------------------------------------------------------------------------


def test_S01_default_route_is_waited_for(network: Network) -> None:
    host = network.host(*WAITS, iface=None, default_route=False)
    host.daemon.start()
    tells_why_it_waits(host, "there is no IPv4 default route", "eth0", f"{host.address}/24")
    assert untouched(network, host) == []
    host.namespace.ip(f"route add default via {SWITCH_V4}")
    host.daemon.wait_ready(5)
    assert readyz(host, PORT) == (200, "flanneld is ready")
    assert device(host)["vxlan link"] == "eth0"


def test_late_interface_is_waited_for(network: Network) -> None:
    host = network.host(*WAITS, iface="eth7")
    host.daemon.start()
    tells_why_it_waits(host, "eth7", "eth0 (up")
    network.lab.plug(host.namespace, f"{host.name}-eth7", "eth7")
    settle("STATUS", lacks(lambda: host.daemon.notify.status, "eth7 has no IPv4 address"), 5)
    host.namespace.ip("addr add 192.0.2.240/24 dev eth7")
    host.daemon.wait_ready(5)
    assert device(host)["vxlan local"] == "192.0.2.240"
    assert network.lease(host) == {} or network.lease(host)["PublicIP"] == "192.0.2.240"


TIMEOUTS: dict[str, tuple[str, tuple[str, ...], dict[str, Any], str]] = {
    "S02-no-such-interface": ("vxlan", (), {"iface": "nosuch0"}, "nosuch0"),
    "S02-unknown-backend": ("vxlam", (), {}, "vxlam"),
    "no-default-route": ("vxlan", (), {"iface": None, "default_route": False}, "default route"),
    "no-store": ("vxlan", (f"--etcd-endpoints={NO_STORE}",), {}, "192.0.2.254:1"),
}


def test_startup_timeout_ends_the_wait_with_its_reason(make_network: Callable[..., Network]) -> None:
    waiting = {}
    for name, (backend, flags, options, _) in TIMEOUTS.items():
        network = make_network(CONFIG | {"Backend": {"Type": backend}})
        waiting[name] = network, network.host("--startup-timeout=3", *flags, **options)
        waiting[name][1].daemon.start()
    for name, (network, host) in waiting.items():
        assert host.daemon.wait_exit(10) == 1, name
        errors = [line for line in host.daemon.log().splitlines() if " ERROR " in line]
        assert len(errors) == 1, name
        assert "--startup-timeout" in errors[0]
        assert TIMEOUTS[name][3] in errors[0]
        assert not host.daemon.notify.ready
        assert untouched(network, host) == []


def test_C09_missing_config_is_named_and_waited_for(make_network: Callable[..., Network]) -> None:
    network = make_network(None)
    key = f"{network.etcd.prefix}/config"
    network.etcd.put(f"{key}/", json.dumps(CONFIG))
    host = network.host(*WAITS)
    host.daemon.start()
    tells_why_it_waits(host, f"key {key} does not exist", "etcd API v3", f"'{key}/'")
    network.etcd.configure(CONFIG)
    host.daemon.wait_ready(3)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "C01-network-of-one": ({"Network": "10.5.0.0/32"}, "Network"),
    "C01-network-of-eight": ({"Network": "10.5.0.0/29"}, "Network"),
    "C01-length-31": ({"SubnetLen": 31}, "SubnetLen"),
    "C01-length-0": ({"SubnetLen": 0}, "SubnetLen"),
    "C01-length-text": ({"SubnetLen": "24"}, "SubnetLen"),
    "C01-length-fraction": ({"SubnetLen": 24.5}, "SubnetLen"),
    "C02-min-off-the-grid": ({"SubnetLen": 26, "SubnetMin": "10.5.0.2"}, "SubnetMin"),
    "C02-max-off-the-grid": ({"SubnetLen": 26, "SubnetMax": "10.5.254.254"}, "SubnetMax"),
    "C02-min-above-max": ({"SubnetMin": "10.5.9.0", "SubnetMax": "10.5.2.0"}, "SubnetM"),
    "C02-outside": ({"SubnetMin": "10.6.2.0"}, "SubnetMin"),
    "V15-too-small": ({"Backend": {"Type": "vxlan", "MTU": 100}}, "MTU"),
    "V15-text": ({"Backend": {"Type": "vxlan", "MTU": "1400"}}, "MTU"),
    "V19-port": ({"Backend": {"Type": "vxlan", "Port": 70000}}, "Port"),
    "S02-backend": ({"Backend": {"Type": "vxlam"}}, "vxlam"),
}


def test_unusable_configs_are_refused_one_after_the_other_before_anything_is_made(
    make_network: Callable[..., Network],
) -> None:
    network = make_network(None)
    host = network.host()
    host.daemon.start()
    for name, (change, word) in REFUSED.items():
        # In between another reason, so that the one expected cannot be that of the step before.
        network.etcd.put(f"{network.etcd.prefix}/config", "")
        settle("no config", lacks(partial(status, host), "invalid JSON"), 10)
        network.etcd.configure({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}} | change)
        settle(name, lacks(partial(status, host), "not ready: ", word), 5)
        assert "invalid JSON" not in status(host)
        assert untouched(network, host) == []
    network.etcd.configure(CONFIG)
    host.daemon.wait_ready(3)


def test_C03_broken_config_is_located_reported_once_and_its_correction_followed(
    make_network: Callable[..., Network],
) -> None:
    network = make_network(None)
    key = f"{network.etcd.prefix}/config"
    network.etcd.put(key, '{\n  "Network": 10.5.0.0/16\n}')
    host = network.host(*WAITS)
    host.daemon.start()
    tells_why_it_waits(host, key, "line 2", "column", "10.5.0.0/16")
    lines = len(host.daemon.log().splitlines())
    stays("silence", lambda: host.daemon.log().splitlines()[lines:], 3)
    network.etcd.put(key, r"{\"Network\": \"10.5.0.0/16\"}")
    settle("the new reason", lacks(lambda: host.daemon.notify.status, key, "line 1", r"{\"Network"), 3)
    pid = host.daemon.pid
    network.etcd.configure(CONFIG)
    host.daemon.wait_ready(3)
    assert host.daemon.pid == pid


def test_C13_misspelt_options_are_warned_of(make_network: Callable[..., Network]) -> None:
    network = make_network(
        {"Network": "10.5.0.0/16", "SubnetLenn": 24, "Backend": {"Type": "vxlan", "DirectRoutng": 1}}
    )
    host = network.host(ready=True)
    warnings = [line for line in host.daemon.log().splitlines() if " WARNING " in line]
    assert [w for w in warnings if "DirectRoutng" in w and "DirectRouting" in w]
    assert [w for w in warnings if "SubnetLenn" in w]


def test_C05_exhausted_pool_is_waited_for(make_network: Callable[..., Network]) -> None:
    network = make_network({"Network": "10.5.0.0/24", "Backend": {"Type": "vxlan"}})
    # A /24 without SubnetLen is cut into /26, the first of which stays unused.
    for n in (1, 2, 3):
        network.etcd.forge(f"10.5.0.{64 * n}-26", peer_value(n))
    host = network.host(*WAITS)
    host.daemon.start()
    tells_why_it_waits(host, "10.5.0.64", "10.5.0.192", "3")
    network.forget("10.5.0.128-26")
    host.daemon.wait_ready(5)
    assert network.subnet(host) == "10.5.0.128/26"
    network.settled(5)


def test_N01_file_that_cannot_be_written_is_told_and_waited_for(network: Network, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.write_text("")
    host = network.host(*WAITS, f"--subnet-file={directory}/subnet.env")
    host.daemon.start()
    tells_why_it_waits(host, f"{directory}/subnet.env", "Not a directory")
    directory.unlink()
    host.daemon.wait_ready(20)
    assert "FLANNEL_SUBNET=10.5." in (directory / "subnet.env").read_text()


@pytest.mark.parametrize(("bridge", "address"), [("docker0", "10.5.27.1/24"), ("cni0", "10.5.9.1/24")])
def test_N05_N06_bridge_of_an_earlier_lease_is_told_until_it_is_gone(
    make_network: Callable[..., Network], bridge: str, address: str
) -> None:
    network = make_network(CONFIG | {"SubnetMin": "10.5.19.0", "SubnetMax": "10.5.19.0"})
    host = network.host(*WAITS)
    host.namespace.ip(f"link add {bridge} type bridge", f"addr add {address} dev {bridge}", f"link set {bridge} up")
    host.daemon.start()
    host.daemon.wait_ready()
    words = bridge, address, "10.5.19.0/24"
    settle("STATUS", lacks(partial(status, host), *words), 5)
    settle("log", lacks(host.daemon.log, "WARNING", *words), 5)
    assert readyz(host, PORT)[0] == 200
    assert all(word in readyz(host, PORT)[1] for word in words)
    host.namespace.ip(f"link del {bridge}")
    settle("/readyz", lambda: bridge in readyz(host, PORT)[1], 10)
    settle("STATUS", lambda: bridge in status(host), 5)


# -- refusing -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (("--ifaec=eth1",), "ifaec"),
        (("eth1",), "eth1"),
        (("--ip-masq", "maybe"), "maybe"),
        (("--iface-regex=(",), "iface-regex"),
    ],
)
def test_S14_usage_errors_touch_nothing(network: Network, flags: tuple[str, ...], word: str) -> None:
    host = network.host()
    before = host.namespace.show("addr"), host.namespace.iptables_save()
    host.daemon.start(*flags)
    assert host.daemon.wait_exit(5) == 2
    assert word in host.daemon.log()
    assert (host.namespace.show("addr"), host.namespace.iptables_save()) == before
    assert untouched(network, host) == []


def test_S02_unreadable_tls_key_is_a_usage_error(network: Network, tmp_path: Path) -> None:
    missing = tmp_path / "missing.pem"
    host = network.host(f"--etcd-keyfile={missing}", f"--etcd-certfile={missing}")
    host.daemon.start()
    assert host.daemon.wait_exit(5) == 2
    assert str(missing) in host.daemon.log()
    assert untouched(network, host) == []


# -- choosing -----------------------------------------------------------------------

INTERFACES = {
    "S03-public-ip-alone": (
        ("addr flush dev eth0", "addr add 198.51.100.1/24 dev eth0", "addr add {own}/24 dev eth1"),
        ("--public-ip={own}",),
        ("eth1", "{own}"),
    ),
    "S04-regex-on-the-second-address": (
        ("addr add 10.64.3.9/24 dev eth0",),
        (r"--iface-regex=10\.64\..*",),
        ("eth0", "10.64.3.9"),
    ),
    "S05-regex-on-a-name": (
        ("addr add 198.51.100.9/24 dev eth1",),
        ("--iface-regex=^eth1$",),
        ("eth1", "198.51.100.9"),
    ),
    "S05-regex-on-an-address": (
        ("addr add 198.51.100.9/24 dev eth1",),
        (r"--iface-regex=198\.51",),
        ("eth1", "198.51.100.9"),
    ),
    "S13-link-local-first": (
        ("addr flush dev eth0", "addr add 169.254.9.9/16 dev eth0", "addr add {own}/24 dev eth0"),
        ("--iface=eth0",),
        ("eth0", "{own}"),
    ),
}


def test_external_interface_is_the_one_meant(make_network: Callable[..., Network]) -> None:
    hosts: dict[str, tuple[Network, Host]] = {}
    for name, (setup, flags, _) in INTERFACES.items():
        network = make_network()
        host = network.host(iface=None)
        network.lab.plug(host.namespace, f"{host.name}-eth1", "eth1")
        own = f"203.0.113.{host.name[1:]}"
        host.namespace.ip(*(line.format(own=own) for line in setup), "route replace default dev eth0")
        # The store is reached whatever the addresses are.
        host.namespace.ip(f"route replace {SWITCH_V4} dev eth0")
        network.lab.switch.ip(f"route replace {own} dev br0")
        for foreign in ("198.51.100.1", "198.51.100.9", "10.64.3.9", "169.254.9.9"):
            network.lab.switch.ip(f"route replace {foreign} dev br0")
        host.daemon.start(*(flag.format(own=own) for flag in flags))
        hosts[name] = network, host
    for name, (network, host) in hosts.items():
        host.daemon.wait_ready(15)
        own = f"203.0.113.{host.name[1:]}"
        name_wanted, address = INTERFACES[name][2]
        address = address.format(own=own)
        found = device(host)
        seen = found["vxlan link"], found["vxlan local"], network.lease(host)["PublicIP"]
        assert seen == (name_wanted, address, address), name


# -- ending -------------------------------------------------------------------------


@contextmanager
def silent_server(host: str, site: Site) -> Iterator[str]:
    """A port that takes connections and never answers."""
    listener = site.lab.switch.call(lambda: socket.create_server((host, 0), backlog=64))
    try:
        yield f"http://{host}:{listener.getsockname()[1]}"
    finally:
        listener.close()


def catches_sigterm(daemon: Daemon) -> bool:
    """Whether the process, as of now, has a handler for SIGTERM: the interpreter's own first steps cannot have one."""
    status = Path(f"/proc/{daemon.pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


FIXED_S = (0.0, 0.03, 0.1, 0.2, 0.35, 0.6, 0.9, 1.5)
STAGES = ("store-absent", "store-silent", "config-missing", "no-interface", "pool-exhausted", "nothing-amiss")


@pytest.mark.parametrize("stage", STAGES)
def test_SIGTERM_ends_the_start_at_any_stage(make_network: Callable[..., Network], site: Site, stage: str) -> None:
    config = None if stage == "config-missing" else CONFIG
    if stage == "pool-exhausted":
        config = CONFIG | {"SubnetMin": "10.5.1.0", "SubnetMax": "10.5.1.0"}
    network = make_network(config)
    if stage == "pool-exhausted":
        network.peer(1)
    delays = [*FIXED_S, *(random.uniform(0, 1.5) for _ in range(2))]
    with silent_server(SWITCH_V4, site) as silent:
        flags = {"store-absent": (f"--etcd-endpoints={NO_STORE}",), "store-silent": (f"--etcd-endpoints={silent}",)}
        hosts = [
            network.host(*flags.get(stage, ()), iface="nosuch0" if stage == "no-interface" else "eth0")
            for _ in range(2)
        ]
        for pair in zip(delays[::2], delays[1::2], strict=True):
            for host in hosts:
                host.daemon.start()
            began = time.monotonic()
            for host, delay_s in sorted(zip(hosts, pair, strict=True), key=lambda item: item[1]):
                time.sleep(max(0.0, began + delay_s - time.monotonic()))
                caught = catches_sigterm(host.daemon)
                host.daemon.signal(signal.SIGTERM)
                at = time.monotonic()
                code = host.daemon.wait_exit(2)
                took = time.monotonic() - at
                allowed = {0} if caught else {0, -signal.SIGTERM}
                assert code in allowed, f"SIGTERM after {delay_s:.2f} s: exit code {code}"
                assert took < 2, f"SIGTERM after {delay_s:.2f} s: {took:.2f} s"


def test_waiting_costs_next_to_nothing(network: Network) -> None:
    hosts = [network.host(f"--etcd-endpoints={NO_STORE}"), network.host(iface="nosuch0")]
    for host in hosts:
        host.daemon.start()
        settle("STATUS", lacks(partial(status, host), "not ready"), 10)
    time.sleep(0.5)
    before = [cpu_s(h.daemon) for h in hosts]
    time.sleep(2)
    used = [cpu_s(h.daemon) - b for h, b in zip(hosts, before, strict=True)]
    assert max(used) < 0.2, used
