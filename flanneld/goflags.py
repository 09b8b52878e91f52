"""Command lines in the syntax of Go's ``flag`` package. Pure.

Source: Go standard library, flag/flag.go (parseOne) and strconv/atoi.go
(ParseInt with base 0). Unlike Go, what cannot be parsed is never passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeAlias

from subnet.errors import UsageError

Kind: TypeAlias = Literal["string", "bool", "int"]
Value: TypeAlias = str | bool | int

HELP_FLAGS = frozenset({"h", "help"})
_BOOLS = {
    **dict.fromkeys(("1", "t", "T", "TRUE", "true", "True"), True),
    **dict.fromkeys(("0", "f", "F", "FALSE", "false", "False"), False),
}
_INT = re.compile(
    r"(?P<sign>[+-]?)(?:"
    r"0[xX](?P<hex>(?:_?[0-9a-fA-F])+)|0[bB](?P<bin>(?:_?[01])+)|0[oO]?(?P<oct>(?:_?[0-7])+)|(?P<dec>0|[1-9](?:_?[0-9])*)"
    r")"
)
_BASES = {"hex": 16, "bin": 2, "oct": 8, "dec": 10}
_INT_MIN, _INT_MAX = -(1 << 63), (1 << 63) - 1


def parse_value(kind: Kind, text: str) -> Value:
    """Return what ``text`` means for a flag of this kind.

    Raises ValueError, with a text that quotes the value.
    """
    if kind == "bool":
        if text not in _BOOLS:
            raise ValueError(f"{text!r} is neither true nor false")
        return _BOOLS[text]
    return _parse_int(text) if kind == "int" else text


def _parse_int(text: str) -> int:
    match = _INT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not an integer")
    base = match.lastgroup or "dec"
    number = int(match["sign"] + match[base].replace("_", ""), _BASES[base])
    if not _INT_MIN <= number <= _INT_MAX:
        raise ValueError(f"{text!r} does not fit into 64 bits")
    return number


def parse(argv: Sequence[str], kinds: Mapping[str, Kind]) -> dict[str, list[Value]] | None:
    """Return the values of every flag given, by name, in the order given.

    None if ``-h`` or ``-help`` comes before any mistake. ``argv`` is without the
    program's name. Raises UsageError that names the flag or the stray arguments.
    """
    given: dict[str, list[Value]] = {}
    strays: list[str] = []
    hint = ""
    bool_before = ""
    arguments = iter(argv)
    for argument in arguments:
        if argument == "--":
            strays += arguments
            break
        if not argument.startswith("-") or argument == "-":
            if bool_before and argument in _BOOLS:
                hint = hint or f"; write --{bool_before}={argument}"
            strays.append(argument)
            bool_before = ""
            continue
        name, equals, text = _split(argument)
        if name in HELP_FLAGS:
            return None
        if name not in kinds:
            raise UsageError(f"unknown flag --{name}{did_you_mean(name, kinds, '--')}")
        kind = kinds[name]
        bool_before = name if kind == "bool" and not equals else ""
        if not equals:
            text = "true" if kind == "bool" else _next(arguments, name)
        try:
            given.setdefault(name, []).append(parse_value(kind, text))
        except ValueError as error:
            raise UsageError(f"--{name}: {error}") from error
    if strays:
        quoted = ", ".join(repr(stray) for stray in strays)
        raise UsageError(f"unexpected argument{'s' if len(strays) > 1 else ''} {quoted}{hint}")
    return given


def _split(argument: str) -> tuple[str, bool, str]:
    """Return name, whether ``=`` is there, and what follows it."""
    name, equals, text = argument.removeprefix("-").removeprefix("-").partition("=")
    if not name or name.startswith("-"):
        # Only the name: the value may be a secret.
        raise UsageError(f"bad flag syntax: {argument.partition('=')[0] if name else argument!r}")
    return name, bool(equals), text


def _next(arguments: Iterable[str], name: str) -> str:
    for argument in arguments:
        return argument
    raise UsageError(f"--{name} needs a value")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return a suggestion to append to a message; empty if nothing known is close."""
    from difflib import get_close_matches  # noqa: PLC0415 - only mistakes need it

    close = get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix}{close[0]}?" if close else ""
