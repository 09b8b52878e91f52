from __future__ import annotations

import struct
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.kernel import rtnl
from backends.kernel.layout import LEAST, columns, run_of

pytestmark = pytest.mark.pure

DONE = rtnl.message(3, 2, 7, bytes(4))
BODY = struct.pack("=BBHiHBB", 2, 0, 0, 5, 0x80, 0, 1)


def _message(dst: bytes, mac: bytes, used: int = 0, body: bytes = BODY, sequence: int = 7, flags: int = 2) -> bytes:  # noqa: PLR0917
    payload = (
        body + rtnl.attribute(1, dst) + rtnl.attribute(2, mac) + rtnl.attribute(3, struct.pack("=IIII", used, 0, 0, 0))
    )
    return rtnl.message(28, flags, sequence, payload)


ROWS = st.lists(
    st.tuples(st.binary(min_size=4, max_size=4), st.binary(min_size=6, max_size=6), st.integers(0, 1 << 31)),
    min_size=LEAST,
    max_size=20,
)


@given(ROWS, st.booleans())
def test_like_messages_are_read_at_once(rows: list[tuple[bytes, bytes, int]], last: bool) -> None:
    buffer = b"".join(_message(*row) for row in rows) + (DONE if last else b"")
    assert columns(buffer, 12, (1, 2), (3,)) == ((1, 2), [row[:2] for row in rows])
    run = run_of(buffer)
    assert run is not None
    assert (run.kind, run.sequence, set(run.flags), run.done) == (28, 7, {2}, last)


@given(ROWS)
def test_field_that_is_neither_wanted_nor_ignored_has_to_be_equal(rows: list[tuple[bytes, bytes, int]]) -> None:
    buffer = b"".join(_message(*row) for row in rows)
    equal = len({used for _, _, used in rows}) == 1
    assert (columns(buffer, 12, (1, 2), ()) is not None) is equal


@given(ROWS, st.data())
def test_one_message_that_differs_elsewhere_is_enough(
    rows: list[tuple[bytes, bytes, int]], data: st.DataObject
) -> None:
    messages = [_message(*row) for row in rows]
    at = data.draw(st.integers(0, len(rows) - 1))
    fixed = [*range(4, 32), *range(36, 40), *range(46, 52)]
    where = data.draw(st.sampled_from(fixed))
    changed = bytearray(messages[at])
    changed[where] ^= data.draw(st.integers(1, 255))
    messages[at] = bytes(changed)
    found = columns(b"".join(messages), 12, (1, 2), (3,))
    if found is not None:
        # Only if all agree after all: a single message that differs never does.
        assert len({m[where] for m in messages}) == 1


def test_messages_of_several_lengths_are_no_run() -> None:
    short, long = _message(bytes(4), bytes(6)), _message(bytes(16), bytes(6))
    assert run_of(short * 3 + long) is None
    assert columns(short * 5 + long, 12, (1, 2), (3,)) is None


def test_few_messages_are_not_worth_it() -> None:
    assert columns(_message(bytes(4), bytes(6)) * (LEAST - 1), 12, (1, 2), (3,)) is None


def test_interruption_of_any_message_is_seen() -> None:
    run = run_of(_message(bytes(4), bytes(6)) * 3 + _message(bytes(4), bytes(6), flags=2 | rtnl.NLM_F_DUMP_INTR))
    assert run is not None
    assert any(flags & rtnl.NLM_F_DUMP_INTR for flags in run.flags)


@given(st.binary(max_size=300) | ROWS.map(lambda rows: b"".join(_message(*row) for row in rows)), st.integers(0, 300))
def test_garbage_and_cut_buffers_are_no_fault(buffer: bytes, end: int) -> None:
    for text in (buffer, buffer[:end]):
        run_of(text)
        found = columns(text, 12, (1, 2), (3,))
        if found is not None:
            headers = list(rtnl.messages(text))
            assert len(found[1]) == len([h for h in headers if h.kind != 3])
            assert all(b.start - a.start == headers[1].start - headers[0].start for a, b in pairwise(headers[:-1]))
