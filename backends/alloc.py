"""Backend ``alloc``: takes a subnet and leaves carrying it to others."""

from __future__ import annotations

from collections.abc import Collection, Mapping

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
        return self._setting.interface.attrs(self._setting.config.families)

    def mtu_bytes(self) -> int:
        """The external interface's MTU."""
        return self._setting.interface.mtu_bytes

    def desired(self, own: Subnets, peers: Collection[Lease], on_link: OnLink) -> DesiredState:
        """Nothing; the routes that carry the packets are somebody else's, and may look like Go flannel's."""
        return DesiredState(frozenset(), self._setting.interface.name, self._setting.networks, alone=False)


BACKEND = AllocBackend
