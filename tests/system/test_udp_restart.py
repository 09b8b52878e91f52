"""What a restart costs whoever sends through the udp backend."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.hosts import Host
from flanneld.ctl.lab.tools import poll
from tests.support.echoes import all_answer
from tests.system.test_udp import PYTHON_PUMP

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

BOUND_S = 0.1
"""How long nothing may arrive without a service manager."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    """A host whose descriptors are kept as systemd would, one where they are not, and one with the pump in Python."""
    with Lab(2, backend="udp", start=False) as built:
        built.add_host(command=PYTHON_PUMP)
        built.hosts[0].daemon.keeps_descriptors = True
        built.start()
        all_answer(built.hosts)
        yield built


@contextmanager
def both_ways(first: Host, second: Host) -> Iterator[tuple[Flow, Flow]]:
    with (
        Flow(first.pod.namespace, second.pod.namespace, second.pod.address()) as there,
        Flow(second.pod.namespace, first.pod.namespace, first.pod.address()) as back,
    ):
        poll("datagrams", lambda: there.flowing() and back.flowing(), timeout_s=10)
        yield there, back
        marks = there.sent, back.sent
        poll("more", lambda: there.sent > marks[0] + 50 and back.sent > marks[1] + 50, timeout_s=10)


def index(host: Host) -> int:
    link = host.namespace.link("flannel0")
    assert link is not None
    return int(link["ifindex"])


def in_place(host: Host) -> None:
    pid = host.daemon.pid
    host.daemon.notify.clear()
    host.daemon.signal(signal.SIGHUP)
    host.daemon.wait_ready(30)
    assert host.daemon.pid == pid


def test_a_restart_loses_nothing_where_descriptors_are_kept(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    before = index(first)
    with both_ways(first, second) as flows:
        marks = [flow.sent for flow in flows]
        first.daemon.restart()
    assert [flow.lost(mark) for flow, mark in zip(flows, marks, strict=True)] == [0, 0]
    assert index(first) == before
    assert "device flannel0 taken over" in first.daemon.log()


@pytest.mark.parametrize("number", [1, 2], ids=["native", "python"])
def test_a_restart_in_place_loses_less_than_a_tenth_of_a_second(lab: Lab, number: int) -> None:
    host, peer = lab.hosts[number], lab.hosts[0]
    before = index(host)
    with both_ways(host, peer) as flows:
        marks = [flow.sent for flow in flows]
        in_place(host)
    assert max(flow.outage_s(mark) for flow, mark in zip(flows, marks, strict=True)) < BOUND_S
    assert index(host) == before


def test_a_crash_is_a_restart_as_well(lab: Lab) -> None:
    first, second = lab.hosts[:2]
    with both_ways(first, second) as flows:
        marks = [flow.sent for flow in flows]
        first.daemon.kill()
        first.daemon.start()
        first.daemon.wait_ready()
    # What the pump had taken from the one and not yet given to the other died with it.
    assert max(flow.outage_s(mark) for flow, mark in zip(flows, marks, strict=True)) < BOUND_S


def test_what_another_configuration_does_not_take_over_goes(lab: Lab) -> None:
    first = lab.hosts[0]
    assert first.daemon.notify.kept
    assert first.daemon.stop() == 0
    assert first.namespace.link("flannel0") is not None
    lab.etcd.configure({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
    try:
        first.daemon.start()
        first.daemon.wait_ready()
        poll("nothing kept", lambda: not first.daemon.notify.kept, timeout_s=5)
        poll("the device's end", lambda: first.namespace.link("flannel0") is None, timeout_s=5)
    finally:
        lab.etcd.configure(lab.config)
