"""What every data path of the udp backend has in common: options, lease, MTU, and which peers are its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from backends.api import Setting
from backends.udp import packet, packet6
from subnet.errors import ConfigError
from subnet.model import Family, IPAddress, Lease
from subnet.options import OptionReader

DEFAULT_PORT: Final = 8285
OVERHEAD_BYTES: Final[Mapping[Family, int]] = {4: packet.OVERHEAD_BYTES, 6: packet6.OVERHEAD_BYTES}
MINIMUM_BYTES: Final[Mapping[Family, int]] = {4: 68, 6: 1280}
"""The least MTU that the kernel lets IPv4 and IPv6 work with (RFC 791, RFC 8200 s5)."""
DATA_PATHS: Final = ("auto", "user", "fou", "bpf")


def data_path(setting: Setting) -> str:
    """Return ``user``, ``fou`` or ``bpf``. Raises ConfigError for others.

    ``auto`` is ``user``: what a kernel's carrier sends is not whole on every
    link, so it has to be asked for.
    """
    text = OptionReader(setting.config.backend).text("DataPath", "auto")
    name = text.lower()
    if name not in DATA_PATHS:
        raise ConfigError(f"Backend.DataPath {text!r} is unknown; this version has {', '.join(DATA_PATHS)}")
    return "user" if name == "auto" else name


def carried(lease: Lease) -> bool:
    """Whether packets can be sent to a lease's node: those of this backend name no type.

    Upstream does not look at the type; but a node with another backend listens
    at no such port, and its packets would vanish without an error.
    """
    return not lease.attrs.backend_type


def foreign(peers: Collection[Lease]) -> tuple[tuple[str, str], ...]:
    """Return the leases of nodes with another backend, with what is said about them."""
    return tuple(
        (lease.key, f"lease {lease.key} skipped: its node runs backend {lease.attrs.backend_type!r}")
        for lease in peers
        if not carried(lease)
    )


def port(setting: Setting) -> int:
    """Return the UDP port of every node. Raises ConfigError."""
    return OptionReader(setting.config.backend).integer("Port", DEFAULT_PORT, 1, 65535)


def allow_unknown(setting: Setting) -> bool:
    """Return whether datagrams from addresses that are no peer's are taken. Raises ConfigError."""
    return OptionReader(setting.config.backend).boolean("AllowUnknown", False)


def local(setting: Setting, family: Family) -> IPAddress:
    """Return the interface's own address of a family that the config enables. Raises ConfigError if it has none."""
    address = setting.interface.local(family)
    if address is None:
        raise ConfigError(f"{setting.interface.name} has no IPv{family} address, which the config enables")
    return address


def mtu_bytes(setting: Setting, family: Family) -> int:
    """Return the external interface's MTU less the outer headers. Raises ConfigError if IP cannot work with it."""
    left = setting.interface.mtu_bytes - OVERHEAD_BYTES[family]
    if left < MINIMUM_BYTES[family]:
        text = f"MTU {setting.interface.mtu_bytes} of {setting.interface.name} is too small for IPv{family} tunnels"
        raise ConfigError(text)
    return left
