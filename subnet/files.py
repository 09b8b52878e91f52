"""Making and replacing a file so that no reader, and no power cut, ever meets a part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def replace_file(target: Path, data: bytes, mode: int, directory_mode: int = 0o755) -> None:
    """Give ``target`` new content and this mode, whole or not at all. Raises OSError.

    Missing directories are made with ``directory_mode``. The umask does not matter.
    """
    with _written(target, data, mode, directory_mode) as temporary:
        os.rename(temporary, target)


def create_file(target: Path, data: bytes, mode: int, directory_mode: int = 0o755) -> None:
    """Make ``target`` as ``replace_file`` does, but never in place of another file.

    Raises OSError, of these FileExistsError if it is there.
    """
    with _written(target, data, mode, directory_mode) as temporary:
        os.link(temporary, target)


@contextmanager
def _written(target: Path, data: bytes, mode: int, directory_mode: int) -> Iterator[str]:
    """Give the path of a complete file beside the target; it does not outlive the block under that name."""
    _make_directories(target.parent, directory_mode)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        yield temporary
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)


def _make_directories(directory: Path, mode: int) -> None:
    if not directory.exists():
        _make_directories(directory.parent, mode)
        with suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(mode)
