"""The filter of tunnelled packets applied, kept in step with the known hosts."""

from __future__ import annotations

import logging

from flanneld.traffic.nftables import Nft
from flanneld.traffic.runner import Runner
from flanneld.traffic.vtep_rules import VtepFilter, build_text, parse_table, repair_text
from flanneld.traffic.watch import Generations
from subnet.errors import KernelError, RuleError

log = logging.getLogger(__name__)


class VtepGuard:
    """Keeps the table ``inet NAME``. Used from one thread, in whose network namespace it works."""

    def __init__(self, runner: Runner, table: str) -> None:
        self.table = table
        self._runner = runner
        self._settled: tuple[VtepFilter, int] | None = None
        self._removed = False
        self._generations: Generations | None = None

    def settle(self, wanted: VtepFilter | None) -> None:
        """Bring the filter into force, or remove it. Raises RuleError."""
        if wanted is None and self._removed:
            # Once removed, nobody else is kept from having a table of this name.
            return
        if self._runner.find("nft") is None:
            if wanted is None:
                return
            raise RuleError("tunnelled packets cannot be filtered: --vtep-filter needs nft, which is not installed")
        if wanted is None:
            self._remove()
            return
        self._removed = False
        before = self._generation()
        if before is not None and self._settled == (wanted, before):
            return
        changes = self._correct(wanted)
        # A generation that others moved too says nothing about our table.
        if before is not None and self._generation() == before + changes:
            self._settled = (wanted, before + changes)

    def close(self) -> None:
        """Give back the descriptors; the table stays."""
        if self._generations is not None:
            self._generations.close()
            self._generations = None

    def _remove(self) -> None:
        """Try once: who does not want the filter must not wait for it."""
        self._removed, self._settled = True, None
        nft = Nft(self._runner)
        try:
            if nft.list_table("inet", self.table) is not None:
                nft.apply(f"delete table inet {self.table}\n")
                log.info("nft table inet %s removed: tunnelled packets are taken from everybody", self.table)
        except RuleError as e:
            log.warning("nft table inet %s of an earlier run may be left: %s", self.table, e)

    def _correct(self, wanted: VtepFilter) -> int:
        """Return how many transactions were needed."""
        nft = Nft(self._runner)
        listing = nft.list_table("inet", self.table)
        build = build_text(self.table, wanted)
        text = build if listing is None else repair_text(self.table, parse_table(listing), wanted)
        if not text:
            return 0
        try:
            nft.apply(text)
        except RuleError as e:
            if text == build:
                raise
            log.debug("changed by others meanwhile, building it anew: %s", e)
            nft.apply(build)
        level = logging.INFO if text == build else logging.DEBUG
        log.log(level, "%s", wanted)
        return 1

    def _generation(self) -> int | None:
        if self._generations is None:
            try:
                self._generations = Generations()
            except KernelError:
                return None
        return self._generations.number()
