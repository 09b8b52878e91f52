"""What the keeper needs of an iptables variant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from flanneld.traffic.render import Saved, TablePlan
from subnet.model import Family

Variant = Literal["nft", "legacy"]


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

    def apply(self, family: Family, plans: Sequence[TablePlan]) -> None:
        """Carry out the plans, each table atomically. Raises RuleError, then nothing of the failing table is done."""
        ...


class Watch(Protocol):
    """News that rules may have changed, without asking a program."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is news."""
        ...

    def drain(self, chain_prefix: str) -> bool:
        """Take all news, without waiting; return whether any may concern chains of this prefix or jumps to them.

        Raises KernelError when there will be no more news.
        """
        ...

    def generation(self) -> int | None:
        """Return a number that differs after any change of any rule, None if it cannot be told."""
        ...

    def close(self) -> None:
        """Give back the descriptors."""
        ...
