"""etcd endpoints as URLs, and the TLS files that go with the https ones."""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

from subnet.errors import UsageError
from subnet.etcd.settings import EtcdSettings

DEFAULT_PORT = 2379
SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",  # Debian, Alpine, Arch
    "/etc/pki/tls/certs/ca-bundle.crt",  # Fedora, RHEL
    "/etc/ssl/ca-bundle.pem",  # SUSE
)
"""Where distributions keep their CA bundle; grpc by itself would use a bundle of its own."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One etcd server. ``host`` is a name or a bare address (no brackets)."""

    host: str
    port: int = DEFAULT_PORT
    tls: bool = False

    @property
    def authority(self) -> str:
        """Return host and port as they stand in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def target(self) -> str:
        """Return the gRPC name (grpc/doc/naming.md) of the server."""
        try:
            version = ip_address(self.host).version
        except ValueError:
            return f"dns:///{self.authority}"
        return f"ipv{version}:{self.authority}"

    def __str__(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority}"


def parse_endpoints(texts: Iterable[str]) -> tuple[Endpoint, ...]:
    """Read a list of URLs, comma lists and blanks included; duplicates count once.

    Without a scheme http is meant, without a port 2379. Raises UsageError
    naming the text that is no endpoint, or if there is none at all.
    """
    found: dict[Endpoint, None] = {}
    for text in texts:
        for item in text.split(","):
            if item.strip():
                found[_parse(item.strip())] = None
    if not found:
        raise UsageError("etcd-endpoints: no endpoint is given")
    return tuple(found)


def _parse(text: str) -> Endpoint:
    try:
        url = urlsplit(text if "://" in text else f"http://{text}")
        host, port = url.hostname, url.port
    except ValueError as e:
        raise UsageError(f"etcd-endpoints: {text!r}: {e}") from e
    if url.scheme not in ("http", "https"):
        raise UsageError(f"etcd-endpoints: {text!r}: scheme {url.scheme!r} is neither http nor https")
    if not host or url.path not in ("", "/") or url.query or url.fragment or url.username is not None:
        raise UsageError(f"etcd-endpoints: {text!r} is not of the form http://HOST:PORT or https://HOST:PORT")
    return Endpoint(host, DEFAULT_PORT if port is None else port, url.scheme == "https")


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM contents of CA bundle, client certificate and its key; None where not given."""

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)
    certfile: str = ""
    keyfile: str = ""

    @classmethod
    def read(cls, settings: EtcdSettings) -> TlsFiles:
        """Read and check the files. Raises UsageError naming flag and file."""
        if bool(settings.certfile) != bool(settings.keyfile):
            raise UsageError("etcd-certfile and etcd-keyfile belong together: one is missing")
        tls = cls(
            ca=_read("etcd-cafile", settings.cafile),
            cert=_read("etcd-certfile", settings.certfile),
            key=_read("etcd-keyfile", settings.keyfile),
            certfile=settings.certfile,
            keyfile=settings.keyfile,
        )
        try:
            tls.context()
        except (ssl.SSLError, ValueError) as e:
            files = ", ".join(f for f in (settings.cafile, settings.certfile, settings.keyfile) if f)
            raise UsageError(f"TLS files {files} cannot be used: {e}") from e
        return tls

    @property
    def roots(self) -> bytes | None:
        """Return the CA certificates to trust: the given ones, else the system's."""
        if self.ca is not None:
            return self.ca
        bundle = next((Path(p) for p in SYSTEM_ROOTS if Path(p).is_file()), None)
        return bundle.read_bytes() if bundle else None

    def context(self) -> ssl.SSLContext:
        """Return an ssl context that trusts and presents what the gRPC channel does."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        if self.ca is not None:
            context.load_verify_locations(cadata=self.ca.decode("ascii", "replace"))
        else:
            context.load_default_certs()
        if self.certfile:
            # An empty password instead of a prompt on the terminal.
            context.load_cert_chain(self.certfile, self.keyfile, password="")
        return context


def _read(flag: str, path: str) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as e:
        raise UsageError(f"{flag}: {path}: {e.strerror}") from e
