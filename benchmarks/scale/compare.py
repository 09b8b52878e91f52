"""``python -m benchmarks.scale.compare N``: the processor time of comparing a kernel that holds N peers."""

from __future__ import annotations

import logging
import sys
import time
from ipaddress import ip_address, ip_network

from backends.dataplane.model import DesiredState, FdbEntry, LinkSpec, Neighbour, Route, Vxlan
from backends.dataplane.reconcile import Reconciler
from backends.dataplane.table import WantedTable
from backends.kernel.netlink import NetlinkKernel
from benchmarks.leases import peers
from subnet.clock import SystemClock
from subnet.report import Reporter

DEVICE = "flannel.1"
TIMES = 5


def main(count: int) -> float:
    """Return the least processor seconds of some comparisons; the kernel is that of this network namespace."""
    kernel = NetlinkKernel()
    lower = kernel.links()["eth0"].index
    kernel.create_link(LinkSpec(DEVICE, 4, Vxlan(1, 0, None, lower), 1450))
    kernel.set_link(DEVICE, up=True)
    table = WantedTable(DesiredState(frozenset({DEVICE}), "eth0", frozenset({ip_network("10.0.0.0/8")})))
    for peer in peers(count):
        base = ip_address(peer.base)
        route = Route(ip_network(f"{base}/24"), DEVICE, base, onlink=True)
        fdb = FdbEntry(DEVICE, peer.mac, ip_address(peer.public_ip))
        table.put_objects(peer.base, (1, peer.base), (Neighbour(DEVICE, base, peer.mac), fdb, route))
    reconciler = Reconciler(kernel, Reporter(logging.getLogger(), SystemClock()))
    reconciler.converge(table)
    found = []
    for _ in range(TIMES):
        reconciler.doubt()
        began = time.process_time()
        outcome = reconciler.converge(table)
        found.append(time.process_time() - began)
        if outcome.changed or outcome.refused:
            raise AssertionError(f"{outcome.changed} changes where nothing had changed")
    kernel.close()
    return min(found)


if __name__ == "__main__":
    sys.stdout.write(f"{main(int(sys.argv[1]))}\n")
