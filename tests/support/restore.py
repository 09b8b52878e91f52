"""What iptables-restore --noflush does to tables, in memory: either all of a table's lines or none."""

from __future__ import annotations

import shlex

BUILT_IN = {
    "nat": ("PREROUTING", "INPUT", "OUTPUT", "POSTROUTING"),
    "filter": ("INPUT", "FORWARD", "OUTPUT"),
}

Tables = dict[str, dict[str, list[str]]]


class RestoreError(Exception):
    pass


def restore(tables: Tables, text: str) -> Tables:
    result = {name: {chain: list(rules) for chain, rules in chains.items()} for name, chains in tables.items()}
    table: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("*"):
            name = line[1:]
            table = {chain: list(rules) for chain, rules in result.get(name, {}).items()}
            for chain in BUILT_IN[name]:
                table.setdefault(chain, [])
        elif line == "COMMIT":
            result[name] = table
        elif line.startswith(":"):
            table[line[1:].split()[0]] = []
        else:
            _command(table, line)
    return result


def _command(table: dict[str, list[str]], line: str) -> None:
    option, chain, *rest = line.split(" ", 2)
    rule = rest[0] if rest else ""
    if chain not in table:
        raise RestoreError(f"no chain: {line}")
    if option == "-A":
        table[chain].append(_checked(table, rule))
    elif option == "-I":
        number, rule = rule.split(" ", 1)
        table[chain].insert(int(number) - 1, _checked(table, rule))
    elif option == "-D":
        if rule not in table[chain]:
            raise RestoreError(f"no such rule: {line}")
        table[chain].remove(rule)
    elif option == "-X":
        if table[chain] or any(_target(r) == chain for rules in table.values() for r in rules):
            raise RestoreError(f"in use: {line}")
        del table[chain]
    else:
        raise RestoreError(f"unknown: {line}")


def _checked(table: dict[str, list[str]], rule: str) -> str:
    target = _target(rule)
    if target not in {"ACCEPT", "RETURN", "DROP", "REJECT", "MASQUERADE"} and target not in table:
        raise RestoreError(f"no target: {rule}")
    return rule


def _target(rule: str) -> str:
    words = shlex.split(rule)
    return words[next(i for i, word in enumerate(words) if word in {"-j", "-g"}) + 1]
