"""Which iptables variant this host uses. Never mixed: a packet would pass both sets of rules."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flanneld.traffic.commands import CommandFirewall, Tools, Version
from flanneld.traffic.converge import Converger
from flanneld.traffic.legacy import LegacyFirewall, existing_tables, load_iptc
from flanneld.traffic.nftables import Nft, NftConverger
from flanneld.traffic.ports import Enforcer, Firewall, Variant, Watch
from flanneld.traffic.render import Saved
from flanneld.traffic.runner import Runner
from flanneld.traffic.watch import NftWatch
from subnet.clock import Clock
from subnet.errors import KernelError, RuleError
from subnet.model import FAMILIES, Family
from subnet.report import Reporter

log = logging.getLogger(__name__)

VARIANTS: tuple[Variant, Variant] = ("nft", "legacy")

_VARIANTS_SINCE: Version = (1, 8)
"""Before this version there was only what is now called legacy."""

_SHARED_QUIET_S = 0.1
"""For rules next to those of others. Who flushes chains one command after the other removes them next;
a jump that came back in between would make that fail."""
_OWN_QUIET_S = 0.02
"""For tables of our own: nobody else works there for long."""

_VERSION = re.compile(r"v(\d+(?:\.\d+)*)")
_ENGINES = ("KUBE-", "DOCKER")
_PROGRAMS: dict[Family, str] = {4: "iptables", 6: "ip6tables"}


@dataclass(frozen=True, slots=True)
class Census:
    """Whose rules a variant's tables hold: chains of kube-proxy or Docker, other rules, all not ours."""

    engine_chains: int = 0
    rules: int = 0

    def __add__(self, other: Census) -> Census:
        return Census(self.engine_chains + other.engine_chains, self.rules + other.rules)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a host. ``default`` is the variant that ``iptables`` is."""

    default: Variant
    usable: frozenset[Variant] = frozenset()
    found: Mapping[Variant, Census] = field(default_factory=dict)

    def census(self, variant: Variant) -> Census:
        """Return what was found in a variant's tables."""
        return self.found.get(variant, Census())


@dataclass(frozen=True, slots=True)
class Host:
    """How rules are written on this host, and why so.

    ``others`` are the other ways in use: rules of ours do not belong there.
    ``watch`` is None where only looking at the rules tells of changes.
    ``own_tables``: in nftables mode, else next to the rules of others.
    """

    enforcer: Enforcer
    others: tuple[Enforcer, ...]
    watch: Watch | None
    why: str
    own_tables: bool = False

    @property
    def quiet_s(self) -> float:
        """Return for how long there must be no further change before one is answered."""
        return _OWN_QUIET_S if self.own_tables else _SHARED_QUIET_S


@dataclass(frozen=True, slots=True)
class Signs:
    """What tells, without running a program, that the host may have changed its way: programs and legacy tables.

    A program is the file that runs, whatever leads to it.
    """

    programs: tuple[tuple[int, int], ...]
    legacy_tables: tuple[frozenset[str], ...]


def signs(runner: Runner) -> Signs:
    """Look for the signs, in the network namespace of the calling thread."""
    paths = (runner.find(name) for name in ("iptables", "ip6tables", "nft"))
    return Signs(tuple(_file(path) for path in paths), tuple(existing_tables(f) for f in FAMILIES))


def _file(path: str | None) -> tuple[int, int]:
    try:
        found = os.stat(path) if path else None
    except OSError:
        found = None
    return (found.st_dev, found.st_ino) if found else (0, 0)


def census(saved: Saved, chain_prefix: str = "FLANNEL") -> Census:
    """Count what others put into the tables."""
    chains = [(name, rules) for table in saved.tables.values() for name, rules in table.items()]
    engines = sum(name.startswith(_ENGINES) for name, _ in chains)
    foreign = sum(
        chain_prefix not in rule and "flanneld " not in rule
        for name, rules in chains
        if not name.startswith(chain_prefix)
        for rule in rules
    )
    return Census(engines, foreign)


def choose(evidence: Evidence) -> tuple[Variant, str]:
    """Return the variant to use and the reason. Raises RuleError if there is none."""
    variant, why = _by_rules(evidence)
    if variant in evidence.usable:
        return variant, why
    rest = [other for other in VARIANTS if other in evidence.usable]
    if not rest:
        raise RuleError(f"iptables is {evidence.default}, but its save and restore programs are missing")
    return rest[0], f"{why}, but the {variant} variant cannot be used here"


def _by_rules(evidence: Evidence) -> tuple[Variant, str]:
    nft, legacy = evidence.census("nft"), evidence.census("legacy")
    for what, in_nft, in_legacy in (
        ("chains of kube-proxy or Docker", nft.engine_chains, legacy.engine_chains),
        ("rules of other programs", nft.rules, legacy.rules),
    ):
        if in_nft != in_legacy:
            variant: Variant = "nft" if in_nft > in_legacy else "legacy"
            other = "legacy" if variant == "nft" else "nft"
            return variant, f"{what}: {max(in_nft, in_legacy)} in {variant}, {min(in_nft, in_legacy)} in {other}"
    return evidence.default, f"iptables is {evidence.default} and the rules of other programs do not say otherwise"


