"""Why an endpoint cannot be used, in words: gRPC hides TLS failures behind "unavailable"."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from typing import Any

from subnet.etcd.endpoint import Endpoint, TlsFiles

HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Connection preface and an empty SETTINGS frame (RFC 9113 s3.4)."""
NO_CHECK_TIME = ssl.VerifyFlags(0x200000)
"""X509_V_FLAG_NO_CHECK_TIME (X509_VERIFY_PARAM_set_flags(3)); the ssl module has no name for it."""

VERDICT_S = 0.5
ENDED = (ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How OpenSSL reports that the other side hung up; which one depends on its version."""
TLS_ALERT = b"\x15\x03"
"""Content type and major version of an alert record (RFC 8446 s5.1)."""
SPEAKS_TLS = "the server speaks TLS: use https:// in the endpoint"

EXPIRED, NOT_YET_VALID = 10, 9
UNKNOWN_CA = (2, 18, 19, 20, 21)
WRONG_NAME = (62, 63, 64)
"""X509_V_ERR_* codes (X509_STORE_CTX_get_error(3))."""


def diagnose(endpoint: Endpoint, tls: TlsFiles, timeout_s: float = 2.0) -> str:
    """Connect once, by hand, and say what is wrong; empty if nothing is.

    Takes up to ``timeout_s`` for each of connecting, handshake and first answer.
    """
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout_s) as sock:
            return _diagnose_tls(endpoint, tls, sock) if endpoint.tls else _diagnose_plain(endpoint, sock)
    except socket.gaierror as e:
        return f"host name {endpoint.host} cannot be resolved: {e.strerror}"
    except TimeoutError:
        return f"connection attempt timed out after {timeout_s:g} s"
    except ConnectionRefusedError:
        return "connection refused"
    except OSError as e:
        return f"cannot connect: {e.strerror or e}"


def _diagnose_plain(endpoint: Endpoint, sock: socket.socket) -> str:
    try:
        sock.sendall(HTTP2_HELLO)
        answer = sock.recv(256)
    except TimeoutError:
        return "timed out: it accepts connections but does not answer"
    except OSError:
        answer = b""
    if not answer:
        return SPEAKS_TLS if _speaks_tls(endpoint) else "connection closed by the server"
    if answer[:2] == TLS_ALERT or (answer.startswith(b"HTTP/1.") and b"HTTPS" in answer):
        return SPEAKS_TLS
    return "the server speaks HTTP/1, not gRPC" if answer.startswith(b"HTTP/1.") else ""


def _speaks_tls(endpoint: Endpoint) -> bool:
    """Whether a TLS handshake gets anywhere; trust does not matter here."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        contextlib.suppress(OSError),
        socket.create_connection((endpoint.host, endpoint.port), 1) as sock,
        context.wrap_socket(sock),
    ):
        return True
    return False


def _diagnose_tls(endpoint: Endpoint, tls: TlsFiles, sock: socket.socket) -> str:
    try:
        conn = tls.context().wrap_socket(sock, server_hostname=endpoint.host)
    except ssl.SSLCertVerificationError as e:
        return _certificate_problem(e, endpoint, tls)
    except (*ENDED, ConnectionResetError):
        return "the server ends the connection at the TLS handshake: it does not speak TLS, or is overloaded"
    except ssl.SSLError as e:
        return _alert(e, tls)
    except TimeoutError:
        return "timed out: it accepts connections but does not answer the TLS handshake"
    with conn:
        return _first_answer(conn, tls)


def _first_answer(conn: ssl.SSLSocket, tls: TlsFiles) -> str:
    """Hear the server's verdict on the client certificate: in TLS 1.3 it follows the handshake.

    Nothing is sent before: an answer to that could overtake the verdict.
    """
    timeout_s = conn.gettimeout()
    conn.settimeout(VERDICT_S)
    try:
        try:
            answer = conn.recv(1)
        except TimeoutError:
            conn.settimeout(timeout_s)
            conn.sendall(HTTP2_HELLO)
            answer = conn.recv(1)
    except TimeoutError:
        return "timed out: it does not answer after the TLS handshake"
    except ssl.SSLError as e:
        return _alert(e, tls)
    except OSError as e:
        return f"connection broke after the TLS handshake: {e.strerror or e}"
    return "" if answer else "connection closed by the server after the TLS handshake"


def _certificate_problem(error: ssl.SSLCertVerificationError, endpoint: Endpoint, tls: TlsFiles) -> str:
    code = error.verify_code
    if code in UNKNOWN_CA:
        hint = "" if tls.ca is not None else "; give its CA with --etcd-cafile"
        return f"the server's certificate is signed by an unknown CA ({error.verify_message}){hint}"
    certificate = _peer_certificate(endpoint, tls)
    if code == EXPIRED:
        until = certificate.get("notAfter", "")
        if until and ssl.cert_time_to_seconds(until) < time.time():
            return f"the server's certificate expired on {until}"
        return "a certificate in the server's chain has expired"
    if code == NOT_YET_VALID:
        return f"the server's certificate is not valid before {certificate.get('notBefore', 'some later date')}"
    if code in WRONG_NAME:
        names = ", ".join(value for _, value in certificate.get("subjectAltName", ())) or "no name at all"
        return f"name mismatch: the server's certificate is for {names}, not for {endpoint.host}"
    return f"the server's certificate is not accepted: {error.verify_message}"


def _peer_certificate(endpoint: Endpoint, tls: TlsFiles) -> dict[str, Any]:
    """Fetch the certificate while overlooking its dates and names; empty if that fails."""
    context = tls.context()
    context.check_hostname = False
    context.verify_flags |= NO_CHECK_TIME
    with (
        contextlib.suppress(OSError),
        socket.create_connection((endpoint.host, endpoint.port), 1) as sock,
        context.wrap_socket(sock, server_hostname=endpoint.host) as conn,
    ):
        return dict(conn.getpeercert() or {})
    return {}


def _alert(error: ssl.SSLError, tls: TlsFiles) -> str:
    reason = error.reason or str(error)
    if isinstance(error, ENDED):
        return "connection closed by the server after the TLS handshake"
    if "ALERT" in reason and any(word in reason for word in ("CERTIFICATE", "UNKNOWN_CA", "HANDSHAKE", "DENIED")):
        if tls.cert is None:
            return "the server demands a client certificate; give --etcd-certfile and --etcd-keyfile"
        return f"the server refuses our client certificate ({reason.lower().replace('_', ' ')})"
    if "VERSION_NUMBER" in reason or "RECORD" in reason or "HTTP_REQUEST" in reason:
        return "the server does not speak TLS: use http:// in the endpoint"
    return f"TLS handshake failed: {reason.lower().replace('_', ' ')}"
