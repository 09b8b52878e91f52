"""What charon is told of each peer: pure values, upstream's names and parameters."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network
from typing import Any, Final

from subnet.errors import LeaseDataError
from subnet.model import Lease

TYPE: Final = "ipsec"
IKE_PROPOSAL: Final = "aes256-sha256-modp4096"
ESP_PROPOSAL: Final = "aes128gcm16-sha256-prfsha256-ecp256"
REQID: Final = 11
DPD_DELAY_S: Final = 30
"""Upstream sets none, and so never learns that a peer is dead."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What all connections of this node have in common.

    ``local`` is the interface's own address, ``public`` the announced one, by
    which peers know us.
    """

    local: IPv4Address
    public: IPv4Address
    psk: str = field(repr=False)
    encap: bool
    proposal: str = ESP_PROPOSAL


@dataclass(frozen=True, slots=True)
class End:
    """A peer: its announced address and its subnet."""

    address: IPv4Address
    subnet: IPv4Network


def peer_end(lease: Lease) -> End:
    """Return the end that a lease of this backend stands for. Raises LeaseDataError."""
    if lease.subnets.v4 is None:
        raise LeaseDataError("no IPv4 subnet")
    if lease.attrs.public_ip is None:
        raise LeaseDataError("no public IPv4 address")
    return End(lease.attrs.public_ip, lease.subnets.v4)


@dataclass(frozen=True, slots=True)
class Connection:
    """The tunnel to one peer, as charon gets it (VICI, load-conn)."""

    terms: Terms
    own: IPv4Network
    peer: End

    @property
    def name(self) -> str:
        """Return the connection's name, upstream's."""
        return f"{self.terms.public}-{self.own}-{self.peer.subnet}-{self.peer.address}"

    @property
    def child(self) -> str:
        """Return the name of the only child."""
        return f"{self.own}-{self.peer.subnet}"

    def message(self) -> dict[str, Any]:
        """Return the message of load-conn.

        Kernel policies are ours, not charon's. Source: upstream
        pkg/backend/ipsec/handle_charon.go, LoadConnection.
        """
        terms = self.terms
        local: dict[str, Any] = {"auth": "psk"}
        if terms.local != terms.public:
            local["id"] = str(terms.public)
        child = {
            "local_ts": [str(self.own)],
            "remote_ts": [str(self.peer.subnet)],
            "esp_proposals": [terms.proposal],
            "mode": "tunnel",
            "reqid": str(REQID),
            "rekey_time": "1h",
            "start_action": "start",
            "close_action": "trap",
            "dpd_action": "restart",
            "policies": "no",
        }
        connection = {
            "local_addrs": [str(terms.local)],
            "remote_addrs": [str(self.peer.address)],
            "proposals": [IKE_PROPOSAL],
            "version": "2",
            "keyingtries": "0",
            "encap": "yes" if terms.encap else "no",
            "dpd_delay": f"{DPD_DELAY_S}s",
            "local": local,
            "remote": {"auth": "psk"},
            "children": {self.child: child},
        }
        return {self.name: connection}


_ADDRESS: Final = r"\d+\.\d+\.\d+\.\d+"
_NAME: Final = re.compile(rf"({_ADDRESS})(?:-{_ADDRESS}/\d+){{2}}-({_ADDRESS})")


def ours(name: str, terms: Terms) -> bool:
    """Whether a connection has a name as we give them."""
    found = _NAME.fullmatch(name)
    return found is not None and found[1] == str(terms.public)


def peer_of(name: str) -> IPv4Address:
    """Return the peer's address in the name of a connection of ours."""
    return IPv4Address(name.rpartition("-")[2])


def connections(terms: Terms, own: IPv4Network | None, leases: Collection[Lease]) -> dict[str, Connection]:
    """Return the connections to these peers by name; leases that cannot be used are somebody else's to report."""
    found = {}
    for lease in leases:
        if own is None or lease.attrs.backend_type != TYPE:
            continue
        try:
            connection = Connection(terms, own, peer_end(lease))
        except LeaseDataError:
            continue
        found[connection.name] = connection
    return found


@dataclass(frozen=True, slots=True)
class Steps:
    """What charon is to be told, in this order: ``drop`` are names."""

    drop: tuple[str, ...]
    load: tuple[Connection, ...]


def steps(loaded: Mapping[str, Connection | None], wanted: Mapping[str, Connection]) -> Steps:
    """Compare. What charon has of an earlier run is known by name alone (None) and is loaded again, which keeps it."""
    drop = tuple(sorted(loaded.keys() - wanted.keys()))
    return Steps(drop, tuple(wanted[name] for name in sorted(wanted) if loaded.get(name) != wanted[name]))


@dataclass(frozen=True, slots=True)
class Association:
    """What list-sas says of a connection: whether charon negotiates, and whether packets can pass."""

    negotiating: bool
    installed: bool


SILENT_AFTER_S: Final = 20.0
"""Charon repeats a message after 4 and 11 s; a peer that answers none of them will not soon."""


@dataclass(slots=True)
class Watch:
    """Since when each connection has had no association; seconds of a monotonic clock."""

    since: dict[str, float] = field(default_factory=dict)

    def see(self, wanted: Collection[str], found: Mapping[str, Association], now: float) -> tuple[str, ...]:
        """Take in what there is; return the connections that nobody negotiates, to be begun again."""
        idle = []
        for name in [name for name in self.since if name not in wanted]:
            del self.since[name]
        for name in wanted:
            association = found.get(name)
            if association is not None and association.installed:
                self.since.pop(name, None)
                continue
            self.since.setdefault(name, now)
            if association is None or not association.negotiating:
                idle.append(name)
        return tuple(sorted(idle))

    def silent(self, now: float) -> tuple[str, ...]:
        """Return the connections that have had none for too long."""
        return tuple(sorted(name for name, since in self.since.items() if now - since >= SILENT_AFTER_S))
