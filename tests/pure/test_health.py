from __future__ import annotations

import http.client
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld.healthserver import HealthServer
from flanneld.healthz import Health
from flanneld.systemd import Notifier
from subnet.clock import SystemClock
from tests.support.clock import ManualClock
from tests.support.etcd import free_port

pytestmark = pytest.mark.pure


class Site:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.health = Health(self.clock)
        self.port = free_port()
        self.server = HealthServer("127.0.0.1", self.port, self.health, SystemClock())
        self.server.start()

    def ask(self, path: str, method: str = "GET") -> tuple[int, str, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        for _ in range(200):
            try:
                connection.connect()
                break
            except ConnectionRefusedError:
                self.server.thread.join(0.02)
        connection.request(method, path)
        answer = connection.getresponse()
        found = answer.status, answer.read().decode(), answer.headers["Content-Type"].split(";")[0]
        connection.close()
        return found


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.server.close()
    assert not site.server.thread.is_alive()


def test_texts_and_codes_are_upstreams(site: Site) -> None:
    assert site.ask("/healthz") == (200, "flanneld is running", "text/plain")
    assert site.ask("/readyz") == (503, "flanneld is not ready yet", "text/plain")
    site.health.ready = True
    assert site.ask("/readyz") == (200, "flanneld is ready", "text/plain")
    assert site.ask("/nothing")[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_any_method_is_answered(site: Site, method: str) -> None:
    assert site.ask("/healthz", method)[:2] == (200, "flanneld is running")


def test_head_has_no_body(site: Site) -> None:
    assert site.ask("/healthz", "HEAD")[:2] == (200, "")


def test_readiness_drops_again_and_tells_why_on_demand(site: Site) -> None:
    site.health.ready = True
    assert site.ask("/readyz")[0] == 200
    site.health.ready, site.health.reason = False, "waiting for a subnet lease"
    assert site.ask("/readyz?verbose")[:2] == (503, "flanneld is not ready yet: waiting for a subnet lease")


def test_readiness_in_spite_of_trouble_tells_of_it_on_demand(site: Site) -> None:
    site.health.ready, site.health.reason = True, "etcd does not answer"
    assert site.ask("/readyz")[:2] == (200, "flanneld is ready")
    assert site.ask("/readyz?verbose")[:2] == (200, "flanneld is ready: etcd does not answer")


def test_stuck_owner_is_not_alive(site: Site) -> None:
    site.clock.pass_s(59)
    assert site.ask("/healthz")[0] == 200
    site.clock.pass_s(2)
    assert site.ask("/healthz")[0] == 503
    site.health.beat()
    assert site.ask("/healthz")[0] == 200


def test_taken_port_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as rival:
        rival.bind(("127.0.0.1", 0))
        rival.listen()
        port = int(rival.getsockname()[1])
        site = Site.__new__(Site)
        site.clock, site.port = ManualClock(), port
        site.health = Health(site.clock)
        site.server = HealthServer("127.0.0.1", port, site.health, SystemClock())
        site.server.start()
        for _ in range(500):
            if "trying again" in caplog.text:
                break
            site.server.thread.join(0.01)
        assert f"health endpoint 127.0.0.1:{port}" in caplog.text
    assert site.ask("/healthz")[0] == 200
    site.server.close()


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A service manager's end of NOTIFY_SOCKET."""
    path = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        end.bind(path)
        end.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", path)
        yield end


def _heard(end: socket.socket) -> list[str]:
    messages: list[str] = []
    while True:
        try:
            messages.append(end.recv(4096).decode())
        except BlockingIOError:
            return messages


def test_ready_is_said_once_and_status_on_change(manager: socket.socket) -> None:
    notifier = Notifier({})
    notifier.status("not ready: waiting\nfor more")
    notifier.status("not ready: waiting\nfor more")
    notifier.ready("subnet 10.5.1.0/24")
    notifier.ready("subnet 10.5.1.0/24")
    notifier.status("not ready: lease lost")
    notifier.ready("subnet 10.5.2.0/24")
    notifier.stopping()
    assert _heard(manager) == [
        "STATUS=not ready: waiting for more",
        "READY=1\nSTATUS=subnet 10.5.1.0/24",
        "STATUS=not ready: lease lost",
        "STATUS=subnet 10.5.2.0/24",
        "STOPPING=1\nSTATUS=stopping",
    ]


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, 0.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 30.0),
        ({"WATCHDOG_USEC": "often"}, 0.0),
    ],
)
def test_watchdog_interval_is_ours_only(environ: dict[str, str], watchdog_s: float) -> None:
    assert Notifier(environ).watchdog_s == watchdog_s


def test_sign_of_life_only_if_wanted(manager: socket.socket) -> None:
    Notifier({}).alive()
    Notifier({"WATCHDOG_USEC": "1000000"}).alive()
    assert _heard(manager) == ["WATCHDOG=1"]
