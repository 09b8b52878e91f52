from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
]

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "backends" / "udp" / "native"
FLAGS = "-std=c11 -O1 -g -Wall -Wextra -Werror -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC"

AGAIN = """
import importlib.util, sys
import backends.udp
spec = importlib.util.spec_from_file_location("backends.udp._pump", sys.argv[1])
backends.udp._pump = sys.modules["backends.udp._pump"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(backends.udp._pump)
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-x", *sys.argv[2:]]))
"""


def gcc_library(name: str) -> str:
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.timeout(240)
def test_the_native_pump_steps_nowhere_it_should_not(tmp_path: Path) -> None:
    library = gcc_library("libasan.so")
    if not Path(library).is_absolute():
        pytest.skip("gcc has no address sanitizer here")
    built = tmp_path / "_pump.so"
    include = f"-I{sysconfig.get_paths()['include']}"
    argv = ["gcc", *FLAGS.split(), include, *map(str, sorted(NATIVE.glob("*.c"))), "-o", str(built)]
    compiled = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    # Python itself leaves blocks to the end of the process, which are no leaks of the pump's.
    env = os.environ | {"LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc"}
    pure = ("native", "ipv6", "routes", "pump")
    there = "order or garbage or nobody or ends_here or options or flow or stranger or datagram or fragments"
    tests = [
        *(f"tests/pure/test_udp_{name}.py" for name in pure),
        *(f"tests/kernel/test_udp_{name}.py" for name in ("carrier", "ipv6", "native_loop")),
        *("-k", f"not kernel or (native and not python and ({there} or collected))"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", AGAIN, str(built), *tests],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
    assert " passed" in done.stdout
