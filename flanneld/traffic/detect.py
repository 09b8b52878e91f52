"""Which iptables variant this host uses. Never mixed: a packet would pass both sets of rules."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flanneld.traffic.commands import CommandFirewall, Tools, Version
from flanneld.traffic.legacy import LegacyFirewall, existing_tables, load_iptc
from flanneld.traffic.ports import Firewall, Variant, Watch
from flanneld.traffic.render import Saved
from flanneld.traffic.runner import Runner
from flanneld.traffic.watch import NftWatch
from subnet.clock import Clock
from subnet.errors import KernelError, RuleError
from subnet.model import FAMILIES, Family

log = logging.getLogger(__name__)

VARIANTS: tuple[Variant, Variant] = ("nft", "legacy")

_VARIANTS_SINCE: Version = (1, 8)
"""Before this version there was only what is now called legacy."""

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

    ``other`` is the other variant if it is in use: rules of ours do not belong
    there. ``watch`` is None where only looking at the rules tells of changes.
    """

    firewall: Firewall
    other: Firewall | None
    watch: Watch | None
    why: str


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


def open_host(runner: Runner, clock: Clock) -> Host:
    """Look at the host and return how to write rules there. Raises RuleError if that is impossible.

    Looks at the network namespace of the calling thread.
    """
    iptables = runner.find("iptables", "iptables-nft", "iptables-legacy")
    if iptables is None:
        raise RuleError("no iptables program found: masquerade and forward rules cannot be written")
    version, default = parse_version(runner.run([iptables, "--version"]).out)
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
    variant, why = choose(Evidence(default, frozenset(firewalls), found))
    others = [firewalls[v] for v in firewalls if v != variant and _in_use(v)]
    firewall = firewalls[variant]
    chosen = _without_forks(firewall, runner, clock) if variant == "legacy" else firewall
    log.info("traffic rules go to %s: %s", chosen.name, why)
    return Host(chosen, others[0] if others else None, _watch() if variant == "nft" else None, why)


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
