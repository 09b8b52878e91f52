"""The text of ``--help``."""

from __future__ import annotations

from textwrap import fill

from flanneld.options import FLAGS, GROUPS, Flag

_INTRODUCTION = """\
Usage: flanneld [flags]

Joins this host to an overlay network whose config and leases are in etcd.

One dash or two; --name=value or --name value, a bool only --name or --name=value.
Each flag can be set by an environment variable instead: FLANNELD_ and its name in
upper case, with _ for - (FLANNELD_ETCD_ENDPOINTS). The command line comes first.
"""


def usage() -> str:
    """Return all flags by group, with types and defaults; ends with a newline."""
    parts = [_INTRODUCTION]
    for group in GROUPS:
        members = [_entry(flag) for flag in FLAGS.values() if flag.group == group]
        parts.append("\n".join([f"{group}:", *members, ""]))
    parts.append(
        "\n".join(["Information:", "  --help, -h", "        show this text", "  --version", "        show the version"])
    )
    return "\n".join(parts) + "\n"


def _entry(flag: Flag) -> str:
    notes = (
        [f"default {str(flag.default).lower() if flag.kind == 'bool' else flag.default}"] if flag.default != "" else []
    )
    if flag.repeatable:
        notes.append("can be repeated")
    remarks = f" ({'; '.join(notes)})" if notes else ""
    value = "[=bool]" if flag.kind == "bool" else f" {flag.kind}"
    text = fill(flag.text + remarks, 100, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False)
    return f"  --{flag.name}{value}\n{text}"
