from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flanneld import __version__, cli
from flanneld.options import Options
from subnet.errors import UsageError

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[2]
LIGHT = {"argparse", "etcd3", "grpc", "pyroute2", "click", "rich", "difflib", "importlib.metadata", "flanneld.usage"}


@pytest.fixture(autouse=True)
def _root_logger_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.captureWarnings(False)


def run(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flanneld", *argv],
        cwd=ROOT,
        env={"PATH": os.environ["PATH"], **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("argv", "environ", "word"),
    [
        (["--ifaec=eth1"], {}, "--ifaec; did you mean --iface?"),
        (["eth1"], {}, "'eth1'"),
        (["--ip-masq", "maybe"], {}, "'maybe'"),
        ([], {"FLANNELD_IP_MASQ": "maybe"}, "FLANNELD_IP_MASQ"),
        (["--etcd-certfile=/nonexistent.crt", "--etcd-keyfile=/nonexistent.key"], {}, "/nonexistent"),
    ],
)
def test_S14_usage_errors_exit_2(argv: list[str], environ: dict[str, str], word: str) -> None:
    done = run(*argv, **environ)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("flanneld: ")
    assert word in done.stderr
    assert done.stderr.endswith("Run flanneld --help for all flags.\n")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    ("flag", "pattern"),
    [
        ("--version", rf"flanneld {re.escape(__version__)}\n"),
        ("-version", r"flanneld \d.*\n"),
        ("-h", r"(?s)Usage: .*--etcd-endpoints.*"),
    ],
)
def test_help_and_version_are_on_stderr(flag: str, pattern: str) -> None:
    done = run(flag)
    assert (done.returncode, done.stdout) == (0, "")
    assert re.fullmatch(pattern, done.stderr)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_while_loading_end_with_0(number: signal.Signals) -> None:
    code = """
import sys, time
class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "flanneld.cli":
            print("loading", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
from flanneld.__main__ import run
sys.exit(run())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "loading\n"
            process.send_signal(number)
            assert process.wait(30) == 0
            assert process.stderr is not None
            assert process.stderr.read() == ""
        finally:
            process.kill()


def test_the_command_line_loads_nothing_heavy() -> None:
    code = f"import sys, flanneld.cli; print(sorted({LIGHT!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "[]\n"


def test_daemon_in_etcd_mode_loads_what_it_needs() -> None:
    heavy = {
        "pyroute2",
        "etcd3.client",
        "http.server",
        "kubernetes",
        "iptc",
        "pkg_resources",
        "click",
        "rich",
        "msgspec",
    }
    code = "import sys, flanneld.daemon, subnet.etcd.manager, backends.vxlan"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(sorted({heavy!r} & set(sys.modules)))"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == "[]\n"


def test_start(capsys: pytest.CaptureFixture[str]) -> None:
    served: list[Options] = []

    def serve(options: Options) -> int:
        served.append(options)
        return 7

    environ = {"FLANNELD_ETCD_PASSWORD": "s3cret", "FLANNELD_IFAEC": "eth1", "FLANNELD_ETCD_USERNAME": "root"}
    assert cli.main(["--ip-masq", "-v=10"], environ, serve) == 7
    (options,) = served
    assert (options.ip_masq, options.etcd_password) == (True, "s3cret")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(" ", 1)[1].split(";")[0] for line in captured.err.splitlines()] == [
        f"INFO cli: flanneld {__version__} starts",
        "INFO cli: options: --etcd-username=root --etcd-password=*** --ip-masq=true --v=10",
        "WARNING cli: environment variable FLANNELD_IFAEC belongs to no flag",
    ]


def test_the_daemon_is_not_started_by_mistakes_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    def serve(_options: Options) -> int:
        raise AssertionError

    assert [cli.main([flag], {}, serve) for flag in ("--nosuch", "--help", "--version")] == [2, 0, 0]
    assert capsys.readouterr().out == ""


def test_a_usage_error_of_the_daemon_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    def serve(_options: Options) -> int:
        raise UsageError("--etcd-cafile: /ca.pem holds no certificate")

    assert cli.main([], {}, serve) == 2
    assert "ERROR cli: --etcd-cafile: /ca.pem holds no certificate\n" in capsys.readouterr().err
