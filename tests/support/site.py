"""A switch and an etcd shared by the tests of a module; each test has networks of its own there.

A network is an etcd prefix with its config, and the hosts that use it. Hosts
of different networks share nothing but the switch.
"""

from __future__ import annotations

import contextlib
import copy
import http.client
import itertools
import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.etcd import Etcd
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Daemon, Host
from flanneld.ctl.lab.lab import SWITCH_V4
from tests.support.drawn import CONFIG
from tests.support.expected import Facts, device, held, wanted

ETCD_PORT = "2379"


def settle(what: str, difference: Callable[[], object], within_s: float, every_s: float = 0.03) -> float:
    """Wait until ``difference`` is empty and return how long that took; otherwise fail with it."""
    began = time.monotonic()
    while found := difference():
        took = time.monotonic() - began
        assert took < within_s, f"{what}: not within {within_s:g} s: {found}"
        time.sleep(every_s)
    return time.monotonic() - began


def stays(what: str, difference: Callable[[], object], for_s: float, every_s: float = 0.1) -> None:
    """Fail if ``difference`` is ever non-empty within ``for_s``."""
    end = time.monotonic() + for_s
    while time.monotonic() < end:
        assert not (found := difference()), f"{what}: {found}"
        time.sleep(every_s)


def lacks(text: Callable[[], str], *words: str) -> Callable[[], list[str]]:
    """Return a difference: the words that are not in the text yet, with the text."""

    def difference() -> list[str]:
        found = text()
        gone = [word for word in words if word not in found]
        return [*gone, f"in: {found[-400:]}"] if gone else []

    return difference


class Network:
    """A flannel network: ``etcd`` sees its prefix only, as far as keys are not given in full."""

    def __init__(self, lab: Lab, prefix: str, config: Mapping[str, Any] | None) -> None:
        self.lab, self.hosts = lab, list[Host]()
        self.etcd: Etcd = copy.copy(lab.etcd)
        self.etcd.prefix = prefix
        self._cuts: list[str] = []
        if config is not None:
            self.etcd.configure(config)

    # -- hosts ------------------------------------------------------------------

    def host(self, *flags: str, ready: bool = False, **options: Any) -> Host:
        """Return a further host; its daemon runs if ``ready`` is asked for. ``options`` as of Lab.add_host."""
        host = self.lab.add_host(flags=(f"--etcd-prefix={self.etcd.prefix}", *flags), **options)
        self.hosts.append(host)
        if ready:
            self.start(host)
        return host

    def cluster(self, count: int, *flags: str) -> list[Host]:
        """Return hosts that know each other and have a container each."""
        hosts = [self.host(*flags) for _ in range(count)]
        self.start(*hosts)
        for host in hosts:
            self.lab.add_pod(host)
        self.settled()
        return hosts

    def start(self, *hosts: Host) -> None:
        """Start the daemons together and wait until all are ready."""
        for host in hosts:
            host.daemon.start()
        for host in hosts:
            host.daemon.wait_ready()

    def settled(self, within_s: float = 10.0, hosts: Iterable[Host] | None = None) -> float:
        """Wait until each running host's kernel holds exactly what the leases ask for."""
        chosen = [h for h in (self.hosts if hosts is None else hosts) if h.daemon.pid is not None]
        return settle("entries", lambda: [d for h in chosen for d in self.difference(h)], within_s)

    def difference(self, host: Host, without: Collection[str] = ()) -> list[str]:
        """Return what a vxlan host has too much (+) and lacks (-), leases ``without`` left aside."""
        return compare(wanted(self.leases(without), self.subnet(host)), held(host))

    def subnet(self, host: Host) -> str:
        """Return the subnet that subnet.env names, empty if there is none."""
        text = host.subnet_env().get("FLANNEL_SUBNET", "")
        return str(IPv4Network(text, strict=False)) if text else ""

    # -- leases -----------------------------------------------------------------

    def leases(self, without: Collection[str] = ()) -> dict[str, dict[str, Any]]:
        """Return the lease values by the last part of their key, but those of keys ``without``, unread."""
        found = {key.rsplit("/", 1)[1]: text for key, text in self.etcd.list(f"{self.etcd.prefix}/subnets/").items()}
        return {key: json.loads(text) for key, text in found.items() if key not in without}

    def lease(self, host: Host) -> dict[str, Any]:
        """Return the value of the lease that the host's subnet.env names, empty if there is none."""
        return self.etcd.leases().get(self.subnet(host).replace("/", "-"), {})

    def key(self, host: Host) -> str:
        """Return the full key of the host's lease."""
        return f"{self.etcd.prefix}/subnets/{self.subnet(host).replace('/', '-')}"

    def keys_of(self, host: Host) -> list[str]:
        """Return the lease keys (last part) that announce the host's address."""
        return [key for key, value in self.etcd.leases().items() if value["PublicIP"] == host.address]

    def peer(self, number: int, ttl_s: int = 86400) -> str:
        """Write the lease of a host that does not exist, with subnet 10.5.N.0/24; return its key's last part."""
        subnet = f"10.5.{number}.0-24"
        self.etcd.forge(subnet, peer_value(number), ttl_s=ttl_s)
        return subnet

    def forget(self, subnet: str) -> None:
        """Delete the lease of a subnet, given as its key's last part."""
        assert self.etcd.delete(f"{self.etcd.prefix}/subnets/{subnet}")

    def raw(self, key: str, value: str) -> None:
        """Write anything below the leases' prefix."""
        self.etcd.put(f"{self.etcd.prefix}/subnets/{key}", value)

    # -- disturbances -----------------------------------------------------------

    def cut_from_etcd(self, host: Host) -> None:
        """End the host's connections to etcd and let no packet of new ones through."""
        self._block(f"INPUT -s {host.address} -p tcp --dport {ETCD_PORT} -j DROP")
        host.run("ss", "-K", "dst", SWITCH_V4, "dport", "=", ETCD_PORT)
        self.lab.switch.run("ss", "-K", "dst", host.address, "sport", "=", ETCD_PORT)

    def freeze_connections(self, host: Host) -> None:
        """Swallow, both ways, what is sent on the host's present connections to etcd; new ones work."""
        found = host.run("ss", "-Htn", "state", "established", "dst", SWITCH_V4, "dport", "=", ETCD_PORT)
        ports = [line.split()[2].rsplit(":", 1)[1] for line in found.splitlines()]
        assert ports
        for port in ports:
            self._block(f"INPUT -s {host.address} -p tcp --dport {ETCD_PORT} --sport {port} -j DROP")
            self._block(f"OUTPUT -d {host.address} -p tcp --sport {ETCD_PORT} --dport {port} -j DROP")

    def heal(self) -> None:
        """Undo the former two."""
        while self._cuts:
            self.lab.switch.run("iptables", "-w", "-D", *self._cuts.pop().split())

    def _block(self, rule: str) -> None:
        self.lab.switch.run("iptables", "-w", "-A", *rule.split())
        self._cuts.append(rule)

    # -- end --------------------------------------------------------------------

    def report(self) -> str:
        """Return logs and kernel state of the hosts, for whoever looks at a failure."""
        parts = []
        for host in self.hosts:
            state = [host.run(*c.split(), check=False) for c in ("ip -d addr", "ip route", "ip neigh", "bridge fdb")]
            parts.append("\n".join([f"==== {host.name}", host.daemon.log(all_runs=True), *state]))
        return "\n".join(parts)

    def close(self) -> None:
        """End the daemons and remove the hosts."""
        self.heal()
        for host in self.hosts:
            if host.daemon.pid is not None:
                host.daemon.kill()
            for pod in host.pods:
                pod.namespace.delete()
            host.namespace.delete()
            self.lab.hosts.remove(host)


