"""Private keys of WireGuard (Curve25519, RFC 7748) and the file that holds this node's."""

from __future__ import annotations

import base64
import binascii
import logging
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from subnet.errors import ConfigError
from subnet.files import create_file

log = logging.getLogger(__name__)

KEY_BYTES = 32
DEFAULT_FILE = "/run/flannel/wgkey"
VARIABLE = "WIREGUARD_KEY_FILE"
FILE_MODE, DIRECTORY_MODE = 0o400, 0o755
READ_LIMIT_BYTES = 4096
_FIELD_BITS, _FIELD, _BASE_POINT, _A24 = 255, 2**255 - 19, 9, 121665
"""Curve25519 (RFC 7748 s4.1, s5)."""


def parse_key(text: str) -> str:
    """Return a key in canonical base64. Raises ValueError, without the text, for what is none."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as cause:
        raise ValueError("is not base64") from cause
    if len(raw) != KEY_BYTES:
        raise ValueError(f"is base64 of {len(raw)} bytes, a key has {KEY_BYTES}")
    return base64.b64encode(raw).decode()


def clamped(raw: bytes) -> str:
    """Return the private key that 32 bytes stand for (RFC 7748 s5), in base64, as the kernel shows it."""
    octets = bytearray(raw)
    octets[0] &= 0xF8
    octets[31] = octets[31] & 0x7F | 0x40
    return base64.b64encode(octets).decode()


@lru_cache(maxsize=8)
def public_key(private: str) -> str:
    """Return the public key of a private one, both in base64: X25519 of the base point (RFC 7748 s5 and s6.1).

    Kernels do this themselves. Not in constant time: nobody can have it done again and again and measure.
    """
    scalar = int.from_bytes(base64.b64decode(clamped(base64.b64decode(private))), "little")
    x2, z2, x3, z3, swapped = 1, 0, _BASE_POINT, 1, 0
    for position in reversed(range(_FIELD_BITS)):
        bit = scalar >> position & 1
        if swapped ^ bit:
            x2, z2, x3, z3 = x3, z3, x2, z2
        swapped = bit
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        aa, bb, da, cb = a * a, b * b, d * a, c * b
        e = aa - bb
        x3, z3 = (da + cb) ** 2 % _FIELD, _BASE_POINT * (da - cb) ** 2 % _FIELD
        x2, z2 = aa * bb % _FIELD, e * (aa + _A24 * e) % _FIELD
    if swapped:
        x2, z2 = x3, z3
    return base64.b64encode((x2 * pow(z2, -1, _FIELD) % _FIELD).to_bytes(KEY_BYTES, "little")).decode()


def key_file() -> Path:
    """Return the file that the environment names, else the default."""
    return Path(os.environ.get(VARIABLE) or DEFAULT_FILE)


def private_key(path: Path, random: Callable[[int], bytes] = secrets.token_bytes) -> str:
    """Return the private key that ``path`` holds, in base64; an absent file is made, with a new key.

    Raises ConfigError, never with anything of the content, for a file that
    cannot be read, written or understood: a key that peers know is not thrown
    away because of a slip. Source: upstream pkg/backend/wireguard/device.go.
    """
    try:
        with suppress(FileNotFoundError):
            return _read(path)
        try:
            create_file(path, clamped(random(KEY_BYTES)).encode(), FILE_MODE, DIRECTORY_MODE)
        except FileExistsError:
            pass  # another daemon was faster
        else:
            log.info("a new WireGuard key was written to %s", path)
        return _read(path)
    except OSError as cause:
        raise ConfigError(f"WireGuard key file {path}: {(cause.strerror or str(cause)).lower()}") from cause


def _read(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(READ_LIMIT_BYTES)
        others = os.fstat(file.fileno()).st_mode & 0o077
    if others:
        log.warning("WireGuard key file %s can be read or written by others", path)
    try:
        return clamped(base64.b64decode(parse_key(content.decode("ascii").strip())))
    except ValueError as cause:
        reason = "is not text" if isinstance(cause, UnicodeDecodeError) else cause
        # The cause may quote the content.
        raise ConfigError(f"WireGuard key file {path} {reason}; remove it to have a new key made") from None
