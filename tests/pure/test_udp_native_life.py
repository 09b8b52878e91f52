from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from backends.udp.routes import Range, pack

native = pytest.importorskip("backends.udp._pump", reason="the native pump was not built")

pytestmark = pytest.mark.pure

STARTS = 1000
GROWTH_MIB = 64
"""Each pump has almost 1 MiB of buffers: what a thousand of them left behind would be seen."""


def data_mib() -> float:
    """What is allocated, whether or not it was ever touched."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) / 1024


def start_and_stop(fds: tuple[int, int], number: int) -> None:
    offloads = dict.fromkeys(("vnet_hdr", "tso", "uso", "gso"), bool(number % 2))
    pump = native.Pump(*fds, **offloads, port=1, mtu_bytes=1472, version=4 if number % 3 else 6)
    thread = threading.Thread(target=pump.run, name="test-pump")
    thread.start()
    if number % 3:
        for hop in (1, 2):
            pump.forward(pack([Range(0, 2**31, hop)]), bytes(4), b"", bytes(4))
    pump.stop()
    thread.join(10)
    assert not thread.is_alive()


def test_a_thousand_starts_leave_nothing_behind() -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM), socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    for pair in ends:
        pair[0].setblocking(False)
    fds = ends[0][0].fileno(), ends[1][0].fileno()
    try:
        for number in range(50):
            start_and_stop(fds, number)
        before, open_before = data_mib(), len(os.listdir("/proc/self/fd"))
        for number in range(STARTS):
            start_and_stop(fds, number)
        assert data_mib() - before < GROWTH_MIB
        assert len(os.listdir("/proc/self/fd")) == open_before
    finally:
        for pair in ends:
            for end in pair:
                end.close()
