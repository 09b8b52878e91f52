from __future__ import annotations

import queue
import select
import socket
from collections.abc import Iterator, Sequence
from ipaddress import ip_address

import pytest

from backends.dataplane.model import Change, Neighbour
from backends.dataplane.ports import KernelEvent, LinkSeen, ObjectSeen, Overflow
from backends.kernel import monitor as module
from backends.kernel.monitor import Monitor
from backends.kernel.netlink import NetlinkKernel
from tests.support.netns import Namespace

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

WAIT_S = 5
OURS = Neighbour("eth0", ip_address("192.0.2.7"), "02:00:00:00:00:07")


@pytest.fixture
def host(namespace: Namespace) -> Iterator[Namespace]:
    namespace.ip("link add eth0 type veth peer name far0")
    namespace.ip("link set eth0 up")
    namespace.ip("link set far0 up")
    with namespace.inside():
        yield namespace


@pytest.fixture
def kernel(host: Namespace) -> Iterator[NetlinkKernel]:
    adapter = NetlinkKernel()
    yield adapter
    adapter.close()


def _heard(host: Namespace, kernel: NetlinkKernel, own_ports: frozenset[int]) -> list[str]:
    """Return the neighbours that a monitor tells of when we write one and ip(8) another."""
    events: queue.SimpleQueue[KernelEvent] = queue.SimpleQueue()

    def deliver(found: Sequence[KernelEvent]) -> None:
        for event in found:
            events.put(event)

    monitor = Monitor(deliver, own_ports)
    monitor.start()
    try:
        assert kernel.apply([Change("put", OURS)]) == []
        host.ip("neigh replace 192.0.2.8 lladdr 02:00:00:00:00:08 dev eth0 nud permanent")
        host.ip("link set far0 alias done")
        heard = []
        while not isinstance(event := events.get(timeout=WAIT_S), LinkSeen) or event.name != "far0":
            if isinstance(event, ObjectSeen) and isinstance(event.target, Neighbour):
                heard.append(str(event.target.address))
        return heard
    finally:
        monitor.close()


@pytest.mark.parametrize("others", [0, 1, 3])
def test_what_we_write_is_not_heard_and_what_others_write_is(
    host: Namespace, kernel: NetlinkKernel, others: int
) -> None:
    own = kernel.port_ids | {0x7F000000 + n for n in range(others)}
    assert _heard(host, kernel, own) == ["192.0.2.8"]


def test_without_ports_of_ours_everything_is_heard(host: Namespace, kernel: NetlinkKernel) -> None:
    assert _heard(host, kernel, frozenset()) == ["192.0.2.7", "192.0.2.8"]


def test_without_a_filter_in_the_kernel_the_same_is_heard(
    host: Namespace, kernel: NetlinkKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SO_ATTACH_FILTER", 0xFFFF)
    assert _heard(host, kernel, kernel.port_ids) == ["192.0.2.8"]


@pytest.mark.usefixtures("host")
def test_what_we_write_wakes_nobody_up(kernel: NetlinkKernel) -> None:
    monitor = Monitor(lambda _: None, kernel.port_ids)
    listener = monitor._socket
    assert kernel.apply([Change("put", OURS)]) == []
    while select.select([listener], [], [], 0)[0]:
        # Of the devices that have just been made there may be news at any time.
        assert OURS.address.packed not in listener.recv(1 << 16)
    listener.close()


def test_a_burst_of_which_some_was_lost_is_told_in_one_word(host: Namespace) -> None:
    monitor = Monitor(lambda _: None)
    listener = monitor._socket
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    lines = [f"neigh replace 192.0.2.{n} lladdr 02:00:00:00:00:{n:02x} dev eth0 nud permanent" for n in range(1, 255)]
    host.run("ip", "-batch", "-", text="\n".join(lines))
    assert monitor._read() == [Overflow()]
    host.ip("neigh del 192.0.2.7 dev eth0")
    assert {type(event) for event in monitor._read()} == {ObjectSeen}
    listener.close()
