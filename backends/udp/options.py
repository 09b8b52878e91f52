"""What every data path of the udp backend has in common: options, lease, MTU, and which peers are its own."""

from __future__ import annotations

from collections.abc import Collection
from ipaddress import IPv4Network
from typing import Final

from backends.api import Setting
from backends.udp.packet import OVERHEAD_BYTES
from subnet.errors import ConfigError
from subnet.model import Lease, LeaseAttrs
from subnet.options import OptionReader

DEFAULT_PORT: Final = 8285
DATA_PATHS: Final = ("auto", "user", "fou")
PLANNED_DATA_PATHS: Final = ("bpf",)


def data_path(setting: Setting) -> str:
    """Return ``user`` or ``fou``. Raises ConfigError for others.

    ``auto`` is ``user``: what a kernel's carrier sends is not whole on every
    link, so it has to be asked for.
    """
    text = OptionReader(setting.config.backend).text("DataPath", "auto")
    name = text.lower()
    if name in PLANNED_DATA_PATHS:
        raise ConfigError(f"Backend.DataPath {text!r} is not available in this version; it has {', '.join(DATA_PATHS)}")
    if name not in DATA_PATHS:
        raise ConfigError(f"Backend.DataPath {text!r} is unknown; this version has {', '.join(DATA_PATHS)}")
    return "user" if name == "auto" else name


def carried(lease: Lease) -> bool:
    """Whether packets can be sent to a lease's node: those of this backend name no type.

    Upstream does not look at the type; but a node with another backend listens
    at no such port, and its packets would vanish without an error.
    """
    return not lease.attrs.backend_type


class Common:
    """The options and what follows from them. Raises ConfigError for those that cannot be used."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        pool, local = setting.config.ipv4, setting.interface.v4
        if pool is None or not isinstance(pool.network, IPv4Network):
            raise ConfigError("Backend.Type 'udp' carries IPv4 only, which the config does not enable")
        if local is None:
            raise ConfigError(f"{setting.interface.name} has no IPv4 address, which the config enables")
        self.network, self.local = pool.network, local
        self.port = OptionReader(setting.config.backend).integer("Port", DEFAULT_PORT, 1, 65535)
        self.mtu_bytes = setting.interface.mtu_bytes - OVERHEAD_BYTES

    def attrs(self) -> LeaseAttrs:
        """Return the announced address alone: upstream's leases of this backend name no type either."""
        return LeaseAttrs(self._setting.interface.public_v4)

    def carried(self, peers: Collection[Lease]) -> list[Lease]:
        """Return the peers that packets can be sent to."""
        return [lease for lease in peers if carried(lease)]

    def problems(self, peers: Collection[Lease]) -> tuple[tuple[str, str], ...]:
        """Return what is not connected, with the reason."""
        found = [
            (lease.key, f"lease {lease.key} skipped: its node runs backend {lease.attrs.backend_type!r}")
            for lease in peers
            if not carried(lease)
        ]
        if self._setting.config.ipv6 is not None:
            network = self._setting.config.ipv6.network
            found.append(("IPv6Network", f"backend udp carries IPv4 only: {network} is not connected"))
        return tuple(found)
