"""JSON as Go's encoding/json reads and writes it, because Go nodes share our data.

Differences from Python's json: no NaN or Infinity, member names match in any
case, a later duplicate wins over an earlier one in another spelling, and
``<``, ``>``, ``&``, U+2028, U+2029 are escaped in strings.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping

from subnet.model import Json

SHOWN_CHARS = 60
"""How much of a value or text a message quotes."""
SECRETS = frozenset({"psk", "accesskeysecret"})
"""Folded names of members whose values never appear in a message."""

_ESCAPED = re.compile("[<>&\u2028\u2029\ud800-\udfff]")
_LITERALS = re.compile(r'"(?:[^"\\]|\\.)*"|-?Infinity|NaN|-?[0-9][0-9.eE+-]*', re.DOTALL)
_SECRET_TEXT = re.compile(rf"({'|'.join(sorted(SECRETS))})([\"'\\:=\s]*)((?:[^\"\\\n]|\\.)+)", re.IGNORECASE)


class JsonError(ValueError):
    """Text that is not JSON; the message has line, column and the offending text."""


def loads(text: str | bytes) -> Json:
    """Decode one JSON value. Raises JsonError.

    Bytes that are not UTF-8 become U+FFFD. Objects keep the order in which
    their members were last written.
    """
    if isinstance(text, bytes):
        text = text.decode(errors="replace")
    try:
        value, end = _DECODER.raw_decode(text)
        if end == len(text):
            return value
    except (ValueError, RecursionError):
        pass
    # White space around it, or a mistake whose place is to be told.
    try:
        return _decoder(text).decode(text)
    except json.JSONDecodeError as error:
        raise JsonError(_explain(error)) from error
    except (ValueError, RecursionError) as error:
        raise JsonError(f"invalid JSON: {error}") from error


def dumps(value: Json) -> bytes:
    """Encode compactly, as json.Marshal does. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return _ESCAPED.sub(_escape, text).encode()


def fold(name: str) -> str:
    """Return the form in which two spellings of one member name are equal."""
    return name.casefold()


def folded(members: Mapping[str, Json], known: Iterable[str]) -> dict[str, Json]:
    """Return the members with a known name, under that name, whatever the case they were written in."""
    spelt = frozenset(known)
    if members.keys() <= spelt:
        return dict(members)
    names = {fold(name): name for name in spelt}
    return {names[key]: value for written, value in members.items() if (key := fold(written)) in names}


def unknown(members: Mapping[str, Json], known: Iterable[str]) -> dict[str, Json]:
    """Return the members that match no known name, as written."""
    names = {fold(name) for name in known}
    return {written: value for written, value in members.items() if fold(written) not in names}


def show(value: Json) -> str:
    """Return a value as JSON text for a message: in ASCII, shortened, without what containers hold."""
    if isinstance(value, list):
        return "[...]" if value else "[]"
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    text = json.dumps(value)
    return text if len(text) <= SHOWN_CHARS else text[: SHOWN_CHARS - 3] + "..."


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"


def _decoder(text: str) -> json.JSONDecoder:
    def refuse(literal: str) -> Json:
        places = (match.start() for match in _LITERALS.finditer(text) if match[0] == literal)
        raise json.JSONDecodeError(f"{literal} is not a JSON number", text, next(places, 0))

    def number(literal: str) -> float:
        value = float(literal)
        return value if math.isfinite(value) else refuse(literal)

    return json.JSONDecoder(object_pairs_hook=_last_wins, parse_constant=refuse, parse_float=number)


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(literal)
    return value


def _last_wins(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    members: dict[str, Json] = dict(pairs)
    if len(members) == len(pairs):
        return members
    members = {}
    for name, value in pairs:
        members.pop(name, None)
        members[name] = value
    return members


_DECODER = json.JSONDecoder(object_pairs_hook=_last_wins, parse_constant=_finite, parse_float=_finite)
"""For texts that are as they should be; making one takes longer than reading a lease."""


def _explain(error: json.JSONDecodeError) -> str:
    # Masking keeps lengths, so that the decoder's position still holds.
    masked = _SECRET_TEXT.sub(lambda m: m[1] + m[2] + "*" * len(m[3]), error.doc)
    start = masked.rfind("\n", 0, error.pos) + 1
    line = masked[max(start, error.pos - SHOWN_CHARS // 2) : error.pos + SHOWN_CHARS // 2].split("\n")[0]
    excerpt = "".join(char if char.isprintable() else "?" for char in line.strip())
    near = f"near: {excerpt}" if excerpt else "at the end" if masked.strip() else "the text is empty"
    reason = error.msg[:1].lower() + error.msg[1:]
    return f"invalid JSON, line {error.lineno} column {error.colno}: {reason}, {near}"
