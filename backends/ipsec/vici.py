"""Charon's control socket, through strongSwan's own client (VICI)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vici import Session
from vici.exception import CommandException, DeserializationException, SessionException

from backends.ipsec.connections import Association, Connection
from subnet.errors import FlannelError

SOCKET = "/var/run/charon.vici"
TIMEOUT_S = 10.0
NEGOTIATING = frozenset({"CREATED", "CONNECTING", "REKEYING"})
INSTALLED = frozenset({"INSTALLED", "REKEYING", "REKEYED", "UPDATING"})
"""States in which a child's keys are in the kernel (strongSwan, child_sa_state_t)."""


class CharonError(FlannelError):
    """Charon cannot be reached; everything is to be begun anew."""


class RefusedError(FlannelError):
    """Charon refused one command; others may succeed."""


class Vici:
    """A connection to charon. Used by one thread; ``abort`` may be called by any."""

    def __init__(self, path: str = SOCKET) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        try:
            self._socket.connect(path)
        except OSError as cause:
            self._socket.close()
            raise CharonError(f"charon does not listen at {path}: {cause.strerror or cause}") from cause
        self._session = Session(self._socket)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def abort(self) -> None:
        """Have whatever waits for an answer fail."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def names(self) -> list[str]:
        """Return the names of the connections that charon has. Raises CharonError."""
        with _translated("list connections"):
            return [name.decode() for name in self._session.request("get-conns").get("conns", [])]

    def load_psk(self, owner: str, psk: str) -> None:
        """Let charon know the secret of an address. Raises CharonError, RefusedError."""
        with _translated(f"load the PSK of {owner}"):
            self._session.request("load-shared", {"id": owner, "type": "IKE", "data": psk, "owners": [owner]})

    def unload_psk(self, owner: str) -> None:
        """Let charon forget the secret of an address; one that it has not is fine. Raises CharonError."""
        with _forgiven(), _translated(f"unload the PSK of {owner}"):
            self._session.request("unload-shared", {"id": owner})

    def load(self, connection: Connection) -> None:
        """Add or replace a connection, which begins at once. Raises CharonError, RefusedError."""
        with _translated(f"load connection {connection.name}"):
            self._session.request("load-conn", connection.message())

    def drop(self, name: str) -> None:
        """Remove a connection and what it has negotiated; one that is gone is fine. Raises CharonError.

        The peer is told, but not waited for: it may be gone as well.
        """
        with _forgiven(), _translated(f"unload connection {name}"):
            self._session.request("unload-conn", {"name": name})
        with _forgiven(), _translated(f"terminate connection {name}"):
            self._session.request("terminate", {"ike": name, "timeout": "-1", "force": "yes"})

    def initiate(self, connection: Connection) -> None:
        """Begin to negotiate, and do not wait for the result. Raises CharonError, RefusedError."""
        with _translated(f"initiate connection {connection.name}"):
            self._session.request("initiate", {"ike": connection.name, "child": connection.child, "timeout": "-1"})

    def associations(self) -> dict[str, Association]:
        """Return what there is of each connection, by name. Raises CharonError."""
        found: dict[str, Association] = {}
        with _translated("list associations"):
            for event in self._session.streamed_request("list-sas", "list-sa"):
                for name, said in event.items():
                    before = found.get(name, Association(negotiating=False, installed=False))
                    found[name] = _joined(before, said)
        return found


def _joined(before: Association, said: dict[str, Any]) -> Association:
    """Add one IKE association to what is known of its connection: there may be several, when both ends began."""
    children = said.get("child-sas", {}).values()
    states = {child.get("state", b"").decode() for child in children}
    return Association(
        before.negotiating or said.get("state", b"").decode() in NEGOTIATING or bool(states & NEGOTIATING),
        before.installed or bool(states & INSTALLED),
    )


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except CommandException as cause:
        raise RefusedError(f"charon could not {what}: {cause}") from cause
    except (OSError, SessionException, DeserializationException) as cause:
        raise CharonError(f"charon did not {what}: {cause}") from cause


@contextmanager
def _forgiven() -> Iterator[None]:
    try:
        yield
    except RefusedError:
        return
