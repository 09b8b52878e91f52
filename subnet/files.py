"""Replacing a file so that no reader, and no power cut, ever meets a part of it."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(target: Path, data: bytes, mode: int, directory_mode: int = 0o755) -> None:
    """Give ``target`` new content and this mode, whole or not at all. Raises OSError.

    Missing directories are made with ``directory_mode``. The umask does not matter.
    """
    _make_directories(target.parent, directory_mode)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.rename(temporary, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def _make_directories(directory: Path, mode: int) -> None:
    if not directory.exists():
        _make_directories(directory.parent, mode)
        with suppress(FileExistsError):
            directory.mkdir()
            directory.chmod(mode)
