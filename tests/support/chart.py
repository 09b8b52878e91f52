"""Renders the chart's templates, in the part of Helm's language that they use; anything else is refused.

``{{ VALUE | FUNCTION ... }}``, ``{{ eq VALUE "text" }}``, ``if``, ``else if``, ``else``, ``end``, and ``{{-``.
VALUE is ``.Values.a.b`` or ``.Release.Namespace``. Source: Go text/template, "Text and spaces"; Helm, "Template
Function List". tests/pure/test_chart.py compares it with Helm where that is installed.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "deploy" / "chart"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_ACTION = re.compile(r"(\s*\{\{-|\{\{)\s+(.*?)\s+\}\}", re.DOTALL)
_PATH = re.compile(r"\.(?:Values(?:\.\w+)+|Release\.Namespace)")
_CALL = re.compile(r'eq (\S+) "([^"]*)"|not (\S+)|(\S+)')


class Refused(Exception):
    """A template says what this renderer, or the chart's rules for itself, do not know."""


@dataclass
class _Branch:
    """An open ``if``: whether what follows is printed, and whether a branch has been already."""

    shown: bool
    taken: bool = field(init=False)

    def __post_init__(self) -> None:
        self.taken = self.shown


@functools.cache
def default_values() -> dict[str, Any]:
    """Return values.yaml, not to be changed."""
    found: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return found


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with changes, as ``helm -f`` merges them: objects by member, null removes."""
    found = dict(base)
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(found.get(key), Mapping):
            found[key] = merged(found[key], value)
        else:
            found[key] = value
    return found


def objects(changes: Mapping[str, Any], namespace: str = "kube-flannel") -> list[Any]:
    """Return the objects that the chart makes with the default values and these changes."""
    context = {"Values": merged(default_values(), changes), "Release": {"Namespace": namespace}}
    texts = [render(path.read_text(), context) for path in sorted((CHART / "templates").glob("*.yaml"))]
    return [made for text in texts for made in yaml.load_all(text, Loader=LOADER) if made]


def render(template: str, context: Mapping[str, Any]) -> str:
    """Return the text. Raises Refused."""
    parts: list[str] = []
    branches: list[_Branch] = []
    at = 0
    for match in _ACTION.finditer(template):
        between = template[at : match.start()]
        at = match.end()
        if all(branch.shown for branch in branches):
            parts.append(between + ("" if match[1].endswith("-") else match[1].removesuffix("{{")))
        _act(match[2], context, branches, parts)
    rest = template[at:]
    if branches or "{{" in rest or "}}" in "".join(parts):
        raise Refused(f"unfinished: {rest[:40]!r}, {len(branches)} open")
    return "".join([*parts, rest])


def _act(action: str, context: Mapping[str, Any], branches: list[_Branch], parts: list[str]) -> None:
    word, _, rest = action.partition(" ")
    if word == "if":
        branches.append(_Branch(bool(_value(rest, context))))
    elif word == "else":
        branch = branches[-1]
        said = _value(rest.removeprefix("if "), context) if rest else True
        branch.shown = bool(said) and not branch.taken
        branch.taken = branch.taken or branch.shown
    elif action == "end":
        branches.pop()
    elif all(branch.shown for branch in branches):
        parts.append(_printed(action, context))


def _printed(action: str, context: Mapping[str, Any]) -> str:
    first, *functions = action.split(" | ")
    value = _value(first, context)
    for function in functions:
        name, _, argument = function.partition(" ")
        if name == "toJson":
            value = json.dumps(value)
        elif name == "toYaml":
            value = yaml.safe_dump(value).rstrip("\n")
        elif name == "nindent" and isinstance(value, str):
            value = "".join(f"\n{' ' * int(argument)}{line}" for line in value.split("\n"))
        else:
            raise Refused(f"function {function!r} in {action!r}")
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, str):
        raise Refused(f"{action!r} prints {value!r}: numbers and nothing have forms of their own in Go")
    return value


def _value(text: str, context: Mapping[str, Any]) -> Any:
    call = _CALL.fullmatch(text)
    if call is None:
        raise Refused(f"expression {text!r}")
    if call[1]:
        return _look_up(call[1], context) == call[2]
    return not _look_up(call[3], context) if call[3] else _look_up(call[4], context)


def _look_up(path: str, context: Mapping[str, Any]) -> Any:
    if not _PATH.fullmatch(path):
        raise Refused(f"value {path!r}")
    found: Any = context
    for name in path[1:].split("."):
        if not isinstance(found, Mapping):
            raise Refused(f"{path}: nothing is above {name}")
        found = found.get(name)
    return found


_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}
_KEYWORDS = {"type", "enum", "properties", "additionalProperties", "required", "items", "minItems", "minimum"}
_KEYWORDS |= {"maximum", "pattern", "$schema"}


def violations(value: Any, schema: Mapping[str, Any], where: str = "values") -> list[str]:
    """Return where a value is not as a JSON schema (draft 7) wants it. Raises Refused for other keywords."""
    if unknown := schema.keys() - _KEYWORDS:
        raise Refused(f"{where}: keywords {sorted(unknown)}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_kind(value, kind) for kind in kinds):
        return [f"{where}: {value!r} is not {' or '.join(kinds)}"]
    found = [f"{where}: {value!r} is not one of {schema['enum']}"] if value not in schema.get("enum", [value]) else []
    if isinstance(value, dict):
        members, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        found += [f"{where}: {name} is missing" for name in schema.get("required", ()) if name not in value]
        for name, member in value.items():
            rule = members.get(name, others)
            if rule is False:
                found.append(f"{where}: {name} is unknown")
            elif rule is not True:
                found += violations(member, rule, f"{where}.{name}")
    elif isinstance(value, list):
        found += [f"{where}: too short"] if len(value) < schema.get("minItems", 0) else []
        for number, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{where}[{number}]")
    elif isinstance(value, str):
        found += [] if re.search(schema.get("pattern", ""), value) else [f"{where}: {value!r} has another form"]
    elif type(value) is int and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        found.append(f"{where}: {value} is out of range")
    return found


def _is_kind(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind])
