"""Every data path of the udp backend with itself, with the others, and with a peer that does one packet at a time."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from backends.udp.carrier import native_available
from tests.support.netns import MakeNamespace
from tests.support.paths import IN_GUEST, DataPath, bad_checksums, connected, datagrams_beside, mixed_datagrams, streams

pytestmark = pytest.mark.kernel

PATHS: tuple[DataPath, ...] = ("native", "python", "fou", "bpf", "plain")
SECONDS = float(os.environ.get("UDP_MATRIX_SECONDS", "0"))
"""How long each pair is kept at it; once at least."""
SLOW = frozenset({"python", "plain"})


def marks(pair: tuple[DataPath, DataPath]) -> list[pytest.MarkDecorator]:
    found = [pytest.mark.vm] if "fou" in pair else []
    if "native" in pair:
        found.append(pytest.mark.skipif(not native_available(), reason="the native pump was not built"))
    return found


PAIRS = [
    pytest.param(pair, id=f"{pair[0]} with {pair[1]}", marks=marks(pair))
    for pair in itertools.combinations_with_replacement(PATHS, 2)
    if pair != ("plain", "plain")
]


@contextmanager
def on_one_processor() -> Iterator[None]:
    """Keep this thread, and those it starts, on one processor: a veth has a queue on each, and what a thread sends
    before and after it moves may change places there.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.parametrize("pair", PAIRS)
def test_everything_arrives_intact_and_in_order_both_ways(
    make_namespace: MakeNamespace, pair: tuple[DataPath, DataPath]
) -> None:
    size = (1 if IN_GUEST else 4 if SLOW & {*pair} else 32) << 20
    end = time.monotonic() + SECONDS
    with on_one_processor(), connected(make_namespace, pair) as (first, second):
        for again in itertools.count():
            if again and time.monotonic() >= end:
                break
            for source, target in ((first, second), (second, first)):
                full = ("ping", "-c3", "-i0.2", "-W10", "-Mdo", "-s1444", target.overlay)
                assert "3 received" in source.namespace.run(*full)
                mixed_datagrams(source, target, 200 if IN_GUEST else 2000)
            with ThreadPoolExecutor(1, "test-back") as back, ExitStack() as beside:
                if not IN_GUEST:  # an emulator would do nothing else
                    beside.enter_context(datagrams_beside(first, second))
                    beside.enter_context(datagrams_beside(second, first))
                other = back.submit(streams, second, first, 2, size // 2, 5201)
                streams(first, second, 4, size // 4)
                other.result()
        assert (bad_checksums(first), bad_checksums(second)) == ({}, {})
