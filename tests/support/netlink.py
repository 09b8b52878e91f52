"""Netlink messages as pyroute2 writes them: what our own bytes are compared with."""

from __future__ import annotations

from typing import Any

from pyroute2.netlink import nlmsg
from pyroute2.netlink.rtnl.rtmsg import rtmsg


class Nexthop(nlmsg):  # type: ignore[misc]
    """A nexthop object (linux/nexthop.h), which pyroute2 does not know."""

    prefix = "NHA_"
    fields = (("family", "B"), ("scope", "B"), ("protocol", "B"), ("resvd", "B"), ("flags", "I"))
    nla_map = (
        ("NHA_UNSPEC", "none"),
        ("NHA_ID", "uint32"),
        ("NHA_GROUP", "hex"),
        ("NHA_GROUP_TYPE", "uint16"),
        ("NHA_BLACKHOLE", "flag"),
        ("NHA_OIF", "uint32"),
        ("NHA_GATEWAY", "ip4addr"),
    )


class NexthopRoute(nlmsg):  # type: ignore[misc]
    """An IPv4 route with the attribute that names a nexthop object (linux/rtnetlink.h).

    Not a kind of pyroute2's ``rtmsg``: once that was used, its attributes are those of its heirs.
    """

    prefix = "RTA_"
    fields = rtmsg.fields
    nla_map = ((1, "RTA_DST", "ip4addr"), (30, "RTA_NH_ID", "uint32"))


def reference(  # noqa: PLR0917
    cls: Any, kind: int, flags: int, sequence: int, fields: dict[str, Any], attrs: list[Any]
) -> bytes:
    """Return a message of a pyroute2 class with these header fields, fields and attributes."""
    message = cls()
    message["header"]["type"] = kind
    message["header"]["flags"] = flags
    message["header"]["sequence_number"] = sequence
    for name, value in fields.items():
        message[name] = value
    message["attrs"] = attrs
    message.encode()
    return bytes(message.data)
