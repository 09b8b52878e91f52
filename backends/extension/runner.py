"""Runs one command: its own session, all its output in one place, a limit on its time."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

OUTPUT_LIMIT_BYTES = 64 << 10
SHOWN_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Result:
    """What a command printed, trimmed; ``problem`` says how it failed, empty for success."""

    output: str
    problem: str = ""


class Runner:
    """Runs commands one at a time; ``abort`` may be called from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._aborted = False

    def run(self, argv: Sequence[str], env: Mapping[str, str], text: str, timeout_s: float) -> Result:
        """Run a program with ``env`` added to ours and ``text`` as its input; wait until it ends.

        Standard output and standard error go to one file, not to a pipe: what a
        command leaves running in the background would keep a pipe open.
        """
        with _unnamed_file() as given, _unnamed_file() as taken:
            given.write(text.encode())
            given.seek(0)
            try:
                with self._lock:
                    if self._aborted:
                        return Result("", "was not started: the daemon ends")
                    process = self._process = subprocess.Popen(
                        argv,
                        stdin=given,
                        stdout=taken,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, **env},
                        start_new_session=True,
                    )
            except (OSError, ValueError) as error:
                return Result("", f"cannot be started: {error}")
            problem = self._wait(process, timeout_s)
            taken.seek(0)
            output = taken.read(OUTPUT_LIMIT_BYTES).decode(errors="replace").strip()
        if problem and output:
            shown = " / ".join(output.splitlines())
            problem += f": {shown[:SHOWN_CHARACTERS]}{'…' if len(shown) > SHOWN_CHARACTERS else ''}"
        return Result(output, problem)

    def _wait(self, process: subprocess.Popen[bytes], timeout_s: float) -> str:
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            process.wait()
            return f"was killed after {timeout_s:g} s"
        finally:
            with self._lock:
                self._process = None
        if code < 0:
            return f"was ended by signal {-code}"
        return f"ended with exit code {code}" if code else ""

    def abort(self) -> None:
        """Kill what runs, and start nothing any more."""
        with self._lock:
            self._aborted = True
            if self._process is not None:
                _kill(self._process)


def _unnamed_file() -> IO[bytes]:
    """Return a file that goes when it is closed, in memory where no directory takes one: in a read-only container."""
    try:
        return tempfile.TemporaryFile()
    except FileNotFoundError:
        return os.fdopen(os.memfd_create("flannel-command"), "w+b")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the command and everything in its session; not yet waited for, so the number is still its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
