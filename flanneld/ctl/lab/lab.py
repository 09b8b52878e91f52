"""The laboratory: a switch, an etcd and hosts with daemons and containers, all in network namespaces.

Hosts are 192.0.2.N (RFC 5737) and 2001:db8:1::N (RFC 3849); the switch holds
.254 and ::fe, where etcd listens and default routes point. Nothing outside
the namespaces is touched.
"""

from __future__ import annotations

import itertools
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from ipaddress import IPv4Interface, IPv6Interface
from pathlib import Path
from typing import Any, Literal, TypeAlias

from flanneld.ctl.lab import traces
from flanneld.ctl.lab.errors import LabError
from flanneld.ctl.lab.etcd import Etcd
from flanneld.ctl.lab.hosts import OWN_COMMAND, Daemon, Host, Pod
from flanneld.ctl.lab.netns import Namespace

FamilyChoice: TypeAlias = Literal["v4", "v6", "dual"]
Say: TypeAlias = Callable[[str], None]

SWITCH_V4, SWITCH_V6 = "192.0.2.254", "2001:db8:1::fe"
MAX_HOSTS = 200
_serial = itertools.count(1)


def network_config(backend: str = "vxlan", family: FamilyChoice = "v4") -> dict[str, Any]:
    """Return a network config; ``backend`` goes to ``Backend.Type`` as it is, with what it cannot do without."""
    config: dict[str, Any] = {}
    if family != "v6":
        config["Network"] = "10.5.0.0/16"
    else:
        config["EnableIPv4"] = False
    if family != "v4":
        config |= {"EnableIPv6": True, "IPv6Network": "fd05::/48"}
    psk = {"PSK": secrets.token_hex(64)} if backend.lower() == "ipsec" else {}
    return config | {"Backend": {"Type": backend, **psk}}


def _quiet(text: str) -> None:
    del text


