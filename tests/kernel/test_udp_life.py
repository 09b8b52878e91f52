"""Carriers come and go and leave nothing behind: no descriptor, thread or device, and no memory."""

from __future__ import annotations

import gc
import os
import threading
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from backends.kernel.netlink import NetlinkKernel
from backends.udp.carrier import CarrierSpec, UdpCarrier, native_available
from subnet.model import Subnets
from tests.support.netns import Namespace
from tests.support.overlay import NETWORK, PORT, peer, subnet

pytestmark = pytest.mark.kernel

SPEC = CarrierSpec(IPv4Address("192.0.2.1"), PORT, 1472, NETWORK)
WARM_UP = 30
GROWTH_MIB = 32
"""A pump has a third of a MiB of buffers and more."""


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def data_mib() -> float:
    """What is allocated, whether or not it was ever touched."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmData"].split()[0]) / 1024


def come_and_go(kernel: NetlinkKernel, native: bool) -> None:
    carrier = UdpCarrier(SPEC, native=native)
    try:
        assert carrier.ensure(kernel).keys() == {"flannel0"}
        carrier.carry(Subnets(subnet(1)), [peer(2)])
    finally:
        carrier.close()


@pytest.mark.parametrize(
    ("native", "times"),
    [
        pytest.param(
            True,
            1000,
            marks=pytest.mark.skipif(not native_available(), reason="the native pump was not built"),
            id="native",
        ),
        pytest.param(False, 200, id="python"),
    ],
)
def test_a_thousand_starts_and_ends_leave_nothing_behind(namespace: Namespace, native: bool, times: int) -> None:
    namespace.ip(f"addr add {SPEC.local}/32 dev lo")
    with namespace.inside():
        kernel = NetlinkKernel()
        try:
            for _ in range(WARM_UP):
                come_and_go(kernel, native)
            before, data_before = held(), data_mib()
            for _ in range(times):
                come_and_go(kernel, native)
            assert held() == before
            assert data_mib() - data_before < GROWTH_MIB
        finally:
            kernel.close()
    assert [link["ifname"] for link in namespace.ip_json("link show")] == ["lo"]
