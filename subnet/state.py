"""The cached state as text: what a node needs to start again while its datastore is away. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from subnet.errors import FlannelError, LeaseDataError
from subnet.gojson import JsonError, dumps, loads, show
from subnet.model import Json, Lease
from subnet.wire import decode_attrs, encode_attrs, parse_subnet_key, subnet_key

VERSION = 1
"""Of the file's shape; another one is not read."""
_LAST_S = 253402300799
"""The end of the year 9999: later times have no date."""

_T = TypeVar("_T")


class StateError(FlannelError):
    """A cached state that cannot be used or kept; the daemon does without. The text says why."""


@dataclass(frozen=True, slots=True)
class State:
    """What the datastore said last.

    ``datastore`` names the network in it, such as an etcd prefix, so that no
    other network's state is taken for ours. ``seen_at_s`` is the Unix time in
    seconds when the store was last known to say so. ``config`` is the JSON text
    of the network config. ``peers`` are all leases but the own one.
    """

    datastore: str
    seen_at_s: int
    config: str
    own: Lease | None = None
    peers: tuple[Lease, ...] = ()


def encode(state: State) -> bytes:
    """Return the state as one JSON object; keys and values of leases are spelt as in etcd.

    Peers whose values cannot be encoded (nested too deeply) are left out.
    """
    record = {
        "version": VERSION,
        "datastore": state.datastore,
        "seen_at_s": state.seen_at_s,
        "config": state.config,
        "own": None if state.own is None else _entry(state.own),
        "peers": list(_entries(state.peers)),
    }
    return dumps(record) + b"\n"


def decode(text: bytes) -> State:
    """Return the state that ``encode`` made a text of. Raises StateError.

    Unusable peers are passed over: one of them must not take the others along.
    """
    record = _object(text)
    own = record.get("own")
    return State(
        _member(record, "datastore", str),
        _time_s(record),
        _member(record, "config", str),
        None if own is None else _lease(own),
        tuple(_leases(_member(record, "peers", list))),
    )


def _entry(lease: Lease) -> Json:
    return {
        "subnet": subnet_key(lease.subnets),
        "value": encode_attrs(lease.attrs).decode(),
        "key": lease.key,
        "lease_id": lease.lease_id,
        "revision": lease.revision,
    }


def _entries(leases: Iterable[Lease]) -> Iterator[Json]:
    for lease in leases:
        try:
            yield _entry(lease)
        except (ValueError, RecursionError):
            continue


def _object(text: bytes) -> Mapping[str, Json]:
    try:
        record = loads(text)
    except JsonError as error:
        raise StateError(str(error)) from error
    if not isinstance(record, dict):
        raise StateError(f"is {show(record)}, not an object")
    version = _member(record, "version", int)
    if version != VERSION:
        raise StateError(f"has version {version}, this daemon reads {VERSION}")
    return record


def _member(record: Mapping[str, Json], name: str, kind: type[_T]) -> _T:
    value = record.get(name)
    if type(value) is not kind:  # JSON true is a Python int
        raise StateError(f"{name} is {show(value)}")
    return value


def _time_s(record: Mapping[str, Json]) -> int:
    seconds = _member(record, "seen_at_s", int)
    if not 0 <= seconds <= _LAST_S:
        raise StateError(f"seen_at_s is {show(seconds)}")
    return seconds


def _lease(record: Json) -> Lease:
    if not isinstance(record, dict):
        raise StateError(f"a lease is {show(record)}")
    try:
        subnets = parse_subnet_key(_member(record, "subnet", str))
        attrs = decode_attrs(_member(record, "value", str).encode())
    except LeaseDataError as error:
        raise StateError(str(error)) from error
    return Lease(
        subnets,
        attrs,
        _member(record, "key", str),
        _member(record, "lease_id", int),
        _member(record, "revision", int),
    )


def _leases(records: Iterable[Json]) -> Iterator[Lease]:
    for record in records:
        try:
            yield _lease(record)
        except StateError:
            continue
