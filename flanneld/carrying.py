"""Drives the carrier of a backend that has one: started, told of peers, asked for trouble, closed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from backends.api import Backend, Carrier, CarryingBackend, Setting
from backends.dataplane.model import Link
from backends.dataplane.ports import Kernel
from backends.kernel.fdstore import process_store
from flanneld.peering import Peering
from subnet.clock import Clock
from subnet.model import Subnets
from subnet.report import Reporter

log = logging.getLogger(__name__)


class Carrying:
    """At most one carrier. ``wake`` is called from any thread when one of its answers has changed."""

    def __init__(self, kernel: Kernel, clock: Clock, wake: Callable[[], None]) -> None:
        self._kernel, self._wake = kernel, wake
        self._reporter = Reporter(log, clock, again_s=600)
        self._carrier: Carrier | None = None
        self._for: tuple[Setting, Subnets, bool] | None = None
        self.links: Mapping[str, Link] = {}
        """The devices that the carrier holds."""
        self.problems: Mapping[str, str] = {}
        """Leases in trouble, by key, with the reason."""

    def ensure(self, backend: Backend) -> None:
        """Have the carrier that the backend wants, and what it needs before the lease. Raises KernelError."""
        earlier = self._carrier
        if isinstance(backend, CarryingBackend):
            self._carrier = backend.carrier(earlier, self._wake)
        else:
            self.close()
            self._carrier, self.problems = None, {}
        if self._carrier is not earlier:
            self._for = None
        self.links = self._carrier.ensure(self._kernel) if self._carrier is not None else {}
        process_store().forget_untaken()

    def unprepared(self) -> str:
        """Return why it is not known yet what peers must be told; empty: it is."""
        return self._carrier.unprepared() if self._carrier is not None else ""

    def carry(self, peering: Peering, backend: Backend, setting: Setting, own: Subnets) -> str:
        """Tell the carrier what to carry; return why packets do not flow yet, empty if they do."""
        carrier = self._carrier
        if carrier is None:
            return ""
        complete = peering.leases.complete
        if peering.moved or self._for != (setting, own, complete):
            carrier.carry(own, peering.peers(backend, setting, own), complete)
            self._for = (setting, own, complete)
        self.problems = carrier.problems()
        for topic, text in self.problems.items():
            self._reporter.problem(topic, text)
        self._reporter.forget_except(self.problems)
        return carrier.unready()

    def hooked(self) -> frozenset[int]:
        """Return the devices that programs of the carrier belong to, by index."""
        return self._carrier.hooked() if self._carrier is not None else frozenset()

    def close(self) -> None:
        """End the carrier, if there is one."""
        if self._carrier is not None:
            self._carrier.close()