class Site:
    """The lab of a module."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self._serial = itertools.count(1)

    def network(self, config: Mapping[str, Any] | None = CONFIG) -> Network:
        """Return a new network; with ``config`` None the key is missing."""
        return Network(self.lab, f"/net{next(self._serial)}.test/network", config)

    def wipe_etcd(self, away_s: float = 0.0) -> None:
        """Let etcd lose everything and start anew, after ``away_s`` seconds."""
        self.lab.etcd.kill()
        shutil.rmtree(self.lab.etcd.directory / "data")
        time.sleep(away_s)
        self.lab.etcd.start()


def peer_value(number: int, **changes: Any) -> dict[str, Any]:
    """Return the lease value of a vxlan host at 198.51.100.N."""
    data = {"VNI": 1, "VtepMAC": f"02:00:00:00:00:{number:02x}"}
    value = {"PublicIP": f"198.51.100.{number}", "PublicIPv6": None, "BackendType": "vxlan", "BackendData": data}
    return value | changes


def compare(want: Facts, have: Facts) -> list[str]:
    """Return the differences, one line each."""
    return [f"-{fact}" for fact in sorted(want - have)] + [f"+{fact}" for fact in sorted(have - want)]


def flow(source: Host, target: Host) -> Flow:
    """Return 200 datagrams a second from container to container, once they arrive."""
    flow = Flow(source.pod.namespace, target.pod.namespace, target.pod.address(), rate_per_s=200)
    settle("datagrams", lambda: "none arrives" if not flow.received_at else "", 5)
    return flow


@contextlib.contextmanager
def lossless(*pairs: tuple[Host, Host]) -> Iterator[None]:
    """Send between containers for the length of the block, and fail if a single datagram is lost."""
    flows = [flow(source, target) for source, target in pairs]
    marks = [f.sent for f in flows]
    try:
        yield
    finally:
        for f in flows:
            f.stop()
    for (source, target), f, mark in zip(pairs, flows, marks, strict=True):
        lost = f.lost(mark)
        assert lost == 0, f"{source} to {target}: {lost} of {f.sent - mark} lost, {f.outage_s(mark):.2f} s in a row"


def cpu_s(daemon: Daemon) -> float:
    """Return the processor seconds that the running process has used."""
    fields = Path(f"/proc/{daemon.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def readyz(host: Host, port: int) -> tuple[int, str]:
    """Return status and text of /readyz?verbose, (0, "") while nothing listens."""
    return answer(host, port, "/readyz?verbose")


def answer(host: Host, port: int, path: str) -> tuple[int, str]:
    """Return status and text of what the daemon answers, (0, "") while nothing listens."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.sock = host.namespace.connect("127.0.0.1", port)
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except ConnectionRefusedError:
        return 0, ""
    finally:
        connection.close()


def differs(read: Callable[[Host], Collection[str]], host: Host, *wanted: str) -> set[str]:
    """Return what is not as wanted."""
    return set(read(host)) ^ set(wanted)


def mtu_differs(host: Host, mtu: int) -> set[int]:
    """Return the MTU that device and subnet.env do not agree on."""
    return {int(device(host).get("mtu", 0)), int(host.subnet_env().get("FLANNEL_MTU", "0"))} ^ {mtu}
