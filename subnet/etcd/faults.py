"""What a failed etcd call means, from its gRPC code and text."""

from __future__ import annotations

import enum

from subnet.errors import AccessDenied, Compacted, Conflict, DatastoreError, FlannelError, Unavailable

SERVER = "etcdserver: "
"""How texts begin that come from etcd itself, not from the transport (etcd rpctypes/error.go)."""
UNREACHABLE = frozenset({"UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "CANCELLED", "ABORTED"})
STALE_TOKEN = ("invalid auth token", "user name is empty", "revision of auth store is old")


class Kind(enum.Enum):
    """What the caller can do about it."""

    TRANSPORT = "the connection failed: another endpoint may do better"
    TOKEN = "a new token may do better"  # noqa: S105 - no secret
    FINAL = "the answer stands"


def kind(code: str, text: str) -> Kind:
    """Classify a gRPC status (its name and details)."""
    if code == "UNAUTHENTICATED" or any(t in text for t in STALE_TOKEN):
        return Kind.TOKEN
    if code in UNREACHABLE:
        return Kind.TRANSPORT
    return Kind.FINAL


def translate(code: str, text: str, where: str, what: str, username: str) -> FlannelError:
    """Return the error to raise for a status that stands.

    ``where`` is the endpoint, ``what`` the attempted thing ("read /a/config").
    """
    who = f"user {username!r}" if username else "no user name given"
    cause = text.removeprefix(SERVER) or code
    if kind(code, text) is Kind.TRANSPORT:
        return Unavailable(f"{where}: {cause}")
    if "user name is empty" in text:
        return AccessDenied(f"{where}: etcd demands authentication to {what}; give --etcd-username and --etcd-password")
    if "authentication failed" in text:
        return AccessDenied(f"{where}: authentication of {who} failed: wrong user name or password")
    if code == "UNAUTHENTICATED":
        return AccessDenied(f"{where}: authentication failed ({who}): {cause}")
    if code == "PERMISSION_DENIED":
        return AccessDenied(f"{where}: permission denied to {what} ({who})")
    if "space exceeded" in text:
        return DatastoreError(
            f"{where}: etcd is out of space (NOSPACE alarm), cannot {what}; compact and defragment it, then disarm"
        )
    if "compacted" in text:
        return Compacted(f"{where}: {cause}")
    if "lease not found" in text:
        return Conflict(f"{where}: cannot {what}: {cause}")
    if code == "UNIMPLEMENTED":
        return DatastoreError(f"{where}: the server does not speak the etcd v3 API")
    return DatastoreError(f"{where}: cannot {what}: {cause}")
