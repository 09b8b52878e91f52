"""What the log looks like: one line per record on stderr, in one of three formats."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import TextIO

from flanneld.flagvalues import parse_module_levels
from flanneld.options import REDACTED, Options

OWN_PACKAGES = frozenset({"flanneld", "backends", "subnet"})
DETAILS = 2
"""Level (-v) from which our own DEBUG records are shown."""
LIBRARIES = 4
"""Level (-v) from which DEBUG records of libraries are shown, too."""

_KLOG_LETTERS = {logging.WARNING: "W", logging.ERROR: "E", logging.CRITICAL: "F"}
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0))}


def configure(options: Options, environ: Mapping[str, str] = os.environ, stream: TextIO | None = None) -> None:
    """Send every record that the options ask for to ``stream`` (stderr).

    Can be called again; replaces only what it set up itself.
    """
    stream = stream or sys.stderr
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, _Handler)]:
        root.removeHandler(old)
    root.addHandler(_Handler(options, _formatter(options.log_format, _goes_to_journal(stream, environ)), stream))
    levels = [options.verbosity, *(level for _, level in parse_module_levels(options.vmodule))]
    root.setLevel(logging.DEBUG if max(levels) >= DETAILS else logging.INFO)
    logging.captureWarnings(True)


def area(logger_name: str) -> str:
    """Return what a logger's records are about: ``etcd`` for subnet.etcd.manager.

    That is the part below our own packages, or the package of a library.
    """
    first, _, below = logger_name.partition(".")
    return below.partition(".")[0].replace("_", "-") if first in OWN_PACKAGES and below else first


def _is_own(logger_name: str) -> bool:
    return logger_name.partition(".")[0] in OWN_PACKAGES


def _goes_to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether the journal reads the stream, and so adds time and process itself (systemd.exec(5), JOURNAL_STREAM)."""
    try:
        status = os.fstat(stream.fileno())
    except OSError:
        return False
    return environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"


class _Handler(logging.StreamHandler[TextIO]):
    """Writes the records that -v and --vmodule let through."""

    def __init__(self, options: Options, formatter: logging.Formatter, stream: TextIO) -> None:
        super().__init__(stream)
        self.setFormatter(formatter)
        self._verbosity = options.verbosity
        self._modules = parse_module_levels(options.vmodule)
        self._backtrace_at = options.log_backtrace_at
        password = options.etcd_password
        self._secrets = {password, json.dumps(password)[1:-1]} if password else set()
        self._threshold = cache(self._threshold_of)

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= self._threshold(record.name)

    def _threshold_of(self, logger_name: str) -> int:
        names = {logger_name, area(logger_name), *logger_name.split(".")}
        matching = (n for pattern, n in self._modules if any(fnmatchcase(name, pattern) for name in names))
        verbosity = max(self._verbosity, next(matching, 0))
        if _is_own(logger_name):
            return logging.DEBUG if verbosity >= DETAILS else logging.INFO
        if verbosity >= LIBRARIES:
            return logging.DEBUG
        # Warnings of module warnings speak to developers.
        return logging.ERROR if logger_name == "py.warnings" else logging.WARNING

    def format(self, record: logging.LogRecord) -> str:
        if self._backtrace_at == f"{record.filename}:{record.lineno}":
            record.stack_info = _stack_of(record)
        text = super().format(record)
        if record.exc_info or not _is_own(record.name):
            # Our own texts hold no secrets; what libraries say is not known.
            for secret in self._secrets:
                text = text.replace(secret, REDACTED)
        return text


def _stack_of(record: logging.LogRecord) -> str:
    stack = traceback.extract_stack()
    while stack and (stack[-1].filename, stack[-1].lineno) != (record.pathname, record.lineno):
        stack.pop()
    return "Stack (most recent call last):\n" + "".join(stack.format())


def _formatter(log_format: str, journal: bool) -> logging.Formatter:
    if log_format == "json":
        return _JsonFormatter()
    return _KlogFormatter() if log_format == "klog" else _TextFormatter(with_time=not journal)


class _LineFormatter(logging.Formatter):
    """Keeps a record one line, whatever text from elsewhere it quotes."""

    def format(self, record: logging.LogRecord) -> str:
        text = "\n".join(filter(None, (record.getMessage(), self.detail(record))))
        lines = (line.strip() for line in text.splitlines() if line.strip(" ^~"))
        return self.head(record) + " | ".join(lines).translate(_CONTROL)

    def head(self, record: logging.LogRecord) -> str:
        """Return what stands before the text."""
        raise NotImplementedError

    def detail(self, record: logging.LogRecord) -> str:
        """Return traceback and stack, empty if the record has none."""
        exception = self.formatException(record.exc_info) if record.exc_info else ""
        return "\n".join(filter(None, (exception, record.stack_info)))


class _TextFormatter(_LineFormatter):
    """``LEVEL area: text``, after the time if nobody else adds it."""

    def __init__(self, with_time: bool) -> None:
        super().__init__()
        self._with_time = with_time

    def head(self, record: logging.LogRecord) -> str:
        when = f"{_rfc3339(record)} " if self._with_time else ""
        return f"{when}{record.levelname} {area(record.name)}: "


class _KlogFormatter(_LineFormatter):
    """``Lmmdd hh:mm:ss.uuuuuu pid file:line] text``, local time, as k8s.io/klog/v2 writes it."""

    def head(self, record: logging.LogRecord) -> str:
        when = time.strftime("%m%d %H:%M:%S", time.localtime(record.created))
        micros = int(record.created % 1 * 1_000_000)
        letter = _KLOG_LETTERS.get(record.levelno, "I")
        return f"{letter}{when}.{micros:06d} {record.process:7d} {record.filename}:{record.lineno}] "


class _JsonFormatter(_LineFormatter):
    """One object per line; ``exception`` only where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": _rfc3339(record),
            "level": record.levelname,
            "area": area(record.name),
            "message": record.getMessage(),
        }
        if detail := self.detail(record):
            entry["exception"] = detail
        return json.dumps(entry)


def _rfc3339(record: logging.LogRecord) -> str:
    seconds, millis = divmod(int(record.created * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{millis:03d}Z"
