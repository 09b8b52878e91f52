"""Kernel objects as values. Devices are named; the adapter turns names into indexes.

Objects hash by their key, which holds integers: thousands are put into sets,
and hashing addresses takes its time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Interface, IPv6Address, IPv6Interface
from typing import ClassVar, Literal, TypeAlias

from subnet.model import Family, IPAddress, IPNetwork

IPInterface: TypeAlias = IPv4Interface | IPv6Interface

PROTO_KERNEL = 2
PROTO_BOOT = 3
PROTO_FLANNEL = 142
"""Route protocol numbers (rtnetlink(7)); 142 marks our routes on devices that are not ours."""

LOOPBACK, OWN_LABEL = "lo", "lo:flannel"
"""Where a host has its address in the cluster if no device of ours holds it, and the label that marks it as ours."""

DEFAULT_PORT = 8472
"""The kernel's VXLAN port when none is asked for; older than IANA's 4789."""

METRIC: Mapping[Family, int] = {4: 0, 6: 1024}
"""Metric the kernel gives a route that was added without one."""


@dataclass(frozen=True, slots=True)
class Vxlan:
    """What makes a VXLAN device (ip-link(8), VXLAN Type Support). Port 0: the kernel's default, 8472."""

    kind: ClassVar[str] = "vxlan"

    vni: int
    port: int
    local: IPAddress | None
    lower_index: int
    learning: bool = False
    gbp: bool = False
    multicast: bool = False
    l2miss: bool = False

    def __str__(self) -> str:
        return f"vxlan id {self.vni} local {self.local} port {self.port or DEFAULT_PORT}"


@dataclass(frozen=True, slots=True)
class Ipip:
    """What makes an IPv4-in-IPv4 device (RFC 2003). Without ``remote`` each packet goes to its route's gateway.

    ``fou_port``: packets travel in UDP from and to that port; 0: without UDP.
    """

    kind: ClassVar[str] = "ipip"

    local: IPv4Address | None
    remote: IPv4Address | None = None
    fou_port: int = 0

    def __str__(self) -> str:
        encap = f" encap fou encap-sport {self.fou_port} encap-dport {self.fou_port}" if self.fou_port else ""
        return f"ipip local {self.local} remote {self.remote or 'any'}{encap}"


@dataclass(frozen=True, slots=True)
class Ip6Tunnel:
    """What makes an IPv6-in-IPv6 device (RFC 2473). ``external``: the outer addresses come from the route.

    A kernel has at most one external device of this kind.
    """

    kind: ClassVar[str] = "ip6tnl"

    external: bool = True

    def __str__(self) -> str:
        return f"ip6tnl mode ip6ip6{' external' if self.external else ''}"


@dataclass(frozen=True, slots=True)
class Wireguard:
    """What a WireGuard device is set to (wg(8)). Keys are base64; port 0: the kernel's choice, made when it goes up.

    ``public_key`` is what the kernel derives; nobody sets it.
    """

    kind: ClassVar[str] = "wireguard"

    port: int
    private_key: str = field(repr=False)
    public_key: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"wireguard port {self.port or 'any'}"


@dataclass(frozen=True, slots=True)
class KeptTun:
    """A TUN device that stays when whoever reads from it ends. Others go with their reader, and say nothing here."""

    kind: ClassVar[str] = "tun"


Tunnel: TypeAlias = Vxlan | Ipip | Ip6Tunnel | Wireguard | KeptTun
"""The kinds of devices that backends make."""


