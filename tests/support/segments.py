"""Three hosts on two segments that a router joins, and what a backend is to bring about in their kernels.

``wanted`` speaks from the specification, ``held`` reads ip(8) and bridge(8);
both name every address, entry and device that flannel keeps, in one vocabulary.
"""

from __future__ import annotations

import itertools
import signal
import socket
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Interface, IPv6Interface, ip_interface
from typing import Any

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host, Pod
from flanneld.ctl.lab.lab import SWITCH_V4, SWITCH_V6, FamilyChoice, network_config
from flanneld.ctl.lab.tools import run
from tests.support.drawn import drawn
from tests.support.expected import Facts

VXLAN, DIRECT, HOST_GW = {"Type": "vxlan"}, {"Type": "vxlan", "DirectRouting": True}, {"Type": "host-gw"}
IPIP, DIRECT_IPIP = {"Type": "ipip"}, {"Type": "ipip", "DirectRouting": True}

DEVICES: Mapping[str, Mapping[int, str]] = {
    "vxlan": {4: "flannel.1", 6: "flannel-v6.1"},
    "ipip": {4: "flannel.ipip", 6: "flannel-v6.ipip"},
    "host-gw": {},
}
OVERHEAD: Mapping[str, Mapping[int, int]] = {"vxlan": {4: 50, 6: 70}, "ipip": {4: 20, 6: 40}, "host-gw": {4: 0, 6: 0}}
UNDERLAY_MTU = 1500
ROUTER = {4: SWITCH_V4, 6: SWITCH_V6}
FAR_ROUTER = {4: "198.51.100.254", 6: "2001:db8:2::fe"}
NETWORKS = ("10.5.", "10.6.", "fd05:", "fd06:")

IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PMTUDISC_DO = 10, 23, 2
"""Linux, <linux/in.h> and <linux/in6.h>: packets are not divided (ip(7))."""


