"""What single flag values mean: text or number in, the value of an option out.

Every reader raises ValueError with a text to follow the flag's name. Only
``readable_file`` looks at the host.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from flanneld.goflags import parse_value
from subnet.model import IPAddress, IPNetwork

ETCD_PORT = 2379
"""Registered client port (IANA: etcd-client), for endpoints that name none."""

_ENDPOINT = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<host>\[[0-9a-fA-F:.]+\]|[\w.-]+)(?::(?P<port>\d{1,5}))?/?", re.IGNORECASE
)
_MODULE_LEVEL = re.compile(r"(?P<pattern>[^=]+)=(?P<level>\d+)")
_BACKTRACE_AT = re.compile(r"[^:/]+\.[^:/]+:0*[1-9]\d*")
_RULE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_OUTSIDE_CLASS = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
_INSIDE_CLASS = re.compile(r"\\.|\[:\^?\w*:\]|.", re.DOTALL)
_OUTSIDE_SPELLINGS = {r"\z": r"\Z"}
_POSIX_CLASSES = {
    "alnum": "0-9A-Za-z",
    "alpha": "A-Za-z",
    "ascii": r"\x00-\x7f",
    "blank": r"\t ",
    "cntrl": r"\x00-\x1f\x7f",
    "digit": "0-9",
    "graph": "!-~",
    "lower": "a-z",
    "print": " -~",
    "punct": r"!-/:-@\[-`{-~",
    "space": r"\t\n\v\f\r ",
    "upper": "A-Z",
    "word": "0-9A-Za-z_",
    "xdigit": "0-9A-Fa-f",
}


def endpoints(text: str) -> tuple[str, ...]:
    """Return etcd endpoints as ``scheme://host:port``; http and port 2379 unless given.

    Blanks around items and empty items are dropped.
    """
    if "@" in text:
        # Nothing of the list may be quoted: any part can belong to the password.
        raise ValueError(
            "an endpoint holds a user name or password; give them with --etcd-username and --etcd-password"
        )
    found = tuple(_endpoint(item) for item in map(str.strip, text.split(",")) if item)
    if not found:
        raise ValueError("no endpoint is given")
    return found


def _endpoint(item: str) -> str:
    match = _ENDPOINT.fullmatch(item)
    if match is None:
        raise ValueError(f"endpoint {item!r} is not of the form http://host:port or https://host:port")
    host = match["host"]
    if host.startswith("["):
        try:
            IPv6Address(host[1:-1])
        except ValueError as error:
            raise ValueError(f"endpoint {item!r}: {error}") from error
    port = int(match["port"] or ETCD_PORT)
    if not 0 < port <= 0xFFFF:
        raise ValueError(f"endpoint {item!r}: {port} is not a port")
    return f"{(match['scheme'] or 'http').lower()}://{host}:{port}"


def public_ipv4(text: str) -> IPv4Address | None:
    """Return an IPv4 address that peers can send to; None for the empty text."""
    return IPv4Address(_peer_address(text, 4)) if text else None


def public_ipv6(text: str) -> IPv6Address | None:
    """Return an IPv6 address that peers can send to; None for the empty text."""
    return IPv6Address(_peer_address(text, 6)) if text else None


def _peer_address(text: str, version: int) -> IPAddress:
    found = address(text)
    if found.version != version:
        raise ValueError(f"{text!r} is not an IPv{version} address")
    if found.is_unspecified or found.is_multicast:
        raise ValueError(f"{text!r} is not the address of a host")
    return found


def address(text: str) -> IPAddress:
    """Return the address of either family; a scope (``%eth0``) is refused."""
    try:
        if "%" not in text:
            return ip_address(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is not an IP address") from error
    raise ValueError(f"{text!r} is not an IP address: a scope has no place here")


def optional_address(text: str) -> IPAddress | None:
    """Return the address of either family; None for the empty text."""
    return address(text) if text else None


def network(text: str) -> IPNetwork:
    """Return a network; one with host bits is refused, as it is not clear what was meant."""
    try:
        return ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no network: {error}") from error


def rule_name(longest: int) -> Callable[[str], str]:
    """Return a reader of what begins names of chains or tables."""

    def read(text: str) -> str:
        if not _RULE_NAME.fullmatch(text) or len(text) > longest:
            raise ValueError(
                f"{text!r} is not a letter and then letters, digits, - and _, {longest} characters at most"
            )
        return text

    return read


def listen_address(text: str) -> IPAddress:
    """Return the address to listen on; the empty text means all IPv4 addresses."""
    return address(text or "0.0.0.0")  # noqa: S104 - as upstream


def port(number: int) -> int:
    """Return the port; zero and negative numbers mean none."""
    if number > 0xFFFF:
        raise ValueError(f"{number} is above 65535")
    return number


def between(low: int, high: int | None = None) -> Callable[[int], int]:
    """Return a reader of integers in this range, bounds included."""

    def read(number: int) -> int:
        if number < low or (high is not None and number > high):
            raise ValueError(f"{number} is not {f'at least {low}' if high is None else f'between {low} and {high}'}")
        return number

    return read


def minutes_to_s(low: int, high: int) -> Callable[[int], int]:
    """Return a reader of minutes in this range that gives seconds."""
    check = between(low, high)
    return lambda minutes: check(minutes) * 60


def one_of(*words: str) -> Callable[[str], str]:
    """Return a reader that accepts these words only."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is none of {', '.join(words)}")
        return text

    return read