def parse_version(text: str) -> tuple[Version, Variant]:
    """Return version and variant from ``iptables --version``. Raises RuleError if it is something else."""
    found = _VERSION.search(text)
    if found is None:
        raise RuleError(f"iptables --version says {text.strip()!r}")
    version = tuple(int(part) for part in found[1].split("."))
    return version, "nft" if "(nf_tables)" in text else "legacy"


def find_tools(find: Callable[..., str | None], version: Version, default: Variant, variant: Variant) -> Tools:
    """Return the programs of a variant; ``find`` gives the path of the first name that exists."""
    save: dict[Family, str] = {}
    restore: dict[Family, str] = {}
    for family, program in _PROGRAMS.items():
        for action, paths in (("save", save), ("restore", restore)):
            names = [f"{program}-{variant}-{action}"] if version >= _VARIANTS_SINCE else []
            if variant == default:
                names.append(f"{program}-{action}")
            if names and (path := find(*names)):
                paths[family] = path
    return Tools(variant, version, save, restore)


def open_host(nftables: bool, runner: Runner, clock: Clock) -> Host:
    """Look at the host and return how to write rules there. Raises RuleError if that is impossible.

    ``nftables``: in nftables mode; otherwise in iptables mode, where there is
    an iptables. Looks at the network namespace of the calling thread.
    """
    iptables = runner.find("iptables", "iptables-nft", "iptables-legacy")
    if nftables or iptables is None:
        return _nftables_host(iptables, nftables, runner, clock)
    version, default = parse_version(runner.run([iptables, "--version"]).out)
    firewalls, found = _variants(version, default, runner, clock)
    variant, why = choose(Evidence(default, frozenset(firewalls), found))
    firewall = firewalls[variant]
    chosen = _without_forks(firewall, runner, clock) if variant == "legacy" else firewall
    log.info("traffic rules go to %s: %s", chosen.name, why)
    reporter = Reporter(log, clock)
    others: list[Enforcer] = [Converger(firewalls[v], reporter) for v in firewalls if v != variant and _in_use(v)]
    if runner.find("nft"):
        others.append(NftConverger(Nft(runner), reporter))
    return Host(Converger(chosen, reporter), tuple(others), _watch() if variant == "nft" else None, why)


def _nftables_host(iptables: str | None, wanted: bool, runner: Runner, clock: Clock) -> Host:
    if not wanted and not runner.find("nft"):
        raise RuleError("neither iptables nor nft found: masquerade and forward rules cannot be written")
    reporter = Reporter(log, clock)
    enforcer = NftConverger(Nft(runner), reporter)
    why = "the network config enables nftables" if wanted else "no iptables program found"
    log.info("traffic rules go to %s: %s", enforcer.name, why)
    others: list[Enforcer] = []
    if iptables is not None:
        try:
            version, default = parse_version(runner.run([iptables, "--version"]).out)
            firewalls, _ = _variants(version, default, runner, clock)
            others = [Converger(firewalls[v], reporter) for v in firewalls if _in_use(v)]
        except RuleError as e:
            log.warning("rules of an earlier run in iptables mode stay: %s", e)
    return Host(enforcer, tuple(others), _watch(), why, own_tables=True)


def _variants(
    version: Version, default: Variant, runner: Runner, clock: Clock
) -> tuple[dict[Variant, Firewall], dict[Variant, Census]]:
    """Return the usable variants and what others keep in them."""
    firewalls: dict[Variant, Firewall] = {}
    found: dict[Variant, Census] = {}
    for variant in VARIANTS:
        tools = find_tools(runner.find, version, default, variant)
        if not any(tools.covers(family) for family in FAMILIES):
            continue
        firewall: Firewall = CommandFirewall(tools, runner, clock)
        try:
            found[variant] = _look(firewall, variant)
        except RuleError as e:
            log.info("%s tables cannot be read: %s", variant, e)
        else:
            firewalls[variant] = firewall
    return firewalls, found


def _look(firewall: Firewall, variant: Variant) -> Census:
    families: Iterable[Family] = (f for f in FAMILIES if firewall.covers(f))
    if variant == "legacy":
        families = (f for f in families if existing_tables(f))
    return sum((census(firewall.read(family)) for family in families), Census())


def _in_use(variant: Variant) -> bool:
    return variant == "nft" or any(existing_tables(family) for family in FAMILIES)


def _without_forks(firewall: Firewall, runner: Runner, clock: Clock) -> Firewall:
    """Return libiptc in place of the programs, or the programs if that does not load."""
    try:
        iptc = load_iptc()
    except RuleError as e:
        log.warning("%s: the legacy tables are read and written with %s instead", e, firewall.name)
        return firewall
    return LegacyFirewall(iptc, f"{firewall.name} through libiptc", firewall.random_fully, clock, runner.closed)


def _watch() -> Watch | None:
    try:
        return NftWatch()
    except KernelError as e:
        log.warning("no notification of rule changes, looking at the rules periodically instead: %s", e)
        return None
