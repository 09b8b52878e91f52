"""The process charon, played by a script of that name."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.ipsec import charon as module
from backends.ipsec.charon import MARK, Charon
from backends.ipsec.vici import CharonError
from flanneld.ctl.lab.tools import poll

pytestmark = pytest.mark.kernel

SCRIPT = """#!/bin/sh
echo $$ >"$PLAY/charon.pid"
trap '%s' TERM
while :; do sleep 0.02; done
"""


@pytest.fixture(autouse=True)
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the script, in which it writes its process id."""

    def connect() -> str:
        if not (tmp_path / "charon.pid").exists() or not (tmp_path / "charon.pid").read_text():
            raise CharonError("charon does not listen")
        return "connected"

    monkeypatch.setenv("PLAY", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "PID_FILE", tmp_path / "charon.pid")
    monkeypatch.setattr(module, "DIRECTORIES", ())
    monkeypatch.setattr(module, "Vici", connect)
    write(tmp_path, 'rm -f "$PLAY/charon.pid"; exit 0')
    yield tmp_path
    try:
        os.kill(int((tmp_path / "charon.pid").read_text()), signal.SIGKILL)
    except (OSError, ValueError):
        return


def write(directory: Path, at_the_end: str) -> None:
    (directory / "charon").write_text(SCRIPT % at_the_end)
    (directory / "charon").chmod(0o755)


def pid(directory: Path) -> int:
    return int((directory / "charon.pid").read_text())


def make() -> Charon:
    return Charon(lambda: False)


def test_it_is_started_found_running_and_ended(play: Path) -> None:
    charon = make()
    assert not charon.running()
    assert charon.connect() == "connected"  # type: ignore[comparison-overlap]
    first = pid(play)
    assert charon.running()
    charon.connect()
    assert pid(play) == first
    charon.end(5)
    assert not charon.running()
    assert not (play / "charon.pid").exists()
    charon.end(5)


@pytest.mark.usefixtures("play")
def test_a_new_one_after_each_change_of_address_leaves_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        charon = make()
        charon.connect()
        charon.end(5)
        del charon
    assert len(os.listdir("/proc/self/fd")) == before


def test_one_that_died_is_started_again(play: Path) -> None:
    charon = make()
    charon.connect()
    first = pid(play)
    os.kill(first, signal.SIGKILL)
    poll("its end", lambda: not charon.running(), 5)
    (play / "charon.pid").unlink()
    charon.connect()
    assert pid(play) != first
    charon.end(5)


def test_one_of_an_earlier_run_is_taken_over_and_ended(play: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    earlier = make()
    earlier.connect()
    first = pid(play)
    charon = make()
    charon.connect()
    assert (pid(play), charon.running()) == (first, True)
    assert f"earlier run goes on (process {first})" in caplog.text
    charon.end(5)
    assert not earlier.running()


def test_one_that_ends_while_it_is_taken_over_is_started_again(play: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    earlier = make()
    earlier.connect()
    first = pid(play)
    opened = os.pidfd_open

    def too_late(number: int) -> int:
        monkeypatch.setattr(os, "pidfd_open", opened)
        earlier.end(5)
        return opened(number)

    monkeypatch.setattr(os, "pidfd_open", too_late)
    charon = make()
    with pytest.raises(CharonError, match=rf"charon \(process {first}\) cannot be watched: No such process"):
        charon.connect()
    charon.connect()
    assert pid(play) != first
    charon.end(5)


def test_one_of_somebody_else_is_left_alone_and_named(play: Path) -> None:
    env = {key: value for key, value in os.environ.items() if key != MARK}
    with subprocess.Popen([play / "charon"], env=env) as foreign:
        try:
            poll("its file", lambda: (play / "charon.pid").exists() and (play / "charon.pid").read_text(), 5)
            with pytest.raises(CharonError, match=rf"another charon runs here \(process {foreign.pid}\)"):
                make().connect()
            assert foreign.poll() is None
        finally:
            foreign.kill()


def test_a_file_that_names_another_program_is_removed(play: Path) -> None:
    (play / "charon.pid").write_text(f"{os.getpid()}\n")
    charon = make()
    charon.connect()
    assert pid(play) != os.getpid()
    charon.end(5)


def test_one_that_does_not_end_is_killed_in_time(play: Path) -> None:
    write(play, "")
    charon = make()
    charon.connect()
    began = time.monotonic()
    charon.end(0.2)
    poll("its end", lambda: not charon.running(), 5)
    assert time.monotonic() - began < 5


def test_what_is_not_installed_or_ends_at_once_is_said(play: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (play / "charon").write_text("#!/bin/sh\nexit 7\n")
    with pytest.raises(CharonError, match=r"ended at once \(exit code 7\)"):
        make().connect()
    (play / "charon").unlink()
    monkeypatch.setenv("PATH", str(play))
    with pytest.raises(CharonError, match="neither in PATH nor in"):
        make().connect()


def test_none_is_started_at_the_end(play: Path) -> None:
    with pytest.raises(CharonError, match="ends"):
        Charon(lambda: True).connect()
    assert not (play / "charon.pid").exists()