def path(text: str) -> str:
    """Return a path that is not empty."""
    if not text:
        raise ValueError("a file name is needed")
    return text


def readable_file(text: str) -> str:
    """Return the path of a file that can be read now; the empty text is none."""
    if text:
        try:
            with open(text, "rb") as file:
                file.read(1)
        except OSError as error:
            raise ValueError(f"cannot read {text!r}: {error.strerror}") from error
    return text


def pattern(text: str) -> str:
    r"""Return a Go regular expression as one of module ``re``.

    Translates what is spelled otherwise: ``\z`` and classes like ``[[:alpha:]]``.
    Other spellings that only RE2 has are refused. Source: RE2 wiki, Syntax.
    """
    parts: list[str] = []
    inside = False
    position = 0
    while match := (_INSIDE_CLASS if inside else _OUTSIDE_CLASS).match(text, position):
        piece, position = match[0], match.end()
        parts.append(_in_class(piece) if inside else _OUTSIDE_SPELLINGS.get(piece, piece))
        inside = piece != "]" if inside else piece.startswith("[")
    translated = "".join(parts)
    try:
        re.compile(translated)
    except re.error as error:
        raise ValueError(f"{text!r} is not a usable regular expression: {error}") from error
    return translated


def _in_class(piece: str) -> str:
    if piece == "[":
        return r"\["  # module re warns of a bare one
    if not piece.startswith("["):
        return piece
    name = piece[2:-2]
    if name.startswith("^"):
        raise ValueError(f"the negated class {piece} is not supported; negate the brackets around it")
    if name not in _POSIX_CLASSES:
        raise ValueError(f"{piece} is not a character class")
    return _POSIX_CLASSES[name]


def module_levels(text: str) -> str:
    """Return the text if it is ``pattern=N,...``; see ``parse_module_levels``."""
    parse_module_levels(text)
    return text


def parse_module_levels(text: str) -> tuple[tuple[str, int], ...]:
    """Return pairs of a glob pattern and the log level of the modules it matches."""
    levels = []
    for item in filter(None, map(str.strip, text.split(","))):
        match = _MODULE_LEVEL.fullmatch(item)
        if match is None:
            raise ValueError(f"{item!r} is not of the form pattern=N")
        levels.append((match["pattern"], int(parse_value("int", match["level"]))))
    return tuple(levels)


def source_line(text: str) -> str:
    """Return the text if it is empty or ``file:line``, as ``loop.py:40``."""
    if text and not _BACKTRACE_AT.fullmatch(text):
        raise ValueError(f"{text!r} is not of the form file:line")
    return text
