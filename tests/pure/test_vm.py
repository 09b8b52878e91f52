from __future__ import annotations

import gzip
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vm.machine import (
    BEGIN,
    BUSYBOX,
    END,
    HERE,
    PROJECT,
    Console,
    GuestKernel,
    MachineError,
    build_initramfs,
    covered,
    fill,
    find_kernel,
    load_order,
    qemu_argv,
    run_machine,
    script_of,
)

pytestmark = pytest.mark.pure


def guest(*lines: str, then: str = "") -> list[str]:
    said = "".join(f"print({line!r}, flush=True)\n" for line in lines)
    return [sys.executable, "-c", said + then]


def test_exit_status_of_pytest_becomes_the_result_and_only_its_output_is_shown() -> None:
    shown: list[str] = []
    lines = ("[    0.5] boot\r", f"{BEGIN}\r", "2 failed, 3 passed\r", f"{END} 1\r", "[    9.0] power down\r")
    assert run_machine(guest(*lines), 20, shown.append) == 1
    assert shown == ["2 failed, 3 passed"]
    assert run_machine(guest(BEGIN, f"{END} 0"), 20, shown.append) == 0


def test_guest_that_hangs_is_stopped_and_its_console_shown() -> None:
    argv = guest("loading", BEGIN, "..F", then="import time; time.sleep(60)")
    with pytest.raises(MachineError, match=r"was stopped after 3 s.*\n(.*\n)*\.\.F"):
        run_machine(argv, 3, lambda _: None)


def test_guest_that_ends_without_a_result_is_a_failure() -> None:
    with pytest.raises(MachineError, match=r"ended early(.*\n)*Kernel panic"):
        run_machine(guest("Kernel panic - not syncing"), 20, lambda _: None)


RUNNER = f"""
import sys
from tests.vm.__main__ import end_with_the_machine
from tests.vm.machine import run_machine

guest = "import os, time; print({BEGIN!r}); print(os.getpid(), flush=True); time.sleep(60)"
end_with_the_machine()
run_machine([sys.executable, "-c", guest], 60, lambda line: print(line, flush=True))
"""


def test_end_of_the_runner_is_the_end_of_the_guest_even_if_asked_for_twice() -> None:
    with subprocess.Popen([sys.executable, "-c", RUNNER], cwd=PROJECT, stdout=subprocess.PIPE, text=True) as runner:
        assert runner.stdout is not None
        guest = Path("/proc", runner.stdout.readline().strip())
        assert guest.is_dir()
        runner.terminate()
        runner.terminate()
        assert runner.wait(20) == 128 + signal.SIGTERM
        assert not guest.exists()


def test_long_console_is_shown_from_its_end() -> None:
    console = Console(lambda _: None)
    for number in range(1000):
        console.take(str(number))
    assert console.tail().splitlines()[0] != "0"
    assert console.tail().splitlines()[-1] == "999"


def test_modules_load_after_what_they_need_and_once() -> None:
    shown = ("insmod /k/virtio_ring.ko ", "insmod /k/virtio.ko ", "builtin pci", "insmod /k/virtio_ring.ko ")
    assert load_order("\n".join((*shown, "insmod /k/9p.ko opt=1\n"))) == [
        Path("/k/virtio_ring.ko"),
        Path("/k/virtio.ko"),
        Path("/k/9p.ko"),
    ]


def test_directories_below_what_the_guest_covers_are_shown_again() -> None:
    paths = [Path(p) for p in ("/tmp/w/tree", "/tmp/w/tree/.venv", "/usr", "/tmp/w/tree", "/tmpfiles", "/var/lib/x")]
    assert covered(paths) == [Path("/tmp/w/tree"), Path("/var/lib/x")]


def test_template_keeps_braces_that_are_not_its_own() -> None:
    assert fill("{a} ${HOME} {b}", {"a": "1", "b": "2"}) == "1 ${HOME} 2"


def make_kernel(root: Path) -> GuestKernel:
    modules = root / "linux-image" / "lib" / "modules" / "6.1.0-1-amd64"
    modules.mkdir(parents=True)
    (modules / "modules.dep").write_text("".join(f"{name}.ko:\n" for name in ("virtio_pci", "9pnet_virtio", "9p")))
    for name in ("virtio_pci", "9pnet_virtio", "9p"):
        (modules / f"{name}.ko").write_bytes(name.encode())
    subprocess.run(["depmod", "-b", root / "linux-image", "6.1.0-1-amd64"], check=False, capture_output=True)
    return find_kernel(root)


def test_kernel_is_found_and_booted(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="install-debian"):
        find_kernel(tmp_path)
    kernel = make_kernel(tmp_path)
    assert (kernel.directory, kernel.version) == (tmp_path / "linux-image", "6.1.0-1-amd64")
    argv = qemu_argv(kernel, Path("/i"))
    assert argv[argv.index("-kernel") + 1] == str(tmp_path / "linux-image" / "boot" / "vmlinuz-6.1.0-1-amd64")
    share = argv[argv.index("-fsdev") + 1].split(",")
    assert {"path=/", "readonly=on"} <= set(share)


@pytest.mark.skipif(not (BUSYBOX.exists() and shutil.which("cpio")), reason="busybox-static or cpio is not installed")
def test_initramfs_holds_modules_scripts_and_the_arguments(tmp_path: Path) -> None:
    kernel = make_kernel(tmp_path)
    target = tmp_path / "initramfs.gz"
    build_initramfs(kernel, [["-k", "a b"], ["c"]], target)
    unpacked = tmp_path / "unpacked"
    unpacked.mkdir()
    subprocess.run(["cpio", "--quiet", "-i"], input=gzip.decompress(target.read_bytes()), cwd=unpacked, check=True)
    assert sorted((unpacked / "modules" / "order").read_text().split()) == ["9p.ko", "9pnet_virtio.ko", "virtio_pci.ko"]
    assert (unpacked / "init").stat().st_mode & 0o111
    script = (unpacked / "guest.sh").read_text()
    assert "run '1| ' -k 'a b' &\n" in script
    assert "run '2| ' c &\n" in script
    assert f"cd '{PROJECT}'" in script


@pytest.mark.parametrize(("ends", "status"), [((0, 0), 0), ((1, 0), 1), ((0, 1), 1)])
def test_runs_side_by_side_end_together_with_the_status_of_the_one_that_failed(
    ends: tuple[int, int], status: int, tmp_path: Path
) -> None:
    template = (HERE / "guest.sh").read_text()
    body = template[template.index("# pytest with") : template.index("echo o >")]
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nfor last; do :; done\necho "said by $last"\nexit "$last"\n')
    python.chmod(0o755)
    values = {"python": str(python), "begin": BEGIN, "end": END, "runs": script_of([[str(end)] for end in ends])}
    shown: list[str] = []
    assert run_machine(["bash", "-c", fill(body, values)], 20, shown.append) == status
    assert sorted(shown) == [f"{number}| said by {end}" for number, end in enumerate(ends, 1)]
