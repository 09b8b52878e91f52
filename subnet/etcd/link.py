"""One gRPC channel per endpoint, dialled when first needed."""

from __future__ import annotations

import threading
from typing import Any

import grpc
from grpc import _common as common

from subnet.clock import Clock
from subnet.etcd.diagnose import diagnose
from subnet.etcd.endpoint import Endpoint, TlsFiles
from subnet.etcd.stubs import etcdrpc

DIAGNOSE_EACH_S = 10.0
OPTIONS: tuple[tuple[str, int], ...] = (
    # A silent connection is noticed after 15 s. etcd refuses pings closer than 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # "min" is the least time between attempts, and what one attempt gets at least.
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 3_000),
    ("grpc.max_receive_message_length", -1),
    # Proxy variables are meant for web traffic; the datastore is on the underlay.
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


PATIENCE_S = 60.0


def _be_patient() -> None:
    """Have threads that wait for an answer sleep until it comes.

    gRPC lets them look ten times a second whether the program was interrupted,
    which only the main thread can be. It has no option for that, and a version
    that does it otherwise is left alone.
    """
    if hasattr(common, "MAXIMUM_WAIT_TIMEOUT"):
        common.MAXIMUM_WAIT_TIMEOUT = PATIENCE_S


_be_patient()


class Link:
    """The way to one endpoint. ``close`` ends its calls."""

    def __init__(self, endpoint: Endpoint, tls: TlsFiles, clock: Clock) -> None:
        self.endpoint, self._tls, self._clock = endpoint, tls, clock
        self._lock = threading.Lock()
        self._channel: Any = None
        self._closed = False
        self._said: tuple[float, str] | None = None

    def channel(self) -> Any:
        """Return the channel; a ValueError comes from it, or from here, once closed."""
        with self._lock:
            if self._closed:
                raise ValueError("closed")
            if self._channel is None:
                self._channel = self._dial()
            return self._channel

    def _dial(self) -> Any:
        options = (*OPTIONS, ("grpc.default_authority", self.endpoint.authority))
        if not self.endpoint.tls:
            return grpc.insecure_channel(self.endpoint.target, options)
        credentials = grpc.ssl_channel_credentials(self._tls.roots, self._tls.key, self._tls.cert)
        return grpc.secure_channel(self.endpoint.target, credentials, options)

    @property
    def kv(self) -> Any:
        """Return the KV service."""
        return etcdrpc.KVStub(self.channel())

    @property
    def lease(self) -> Any:
        """Return the Lease service."""
        return etcdrpc.LeaseStub(self.channel())

    @property
    def watch(self) -> Any:
        """Return the Watch service."""
        return etcdrpc.WatchStub(self.channel())

    @property
    def auth(self) -> Any:
        """Return the Auth service."""
        return etcdrpc.AuthStub(self.channel())

    def why(self, text: str) -> str:
        """Return the reason of a transport failure in words; ``text`` is gRPC's own."""
        now = self._clock.now()
        if self._said is None or now - self._said[0] >= DIAGNOSE_EACH_S:
            self._said = (now, diagnose(self.endpoint, self._tls))
        return self._said[1] or text

    def reset(self) -> None:
        """Drop the connection and the calls on it; the next call dials anew."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def close(self) -> None:
        """Cancel every call on the channel; no new one can begin."""
        with self._lock:
            self._closed, channel = True, self._channel
        if channel is not None:
            channel.close()
