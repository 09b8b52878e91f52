"""Settings of the host without which correct rules still do not help. Reported, never changed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flanneld.traffic.runner import Runner
from subnet.model import Family

_BRIDGE: dict[Family, str] = {4: "net/bridge/bridge-nf-call-iptables", 6: "net/bridge/bridge-nf-call-ip6tables"}
_FORWARD: dict[Family, str] = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}


def host_problems(families: Iterable[Family], runner: Runner, sysctl: Path = Path("/proc/sys")) -> list[str]:
    """Return one sentence per setting that keeps pods or services from working.

    Tries to load br_netfilter where it is absent; all else is left as it is.
    ``sysctl`` is where the settings are read, of the calling thread's network namespace.
    """
    wanted = list(families)
    if not all((sysctl / _BRIDGE[family]).exists() for family in wanted):
        modprobe = runner.find("modprobe")
        if modprobe is not None:
            runner.run([modprobe, "br_netfilter"])
    problems = []
    for family in wanted:
        problems += _problem(sysctl, _BRIDGE[family], "services do not work between pods of one host")
        problems += _problem(sysctl, _FORWARD[family], f"IPv{family} packets of pods are not forwarded")
    return problems


def _problem(sysctl: Path, name: str, consequence: str) -> list[str]:
    dotted = name.replace("/", ".")
    try:
        value = int((sysctl / name).read_text())
    except FileNotFoundError:
        hint = " (kernel module br_netfilter is not loaded)" if "bridge" in name else ""
        return [f"{dotted} does not exist{hint}: {consequence}"]
    except (OSError, ValueError) as e:
        return [f"{dotted} cannot be read: {e}"]
    return [] if value else [f"{dotted} is 0: {consequence}"]
