"""One round measures everything once, daemon and reference side by side."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks import reference
from benchmarks.leases import CONFIG, Peer, absent, peers
from benchmarks.machine import cpu_s, rss_mib
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.etcd import Etcd
from flanneld.ctl.lab.hosts import Daemon, Host
from flanneld.ctl.lab.measure import carried_bps

FEW, MANY = 1000, 5000
READY_TIMEOUT_S = 120.0

Figures = dict[str, float]
"""By name: seconds, MiB or bits per second, as the name says."""


class Bench:
    """Hosts of a lab without daemons; each measurement has a host and an etcd prefix of its own."""

    def __init__(self, lab: Lab, idle_s: float) -> None:
        self.lab, self.idle_s = lab, idle_s
        self.sizes: Mapping[int, tuple[Etcd, list[Peer]]] = {n: self._seeded(n) for n in (0, FEW, MANY)}
        self._serial = itertools.count(1)

    def _seeded(self, count: int) -> tuple[Etcd, list[Peer]]:
        etcd = copy.copy(self.lab.etcd)
        etcd.prefix = f"/peers{count}"
        etcd.configure(CONFIG)
        wanted = peers(count)
        etcd.forge_many(dict(p.lease for p in wanted))
        return etcd, wanted

    def round(self, number: int) -> Figures:
        """Return one figure of each kind. The order of daemon and reference changes from round to round."""
        parts = [self._daemon, self._references]
        figures: Figures = {}
        for part in parts if number % 2 else reversed(parts):
            figures |= part()
        return figures

    def _references(self) -> Figures:
        figures = {
            "interpreter start s": reference.interpreter_start_s(),
            "interpreter rss MiB": reference.interpreter_rss_mib(),
        }
        for count in (FEW, MANY):
            with self._host() as host:
                passed_s, used_s = reference.batch_s(host.namespace, self.sizes[count][1])
                figures |= {f"batch {count} s": passed_s, f"batch {count} cpu s": used_s}
        return figures

    def _daemon(self) -> Figures:
        figures: Figures = {}
        with self._host(0) as alone, self._host(FEW) as host:
            figures |= self._start(alone, 0) | self._start(host, FEW)
            daemons = {0: alone.daemon, FEW: host.daemon}
            time.sleep(2)  # what follows a start is not idleness
            before = {count: cpu_s(_pid(daemon)) for count, daemon in daemons.items()}
            time.sleep(self.idle_s)
            for count, daemon in daemons.items():
                figures[f"cpu {count} s"] = (cpu_s(_pid(daemon)) - before[count]) * 60 / self.idle_s
                figures[f"rss {count} MiB"] = rss_mib(_pid(daemon))
        with self._host(MANY) as host:
            figures |= self._start(host, MANY)
            figures[f"rss {MANY} MiB"] = rss_mib(_pid(host.daemon))
            host.daemon.stop()
            figures |= self._start(host, MANY, "restart")
        return figures

    def _start(self, host: Host, count: int, name: str = "ready") -> Figures:
        """Return the seconds from exec to READY=1, and those of the processor. Entries missing then are a fault."""
        began = time.monotonic()
        host.daemon.start()
        ready_s = host.daemon.wait_ready(READY_TIMEOUT_S) - began
        used_s = cpu_s(_pid(host.daemon))
        missing = absent(host.namespace, self.sizes[count][1])
        if missing:
            raise AssertionError(f"{missing} of {3 * count} entries are missing at READY")
        return {f"{name} {count} s": ready_s, f"{name} {count} cpu s": used_s}

    @contextmanager
    def _host(self, count: int = 0) -> Iterator[Host]:
        host = self.lab.add_host(flags=(f"--etcd-prefix={self.sizes[count][0].prefix}",))
        try:
            yield host
        finally:
            if host.daemon.pid is not None:
                host.daemon.kill()
            key = next((k for k, v in self.sizes[count][0].leases().items() if v["PublicIP"] == host.address), None)
            if key is not None:
                self.sizes[count][0].delete(f"{self.sizes[count][0].prefix}/subnets/{key}")
            host.namespace.delete()
            self.lab.hosts.remove(host)


def throughput(lab: Lab, seconds: float) -> Figures:
    """Return what one TCP connection carries, in bits per second: between containers, and between their hosts."""
    first, second = lab.hosts
    through = carried_bps(first.pod.namespace, second.pod.namespace, second.pod.address(), int(seconds))
    beside = carried_bps(first.namespace, second.namespace, second.address, int(seconds))
    if not through or not beside:
        raise AssertionError("no connection came about")
    return {"tunnel bps": through, "underlay bps": beside}


def _pid(daemon: Daemon) -> int:
    if daemon.pid is None:
        raise AssertionError(f"the daemon ended with {daemon.exit_code}:{daemon.tail()}")
    return daemon.pid
