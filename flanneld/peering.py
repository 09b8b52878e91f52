"""From leases to wanted kernel entries, at the cost of what changed."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from ipaddress import ip_network

from backends.api import Backend, ExternalInterface, PeerwiseBackend, Setting
from backends.dataplane.model import Route, blackhole
from backends.dataplane.ports import Kernel
from backends.dataplane.table import WantedTable
from subnet.clock import Clock
from subnet.errors import KernelError
from subnet.leaseset import LeaseSet, checks_for
from subnet.manager import LeasesChanged, LeasesListed
from subnet.model import FAMILIES, IPAddress, Lease, Subnets
from subnet.parting import GRACE_S, RETURN_S, Parting
from subnet.peers import PeerSet
from subnet.report import Reporter

log = logging.getLogger(__name__)


class Peering:
    """Leases in, one table of wanted entries out."""

    def __init__(self, kernel: Kernel, clock: Clock, *, blackhole_own: bool = False) -> None:
        self._kernel, self._clock, self._blackhole_own = kernel, clock, blackhole_own
        self._reporter = Reporter(log, clock, again_s=600)
        self.leases = LeaseSet()
        self.moved = True
        """Whether something changed since the table was last asked for."""
        self._peers = PeerSet((), None)
        self._parting = Parting()
        self._pending: dict[Subnets, Lease | None] = {}
        """Changes of peers that the table has not got yet."""
        self._table: WantedTable | None = None
        self._table_of: tuple[Setting, Subnets, bool] | None = None
        self._backend: Backend | None = None
        self._peerwise: PeerwiseBackend | None = None
        self._interface: ExternalInterface | None = None
        self._on_link: dict[IPAddress, bool] = {}
        self._ways_changed = False

    def listed(self, event: LeasesListed) -> None:
        """Take over a full list. A peer that is not in it stays for a moment: see ``part``."""
        grace_s = RETURN_S if self.leases.listed(event) else GRACE_S
        known, now = self._peers.leases(), self._clock.now()
        for gone in known:
            if gone.subnets not in self.leases and gone.subnets not in self._parting:
                self._parting.begin(gone, now, grace_s)
        if self._parting.next_at is not None:
            for lease in event.leases:
                self._parting.came(lease)
        self._load(lease for lease in known if lease.subnets in self._parting)
        self.moved = True

    def changed(self, event: LeasesChanged) -> None:
        """Take over changes. A peer whose lease has gone stays for a moment: see ``part``."""
        if not self.leases.changed(event):
            return
        for change in event.changes:
            if isinstance(change, Lease):
                for replaced in self._parting.came(change):
                    self._peers.remove(replaced)
                self._peers.put(change)
                self.moved = True
            elif (gone := self._peers.lease(change)) is not None:
                self._parting.begin(gone, self._clock.now())

    def part(self) -> None:
        """Let go the peers whose lease has not come back; to be called again at ``parts_at``."""
        for subnets in self._parting.over(self._clock.now()):
            self._peers.remove(subnets)
            self.moved = True

    @property
    def parts_at(self) -> float | None:
        """When ``part`` has something to do, by the clock."""
        return self._parting.next_at

    def _load(self, parting: Iterable[Lease] = ()) -> None:
        if self._table is not None:
            # Without a table the checks are not known yet.
            self._peers.load((*self.leases, *parting))

    def ways_changed(self) -> None:
        """The host's routes changed: whether a peer is reached directly is to be decided anew."""
        if self._on_link:
            self._on_link.clear()
            self._ways_changed = self.moved = True

    def peers(self, backend: Backend, setting: Setting, own: Subnets) -> Collection[Lease]:
        """Return the admitted leases. ``moved`` stays as it is."""
        self._renew(backend, setting, own)
        self._pending |= self._peers.take()
        return tuple(self._peers.peers.values())

    def table(self, backend: Backend, setting: Setting, own: Subnets) -> WantedTable:
        """Return the wanted entries, up to date. It is another object when it is to be compared whole."""
        table = self._renew(backend, setting, own)
        for subnets, peer in (self._pending | self._peers.take()).items():
            self._set(table, backend, own, subnets, peer)
        self._pending.clear()
        if self._ways_changed:
            self._ways_changed = False
            for subnets, peer in self._peers.peers.items():
                self._set(table, backend, own, subnets, peer)
        self.moved = False
        return table

    def _renew(self, backend: Backend, setting: Setting, own: Subnets) -> WantedTable:
        """Return the table as it is, or an empty one if another setting, own subnet or kind of list needs it."""
        if backend is not self._backend:
            self._backend = backend
            self._peerwise = backend if isinstance(backend, PeerwiseBackend) else None
        about = setting, own, self.leases.complete
        if self._table is None or self._table_of != about:
            interface = self._interface = setting.interface
            local = {a for a in (interface.v4, interface.v6) if a is not None}
            announced = frozenset(a for a in (interface.public_v4, interface.public_v6) if a is not None)
            underlay = interface.prefixes | {ip_network(address) for address in local}
            self._on_link.clear()
            self._peers = PeerSet(checks_for(setting.config, own, announced, underlay), own)
            # Leases remembered from an earlier run only fill gaps: what the kernel holds may be newer.
            base = replace(backend.desired(own, (), lambda _: False), additive=not self.leases.complete)
            if self._blackhole_own:
                base = replace(base, routes=base.routes | _blackholes(own, setting))
            self._table = WantedTable(base)
            self._table_of = about
            self._parting.clear()
            self._load()
            self._pending.clear()
        return self._table

    def _set(self, table: WantedTable, backend: Backend, own: Subnets, subnets: Subnets, peer: Lease | None) -> None:
        if peer is None:
            table.remove(subnets)
            return
        rank = peer.revision, peer.key
        if self._peerwise is not None:
            found = self._peerwise.entries(peer, self._is_on_link)
            table.put_objects(subnets, rank, found.targets, found.problems)
        else:
            table.put(subnets, rank, backend.desired(own, (peer,), self._is_on_link))

    def public_addresses(self) -> frozenset[IPAddress]:
        """Return the announced addresses of all peers."""
        announced = (peer.attrs.public(family) for peer in self._peers.peers.values() for family in FAMILIES)
        return frozenset(address for address in announced if address is not None)

    def refused(self) -> dict[str, str]:
        """Return the leases that are no peers, or not in every family, with the reason; log what is new."""
        found = {lease.key: f"lease {lease.key} skipped: {why}" for lease, why in self._peers.refused.values()}
        for key, text in found.items():
            self._reporter.problem(key, text)
        self._reporter.forget_except(found.keys())
        return found

    def _is_on_link(self, address: IPAddress) -> bool:
        """Whether a peer is reached directly: inside a prefix of the interface, and by the kernel's own word.

        The prefix alone would miss a more specific route through a VPN; the
        route alone would take a point-to-point device for a shared segment.
        """
        known, interface = self._on_link.get(address), self._interface
        if known is None and interface is not None:
            known = any(address.version == prefix.version and address in prefix for prefix in interface.prefixes)
            if known:
                try:
                    route = self._kernel.lookup(address)
                    known = route.gateway is None and route.device == interface.name
                except KernelError:
                    known = False
            self._on_link[address] = known
        return bool(known)


def _blackholes(own: Subnets, setting: Setting) -> frozenset[Route]:
    return frozenset(blackhole(net) for net in map(own.of, setting.config.families) if net is not None)
