"""What the API server says, decoded by the needed fields alone.

A node object has some 10 KB, and there are thousands: everything that is not
named here is skipped without being built.
Source: Kubernetes API reference, Node v1 core; "API concepts", watches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct, field

from subnet.errors import DatastoreError

T = TypeVar("T")


class Metadata(Struct, rename="camel", gc=False):
    """Of an object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    annotations: dict[str, str] | None = None

    @property
    def created_s(self) -> int:
        """Return the time of creation in seconds since 1970, 0 if it is not known."""
        try:
            return int(datetime.fromisoformat(self.creation_timestamp or "").timestamp())
        except ValueError:
            return 0


class NodeSpec(Struct, gc=False):
    """What the cluster assigned to a node."""

    pod_cidr: str | None = field(default=None, name="podCIDR")
    pod_cidrs: list[str] | None = field(default=None, name="podCIDRs")

    @property
    def cidrs(self) -> tuple[str, ...]:
        """Return the pod CIDRs as text: podCIDRs if there are any, else podCIDR."""
        return tuple(filter(None, self.pod_cidrs or (self.pod_cidr,)))


class Node(Struct, gc=False):
    """A node, as peers see it."""

    metadata: Metadata
    spec: NodeSpec = field(default_factory=NodeSpec)

    @property
    def annotations(self) -> dict[str, str]:
        """Return all annotations."""
        return self.metadata.annotations or {}


class Condition(Struct, rename="camel", gc=False):
    """A condition of a node."""

    type: str
    status: str = ""
    reason: str | None = None
    last_transition_time: str | None = None


class NodeStatus(Struct, gc=False):
    """What is known of a node's state."""

    conditions: list[Condition] | None = None


class OwnNode(Node, gc=False):
    """This node, with its conditions."""

    status: NodeStatus = field(default_factory=NodeStatus)

    def condition(self, name: str) -> Condition | None:
        """Return the condition of that type."""
        return next((c for c in self.status.conditions or () if c.type == name), None)


class ListMetadata(Struct, rename="camel", gc=False):
    """Of a page: ``resource_version`` is where a watch starts, ``continue_`` the token of the next page."""

    resource_version: str = ""
    continue_: str | None = field(default=None, name="continue")


class NodePage(Struct, gc=False):
    """A page of a list. Items are left undecoded, so that one odd node does not spoil the others."""

    metadata: ListMetadata
    items: list[Raw] | None = None


class WatchEvent(Struct, gc=False):
    """One line of a watch. Types: ADDED, MODIFIED, DELETED, BOOKMARK, ERROR."""

    type: str
    object: Raw


class Status(Struct, gc=False):
    """Why a request failed."""

    message: str | None = None
    reason: str | None = None
    code: int = 0


class _PodSpec(Struct, gc=False):
    node_name: str = field(default="", name="nodeName")


class Pod(Struct, gc=False):
    """A pod."""

    spec: _PodSpec


def decode(data: bytes | Raw, kind: type[T]) -> T:
    """Decode JSON. Raises DatastoreError."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise DatastoreError(f"the API server's answer is no {kind.__name__}: {error}") from error


def name_of(data: Raw) -> str:
    """Return the name of an object that may be unreadable otherwise; for messages."""
    try:
        return msgspec.json.decode(data, type=_Named).metadata.name
    except msgspec.MsgspecError:
        return "without a name"


class _Name(Struct, gc=False):
    name: str


class _Named(Struct, gc=False):
    metadata: _Name


def lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Cut a stream into its lines, without their ends; an unfinished last line is dropped."""
    rest = bytearray()
    for block in blocks:
        first, *others = block.split(b"\n")
        rest += first
        for following in others:
            if rest:
                yield bytes(rest)
            rest = bytearray(following)
