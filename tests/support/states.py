"""What hosts may run, backend by backend, and all that each is to leave in the kernel and in the datastore.

Everything is dual-stack. Facts are spelt as in ``tests.support.segments``; devices by their name alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from backends.wgkeys import public_key
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import run
from tests.support import wireguard
from tests.support.expected import Facts
from tests.support.segments import LENGTH, NETWORKS, held

NETWORK = {4: "10.5.0.0/16", 6: "fd05::/48"}
OTHER_NETWORK = {4: "10.6.0.0/16", 6: "fd06::/48"}
BOTH = (4, 6)

VIA_TUNNEL = (
    "neigh {base} lladdr {mac} dev {device}",
    "fdb {mac} dst {remote} dev {device} self permanent",
    "route {subnet} via {base} dev {device} onlink",
)
DIRECTLY = ("route {subnet} via {remote} dev eth0 proto 142",)
TO_THE_NETWORK = {4: ("route {network} dev {device}",), 6: ("route {network} dev {device}",)}


@dataclass(frozen=True)
class State:
    """A backend with what it is to bring about on a host that has one peer.

    ``entries`` are templates by family, ``carries`` the families whose packets
    get through, ``announces`` those whose address is in the lease.
    """

    backend: Mapping[str, Any]
    devices: Mapping[int, str] = field(default_factory=dict)
    entries: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    ports: frozenset[int] = frozenset()
    """UDP, of programs or of the kernel."""
    carries: tuple[int, ...] = BOTH
    announces: tuple[int, ...] = BOTH
    network: Mapping[int, str] = field(default_factory=lambda: NETWORK)

    @property
    def config(self) -> dict[str, Any]:
        """The network config."""
        return {
            "Network": self.network[4],
            "EnableIPv6": True,
            "IPv6Network": self.network[6],
            "Backend": self.backend,
        }


def vxlan(vni: int = 1, **options: Any) -> State:
    """Return backend vxlan; a direct one has its tunnels without peers on them."""
    entries = DIRECTLY if options.get("DirectRouting") else VIA_TUNNEL
    return State(
        {"Type": "vxlan", "VNI": vni, **options},
        {4: f"flannel.{vni}", 6: f"flannel-v6.{vni}"},
        {4: entries, 6: entries},
        frozenset({8472}),
    )


# Commands that build a VXLAN network, like upstream's sample; the tunnel is of IPv4 and carries both families.
# With this backend nothing is recognised as the daemon's own, so they begin with what another one left.
COMMANDS = {
    "ExtensionShell": True,
    "PreStartupCommand": (
        "{ for device in $(ls /sys/class/net | grep ^flannel | grep -vx flannel-vxlan); do ip link del $device; done;"
        " ip route flush proto 142; ip -6 route flush proto 142; } >/dev/null 2>&1;"
        " ip link show flannel-vxlan >/dev/null 2>&1 ||"
        " ip link add flannel-vxlan mtu 1450 type vxlan id 5 dstport 8477 nolearning;"
        " cat /sys/class/net/flannel-vxlan/address"
    ),
    "PostStartupCommand": (
        'for base in "${SUBNET%/*}/32" "${IPV6SUBNET%/*}/128"; do ip addr replace $base dev flannel-vxlan; done;'
        " ip link set flannel-vxlan up"
    ),
    "SubnetAddCommand": (
        'read vtep; bridge fdb replace "$vtep" dev flannel-vxlan self dst "$PUBLIC_IP";'
        ' for subnet in "$SUBNET" "$IPV6SUBNET"; do'
        ' ip neigh replace "${subnet%/*}" lladdr "$vtep" dev flannel-vxlan nud permanent &&'
        ' ip route replace "$subnet" via "${subnet%/*}" dev flannel-vxlan onlink; done'
    ),
    "ShutdownCommand": "ip link del flannel-vxlan",
}
IPIP_ROUTES = {
    4: ("route {subnet} via {remote} dev {device} onlink",),
    6: ("route {subnet} encap ip6 src {local} dst {remote} dev {device}",),
}

STATES: Mapping[str, State] = {
    "vxlan": vxlan(),
    "vxlan-2": vxlan(2),
    "direct": vxlan(DirectRouting=True),
    "network": State(
        {"Type": "vxlan"},
        {4: "flannel.1", 6: "flannel-v6.1"},
        {4: VIA_TUNNEL, 6: VIA_TUNNEL},
        frozenset({8472}),
        network=OTHER_NETWORK,
    ),
    "host-gw": State({"Type": "host-gw"}, {}, {4: DIRECTLY, 6: DIRECTLY}),
    "udp": State({"Type": "udp"}, {4: "flannel0", 6: "flannel-v6.0"}, TO_THE_NETWORK, frozenset({8285})),
    "alloc": State({"Type": "alloc"}, carries=()),
    "extension": State(
        {"Type": "extension", **COMMANDS},
        {4: "flannel-vxlan"},
        {4: VIA_TUNNEL, 6: tuple(text for text in VIA_TUNNEL if not text.startswith("fdb"))},
        frozenset({8477}),
    ),
    "wireguard": State(
        {"Type": "wireguard"},
        {4: "flannel-wg", 6: "flannel-wg-v6"},
        {
            4: ("route {network} dev {device} scope link", "peer {key} of {subnet} dev {device}"),
            6: ("route {network} dev {device}", "peer {key} of {subnet} dev {device}"),
        },
        frozenset({51820, 51821}),
    ),
    "ipip": State({"Type": "ipip"}, {4: "flannel.ipip", 6: "flannel-v6.ipip"}, IPIP_ROUTES),
    "fou": State(
        {"Type": "udp", "DataPath": "fou"},
        {4: "flannel.fou"},
        {4: IPIP_ROUTES[4]},
        frozenset({8285}),
        carries=(4,),
        announces=(4,),
    ),
}


# -- what is wanted -------------------------------------------------------------


def wanted(state: State, lab: Lab, host: Host, peer: Host) -> Facts:
    """Return what the host is to hold, its lease included."""
    facts = {f"port {port}" for port in state.ports} | {f"device {name}" for name in state.devices.values()}
    lease = lease_of(lab, peer)
    for family in BOTH:
        # Commands may have one device for both families.
        device = state.devices.get(family, state.devices.get(4, ""))
        own, base = (_subnet(one, family).partition("/")[0] for one in (host, peer))
        if device and family in state.entries:
            facts.add(f"addr {own}/{LENGTH[family]} dev {device}")
        data = lease.get("BackendData" if family == 4 or state.backend["Type"] == "extension" else "BackendV6Data")
        values = {
            "base": base,
            "subnet": _subnet(peer, family),
            "network": state.network[family],
            "device": device,
            "local": _address(host, family),
            "remote": _address(peer, family),
            "mac": data if isinstance(data, str) else (data or {}).get("VtepMAC"),
            "key": (data or {}).get("PublicKey") if not isinstance(data, str) else "",
        }
        facts |= {text.format(**values) for text in state.entries.get(family, ())}
    return frozenset(facts)


def lease_of(lab: Lab, host: Host) -> dict[str, Any]:
    """Return the value of the lease with the host's address, empty if there is none."""
    return next((v for v in lab.etcd.leases().values() if v["PublicIP"] == host.address), {})


