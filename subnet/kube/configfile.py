"""Follows the network config in its file, which a ConfigMap replaces under way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from subnet.clock import Clock
from subnet.config import parse_network_config
from subnet.errors import ConfigError
from subnet.manager import ConfigSeen, Post
from subnet.model import NetworkConfig
from subnet.report import Reporter

log = logging.getLogger(__name__)

LOOK_EACH_S = 2.0


class ConfigFile:
    """Posts ConfigSeen. ``run`` is the body of its thread.

    A usable config is posted only after ``release``: what the cluster says
    about this node is to be known before anything follows from the config.
    Compares the text, not times or inodes: the file is small, and a kubelet
    replaces it by a symlink two levels up.
    """

    def __init__(self, path: str, post: Post, clock: Clock, wait: Callable[[float], bool]) -> None:
        self._path, self._post, self._wait = path, post, wait
        self._reporter = Reporter(log, clock)
        self._text: bytes | str | None = None
        self._lock = threading.Lock()
        self._released = False
        self._withheld: ConfigSeen | None = None
        self._usable = threading.Event()
        self.current: NetworkConfig | None = None
        """The last usable config."""

    def run(self) -> None:
        """Look at the file until the manager is closed (``wait`` returns true)."""
        while True:
            self.look()
            if self._wait(LOOK_EACH_S):
                return

    def first(self, timeout_s: float) -> NetworkConfig | None:
        """Return the last usable config, after waiting for the first one for a while."""
        self._usable.wait(timeout_s)
        return self.current

    def release(self) -> None:
        """Let usable configs through from now on."""
        with self._lock:
            self._released, seen, self._withheld = True, self._withheld, None
        if seen is not None:
            self._post(seen)

    def look(self) -> None:
        """Read the file and tell what changed."""
        try:
            text: bytes | str = Path(self._path).read_bytes()
        except OSError as error:
            text = f"network config {self._path}: {error.strerror or error}"
        if text == self._text:
            return
        self._text = text
        if isinstance(text, str):
            self._tell(ConfigSeen(None, text))
            return
        try:
            config = parse_network_config(text, self._path, check_pools=False)
        except ConfigError as error:
            self._tell(ConfigSeen(None, str(error)))
            return
        self._reporter.solved("config", f"network config {self._path} is usable now")
        self.current = config
        self._usable.set()
        self._tell(ConfigSeen(config, text=text.decode(errors="replace")))

    def _tell(self, seen: ConfigSeen) -> None:
        if seen.config is None:
            self._reporter.problem("config", seen.problem)
        with self._lock:
            withheld = seen.config is not None and not self._released
            self._withheld = seen if withheld else None
        if not withheld:
            self._post(seen)
