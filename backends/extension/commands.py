"""What a command is: its words, its variables, its input. Nothing is run here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address

from subnet.errors import LeaseDataError
from subnet.model import Lease, Subnets

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_QUOTED = re.compile(r"""'[^']*'|"(?:\\.|[^"\\])*"|\\.""", re.DOTALL)
_SHELL_SYNTAX = re.compile(r"[;|&<>`\n]|\$\(|^\s*(?:export|if|for|while|case)\s")
_ESCAPABLE = frozenset('$`"\\')
"""What a backslash guards inside double quotes (POSIX shell, 2.2.3)."""


@dataclass(frozen=True, slots=True)
class CommandPlan:
    """The commands by option name, how they run, and what they are told of this node.

    ``v4`` and ``v6`` are the external interface's own addresses, None for a
    family that is off.
    """

    commands: Mapping[str, str] = field(hash=False)
    shell: bool
    timeout_s: float
    network: str
    v4: IPv4Address | None
    v6: IPv6Address | None

    def argv(self, name: str, env: Mapping[str, str]) -> list[str]:
        """Return the program and its arguments, empty for a command that is not given."""
        command = self.commands[name]
        if not command:
            return []
        return ["sh", "-c", command] if self.shell else words(command, env)

    def suspects(self) -> list[str]:
        """Return the commands that were written for a shell and will not get one."""
        return [] if self.shell else [name for name, text in self.commands.items() if has_shell_syntax(text)]

    def own_env(self, own: Subnets | None) -> dict[str, str]:
        """Return what commands about this node are told; before the lease nothing."""
        if own is None:
            return {}
        return {"NETWORK": self.network, **_variables(own, self.v4, self.v6)}


def peer_env(lease: Lease) -> dict[str, str]:
    """Return what commands about a peer are told: its subnets and announced addresses."""
    return _variables(lease.subnets, lease.attrs.public_ip, lease.attrs.public_ipv6)


def peer_input(lease: Lease) -> str:
    """Return what a peer's PreStartupCommand printed, as one line. Raises LeaseDataError for other data."""
    data = lease.attrs.backend_data
    if data is None:
        return "\n"
    if not isinstance(data, str):
        raise LeaseDataError(f"lease {lease.key}: backend data is {data!r:.60}, not a string")
    return f"{data}\n"


def _variables(subnets: Subnets, v4: IPv4Address | None, v6: IPv6Address | None) -> dict[str, str]:
    """Absent values are spelt as upstream prints them."""
    return {
        "SUBNET": str(subnets.v4 or "0.0.0.0/0"),
        "IPV6SUBNET": str(subnets.v6 or "::/0"),
        "PUBLIC_IP": str(v4 or IPv4Address(0)),
        "PUBLIC_IPV6": str(v6 or "<nil>"),
    }


def has_shell_syntax(command: str) -> bool:
    """Whether a command relies on a shell: pipes, lists, redirection, substitution, keywords outside quotes."""
    return _SHELL_SYNTAX.search(_QUOTED.sub("", command)) is not None


def words(command: str, env: Mapping[str, str]) -> list[str]:
    """Split a command as a POSIX shell does (2.2, 2.3) and expand ``$NAME`` and ``${NAME}`` in it.

    Single quotes keep their text as it is. What a variable holds is not split
    again; an unset one is empty. Raises ValueError for quotes that do not end.
    """
    found: list[str] = []
    word: str | None = None
    at = 0
    while at < len(command):
        character = command[at]
        if character.isspace():
            if word is not None:
                found.append(word)
            word, at = None, at + 1
            continue
        text, at = _piece(command, at, env)
        word = (word or "") + text
    return found if word is None else [*found, word]


def _piece(command: str, at: int, env: Mapping[str, str]) -> tuple[str, int]:
    """Return one quoted text, variable or character, and where it ends."""
    match command[at]:
        case "'":
            end = command.find("'", at + 1)
            if end < 0:
                raise ValueError("a single quote is not closed")
            return command[at + 1 : end], end + 1
        case '"':
            return _double_quoted(command, at + 1, env)
        case "\\":
            if at + 1 == len(command):
                raise ValueError("it ends with a backslash")
            return command[at + 1].removeprefix("\n"), at + 2  # an escaped end of line joins the lines
        case _:
            return _plain(command, at, env)


def _plain(command: str, at: int, env: Mapping[str, str]) -> tuple[str, int]:
    variable = _VARIABLE.match(command, at)
    if variable is None:
        return command[at], at + 1
    return env.get(variable[1] or variable[2], ""), variable.end()


def _double_quoted(command: str, at: int, env: Mapping[str, str]) -> tuple[str, int]:
    text = ""
    while at < len(command):
        if command[at] == '"':
            return text, at + 1
        if command[at] == "\\" and command[at + 1 : at + 2] in _ESCAPABLE:
            text, at = text + command[at + 1], at + 2
            continue
        if command.startswith("\\\n", at):
            at += 2
            continue
        piece, at = _plain(command, at, env)
        text += piece
    raise ValueError("a double quote is not closed")
