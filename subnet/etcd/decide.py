"""What has become of the own key, and what to do about it. Pure."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from subnet.errors import LeaseDataError
from subnet.etcd.records import unchanged
from subnet.etcd.store import KeyValue
from subnet.model import IPAddress, Lease, LeaseAttrs
from subnet.wire import decode_attrs, encode_attrs, unknown_members


class Verdict(enum.Enum):
    """What a fresh look at the own key shows, compared with what was last known of it."""

    KEPT = "as it was left"
    ADOPTED = "written by someone, but it still says the same"
    REWRITTEN = "rewritten for another node with our public IP, or damaged"
    TAKEN = "now another node's"
    GONE = "deleted or expired"


def judge(held: Lease, found: KeyValue | None) -> Verdict:
    """Compare the lease as held with its key as it is now."""
    if found is None:
        return Verdict.GONE
    if unchanged(held, found):
        return Verdict.KEPT
    attrs = readable(found.value)
    if attrs == held.attrs:
        return Verdict.ADOPTED
    if attrs is None or not announced(attrs) or announced(attrs) & announced(held.attrs):
        return Verdict.REWRITTEN
    return Verdict.TAKEN


def announced(attrs: LeaseAttrs) -> frozenset[IPAddress]:
    """Return the public addresses of a record."""
    return frozenset(a for a in (attrs.public_ip, attrs.public_ipv6) if a is not None)


def readable(value: bytes) -> LeaseAttrs | None:
    """Return what a value says, None if it cannot be understood."""
    try:
        return decode_attrs(value)
    except LeaseDataError:
        return None


def identity(attrs: LeaseAttrs | None) -> str:
    """Return who a record speaks for, in words: addresses, type, and the backend's data (MAC, public key)."""
    if attrs is None:
        return "an unreadable record"
    data = [json.dumps(d, sort_keys=True) for d in (attrs.backend_data, attrs.backend_v6_data) if d is not None]
    where = [str(a) for a in (attrs.public_ip, attrs.public_ipv6) if a is not None] or ["no address"]
    return " ".join([*where, *filter(None, [attrs.backend_type]), *data])


def as_own(leases: Iterable[Lease], held: Lease | None, kvs: Mapping[str, KeyValue], attrs: LeaseAttrs) -> list[Lease]:
    """Mark the key that this process holds as its own, whatever address it announces, unless another node has it."""
    if held is None or judge(held, kvs.get(held.key)) in (Verdict.TAKEN, Verdict.GONE):
        return list(leases)
    return [replace(lease, attrs=attrs) if lease.key == held.key else lease for lease in leases]


def own_value(attrs: LeaseAttrs, before: bytes | None) -> bytes:
    """Return the value to write: ``before`` untouched if it says the same, its unknown members kept otherwise."""
    if before is None:
        return encode_attrs(attrs)
    try:
        return before if decode_attrs(before) == attrs else encode_attrs(attrs, extra=unknown_members(before))
    except LeaseDataError:
        return encode_attrs(attrs)


@dataclass
class FlipGuard:
    """Tells a slip from a second live node with our public IP, and how long to leave the key to it.

    One rewrite of our record by others is answered at once. Another within
    ``window_s`` means that somebody else does the same as we do.
    """

    window_s: float = 300.0
    first_s: float = 10.0
    ceiling_s: float = 300.0
    _at: float | None = field(default=None, init=False)
    _hold_s: float = field(default=0.0, init=False)

    def flipped(self, now: float) -> float:
        """Note a rewrite by others; returns for how many seconds to leave it so, 0 to answer at once."""
        again = self._at is not None and now - self._at <= self.window_s + self._hold_s
        self._at = now
        self._hold_s = min(self._hold_s * 2 or self.first_s, self.ceiling_s) if again else 0.0
        return self._hold_s
