"""The legacy variant through libiptc: reading forks nothing, so a check costs next to nothing.

python-iptables' table calls are used as they are, with entries made by
``flanneld.traffic.entry``. Each table is committed once per plan; libiptc then
replaces the table as a whole, so no packet meets half a change.
"""

from __future__ import annotations

import ctypes
import glob
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from flanneld.traffic.entry import decode, encode, for_deletion
from flanneld.traffic.legacy_chains import read_chains
from flanneld.traffic.lock import default_path, xtables_lock
from flanneld.traffic.render import Saved, TablePlan
from flanneld.traffic.rules import RuleSet
from subnet.clock import Clock
from subnet.errors import KernelError, RuleError
from subnet.model import Family

log = logging.getLogger(__name__)

TABLES = ("nat", "filter")

_EXTENSION_DIRS = ("/usr/lib/*/xtables", "/usr/lib/xtables", "/usr/lib64/xtables", "/usr/local/lib*/xtables")


def load_iptc() -> Any:
    """Import python-iptables. Raises RuleError if it or the libraries below it are missing."""
    if not os.environ.get("XTABLES_LIBDIR"):
        # Otherwise the import runs ldconfig, and fails where that is missing.
        found = [path for pattern in _EXTENSION_DIRS for path in sorted(glob.glob(pattern))]
        if found:
            os.environ["XTABLES_LIBDIR"] = found[0]
    try:
        import iptc  # noqa: PLC0415 - only hosts with legacy tables pay for it
    except Exception as e:  # it fails in whatever way the missing library happens to cause
        raise RuleError(f"libiptc cannot be used: {e}") from e
    return iptc


def existing_tables(family: Family) -> frozenset[str]:
    """Return the names of the legacy tables of this thread's network namespace; asking makes none."""
    try:
        with open(f"/proc/thread-self/net/ip{'6' if family == 6 else ''}_tables_names") as names:
            text = names.read()
    except OSError:
        return frozenset()
    return frozenset(text.split())


class LegacyFirewall:
    """The legacy tables. libiptc keeps global state: all calls come from one thread."""

    def __init__(self, iptc: Any, name: str, random_fully: bool, clock: Clock, closed: threading.Event) -> None:
        self.iptc, self.name, self.random_fully = iptc, name, random_fully
        self.clock, self.closed = clock, closed

    def covers(self, family: Family) -> bool:
        """Whether the family can be spoken: always."""
        return True

    def read(self, family: Family) -> Saved:
        """Return what the tables hold; one that does not exist is not made. Raises RuleError."""
        return Saved({name: self._read_table(family, name) for name in TABLES if name in existing_tables(family)})

    def look(self, family: Family, wanted: Sequence[RuleSet]) -> Saved:
        """Return at least the chains of ``wanted`` and what jumps to them. Raises RuleError."""
        try:
            found = read_chains(family, wanted, existing_tables(family))
        except KernelError as e:
            log.debug("chains cannot be read one by one: %s", e)
            found = None
        return found if found is not None else self.read(family)

    def apply(self, family: Family, plans: Sequence[TablePlan]) -> None:
        """Carry out the plans under the xtables lock, one commit per table. Raises RuleError."""
        with xtables_lock(default_path(), self.clock, self.closed):
            for plan in plans:
                self._apply_table(family, plan)

    def _read_table(self, family: Family, name: str) -> dict[str, tuple[str, ...]]:
        table = self._open(family, name)
        try:
            chains = [chain.name for chain in table.chains]
            return {chain: tuple(text for text, _, _ in _entries(table, chain, family)) for chain in chains}
        finally:
            table.close()

    def _apply_table(self, family: Family, plan: TablePlan) -> None:
        table = self._open(family, plan.table)
        try:
            _carry_out(table, plan, family)
            table.commit()
        except self.iptc.IPTCError as e:
            raise RuleError(f"table {plan.table}: {e}; wanted: {'; '.join(plan.summary)}") from e
        finally:
            table.close()

    def _open(self, family: Family, name: str) -> Any:
        try:
            kind = self.iptc.Table if family == 4 else self.iptc.Table6
            table = kind(name, autocommit=False)
            table.refresh()
        except self.iptc.IPTCError as e:
            raise RuleError(f"legacy table {name} of IPv{family}: {e}") from e
        return table


def _entries(table: Any, chain: str, family: Family) -> Iterator[tuple[str, bytes, str]]:
    """Yield each rule of a chain: its text, its bytes, and the name of its target."""
    entry = table.first_rule(chain)
    while entry:
        data = ctypes.string_at(ctypes.addressof(entry), entry.next_offset)
        target = table.get_target(entry).decode()
        yield decode(data, target, family), data, target
        entry = table.next_rule(entry)


def _carry_out(table: Any, plan: TablePlan, family: Family) -> None:
    for chain in (*(name for name, _ in plan.build), *plan.drop):
        if table.is_chain(chain):
            table.flush_entries(chain)
        else:
            table.create_chain(chain)
    for chain, rules in plan.build:
        for rule in rules:
            table.append_entry(chain, _buffer(encode(rule, family)))
    for chain, text in plan.delete:
        same = (entry for entry in _entries(table, chain, family) if entry[0] == text)
        if (entry := next(same, None)) is None:
            raise RuleError(f"table {table.name}: rule is gone already: -A {chain} {text}")
        data = for_deletion(*entry[1:], family)
        table.delete_entry(chain, _buffer(data), _buffer(b"\xff" * len(data)))
    for chain, position, rule in plan.add:
        if position is None:
            table.append_entry(chain, _buffer(encode(rule, family)))
        else:
            table.insert_entry(chain, _buffer(encode(rule, family)), position - 1)
    for chain in plan.drop:
        table.delete_chain(chain)


def _buffer(data: bytes) -> Any:
    return (ctypes.c_ubyte * len(data)).from_buffer_copy(data)
