"""Every fuzz target for some seconds; ``make fuzz`` is the same for long."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.fuzz import NATIVE, TARGETS, build, run, sow


def can_fuzz() -> bool:
    if shutil.which("clang") is None:
        return False
    argv = ["clang", "-print-runtime-dir"]
    directory = Path(subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip())
    return any(directory.glob("libclang_rt.fuzzer*"))


pytestmark = [pytest.mark.pure, pytest.mark.skipif(not can_fuzz(), reason="needs clang with libFuzzer")]


def tried(target: str, directory: Path, native: Path = NATIVE) -> subprocess.CompletedProcess[str]:
    corpus = directory / target
    sow(target, corpus)
    return run(build(target, directory, native), corpus, f"-runs={TARGETS[target]}", "-seed=1")


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks_a_rule(tmp_path: Path, target: str) -> None:
    done = tried(target, tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    assert f"stat::number_of_executed_units: {TARGETS[target]}" in done.stderr


DAMAGE = {
    "segment": ("segment.c", "cut->seq + (uint32_t)cut->at", "cut->seq"),
    "coalesce": ("coalesce.c", "a[IP4_TTL] != b[IP4_TTL] || ", ""),
    "icmp": ("packet.c", "if (get16(ip + IP4_FRAGMENT) & OFFSET)", "if (0)"),
    "lookup": ("routes.c", "return address_less(destination, r->ranges[low].first) ? none : ", "return "),
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_damaged_pump_is_found_out(tmp_path: Path, target: str) -> None:
    native = tmp_path / "native"
    shutil.copytree(NATIVE, native)
    name, right, wrong = DAMAGE[target]
    source = (native / name).read_text()
    assert source.count(right) == 1
    (native / name).write_text(source.replace(right, wrong))
    done = tried(target, tmp_path, native)
    assert done.returncode != 0
    assert "not so:" in done.stderr
