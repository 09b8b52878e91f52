"""From an HTTP answer to an error that says what the caller's loop should do. Pure."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from dataclasses import dataclass

from subnet.errors import AccessDenied, Compacted, Conflict, DatastoreError, Unavailable
from subnet.kube.records import Status, decode

LONGEST_RETRY_AFTER_S = 60.0
SHOWN_CHARS = 300


class NotFound(DatastoreError):
    """The object does not exist (yet)."""


class Busy(Unavailable):
    """The server asks to be left alone for ``retry_after_s`` seconds."""

    def __init__(self, text: str, retry_after_s: float) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of the server, in the words of its access rules: ``patch``, ``nodes/status``, ``n1``."""

    verb: str
    resource: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.resource}{self.name and ' '}{self.name}"


def read_status(body: bytes) -> Status:
    """Return the server's reason; proxies answer with other things than a Status."""
    try:
        return decode(body, Status)
    except DatastoreError:
        return Status(body.decode(errors="replace").strip()[:SHOWN_CHARS])


def refused(request: Request, code: int, status: Status, *, account: str, retry_after: str = "") -> DatastoreError:
    """Return the error for an answer that is no success.

    ``account`` is whom the server takes us for, for messages. ``retry_after``
    is the header's text (RFC 9110 s10.2.3); a date counts as no number.
    """
    reason = (status.message or status.reason or "no reason given").strip()[:SHOWN_CHARS]
    text = f"{request}: HTTP {code}: {reason}"
    match code:
        case 401:
            return AccessDenied(f"{request} is refused: the API server does not accept {account} (HTTP 401: {reason})")
        case 403:
            return AccessDenied(f"{request} is forbidden to {account} (HTTP 403: {reason})")
        case 404:
            return NotFound(text)
        case 409:
            return Conflict(text)
        case 410:
            return Compacted(text)
    seconds = min(float(retry_after), LONGEST_RETRY_AFTER_S) if retry_after.isdecimal() else 0.0
    if code == 429 or seconds:
        return Busy(text, max(seconds, 1.0))
    return Unavailable(text) if code >= 500 else DatastoreError(text)


def stream_error(request: Request, status: Status) -> DatastoreError:
    """Return the error that an ERROR event of a watch stands for."""
    return refused(request, status.code or 500, status, account="this client")


def account_of(authorization: str, otherwise: str) -> str:
    """Return the account that a bearer token names (RFC 7519 s4.1.2), for messages; the token is not checked."""
    parts = authorization.rpartition(" ")[2].split(".")
    if len(parts) != 3:
        return otherwise
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError):
        return otherwise
    subject = claims.get("sub") if isinstance(claims, Mapping) else None
    return subject if isinstance(subject, str) and subject.isprintable() and subject else otherwise
