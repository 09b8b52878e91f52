"""Node objects as an API server tells them: some 10 KB each, most of it of no concern to the network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.leases import Peer, peers

PREFIX = "flannel.alpha.coreos.com/"
OWN = "own"
PAGE = 500
VERSION = 1000

_IMAGE = {"names": [f"registry.example/some/image@sha256:{'0' * 64}", "registry.example/some/image:v1"]}
_CONDITION = {
    "status": "False",
    "lastHeartbeatTime": "2026-01-01T00:00:00Z",
    "lastTransitionTime": "2026-01-01T00:00:00Z",
    "reason": "KubeletHasSufficientResources",
    "message": "kubelet has sufficient resources available",
}


def node(name: str, cidr: str, annotations: dict[str, str]) -> dict[str, Any]:
    """Return a node object of usual size."""
    metadata = {
        "name": name,
        "uid": f"00000000-0000-0000-0000-{name:0>12}",
        "resourceVersion": str(VERSION),
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {f"label.example/number-{n}": name for n in range(12)},
        "annotations": annotations | {"volumes.example/controller-managed-attach-detach": "true"},
        "managedFields": [
            {
                "manager": "kubelet",
                "operation": "Update",
                "apiVersion": "v1",
                "fieldsV1": {f"f:{n}": {} for n in range(99)},
            }
        ],
    }
    status = {
        "conditions": [{"type": kind, **_CONDITION} for kind in ("MemoryPressure", "DiskPressure", "PIDPressure")],
        "images": [_IMAGE | {"sizeBytes": n} for n in range(45)],
        "capacity": {"cpu": "8", "memory": "32771096Ki", "pods": "110"},
    }
    return {"metadata": metadata, "spec": {"podCIDR": cidr, "podCIDRs": [cidr]}, "status": status}


def of_peer(peer: Peer, public_ip: str = "") -> dict[str, Any]:
    """Return the node of a peer; another public address is what an update changes."""
    told = {
        "kube-subnet-manager": "true",
        "backend-type": "vxlan",
        "backend-data": json.dumps({"VNI": 1, "VtepMAC": peer.mac}, separators=(",", ":")),
        "public-ip": public_ip or peer.public_ip,
    }
    return node(f"node-{peer.base}", f"{peer.base}/24", {PREFIX + key: text for key, text in told.items()})


def own_node() -> dict[str, Any]:
    """Return the node of the daemon that is measured, before it has said anything."""
    return node(OWN, "10.200.1.0/24", {})


def pages(count: int) -> Iterator[bytes]:
    """Yield the answers to a list request in pages: the own node, and ``count`` peers."""
    nodes = [own_node(), *map(of_peer, peers(count))]
    for start in range(0, len(nodes), PAGE):
        meta = {"resourceVersion": str(VERSION)}
        if start + PAGE < len(nodes):
            meta["continue"] = str(start // PAGE + 1)
        document = {"kind": "NodeList", "apiVersion": "v1", "metadata": meta, "items": nodes[start : start + PAGE]}
        yield json.dumps(document, separators=(",", ":")).encode()
