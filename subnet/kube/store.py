"""What the manager needs of an API server. All calls block, and may be made from several threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from subnet.model import Json


class NodeStore(Protocol):
    """Answers are JSON as the server sends them.

    Every call raises Unavailable (Busy with a delay), AccessDenied, NotFound,
    Conflict, Compacted, DatastoreError for any other refusal, and Closed.
    """

    def list_nodes(self, token: str, limit: int) -> bytes:
        """Return a page of all nodes, the first without a token; ``limit`` 0: all in one."""
        ...

    def watch_nodes(self, version: str, timeout_s: int) -> Iterator[bytes]:
        """Yield the watch's bytes from after ``version`` as they come, until the server ends it after ``timeout_s``."""
        ...

    def node(self, name: str) -> bytes:
        """Return one node, as fresh as the server's cache."""
        ...

    def pod(self, namespace: str, name: str) -> bytes:
        """Return one pod."""
        ...

    def patch_node(self, name: str, patch: Json) -> bytes:
        """Apply a strategic merge patch to the node's status subresource; returns the node."""
        ...

    def reconnect(self) -> None:
        """Drop all connections: what the host sends from is gone."""
        ...

    def close(self) -> None:
        """End the watch; every later call raises Closed."""
        ...
