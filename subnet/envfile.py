"""subnet.env: how CNI plugins and Docker learn of the lease, and how the next run remembers it.

Source: upstream pkg/subnet/subnet.go, WriteSubnetFile and ReadCIDRFromSubnetFile.
"""

from __future__ import annotations

import os
import re
import stat
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

from subnet.errors import FlannelError
from subnet.files import replace_file
from subnet.iptext import as_subnets, parse_cidr
from subnet.model import Family, IPNetwork, NetworkConfig, Subnets

_FILE_MODE = 0o644
_PREFIX: dict[Family, str] = {4: "FLANNEL_", 6: "FLANNEL_IPV6_"}
_ASSIGNMENT = re.compile(
    r"""\s*(?:export\s+)?(?P<name>[A-Za-z_][A-Za-z0-9_.]*)\s*=\s*
        (?:"(?P<double>[^"]*)"|'(?P<single>[^']*)'|(?P<bare>.*?))\s*(?:(?<=\s)\#.*)?""",
    re.VERBOSE,
)


class EnvFileError(FlannelError):
    """The file cannot be written or read; retry. The text names the path and the reason."""


def render(config: NetworkConfig, subnets: Subnets, mtu_bytes: int, ip_masq: bool) -> str:
    """Return the file's text; ``mtu_bytes`` is what is left to pods after encapsulation."""
    lines: list[str] = []
    for family, prefix in _PREFIX.items():
        pool, subnet = config.pool(family), subnets.of(family)
        if pool is not None and subnet is not None:
            lines.append(f"{prefix}NETWORK={pool.network}")
            # The bridge's address, not the network: consumers depend on it.
            lines.append(f"{prefix}SUBNET={subnet.network_address + 1}/{subnet.prefixlen}")
    lines += [f"FLANNEL_MTU={mtu_bytes}", f"FLANNEL_IPMASQ={str(ip_masq).lower()}"]
    return "".join(f"{line}\n" for line in lines)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Replace the file in one step, whole or not at all. Raises EnvFileError.

    A new file gets mode 0644 whatever the umask, an existing one keeps its
    mode; missing directories are made with mode 0755.
    """
    target = Path(path)
    try:
        replace_file(target, text.encode("ascii"), _mode(target))
    except OSError as error:
        raise EnvFileError(f"cannot write {target}: {error.strerror or error}") from error


def read_previous(path: str | os.PathLike[str]) -> Subnets | None:
    """Return the subnets of an earlier run, host bits dropped; None if there are none. Raises EnvFileError.

    Of each family's comma list the bad items are skipped; anything but exactly
    one CIDR counts as none.
    """
    return _read(path, "SUBNET")


def read_networks(path: str | os.PathLike[str]) -> Subnets | None:
    """Return the pod networks of an earlier run, by the rules of read_previous."""
    return _read(path, "NETWORK")


def _mode(target: Path) -> int:
    try:
        return stat.S_IMODE(target.stat().st_mode)
    except FileNotFoundError:
        return _FILE_MODE


def _read(path: str | os.PathLike[str], item: str) -> Subnets | None:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
    except OSError as error:
        raise EnvFileError(f"cannot read {os.fspath(path)}: {error.strerror or error}") from error
    values = _assignments(text)
    found = [_only_cidr(values.get(prefix + item, ""), family) for family, prefix in _PREFIX.items()]
    subnets = as_subnets(network for network in found if network is not None)
    return None if subnets == Subnets() else subnets


def _assignments(text: str) -> dict[str, str]:
    """Return names and values in dotenv syntax; lines that are none are skipped, the last of a name wins."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        match = _ASSIGNMENT.fullmatch(line)
        if match:
            values[match["name"]] = next(v for v in match.group("double", "single", "bare") if v is not None)
    return values


def _only_cidr(text: str, family: Family) -> IPNetwork | None:
    kind = IPv4Network if family == 4 else IPv6Network
    networks = [network for item in text.split(",") if isinstance(network := _cidr(item.strip()), kind)]
    return networks[0] if len(networks) == 1 else None


def _cidr(text: str) -> IPNetwork | None:
    try:
        return parse_cidr(text)
    except ValueError:
        return None
