"""``python -m tests.vm``: run the tests marked ``vm`` or ``stock`` in the guest; arguments go to pytest there."""

from __future__ import annotations

import compileall
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tests.vm.machine import PROJECT, MachineError, build_initramfs, find_kernel, qemu_argv, run_machine

DEADLINE_S = 3600.0
SELECTION = "vm or stock"
LONGEST = "tests/system/test_ipip.py"
"""Takes about as long as everything else together."""


def compile_sources() -> None:
    """Leave byte code beside the sources: the guest can only read them, and would compile them in every process."""
    for package in ("subnet", "backends", "flanneld", "tests"):
        compileall.compile_dir(PROJECT / package, quiet=2)


def selected() -> list[str]:
    """Return the test files that hold something for the guest; collecting there would take far longer."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", SELECTION]
    done = subprocess.run(argv, cwd=PROJECT, capture_output=True, text=True, check=False)
    files = dict.fromkeys(line.split("::")[0] for line in done.stdout.splitlines() if "::" in line)
    if done.returncode or not files:
        raise MachineError(f"no test was found for the guest:\n{done.stdout}{done.stderr}")
    return list(files)


def side_by_side(files: list[str]) -> list[list[str]]:
    """Return the arguments of two runs, one per processor of the guest: the longest file, and all others."""
    shares = [file for file in files if file == LONGEST], [file for file in files if file != LONGEST]
    return [["-m", SELECTION, *share] for share in shares if share]


def end_with_the_machine() -> None:
    """Let SIGTERM unwind the stack, which ends the machine; whoever asks twice does not disturb that."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        del frame
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def main(arguments: list[str]) -> int:
    """Return pytest's exit status in the guest, 1 if it never got that far."""
    end_with_the_machine()
    try:
        kernel = find_kernel()
        compile_sources()
        with tempfile.TemporaryDirectory() as directory:
            initramfs = Path(directory) / "initramfs.gz"
            build_initramfs(kernel, [arguments] if arguments else side_by_side(selected()), initramfs)
            print(f"Linux {kernel.version}, emulated:", flush=True)
            return run_machine(qemu_argv(kernel, initramfs), DEADLINE_S, lambda line: print(line, flush=True))
    except MachineError as error:
        print(f"tests.vm: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
