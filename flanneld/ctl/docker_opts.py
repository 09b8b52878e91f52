"""Docker daemon options from subnet.env, a drop-in for upstream's dist/mk-docker-opts.sh.

Flags, output and exit codes are that script's: units and images call it by them.
"""

from __future__ import annotations

import getopt
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_network
from pathlib import Path

USAGE = """\
flannelctl docker-opts [-f FLANNEL-ENV-FILE] [-d DOCKER-ENV-FILE] [-i] [-c] [-m] [-k COMBINED-KEY]

Write Docker daemon options from the flannel environment file.
  -f  flannel environment file (/run/flannel/subnet.env)
  -d  Docker environment file to write (/run/docker_opts.env)
  -i  write each option as a variable of its own, such as DOCKER_OPT_MTU
  -c  write all options into one variable; neither -i nor -c means both
  -k  name of that variable (DOCKER_OPTS)
  -m  leave --ip-masq out, for old versions of Docker
"""

_DEFAULTS = {"-f": "/run/flannel/subnet.env", "-d": "/run/docker_opts.env", "-k": "DOCKER_OPTS"}
_SBIN = "/usr/sbin:/sbin:/usr/bin:/bin"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INVERTED = {"true": "false", "false": "true"}


@dataclass(frozen=True, slots=True)
class Flags:
    """What was asked for. Neither ``individual`` nor ``combined`` cannot be: that means both."""

    flannel_env: Path
    docker_env: Path
    individual: bool
    combined: bool
    combined_key: str
    ip_masq: bool


class BadInputError(Exception):
    """Flags or environment that cannot be used; nothing was written."""


def parse_flags(argv: Sequence[str]) -> Flags:
    """Read the flags as the shell's getopts does; raises BadInputError for help and for anything unknown."""
    try:
        pairs, rest = getopt.getopt(list(argv), "f:d:icmk:")
    except getopt.GetoptError as e:
        raise BadInputError(USAGE) from e
    given = _DEFAULTS | dict(pairs)
    if rest or not _NAME.fullmatch(given["-k"]):
        raise BadInputError(USAGE)
    both = "-i" not in given and "-c" not in given
    return Flags(
        flannel_env=Path(given["-f"]),
        docker_env=Path(given["-d"]),
        individual=both or "-i" in given,
        combined=both or "-c" in given,
        combined_key=given["-k"],
        ip_masq="-m" not in given,
    )


def assignments(text: str) -> dict[str, str]:
    """Read the shell assignments of an environment file; other lines count for nothing."""
    found = {}
    for line in text.splitlines():
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        for word in words[words[:1] == ["export"] :]:
            name, equals, value = word.partition("=")
            if equals and _NAME.fullmatch(name):
                found[name] = value
    return found


def render(flags: Flags, variables: Mapping[str, str]) -> str:
    """Return the content of the Docker environment file.

    ``variables`` are the environment with the flannel file's on top. Raises
    BadInputError if FLANNEL_IPMASQ is neither true nor false.
    """
    options = {name: value for name, value in variables.items() if name.startswith("DOCKER_OPT_")}
    if subnet := variables.get("FLANNEL_SUBNET"):
        options["DOCKER_OPT_BIP"] = f"--bip={subnet}"
    if mtu := variables.get("FLANNEL_MTU"):
        options["DOCKER_OPT_MTU"] = f"--mtu={mtu}"
    if flags.ip_masq and (masquerades := variables.get("FLANNEL_IPMASQ")):
        if masquerades not in _INVERTED:
            raise BadInputError(f"Invalid value of FLANNEL_IPMASQ: {masquerades}\n")
        # Docker need not do again what flanneld does.
        options["DOCKER_OPT_IPMASQ"] = f"--ip-masq={_INVERTED[masquerades]}"
    lines = [f'{name}="{value}"' for name, value in sorted(options.items())] if flags.individual else []
    if flags.combined:
        before = variables.get(flags.combined_key, "")
        all_options = "".join(f" {value}" for _, value in sorted(options.items()))
        lines.append(f'{flags.combined_key}="{before + " " if before else ""}{all_options}"')
    return "".join(f"{line}\n" for line in lines)


def routed_elsewhere(subnet: IPv4Network, routes: str) -> str:
    """Return the line of ``ip route`` that sends this host's own subnet to a gateway, empty if none does."""
    for line in routes.splitlines():
        words = line.split()
        if "via" in words and words[0] != "default" and _network(words[0]) == subnet:
            return line.strip()
    return ""


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 for bad input, a failed write or a subnet routed elsewhere."""
    try:
        flags = parse_flags(argv)
        text = flags.flannel_env.read_text() if flags.flannel_env.is_file() else ""
        variables = {**os.environ, **assignments(text)}
        content = render(flags, variables)
        # Written in place: the file may be a device or a link.
        flags.docker_env.write_text(content)
    except BadInputError as e:
        sys.stderr.write(str(e))
        return 1
    except OSError as e:
        sys.stderr.write(f"{e.filename}: {e.strerror}\n")
        return 1
    subnet = _network(variables.get("FLANNEL_SUBNET", ""))
    line = routed_elsewhere(subnet, _ip_route()) if subnet else ""
    if line:
        sys.stderr.write(f"{subnet} is this host's subnet, but a route leads elsewhere: {line}\n")
        return 1
    return 0


def _network(text: str) -> IPv4Network | None:
    try:
        network = ip_network(text, strict=False)
    except ValueError:
        return None
    return network if isinstance(network, IPv4Network) else None


def _ip_route() -> str:
    # A unit's PATH need not hold the system directories.
    ip = shutil.which("ip") or shutil.which("ip", path=_SBIN)
    if ip is None:
        return ""
    return subprocess.run([ip, "route"], capture_output=True, text=True, check=False).stdout
