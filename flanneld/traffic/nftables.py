"""Nftables mode applied: one nft process per look, one per change, each change one transaction."""

from __future__ import annotations

import json
import logging

from flanneld.traffic import nft_rules
from flanneld.traffic.nft_chains import table_exists
from flanneld.traffic.nft_rules import DIALECTS, Chain, Dialect, Held
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.runner import Runner
from subnet.errors import KernelError, RuleError
from subnet.model import Family
from subnet.report import Reporter

log = logging.getLogger(__name__)

_ABSENT = ("No such file or directory", "Protocol not supported", "Operation not supported")
"""Why there is no such table; the latter two on a kernel without nf_tables."""
_PROTOCOL = {"inet": 1, "ip": 2, "ip6": 10}
"""Families as numbers (linux/netfilter.h)."""
UNREADABLE: dict[str, object] = {"nftables": [{"unreadable": {}}]}
"""Stands for a listing that is no JSON: a table with something in it that is not ours."""


class Nft:
    """The program nft(8). Raises RuleError if it is not installed."""

    def __init__(self, runner: Runner) -> None:
        path = runner.find("nft")
        if path is None:
            raise RuleError("no nft program found: nftables rules cannot be written")
        self._path, self._runner = path, runner

    def list_table(self, family: str, table: str) -> dict[str, object] | None:
        """Return the listing of a table, None if there is none, which the kernel says by itself. Raises RuleError."""
        try:
            if not table_exists(_PROTOCOL[family], table):
                return None
        except KernelError as e:
            log.debug("nft is asked for table %s: %s", table, e)
        done = self._runner.run([self._path, "-j", "-p", "list", "table", family, table])
        if done.rc and any(reason in done.err for reason in _ABSENT):
            return None
        if done.rc:
            raise RuleError(f"nft list table {family} {table} failed ({done.rc}): {' '.join(done.err.split())}")
        try:
            listing = json.loads(done.out)
        except ValueError:
            # Version 1.0.6 for one breaks off at the flags of a table: not as we made it.
            return UNREADABLE
        return listing if isinstance(listing, dict) else UNREADABLE

    def apply(self, text: str) -> None:
        """Carry out the commands, all or none. Raises RuleError with nft's own words, which show the line."""
        done = self._runner.run([self._path, "-f", "-"], text)
        if done.rc:
            raise RuleError(f"nft failed ({done.rc}): {' '.join(done.err.split())}")

    def refuses(self, text: str) -> str:
        """Return why the commands could not be carried out, '' if they could; nothing is changed."""
        done = self._runner.run([self._path, "--check", "-f", "-"], text)
        return " ".join(done.err.split()) or "no message" if done.rc else ""


class NftConverger:
    """Keeps the tables of nftables mode. Remembers what kernel and nft were found to take."""

    name = "nftables"

    def __init__(self, nft: Nft, reporter: Reporter) -> None:
        self._nft, self._reporter = nft, reporter
        self._dialect: Dialect | None = None

    def covers(self, family: Family) -> bool:
        """Whether the family can be spoken: always."""
        return True

    def interested(self, policy: TrafficPolicy, table: str, chain: str | None) -> bool:
        """Whether news of this table can be about us: it is one of ours."""
        return table in {nft_rules.table_name(policy, 4), nft_rules.table_name(policy, 6)}

    def converge(self, policy: TrafficPolicy, family: Family) -> bool:
        """Change what differs and return whether anything did. Raises RuleError."""
        table = nft_rules.table_name(policy, family)
        chains = nft_rules.decide(policy, family)
        held = self._held(family, table)
        if chains:
            chains = nft_rules.in_dialect(chains, self._dialect_for(family, table, chains))
            return self._correct(family, table, held, chains)
        if held is None:
            return False
        self._nft.apply(nft_rules.delete_text(family, table))
        log.info("nft table %s %s removed", nft_rules.IP[family], table)
        return True

    def _correct(self, family: Family, table: str, held: Held | None, chains: tuple[Chain, ...]) -> bool:
        build = nft_rules.build_text(family, table, chains)
        repair = build if held is None else nft_rules.repair_text(family, table, held, chains)
        if not repair:
            self._reporter.solved(f"nft IPv{family}", f"nft table {table} is as wanted after a failed change")
            return False
        try:
            self._nft.apply(repair)
        except RuleError as e:
            # Somebody changed the table after it was read. A new one does not depend on that.
            self._reporter.problem(f"nft IPv{family}", str(e))
            self._nft.apply(build)
        said = ", ".join(nft_rules.differences(held, chains))
        log.info("nft table %s %s: %s", nft_rules.IP[family], table, said)
        return True

    def _held(self, family: Family, table: str) -> Held | None:
        listing = self._nft.list_table(nft_rules.IP[family], table)
        return None if listing is None else nft_rules.parse_table(listing)

    def _dialect_for(self, family: Family, table: str, chains: tuple[Chain, ...]) -> Dialect:
        """Return the best of what kernel and nft take, found out by trials that change nothing."""
        if self._dialect is not None:
            return self._dialect
        refusals: list[str] = []
        for dialect in DIALECTS:
            refusal = self._nft.refuses(nft_rules.build_text(family, table, nft_rules.in_dialect(chains, dialect)))
            if not refusal:
                self._remember(dialect, refusals, masquerades=any(c.at.type == "nat" for c in chains))
                return dialect
            refusals.append(refusal)
        raise RuleError(f"nft refuses the rules: {refusals[0]}")

    def _remember(self, dialect: Dialect, refusals: list[str], *, masquerades: bool) -> None:
        if not dialect.fully_random:
            log.warning("masquerade fully-random is refused: source ports are less random: %s", refusals[0])
        if not dialect.comments:
            log.info("comments of nft tables and chains are refused and left out: %s", refusals[0])
        # Rules without masquerade have proved nothing about it.
        if masquerades:
            self._dialect = dialect
