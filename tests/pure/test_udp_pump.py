from __future__ import annotations

import sys

import pytest

from backends.udp.api import COUNTERS, ICMP_PER_SECOND
from backends.udp.pump import _Limit, _Run

pytestmark = pytest.mark.pure


def test_icmp_errors_are_limited_to_a_rate() -> None:
    now = 100.0
    limit = _Limit(lambda: now)
    burst = ICMP_PER_SECOND // 10
    assert sum(limit.grants() for _ in range(1000)) == burst
    now += 0.02
    assert sum(limit.grants() for _ in range(1000)) == pytest.approx(ICMP_PER_SECOND * 0.02, abs=1)
    now += 1000
    assert sum(limit.grants() for _ in range(1000)) == burst


def run_of(*sizes: int) -> _Run:
    first, *more = [memoryview(bytes(size)) for size in sizes]
    run = _Run(first)
    assert all(run.take(one) for one in more)
    return run


@pytest.mark.parametrize(
    ("sizes", "size", "taken"),
    [
        ((100,), 100, True),
        ((100,), 101, False),
        ((100,), 60, True),
        ((100, 60), 60, False),
        ((20,) * 63, 20, True),
        ((20,) * 64, 20, False),
        ((1472,) * 43, 1472, True),
        ((1472,) * 44, 1472, False),
        ((1472,) * 44, 65507 - 44 * 1472, True),
    ],
)
def test_datagrams_of_one_message(sizes: tuple[int, ...], size: int, taken: bool) -> None:
    run = run_of(*sizes)
    assert run.take(memoryview(bytes(size))) is taken
    assert run.bytes == sum(sizes) + size * taken


def test_the_native_pump_counts_the_same() -> None:
    native = pytest.importorskip("backends.udp._pump")
    import os
    import socket

    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    fd = os.dup(ends[0].fileno())
    try:
        offloads = dict.fromkeys(("vnet_hdr", "tso", "uso", "gso"), False)
        pump = native.Pump(fd, fd, **offloads, port=1, mtu_bytes=1472, version=4)
        assert tuple(pump.stats()) == COUNTERS
        assert set(pump.stats().values()) == {0}
        pump.stop()
        pump.run()
        with pytest.raises(ValueError, match="ranges"):
            pump.forward(b"x", b"", b"", None)
        with pytest.raises(ValueError, match="family"):
            pump.forward(b"", bytes(16), b"", None)
        for peers in (
            b"x",
            bytes([2, 0, 0, 0, 1, 0, 0, 0]) if sys.byteorder == "little" else bytes([0, 0, 0, 2, 0, 0, 0, 1]),
        ):
            with pytest.raises(ValueError, match="ascending"):
                pump.forward(b"", b"", b"", peers)
    finally:
        os.close(fd)
        for end in ends:
            end.close()
