"""``python -m benchmarks.kube.server ADDRESS COUNT``: an API server whose lists are ready beforehand.

Serves lists in pages, watches, and patches of the own node. A request for
``/updates/N`` makes it tell N changes of peers to whoever watches, and answers
with the public addresses that they get. ``/listed`` answers when the first page
was asked for and when the last one had been sent, by the monotonic clock.
"""

from __future__ import annotations

import json
import queue
import sys
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from benchmarks.kube.nodes import OWN, VERSION, of_peer, own_node, pages
from benchmarks.leases import peers


class Server(ThreadingHTTPServer):
    """Prints its port once it listens."""

    daemon_threads = True

    def __init__(self, address: str, count: int) -> None:
        self.pages = list(pages(count))
        self.peers = peers(count)
        self.own: dict[str, Any] = own_node()
        self.version = VERSION
        self.updates = 0
        self.listed: list[float] = []
        self.watchers: list[queue.Queue[bytes]] = []
        super().__init__((address, 0), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell of faults, but not of clients that have ended."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def update(self) -> str:
        """Give the next peer another public address and tell it; returns the address."""
        address = f"198.19.{self.updates // 250}.{self.updates % 250 + 1}"
        self.tell(of_peer(self.peers[self.updates % len(self.peers)], address))
        self.updates += 1
        return address

    def tell(self, node: dict[str, Any]) -> None:
        """Send a changed node to all who watch."""
        self.version += 1
        node["metadata"]["resourceVersion"] = str(self.version)
        line = json.dumps({"type": "MODIFIED", "object": node}, separators=(",", ":")).encode() + b"\n"
        for watcher in self.watchers:
            watcher.put(line)

    def patch(self, change: dict[str, Any]) -> dict[str, Any]:
        """Merge annotations and conditions into the own node."""
        self.own["metadata"]["annotations"] |= change.get("metadata", {}).get("annotations", {})
        told = change.get("status", {}).get("conditions", [])
        kinds = {condition["type"] for condition in told}
        kept = [condition for condition in self.own["status"]["conditions"] if condition["type"] not in kinds]
        self.own["status"]["conditions"] = kept + told
        self.tell(self.own)
        return self.own


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/updates/"):
            count = int(self.path.rsplit("/", 1)[1])
            self._answer(json.dumps([self.server.update() for _ in range(count)]).encode())
        elif self.path == "/listed":
            self._answer(json.dumps(self.server.listed).encode())
        elif "watch=" in self.path:
            self._watch()
        else:
            began = time.monotonic()
            self._answer(self.server.pages[int(self.path.partition("continue=")[2] or 0)])
            self.server.listed = [*(self.server.listed[:1] or [began]), time.monotonic()]

    def do_PATCH(self) -> None:
        change = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if f"/{OWN}/" not in self.path:
            raise ValueError(f"{self.path}: only {OWN} is patched")
        self._answer(json.dumps(self.server.patch(change)).encode())

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _watch(self) -> None:
        news: queue.Queue[bytes] = queue.Queue()
        self.server.watchers.append(news)
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        with suppress(OSError):
            while True:
                line = news.get()
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))


def main() -> None:
    """Serve until killed."""
    with Server(sys.argv[1], int(sys.argv[2])) as server:
        print(server.server_address[1], flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
