"""``python -m benchmarks.kube.manager WAY URL``: the subnet manager at an API server, in a process of its own.

WAY is ``manager``, or ``bytes``: the same client reads the same pages, and
nothing is made of them. Prints seconds, processor seconds, and, of the
manager, processor seconds per update.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from benchmarks.kube.nodes import OWN, PAGE
from subnet.kube.client import KubeClient
from subnet.kube.manager import KubeManager, KubeSettings
from subnet.manager import LeasesChanged, LeasesListed, StoreEvent

UPDATES = 400
TIMEOUT_S = 120.0


class _Ear:
    """Counts what it hears."""

    def __init__(self) -> None:
        self.listed, self.changed = threading.Event(), threading.Semaphore(0)

    def __call__(self, event: StoreEvent) -> None:
        if isinstance(event, LeasesListed):
            self.listed.set()
        elif isinstance(event, LeasesChanged):
            self.changed.release(len(event.changes))


def read_bytes(url: str) -> None:
    """Read all pages."""
    client, token = KubeClient(KubeSettings(api_url=url, node_name=OWN)), ""
    while True:
        page = client.list_nodes(token, PAGE)
        # The continue token is a number here, and stands before the items.
        token = page[:300].partition(b'"continue":"')[2].partition(b'"')[0].decode()
        if not token:
            return


def main() -> None:
    """Measure once."""
    way, url = sys.argv[1:]
    began, used = time.monotonic(), time.process_time()
    figures: dict[str, float] = {}
    if way == "bytes":
        read_bytes(url)
        figures = {"s": time.monotonic() - began, "cpu s": time.process_time() - used}
    else:
        with tempfile.TemporaryDirectory() as directory:
            config = Path(directory) / "net-conf.json"
            config.write_text(json.dumps({"Network": "10.0.0.0/8", "Backend": {"Type": "vxlan"}}))
            ear = _Ear()
            manager = KubeManager(KubeSettings(api_url=url, node_name=OWN, net_config_path=str(config)))
            manager.start(ear)
            if not ear.listed.wait(TIMEOUT_S):
                raise SystemExit("no list")
            figures = {"s": time.monotonic() - began, "cpu s": time.process_time() - used}
            time.sleep(0.5)  # until it watches
            figures["update s"] = _update_s(url, ear)
            manager.close()
    print(json.dumps(figures), flush=True)
    os._exit(0)


def _update_s(url: str, ear: _Ear) -> float:
    used = time.process_time()
    with urllib.request.urlopen(f"{url}/updates/{UPDATES}", timeout=TIMEOUT_S):  # noqa: S310 - our own server
        pass
    for _ in range(UPDATES):
        if not ear.changed.acquire(timeout=TIMEOUT_S):
            raise SystemExit("updates are missing")
    return (time.process_time() - used) / UPDATES


if __name__ == "__main__":
    main()
