"""What this node's object is to say: pure, from what it says now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

from subnet.kube.annotations import DATA, MANAGED, NODE_PUBLIC, OVERWRITE, read_address, read_attrs, with_prefix
from subnet.kube.records import OwnNode
from subnet.manager import ThisNode
from subnet.model import FAMILIES, Family, IPAddress, Json, LeaseAttrs

CONDITION = "NetworkUnavailable"
UP = {"status": "False", "reason": "FlannelIsUp", "message": "Flannel is running on this node"}


@dataclass(frozen=True, slots=True)
class Operators:
    """What operators wrote into the node's annotations; ``problems`` are values that cannot be used."""

    node_public: Mapping[Family, IPAddress]
    overwrite: Mapping[Family, str]
    problems: tuple[str, ...]


def read_operators(ours: Mapping[str, str]) -> Operators:
    """Read the operators' annotations, given by suffix. Overwrites are kept as they are spelt."""
    node_public: dict[Family, IPAddress] = {}
    overwrite: dict[Family, str] = {}
    problems: list[str] = []
    for family in FAMILIES:
        try:
            address = read_address(ours, NODE_PUBLIC[family], family)
            if address is not None:
                node_public[family] = address
        except ValueError as error:
            problems.append(f"annotation {error}; ignored")
        try:
            if read_address(ours, OVERWRITE[family], family) is not None:
                overwrite[family] = ours[OVERWRITE[family]]
        except ValueError as error:
            problems.append(f"annotation {error}; ignored")
    return Operators(node_public, overwrite, tuple(problems))


def this_node(node: OwnNode | None, prefix: str) -> tuple[ThisNode, tuple[str, ...]]:
    """Return what the node's object says about the node, and which of its annotations cannot be used."""
    if node is None:
        return ThisNode(), ()
    ours = with_prefix(node.annotations, prefix)
    operators = read_operators(ours)
    v4, v6 = operators.node_public.get(4), operators.node_public.get(6)
    told: LeaseAttrs | None = None
    broken: Mapping[Family, str] = {}
    if MANAGED in ours or any(name in ours for name in DATA.values()):
        told, broken = read_attrs(ours)
    return (
        ThisNode(v4 if isinstance(v4, IPv4Address) else None, v6 if isinstance(v6, IPv6Address) else None, told),
        (*operators.problems, *(f"{text}; written anew" for text in broken.values())),
    )


def annotations_patch(changes: Mapping[str, str | None], prefix: str) -> Json:
    """Return the strategic merge patch that changes annotations, given by suffix; None removes one."""
    return {"metadata": {"annotations": {prefix + name: text for name, text in changes.items()}}}


def condition_patch(node: OwnNode, now: str) -> Json:
    """Return the patch that says the network is available; ``now`` is the time in RFC 3339.

    The time of transition is kept if the condition does not change by it.
    """
    known = node.condition(CONDITION)
    kept = known.last_transition_time if known is not None and known.status == UP["status"] else None
    condition = {"type": CONDITION, "lastHeartbeatTime": now, "lastTransitionTime": kept or now, **UP}
    return {"status": {"conditions": [condition]}}
