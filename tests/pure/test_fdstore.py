from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.kernel import fdstore
from backends.kernel.fdstore import FdStore

pytestmark = pytest.mark.pure

PID = 4711


class Manager:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self.path)
        self._socket.settimeout(5)

    def hear(self) -> tuple[set[str], list[int]]:
        data, fds, _, _ = socket.recv_fds(self._socket, 4096, 4)
        return set(data.decode().splitlines()), fds

    def silent(self) -> bool:
        self._socket.setblocking(False)
        try:
            self._socket.recv(1)
        except BlockingIOError:
            return True
        return False

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    one = Manager(tmp_path / "notify")
    yield one
    one.close()


@pytest.mark.parametrize("says", [{"FDSTORE": "4"}, {"SYSTEMD_EXEC_PID": str(PID)}])
def test_a_copy_is_given_to_who_keeps_it(manager: Manager, says: dict[str, str]) -> None:
    store = FdStore({"NOTIFY_SOCKET": manager.path, **says}, PID)
    there, here = os.pipe()
    assert store.keep("flannel-tun-4", here)
    os.close(here)
    lines, (copy,) = manager.hear()
    assert lines == {"FDSTORE=1", "FDPOLL=0", "FDNAME=flannel-tun-4"}
    os.write(copy, b"alive")
    assert os.read(there, 10) == b"alive"
    store.forget("flannel-tun-4")
    assert manager.hear() == ({"FDSTOREREMOVE=1", "FDNAME=flannel-tun-4"}, [])
    os.close(copy)
    os.close(there)


@pytest.mark.parametrize("says", [{}, {"FDSTORE": "0"}, {"FDSTORE": ""}, {"SYSTEMD_EXEC_PID": "1"}])
def test_nobody_is_asked_who_keeps_nothing(manager: Manager, says: dict[str, str]) -> None:
    store = FdStore({"NOTIFY_SOCKET": manager.path, **says}, PID)
    assert not store.keep("flannel-tun-4", 0)
    store.forget("flannel-tun-4")
    assert manager.silent()
    assert not FdStore({"FDSTORE": "4"}, PID).keep("flannel-tun-4", 0)
    assert not FdStore({"FDSTORE": "4", "NOTIFY_SOCKET": f"{manager.path}-gone"}, PID).keep("flannel-tun-4", 0)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Environment of a process that was given two descriptors."""
    first = os.dup(0) + 60
    os.dup2(0, first)
    os.dup2(0, first + 1)
    monkeypatch.setattr(fdstore, "FIRST_FD", first)
    yield {"LISTEN_PID": str(PID), "LISTEN_FDS": "2", "LISTEN_FDNAMES": "flannel-tun-4:flannel-udp-4"}
    for fd in (first - 60, first, first + 1):
        try:
            os.close(fd)
        except OSError:
            continue


def test_what_was_kept_is_taken_once_and_no_child_gets_it(passed: dict[str, str]) -> None:
    store = FdStore(passed, PID)
    fd = store.take("flannel-udp-4")
    assert fd == fdstore.FIRST_FD + 1
    assert not os.get_inheritable(fd)
    assert store.take("flannel-udp-4") is None
    assert store.take("flannel-tun-6") is None


def test_what_nobody_takes_is_closed_on_both_sides(passed: dict[str, str], manager: Manager) -> None:
    store = FdStore({**passed, "NOTIFY_SOCKET": manager.path, "FDSTORE": "4"}, PID)
    store.take("flannel-tun-4")
    for _ in range(2):
        store.forget_untaken()
    assert manager.hear() == ({"FDSTOREREMOVE=1", "FDNAME=flannel-udp-4"}, [])
    assert manager.silent()
    os.fstat(fdstore.FIRST_FD)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fdstore.FIRST_FD + 1)


def test_what_is_meant_for_another_process_is_left_alone(passed: dict[str, str]) -> None:
    store = FdStore({**passed, "LISTEN_PID": "1"}, PID)
    assert store.take("flannel-tun-4") is None
    store.forget_untaken()
    os.fstat(fdstore.FIRST_FD)
