"""The one module that speaks to the Kubernetes client library.

It lends its configuration (pod, kubeconfig, token renewal) and its REST layer.
Its API classes and models are not loaded: they would double the time to start,
and build ten thousand objects where one record is needed.
Source: Kubernetes "API concepts"; upstream pkg/subnet/kube/kube.go.
"""

from __future__ import annotations

import logging
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import quote, urlencode

from subnet.errors import Closed, DatastoreError, Unavailable
from subnet.kube.faults import Request, account_of, read_status, refused
from subnet.kube.settings import KubeSettings
from subnet.model import Json

log = logging.getLogger(__name__)

CONNECT_S = 3.0
"""Each step of connecting, TLS included."""
ANSWER_S = 15.0
"""Between a request and its answer, and between two parts of it."""
WATCH_ANSWER_S = 30.0
SILENCE_S = 90.0
"""A watch without a byte is taken for dead; a server sends a bookmark each minute."""
BLOCK_BYTES = 1 << 16
KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 20_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
"""A host that is gone is noticed within 25 s."""
NODES = "/api/v1/nodes"


class KubeClient:
    """A NodeStore (subnet.kube.store) on a real API server. Nothing is loaded or connected before the first call."""

    def __init__(self, settings: KubeSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._link: _Link | None = None
        self._stream: Any = None
        self._closed = False
        self._scratch = tempfile.TemporaryDirectory(prefix="flanneld-") if settings.kubeconfig_file else None

    def list_nodes(self, token: str, limit: int) -> bytes:
        """See NodeStore."""
        query = {"limit": str(limit)} if limit else {}
        if token:
            query["continue"] = token
        return self._read(Request("list", "nodes"), NODES, query)

    def watch_nodes(self, version: str, timeout_s: int) -> Iterator[bytes]:
        """See NodeStore."""
        request = Request("watch", "nodes")
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(timeout_s),
        }
        link, response = self._send(request, "GET", NODES, query, answer_s=WATCH_ANSWER_S)
        with self._lock:
            # Its way may have been given up while it was on it: then the next watch takes another.
            self._stream = response if self._link is link else None
        try:
            if self._stream is None:
                return
            _wait_up_to(response, SILENCE_S)
            # The first block is empty: it says that the server took the request.
            yield b""
            while block := link.translate(request, lambda: response.read1(BLOCK_BYTES)):
                yield block
            if self._closed:
                raise Closed
        finally:
            with self._lock:
                self._stream = None
            response.close()

    def node(self, name: str) -> bytes:
        """See NodeStore."""
        return self._read(Request("get", "nodes", name), f"{NODES}/{quote(name, safe='')}", {"resourceVersion": "0"})

    def pod(self, namespace: str, name: str) -> bytes:
        """See NodeStore."""
        path = f"/api/v1/namespaces/{quote(namespace, safe='')}/pods/{quote(name, safe='')}"
        return self._read(Request("get", "pods", f"{namespace}/{name}"), path, {})

    def patch_node(self, name: str, patch: Json) -> bytes:
        """See NodeStore."""
        request = Request("patch", "nodes/status", name)
        link, response = self._send(request, "PATCH", f"{NODES}/{quote(name, safe='')}/status", {}, body=patch)
        return link.body(request, response)

    def reconnect(self) -> None:
        """See NodeStore."""
        with self._lock:
            link, self._link = self._link, None
            stream = self._stream
        if stream is not None:
            # It is being read in another thread, or has just ended.
            with suppress(ValueError, RuntimeError, OSError):
                stream.shutdown()
        if link is not None:
            link.close()

    def close(self) -> None:
        """See NodeStore."""
        self._closed = True
        self.reconnect()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _read(self, request: Request, path: str, query: Mapping[str, str]) -> bytes:
        link, response = self._send(request, "GET", path, query)
        return link.body(request, response)

    def _send(
        self,
        request: Request,
        method: str,
        path: str,
        query: Mapping[str, str],
        *,
        body: Json = None,
        answer_s: float = 0.0,
    ) -> tuple[_Link, Any]:
        """Return the answer's head once it is a success; ``answer_s`` of 0 is the usual limit."""
        link = self._connected()
        url = f"{path}?{urlencode(query)}" if query else path
        response = link.ask(request, method, url, body, answer_s or ANSWER_S)
        if 200 <= response.status < 300:
            return link, response
        status = read_status(link.body(request, response))
        if response.status == 401:
            # A token may have been replaced: files and plug-ins are asked anew at the next call.
            self._forget(link)
        retry_after = response.headers.get("Retry-After", "")
        raise refused(request, response.status, status, account=link.account, retry_after=retry_after)

    def _connected(self) -> _Link:
        with self._lock:
            if self._closed:
                raise Closed
            if self._link is None:
                self._link = _open(self._settings, self._scratch.name if self._scratch else None, self._forget)
            return self._link

    def _forget(self, link: _Link) -> None:
        with self._lock:
            if self._link is link:
                self._link = None
        link.close()


