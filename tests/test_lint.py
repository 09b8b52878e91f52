from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent


@pytest.mark.parametrize(
    "argv",
    [("ruff", "check"), ("ruff", "format", "--check"), ("mypy", "--strict"), ("lint-imports",)],
    ids=" ".join,
)
def test_the_code_is_clean(argv: tuple[str, ...]) -> None:
    tool = BIN / argv[0]
    if not tool.exists():
        pytest.skip(f"{argv[0]} is not installed beside {sys.executable}")
    done = subprocess.run([tool, *argv[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"\n{done.stdout}{done.stderr}"
