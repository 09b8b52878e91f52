from __future__ import annotations

import re
from pathlib import Path

import pytest

from flanneld.options import FLAGS, Flag

pytestmark = pytest.mark.pure

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text()


def row(flag: Flag) -> str:
    kind = flag.kind + (", repeatable" if flag.repeatable else "")
    default = f"`{str(flag.default).lower() if flag.kind == 'bool' else flag.default}`" if flag.default != "" else ""
    return f"| `--{flag.name}` | `{flag.variable}` | {kind} | {default} | {flag.text} |"


@pytest.mark.parametrize("field_name", FLAGS)
def test_each_flag_has_its_row(field_name: str) -> None:
    assert row(FLAGS[field_name]) in DOCUMENT.splitlines()


def test_no_other_flag_is_named() -> None:
    named = re.findall(r"^\| `--([\w-]+)` \| `(FLANNELD_\w+)`", DOCUMENT, re.MULTILINE)
    assert named == [(flag.name, flag.variable) for flag in FLAGS.values()]
