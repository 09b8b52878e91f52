from __future__ import annotations

import io
import json
import logging
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from flanneld import logs
from flanneld.options import Options

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _root_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    logging.captureWarnings(False)


def start(**settings: Any) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(Options(**settings), {}, stream)
    return stream


def shown(stream: io.StringIO) -> list[str]:
    return [line.split(" ", 1)[1] for line in stream.getvalue().splitlines()]


def fail(text: str) -> None:
    raise RuntimeError(text)


@pytest.mark.parametrize(
    ("logger", "area"),
    [
        ("subnet.etcd.manager", "etcd"),
        ("subnet.renewal", "renewal"),
        ("backends.vxlan", "vxlan"),
        ("backends.host_gw", "host-gw"),
        ("backends.kernel.netlink", "kernel"),
        ("flanneld.traffic.iptables", "traffic"),
        ("flanneld", "flanneld"),
        ("etcd3.watch", "etcd3"),
        ("root", "root"),
    ],
)
def test_area(logger: str, area: str) -> None:
    assert logs.area(logger) == area


def test_text() -> None:
    stream = start()
    before = datetime.now().astimezone()
    logging.getLogger("subnet.etcd.manager").warning("lease %s lost", "10.5.1.0/24")
    when, text = stream.getvalue().split(" ", 1)
    assert text == "WARNING etcd: lease 10.5.1.0/24 lost\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", when)
    assert abs((datetime.fromisoformat(when) - before).total_seconds()) < 60


@pytest.mark.parametrize("matches", [True, False])
def test_the_journal_adds_the_time_itself(tmp_path: Path, matches: bool) -> None:
    with (tmp_path / "log").open("w+") as stream:
        status = os.fstat(stream.fileno())
        inode = status.st_ino if matches else status.st_ino + 1
        logs.configure(Options(), {"JOURNAL_STREAM": f"{status.st_dev}:{inode}"}, stream)
        logging.getLogger("flanneld.loop").info("up")
        stream.seek(0)
        assert stream.read().startswith("INFO loop: up\n") is matches


def test_json() -> None:
    stream = start(log_format="json")
    log = logging.getLogger("backends.vxlan")
    log.info("two\nlines %s", 'and "quotes"')
    try:
        fail("boom")
    except RuntimeError:
        log.exception("failed")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert datetime.fromisoformat(first.pop("time")).utcoffset() is not None
    assert first == {"level": "INFO", "area": "vxlan", "message": 'two\nlines and "quotes"'}
    assert (second["level"], second["message"]) == ("ERROR", "failed")
    assert second["exception"].startswith("Traceback")
    assert second["exception"].endswith("RuntimeError: boom")


@pytest.mark.parametrize(
    ("level", "letter"),
    [(logging.DEBUG, "I"), (logging.INFO, "I"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "F")],
)
def test_klog(level: int, letter: str) -> None:
    stream = start(log_format="klog", verbosity=2)
    logging.getLogger("flanneld.loop").log(level, "text %d", 1)
    line = stream.getvalue()
    assert re.fullmatch(letter + r"\d{4} \d\d:\d\d:\d\d\.\d{6} [ \d]{7} test_logs\.py:\d+\] text 1\n", line)
    assert line.split()[2] == str(os.getpid())


@pytest.mark.parametrize("log_format", ["text", "klog", "json"])
def test_a_traceback_is_one_line(log_format: str) -> None:
    stream = start(log_format=log_format)
    try:
        fail("boom\nINFO etcd: forged")
    except RuntimeError:
        logging.getLogger("flanneld.loop").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert line.index("failed") < line.index("Traceback") < line.index("in fail") < line.index("RuntimeError: boom")


@pytest.mark.parametrize("log_format", ["text", "klog", "json"])
def test_quoted_text_cannot_forge_a_record(log_format: str) -> None:
    stream = start(log_format=log_format)
    logging.getLogger("flanneld.loop").info("key %s", "a\nINFO etcd: b\r\x1b[2Jc\u2028d\x85e")
    (line,) = stream.getvalue().splitlines()
    assert "\x1b" not in line


@pytest.mark.parametrize(
    ("verbosity", "own", "library"),
    [
        (0, "IWE", "WE"),
        (1, "IWE", "WE"),
        (2, "DIWE", "WE"),
        (3, "DIWE", "WE"),
        (4, "DIWE", "DIWE"),
        (10, "DIWE", "DIWE"),
    ],
)
def test_O02_verbosity(verbosity: int, own: str, library: str) -> None:
    stream = start(verbosity=verbosity)
    for name, expected in (("subnet.etcd.registry", own), ("etcd3.client", library)):
        stream.truncate(0)
        stream.seek(0)
        for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
            logging.getLogger(name).log(level, "x")
        assert "".join(line[0] for line in shown(stream)) == expected


@pytest.mark.parametrize(
    ("vmodule", "expected"),
    [
        ("vxlan=2", {"vxlan"}),
        ("etcd=2", {"etcd"}),
        ("registry=2", {"etcd"}),
        ("subnet.etcd.*=2", {"etcd"}),
        ("host-gw=2", {"host-gw"}),
        ("host_gw=2", {"host-gw"}),
        ("*=2", {"vxlan", "etcd", "host-gw"}),
        ("vxlan=2,registry=3", {"vxlan", "etcd"}),
        ("vxlan=1", set()),
        ("vxlan=1,*=2", {"etcd", "host-gw"}),
        ("etcd3=2", set()),
        ("etcd3=4", {"etcd3"}),
    ],
)
def test_O02_vmodule(vmodule: str, expected: set[str]) -> None:
    stream = start(vmodule=vmodule)
    for name in ("backends.vxlan", "backends.host_gw", "subnet.etcd.registry", "etcd3.client"):
        logging.getLogger(name).debug("x")
    assert {line.split()[1].rstrip(":") for line in shown(stream)} == expected


def test_O02_backtrace() -> None:
    here = fail.__code__.co_filename
    log = logging.getLogger("flanneld.loop")
    line_number = test_O02_backtrace.__code__.co_firstlineno + 5
    stream = start(log_backtrace_at=f"{Path(here).name}:{line_number}")
    log.info("with")
    log.info("without")
    first, second = shown(stream)
    assert first.startswith("INFO loop: with | Stack")
    assert first.endswith('log.info("with")')
    assert second == "INFO loop: without"


@pytest.mark.parametrize("log_format", ["text", "json", "klog"])
@pytest.mark.parametrize("password", ["s3cret", 'a"b\\c'])
def test_O04_passwords_in_records_of_libraries_are_hidden(log_format: str, password: str) -> None:
    stream = start(log_format=log_format, verbosity=10, etcd_password=password)
    logging.getLogger("etcd3.client").debug("authenticate with %s", password)
    try:
        fail(f"refused {password}")
    except RuntimeError:
        logging.getLogger("subnet.etcd.registry").exception("failed")
    for line in stream.getvalue().splitlines():
        assert password not in line + (json.loads(line)["message"] if log_format == "json" else "")
        assert "***" in line


def test_configuring_again_replaces_the_handler() -> None:
    first, second = start(), start()
    logging.getLogger("flanneld").info("once")
    assert first.getvalue() == ""
    assert len(second.getvalue().splitlines()) == 1