@dataclass(frozen=True, slots=True)
class Link:
    """A network device as the kernel shows it."""

    name: str
    index: int
    kind: str
    mac: str
    mtu_bytes: int
    up: bool
    tunnel: Tunnel | None = None
    """None for every device that no backend could have made."""
    loopback: bool = False
    point_to_point: bool = False


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A device that a backend wants. ``mac`` is what peers were told, or a proposal for a new VXLAN device.

    ``binding``: an existing device with another MAC is given ``mac``;
    otherwise an existing device keeps its own.
    """

    name: str
    family: Family
    tunnel: Tunnel
    mtu_bytes: int
    mac: str = ""
    binding: bool = False


@dataclass(frozen=True, slots=True)
class Address:
    """An address of a device. Equality looks at device and address alone.

    ``label`` marks an IPv4 address (ip-address(8)); on devices that are not ours it tells which are.
    """

    device: str
    interface: IPInterface
    scope: str = field(default="global", compare=False)
    dynamic: bool = field(default=False, compare=False)
    temporary: bool = field(default=False, compare=False)
    """For IPv4 the same bit means secondary (rtnetlink(7), IFA_F_SECONDARY)."""
    deprecated: bool = field(default=False, compare=False)
    tentative: bool = field(default=False, compare=False)
    label: str = field(default="", compare=False)

    @property
    def family(self) -> Family:
        """Return the address family."""
        return 4 if self.interface.version == 4 else 6

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the kernel tells addresses apart by."""
        return self.device, self.interface.version, int(self.interface.ip), self.interface.network.prefixlen

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"address {self.interface} dev {self.device}"


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A permanent neighbour entry: protocol address to MAC."""

    device: str
    address: IPAddress
    mac: str

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the kernel replaces by."""
        return self.device, self.address.version, int(self.address)

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"neigh {self.address} lladdr {self.mac} dev {self.device}"


@dataclass(frozen=True, slots=True)
class FdbEntry:
    """A permanent forwarding entry of a VXLAN device: MAC to the remote VTEP's address."""

    device: str
    mac: str
    remote: IPAddress

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the kernel replaces by."""
        return self.device, self.mac

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        return f"fdb {self.mac} dev {self.device} dst {self.remote}"


@dataclass(frozen=True, slots=True)
class Encap:
    """The outer header that a route gives its packets (ip-route(8), ``encap ip6``); its device adds it."""

    source: IPv6Address
    destination: IPv6Address

    def __str__(self) -> str:
        return f"encap ip6 src {self.source} dst {self.destination}"


@dataclass(frozen=True, slots=True)
class Route:
    """A route of the main table. ``metric`` None: the kernel's default for the family.

    One that discards packets has no device. ``scope`` is how far the
    destination is, in ip-route(8)'s words; IPv6 knows ``global`` only.
    """

    destination: IPNetwork
    device: str
    gateway: IPAddress | None = None
    onlink: bool = False
    protocol: int = PROTO_BOOT
    metric: int | None = None
    type: str = "unicast"
    source: IPAddress | None = None
    encap: Encap | None = None
    scope: str = "global"

    @property
    def family(self) -> Family:
        """Return the address family."""
        return 4 if self.destination.version == 4 else 6

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the kernel replaces by: destination and metric."""
        destination = self.destination
        return destination.version, int(destination.network_address), destination.prefixlen, self.priority

    @property
    def priority(self) -> int:
        """Return the metric as a number; the lowest wins."""
        return METRIC[self.family] if self.metric is None else self.metric

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        kind = "" if self.type == "unicast" else f"{self.type} "
        via = (f" {self.encap}" if self.encap else "") + (f" via {self.gateway}" if self.gateway else "")
        device = f" dev {self.device}" if self.device else ""
        return f"route {kind}{self.destination}{via}{device}{' onlink' if self.onlink else ''}"


BLACKHOLE_METRIC = 1 << 31
"""Behind every route that carries: the connected one of a bridge has 0 (IPv4) or 256 (IPv6)."""


def blackhole(subnet: IPNetwork) -> Route:
    """Return the route that discards packets to own addresses while no device has their network.

    Without it they would follow a less specific route, out of the host and perhaps back again.
    """
    return Route(subnet, "", protocol=PROTO_FLANNEL, metric=BLACKHOLE_METRIC, type="blackhole")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer's datagrams go to and come from."""

    address: IPAddress
    port: int

    def __str__(self) -> str:
        return f"{self.address}:{self.port}" if self.address.version == 4 else f"[{self.address}]:{self.port}"


