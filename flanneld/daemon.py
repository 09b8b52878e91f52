"""Wiring: makes the parts, starts the threads, waits for the end, takes everything down.

The main thread only waits for signals. Leases and kernel belong to the thread
"owner", the datastore to the manager's threads, traffic rules to theirs.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from backends.api import CLOSE_WITHIN_S
from backends.kernel.fdstore import passing_on, process_store
from backends.kernel.monitor import Monitor
from backends.kernel.netlink import NetlinkKernel
from flanneld import memory
from flanneld.extiface import Wish
from flanneld.healthz import Health
from flanneld.inbox import Inbox, KernelEvents, Wake
from flanneld.loop import Owner
from flanneld.options import Options
from flanneld.plan import Plan
from flanneld.systemd import Notifier
from flanneld.threads import Crash
from flanneld.traffic.keeper import TrafficKeeper
from subnet.cached import CachedManager
from subnet.clock import Clock, SystemClock
from subnet.etcd.layout import join
from subnet.manager import SubnetManager

log = logging.getLogger(__name__)

ANEW = "SIGHUP"
"""The signal that asks for a restart in place."""
END_WITHIN_S = CLOSE_WITHIN_S + 0.2
"""Time the threads get to unwind after a signal; then the process ends without them."""


def serve(options: Options) -> int:
    """Run until SIGTERM or SIGINT; return the exit code.

    0 after a signal, 1 after a failure that ended the daemon. SIGHUP restarts
    it in place: the process goes on with a program that was just started, and
    with the descriptors that carry packets. Raises UsageError for files that
    waiting cannot cure.
    """
    memory.begin()
    signals = _Signals()
    clock = SystemClock()
    inbox = Inbox()
    notifier = Notifier()
    health = Health(clock)
    stop = threading.Event()
    crash = Crash(signals.wake)
    crash.install()

    manager = _remembered(_manager(options, clock, os.environ), options, clock)
    traffic = TrafficKeeper(
        clock,
        options.iptables_resync_s,
        manage_sysctls=options.manage_sysctls,
        cleanup_on_exit=options.cleanup_on_exit,
        vtep_filter=options.vtep_filter,
    )
    ended: list[int] = []

    def own() -> None:
        kernel = NetlinkKernel(nexthop_objects=options.nexthop_objects)
        monitor = Monitor(lambda events: inbox.post(KernelEvents(tuple(events))), kernel.port_ids)
        monitor.start()
        try:
            owner = Owner(
                _plan(options),
                kernel=kernel,
                manager=manager,
                traffic_want=traffic.want,
                filter_want=traffic.want_filter,
                inbox=inbox,
                health=health,
                notifier=notifier,
                clock=clock,
                settled=memory.settle,
            )
            owner.run(stop)
            ended.append(owner.exit_code)
        finally:
            monitor.close()
            kernel.close()
            signals.wake()

    server = None
    if options.healthz_port > 0:
        from flanneld.healthserver import HealthServer  # noqa: PLC0415 - an HTTP server is loaded only where one is wanted

        server = HealthServer(str(options.healthz_ip), options.healthz_port, health, clock)
        server.start()
    manager.start(inbox.post)
    traffic.start(inbox.post)
    thread = threading.Thread(target=own, name="owner", daemon=True)
    thread.start()

    name = signals.wait()
    copies = _parting(name, notifier)
    deadline = time.monotonic() + END_WITHIN_S
    stop.set()
    inbox.post(Wake())
    for part in (manager.close, traffic.close, *([server.close] if server else [])):
        # Side by side: each takes its time, and the process has to end within two seconds.
        threading.Thread(target=part, name="closing", daemon=True).start()
    thread.join(max(0.0, deadline - time.monotonic()))
    for closing in [t for t in threading.enumerate() if t.name == "closing"]:
        closing.join(max(0.0, deadline - time.monotonic()))
    code = 1 if crash.name else next(iter(ended), 0)
    log.info("stopped")
    if name == ANEW and code == 0:
        _start_anew(copies)
    _leave(code)
    return code


def _parting(name: str, notifier: Notifier) -> dict[str, int]:
    """Say what the signal leads to; return copies of the descriptors that outlive a restart in place."""
    if name == ANEW:
        log.info("%s: restarting", name)
        notifier.reloading()
        return process_store().copies()
    if name:
        log.info("%s: stopping", name)
    notifier.stopping()
    return {}


def _start_anew(copies: Mapping[str, int]) -> None:
    """Replace the program by itself, as it was called."""
    # Until it listens itself, this is inherited: another wish for a restart must not end it.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    logging.shutdown()
    sys.stderr.flush()
    environ = {**os.environ, **passing_on(copies)}
    os.execve(sys.executable, sys.orig_argv, environ)  # noqa: S606 - the very program that runs


def _leave(code: int) -> None:
    """End now: what still blocks (a call in a library, a child) must not hold the process."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(code)


