"""What the kernel holds, as long as nobody says otherwise: nothing is kept of entries that are as wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from backends.dataplane.model import Route
from backends.dataplane.packed import Entries, Key, Value
from backends.dataplane.table import WantedTable


class Sight:
    """What is seen of the kernel, part by part, beside what is wanted. Pure."""

    def __init__(self, wanted: Entries) -> None:
        self._wanted = wanted
        self._unseen = set(wanted)
        self._other: Entries = {}

    def see(self, part: Entries) -> None:
        """Take a part, which has all that is there of its keys."""
        wanted = self._wanted
        self._other.update({key: value for key, value in part.items() if wanted.get(key) != value})
        self._unseen.difference_update(part)

    def differing(self) -> dict[Key, Value | None]:
        """Return what is there where the kernel is not as wanted, None for nothing. What it holds besides is in it."""
        return {**self._other, **dict.fromkeys(self._unseen)}


class Record:
    """The kernel as seen, ``differing`` from a table as it is: both change from then on."""

    def __init__(self, table: WantedTable, differing: Mapping[Key, Value | None]) -> None:
        table.clean()
        self._table = table
        self._other = dict(differing)
        """What is there where something else is wanted; None: nothing."""

    @property
    def unlike(self) -> set[Key]:
        """Return the keys at which something else is there than is wanted."""
        return self._other.keys() | self._table.dirty

    def get(self, key: Key) -> Value | None:
        """Return what is there, None for nothing."""
        return self._other[key] if key in self._other else self._table.before(key)

    def entries(self, keys: Collection[Key]) -> Entries:
        """Return what is there of these keys."""
        return {key: value for key in keys if (value := self.get(key)) is not None}

    def saw(self, keys: Collection[Key], held: Entries) -> None:
        """Of these keys, ``held`` is there now, and nothing else."""
        self._table.settle(keys)
        for key in keys:
            value = held.get(key)
            if value == self._table.entries.get(key):
                self._other.pop(key, None)
            else:
                self._other[key] = value

    def wrote(self, keys: Collection[Key]) -> None:
        """What is wanted at these many keys is there now."""
        self._table.settle(keys)
        self._other = {key: value for key, value in self._other.items() if key not in keys}

    def foreign_routes(self) -> Iterator[Route]:
        """Return the routes that are there and are not wanted."""
        return (value for value in self._other.values() if isinstance(value, Route))
