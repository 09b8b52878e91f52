"""Where things are in etcd: ``<prefix>/config`` and ``<prefix>/subnets/<lease key>``."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass
from functools import lru_cache

from subnet.model import Subnets
from subnet.wire import subnet_key


def join(*parts: str) -> str:
    """Join and clean as Go's path.Join: ``//`` and ``.`` vanish, a leading ``/`` is not added."""
    path = posixpath.normpath("/".join(p for p in parts if p))
    return re.sub("//+", "/", path)


def range_end(prefix: str) -> bytes:
    """Return the first key behind all that start with ``prefix`` (etcd API, range_end)."""
    raw = bytearray(prefix.encode("utf-8", "surrogateescape"))
    while raw and raw[-1] == 0xFF:
        raw.pop()
    if not raw:
        return b"\0"  # etcd: every key from the given one on
    raw[-1] += 1
    return bytes(raw)


@lru_cache(maxsize=8)
def _subnets(prefix: str) -> str:
    return join(prefix, "subnets") + "/"


@dataclass(frozen=True, slots=True)
class Layout:
    """The keys below one prefix."""

    prefix: str

    @property
    def config(self) -> str:
        """Key of the network config."""
        return join(self.prefix, "config")

    @property
    def subnets(self) -> str:
        """What every lease key starts with.

        The slash at the end keeps out neighbours such as ``subnets2/``.
        """
        return _subnets(self.prefix)

    def key(self, subnets: Subnets) -> str:
        """Return the full key of a lease."""
        return self.subnets + subnet_key(subnets)

    def name(self, key: str) -> str:
        """Return the part of a lease key that tells its subnets."""
        return key.removeprefix(_subnets(self.prefix))

    @property
    def parent(self) -> str:
        """What the keys beside the prefix start with; near misses are looked for there."""
        parent = posixpath.dirname(join(self.prefix))
        return parent if parent in ("", "/") else parent + "/"

    def resembles_config(self, key: str) -> bool:
        """Whether a key looks like the config key with a slip in it."""
        if key == self.config:
            return False
        tidy = join(key).strip("/").casefold()
        return tidy == self.config.strip("/").casefold() or posixpath.basename(tidy) == "config"
