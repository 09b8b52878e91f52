"""Rules read and written with iptables-save and iptables-restore, of either variant.

The nft variant has no other interface that keeps its rules readable for the
installed iptables. The legacy variant is spoken this way where libiptc is missing.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from flanneld.traffic.lock import WAIT_S, LockHeld, default_path, xtables_lock
from flanneld.traffic.nft_chains import read_chains
from flanneld.traffic.ports import Variant
from flanneld.traffic.render import Saved, TablePlan, parse_save, restore_text
from flanneld.traffic.rules import RuleSet
from flanneld.traffic.runner import Runner
from subnet.clock import Clock
from subnet.errors import KernelError, RuleError
from subnet.model import Family

log = logging.getLogger(__name__)

Version = tuple[int, ...]

_RESTORE_WAIT_SINCE: Version = (1, 6, 2)
_RANDOM_FULLY_SINCE: Version = (1, 6, 2)
_LINE = re.compile(r"line:? (\d+)")


@dataclass(frozen=True, slots=True)
class Tools:
    """Programs of one variant: per family the paths of save and restore."""

    variant: Variant
    version: Version
    save: Mapping[Family, str] = field(default_factory=dict)
    restore: Mapping[Family, str] = field(default_factory=dict)

    @property
    def random_fully(self) -> bool:
        """Whether this version knows MASQUERADE --random-fully."""
        return self.version >= _RANDOM_FULLY_SINCE

    @property
    def restore_waits(self) -> bool:
        """Whether restore takes the lock by itself and can wait for it; the nft variant has no lock."""
        return self.variant == "legacy" and self.version >= _RESTORE_WAIT_SINCE

    def covers(self, family: Family) -> bool:
        """Whether both programs of the family are there."""
        return family in self.save and family in self.restore


class CommandFirewall:
    """A variant through its programs: one process per read, one per write, and none per look in the nft variant."""

    def __init__(self, tools: Tools, runner: Runner, clock: Clock) -> None:
        self.tools, self.runner, self.clock = tools, runner, clock
        self.random_fully = tools.random_fully
        self._understood: set[Family] = set()
        self.name = f"iptables {'.'.join(map(str, tools.version))} ({tools.variant})"

    def covers(self, family: Family) -> bool:
        """Whether both programs of the family are there."""
        return self.tools.covers(family)

    def read(self, family: Family) -> Saved:
        """Return what all tables hold. Raises RuleError."""
        done = self.runner.run([self._program(self.tools.save, family)])
        if done.rc:
            raise RuleError(f"{self._name(self.tools.save, family)} failed ({done.rc}): {_one_line(done.err)}")
        return parse_save(done.out)

    def look(self, family: Family, wanted: Sequence[RuleSet]) -> Saved:
        """Return at least the chains of ``wanted`` and what jumps to them. Raises RuleError."""
        found = None
        if self.tools.variant == "nft":
            try:
                found = read_chains(family, wanted, understood=family in self._understood)
            except KernelError as e:
                log.debug("chains cannot be read one by one: %s", e)
            if found is not None and any(found.chains(rules.table).get(rules.chain) for rules in wanted):
                self._understood.add(family)
        return found if found is not None else self.read(family)

    def apply(self, family: Family, plans: Sequence[TablePlan]) -> None:
        """Carry out the plans in one restore. Raises RuleError with the offending lines."""
        argv = [self._program(self.tools.restore, family), "--noflush"]
        if self.tools.restore_waits:
            argv.append(f"--wait={WAIT_S}")
        text = restore_text(plans)
        # The program may be another version by now, and write otherwise.
        self._understood.discard(family)
        with self._lock():
            done = self.runner.run(argv, text)
        if done.rc:
            name = self._name(self.tools.restore, family)
            kind = LockHeld if "xtables lock" in done.err else RuleError
            raise kind(f"{name} failed ({done.rc}): {explain(done.err, text)}")

    def _lock(self) -> AbstractContextManager[None]:
        if self.tools.variant == "legacy" and not self.tools.restore_waits:
            return xtables_lock(default_path(), self.clock, self.runner.closed)
        return nullcontext()

    def _program(self, programs: Mapping[Family, str], family: Family) -> str:
        if family not in programs:
            raise RuleError(f"no {self.tools.variant} {'iptables' if family == 4 else 'ip6tables'} programs found")
        return programs[family]

    def _name(self, programs: Mapping[Family, str], family: Family) -> str:
        return os.path.basename(programs[family])


def explain(err: str, text: str) -> str:
    """Return the message of a failed restore with the lines of the input that it names."""
    lines = text.splitlines()
    numbers = sorted({int(n) for n in _LINE.findall(err)})
    named = [f"line {n} is: {lines[n - 1]}" for n in numbers if 1 <= n <= len(lines)]
    return "; ".join([_one_line(err), *named])


def _one_line(err: str) -> str:
    """Return what a program said without its usage hints, joined to one line."""
    said = [line.strip() for line in err.splitlines() if line.strip() and not line.startswith("Try `")]
    return " ".join(said) or "no message"
