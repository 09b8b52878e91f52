"""The network config: JSON text to NetworkConfig, or an error that says what to write instead.

Source: upstream Documentation/configuration.md and pkg/subnet/config.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from subnet.errors import ConfigError
from subnet.gojson import JsonError, folded, loads, show
from subnet.iptext import network_at, network_of, parse_cidr, parse_ip
from subnet.model import BackendConfig, Family, IPAddress, IPNetwork, Json, NetworkConfig, Pool
from subnet.options import unknown_keys, unknown_options


@dataclass(frozen=True, slots=True)
class _FamilyKeys:
    """Names of one family's members, and the lengths upstream allows."""

    family: Family
    name: str
    enable: str
    network: str
    length: str
    minimum: str
    maximum: str
    longest: int
    default_length: int
    null_bounds: bool
    """Whether null means "not given" for the bounds; for IPv4 it is an error."""

    @property
    def ranges(self) -> tuple[str, str, str]:
        """Return the members that shape the pool inside the network."""
        return self.length, self.minimum, self.maximum


_V4 = _FamilyKeys(4, "IPv4", "EnableIPv4", "Network", "SubnetLen", "SubnetMin", "SubnetMax", 30, 24, null_bounds=False)
_V6 = _FamilyKeys(
    6, "IPv6", "EnableIPv6", "IPv6Network", "IPv6SubnetLen", "IPv6SubnetMin", "IPv6SubnetMax", 126, 64, null_bounds=True
)
_KNOWN = (
    *("EnableIPv4", "EnableIPv6", "EnableNFTables", "Backend"),
    *(name for keys in (_V4, _V6) for name in (keys.network, *keys.ranges)),
)
_MIN_SUBNET_BITS = 2
"""A network has room for at least four subnets."""


def parse_network_config(text: str | bytes, where: str, *, check_pools: bool = True) -> NetworkConfig:
    """Return the network config. Raises ConfigError, whose text starts with ``where``.

    ``where`` is the key or file that the text comes from. Without
    ``check_pools``, as with the Kubernetes manager, subnet lengths and ranges
    are parsed but not used, and the pool is the whole network.
    """
    try:
        return _parse(loads(text), check_pools)
    except (ConfigError, JsonError) as error:
        raise ConfigError(f"{where}: {error}") from error


def _parse(document: Json, check_pools: bool) -> NetworkConfig:
    if not isinstance(document, dict):
        raise ConfigError(f"must be a JSON object, not {show(document)}")
    members = folded(document, _KNOWN)
    backend = _backend(members)
    pools = {keys.family: _pool(members, keys, check_pools) for keys in (_V4, _V6)}
    enabled = {_V4: _boolean(members, _V4.enable, True), _V6: _boolean(members, _V6.enable, False)}
    if not any(enabled.values()):
        raise ConfigError("EnableIPv4 false: both address families are off; set EnableIPv4 or EnableIPv6 to true")
    for keys, on in enabled.items():
        if on and pools[keys.family] is None:
            raise ConfigError(f"{keys.network} is missing: {keys.name} is enabled and needs a CIDR")
    warnings = (
        *unknown_keys("", document, _KNOWN),
        *unknown_options(backend),
        *(() if "Backend" in members else ("no Backend is given: udp is used, as every flannel node does",)),
        *(() if check_pools else _unused_ranges(members)),
    )
    return NetworkConfig(
        ipv4=pools[4] if enabled[_V4] else None,
        ipv6=pools[6] if enabled[_V6] else None,
        backend=backend,
        enable_nftables=_boolean(members, "EnableNFTables", False),
        warnings=warnings,
    )


def _backend(members: Mapping[str, Json]) -> BackendConfig:
    if "Backend" not in members:
        return BackendConfig("udp", {})
    options = members["Backend"]
    if options is None:
        return BackendConfig("", {})
    if not isinstance(options, dict):
        raise ConfigError(f"Backend {show(options)}: must be a JSON object")
    backend_type = folded(options, ("Type",)).get("Type")
    if backend_type is None:
        return BackendConfig("", options)
    if not isinstance(backend_type, str):
        raise ConfigError(f"Backend.Type {show(backend_type)}: must be a string")
    return BackendConfig(backend_type.lower(), options)


def _unused_ranges(members: Mapping[str, Json]) -> tuple[str, ...]:
    given = [name for keys in (_V4, _V6) for name in keys.ranges if members.get(name) is not None]
    if not given:
        return ()
    return (
        f"{', '.join(given)}: ignored with the Kubernetes subnet manager, where a node's subnet is its podCIDR; "
        "its size is set by --node-cidr-mask-size of kube-controller-manager",
    )


