"""The external interface over time: chosen, kept, followed when the host changes."""

from __future__ import annotations

import logging
from dataclasses import replace

from backends.api import ExternalInterface
from backends.dataplane.ports import Kernel
from flanneld.extiface import HostView, Wish, choose, still_there
from subnet.clock import Clock
from subnet.model import Family, IPAddress, NetworkConfig

log = logging.getLogger(__name__)

SETTLE_S = 2.0
"""A changed address is followed only when it has stayed away for so long."""


class Underlay:
    """Looks at the host when told to, and makes as little change as possible."""

    def __init__(self, kernel: Kernel, wish: Wish, clock: Clock) -> None:
        self._kernel, self._wish, self._clock = kernel, wish, clock
        self._families: tuple[Family, ...] = ()
        self._doubted = True
        self._away_since: float | None = None
        self.interface: ExternalInterface | None = None
        """The interface in use, None before the first choice."""
        self.addresses: frozenset[IPAddress] = frozenset()
        """Addresses of the whole host, loopback ones left out."""

    def wish(self, wish: Wish) -> bool:
        """Choose by this wish from now on; returns whether it is another one."""
        if wish == self._wish:
            return False
        self._wish, self._families = wish, ()
        return True

    def doubt(self) -> None:
        """Look at the host again before the interface is next used."""
        self._doubted = True

    @property
    def settled_at(self) -> float | None:
        """When a lost address has been away long enough to be given up; None: nothing is awaited."""
        return None if self._away_since is None else self._away_since + SETTLE_S

    def current(self, config: NetworkConfig) -> ExternalInterface:
        """Return the external interface for the config's families. Raises InterfaceError while there is none."""
        known = self.interface if self._families == config.families else None
        if known is not None and not self._doubted:
            return known
        kernel = self._kernel
        view = HostView(kernel.links(), kernel.addresses(), (), kernel.lookup)
        if known is not None and still_there(known, view):
            chosen = replace(
                known,
                mtu_bytes=view.links[known.name].mtu_bytes or known.mtu_bytes,
                prefixes=frozenset(a.interface.network for a in view.addresses if a.device == known.name),
            )
        elif known is not None and self._may_come_back(known, view):
            return known
        else:
            routes = sorted(kernel.default_routes(), key=str)
            chosen = choose(self._wish, config.families, replace(view, routes=routes))
        self._away_since = None
        self._doubted = False
        if chosen != known:
            log.info("external interface: %s", chosen)
        self.interface, self._families = chosen, config.families
        self.addresses = frozenset(a.interface.ip for a in view.addresses if a.scope != "host")
        return chosen

    def _may_come_back(self, known: ExternalInterface, view: HostView) -> bool:
        """Whether to wait a little: an address that is back within the settling time was never away."""
        link = view.links.get(known.name)
        if link is None or link.index != known.index:
            return False
        if self._away_since is None:
            self._away_since = self._clock.now()
            log.warning("the address of %s is gone; waiting %g s for it to come back", known.name, SETTLE_S)
        return self._clock.now() - self._away_since < SETTLE_S
