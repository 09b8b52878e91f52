"""From the command line to a running daemon."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Mapping, Sequence

from flanneld import __version__, logs
from flanneld.options import Options, ShowHelp, ShowVersion, describe, parse
from subnet.errors import UsageError

log = logging.getLogger(__name__)

EXIT_USAGE = 2


def main(argv: Sequence[str], environ: Mapping[str, str], serve: Callable[[Options], int] | None = None) -> int:
    """Do what the arguments (without the program's name) say and return the exit code.

    Help, version and usage errors go to stderr, as upstream's do. ``serve``
    stands for the daemon, flanneld.daemon.serve if it is not given.
    """
    try:
        command = parse(argv, environ)
    except UsageError as error:
        sys.stderr.write(f"flanneld: {error}\nRun flanneld --help for all flags.\n")
        return EXIT_USAGE
    if isinstance(command, ShowHelp):
        return _show_help()
    if isinstance(command, ShowVersion):
        sys.stderr.write(f"flanneld {__version__}\n")
        return 0
    logs.configure(command, environ)
    _log_start(command)
    try:
        return (serve or _daemon())(command)
    except UsageError as error:
        log.error("%s", error)  # noqa: TRY400 - the text says it all
        return EXIT_USAGE


def _show_help() -> int:
    from flanneld.usage import usage  # noqa: PLC0415 - no other start needs it

    sys.stderr.write(usage())
    return 0


def _log_start(options: Options) -> None:
    log.info("flanneld %s starts", __version__)
    log.info("options: %s", " ".join(describe(options)) or "all at their defaults")
    for warning in options.warnings:
        log.warning("%s", warning)


def _daemon() -> Callable[[Options], int]:
    # Loaded last: it brings the libraries in, and mistakes shall be answered at once.
    serve: Callable[[Options], int] = importlib.import_module("flanneld.daemon").serve
    return serve
