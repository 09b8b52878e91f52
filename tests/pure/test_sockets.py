from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterator

import pytest

from backends.kernel import rtnl, sockets
from backends.kernel.sockets import NetlinkSocket

pytestmark = pytest.mark.pure

Answer = Callable[[list[rtnl.Header]], Iterator[bytes | OSError]]


class Kernel:
    """Stands in for a netlink socket: ``answers`` has what comes back for each datagram that is sent."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.waiting: list[bytes | OSError] = []
        self.sent: list[list[rtnl.Header]] = []

    def sendto(self, data: bytes, _: tuple[int, int]) -> int:
        headers = list(rtnl.messages(data))
        self.sent.append(headers)
        self.waiting += self.answers.pop(0)(headers)
        return len(data)

    def recv(self, _: int, flags: int = 0) -> bytes:
        if not self.waiting:
            raise BlockingIOError(errno.EAGAIN, "nothing") if flags else TimeoutError("timed out")
        answer = self.waiting.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def _ack(header: rtnl.Header, code: int = 0) -> bytes:
    return rtnl.message(2, 0, header.sequence, struct.pack("=i", -code) + bytes(16))


def _wanted(headers: list[rtnl.Header], refused: dict[int, int]) -> Iterator[bytes | OSError]:
    """Answer as the kernel does: what is refused, and what asked for an acknowledgement."""
    for position, header in enumerate(headers):
        if position in refused or header.flags & rtnl.NLM_F_ACK:
            yield _ack(header, refused.get(position, 0))


@pytest.fixture
def channel(monkeypatch: pytest.MonkeyPatch) -> Callable[[Kernel], NetlinkSocket]:
    def make(kernel: Kernel) -> NetlinkSocket:
        made = NetlinkSocket.__new__(NetlinkSocket)
        made._socket, made._sequence, made._large = kernel, 0, 4  # type: ignore[assignment]
        return made

    return make


MESSAGES = [rtnl.message(24, 1, 0, bytes([n]) * 12) for n in range(6)]


def test_last_of_each_datagram_alone_asks_for_an_acknowledgement(channel: Callable[[Kernel], NetlinkSocket]) -> None:
    kernel = Kernel(lambda h: _wanted(h, {1: 22, 3: 17}), lambda h: _wanted(h, {0: 19}))
    assert channel(kernel).transact(MESSAGES) == [(1, 22, ""), (3, 17, ""), (4, 19, "")]
    acks = [[bool(header.flags & rtnl.NLM_F_ACK) for header in sent] for sent in kernel.sent]
    assert acks == [[False, False, False, True], [False, True]]
    assert [header.sequence for sent in kernel.sent for header in sent] == [1, 2, 3, 4, 5, 6]


def test_answers_to_something_else_are_passed_over(channel: Callable[[Kernel], NetlinkSocket]) -> None:
    def answer(headers: list[rtnl.Header]) -> Iterator[bytes | OSError]:
        yield rtnl.message(2, 0, 999, struct.pack("=i", -1) + bytes(16))
        yield rtnl.message(24, 0, headers[0].sequence, bytes(12))
        yield from _wanted(headers, {})

    assert channel(Kernel(answer)).transact(MESSAGES[:3]) == []


@pytest.mark.parametrize(
    "lost", [OSError(errno.ENOBUFS, "no buffer space"), OSError(errno.EAGAIN, "try again"), TimeoutError("timed out")]
)
def test_lost_answers_are_asked_for_again_one_by_one(channel: Callable[[Kernel], NetlinkSocket], lost: OSError) -> None:
    def half(headers: list[rtnl.Header]) -> Iterator[bytes | OSError]:
        yield _ack(headers[0], 22)
        yield lost
        yield _ack(headers[1], 5)  # behind what was lost: it says nothing of the second attempt

    kernel = Kernel(half, lambda h: _wanted(h, {0: 22, 2: 17}))
    assert channel(kernel).transact(MESSAGES[:3]) == [(0, 22, ""), (2, 17, "")]
    assert all(header.flags & rtnl.NLM_F_ACK for header in kernel.sent[1])


def test_what_is_never_acknowledged_counts_as_refused(channel: Callable[[Kernel], NetlinkSocket]) -> None:
    kernel = Kernel(lambda _: iter(()), lambda h: iter([_ack(h[0]), _ack(h[1])]))
    refused = channel(kernel).transact(MESSAGES[:3])
    assert refused == [(2, errno.ETIMEDOUT, "no acknowledgement")]


def test_numbers_begin_anew_before_they_run_out(channel: Callable[[Kernel], NetlinkSocket]) -> None:
    kernel = Kernel(lambda h: _wanted(h, {1: 22}))
    made = channel(kernel)
    made._sequence = sockets.LAST_SEQUENCE - 2
    assert made.transact(MESSAGES[:4]) == [(1, 22, "")]
    assert [header.sequence for header in kernel.sent[0]] == [1, 2, 3, 4]
