"""What the keeper needs of the ways to write rules, and what iptables mode needs of a variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from flanneld.traffic.render import Saved, TablePlan
from flanneld.traffic.rules import RuleSet, TrafficPolicy
from subnet.model import Family

Variant = Literal["nft", "legacy"]

Interest = Callable[[str, str | None], bool]
"""Whether news is wanted of a table, and of which chain of it: '' if of the table itself, None if of something else."""


class Enforcer(Protocol):
    """One way to write rules on this host: an iptables variant or nftables mode. Used from one thread only."""

    @property
    def name(self) -> str:
        """Return how people call it."""
        ...

    def covers(self, family: Family) -> bool:
        """Whether the tools for this family are there."""
        ...

    def converge(self, policy: TrafficPolicy, family: Family) -> bool:
        """Make one family's rules what the policy wants, this way; return whether anything changed.

        Raises RuleError.
        """
        ...

    def interested(self, policy: TrafficPolicy, table: str, chain: str | None) -> bool:
        """Whether news of this table and chain can be about rules of the policy."""
        ...


class Firewall(Protocol):
    """One iptables variant of this host, both families. Used from one thread only."""

    @property
    def name(self) -> str:
        """Return how people call it."""
        ...

    @property
    def random_fully(self) -> bool:
        """Whether MASQUERADE --random-fully can be used."""
        ...

    def covers(self, family: Family) -> bool:
        """Whether the tools for this family are there."""
        ...

    def read(self, family: Family) -> Saved:
        """Return what the family's tables nat and filter hold. Raises RuleError."""
        ...

    def look(self, family: Family, wanted: Sequence[RuleSet]) -> Saved:
        """Return at least the chains of ``wanted`` and all that jumps to them, cheaply. Raises RuleError."""
        ...

    def apply(self, family: Family, plans: Sequence[TablePlan]) -> None:
        """Carry out the plans, each table atomically. Raises RuleError, then nothing of the failing table is done."""
        ...


class Watch(Protocol):
    """News that rules may have changed, without asking a program."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        ...

    def drain(self, interest: Interest) -> bool:
        """Take all news, without waiting; return whether any is of interest, or some was lost.

        Raises KernelError when there will be no more news.
        """
        ...

    def generation(self) -> int | None:
        """Return a number that differs after any change of any rule, None if it cannot be told."""
        ...

    def close(self) -> None:
        """Give back the descriptors."""
        ...
