"""The file that holds the cached state: for this daemon's user alone, and replaced in one step."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from subnet.files import replace_file
from subnet.state import State, StateError, decode, encode

_FILE_MODE, _DIRECTORY_MODE = 0o600, 0o700


def read(path: Path) -> State | None:
    """Return what the file holds, None if there is no file. Raises StateError, which names the path.

    A file that others may write or read is refused: it decides where traffic goes.
    """
    try:
        with path.open("rb") as file:
            _refuse_shared(os.fstat(file.fileno()))
            return decode(file.read())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"cached state {path}: {error.strerror or error}") from error
    except StateError as error:
        raise StateError(f"cached state {path}: {error}") from error


def write(path: Path, state: State) -> None:
    """Replace the file; missing directories are made with mode 0700. Raises StateError, which names the path."""
    try:
        if path.exists() and not path.is_file():
            raise StateError(f"cached state {path}: is no regular file")
        replace_file(path, encode(state), _FILE_MODE, _DIRECTORY_MODE)
    except OSError as error:
        raise StateError(f"cached state {path}: cannot be written: {error.strerror or error}") from error


def _refuse_shared(status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise StateError(f"has mode {mode:04o}, which lets others in; 0600 is needed")
    if status.st_uid not in (0, os.geteuid()):
        raise StateError(f"belongs to user {status.st_uid}")
