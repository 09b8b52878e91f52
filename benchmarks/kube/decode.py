"""``python -m benchmarks.kube.decode WAY DIRECTORY``: what pages of a node list cost in a process of their own.

WAY is ``leases`` (what the daemon does), ``fields`` (its first half: the needed
fields), ``json`` (json.loads) or ``models`` (the Kubernetes client's classes).
All keep what they have read, as a list.
Prints processor seconds, and the greatest memory above that before, in MiB.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.kube.nodes import PREFIX

WAYS = ("leases", "fields", "json", "models")


def reader(way: str) -> Callable[[bytes], list[Any]]:
    """Return what turns a page into a list; everything that it needs is loaded."""
    if way in ("leases", "fields"):
        from subnet.kube.nodes import lease_of  # noqa: PLC0415 - loaded in the process that measures it alone
        from subnet.kube.records import Node, NodePage, decode  # noqa: PLC0415

        if way == "fields":
            return lambda page: [decode(item, Node) for item in decode(page, NodePage).items or ()]

        def leases(page: bytes) -> list[Any]:
            items = decode(page, NodePage).items or ()
            return [lease_of(decode(item, Node), PREFIX, (4,))[0] for item in items]

        return leases
    if way == "json":
        return lambda page: list(json.loads(page)["items"])
    from kubernetes.client import ApiClient, V1NodeList  # noqa: PLC0415

    client = ApiClient()

    def models(page: bytes) -> list[Any]:
        found: V1NodeList = client.deserialize(page.decode(), "V1NodeList", "application/json")
        return list(found.items)

    return models


def memory_mib(what: str) -> float:
    """Return VmRSS or VmHWM of this process (proc(5))."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{what}:")[1].split()[0]) / 1024


def main() -> None:
    """Measure once."""
    way, directory = sys.argv[1:]
    read = reader(way)
    kept: list[Any] = []
    paths = sorted(Path(directory).iterdir())
    read(paths[-1].read_bytes())
    before_mib = memory_mib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    began = time.process_time()
    for path in paths:
        kept += read(path.read_bytes())
    used_s = time.process_time() - began
    print(json.dumps({"s": used_s, "MiB": memory_mib("VmHWM") - before_mib, "kept": len(kept)}))


if __name__ == "__main__":
    main()
