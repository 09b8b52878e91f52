"""What a kernel holds and is told of, seen without much work: the daemons share the machine."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import closing

from backends.dataplane.model import FdbEntry, Neighbour, Route
from backends.dataplane.ports import KernelEvent, ObjectSeen
from backends.kernel import rtnl
from backends.kernel.layout import run_of
from backends.kernel.monitor import GROUPS, RTMGRP_NEXTHOP, Monitor
from backends.kernel.sockets import NetlinkSocket
from flanneld.ctl.lab.netns import Namespace

DEVICE = "flannel.1"


def entries(namespace: Namespace) -> tuple[int, int, int]:
    """Return how many IPv4 routes of any device, and neighbours and FDB entries of the tunnel there are."""

    def look() -> tuple[int, int, int]:
        try:
            index = socket.if_nametoindex(DEVICE)
        except OSError:
            return 0, 0, 0
        with closing(NetlinkSocket(socket.NETLINK_ROUTE)) as channel:
            requests = rtnl.dump_routes(4), rtnl.dump_neighbours(4, index), rtnl.dump_fdb(index)
            routes, neighbours, fdb = (sum(map(_count, channel.buffers(r, "entries"))) for r in requests)
        return routes, neighbours, fdb

    return namespace.call(look)


def _count(buffer: bytes) -> int:
    run = run_of(buffer)
    if run is not None:
        return run.size // run.stride if run.kind != rtnl.NLMSG_DONE else 0
    return sum(header.kind != rtnl.NLMSG_DONE for header in rtnl.messages(buffer))


def until(probe: Callable[[], bool], timeout_s: float, each_s: float = 0.02) -> float:
    """Return the monotonic time at which a probe was seen to hold; raises TimeoutError."""
    end = time.monotonic() + timeout_s
    while not probe():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(each_s)
    return time.monotonic()


class Watch:
    """Notes when each destination's route was written, and how often the tunnel's entries were touched."""

    def __init__(self, namespace: Namespace) -> None:
        self.written_at: dict[str, float] = {}
        self.touched = 0
        self._index = namespace.call(lambda: socket.if_nametoindex(DEVICE))
        # A nexthop object of the daemon's, which is not its watcher's, would make the monitor doubt everything.
        self._monitor = namespace.call(lambda: Monitor(self._hear, groups=GROUPS & ~RTMGRP_NEXTHOP))
        self._monitor.start()

    def close(self) -> None:
        """Stop watching."""
        self._monitor.close()

    def _hear(self, events: Sequence[KernelEvent]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, ObjectSeen) and event.index == self._index:
                self.touched += isinstance(event.target, Route | Neighbour | FdbEntry)
                if isinstance(event.target, Route) and not event.gone:
                    self.written_at.setdefault(str(event.target.destination), now)
