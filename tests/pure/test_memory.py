from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from flanneld import memory

pytestmark = pytest.mark.pure


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def test_what_is_known_at_the_start_is_walked_no_more() -> None:
    memory.begin()
    loaded = gc.get_freeze_count()
    assert loaded > 0
    known = [[n] for n in range(1000)]
    memory.settle()
    assert gc.get_freeze_count() >= loaded + len(known)


def test_garbage_of_later_is_still_found() -> None:
    memory.begin()
    memory.settle()
    cycle: list[object] = []
    cycle.append(cycle)
    del cycle
    assert gc.collect() >= 1