class _Link:
    """Connections to one server with one set of credentials."""

    def __init__(self, configuration: Any, host: str, nobody: str, spoilt: Any) -> None:
        from kubernetes.client.exceptions import ApiException  # noqa: PLC0415 - heavy, and for this mode only
        from kubernetes.client.rest import RESTClientObject  # noqa: PLC0415
        from urllib3.exceptions import HTTPError  # noqa: PLC0415

        # Renewing credentials also puts the kubeconfig's server back into the configuration.
        self._configuration, self._host = configuration, host.rstrip("/")
        self._nobody, self._spoilt = nobody, spoilt
        self._rest = RESTClientObject(configuration)
        self._errors = (HTTPError, ApiException, OSError)
        self._tls_error = ApiException
        self.account = nobody

    def ask(self, request: Request, method: str, url: str, body: Json, answer_s: float) -> Any:
        """Send a request; returns the answer with its body unread."""
        headers = {"Accept": "application/json", "User-Agent": "flanneld"}
        if body is not None:
            headers["Content-Type"] = "application/strategic-merge-patch+json"
        headers |= self.translate(request, self._credentials)
        return self.translate(
            request,
            lambda: (
                self._rest.request(
                    method,
                    self._host + url,
                    headers=headers,
                    body=body,
                    _request_timeout=(CONNECT_S, answer_s),
                ).response
            ),
        )

    def _credentials(self) -> dict[str, str]:
        """Return the header that says who we are; a token that is about to expire is renewed first."""
        token = self._configuration.auth_settings().get("BearerToken")
        if token is None or not token["value"]:
            return {}
        self.account = account_of(token["value"], self._nobody)
        # A file may end with a newline, which no header can have.
        return {"Authorization": token["value"].strip()}

    def body(self, request: Request, response: Any) -> bytes:
        """Read an answer to its end."""
        try:
            data: bytes = self.translate(request, response.read)
            return data
        finally:
            response.release_conn()

    def translate(self, request: Request, call: Any) -> Any:
        """Return what the call returns. Raises Unavailable for whatever the way to the server does to it."""
        try:
            return call()
        except self._errors as error:
            if isinstance(error, self._tls_error):
                # Certificates are replaced in their files: read them again.
                self._spoilt(self)
            raise Unavailable(f"{request}: {self._host}: {_reason(error)}") from error

    def close(self) -> None:
        """Drop idle connections."""
        self._rest.close()


def _open(settings: KubeSettings, scratch: str | None, spoilt: Any) -> _Link:
    """Read kubeconfig or service account. Raises DatastoreError: files may be mended, the cluster may mount them."""
    from kubernetes.client import Configuration  # noqa: PLC0415 - heavy, and for this mode only
    from kubernetes.config import ConfigException, load_incluster_config, load_kube_config  # noqa: PLC0415
    from yaml import YAMLError  # noqa: PLC0415

    configuration = Configuration()
    source, nobody = "service account of the pod", "the pod's service account"
    try:
        if settings.kubeconfig_file:
            source = f"kubeconfig {settings.kubeconfig_file}"
            nobody = f"the user of {source}"
            load_kube_config(
                config_file=settings.kubeconfig_file,
                client_configuration=configuration,
                persist_config=False,
                temp_file_path=scratch,
            )
        elif settings.api_url:
            nobody = "a client without credentials"
        else:
            load_incluster_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        raise DatastoreError(f"{source}: {error}") from error
    except (YAMLError, ValueError, LookupError, TypeError, AttributeError) as error:
        # Their texts may quote the file, which holds secrets.
        raise DatastoreError(f"{source}: it cannot be understood ({type(error).__name__})") from None
    # The library would sleep and try again where we want to know, and to be stoppable.
    configuration.retries = False
    configuration.socket_options = list(KEEPALIVE)
    return _Link(configuration, settings.api_url or configuration.host, nobody, spoilt)


def _wait_up_to(response: Any, seconds: float) -> None:
    """Change how long a read may take from now on."""
    sock = getattr(response.connection, "sock", None)
    if sock is not None:
        sock.settimeout(seconds)


def _reason(error: BaseException) -> str:
    """Return the innermost reason: outer ones repeat it behind the names of objects."""
    text = str(getattr(error, "reason", None) or error)
    while error.__cause__ is not None:
        error = error.__cause__
        text = str(error) or text
    return text.replace("\n", ": ")
