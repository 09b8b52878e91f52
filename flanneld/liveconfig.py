"""Which changes of the network config a running daemon follows, and which need a restart."""

from __future__ import annotations

from collections.abc import Mapping

from subnet.model import FAMILIES, Json, NetworkConfig

LIVE_OPTIONS: Mapping[str, frozenset[str]] = {
    "ipip": frozenset({"directrouting"}),
    "vxlan": frozenset({"mtu", "directrouting", "learning"}),
}
"""Backend members, lower-cased, that can change under way; every other member cannot."""


def restart_reason(old: NetworkConfig, new: NetworkConfig) -> str:
    """Return what of the change needs a restart, for people; empty: it can be followed live."""
    reasons: list[str] = []
    for family in FAMILIES:
        before, after = old.pool(family), new.pool(family)
        was, now = before and before.network, after and after.network
        if was != now:
            reasons.append(f"IPv{family} network {was or 'off'} -> {now or 'off'}")
    if old.enable_nftables != new.enable_nftables:
        reasons.append(f"EnableNFTables {old.enable_nftables} -> {new.enable_nftables}")
    if old.backend.type != new.backend.type:
        reasons.append(f"Backend.Type {old.backend.type} -> {new.backend.type}")
    else:
        live = LIVE_OPTIONS.get(old.backend.type, frozenset()) | {"type"}
        before_options, after_options = _folded(old.backend.options), _folded(new.backend.options)
        reasons += [
            f"Backend.{name} {before_options.get(name)} -> {after_options.get(name)}"
            for name in sorted(before_options.keys() | after_options.keys())
            if name not in live and before_options.get(name) != after_options.get(name)
        ]
    return ", ".join(reasons)


def _folded(options: Mapping[str, Json]) -> dict[str, Json]:
    return {name.lower(): value for name, value in options.items()}
