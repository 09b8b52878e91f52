from __future__ import annotations

import socket
from pathlib import Path

import pytest

from backends.kernel import wireguard_go
from backends.kernel.wireguard_go import WireguardGo

pytestmark = pytest.mark.pure


def test_the_socket_of_a_killed_program_stands_for_no_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a device that the kernel makes afterwards would be set through it, in vain."""
    monkeypatch.setattr(wireguard_go, "SOCKETS", tmp_path)
    devices = WireguardGo(lambda: 0.0)
    assert not devices.holds("flannel-wg")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as program:
        program.bind(str(tmp_path / "flannel-wg.sock"))
        program.listen()
        assert devices.holds("flannel-wg")
    assert (tmp_path / "flannel-wg.sock").is_socket()
    assert not devices.holds("flannel-wg")