def _pool(members: Mapping[str, Json], keys: _FamilyKeys, check_pools: bool) -> Pool | None:
    """Return the pool, None without a network. A family that is off is checked no further than its syntax."""
    network = _network(members, keys)
    length = _length(members, keys)
    low, high = _bound(members, keys, keys.minimum), _bound(members, keys, keys.maximum)
    if network is None or not _boolean(members, keys.enable, keys is _V4):
        return None
    if network.prefixlen == 0:
        raise ConfigError(f'{keys.network} "{network}": the whole address space cannot be a pod network')
    if not check_pools:
        return Pool(network, network.prefixlen, network, network)
    pool = _whole_pool(network, _checked_length(network, length, keys))
    if low is not None:
        pool = replace(pool, first=_aligned(low, pool, keys.minimum))
    if high is not None:
        pool = replace(pool, last=_aligned(high, pool, keys.maximum))
    if int(pool.first.network_address) > int(pool.last.network_address):
        raise _empty_range(pool, keys, low is not None)
    return pool


def _whole_pool(network: IPNetwork, subnet_len: int) -> Pool:
    step = 1 << (network.max_prefixlen - subnet_len)
    # The first subnet is skipped unless asked for: its address is the network's own.
    first = network_at(int(network.network_address) + step, subnet_len, network.version)
    last = network_at(int(network.broadcast_address) + 1 - step, subnet_len, network.version)
    return Pool(network, subnet_len, first, last)


def _checked_length(network: IPNetwork, length: int | None, keys: _FamilyKeys) -> int:
    shortest = network.prefixlen + _MIN_SUBNET_BITS
    if shortest > keys.longest:
        raise ConfigError(
            f'{keys.network} "{network}": too small to be split into subnets; '
            f"the nearest legal prefix length is {keys.longest - _MIN_SUBNET_BITS}"
        )
    if length is None:
        return max(keys.default_length, shortest)
    if not shortest <= length <= keys.longest:
        nearest = min(max(length, shortest), keys.longest)
        raise ConfigError(
            f"{keys.length} {length}: must be {shortest} to {keys.longest} for {keys.network} {network}; "
            f"the nearest legal value is {nearest}"
        )
    return length


def _aligned(address: IPAddress, pool: Pool, name: str) -> IPNetwork:
    """Return the subnet that starts at the address. Raises ConfigError with the nearest one if none does."""
    subnet = network_of(address, pool.subnet_len)
    inside = address in pool.network
    if inside and subnet.network_address == address:
        return subnet
    base, size, step = int(pool.network.network_address), pool.network.num_addresses, subnet.num_addresses
    rounded = (int(address) - base + step // 2 - 1) // step * step
    nearest = network_at(base + min(max(rounded, 0), size - step), pool.subnet_len, address.version)
    reason = f"is not the start of a /{pool.subnet_len} subnet" if inside else f"is outside {pool.network}"
    raise ConfigError(f'{name} "{address}": {reason}; the nearest legal value is {nearest.network_address}')


def _empty_range(pool: Pool, keys: _FamilyKeys, low_given: bool) -> ConfigError:
    low, high = pool.first.network_address, pool.last.network_address
    if low_given:
        return ConfigError(f'{keys.minimum} "{low}": is above {keys.maximum} {high}; the nearest legal value is {high}')
    return ConfigError(
        f'{keys.maximum} "{high}": is below the first subnet {low}; the nearest legal value is {low}, '
        f"unless {keys.minimum} is given"
    )


def _network(members: Mapping[str, Json], keys: _FamilyKeys) -> IPNetwork | None:
    if keys.network not in members:
        return None
    value = members[keys.network]
    shown = f"{keys.network} {show(value)}"
    if not isinstance(value, str):
        raise ConfigError(f"{shown}: must be a CIDR in a string, such as {_example(keys)}")
    try:
        network = parse_cidr(value)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from error
    if network.version != keys.family:
        raise ConfigError(f"{shown}: must be an {keys.name} CIDR")
    return network


def _example(keys: _FamilyKeys) -> str:
    return "10.244.0.0/16" if keys.family == 4 else "fd00:10:244::/48"


def _length(members: Mapping[str, Json], keys: _FamilyKeys) -> int | None:
    value = members.get(keys.length)
    if value is None:
        return None
    # JSON true is a Python int, 24.0 and 1e1 are floats: Go refuses all three.
    if type(value) is not int or value < 0:
        raise ConfigError(
            f"{keys.length} {show(value)}: must be a whole number of bits without sign, fraction, exponent or quotes"
        )
    return value


def _bound(members: Mapping[str, Json], keys: _FamilyKeys, name: str) -> IPAddress | None:
    if name not in members or (members[name] is None and keys.null_bounds):
        return None
    value = members[name]
    shown = f"{name} {show(value)}"
    if not isinstance(value, str):
        raise ConfigError(f"{shown}: must be an IP address in a string")
    try:
        address = parse_ip(value)
    except ValueError as error:
        raise ConfigError(f"{shown}: {error}") from error
    if address.version != keys.family:
        raise ConfigError(f"{shown}: must be an {keys.name} address")
    return address


def _boolean(members: Mapping[str, Json], name: str, default: bool) -> bool:
    value = members.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ConfigError(f"{name} {show(value)}: must be true or false")
    return value
