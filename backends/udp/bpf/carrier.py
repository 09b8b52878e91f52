"""Has the programs of data path bpf beside a pump, and keeps both as wanted."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address

from backends.dataplane.model import Link
from backends.dataplane.ports import Kernel
from backends.kernel import ethtool
from backends.kernel.fdstore import FdStore
from backends.udp.bpf.programs import Programs, Settings
from backends.udp.carrier import CarrierSpec, UdpCarrier, next_hops
from backends.udp.finished import Unfinished, refuse_unfinished
from subnet.errors import KernelError
from subnet.model import Lease, Subnets

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BpfSpec(CarrierSpec):
    """What makes a carrier with programs: beside the rest the external interface."""

    external: str = ""
    external_index: int = 0


class BpfCarrier(UdpCarrier):
    """Programs carry everyday packets, the pump what they pass on. Programs and device outlive the process."""

    def __init__(
        self,
        spec: BpfSpec,
        *,
        native: bool | None = None,
        store: FdStore | None = None,
        unfinished: Unfinished = ethtool.unfinished,
    ) -> None:
        super().__init__(spec, native=native, store=store)
        self._where, self._unfinished = spec, unfinished
        self._programs: Programs | None = None
        self._known = False
        """Whether the programs know the peers: before that they must not take the place of an earlier run's."""

    def hooked(self) -> frozenset[int]:
        """Return the devices that programs belong to, by index."""
        running = self._running
        return frozenset({self._where.external_index} | ({running.index} if running is not None else set()))

    def stats(self) -> Mapping[str, int]:
        """Return the pump's counters and the programs', none while there are none."""
        with suppress(KernelError):
            if self._programs is not None:
                return {**super().stats(), **self._programs.stats()}
        return super().stats()

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        """Return the TUN by name; what was damaged is mended. Raises KernelError, too, where this cannot work."""
        spec = self._where
        refuse_unfinished("bpf", spec.external, self._unfinished)
        external = kernel.links().get(spec.external)
        if external is None or external.index != spec.external_index:
            raise KernelError("find", f"device {spec.external} of index {spec.external_index}", 0, "it has gone")
        if not external.mac:
            reason = "it is not Ethernet, and the programs know nothing else"
            raise KernelError("use", f"DataPath bpf on {spec.external}", 0, reason)
        if self._programs is None:
            self._programs = Programs()
        links = super().ensure(kernel)
        (tun,) = links.values()
        local = spec.local
        if not isinstance(local, IPv4Address):
            raise TypeError(f"{local} is no IPv4 address")
        self._programs.load(
            Settings(local, spec.port, spec.external_index, tun.index, spec.mtu_bytes, spec.allow_unknown)
        )
        if self._known:
            self._attach()
        return links

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """Tell pump and programs which subnet is behind which address. Raises KernelError."""
        super().carry(own, peers, complete)
        if self._programs is not None and own.v4 is not None:
            self._programs.know(next_hops(peers, 4))
            if not self._known and (complete or not self._programs.at_work()):
                self._attach()
                self._known = True

    def _attach(self) -> None:
        if self._programs is not None:
            for one in self._programs.attach():
                log.info("%s attached", one)

    def discard(self) -> None:
        """End everything for good; device, addresses, routes and programs go."""
        if self._programs is not None:
            try:
                self._programs.detach()
            except KernelError as error:
                log.warning("%s", error)
        super().discard()

    def close(self) -> None:
        """End the pump; programs and device stay, and go on carrying."""
        super().close()
        programs, self._programs, self._known = self._programs, None, False
        if programs is not None:
            with suppress(KernelError):
                log.debug("programs left at work: %s", programs.stats())
            programs.close()