class Lab:
    """Builds hosts on entering, removes everything on leaving, whatever happened in between.

    ``config`` replaces the network config made from ``backend`` and ``family``.
    ``command`` is the daemon, ``flags`` go to every one, ``host_flags`` to that
    of the host numbered from 1. With ``start=False`` hosts are built and etcd
    is configured, but no daemon runs and no container exists.
    ``say`` hears of each step. Raises LabError.
    """

    def __init__(
        self,
        hosts: int = 3,
        *,
        backend: str = "vxlan",
        family: FamilyChoice = "v4",
        config: Mapping[str, Any] | None = None,
        command: Sequence[str] = OWN_COMMAND,
        flags: Sequence[str] = (),
        host_flags: Mapping[int, Sequence[str]] | None = None,
        start: bool = True,
        ready_timeout_s: float = 60.0,
        say: Say = _quiet,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise LabError(f"a lab has 1 to {MAX_HOSTS} hosts, not {hosts}")
        serial = next(_serial)
        self.prefix = f"{traces.STEM}{os.getpid()}" + (f".{serial}" if serial > 1 else "")
        self.family, self.config = family, dict(config) if config is not None else network_config(backend, family)
        self.command, self.flags, self.host_flags = tuple(command), tuple(flags), dict(host_flags or {})
        self.ready_timeout_s, self.say = ready_timeout_s, say
        self.hosts: list[Host] = []
        self._wanted, self._start, self._keep = hosts, start, False
        self._number = itertools.count(1)
        self._ending = ExitStack()

    # -- life -------------------------------------------------------------

    def __enter__(self) -> Lab:
        if os.geteuid() != 0:
            raise LabError("needs root: network namespaces are made")
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            self.close()

    def keep(self) -> None:
        """Leave everything up when the context ends; ``flannelctl lab --clean`` removes it."""
        self._keep = True
        traces.mark_kept(self.directory)

    def close(self) -> None:
        """End all processes and remove namespaces and files, all of them even if one resists."""
        self._ending.close()

    def _build(self) -> None:
        for gone in traces.sweep():
            self.say(f"removed what {gone} had left behind")
        # Last, by name and not by what was noted: an interrupt may have come between making and noting.
        self._ending.callback(traces.remove, self.prefix)
        self.directory = traces.claim(self.prefix)
        self.say("switch and etcd")
        self.switch = self.namespace("sw")
        self.switch.ip(
            # A fixed address, or the bridge would take over that of its lowest port, and change it with every host.
            "link add br0 address 02:00:00:00:00:fe type bridge",
            "link set br0 up",
            f"addr add {SWITCH_V4}/24 dev br0",
            f"addr add {SWITCH_V6}/64 dev br0 nodad",
        )
        self._bypass_bridge_filter()
        address = SWITCH_V4 if self.family != "v6" else f"[{SWITCH_V6}]"
        self.etcd = Etcd(self.switch, address, self.directory / "etcd")
        self._ending.callback(self.etcd.kill)
        self.etcd.start()
        self.etcd.configure(self.config)
        for _ in range(self._wanted):
            self.say(f"host {self.add_host().name}")
        if self._start:
            self.start()

    def start(self) -> None:
        """Start every daemon that does not run, wait until all are ready, and give each host a container."""
        for host in self.hosts:
            if host.daemon.pid is None:
                host.daemon.start()
        for host in self.hosts:
            self.say(f"waiting for flanneld of {host.name}")
            host.daemon.wait_ready(self.ready_timeout_s)
        for host in self.hosts:
            if not host.pods:
                self.say(f"container of {host.name}")
                self.add_pod(host)

    # -- parts ------------------------------------------------------------

    def namespace(self, label: str) -> Namespace:
        """Return a new namespace of this lab; it goes with the lab."""
        namespace = Namespace(f"{self.prefix}-{label}")
        self._ending.callback(namespace.delete)
        return namespace

    def add_host(
        self,
        *,
        default_route: bool = True,
        mtu_bytes: int = 1500,
        iface: str | None = "eth0",
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> Host:
        """Return a further host, plugged in; its daemon is not started.

        ``iface`` None leaves the choice of interface to the daemon.
        """
        number = next(self._number)
        name = f"h{number}"
        namespace = self.namespace(name)
        v4 = IPv4Interface(f"192.0.2.{number}/24") if self.family != "v6" else None
        v6 = IPv6Interface(f"2001:db8:1::{number:x}/64") if self.family != "v4" else None
        self.plug(namespace, f"{name}-eth0", "eth0", mtu_bytes)
        namespace.ip(
            *([f"addr add {v4} dev eth0"] if v4 else []),
            *([f"addr add {v6} dev eth0 nodad"] if v6 else []),
            *([f"route add default via {SWITCH_V4}"] if v4 and default_route else []),
            *([f"route add default via {SWITCH_V6}"] if v6 and default_route else []),
        )
        own = [f"--etcd-endpoints={self.etcd.url}", *([f"--iface={iface}"] if iface else [])]
        daemon = Daemon(
            namespace,
            self.directory / name,
            command=command or self.command,
            flags=[*own, *self.flags, *self.host_flags.get(number, ()), *flags],
            # Hosts share a file system, and each is to have a key of its own.
            env={"WIREGUARD_KEY_FILE": str(self.directory / name / "wgkey"), **(env or {})},
            own={Path("/run"): self.directory / name / "run"} if self._has_helpers() else {},
        )
        self._ending.callback(daemon.close)
        host = Host(name, namespace, daemon, v4, v6)
        self.hosts.append(host)
        return host

    def add_pod(self, host: Host) -> Pod:
        """Return a further container on a host that has a subnet.env."""
        return host.add_pod(self.namespace(f"{host.name}p{len(host.pods)}"))

    def plug(self, namespace: Namespace, port: str, device: str, mtu_bytes: int = 1500) -> None:
        """Connect a new ``device`` of a namespace with the switch; ``port`` is the name of its other end."""
        self.switch.ip(
            f"link add {port} mtu {mtu_bytes} type veth peer name {device} mtu {mtu_bytes} netns {namespace.name}",
            f"link set {port} master br0 up",
        )
        namespace.ip(f"link set {device} up")

    def cut(self, host: Host, *, connected: bool = False) -> None:
        """Take the host's cable out of the switch: the host still sees its link up. ``connected`` plugs it in again."""
        port = f"{host.name}-eth0"
        self.switch.ip(f"link set {port} {'master br0' if connected else 'nomaster'}")

    def pairs(self) -> Iterator[tuple[Host, Host]]:
        """Return every ordered pair of hosts that have containers."""
        return itertools.permutations([h for h in self.hosts if h.pods], 2)

    def _has_helpers(self) -> bool:
        """Whether daemons may start programs whose sockets and locks are found by a path: wireguard-go, charon."""
        return str((self.config.get("Backend") or {}).get("Type", "")).lower() in {"wireguard", "ipsec"}

    def _bypass_bridge_filter(self) -> None:
        # With br_netfilter loaded, the switch would pass frames through its own IP rules.
        for key in ("bridge-nf-call-iptables", "bridge-nf-call-ip6tables", "bridge-nf-call-arptables"):
            try:
                self.switch.sysctl(f"net/bridge/{key}", "0")
            except FileNotFoundError:
                return
