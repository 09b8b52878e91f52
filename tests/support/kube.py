"""A Kubernetes API server for tests: nodes and pods over HTTP/1.1, with faults on demand.

What it promises is in tests/datastore/test_kube_contract.py.
"""

from __future__ import annotations

import base64
import copy
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

Object = dict[str, Any]
PREFIX = "flannel.alpha.coreos.com/"
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 405: "MethodNotAllowed", 409: "Conflict"}
REASONS |= {410: "Expired", 415: "UnsupportedMediaType", 429: "TooManyRequests", 500: "InternalError", 504: "Timeout"}
VERBS = {"PATCH": "patch", "POST": "create", "PUT": "update", "DELETE": "delete"}


def node_annotations(
    public: str = "", mac: str = "", public6: str = "", mac6: str = "", backend: str = "vxlan"
) -> Object:
    """Annotations as a flannel node writes them."""
    told = {"kube-subnet-manager": "true", "backend-type": backend}
    for address, its_mac, keys in (
        (public, mac, ("public-ip", "backend-data")),
        (public6, mac6, ("public-ipv6", "backend-v6-data")),
    ):
        if address:
            data = {"VNI": 1, "VtepMAC": its_mac}
            told |= {keys[0]: address, keys[1]: json.dumps(data, separators=(",", ":")) if its_mac else "null"}
    return {PREFIX + name: text for name, text in told.items()}


