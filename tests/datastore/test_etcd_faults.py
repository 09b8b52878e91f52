from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from subnet.clock import SystemClock
from subnet.errors import AccessDenied, Closed, DatastoreError, FlannelError, Unavailable
from subnet.etcd.client import EtcdClient
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import Put, Watched
from tests.support.etcd import PREFIX, Etcd, Proxy, Tls, free_port, make_tls, running, until

pytestmark = pytest.mark.datastore

CONFIG, SUBNETS = f"{PREFIX}/config", f"{PREFIX}/subnets/"


def client(*endpoints: str, **settings: str) -> EtcdClient:
    return EtcdClient(EtcdSettings(endpoints, **settings), SystemClock())  # type: ignore[arg-type]


def failure(*endpoints: str, **settings: str) -> FlannelError:
    """Return what reading raises, within the five seconds that a person waits."""
    store = client(*endpoints, **settings)
    began = time.monotonic()
    with pytest.raises(FlannelError) as caught:
        store.snapshot(CONFIG, SUBNETS)
    store.close()
    assert time.monotonic() - began < 8
    return caught.value


def read(*endpoints: str, **settings: str) -> int:
    store = client(*endpoints, **settings)
    try:
        return store.snapshot(CONFIG, SUBNETS).revision
    finally:
        store.close()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tls]:
    directory = tmp_path_factory.mktemp("tls")
    good = make_tls(directory, "good")
    return {
        "good": good,
        "stranger": make_tls(directory, "stranger"),
        "expired": make_tls(directory, "expired", ca=good, past=True),
        "misnamed": make_tls(directory, "misnamed", ca=good, san="DNS:etcd.example"),
    }


