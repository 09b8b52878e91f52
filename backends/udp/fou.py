"""Data path ``fou``: the kernel puts packets into UDP datagrams and takes them out; none passes through a process.

On the wire it is what the pumps send: one plain IPv4 packet per datagram.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from ipaddress import IPv4Address, IPv4Interface
from typing import Final

from backends.api import Carrier, OnLink, Setting
from backends.dataplane.model import Address, DesiredState, Ipip, Link, LinkSpec, Route
from backends.dataplane.ports import Kernel
from backends.kernel import ethtool, fou
from backends.kernel.fdstore import FdStore, process_store
from backends.kernel.fou import FouPort
from backends.udp import options
from backends.udp.finished import Unfinished, refuse_unfinished
from backends.udp.options import carried, foreign
from subnet.errors import ConfigError, KernelError
from subnet.model import Lease, LeaseAttrs, Subnets

log = logging.getLogger(__name__)

DEVICE: Final = "flannel.fou"


class FouBackend:
    """One tunnel device for all peers, one port, and a route per peer that names its public address as gateway."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        address = options.local(setting, 4) if setting.config.ipv4 else None
        if not isinstance(address, IPv4Address):
            raise ConfigError("Backend.DataPath 'fou' carries IPv4 only, which the config does not enable")
        self._port = FouPort(address, options.port(setting))
        self._mtu_bytes = options.mtu_bytes(setting, 4)

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """The device; its packets go to and come from the port of every node."""
        tunnel = Ipip(self._port.local, fou_port=self._port.port)
        return (LinkSpec(DEVICE, 4, tunnel, self.mtu_bytes()),)

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """The device has no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The announced address alone, as with every data path."""
        return LeaseAttrs(self._setting.interface.public_v4)

    def mtu_bytes(self) -> int:
        """The external interface's MTU less the outer headers."""
        return self._mtu_bytes

    def carrier(self, earlier: Carrier | None, wake: Callable[[], None]) -> Carrier:
        """Return what keeps the port open; an earlier one of another address is closed for good."""
        interface = self._setting.interface.name
        if isinstance(earlier, FouCarrier):
            if (earlier.port, earlier.interface) == (self._port, interface):
                return earlier
            earlier.remove()
        elif earlier is not None:
            earlier.close()
        return FouCarrier(self._port, interface)

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """The device's address, and a route per peer."""
        addresses = frozenset(
            {Address(DEVICE, IPv4Interface((own.v4.network_address, own.v4.max_prefixlen)))} if own.v4 else ()
        )
        routes = frozenset(
            Route(lease.subnets.v4, DEVICE, lease.attrs.public_ip, onlink=True)
            for lease in peers
            if carried(lease) and lease.subnets.v4 is not None and lease.attrs.public_ip is not None
        )
        return DesiredState(
            frozenset({DEVICE}),
            self._setting.interface.name,
            self._setting.networks,
            addresses,
            routes=routes,
            problems=self._problems(peers),
        )

    def _problems(self, peers: Collection[Lease]) -> tuple[tuple[str, str], ...]:
        pool = self._setting.config.ipv6
        if pool is None:
            return foreign(peers)
        text = f"data path fou carries IPv4 only: {pool.network} is not connected"
        return (*foreign(peers), ("IPv6Network", text))


class FouCarrier(Carrier):
    """Keeps the port open. Port and device stay when the process ends, and go on carrying."""

    def __init__(
        self,
        port: FouPort,
        interface: str,
        unfinished: Unfinished = ethtool.unfinished,
        store: FdStore | None = None,
    ) -> None:
        self.port, self.interface, self._unfinished = port, interface, unfinished
        self._store = process_store() if store is None else store

    def ensure(self, kernel: Kernel) -> dict[str, Link]:
        """Open the port unless it is open. Raises KernelError, too, where packets would not arrive whole."""
        refuse_unfinished("fou", self.interface, self._unfinished)
        if not any(there.covers(self.port) for there in fou.ports()):
            # Data path user may have left its socket, which is bound to the same port.
            self._store.forget_untaken()
            fou.add(self.port)
            log.info("%s added", self.port)
        return {}

    def carry(self, own: Subnets, peers: Collection[Lease], complete: bool = True) -> None:
        """The kernel's routes say everything."""

    def remove(self) -> None:
        """Close the port for good."""
        try:
            fou.remove(self.port)
            log.info("%s removed", self.port)
        except KernelError as error:
            log.warning("%s", error)

    def close(self) -> None:
        """Leave the port open: the data path outlives the daemon."""
