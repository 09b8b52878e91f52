"""One round measures everything once, with one daemon."""

from __future__ import annotations

import copy
import itertools
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from benchmarks.leases import CONFIG, Peer, absent, peers
from benchmarks.machine import cpu_s, rss_mib
from benchmarks.scale.watch import Watch, entries, until
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.etcd import Etcd
from flanneld.ctl.lab.hosts import Host

FEW, MANY, MOST = 1000, 10_000, 50_000
BURST, WRITERS, SINGLE = 1000, 8, 20
TIMEOUT_S = 180.0
PAUSE_S = 0.3
"""Between single puts, so that none is part of a burst."""

Figures = dict[str, float]
"""By name: seconds or MiB, as the name says."""


class Bench:
    """Hosts of a lab; each measurement has a host of its own, each number of peers an etcd prefix.

    ``command`` is the daemon, empty for the one beside this interpreter.
    """

    def __init__(self, lab: Lab, sizes: Sequence[int], idle_s: float) -> None:
        self.lab, self.idle_s = lab, idle_s
        self.sizes: Mapping[int, Etcd] = {n: self._seeded(n) for n in sizes}
        self._spare = iter(peers(60_000)[MOST:])

    def _seeded(self, count: int) -> Etcd:
        etcd = copy.copy(self.lab.etcd)
        etcd.prefix = f"/peers{count}"
        etcd.configure(CONFIG)
        etcd.forge_many(dict(p.lease for p in peers(count)))
        return etcd

    def round(self, command: Sequence[str], *, largest: bool) -> Figures:
        """Return one figure of each kind. READY of a reference may come before its entries are there."""
        figures: Figures = {}
        with self._host(0, command) as empty, self._host(MANY, command) as full:
            figures |= self._start(empty, 0)
            figures |= self._start(full, MANY)
            figures |= self._restart(full)
            figures |= self._idle({0: empty, MANY: full})
            figures |= self._single(full, MANY)
        with self._host(FEW, command) as host:
            figures |= self._start(host, FEW)
            figures |= self._single(host, FEW) | self._burst(host)
        if largest:
            with self._host(MOST, command) as host:
                figures |= self._start(host, MOST)
        started = {n: figures[f"start {n} s"] for n in (0, FEW, MANY, MOST) if f"start {n} s" in figures}
        for fewer, more in itertools.pairwise((FEW, MANY, MOST)):
            if more in started:
                figures[f"growth to {more}"] = (started[more] + started[0]) / started[fewer]
        return figures

    def _start(self, host: Host, count: int) -> Figures:
        """Return the seconds from exec until it is ready and the kernel has all entries, which is checked."""
        began = time.monotonic()
        host.daemon.start()
        ready_at = host.daemon.wait_ready(TIMEOUT_S)
        done_at = ready_at
        if min(entries(host.namespace)) < count:
            done_at = until(lambda: min(entries(host.namespace)) >= count, TIMEOUT_S)
        missing = absent(host.namespace, peers(count))
        if missing:
            raise AssertionError(f"{missing} of {3 * count} entries are missing")
        return {f"start {count} s": done_at - began, f"ready {count} s": ready_at - began}

    def _restart(self, host: Host) -> Figures:
        host.daemon.stop()
        with closing(Watch(host.namespace)) as watch:
            began = time.monotonic()
            host.daemon.start()
            ready_s = host.daemon.wait_ready(TIMEOUT_S) - began
            time.sleep(2)
            return {"restart s": ready_s, "restart touches": watch.touched}

    def _idle(self, hosts: Mapping[int, Host]) -> Figures:
        time.sleep(3)  # what follows a start is not idleness
        before = {count: cpu_s(_pid(host), children=True) for count, host in hosts.items()}
        time.sleep(self.idle_s)
        figures: Figures = {}
        for count, host in hosts.items():
            used_s = cpu_s(_pid(host), children=True) - before[count]
            figures |= {f"idle {count} s": used_s * 60 / self.idle_s, f"rss {count} MiB": rss_mib(_pid(host))}
        return figures

    def _single(self, host: Host, count: int) -> Figures:
        """Return the median seconds of a put, and from its begin to the route beyond them."""
        rpcs, rests = [], []
        with closing(Watch(host.namespace)) as watch:
            for peer in itertools.islice(self._spare, SINGLE):
                time.sleep(PAUSE_S)
                began = time.monotonic()
                _put(self.sizes[count], peer)
                put_s = time.monotonic() - began
                until(lambda peer=peer: f"{peer.base}/24" in watch.written_at, 10, 0.001)  # type: ignore[misc]
                rpcs.append(put_s)
                rests.append(watch.written_at[f"{peer.base}/24"] - began - put_s)
        return {f"put {count} s": statistics.median(rpcs), f"route {count} s": statistics.median(rests)}

    def _burst(self, host: Host) -> Figures:
        new = list(itertools.islice(self._spare, BURST))
        with closing(Watch(host.namespace)) as watch:
            threads = [
                threading.Thread(target=_put_all, args=(self.sizes[FEW], new[n::WRITERS])) for n in range(WRITERS)
            ]
            began = time.monotonic()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            writers_s = time.monotonic() - began
            until(lambda: all(f"{p.base}/24" in watch.written_at for p in new), 60)
            last_at = max(watch.written_at[f"{p.base}/24"] for p in new)
        return {"burst s": last_at - began, "writers s": writers_s, "burst ratio": (last_at - began) / writers_s}

    @contextmanager
    def _host(self, count: int, command: Sequence[str]) -> Iterator[Host]:
        etcd = self.sizes[count]
        host = self.lab.add_host(flags=(f"--etcd-prefix={etcd.prefix}", "--ip-masq"), command=command or None)
        known = {p.lease[0] for p in peers(count)}
        try:
            yield host
        finally:
            if host.daemon.pid is not None:
                host.daemon.kill()
            for key in etcd.leases().keys() - known:
                etcd.delete(f"{etcd.prefix}/subnets/{key}")
            host.namespace.delete()
            self.lab.hosts.remove(host)


def comparison(lab: Lab, count: int) -> Figures:
    """Return the processor seconds of one full comparison, in an interpreter of its own (``compare``)."""
    namespace = lab.namespace("compare")
    lab.plug(namespace, "compare", "eth0")
    namespace.ip("addr add 192.0.2.250/24 dev eth0")
    text = namespace.run(sys.executable, "-m", "benchmarks.scale.compare", str(count), timeout_s=60)
    namespace.delete()
    return {"comparison cpu s": float(text)}


def yardstick() -> Figures:
    """Return the seconds that an interpreter takes to load the two libraries that the goals were set beside."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import etcd3, pyroute2"], check=True)
    return {"yardstick s": time.monotonic() - began}


def _put(etcd: Etcd, peer: Peer) -> None:
    name, value = peer.lease
    etcd.put(f"{etcd.prefix}/subnets/{name}", json.dumps(value))


def _put_all(etcd: Etcd, new: Sequence[Peer]) -> None:
    for peer in new:
        _put(etcd, peer)


def _pid(host: Host) -> int:
    if host.daemon.pid is None:
        raise AssertionError(f"the daemon ended with {host.daemon.exit_code}:{host.daemon.tail()}")
    return host.daemon.pid