def _manager(options: Options, clock: Clock, environ: Mapping[str, str]) -> SubnetManager:
    return _kube_manager(options, clock, environ) if options.kube_subnet_mgr else _etcd_manager(options, clock)


def _etcd_manager(options: Options, clock: Clock) -> SubnetManager:
    from subnet.etcd.manager import EtcdManager  # noqa: PLC0415 - gRPC is loaded only where etcd is used
    from subnet.etcd.settings import EtcdSettings  # noqa: PLC0415

    settings = EtcdSettings(
        endpoints=options.etcd_endpoints,
        prefix=options.etcd_prefix,
        keyfile=options.etcd_keyfile,
        certfile=options.etcd_certfile,
        cafile=options.etcd_cafile,
        username=options.etcd_username,
        password=options.etcd_password,
        renew_margin_s=options.renew_margin_s,
        on_lease_lost=options.on_lease_lost,
    )
    return EtcdManager(settings, clock)


def _remembered(manager: SubnetManager, options: Options, clock: Clock) -> SubnetManager:
    if not options.state_file:
        return manager
    return CachedManager(
        manager,
        Path(options.state_file),
        f"kube {options.kube_annotation_prefix}" if options.kube_subnet_mgr else f"etcd {join(options.etcd_prefix)}",
        offline_start=options.offline_start,
        check_pools=not options.kube_subnet_mgr,
        clock=clock,
    )


def _kube_manager(options: Options, clock: Clock, environ: Mapping[str, str]) -> SubnetManager:
    from subnet.kube.manager import KubeManager  # noqa: PLC0415 - loaded only where Kubernetes is used
    from subnet.kube.settings import KubeSettings, check  # noqa: PLC0415

    settings = KubeSettings(
        api_url=options.kube_api_url,
        kubeconfig_file=options.kubeconfig_file,
        prefix=options.kube_annotation_prefix,
        node_name=environ.get("NODE_NAME", ""),
        pod_name=environ.get("POD_NAME", ""),
        pod_namespace=environ.get("POD_NAMESPACE", ""),
        net_config_path=options.net_config_path,
        set_network_condition=options.set_node_network_unavailable,
    )
    check(settings, environ)
    return KubeManager(settings, clock)


def _plan(options: Options) -> Plan:
    return Plan(
        wish=Wish(
            options.iface,
            options.iface_regex,
            options.iface_can_reach,
            options.public_ip,
            options.public_ipv6,
        ),
        subnet_file=options.subnet_file,
        ip_masq=options.ip_masq,
        forward_rules=options.iptables_forward_rules,
        random_fully=not options.ip_masq_fully_random_disable,
        masq_exclude=options.ip_masq_exclude,
        chain_prefix=options.chain_prefix,
        table_prefix=options.table_prefix,
        blackhole=options.ip_blackhole_route,
        vtep_filter=options.vtep_filter,
        resync_s=options.resync_period_s,
        startup_timeout_s=options.startup_timeout_s,
        tunnel_checksum_offload=options.tunnel_checksum_offload,
    )


class _Signals:
    """SIGTERM, SIGINT and SIGHUP wake the main thread; a second SIGTERM or SIGINT ends the process at once.

    The handlers run between two byte codes of the main thread, which may hold
    any lock: so they take none, and the waking is done by the interpreter
    itself, through a socket.
    """

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self._name = ""
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._name:
            self._name = name
        elif name != ANEW:
            os._exit(0)

    def wake(self) -> None:
        """Let ``wait`` return without a signal; callable from any thread."""
        self._write.send(b"\0")

    def wait(self) -> str:
        """Return the name of the signal that came, empty if ``wake`` was called."""
        select.select([self._read], [], [])
        self._read.recv(64)
        return self._name