class Segments:
    """h1 and h2 on the switch, h3 behind it on a segment of its own; the switch routes between them."""

    def __init__(self, lab: Lab, backend: Mapping[str, Any], family: FamilyChoice) -> None:
        self.lab = lab
        self.first, self.second, self.far = lab.hosts
        self.choose(backend, family)

    def choose(self, backend: Mapping[str, Any], family: FamilyChoice) -> None:
        """Write the network config; daemons that run already follow it after a restart."""
        self.backend, self.kind, self.family = backend, str(backend["Type"]), family
        self.families = {"v4": (4,), "v6": (6,), "dual": (4, 6)}[family]
        self.devices = {family: name for family, name in DEVICES[self.kind].items() if family in self.families}
        self.lab.etcd.configure(drawn(network_config(family=family)) | {"Backend": backend})

    def join(self) -> None:
        """Move h3 to the other segment and make the switch a router."""
        switch = self.lab.switch
        switch.ip(
            "link add br1 address 02:00:00:00:01:fe type bridge",
            "link set br1 up",
            f"addr add {FAR_ROUTER[4]}/24 dev br1",
            f"addr add {FAR_ROUTER[6]}/64 dev br1 nodad",
            "link set h3-eth0 master br1",
        )
        for key in ("ipv4/ip_forward", "ipv6/conf/all/forwarding"):
            switch.sysctl(f"net/{key}", "1")
        self._house()

    def _house(self) -> None:
        """Give each host an address on its segment, and a default route, in the families of the config alone."""
        for host in self.lab.hosts:
            number, router = self.lab.hosts.index(host) + 1, FAR_ROUTER if host is self.far else ROUTER
            host.v4 = IPv4Interface(f"{router[4].rpartition('.')[0]}.{number}/24") if 4 in self.families else None
            host.v6 = IPv6Interface(f"{router[6].removesuffix('fe')}{number}/64") if 6 in self.families else None
            lines = ["addr flush dev eth0 scope global", "link set eth0 down", "link set eth0 up"]
            for a in host.addresses:
                lines.append(f"addr add {a} dev eth0{' nodad' if a.version == 6 else ''}")
                lines.append(f"route replace default via {router[a.version]}")
            host.namespace.ip(*lines)

    def change(self, backend: Mapping[str, Any], family: FamilyChoice, within_s: float = 60.0) -> None:
        """Let all hosts run another config, after a restart, with addresses and containers that fit it.

        They are to know the store by an address of either family.
        """
        for host in self.lab.hosts:
            host.daemon.signal(signal.SIGTERM)
        for host in self.lab.hosts:
            assert host.daemon.wait_exit(within_s) == 0
            for pod in host.pods:
                pod.namespace.delete()
            host.pods.clear()
            host.namespace.ip("link del cni0")
        self.choose(backend, family)
        self._house()
        self.lab.start()

    # -- what is where ------------------------------------------------------

    def underlay(self, host: Host) -> tuple[int, ...]:
        """Return the families in which a host has addresses on its segment, as the kernel says."""
        found = {ip_interface(address) for address in host.namespace.addresses("eth0")}
        return tuple(sorted({address.version for address in found if not address.ip.is_link_local}))

    def pairs(self) -> Iterator[tuple[Host, Host]]:
        """Return the ordered pairs that the backend can join: host-gw does not cross a router."""
        for source, target in itertools.permutations(self.lab.hosts, 2):
            if self.kind != "host-gw" or self.near(source, target):
                yield source, target

    def near(self, host: Host, peer: Host) -> bool:
        """Whether both are on one segment."""
        return self.far not in (host, peer)

    def plain(self, host: Host, peer: Host) -> bool:
        """Whether packets between the hosts go without a tunnel."""
        return self.kind == "host-gw" or bool(self.backend.get("DirectRouting") and self.near(host, peer))

    def subnet(self, host: Host, family: int) -> str:
        """Return the host's subnet of a family."""
        return str(next(g.network for g in host.gateways() if g.version == family))

    def base(self, host: Host, family: int) -> str:
        """Return the first address of the subnet, which the host's tunnel device has."""
        return self.subnet(host, family).partition("/")[0]

    def address(self, host: Host, family: int) -> str:
        """Return the host's own address, which it announces."""
        return str(next(a.ip for a in host.addresses if a.version == family))

    def mac(self, host: Host, family: int) -> str:
        """Return the VTEP's MAC in the host's lease."""
        announced = {4: ("PublicIP", "BackendData"), 6: ("PublicIPv6", "BackendV6Data")}
        public, data = announced[family]
        leases = self.lab.etcd.leases().values()
        return str(next(v[data]["VtepMAC"] for v in leases if v[public] == self.address(host, family)))

    # -- the kernel ---------------------------------------------------------

    def wanted(self, host: Host) -> Facts:
        """Return the devices with their addresses, and the entries for every peer that can be reached."""
        facts = set()
        for family, device in self.devices.items():
            facts |= {self._device(host, family), f"addr {self.base(host, family)}/{LENGTH[family]} dev {device}"}
        for source, peer in self.pairs():
            if source is host:
                for family in self.families:
                    facts |= self._entries(host, peer, family)
        return frozenset(facts)

    def _device(self, host: Host, family: int) -> str:
        name, mtu = self.devices[family], UNDERLAY_MTU - OVERHEAD[self.kind][family]
        local = self.address(host, family)
        kind = {
            ("vxlan", 4): f"vxlan id 1 local {local} dev eth0 port 8472 learning False mac {{mac}}",
            ("vxlan", 6): f"vxlan id 1 local {local} dev eth0 port 8472 learning False mac {{mac}}",
            ("ipip", 4): f"ipip local {local} remote any ttl 0 pmtudisc False",
            ("ipip", 6): "ip6tnl ip6ip6 external",
        }[self.kind, family]
        if "{mac}" in kind:
            kind = kind.format(mac=self.mac(host, family))
        return f"device {name} {kind} mtu {mtu} queue 0 up"

    def _entries(self, host: Host, peer: Host, family: int) -> set[str]:
        subnet, base, remote = self.subnet(peer, family), self.base(peer, family), self.address(peer, family)
        if self.plain(host, peer):
            onlink = " onlink" if self.kind == "ipip" else ""
            return {f"route {subnet} via {remote} dev eth0 proto 142{onlink}"}
        device = self.devices[family]
        if self.kind == "ipip":
            if family == 4:
                return {f"route {subnet} via {remote} dev {device} onlink"}
            return {f"route {subnet} encap ip6 src {self.address(host, 6)} dst {remote} dev {device}"}
        mac = self.mac(peer, family)
        return {
            f"neigh {base} lladdr {mac} dev {device}",
            f"fdb {mac} dst {remote} dev {device} self permanent",
            f"route {subnet} via {base} dev {device} onlink",
        }

    def lacking(self) -> list[str]:
        """Return where the kernels differ from what is wanted."""
        return [f"{host}: {text}" for host in self.lab.hosts for text in differences(self.wanted(host), held(host))]

    # -- packets ------------------------------------------------------------

    def silent(self, *, echo: bool = True) -> list[str]:
        """Return the pairs and families of which packets of full size, not to be divided, do not get through.

        Without ``echo`` only UDP is tried, which needs no process.
        """
        wrong = []
        for source, target in self.pairs():
            for family in self.families:
                if echo and source.pod.ping(target.pod, family, count=1)[0] != 1:
                    wrong.append(f"{source} to {target} IPv{family}: no echo")
                elif trouble := undelivered(source.pod, target.pod, family):
                    wrong.append(f"{source} to {target} IPv{family}: {trouble}")
        return wrong


