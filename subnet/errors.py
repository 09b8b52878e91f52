"""Errors say what the caller's loop should do: wait, retry, relist, or end the process."""

from __future__ import annotations


class FlannelError(Exception):
    """Root of every error that this project raises on purpose."""


class UsageError(FlannelError):
    """A flag, variable or local file that waiting cannot cure; the process exits 2."""


class ConfigError(FlannelError):
    """A network config that cannot be used; the daemon waits for a better one.

    The text names key or file, field, value and, where there is one, the
    nearest legal value.
    """


class LeaseDataError(FlannelError):
    """One lease key or value that cannot be used; it is skipped, the others stand."""


class InterfaceError(FlannelError):
    """No external interface fits yet; the text lists what exists."""


class DatastoreError(FlannelError):
    """The datastore did not do what was asked."""


class Unavailable(DatastoreError):
    """No endpoint answers, or not in time; retry with back-off."""


class AccessDenied(DatastoreError):
    """Authentication or permission refused; re-authenticate once, then back off."""


class Compacted(DatastoreError):
    """The wanted revision is gone from the store's history; list anew."""


class Conflict(DatastoreError):
    """A compare-and-swap lost its race; read again and decide anew."""


class NoFreeSubnet(DatastoreError):
    """Every subnet of the pool is leased; the text says size and use."""


class Closed(FlannelError):
    """The component was closed while the call was in flight; unwind quietly."""


class KernelError(FlannelError):
    """A request to the kernel failed: carries errno, operation and object.

    ``errno`` is the positive errno value (errno(3)), 0 if there is none.
    """

    def __init__(self, operation: str, target: object, errno: int, detail: str = "") -> None:
        self.operation, self.target, self.errno, self.detail = operation, target, errno, detail
        super().__init__(f"{operation} {target}: {detail or f'errno {errno}'}")


class RuleError(FlannelError):
    """Traffic rules could not be read or written; the text holds the offending lines."""