@dataclass(frozen=True, slots=True)
class WireguardPeer:
    """A peer of a WireGuard device (wg(8)). Keys are base64; ``preshared_key`` empty: none.

    ``allowed`` are the networks behind it, in order; what comes from or goes to
    others is dropped. ``endpoint`` None: not known, the peer has to speak first.
    """

    device: str
    public_key: str
    endpoint: Endpoint | None
    allowed: tuple[IPNetwork, ...]
    keepalive_s: int = 0
    preshared_key: str = field(default="", repr=False)

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the kernel replaces by."""
        return self.device, self.public_key

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        networks = " ".join(str(network) for network in self.allowed)
        return f"peer {self.public_key} dev {self.device} endpoint {self.endpoint} for {networks or 'nothing'}"


@dataclass(frozen=True, slots=True)
class IpsecPolicy:
    """Packets between two networks go through an ESP tunnel between two hosts (ip-xfrm(8)), whatever their device.

    ``direction`` is the kernel's: ``out``, ``in`` for packets to this host, ``fwd`` for those to its containers.
    """

    direction: Literal["out", "in", "fwd"]
    source: IPNetwork
    destination: IPNetwork
    outer_source: IPAddress
    outer_destination: IPAddress
    device: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the kernel replaces by."""
        ends = (self.source, self.destination)
        return self.direction, *((end.version, int(end.network_address), end.prefixlen) for end in ends)

    def __hash__(self) -> int:
        return hash(self.key)

    def __str__(self) -> str:
        inner = f"policy {self.direction} src {self.source} dst {self.destination}"
        return f"{inner} tunnel src {self.outer_source} dst {self.outer_destination}"


KernelObject: TypeAlias = Address | Neighbour | FdbEntry | WireguardPeer | IpsecPolicy | Route


@dataclass(frozen=True, slots=True)
class Change:
    """One step towards the wanted state: ``put`` creates or replaces, ``delete`` removes."""

    verb: Literal["put", "delete"]
    target: KernelObject

    def __str__(self) -> str:
        return f"{self.target} {'added' if self.verb == 'put' else 'removed'}"


@dataclass(frozen=True, slots=True)
class DesiredState:
    """Everything a backend wants in the kernel, links aside.

    ``devices`` are ours: whatever else they hold is removed (see ``diff`` for
    the exceptions). ``networks`` are the cluster's networks, now and in an
    earlier run: inside them stale addresses and routes of ours are recognised.
    ``underlay`` names the external interface.
    ``problems`` are leases that could not be turned into entries, with the reason.
    ``alone``: nobody else carries this network, so that a gateway route of
    protocol boot inside it is what Go flannel left; otherwise only routes of
    our own protocol number are ours.
    ``additive``: the peers are known from memory only; what the kernel holds may
    be newer, and is neither removed nor replaced.
    """

    devices: frozenset[str]
    underlay: str
    networks: frozenset[IPNetwork]
    addresses: frozenset[Address] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    fdb: frozenset[FdbEntry] = frozenset()
    routes: frozenset[Route] = frozenset()
    problems: tuple[tuple[str, str], ...] = ()
    additive: bool = False
    alone: bool = True
    peers: frozenset[WireguardPeer] = frozenset()
    policies: frozenset[IpsecPolicy] = frozenset()


@dataclass(frozen=True, slots=True)
class ObservedState:
    """What the kernel holds: everything of our devices, all addresses, the main tables' routes, tunnel policies.

    ``silent`` are the peers that are sent to and do not answer.
    """

    addresses: frozenset[Address] = frozenset()
    neighbours: frozenset[Neighbour] = frozenset()
    fdb: frozenset[FdbEntry] = frozenset()
    routes: frozenset[Route] = frozenset()
    peers: frozenset[WireguardPeer] = frozenset()
    policies: frozenset[IpsecPolicy] = frozenset()
    silent: frozenset[WireguardPeer] = frozenset()
