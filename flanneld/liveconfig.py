"""Which changes of the network config a running daemon follows, and which need a restart."""

from __future__ import annotations

from collections.abc import Mapping

from subnet.gojson import SECRETS, fold
from subnet.model import FAMILIES, Json, NetworkConfig, Subnets

LIVE_OPTIONS: Mapping[str, frozenset[str]] = {
    "ipip": frozenset({"directrouting"}),
    "vxlan": frozenset({"mtu", "directrouting", "learning"}),
    "wireguard": frozenset({"mtu", "persistentkeepaliveinterval", "psk"}),
}
"""Backend members, lower-cased, that can change under way; every other member cannot."""


def restart_reason(old: NetworkConfig, new: NetworkConfig, own: Subnets) -> str:
    """Return what of the change needs a restart, for people; empty: it can be followed live.

    A range of subnets that no longer holds ours needs one: to move at once
    would cut off every container of the host.
    """
    reasons: list[str] = []
    for family in FAMILIES:
        before, after, subnet = old.pool(family), new.pool(family), own.of(family)
        was, now = before and before.network, after and after.network
        if was != now:
            reasons.append(f"IPv{family} network {was or 'off'} -> {now or 'off'}")
        elif before and after and before.holds(subnet) and not after.holds(subnet):
            text = f"{after.first} to {after.last}" if after.first != after.last else f"{after.first} alone"
            reasons.append(f"IPv{family} subnets are {text}, ours is {subnet}")
    if old.backend.type != new.backend.type:
        reasons.append(f"Backend.Type {old.backend.type} -> {new.backend.type}")
    else:
        live = LIVE_OPTIONS.get(old.backend.type, frozenset()) | {"type"}
        before_options, after_options = _folded(old.backend.options), _folded(new.backend.options)
        reasons += [
            f"Backend.{name} {_shown(name, before_options)} -> {_shown(name, after_options)}"
            for name in sorted(before_options.keys() | after_options.keys())
            if name not in live and before_options.get(name) != after_options.get(name)
        ]
    return ", ".join(reasons)


def _shown(name: str, options: Mapping[str, Json]) -> str:
    return "(not shown)" if name in SECRETS else str(options.get(name))


def _folded(options: Mapping[str, Json]) -> dict[str, Json]:
    return {fold(name): value for name, value in options.items()}
