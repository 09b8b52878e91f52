"""Notice changes of nf_tables rules without asking a program."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from flanneld.traffic.nfnetlink import (
    DEL_CHAIN,
    DEL_RULE,
    DEL_TABLE,
    GET_GENERATION,
    NEW_CHAIN,
    NEW_GENERATION,
    NEW_RULE,
    NEW_TABLE,
    RECEIVE_BYTES,
    Questions,
    messages,
    open_socket,
)
from flanneld.traffic.nft_entry import jumps
from flanneld.traffic.ports import Interest
from subnet.errors import KernelError

_GROUP_NFTABLES = 7

_TABLES = frozenset({NEW_TABLE, DEL_TABLE})
_GENERATIONS = frozenset({NEW_GENERATION, GET_GENERATION})

_ATTR_TABLE, _ATTR_EXPRESSIONS = 1, 4
_ATTR_NAME_OF_CHAIN: dict[int, int] = {NEW_CHAIN: 3, DEL_CHAIN: 3, NEW_RULE: 2, DEL_RULE: 2}


def subjects(kind: int, attrs: dict[int, bytes]) -> Iterator[tuple[str, str | None]]:
    """Yield table and chain that a message is about, as ``Interest`` takes them: a new rule also about its targets."""
    if kind in _GENERATIONS:
        return
    table = _text(attrs, _ATTR_TABLE)
    if kind in _ATTR_NAME_OF_CHAIN:
        yield table, _text(attrs, _ATTR_NAME_OF_CHAIN[kind])
    else:
        yield table, "" if kind in _TABLES else None
    if kind == NEW_RULE:
        for chain in jumps(attrs.get(_ATTR_EXPRESSIONS, b"")):
            yield table, chain


def _text(attrs: dict[int, bytes], kind: int) -> str:
    return attrs.get(kind, b"").rstrip(b"\0").decode(errors="replace")


class Generations:
    """The number of the current rule set, of the network namespace of the thread that makes this object.

    Raises KernelError where the kernel has no nf_tables.
    """

    def __init__(self) -> None:
        self._questions = Questions()
        if self.number() is None:
            self.close()
            raise KernelError("watch", "nf_tables", errno.EOPNOTSUPP, "the kernel does not answer")

    def number(self) -> int | None:
        """Return the number the kernel increments with every committed change, None if it does not say."""
        return self._questions.generation()

    def close(self) -> None:
        """Give back the socket."""
        self._questions.close()


class NftWatch:
    """Notifications of rule changes in the network namespace of the thread that makes this object.

    Raises KernelError where the kernel has no nf_tables.
    """

    def __init__(self) -> None:
        self._events = open_socket(1 << (_GROUP_NFTABLES - 1))
        try:
            self._generations = Generations()
        except KernelError:
            self._events.close()
            raise

    def fileno(self) -> int:
        """Return the descriptor that is readable when rules changed."""
        return self._events.fileno()

    def drain(self, interest: Interest) -> bool:
        """Take all notifications; return whether one is of interest, or some were lost."""
        concerned = False
        while True:
            try:
                data = self._events.recv(RECEIVE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return concerned
            except OSError as e:
                if e.errno != errno.ENOBUFS:
                    raise KernelError("read notifications of", "nf_tables", e.errno or 0, str(e)) from e
                concerned = True
                continue
            # Once concerned, the rest only has to be taken away.
            concerned = concerned or any(
                interest(*about) for kind, attrs in messages(data) for about in subjects(kind, attrs)
            )

    def generation(self) -> int | None:
        """Return the number the kernel increments with every committed change, None if it does not say."""
        return self._generations.number()

    def close(self) -> None:
        """Give back both sockets."""
        self._events.close()
        self._generations.close()
