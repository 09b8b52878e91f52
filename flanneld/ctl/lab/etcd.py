"""A real etcd in a namespace, spoken to through its JSON gateway (etcd documentation, "gRPC gateway")."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flanneld.ctl.lab.errors import LabError
from flanneld.ctl.lab.netns import Namespace
from flanneld.ctl.lab.tools import environment, poll

PORT = 2379
MAX_OPERATIONS = 128
"""What etcd takes in one transaction by default (--max-txn-ops)."""


class Etcd:
    """One etcd server. Its data outlives ``stop`` and ``kill``, so that ``start`` continues with it.

    ``address`` is where clients reach it; requests of this class go over the namespace's loopback.
    """

    def __init__(
        self, namespace: Namespace, address: str, directory: Path, prefix: str = "/coreos.com/network"
    ) -> None:
        self.namespace, self.address, self.directory, self.prefix = namespace, address, directory, prefix
        self.log_path = directory / "log"
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        """Return what clients take as endpoint."""
        return f"http://{self.address}:{PORT}"

    # -- process ----------------------------------------------------------

    def start(self, timeout_s: float = 20.0) -> None:
        """Start the server and wait until it answers; raises LabError with the log's end."""
        with self.log_path.open("ab") as log:
            self._process = self.namespace.spawn(
                *("etcd", "--name", "lab", "--data-dir", str(self.directory / "data"), "--logger", "zap"),
                *("--listen-client-urls", f"http://0.0.0.0:{PORT}", "--advertise-client-urls", self.url),
                *("--listen-peer-urls", "http://127.0.0.1:2380", "--initial-advertise-peer-urls"),
                *("http://127.0.0.1:2380", "--initial-cluster", "lab=http://127.0.0.1:2380"),
                output=log,
                env=environment(),
            )

        def answers() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise LabError(f"etcd ended at once: {self.log_path.read_text(errors='replace')[-500:]}")
            try:
                self.call("maintenance/status", {})
            except (OSError, LabError):
                return False
            return True

        poll("etcd answers", answers, timeout_s)

    def stop(self) -> None:
        """End the server in good order."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server as a power cut would."""
        self._end(signal.SIGKILL)

    def freeze(self) -> None:
        """Let connections stay open while nothing answers any more."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Undo ``freeze``."""
        self._signal(signal.SIGCONT)

    # -- data -------------------------------------------------------------

    def call(self, method: str, body: Mapping[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
        """Post to ``/v3/<method>``; raises LabError for a refusal, OSError if nothing answers."""
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=timeout_s)
        connection.sock = self.namespace.connect("127.0.0.1", PORT, timeout_s)
        try:
            connection.request("POST", f"/v3/{method}", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        except http.client.HTTPException as e:
            raise LabError(f"etcd {method}: {e}") from e
        finally:
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise LabError(f"etcd {method}: {answer.status} {text.decode(errors='replace')[:300]}")
        decoded: dict[str, Any] = json.loads(text)
        return decoded

    def put(self, key: str, value: str, *, ttl_s: int = 0) -> int:
        """Write a key, with an etcd lease of its own if ``ttl_s`` is given; return the revision."""
        body = {"key": _encoded(key), "value": _encoded(value)}
        if ttl_s:
            body["lease"] = self.call("lease/grant", {"TTL": ttl_s})["ID"]
        return int(self.call("kv/put", body)["header"]["revision"])

    def get(self, key: str) -> str | None:
        """Return a key's value, None if there is none."""
        found = self.call("kv/range", {"key": _encoded(key)}).get("kvs", ())
        return _decoded(found[0].get("value", "")) if found else None

    def list(self, prefix: str) -> dict[str, str]:
        """Return keys and values below a prefix, in key order."""
        found = self.call("kv/range", {"key": _encoded(prefix), "range_end": _encoded(_after(prefix))})
        return {_decoded(kv["key"]): _decoded(kv.get("value", "")) for kv in found.get("kvs", ())}

    def delete(self, key: str) -> bool:
        """Remove a key; return whether it was there."""
        return int(self.call("kv/deleterange", {"key": _encoded(key)}).get("deleted", 0)) > 0

    def lease_id(self, key: str) -> int:
        """Return the etcd lease that a key hangs on, 0 if none or no key."""
        found = self.call("kv/range", {"key": _encoded(key)}).get("kvs", ())
        return int(found[0].get("lease", 0)) if found else 0

    def ttl_s(self, key: str) -> int:
        """Return the remaining life of a key in seconds, -1 if it does not expire."""
        lease = self.lease_id(key)
        return int(self.call("lease/timetolive", {"ID": lease}).get("TTL", -1)) if lease else -1

    def revoke(self, key: str) -> None:
        """End the etcd lease of a key, as its expiry would."""
        self.call("lease/revoke", {"ID": self.lease_id(key)})

    def revision(self) -> int:
        """Return the store's current revision."""
        return int(self.call("kv/range", {"key": _encoded("\0")})["header"]["revision"])

    def compact(self, revision: int = 0) -> None:
        """Forget history before ``revision``, by default before the current one."""
        self.call("kv/compaction", {"revision": revision or self.revision(), "physical": True})

    # -- what a flannel network keeps there -------------------------------

    def configure(self, config: Mapping[str, Any]) -> None:
        """Write the network config."""
        self.put(f"{self.prefix}/config", json.dumps(config))

    def leases(self) -> dict[str, dict[str, Any]]:
        """Return the lease values by the last part of their key, such as ``10.5.52.0-24``."""
        found = self.list(f"{self.prefix}/subnets/")
        return {key.rsplit("/", 1)[1]: json.loads(value) for key, value in found.items()}

    def forge(self, subnet: str, value: Mapping[str, Any], *, ttl_s: int = 86400) -> None:
        """Write a lease nobody holds: a peer without a host. ``subnet`` as in ``leases``; ``ttl_s`` 0: reservation."""
        self.put(f"{self.prefix}/subnets/{subnet}", json.dumps(value, separators=(",", ":")), ttl_s=ttl_s)

    def forge_many(self, leases: Mapping[str, Mapping[str, Any]]) -> None:
        """Write many leases that do not expire, by the last part of their key, in as few transactions as etcd takes."""
        keys = list(leases)
        for batch in (keys[i : i + MAX_OPERATIONS] for i in range(0, len(keys), MAX_OPERATIONS)):
            puts = [
                {"key": _encoded(f"{self.prefix}/subnets/{key}"), "value": _encoded(json.dumps(leases[key]))}
                for key in batch
            ]
            self.call("kv/txn", {"success": [{"requestPut": put} for put in puts]})

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _end(self, number: signal.Signals) -> None:
        self._signal(number)
        if self._process is not None:
            self._process.wait(10)
            self._process = None


def _encoded(text: str) -> str:
    return b64encode(text.encode()).decode()


def _decoded(text: str) -> str:
    return b64decode(text).decode()


def _after(prefix: str) -> str:
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
