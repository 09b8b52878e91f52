"""Boots the virtual machine, runs pytest in it and returns what pytest ended with."""

from __future__ import annotations

import gzip
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.pace import work_s

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
BUSYBOX = Path("/bin/busybox")
KERNELS = Path(os.environ.get("KERNELS", "/var/cache/flanneld-test-kernels"))
SHARED_FILES = ("virtio_pci", "9pnet_virtio", "9p")
"""Modules that the guest needs before it sees the host's files."""
BEGIN, END = "@@ pytest begins", "@@ pytest ended with"
PASSED = ("UDP_MATRIX_SECONDS",)
"""Variables that tests in the guest have from outside."""
TAIL_LINES = 40


class MachineError(Exception):
    """The machine could not be built, or hung, or ended without a result."""


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A kernel package, unpacked into ``directory``."""

    directory: Path
    version: str

    @property
    def image(self) -> Path:
        """Return the file that is booted."""
        return self.directory / "boot" / f"vmlinuz-{self.version}"


def find_kernel(kernels: Path = KERNELS) -> GuestKernel:
    """Return the newest unpacked kernel. Raises MachineError if there is none."""
    found = sorted(kernels.glob("*/lib/modules/*/modules.dep"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise MachineError(f"no kernel below {kernels}: run scripts/install-debian vm")
    modules = found[-1].parent
    return GuestKernel(modules.parents[2], modules.name)


def load_order(shown: str) -> list[Path]:
    """Return the modules that ``modprobe --show-depends`` lists, dependencies first, each once."""
    paths = [Path(words[1]) for line in shown.splitlines() if (words := line.split()) and words[0] == "insmod"]
    return list(dict.fromkeys(paths))


def covered(paths: Sequence[Path]) -> list[Path]:
    """Return the directories to be shown again where the guest has file systems of its own, without duplicates."""
    own = (Path("/tmp"), Path("/run"), Path("/var/lib"))
    below = [path for path in dict.fromkeys(paths) if any(path.is_relative_to(directory) for directory in own)]
    return [path for path in below if not any(path != other and path.is_relative_to(other) for other in below)]


def fill(template: str, values: Mapping[str, str]) -> str:
    """Replace ``{name}`` by its value; every other brace stays."""
    for name, value in values.items():
        template = template.replace("{" + name + "}", value)
    return template


def build_initramfs(kernel: GuestKernel, runs: Sequence[Sequence[str]], target: Path) -> None:
    """Write what the guest starts from: busybox, modules, and the scripts.

    ``runs`` are the arguments of each pytest; they run side by side.
    """
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "bin").mkdir()
        (root / "modules").mkdir()
        shutil.copy(BUSYBOX, root / "bin" / "busybox")
        order = []
        for module in SHARED_FILES:
            argv = ["modprobe", "-d", str(kernel.directory), "-S", kernel.version, "--show-depends", module]
            order += load_order(_output(argv))
        order = list(dict.fromkeys(order))
        for path in order:
            shutil.copy(path, root / "modules")
        (root / "modules" / "order").write_text("".join(f"{path.name}\n" for path in order))
        needed = covered([PROJECT, Path(sys.prefix), Path(sys.base_prefix), kernel.directory])
        (root / "needed").write_text("".join(f"{path}\n" for path in needed))
        shutil.copy(HERE / "init.sh", root / "init")
        (root / "init").chmod(0o755)
        values = {
            "kernel": str(kernel.directory),
            "project": str(PROJECT),
            "python": sys.executable,
            "reference": f"{work_s():.6f}",
            "passed": " ".join(f"{name}={shlex.quote(os.environ[name])}" for name in PASSED if name in os.environ),
            "begin": BEGIN,
            "end": END,
            "runs": script_of(runs),
        }
        (root / "guest.sh").write_text(fill((HERE / "guest.sh").read_text(), values))
        names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
        packed = subprocess.run(
            ["cpio", "--quiet", "-o", "-H", "newc"], input=names.encode(), cwd=root, stdout=subprocess.PIPE, check=True
        )
        target.write_bytes(gzip.compress(packed.stdout, 1))


def script_of(runs: Sequence[Sequence[str]]) -> str:
    """Return the lines of the guest's script that start the runs; lines of several are marked with their number."""
    marks = [f"{number}| " for number in range(1, len(runs) + 1)] if len(runs) > 1 else [""]
    return "\n".join(
        f"run {shlex.join((mark, *arguments))} &\nruns+=($!)" for mark, arguments in zip(marks, runs, strict=True)
    )


def _output(argv: Sequence[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{argv[0]}: {done.stderr.strip()}")
    return done.stdout


def qemu_argv(kernel: GuestKernel, initramfs: Path) -> list[str]:
    """Return the emulator's command line: no network, no disk, the console on standard output.

    Software emulation always: a KVM device node may be there and hang. The
    plain CPU model is the fastest, as vector instructions are emulated slowly;
    expedited RCU spares a wait at each change of a network device.
    """
    return [
        "qemu-system-x86_64",
        *("-M", "q35", "-accel", "tcg,thread=multi,tb-size=512", "-smp", "2", "-cpu", "qemu64", "-m", "2048"),
        *("-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot"),
        *("-kernel", str(kernel.image), "-initrd", str(initramfs)),
        *("-append", "console=ttyS0 quiet panic=-1 mitigations=off rcupdate.rcu_expedited=1"),
        *("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=root,mount_tag=root"),
    ]


@dataclass
class Console:
    """What the guest said. Lines between the markers are shown, the rest is kept for the case of a fault."""

    show: Callable[[str], None]
    lines: list[str] = field(default_factory=list)
    status: int | None = None
    _running: bool = False

    def take(self, line: str) -> None:
        """Take one line, without its end."""
        line = line.rstrip("\r")
        self.lines.append(line)
        if line == BEGIN:
            self._running = True
        elif line.startswith(END):
            self._running = False
            self.status = int(line.removeprefix(END))
        elif self._running:
            self.show(line)

    def tail(self) -> str:
        """Return the last lines."""
        return "\n".join(self.lines[-TAIL_LINES:])


def run_machine(argv: Sequence[str], deadline_s: float, show: Callable[[str], None]) -> int:
    """Run the emulator until it ends and return pytest's exit status.

    Raises MachineError, with the console's last lines, when ``deadline_s``
    passes or the guest ends without having said a status.
    """
    console = Console(show)
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as machine:
        late = threading.Event()

        def end() -> None:
            late.set()
            machine.kill()

        timer = threading.Timer(deadline_s, end)
        timer.start()
        try:
            for line in _lines(machine):
                console.take(line)
        finally:
            timer.cancel()
            machine.kill()
    if console.status is not None:
        return console.status
    what = f"was stopped after {deadline_s:g} s" if late.is_set() else f"ended early ({machine.returncode})"
    raise MachineError(f"the guest {what}; its console's last lines:\n{console.tail()}")


def _lines(machine: subprocess.Popen[bytes]) -> Iterator[str]:
    if machine.stdout is not None:
        for line in machine.stdout:
            yield line.decode(errors="replace").rstrip("\n")
