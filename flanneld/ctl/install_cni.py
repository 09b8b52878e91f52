"""Puts CNI configuration and plugin where the container runtime looks, each in one step.

Source: upstream dist/install_conf; the reader may look at any moment, so files are replaced, never written in place.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
import tempfile
from pathlib import Path

from flanneld.cni import flannel

PLUGIN_NAME = "flannel"
PLUGIN_MODE = 0o755


class InstallError(Exception):
    """What could not be installed, and why; the target is as it was."""


def install(content: bytes, target: Path, mode: int) -> None:
    """Write a file beside the target, make it durable and rename it. Raises InstallError."""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with open(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fchmod(handle, mode)
                os.fsync(handle)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise
        _sync_directory(target.parent)
    except OSError as error:
        raise InstallError(f"{target}: {error.strerror or error}") from error


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def install_config(source: Path, target: Path) -> str:
    """Install a configuration with the mode of its source; returns a warning, empty if there is none.

    Raises InstallError, for what is no JSON object too: a runtime would
    refuse the whole directory because of it.
    """
    try:
        content = source.read_bytes()
        mode = stat.S_IMODE(source.stat().st_mode)
    except OSError as error:
        raise InstallError(f"{source}: {error.strerror or error}") from error
    try:
        conf = json.loads(content)
    except ValueError as error:
        raise InstallError(f"{source}: not JSON: {error}") from error
    if not isinstance(conf, dict):
        raise InstallError(f"{source}: not a JSON object")
    install(content, target, mode)
    return "" if conf.get("cniVersion") else f"{source} has no cniVersion: newer container runtimes refuse it"


def install_plugin(directory: Path) -> None:
    """Install the plugin as ``flannel`` into the directory. Raises InstallError."""
    install(Path(flannel.__file__).read_bytes(), directory / PLUGIN_NAME, PLUGIN_MODE)


def main(config: tuple[str, ...], plugin_directory: str) -> int:
    """Install what was asked for and return the exit code: 1 if anything could not be."""
    try:
        if plugin_directory:
            install_plugin(Path(plugin_directory))
        if config:
            warning = install_config(Path(config[0]), Path(config[1]))
            if warning:
                sys.stderr.write(f"install-cni: {warning}\n")
    except InstallError as error:
        sys.stderr.write(f"install-cni: {error}\n")
        return 1
    return 0