def make_node(
    name: str, cidrs: tuple[str, ...] | list[str] = (), told: Object | None = None, ballast: int = 0
) -> Object:
    """A node object; ``ballast`` bytes of what real ones are full of."""
    spec: Object = {"podCIDR": cidrs[0], "podCIDRs": list(cidrs)} if cidrs else {}
    images = [{"names": ["registry.example/image@sha256:" + "0" * 64], "sizeBytes": 12345678}]
    return {
        "metadata": {"name": name, "annotations": dict(told or {}), "labels": {"kubernetes.io/hostname": name}},
        "spec": spec,
        "status": {"conditions": [], "images": images * (ballast // len(json.dumps(images)))},
    }


@dataclass
class Seen:
    """One request, as it came."""

    at: float
    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: str
    state: tuple[int, int, int] = (0, 0, 0)
    """Of the server when it came: cuts, freezes, and the oldest version that was not forgotten."""
    status: int = 0

    @property
    def watch(self) -> bool:
        return self.query.get("watch") in ("1", "true")

    @property
    def verb(self) -> str:
        whole = self.path.rstrip("/").endswith("/nodes")
        return VERBS.get(self.method) or ("watch" if self.watch else "list" if whole else "get")


@dataclass
class Fault:
    """What happens to requests of one verb: a status, ``close``, ``hang``, or ``cut`` half-way through the answer."""

    verb: str
    action: int | str
    left: int
    retry_after: str = ""
    gone: threading.Event = field(default_factory=threading.Event)

    def remove(self) -> None:
        self.left = 0
        self.gone.set()


class KubeApi:
    """The server and what it holds; a context manager."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, listen: Callable[[], socket.socket] | None = None, address: str = ""
    ) -> None:
        """``listen`` makes the listening socket, in another network namespace say; it is asked at each start."""
        self.tls, self.port, self.listen = tls, 0, listen
        self.address = address or "127.0.0.1"
        self.nodes: dict[str, Object] = {}
        self.pods: dict[str, Object] = {}
        self.requests: list[Seen] = []
        self.tokens: set[str] | None = None
        """Bearer tokens that are taken; None: nobody is asked."""
        self.bookmark_s = 60.0
        self.marked = 0
        """The latest version that a bookmark told of."""
        self._faults: list[Fault] = []
        self._news = threading.Condition(threading.RLock())
        self._version = self._oldest = 1000
        self._events: list[tuple[int, str, Object]] = []
        self._cuts = 0
        self._freezes = 0
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.address}:{self.port}"

    def __enter__(self) -> KubeApi:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # -- content --------------------------------------------------------------

    def node(
        self, name: str, cidrs: tuple[str, ...] | list[str] = (), told: Object | None = None, **more: Any
    ) -> Object:
        return self.create(make_node(name, cidrs, told, **more))

    def create(self, node: Object) -> Object:
        with self._news:
            node = copy.deepcopy(node)
            meta = node["metadata"]
            self._version += 1
            meta |= {"uid": f"uid-{self._version}", "creationTimestamp": "2026-01-01T00:00:00Z"}
            meta.setdefault("annotations", {})
            meta["managedFields"] = [{"manager": "test", "operation": "Update", "apiVersion": "v1"}]
            node.setdefault("spec", {})
            node.setdefault("status", {}).setdefault("conditions", [])
            return self._store("ADDED", node)

    def change(self, name: str, told: Object | None = None, cidrs: list[str] | None = None) -> None:
        """Set annotations (None removes one) and pod CIDRs."""
        with self._news:
            node = copy.deepcopy(self.nodes[name])
            _merge(node["metadata"]["annotations"], told or {})
            if cidrs is not None:
                node["spec"] = {"podCIDR": cidrs[0], "podCIDRs": cidrs} if cidrs else {}
            self._update(node)

    def patch_spec(self, name: str, spec: Object) -> None:
        """Set members of the node's spec."""
        with self._news:
            node = copy.deepcopy(self.nodes[name])
            node["spec"] |= spec
            self._update(node)

    def delete(self, name: str) -> None:
        with self._news:
            node = copy.deepcopy(self.nodes.pop(name))
            self._version += 1
            node["metadata"]["resourceVersion"] = str(self._version)
            self._tell("DELETED", node)

    def told(self, name: str) -> dict[str, str]:
        """Annotations below the usual prefix, by suffix."""
        found = self.nodes[name]["metadata"]["annotations"]
        return {key[len(PREFIX) :]: text for key, text in found.items() if key.startswith(PREFIX)}

    def condition(self, name: str) -> Object | None:
        conditions = self.nodes[name]["status"]["conditions"]
        return next((c for c in conditions if c["type"] == "NetworkUnavailable"), None)

    def _update(self, node: Object) -> Object:
        if node == self.nodes[node["metadata"]["name"]]:
            return node
        self._version += 1
        return self._store("MODIFIED", node)

    def _store(self, kind: str, node: Object) -> Object:
        node["metadata"]["resourceVersion"] = str(self._version)
        self.nodes[node["metadata"]["name"]] = node
        self._tell(kind, node)
        return node

    def _tell(self, kind: str, node: Object) -> None:
        with self._news:
            self._events.append((self._version, kind, node))
            self._news.notify_all()

    # -- faults ---------------------------------------------------------------

    def fail(self, verb: str, action: int | str, times: int = 1_000_000, retry_after: str = "") -> Fault:
        fault = Fault(verb, action, times, retry_after)
        self._faults.append(fault)
        return fault

    def forget(self) -> None:
        """Compact: earlier versions and continue tokens are too old from now on."""
        with self._news:
            self._version += 1
            self._oldest = self._version

    def cut_watches(self) -> None:
        with self._news:
            self._cuts += 1
            self._news.notify_all()

    def freeze(self) -> None:
        """Open watches stay open and say nothing any more; new ones work."""
        with self._news:
            self._freezes += 1

    def note(self, seen: Seen) -> None:
        """Take a request in. Whoever sees it from now on may cut, freeze or forget: it came before that."""
        with self._news:
            seen.state = self._cuts, self._freezes, self._oldest
            self.requests.append(seen)

    def asked(self, verb: str, since: int = 0) -> list[Seen]:
        return [seen for seen in self.requests[since:] if seen.verb == verb]

    def patches(self, name: str, since: int = 0) -> list[Object]:
        path = f"/api/v1/nodes/{name}/status"
        return [
            json.loads(seen.body) for seen in self.asked("patch", since) if seen.path == path and seen.status == 200
        ]

    # -- server ---------------------------------------------------------------

    def start(self) -> KubeApi:
        self._server = _Server((self.address, self.port), _handler(self), bind_and_activate=self.listen is None)
        if self.listen is not None:
            self._server.socket.close()
            self._server.socket = self.listen()
            self._server.server_address = self._server.socket.getsockname()
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), name="kube-api", daemon=True).start()
        return self

    def stop(self) -> None:
        """Refuse connections and end those there are."""
        for fault in self._faults:
            fault.remove()
        server, self._server = self._server, None
        if server is not None:
            self.cut_watches()
            server.shutdown()
            server.server_close()

    def answer(self, handler: _Handler, seen: Seen) -> None:
        if self._server is None:
            handler.close_connection = True
            return
        cut = False
        for fault in self._faults:
            if fault.verb not in (seen.verb, "*") or fault.left <= 0:
                continue
            fault.left -= 1
            if isinstance(fault.action, int):
                handler.status(fault.action, self._words(seen, fault.action), retry_after=fault.retry_after)
                return
            if fault.action == "hang":
                fault.gone.wait(60)
            cut = fault.action == "cut"
            if not cut:
                handler.close_connection = True
                return
        problem = self._stranger(seen)
        if problem:
            handler.status(problem, "Unauthorized" if problem == 401 else self._words(seen, 403))
        else:
            self._route(handler, seen, cut)

    def _stranger(self, seen: Seen) -> int:
        given = seen.headers.get("authorization", "")
        if self.tokens is None:
            return 0
        return 403 if not given else 0 if given.split(" ")[-1] in self.tokens else 401

    @staticmethod
    def _words(seen: Seen, code: int) -> str:
        if code == 403:
            user = "flannel" if "authorization" in seen.headers else "system:anonymous"
            right = f'cannot {seen.verb} resource "nodes" in API group "" at the cluster scope'
            return f'nodes is forbidden: User "{user}" {right}'
        return f"injected {code}"

    def _route(self, handler: _Handler, seen: Seen, cut: bool) -> None:
        node = re.fullmatch(r"/api/v1/nodes/([^/]+)(/status)?", seen.path)
        pod = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods/([^/]+)", seen.path)
        if seen.path == "/api/v1/nodes" and seen.method == "POST":
            handler.json(201, self.create(json.loads(seen.body)))
        elif seen.path == "/api/v1/nodes" and seen.watch:
            self._watch(handler, seen)
        elif seen.path == "/api/v1/nodes":
            self._list(handler, seen, cut)
        elif node and node[1] in self.nodes:
            self._one(handler, seen, node[1])
        elif pod and "/".join(pod.groups()) in self.pods:
            handler.json(200, self.pods["/".join(pod.groups())])
        elif node or pod:
            kind, name = ("nodes", node[1]) if node else ("pods", pod[2] if pod else "")
            handler.status(404, f'{kind} "{name}" not found')
        else:
            handler.status(404, "the server could not find the requested resource")

    def _one(self, handler: _Handler, seen: Seen, name: str) -> None:
        with self._news:
            if seen.method == "DELETE":
                node = self.nodes[name]
                self.delete(name)
            elif seen.method == "PATCH":
                if seen.headers.get("content-type") != "application/strategic-merge-patch+json":
                    handler.status(415, "the body of the request was in an unknown format")
                    return
                node = self.patch(name, json.loads(seen.body))
            else:
                node = self.nodes[name]
        handler.json(200, {"kind": "Node", "apiVersion": "v1", **node})

    def patch(self, name: str, patch: Object) -> Object:
        node = copy.deepcopy(self.nodes[name])
        _merge(node["metadata"]["annotations"], patch.get("metadata", {}).get("annotations") or {})
        conditions = node["status"]["conditions"]
        for wanted in patch.get("status", {}).get("conditions") or ():
            known = next((c for c in conditions if c["type"] == wanted["type"]), None)
            if known is None:
                conditions.append(wanted)
            else:
                _merge(known, wanted)
        return self._update(node)

    def _list(self, handler: _Handler, seen: Seen, cut: bool) -> None:
        wanted = int(seen.query.get("resourceVersion") or 0)
        exact = seen.query.get("resourceVersionMatch") == "Exact"
        with self._news:
            version, names = self._version, sorted(self.nodes)
            if wanted > version:
                handler.status(504, "Too large resource version", retry_after="1")
                return
            if exact and wanted < self._oldest:
                handler.status(410, f"The provided resource version is too old: {wanted}")
                return
            token, start = seen.query.get("continue", ""), ""
            if token:
                at, start = json.loads(base64.b64decode(token))
                version = at or version
                if at and at < self._oldest:
                    handler.status(410, "The provided continue parameter is too old", more=_token(0, start))
                    return
            names = [name for name in names if name > start]
            limit = int(seen.query.get("limit") or 0) or len(names)
            meta: Object = {"resourceVersion": str(version)}
            if names[limit:]:
                meta |= {"continue": _token(version, names[limit - 1]), "remainingItemCount": len(names) - limit}
            items = [self.nodes[name] for name in names[:limit]]
        handler.json(200, {"kind": "NodeList", "apiVersion": "v1", "metadata": meta, "items": items}, cut=cut)

    def _watch(self, handler: _Handler, seen: Seen) -> None:
        since, (_, _, oldest) = int(seen.query.get("resourceVersion") or 0), seen.state
        handler.begin_stream()
        if seen.query.get("sendInitialEvents") == "true":
            handler.event("ERROR", _status(422, "sendInitialEvents is not served here"))
        elif since < oldest:
            handler.event("ERROR", _status(410, f"too old resource version: {since} ({oldest})"))
        else:
            self._stream(handler, seen, since)
        handler.end_stream()

    def _stream(self, handler: _Handler, seen: Seen, since: int) -> None:
        ends = time.monotonic() + float(seen.query.get("timeoutSeconds") or 3600)
        marks = seen.query.get("allowWatchBookmarks") in ("1", "true")
        (cuts, freezes, _), mark_at = seen.state, time.monotonic() + self.bookmark_s
        while time.monotonic() < ends:
            with self._news:
                if self._cuts != cuts:
                    return
                news = [event for event in self._events if event[0] > since]
                if not news:
                    self._news.wait(min(0.1, max(0.0, ends - time.monotonic())))
                version = self._version
            if self._freezes != freezes:
                continue
            for at, kind, node in news:
                handler.event(kind, {"kind": "Node", "apiVersion": "v1", **node})
                since = at
            if marks and not news and time.monotonic() >= mark_at:
                mark_at = time.monotonic() + self.bookmark_s
                since = version
                handler.event(
                    "BOOKMARK", {"kind": "Node", "apiVersion": "v1", "metadata": {"resourceVersion": str(version)}}
                )
                self.marked = version


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        pass


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1
    seen: Seen

    def log_message(self, *_: object) -> None:
        pass

    def status(self, code: int, message: str, retry_after: str = "", more: str = "") -> None:
        body = _status(code, message)
        if more:
            body["metadata"] = {"continue": more}
        self.json(code, body, {"Retry-After": retry_after} if retry_after else {})

    def json(self, code: int, body: Object, headers: dict[str, str] | None = None, cut: bool = False) -> None:
        self.seen.status = code
        data = json.dumps(body, separators=(",", ":")).encode()
        self.send_response(code)
        for name, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            **(headers or {}),
        }.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2] if cut else data)
        self.wfile.flush()
        self.close_connection = self.close_connection or cut

    def begin_stream(self) -> None:
        self.seen.status = 200
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def event(self, kind: str, body: Object) -> None:
        data = json.dumps({"type": kind, "object": body}, separators=(",", ":")).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def end_stream(self) -> None:
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()
        self.close_connection = True


def _handler(api: KubeApi) -> type[_Handler]:
    class Handler(_Handler):
        def setup(self) -> None:
            if api.tls is not None:
                self.request = api.tls.wrap_socket(self.request, server_side=True)
            super().setup()

        def _any(self) -> None:
            parts = urlsplit(self.path)
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length).decode() if length else ""
            headers = {name.lower(): text for name, text in self.headers.items()}
            self.seen = Seen(time.monotonic(), self.command, parts.path, dict(parse_qsl(parts.query)), headers, body)
            api.note(self.seen)
            with suppress(OSError):
                api.answer(self, self.seen)

        do_GET = do_POST = do_PATCH = do_DELETE = do_PUT = _any  # noqa: N815

    return Handler


def _merge(into: Object, changes: Object) -> None:
    for key, value in changes.items():
        if value is None:
            into.pop(key, None)
        else:
            into[key] = value


def _status(code: int, message: str) -> Object:
    reason = REASONS.get(code, "")
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


def _token(version: int, start: str) -> str:
    return base64.b64encode(json.dumps([version, start]).encode()).decode()


@pytest.fixture
def kube() -> Iterator[KubeApi]:
    with KubeApi() as api:
        yield api
