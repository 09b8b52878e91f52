"""Settings of the host without which correct rules still do not help: reported, or set if the operator wants that."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from flanneld.traffic.runner import Runner
from subnet.model import FAMILIES, Family

_BRIDGE: dict[Family, str] = {4: "net/bridge/bridge-nf-call-iptables", 6: "net/bridge/bridge-nf-call-ip6tables"}
_FORWARD: dict[Family, str] = {4: "net/ipv4/ip_forward", 6: "net/ipv6/conf/all/forwarding"}
_REVERSE_PATH = "net/ipv4/conf/all/rp_filter"
_STRICT = "1"


@dataclass(frozen=True, slots=True)
class Finding:
    """One setting that is not as it should be. ``name`` has dots, as sysctl(8) writes it."""

    name: str
    text: str


class HostCheck:
    """Looks at the settings; with ``manage`` sets to 1 what has to be 1.

    ``sysctl`` is where the settings are, of the calling thread's network namespace.
    """

    def __init__(self, runner: Runner, *, manage: bool = False, sysctl: Path = Path("/proc/sys")) -> None:
        self._runner, self._manage, self._sysctl = runner, manage, sysctl
        self._tried_module = False

    def findings(self, families: Iterable[Family], *, iptables: bool) -> list[Finding]:
        """Return what keeps pods or services from working, after trying to cure it if that is wanted.

        Bridged packets meet iptables only by help of br_netfilter, whose module
        is loaded where it is absent; nftables mode does not need it.
        """
        wanted = list(families)
        found: list[Finding] = []
        for family in wanted:
            if iptables:
                self._load_module(_BRIDGE[family])
                found += self._required(_BRIDGE[family], "services do not work between pods of one host")
            found += self._required(_FORWARD[family], f"IPv{family} packets of pods are not forwarded")
        if 4 in wanted:
            found += self._reverse_path()
        return found

    def _load_module(self, name: str) -> None:
        if self._tried_module or (self._sysctl / name).exists():
            return
        self._tried_module = True
        modprobe = self._runner.find("modprobe")
        if modprobe is not None:
            self._runner.run([modprobe, "br_netfilter"])

    def _required(self, name: str, consequence: str) -> Iterator[Finding]:
        dotted, path = name.replace("/", "."), self._sysctl / name
        try:
            if path.read_text().strip() != "0":
                return
            if self._manage:
                path.write_text("1")
                return
            yield Finding(dotted, f"{dotted} is 0: {consequence}; --manage-sysctls sets it")
        except FileNotFoundError:
            hint = " (kernel module br_netfilter is not loaded)" if "bridge" in name else ""
            yield Finding(dotted, f"{dotted} does not exist{hint}: {consequence}")
        except OSError as e:
            what = "set" if self._manage else "read"
            yield Finding(dotted, f"{dotted} cannot be {what}: {e.strerror}: {consequence}")

    def _reverse_path(self) -> Iterator[Finding]:
        """Loose or off is not needed everywhere, so it is never changed."""
        dotted = _REVERSE_PATH.replace("/", ".")
        try:
            strict = (self._sysctl / _REVERSE_PATH).read_text().strip() == _STRICT
        except OSError:
            return
        if strict:
            text = f"{dotted} is 1: packets that come by another interface than the way back are dropped"
            yield Finding(dotted, text)


TOPICS = tuple(
    name.replace("/", ".")
    for name in (*(_BRIDGE[f] for f in FAMILIES), *(_FORWARD[f] for f in FAMILIES), _REVERSE_PATH)
)
"""Names of all settings that are looked at."""
