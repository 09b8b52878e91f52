"""A real etcd on loopback, certificates for it, and a TCP proxy that misbehaves on demand."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PREFIX = "/coreos.com/network"


_given: set[int] = set()


def free_port() -> int:
    """Return a port that nobody listens on, and never the same twice: who got it first need not listen yet."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port not in _given:
            _given.add(port)
            return port


def until(probe: Callable[[], object], timeout_s: float = 20.0, what: str = "condition") -> None:
    deadline = time.monotonic() + timeout_s
    while not probe():
        assert time.monotonic() < deadline, f"{what} not within {timeout_s} s"
        time.sleep(0.02)


class Etcd:
    def __init__(
        self, directory: Path, tls: Tls | None = None, client_ca: Path | None = None, args: tuple[str, ...] = ()
    ) -> None:
        self.directory, self.tls, self.client_ca, self.args = directory, tls, client_ca, args
        self.port, self._peer_port = free_port(), free_port()
        self.user: tuple[str, ...] = ()
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

    def start(self) -> Etcd:
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = ["etcd", "--name", "test", "--data-dir", str(self.directory / "data"), "--logger", "zap"]
        command += ["--listen-client-urls", self.url, "--advertise-client-urls", self.url]
        command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
        command += ["--initial-cluster", f"test={peer}", "--unsafe-no-fsync"]
        command += ["--heartbeat-interval", "50", "--election-timeout", "500", *self.args]
        if self.tls:
            command += ["--cert-file", str(self.tls.cert), "--key-file", str(self.tls.key)]
        if self.client_ca:
            command += ["--client-cert-auth", "--trusted-ca-file", str(self.client_ca)]
        with (self.directory / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until(self._answers, 30, "etcd answers")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            text = (self.directory / "etcd.log").read_text(errors="replace")
            raise AssertionError(f"etcd exited: {text[-800:]}")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return "is healthy" in self._ctl("endpoint", "health", check=False)
        return False

    def stop(self) -> None:
        if self._process is not None:
            self.resume()
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def wipe(self) -> None:
        shutil.rmtree(self.directory / "data", ignore_errors=True)

    def freeze(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        if self._process is not None and self._stopped:
            self._process.send_signal(signal.SIGCONT)
            self._stopped = False

    def _ctl(self, *args: str, check: bool = True) -> str:
        command = ["etcdctl", "--endpoints", self.url, "--command-timeout", "5s"]
        if self.tls:
            command += ["--cacert", str(self.tls.ca)]
        if self.client_ca:
            assert self.tls is not None
            command += ["--cert", str(self.tls.cert), "--key", str(self.tls.key)]
        if self.user:
            command += ["--user", ":".join(self.user)]
        environment = {"PATH": os.environ["PATH"], "ETCDCTL_API": "3"}
        done = subprocess.run([*command, *args], capture_output=True, text=True, env=environment, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    def ctl(self, *args: str) -> str:
        return self._ctl(*args)

    # -- flannel's keys ------------------------------------------------------------

    def put(self, key: str, value: str, ttl_s: int = 0, lease: int = 0) -> int:
        if ttl_s:
            lease = int(self.ctl("lease", "grant", str(ttl_s)).split()[1], 16)
        self.ctl("put", *([f"--lease={lease:x}"] if lease else []), "--", key, value)
        return lease

    def config(self, value: object) -> None:
        self.put(f"{PREFIX}/config", value if isinstance(value, str) else json.dumps(value))

    def peer(self, n: int, ttl_s: int = 3600) -> None:
        data = {"VNI": 1, "VtepMAC": f"02:00:00:00:00:{n:02x}"}
        record = {"PublicIP": f"192.0.2.{n}", "PublicIPv6": None, "BackendType": "vxlan", "BackendData": data}
        self.put(f"{PREFIX}/subnets/10.5.{n}.0-24", json.dumps(record, separators=(",", ":")), ttl_s)

    def delete(self, key: str, prefix: bool = False) -> None:
        self.ctl("del", *(["--prefix"] if prefix else []), key)

    def record(self, key: str) -> dict[str, int]:
        """Return version, mod_revision, create_revision and lease of a key, empty if it does not exist."""
        kvs = json.loads(self.ctl("get", key, "-w", "json")).get("kvs", [])
        return (
            {k: int(kvs[0].get(k, 0)) for k in ("version", "mod_revision", "create_revision", "lease")} if kvs else {}
        )

    def value(self, key: str) -> str:
        return self.ctl("get", key, "--print-value-only").removesuffix("\n")

    def keys(self, prefix: str = f"{PREFIX}/subnets/") -> list[str]:
        return [k for k in self.ctl("get", "--prefix", prefix, "--keys-only").splitlines() if k]

    def ttl(self, lease: int) -> tuple[int, int]:
        """Return the granted and the remaining life of an etcd lease, (0, -1) if it is gone."""
        found = json.loads(self.ctl("lease", "timetolive", f"{lease:x}", "-w", "json"))
        return int(found.get("granted-ttl", 0)), int(found["ttl"])

    def lease_ids(self) -> set[int]:
        return {int(line, 16) for line in self.ctl("lease", "list").splitlines()[1:] if line}

    def compact(self) -> None:
        revision = json.loads(self.ctl("get", "/", "-w", "json"))["header"]["revision"]
        self.ctl("compact", str(revision))

    def enable_auth(self, name: str, password: str, *prefixes: str) -> None:
        for command in (
            "user add root:r",
            "user grant-role root root",
            f"user add {name}:{password}",
            f"role add {name}",
        ):
            self.ctl(*command.split())
        for prefix in prefixes:
            self.ctl("role", "grant-permission", "--prefix=true", name, "readwrite", prefix)
        self.ctl("user", "grant-role", name, name)
        self.ctl("auth", "enable")
        self.user = ("root", "r")


@dataclass(frozen=True)
class Tls:
    ca: Path
    ca_key: Path
    cert: Path
    key: Path


def make_tls(
    directory: Path, name: str, *, san: str = "IP:127.0.0.1", ca: Tls | None = None, past: bool = False
) -> Tls:
    """Make a CA (unless given) and a certificate signed by it; ``past`` makes one that has expired."""

    def openssl(*args: object) -> None:
        subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)

    base = directory / name
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca_cert, ca_key = (ca.ca, ca.ca_key) if ca else (Path(f"{base}-ca.crt"), Path(f"{base}-ca.key"))
    if ca is None:
        subject = ("-subj", f"/CN=CA {name}", "-addext", "keyUsage=keyCertSign")
        openssl("req", "-x509", *curve, "-keyout", ca_key, "-out", ca_cert, "-days", 2, *subject)
    made = Tls(ca_cert, ca_key, Path(f"{base}.crt"), Path(f"{base}.key"))
    openssl("req", *curve, "-keyout", made.key, "-out", f"{base}.csr", "-subj", f"/CN={name}")
    Path(f"{base}.cnf").write_text(
        f"[ca]\ndefault_ca=d\n[d]\nnew_certs_dir={directory}\ndatabase={base}.db\nrand_serial=yes\ndefault_md=sha256\n"
        f"policy=p\nx509_extensions=x\n[p]\ncommonName=supplied\n"
        f"[x]\nsubjectAltName={san}\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    Path(f"{base}.db").touch()
    dates = ("-startdate", "20200101000000Z", "-enddate", "20200201000000Z" if past else "20991231000000Z")
    signing = ("-config", f"{base}.cnf", "-cert", ca_cert, "-keyfile", ca_key, *dates)
    openssl("ca", "-batch", "-notext", *signing, "-in", f"{base}.csr", "-out", made.cert)
    return made


class Proxy:
    """Forwards TCP to a port; can refuse, cut and silence connections."""

    def __init__(self, target: int) -> None:
        self.target, self.port = target, free_port()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._silent: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self.open()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def open(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port), backlog=64)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.target), 5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._pairs.append((client, server))
            threading.Thread(target=self._serve, args=(client, server), daemon=True).start()

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        other = {client: server, server: client}
        try:
            while True:
                for s in select.select([client, server], [], [], 1.0)[0]:
                    data = s.recv(65536)
                    if client in self._silent:
                        if not data:
                            time.sleep(0.2)
                    elif not data:
                        return
                    else:
                        other[s].sendall(data)
        except (OSError, ValueError):
            pass
        finally:
            for s in (client, server):
                s.close()

    def silence(self) -> None:
        """Swallow whatever is sent on the present connections, without closing them."""
        with self._lock:
            self._silent |= {client for client, _ in self._pairs}

    def cut(self, refuse: bool = True) -> None:
        """Reset the present connections; refuse new ones if told so."""
        if refuse and self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            self._listener = None
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for s in pair:
                with contextlib.suppress(OSError):
                    s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    s.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def running(etcd: Etcd) -> Iterator[Etcd]:
    try:
        yield etcd.start()
    finally:
        etcd.stop()


@pytest.fixture(scope="module")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with running(Etcd(tmp_path_factory.mktemp("etcd"))) as etcd:
        yield etcd


@pytest.fixture
def etcd(shared_etcd: Etcd) -> Etcd:
    """One etcd per module, emptied for each test."""
    shared_etcd.delete("", prefix=True)
    return shared_etcd


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd of the test's own, to be stopped and wiped."""
    with running(Etcd(tmp_path)) as etcd:
        yield etcd


@pytest.fixture
def proxy(etcd: Etcd) -> Iterator[Proxy]:
    proxy = Proxy(etcd.port)
    yield proxy
    proxy.cut()
