"""What others do to a host's kernel state, and how soon the daemon is to have undone it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import run
from tests.support.segments import ROUTER, Segments, held

WITHIN_S = 1.0
"""Whatever others change is put right within this time."""
STRANGER = "02:00:00:00:99:99"
NOBODY = {4: "192.0.2.252", 6: "2001:db8:1::252"}

Lines = Sequence[str]


@dataclass(frozen=True, slots=True)
class Damage:
    """Commands of ip(8) and bridge(8) on the first host; none where the backend has nothing of that kind."""

    ip: Callable[[Segments], Lines]
    bridge: Callable[[Segments], Lines] = lambda _: ()

    def lines(self, segments: Segments) -> tuple[Lines, Lines]:
        """Return the commands."""
        return self.ip(segments), self.bridge(segments)


def inflict(host: Host, lines: tuple[Lines, Lines]) -> None:
    """Run the commands, those of one tool in one process."""
    for tool, commands in zip(("ip", "bridge"), lines, strict=True):
        if commands:
            run(tool, "-n", host.namespace.name, "-batch", "-", stdin="".join(f"{line}\n" for line in commands))


def _devices(*commands: str) -> Callable[[Segments], Lines]:
    return lambda s: [c.format(device=d) for d in s.devices.values() for c in commands]


def _addresses(s: Segments) -> Lines:
    return [f"addr del {fact.removeprefix('addr ')}" for fact in sorted(held(s.first)) if fact.startswith("addr ")]


def _tunnelled(s: Segments) -> Iterator[tuple[Host, int]]:
    """Return the peers, per family, that the first host reaches through a VXLAN device."""
    for source, peer in s.pairs():
        if source is s.first and s.kind == "vxlan" and not s.plain(source, peer):
            for family in s.families:
                yield peer, family


def _neighbours(command: str) -> Callable[[Segments], Lines]:
    return lambda s: [
        f"neigh {command.format(base=s.base(peer, f), stranger=STRANGER)} dev {s.devices[f]}"
        for peer, f in _tunnelled(s)
    ]


def _fdb_deleted(s: Segments) -> Lines:
    return [f"fdb del {s.mac(p, f)} dev {s.devices[f]} dst {s.address(p, f)} self" for p, f in _tunnelled(s)]


def _fdb_misdirected(s: Segments) -> Lines:
    return [f"fdb replace {s.mac(p, f)} dev {s.devices[f]} dst {NOBODY[f]} self permanent" for p, f in _tunnelled(s)]


def _routes(command: str) -> Callable[[Segments], Lines]:
    return lambda s: [
        f"route {command.format(subnet=s.subnet(peer, f), router=ROUTER[f])}"
        for source, peer in s.pairs()
        if source is s.first
        for f in s.families
    ]


def _outer_header(s: Segments) -> Lines:
    if s.kind != "ipip" or 6 not in s.families:
        return ()
    own, device = s.address(s.first, 6), s.devices[6]
    return [f"route replace {s.subnet(s.far, 6)} encap ip6 src {own} dst {NOBODY[6]} dev {device}"]


def _underlay_bounced(s: Segments) -> Lines:
    """A cable that is pulled and put back; whoever manages the interface restores what the kernel dropped."""
    lines = ["link set eth0 down", "link set eth0 up"]
    for address in s.first.addresses:
        lines.append(f"addr replace {address} dev eth0{' nodad' if address.version == 6 else ''}")
        lines.append(f"route replace default via {ROUTER[address.version]}")
    return lines


DAMAGE: Mapping[str, Damage] = {
    "link deleted": Damage(_devices("link del {device}")),
    "link down": Damage(_devices("link set {device} down")),
    "link down and up": Damage(_devices("link set {device} down", "link set {device} up")),
    "MTU changed": Damage(_devices("link set {device} mtu 1300")),
    "address deleted": Damage(_addresses),
    "neighbour deleted": Damage(_neighbours("del {base}")),
    "neighbour changed": Damage(_neighbours("replace {base} lladdr {stranger} nud permanent")),
    "FDB entry deleted": Damage(lambda _: (), _fdb_deleted),
    "FDB entry changed": Damage(lambda _: (), _fdb_misdirected),
    "route deleted": Damage(_routes("del {subnet}")),
    "route conflicting": Damage(_routes("replace {subnet} via {router} dev eth0")),
    "route blackholed": Damage(_routes("replace blackhole {subnet}")),
    "route with another outer header": Damage(_outer_header),
    "V08-H06-underlay down and up": Damage(_underlay_bounced),
}
