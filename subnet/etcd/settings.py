"""How to reach the datastore and how to treat the own lease."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DEFAULT_PREFIX = "/coreos.com/network"


@dataclass(frozen=True, slots=True)
class EtcdSettings:
    """What the ``--etcd-*`` and lease flags say.

    ``endpoints`` are URLs, each with its own scheme. User name and password
    count only if both are given. ``renew_margin_s`` is how long before its
    expiry a lease is renewed.
    """

    endpoints: tuple[str, ...]
    prefix: str = DEFAULT_PREFIX
    keyfile: str = ""
    certfile: str = ""
    cafile: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    renew_margin_s: float = 3600.0
    on_lease_lost: Literal["reacquire", "exit"] = "reacquire"