def wanted_lease(state: State, host: Host) -> dict[str, Any]:
    """Return the value that the host's lease is to have, with the MACs and keys of the host itself."""
    kind = str(state.backend["Type"])
    value: dict[str, Any] = {
        "PublicIP": _address(host, 4),
        "PublicIPv6": _address(host, 6) if 6 in state.announces else None,
    }
    if kind not in ("udp", "alloc"):
        value["BackendType"] = kind
    if kind == "vxlan":
        for family, name in ((4, "BackendData"), (6, "BackendV6Data")):
            value[name] = {"VNI": state.backend.get("VNI", 1), "VtepMAC": _mac(host, state.devices[family])}
    elif kind == "extension":
        value["BackendData"] = _mac(host, state.devices[4])
    elif kind == "wireguard":
        for family, name, port in ((4, "BackendData", 51820), (6, "BackendV6Data", 51821)):
            del family
            value[name] = {"PublicKey": _public_key(host), "Port": port}
    return value


def _public_key(host: Host) -> str:
    return public_key((host.daemon.directory / "wgkey").read_text())


def _subnet(host: Host, family: int) -> str:
    return str(next(gateway.network for gateway in host.gateways() if gateway.version == family))


def _address(host: Host, family: int) -> str:
    return str(next(address.ip for address in host.addresses if address.version == family))


def _mac(host: Host, device: str) -> str:
    return str((host.namespace.link(device) or {}).get("address"))


# -- what there is --------------------------------------------------------------


def found(host: Host, network: Mapping[int, str], plain: Facts = frozenset()) -> Facts:
    """Return what the host holds; of policies, rules and the like what is not in ``plain``, those of a fresh host."""
    facts = {" ".join(fact.split()[:2]) if fact.startswith("device") else fact for fact in held(host)}
    facts |= {f"port {line.split()[3].rpartition(':')[2]}" for line in host.run("ss", "-Hlun").splitlines()}
    for device in [fact.split()[1] for fact in facts if fact.startswith("device flannel-wg")]:
        if (there := wireguard.read(host, device)) is not None:
            facts |= {f"peer {key} of {','.join(peer.networks)} dev {device}" for key, peer in there.peers.items()}
    return frozenset(facts | {f"other {line}" for line in odd(host, network) - plain})


def odd(host: Host, network: Mapping[int, str]) -> Facts:
    """Return what no backend here leaves: policies, rules, queues, routes of other tables, words of another network."""
    name, lines = host.namespace.name, set()
    for family, more in ((4, "nexthop\nxfrm policy\nxfrm state\n"), (6, "")):
        listing = f"{more}rule\nroute show table all\n"
        said = run("ip", "-n", name, f"-{family}", "-o", "-batch", "-", stdin=listing).splitlines()
        lines |= {line for line in said if " dev " not in line or line.startswith(("id ", "src ")) or _strange(line)}
    lines |= set(host.run("tc", "qdisc", "show", "dev", "eth0").splitlines())
    others = [prefix for prefix in NETWORKS if not "".join(network.values()).count(prefix)]
    for tool in ("iptables-save", "ip6tables-save"):
        lines |= {line for line in host.run(tool).splitlines() if any(prefix in line for prefix in others)}
    return frozenset(lines)


def _strange(route: str) -> bool:
    """Whether a route into the networks is in another table than the main one, and not the kernel's own."""
    inside = any(prefix in route for prefix in NETWORKS)
    return inside and " table " in route and "proto kernel" not in route and "dev cni0" not in route