LENGTH = {4: 32, 6: 128}


def held(host: Host) -> Facts:
    """Return the devices called after flannel with what they have, and every route into the cluster's networks."""
    facts = set()
    for link in host.namespace.show("addr show"):
        if link["ifname"].startswith("flannel"):
            facts.add(_shown(link))
            facts |= {
                f"addr {a['local']}/{a['prefixlen']} dev {link['ifname']}"
                for a in link["addr_info"]
                if a.get("scope") == "global"
            }
    name = host.namespace.name
    for family in (4, 6):
        listing = "route show table main\nneigh show nud permanent\n"
        for line in run("ip", "-n", name, f"-{family}", "-o", "-batch", "-", stdin=listing).splitlines():
            facts |= _entry(line.split(), family)
    for line in run("bridge", "-n", name, "fdb", "show").splitlines():
        words = line.split()
        if "dst" in words and words[2].startswith("flannel"):
            mac, _, device, _, remote, *rest = words
            facts.add(" ".join(["fdb", mac, "dst", remote, "dev", device, *rest]))
    return frozenset(facts)


def differences(want: Facts, have: Facts) -> list[str]:
    """Return what is lacking (-) and too much (+)."""
    return [f"-{fact}" for fact in sorted(want - have)] + [f"+{fact}" for fact in sorted(have - want)]


def _shown(link: Mapping[str, Any]) -> str:
    kind, data = link["linkinfo"]["info_kind"], link["linkinfo"].get("info_data", {})
    if kind == "vxlan":
        local = data.get("local", data.get("local6"))
        attributes = f"vxlan id {data['id']} local {local} dev {data.get('link')} port {data['port']}"
        attributes += f" learning {data['learning']} mac {link['address']}"
    elif kind == "ipip":
        attributes = f"ipip local {data['local']} remote {data['remote']} ttl {data['ttl']} pmtudisc {data['pmtudisc']}"
    elif kind == "ip6tnl":
        attributes = f"ip6tnl {data['proto']} {'external' if data.get('external') else 'internal'}"
    else:
        attributes = str(kind)
    state = "up" if "UP" in link["flags"] else "down"
    return f"device {link['ifname']} {attributes} mtu {link['mtu']} queue {link.get('txqlen', 0)} {state}"


def _entry(words: list[str], family: int) -> set[str]:
    """Read a line of ip(8): a permanent neighbour of a tunnel device, or a route that is not the kernel's own."""
    if "lladdr" in words:
        address, _, device, _, mac, *_ = words
        return {f"neigh {address} lladdr {mac} dev {device}"} if device.startswith("flannel") else set()
    text = " ".join(words)
    destination = words[0] if "/" in words[0] else words[1]
    if not destination.startswith(NETWORKS) or "dev cni0" in text or "proto kernel" in text:
        return set()
    if family == 6:
        # What the kernel gives every route that was added without.
        text = text.replace(" metric 1024", "").replace(" pref medium", "")
        text = text.replace(" encap ip6 id 0 ", " encap ip6 ").replace(" hoplimit 0 tc 0", "")
    return {f"route {text}"}


def undelivered(source: Pod, target: Pod, family: int) -> str:
    """Send one UDP packet as large as the containers' MTU; return why it did not arrive as it was sent, or nothing."""
    kind = socket.AF_INET if family == 4 else socket.AF_INET6
    level, option = (socket.IPPROTO_IP, IP_MTU_DISCOVER) if family == 4 else (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER)
    size = source.mtu_bytes - (28 if family == 4 else 48)
    sent = bytes(number % 251 for number in range(size))
    with (
        target.namespace.open_socket(kind, socket.SOCK_DGRAM) as there,
        source.namespace.open_socket(kind, socket.SOCK_DGRAM) as here,
    ):
        there.bind((target.address(family), 0))
        there.settimeout(2)
        here.bind((source.address(family), 0))
        here.setsockopt(level, option, PMTUDISC_DO)
        try:
            here.sendto(sent, there.getsockname()[:2])
            received, sender = there.recvfrom(65536)
        except OSError as error:
            return f"{size} bytes of UDP: {error}"
    if received != sent:
        return f"{size} bytes of UDP: {len(received)} other bytes arrived"
    return "" if sender[0] == source.address(family) else f"UDP comes from {sender[0]}"
