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

DEADLINE_S = 2400.0
SELECTION = "vm or stock"


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
            chosen = arguments or ["-m", SELECTION, *selected()]
            build_initramfs(kernel, chosen, initramfs)
            print(f"Linux {kernel.version}, emulated:", flush=True)
            return run_machine(qemu_argv(kernel, initramfs), DEADLINE_S, lambda line: print(line, flush=True))
    except MachineError as error:
        print(f"tests.vm: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
