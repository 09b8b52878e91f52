"""Bridges of container runtimes that are older than the lease: their containers have addresses of another host."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from backends.dataplane.model import Address
from backends.dataplane.ports import Kernel, KernelEvent, LinkSeen, ObjectSeen, Overflow
from subnet.clock import Clock
from subnet.model import IPNetwork, Subnets
from subnet.report import Reporter

log = logging.getLogger(__name__)

BRIDGES = ("cni0", "docker0")
AGAIN_S = 600.0


def misplaced(addresses: Iterable[Address], networks: Collection[IPNetwork], own: Subnets) -> dict[str, str]:
    """Return, by bridge, what is wrong with its address: in the cluster's networks, but outside the own subnet."""
    found: dict[str, str] = {}
    for address in addresses:
        subnet, held = own.of(address.family), address.interface.network
        if address.device not in BRIDGES or subnet is None or not _overlap(held, networks):
            continue
        if not held.subnet_of(subnet):  # type: ignore[arg-type]
            found[address.device] = (
                f"bridge {address.device} has {address.interface}, but this host's subnet is {subnet}: packets between "
                f"its containers and other hosts go astray; stop them and delete it: ip link del {address.device}"
            )
    return found


def _overlap(network: IPNetwork, others: Iterable[IPNetwork]) -> bool:
    return any(network.version == other.version and network.overlaps(other) for other in others)


class Bridges:
    """Looks at them when something changed, and tells the log."""

    def __init__(self, kernel: Kernel, clock: Clock) -> None:
        self._kernel, self._reporter = kernel, Reporter(log, clock, again_s=AGAIN_S)
        self._looked_for: tuple[frozenset[IPNetwork], Subnets] | None = None
        self.problems: dict[str, str] = {}

    def doubt(self) -> None:
        """Look again at the next opportunity."""
        self._looked_for = None

    def saw(self, event: KernelEvent) -> None:
        """Take a notification: most are of containers' interfaces, and no reason to look."""
        if self._looked_for is None:
            return
        match event:
            case Overflow():
                self.doubt()
            case LinkSeen(name=name) if name in BRIDGES:
                self.doubt()
            case ObjectSeen(target=Address(interface=interface)) if _overlap(interface.network, self._looked_for[0]):
                self.doubt()
            case _:
                pass

    def look(self, networks: frozenset[IPNetwork], own: Subnets) -> None:
        """Bring ``problems`` up to date. Raises KernelError."""
        if self._looked_for == (networks, own):
            return
        self.problems = misplaced(self._kernel.addresses(), networks, own)
        for name in BRIDGES:
            if name in self.problems:
                self._reporter.problem(name, self.problems[name])
            else:
                self._reporter.solved(name, f"bridge {name} is in order, or gone")
        self._looked_for = networks, own
