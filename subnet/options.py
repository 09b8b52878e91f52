"""Typed reading of the backend's own members of the network config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

from subnet.errors import ConfigError
from subnet.gojson import SECRETS, fold, show, unknown
from subnet.model import BackendConfig, Json

BACKEND_KEYS: Mapping[str, tuple[str, ...]] = {
    "vxlan": ("VNI", "Port", "MTU", "GBP", "Learning", "DirectRouting", "MacPrefix", "Name"),
    "host-gw": (),
    "ipip": ("DirectRouting",),
    "udp": ("Port", "DataPath"),
    "wireguard": ("ListenPort", "ListenPortV6", "MTU", "PSK", "PersistentKeepaliveInterval", "Mode"),
    "ipsec": ("PSK", "UDPEncap", "ESPProposal"),
    "extension": (
        "PreStartupCommand",
        "PostStartupCommand",
        "SubnetAddCommand",
        "SubnetRemoveCommand",
        "ShutdownCommand",
        "ExtensionShell",
        "CommandTimeout",
    ),
    "alloc": (),
    "tencent-vpc": ("AccessKeyID", "AccessKeySecret"),
}
"""Members of ``Backend`` beside ``Type`` that each backend type reads or knowingly ignores."""


class OptionReader:
    """Typed access to backend options: names match in any case, null means absent.

    Every getter raises ConfigError naming ``Backend.<name>`` and its value.
    """

    def __init__(self, backend: BackendConfig) -> None:
        self._members = {fold(name): value for name, value in backend.options.items()}

    def integer(self, name: str, default: int, minimum: int, maximum: int) -> int:
        """Return an integer within the bounds, both included."""
        value = self._members.get(fold(name))
        if value is None:
            return default
        # JSON true is a Python int, 1.0 and 1e3 are floats: Go refuses all three.
        if type(value) is not int:
            raise _bad(name, value, "must be a whole number without fraction, exponent or quotes")
        if not minimum <= value <= maximum:
            nearest = min(max(value, minimum), maximum)
            raise _bad(name, value, f"must be {minimum} to {maximum}; the nearest legal value is {nearest}")
        return value

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self._members.get(fold(name))
        if value is None:
            return default
        if not isinstance(value, bool):
            raise _bad(name, value, "must be true or false")
        return value

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self._members.get(fold(name))
        if value is None:
            return default
        if not isinstance(value, str):
            raise _bad(name, value, "must be a string")
        return value


def unknown_options(backend: BackendConfig) -> tuple[str, ...]:
    """Return one warning per member that the backend type does not read; none for an unknown type."""
    known = BACKEND_KEYS.get(backend.type)
    if known is None:
        return ()
    return unknown_keys("Backend.", backend.options, ("Type", *known))


def unknown_keys(prefix: str, members: Mapping[str, Json], known: Iterable[str]) -> tuple[str, ...]:
    """Return one warning per member with an unknown name, with the nearest known name if one is near."""
    by_folded = {fold(name): name for name in known}
    return tuple(_unknown_key(prefix, name, by_folded) for name in unknown(members, by_folded))


def _unknown_key(prefix: str, name: str, known: Mapping[str, str]) -> str:
    nearest = difflib.get_close_matches(fold(name), known, n=1)
    hint = f"; the nearest known key is {prefix}{known[nearest[0]]}" if nearest else ""
    return f"unknown key {show(prefix + name)} is ignored{hint}"


def _bad(name: str, value: Json, reason: str) -> ConfigError:
    shown = "(not shown)" if fold(name) in SECRETS else show(value)
    return ConfigError(f"Backend.{name} {shown}: {reason}")
