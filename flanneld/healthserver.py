"""/healthz and /readyz over HTTP. Source: upstream main.go, mustRunHealthz.

The texts are upstream's; ``/readyz?verbose`` adds the reason, or what is wrong in spite of readiness.
Loaded only where the port is set: the standard library's server is heavy.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from flanneld.healthz import STUCK_S, Health
from subnet.clock import Backoff, Clock
from subnet.report import Reporter

log = logging.getLogger(__name__)


class HealthServer:
    """Serves until closed; a port that is taken is tried again, not a reason to end."""

    def __init__(self, address: str, port: int, health: Health, clock: Clock) -> None:
        self._address, self._port, self._health = address, port, health
        self._reporter = Reporter(log, clock)
        self._stop = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.thread = threading.Thread(target=self._run, name="healthz", daemon=True)

    def start(self) -> None:
        """Begin to serve in a thread of its own."""
        self.thread.start()

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        with suppress(OSError):
            os.write(self._wake_write, b"x")
        if self.thread.is_alive():
            self.thread.join(1)

    def _run(self) -> None:
        backoff = Backoff(first_s=0.5, ceiling_s=10)
        while not self._stop.is_set():
            try:
                server = self._bind()
            except OSError as error:
                where = f"{self._address}:{self._port}"
                self._reporter.problem("bind", f"health endpoint {where}: {error.strerror}; trying again")
                self._stop.wait(backoff.next_s())
                continue
            with server:
                self._reporter.solved("bind", "health endpoint is bound")
                self._serve(server)

    def _serve(self, server: ThreadingHTTPServer) -> None:
        """Answer until closed. ``serve_forever`` would look twice a second whether it is to end."""
        while not self._stop.is_set():
            readable, _, _ = select.select([server.fileno(), self._wake_read], [], [])
            if server.fileno() in readable:
                server.handle_request()

    def _bind(self) -> ThreadingHTTPServer:
        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in self._address else socket.AF_INET
            daemon_threads = True
            timeout = 0.0
            """Of a connection that is gone again when it is to be taken."""

        return Server((self._address, self._port), _handler(self._health))


def _handler(health: Health) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 10

        def __getattr__(self, name: str) -> object:
            # Any method is answered alike, as upstream does.
            if name.startswith("do_"):
                return self._answer
            raise AttributeError(name)

        def _answer(self) -> None:
            status, text = _respond(self.path, health)
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)
            self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            log.debug(format, *args)

    return Handler


def _respond(target: str, health: Health) -> tuple[HTTPStatus, str]:
    path, _, query = target.partition("?")
    if path == "/healthz":
        if health.stuck:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"flanneld is stuck: no progress for more than {STUCK_S:.0f} s"
        return HTTPStatus.OK, "flanneld is running"
    if path == "/readyz":
        detail = f": {health.reason}" if query == "verbose" and health.reason else ""
        if health.ready:
            return HTTPStatus.OK, f"flanneld is ready{detail}"
        return HTTPStatus.SERVICE_UNAVAILABLE, f"flanneld is not ready yet{detail}"
    return HTTPStatus.NOT_FOUND, "not found"
