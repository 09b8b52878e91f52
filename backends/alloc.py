"""Backend ``alloc``: takes a subnet and leaves carrying it to others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from ipaddress import IPv4Address, IPv6Address

from backends.api import OnLink, Setting
from backends.dataplane.model import DesiredState, Link, LinkSpec
from subnet.model import Lease, LeaseAttrs, Subnets


class AllocBackend:
    """A lease and nothing else. Source: upstream pkg/backend/alloc/alloc.go."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def links(self, macs: Mapping[str, str], binding: bool) -> tuple[LinkSpec, ...]:
        """No device."""
        return ()

    def device_macs(self, attrs: LeaseAttrs) -> dict[str, str]:
        """No device, no MAC."""
        return {}

    def attrs(self, links: Mapping[str, Link]) -> LeaseAttrs:
        """The announced addresses, without a backend type."""
        interface, families = self._setting.interface, self._setting.config.families
        v4: IPv4Address | None = interface.public_v4 if 4 in families else None
        v6: IPv6Address | None = interface.public_v6 if 6 in families else None
        return LeaseAttrs(v4, v6)

    def mtu_bytes(self) -> int:
        """The external interface's MTU."""
        return self._setting.interface.mtu_bytes

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Nothing, and no route there is ours: those that carry the packets may look like Go flannel's."""
        return DesiredState(frozenset(), self._setting.interface.name, frozenset())


BACKEND = AllocBackend