@pytest.fixture(scope="module")
def secure(certificates: dict[str, Tls], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(Etcd(tmp_path_factory.mktemp("secure"), tls=certificates["good"])) as etcd:
        yield etcd


def test_E12_ca_file_alone_is_enough(secure: Etcd, certificates: dict[str, Tls]) -> None:
    assert read(secure.url, cafile=str(certificates["good"].ca)) > 0


def test_E12_unknown_ca_is_named(secure: Etcd, certificates: dict[str, Tls]) -> None:
    error = failure(secure.url, cafile=str(certificates["stranger"].ca))
    assert isinstance(error, Unavailable)
    assert secure.url in str(error)
    assert "certificate is signed by an unknown CA" in str(error)
    assert "--etcd-cafile" in str(failure(secure.url))


class Bare:
    """A TLS server that shows a certificate and says no more."""

    def __init__(self, tls: Tls) -> None:
        self.port = free_port()
        command = ["openssl", "s_server", "-quiet", "-accept", f"127.0.0.1:{self.port}", "-alpn", "h2"]
        command += ["-cert", str(tls.cert), "-key", str(tls.key)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(self._listens, what="s_server listens")

    def _listens(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("expired", ("certificate expired on Feb  1 00:00:00 2020 GMT",)),
        ("misnamed", ("name mismatch", "certificate", "etcd.example", "127.0.0.1")),
    ],
)
def test_E12_reason_is_precise(certificates: dict[str, Tls], kind: str, words: tuple[str, ...]) -> None:
    server = Bare(certificates[kind])
    try:
        error = failure(f"https://127.0.0.1:{server.port}", cafile=str(certificates["good"].ca))
    finally:
        server.stop()
    for word in words:
        assert word in str(error)


def test_E12_client_certificate_required(certificates: dict[str, Tls], tmp_path: Path) -> None:
    good, stranger = certificates["good"], certificates["stranger"]
    with running(Etcd(tmp_path, tls=good, client_ca=good.ca)) as etcd:
        assert "demands a client certificate" in str(failure(etcd.url, cafile=str(good.ca)))
        wrong = {"certfile": str(stranger.cert), "keyfile": str(stranger.key)}
        assert "refuses our client certificate" in str(failure(etcd.url, cafile=str(good.ca), **wrong))
        right = {"certfile": str(good.cert), "keyfile": str(good.key)}
        assert read(etcd.url, cafile=str(good.ca), **right) > 0


def test_E11_scheme_of_each_endpoint_decides(etcd: Etcd, secure: Etcd, certificates: dict[str, Tls]) -> None:
    good = certificates["good"]
    files = {"cafile": str(good.ca), "certfile": str(good.cert), "keyfile": str(good.key)}
    dead = f"http://127.0.0.1:{free_port()}"
    assert read(etcd.url) > 0
    assert read(etcd.url, **files) > 0
    assert read(dead, secure.url, **files) > 0
    assert read(f"https://127.0.0.1:{free_port()}", f" {etcd.url} ", **files) > 0
    assert "does not speak TLS" in str(failure(etcd.url.replace("http", "https"), **files))
    assert "speaks TLS" in str(failure(secure.url.replace("https", "http")))


def test_E18_closed_port() -> None:
    urls = [f"http://127.0.0.1:{free_port()}", f"https://127.0.0.1:{free_port()}"]
    error = failure(*urls)
    assert isinstance(error, Unavailable)
    for url in urls:
        assert f"{url}: connection refused" in str(error)


def test_E18_black_hole() -> None:
    # A listener with a full queue: the kernel drops further connection attempts.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        error = failure(f"http://127.0.0.1:{port}")
        for filler in fillers:
            filler.close()
    assert isinstance(error, Unavailable)
    assert f"http://127.0.0.1:{port}: connection attempt timed out" in str(error)


def test_E18_server_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "does not answer" in str(failure(f"http://127.0.0.1:{silent.getsockname()[1]}"))


def test_E18_unknown_host() -> None:
    assert "no-such-host.invalid cannot be resolved" in str(failure("http://no-such-host.invalid:2379"))


def test_E18_authentication(tmp_path: Path) -> None:
    with running(Etcd(tmp_path, args=("--auth-token-ttl", "2"))) as etcd:
        assert read(etcd.url, username="flannel", password="secret") > 0, "authentication is not enabled"
        etcd.enable_auth("flannel", "secret", f"{PREFIX}/")
        wrong = failure(etcd.url, username="flannel", password="wr0ng")
        assert isinstance(wrong, AccessDenied)
        assert "wrong user name or password" in str(wrong)
        assert "wr0ng" not in str(wrong)
        nobody = failure(etcd.url)
        assert isinstance(nobody, AccessDenied)
        assert "give --etcd-username" in str(nobody)
        store = client(etcd.url, username="flannel", password="secret")
        with pytest.raises(AccessDenied, match="permission denied to read /elsewhere"):
            store.get("/elsewhere")
        at = store.txn({}, Put(CONFIG, b"1"))
        targets = [Watched(CONFIG, False, at)]
        assert next(store.watch(targets)).index == -1
        time.sleep(3)
        assert store.get(CONFIG) is not None, "with an expired token"
        etcd.stop()
        etcd.start()
        until(lambda: _reads(store), what="reading after etcd forgot its tokens")
        with pytest.raises(AccessDenied, match="permission denied to watch /elsewhere"):
            next(store.watch([Watched("/elsewhere", False, at)]))
        assert next(store.watch(targets)).index == -1
        store.close()


def _reads(store: EtcdClient) -> bool:
    try:
        return store.get(CONFIG) is not None
    except Unavailable:
        return False


def _fill(store: EtcdClient) -> None:
    for i in range(200):
        store.txn({}, Put(f"/fill/{i}", b"x" * 10000))


def test_E18_out_of_space(tmp_path: Path) -> None:
    with running(Etcd(tmp_path, args=("--quota-backend-bytes", "100000"))) as etcd:
        store = client(etcd.url)
        lease = store.grant(600)
        with pytest.raises(DatastoreError, match="out of space"):
            _fill(store)
        assert store.get("/fill/0") is not None
        assert store.keepalive_once(lease) == 600
        store.close()


def test_fails_over_and_stays_with_the_endpoint_that_works(etcd: Etcd) -> None:
    proxy = Proxy(etcd.port)
    store = client(proxy.url, etcd.url)
    store.snapshot(CONFIG, SUBNETS)
    proxy.cut()
    for _ in range(3):
        store.snapshot(CONFIG, SUBNETS)
    assert next(store.watch([Watched(CONFIG, False, 1)])).index == -1
    store.close()


@pytest.mark.parametrize("call", ["snapshot", "watch", "keepalive_once"])
def test_close_cancels_a_call_that_gets_no_answer(call: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = client(f"http://127.0.0.1:{silent.getsockname()[1]}")
        calls: dict[str, Callable[[], object]] = {
            "snapshot": lambda: store.snapshot(CONFIG, SUBNETS),
            "watch": lambda: next(store.watch([Watched(CONFIG, False, 1)])),
            "keepalive_once": lambda: store.keepalive_once(1),
        }
        timer = threading.Timer(0.3, store.close)
        timer.start()
        began = time.monotonic()
        with pytest.raises(Closed):
            calls[call]()
        assert time.monotonic() - began < 1.5
        timer.join()


def tasks() -> tuple[int, int]:
    """Return how many threads and descriptors this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_P02_watches_that_end_leave_no_task_behind(etcd: Etcd) -> None:
    store = client(etcd.url)

    def watch_and_lose() -> None:
        watch = store.watch([Watched(CONFIG, False, 1)])
        assert next(watch).index == -1
        store.reconnect()
        with pytest.raises(Unavailable):
            next(watch)

    for _ in range(50):
        watch_and_lose()
    threads, descriptors = tasks()
    for _ in range(500):
        watch_and_lose()
    # gRPC's threads come and go in small numbers; what leaks does so once a watch.
    most = (threads + 10, descriptors + 10)
    until(lambda: all(now <= limit for now, limit in zip(tasks(), most, strict=True)), 20, f"{tasks()} at most {most}")
    store.close()


def test_E16_silent_connection_is_noticed(etcd: Etcd, proxy: Proxy) -> None:
    store = client(proxy.url)
    watch = store.watch([Watched(CONFIG, False, 1)])
    next(watch)
    proxy.silence()
    began = time.monotonic()
    with pytest.raises(Unavailable):
        next(watch)
    assert time.monotonic() - began < 20
    etcd.put(CONFIG, "new")
    watch = store.watch([Watched(CONFIG, False, 1)])
    next(watch)
    assert next(watch).events[-1].key == CONFIG
    store.close()


def test_grpc_is_silent_when_the_process_forks_and_ends(etcd: Etcd) -> None:
    program = f"""
import os, subprocess
from subnet.clock import SystemClock
from subnet.etcd.client import EtcdClient
from subnet.etcd.settings import EtcdSettings
from subnet.etcd.store import Watched
store = EtcdClient(EtcdSettings(({etcd.url!r}, "http://127.0.0.1:1", "https://127.0.0.1:1")), SystemClock())
watch = store.watch([Watched("/x", False, 1)])
next(watch)
for _ in range(3):
    subprocess.run(["true"], check=True)
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
store.get("/x")
store.close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
