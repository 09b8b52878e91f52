"""Stand-ins for an iptables variant and for the kernel's notifications."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from flanneld.traffic.ports import Interest
from flanneld.traffic.render import Saved, TablePlan, restore_text
from flanneld.traffic.rules import RuleSet
from subnet.errors import KernelError, RuleError
from subnet.model import Family
from tests.support.restore import RestoreError, Tables, restore


class FakeFirewall:
    """Tables in memory. ``meanwhile`` changes them just before a plan; plans with the text ``refuses`` fail."""

    name = "fake"
    random_fully = True

    def __init__(self, families: Sequence[Family] = (4, 6)) -> None:
        self.families = families
        self.tables: dict[Family, Tables] = {4: {}, 6: {}}
        self.meanwhile: Callable[[Tables], None] = lambda _: None
        self.refuses = "\0"
        self.reads = 0
        self.applied: list[bool] = []

    def covers(self, family: Family) -> bool:
        return family in self.families

    def read(self, family: Family) -> Saved:
        assert family in self.families
        self.reads += 1
        held = self.tables[family]
        return Saved({t: {c: tuple(rules) for c, rules in chains.items()} for t, chains in held.items()})

    def look(self, family: Family, wanted: Sequence[RuleSet]) -> Saved:
        return self.read(family)

    def apply(self, family: Family, plans: Sequence[TablePlan]) -> None:
        text = restore_text(plans)
        self.applied.append(False)
        self.meanwhile(self.tables[family])
        if self.refuses in text:
            raise RuleError(next(line for line in text.splitlines() if self.refuses in line))
        try:
            self.tables[family] = restore(self.tables[family], text)
        except RestoreError as e:
            raise RuleError(str(e)) from e
        self.applied[-1] = True


class FakeWatch:
    """News on demand: ``number`` is the generation; ``tell`` makes news, of an end if ``broken``."""

    def __init__(self) -> None:
        self.number = 1
        self.broken = False
        self.closed = False
        self._news = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def tell(self) -> None:
        os.eventfd_write(self._news, 1)

    def fileno(self) -> int:
        return self._news

    def drain(self, interest: Interest) -> bool:
        assert interest("nat", "FLANNEL-POSTRTG")
        assert not interest("nat", "DOCKER")
        if self.broken:
            raise KernelError("read notifications of", "nf_tables", 5)
        try:
            os.eventfd_read(self._news)
        except BlockingIOError:
            return False
        return True

    def generation(self) -> int | None:
        return self.number

    def close(self) -> None:
        assert not self.closed
        self.closed = True
        os.close(self._news)
