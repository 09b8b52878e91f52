"""The owner thread: one loop that brings host and datastore to what is wanted, again and again.

Start-up is nothing special: it is the first time that every step succeeds.
Each round walks the same steps from the network config to readiness and stops
at the first one that has to wait; events only say that a round is due.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from backends import load_backend
from backends.api import Backend, ExternalInterface, Setting
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.diff import foreign_addresses, leftover_links
from backends.dataplane.model import Address, Change, Link, Route
from backends.dataplane.ports import HookSeen, Kernel, KernelEvent, LinkSeen, ObjectSeen, Overflow
from backends.dataplane.reconcile import Reconciler
from flanneld.bridges import Bridges
from flanneld.carrying import Carrying
from flanneld.healthz import Health
from flanneld.inbox import Event, Inbox, KernelEvents, Wake
from flanneld.liveconfig import restart_reason
from flanneld.peering import Peering
from flanneld.plan import NotYet, Plan, Told
from flanneld.ruling import Ruling
from flanneld.systemd import Notifier
from flanneld.traffic.keeper import TrafficState
from flanneld.traffic.rules import TrafficPolicy
from flanneld.traffic.vtep_rules import VtepFilter
from flanneld.underlay import Underlay
from subnet import envfile
from subnet.clock import Backoff, Clock, Throttle
from subnet.errors import ConfigError, InterfaceError, KernelError
from subnet.manager import (
    ConfigSeen,
    LeaseRequest,
    LeasesChanged,
    LeasesListed,
    OwnLease,
    StoreState,
    SubnetManager,
    ThisNode,
)
from subnet.model import FAMILIES, IPNetwork, Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.report import Reporter

log = logging.getLogger(__name__)

TICK_S = 10.0
"""Longest sleep: subnet.env is looked at so often."""
NEWS_S = 1.0
"""A reason to wait is logged once it has lasted so long."""
QUIET_S = 1.0
"""The start is over once nothing has happened for so long since readiness."""
HURRY_S = 0.2
"""A pending retry is brought forward to this when the host changed."""


class Owner:
    """Owns leases, devices and kernel entries. Belongs to the thread that makes it."""

    def __init__(
        self,
        plan: Plan,
        *,
        kernel: Kernel,
        manager: SubnetManager,
        traffic_want: Callable[[TrafficPolicy], None],
        filter_want: Callable[[VtepFilter | None], None],
        inbox: Inbox,
        health: Health,
        notifier: Notifier,
        clock: Clock,
        settled: Callable[[], None] = lambda: None,
    ) -> None:
        """``settled`` is called once, when for the first time since readiness nothing happens for QUIET_S."""
        self._plan, self._kernel = plan, kernel
        self._settled: Callable[[], None] | None = settled
        self._manager = manager
        self._ruling = Ruling(plan, traffic_want, filter_want)
        self._inbox, self._health, self._notifier, self._clock = inbox, health, notifier, clock
        self._reporter = Reporter(log, clock)
        self._carrying = Carrying(kernel, clock, lambda: inbox.post(Wake()))
        self._reconciler = Reconciler(kernel, Reporter(log, clock, again_s=600))
        self._devices = DeviceKeeper(kernel, tx_checksum=plan.tunnel_checksum_offload)
        self._underlay = Underlay(kernel, plan.wish, clock)
        self._bridges = Bridges(kernel, clock)
        self._peering = Peering(kernel, clock, blackhole_own=plan.blackhole)
        self._backoff = Backoff(first_s=0.2, ceiling_s=10)
        self._recheck_backoff = Backoff(first_s=0.5, ceiling_s=10)
        self.exit_code = 0
        """What the process is to end with when the loop ended by itself."""

        self._config: NetworkConfig | None = None
        self._config_problem = "network config was not read yet"
        self._own: Lease | None = None
        self._own_problem = ""
        self._fatal = ""
        self._restart_reason = ""
        self._store_problem = "datastore was not reached yet"

        self._told: LeaseAttrs | None = None
        self._backend: Backend | None = None
        self._built: tuple[Setting, Backend] | None = None
        self._links: dict[str, Link] = {}
        self._devices_doubted = True
        self._macs: dict[str, str] = {}
        self._made: set[str] = set()
        self._asked: LeaseRequest | None = None
        self._converged_for: tuple[Setting, Subnets] | None = None
        self._cleaned_for: Setting | None = None
        self._addressed: Subnets | None = None
        self._problems: Mapping[str, str] = {}
        self._previous = Subnets()
        self._previous_networks = Subnets()
        self._was_ready = False
        self._waiting_since = 0.0
        self._began = clock.now()
        self._next_resync = self._began + plan.resync_s
        self._retry_at: float | None = None
        self._recheck_at: float | None = None
        self._comparisons = Throttle()
        self._alive_at = 0.0

        self._remember_earlier_run()

    def run(self, stop: threading.Event) -> None:
        """Go round until told to stop, or until ``exit_code`` says why it ended."""
        try:
            self._go_round(stop)
        finally:
            self._carrying.close()

    def _go_round(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._round()
            if self.exit_code:
                return
            limit = self._plan.startup_timeout_s
            if limit and not self._was_ready and self._clock.now() - self._began >= limit:
                log.error("not ready within --startup-timeout=%g s: %s", limit, self._health.reason)
                self.exit_code = 1
                return
            self._take_all()

    # -- what happened ----------------------------------------------------

    def _take_all(self) -> None:
        # Not in the loop, where the last event, maybe of thousands of entries, would be kept until the next comes.
        events = self._inbox.drain(self._sleep_s())
        for event in events:
            self._take(event)
        if not events and self._was_ready and self._settled:
            self._settled()
            self._settled = None

    def _take(self, event: Event) -> None:
        match event:
            case KernelEvents(events):
                for seen in events:
                    self._take_kernel(seen)
            case LeasesListed():
                self._peering.listed(event)
            case LeasesChanged():
                self._peering.changed(event)
            case OwnLease():
                self._take_own(event)
            case ConfigSeen():
                self._take_config(event)
            case ThisNode():
                self._take_this_node(event)
            case StoreState():
                self._store_problem = event.problem
            case TrafficState():
                self._ruling.heard(event)
            case _:
                pass
        if not isinstance(event, KernelEvents):
            self._retry_at = None

    def _take_kernel(self, event: KernelEvent) -> None:
        mine = self._links.keys() | self._made | self._carrying.links.keys()
        interface = self._underlay.interface
        self._bridges.saw(event)
        if isinstance(event, Overflow):
            self._doubt_everything()
        elif isinstance(event, LinkSeen):
            if event.name in mine:
                self._devices_doubted = True
                self._reconciler.doubt()
            if interface is None or event.name == interface.name or event.index == interface.index:
                self._doubt_interface()
                self._reconciler.doubt()
        elif isinstance(event, HookSeen):
            if event.index in self._carrying.hooked():
                self._devices_doubted = True
        elif isinstance(event, ObjectSeen):
            if interface is None or (isinstance(event.target, Address) and event.index == interface.index):
                self._doubt_interface()
            if isinstance(event.target, Route) and event.index not in {link.index for link in self._links.values()}:
                self._peering.ways_changed()
            if self._reconciler.contradicted(event):
                self._reconciler.doubt()

    def _doubt_everything(self) -> None:
        self._doubt_interface()
        self._devices_doubted = True
        self._reconciler.doubt()
        self._bridges.doubt()

    def _doubt_interface(self) -> None:
        self._peering.ways_changed()
        self._underlay.doubt()
        if self._retry_at is not None:
            self._retry_at = min(self._retry_at, self._clock.now() + HURRY_S)

    def _take_own(self, event: OwnLease) -> None:
        if event.fatal:
            self._fatal = event.problem
        if event.lease is not None:
            if self._own is None or self._own.subnets != event.lease.subnets:
                log.info("subnet lease: %s (%s)", event.lease.subnets, event.lease.key)
            self._own = event.lease
        elif self._own is not None:
            log.warning("%s; the data plane stays as it is meanwhile", event.problem)
        self._own_problem = event.problem

    def _take_this_node(self, event: ThisNode) -> None:
        self._told = event.told
        flags = self._plan.wish
        wish = replace(
            flags, public_ip=event.public_ip or flags.public_ip, public_ipv6=event.public_ipv6 or flags.public_ipv6
        )
        if self._underlay.wish(wish):
            for public in (wish.public_ip, wish.public_ipv6):
                if public is not None:
                    log.info("public address %s: by the node's annotations or the flags", public)

    def _take_config(self, event: ConfigSeen) -> None:
        config = event.config
        if config is not None and config == self._config:
            self._restart_reason = ""
            self._reporter.solved("config", "the network config can be used again")
            self._reporter.solved("restart", "the network config is the one in force again")
            return
        problem = event.problem if config is None else self._refusal(config)
        if config is None or problem:
            self._config_problem = problem
            if self._own is not None:
                self._reporter.problem("config", f"{problem}; the earlier network config stays in force")
            else:
                self._config = None
            return
        self._reporter.solved("config", "the network config can be used again")
        held = self._own and self._own.subnets
        self._restart_reason = restart_reason(self._config, config, held) if self._config and held else ""
        if self._restart_reason:
            self._reporter.problem("restart", f"network config changed, restart needed: {self._restart_reason}")
            return
        self._reporter.solved("restart", "the network config asks for no restart any more")
        log.info("network config %s", "changed, followed live" if self._config else "read")
        for warning in config.warnings:
            log.warning("network config: %s", warning)
        self._config = config

    def _refusal(self, config: NetworkConfig) -> str:
        """Return why no backend can be made of a config while an earlier one is in force; empty: one can."""
        interface = self._underlay.interface
        if self._own is None or interface is None:
            return ""
        try:
            self._backend_for(self._setting(config, interface))
        except ConfigError as error:
            return str(error)
        return ""

    # -- a round ----------------------------------------------------------

    def _round(self) -> None:
        now = self._clock.now()
        self._health.beat()
        if now - self._alive_at >= self._notifier.watchdog_s / 3:
            self._alive_at = now
            self._notifier.alive()
        if now >= self._next_resync:
            self._next_resync = now + self._plan.resync_s
            self._doubt_everything()
        if self._recheck_at is not None and now >= self._recheck_at:
            self._recheck_at = None
            self._reconciler.doubt()
        self._peering.part()
        if self._retry_at is not None and now < self._retry_at:
            return
        self._retry_at = None
        try:
            self._advance()
        except NotYet as waiting:
            self._not_ready(str(waiting), known=isinstance(waiting, Told))
        except (ConfigError, InterfaceError, KernelError, envfile.EnvFileError) as error:
            delay_s = self._backoff.next_s()
            self._retry_at = now + delay_s
            self._not_ready(str(error))
        else:
            self._backoff.reset()

    def _advance(self) -> None:
        if self._fatal:
            log.error("%s", self._fatal)
            self.exit_code = 1
            return
        config = self._usable_config()
        interface = self._external_interface(config)
        if not self._peering.leases.synced:
            raise NotYet(f"waiting for the list of leases: {self._store_problem}")
        setting = self._setting(config, interface)
        backend = self._the_backend(setting)
        attrs = self._ensure_devices(backend, setting)
        self._ask(attrs, config)
        own = self._own
        if own is None:
            if self._own_problem:
                raise Told(self._own_problem)
            raise NotYet("waiting for a subnet lease")
        self._ruling.ask(config, own.subnets, self._previous_networks, self._previous)
        problem = self._ruling.problem()
        if self._ruling.pending and self._converged_for is None:
            # At the start rules come first, then subnet.env (and with it pods), then peers.
            raise NotYet(problem)
        # Later on, and when rules are in trouble, peers do not wait for them.
        carrier_problem = self._carrying.carry(self._peering, backend, setting, own.subnets)
        problem = problem or carrier_problem
        if not problem:
            self._ensure_addresses(backend, own.subnets)
            self._ensure_env_file(config, backend, own.subnets)
        self._converge(backend, setting, own.subnets)
        self._clean_up(backend, setting, own.subnets)
        self._bridges.look(setting.networks, own.subnets)
        if problem:
            raise NotYet(problem)
        self._is_ready(own)

    def _usable_config(self) -> NetworkConfig:
        if self._config is None:
            problem = self._store_problem or self._config_problem
            raise NotYet(f"waiting for the network config: {problem}")
        return self._config

    def _external_interface(self, config: NetworkConfig) -> ExternalInterface:
        known = self._underlay.interface
        chosen = self._underlay.current(config)
        if known is not None and (known.v4, known.v6) != (chosen.v4, chosen.v6):
            self._manager.underlay_changed()
        return chosen

    def _setting(self, config: NetworkConfig, interface: ExternalInterface) -> Setting:
        networks: set[IPNetwork] = set()
        for family in FAMILIES:
            pool, earlier = config.pool(family), self._previous_networks.of(family)
            networks |= {network for network in (pool.network if pool else None, earlier) if network is not None}
        return Setting(config, interface, frozenset(networks))

    def _the_backend(self, setting: Setting) -> Backend:
        backend = self._backend_for(setting)
        if backend is not self._backend:
            self._backend = backend
            self._devices_doubted = True
        return backend

    def _backend_for(self, setting: Setting) -> Backend:
        if self._built is None or self._built[0] != setting:
            self._built = (setting, load_backend(setting))
        return self._built[1]

    def _ensure_devices(self, backend: Backend, setting: Setting) -> LeaseAttrs:
        if self._devices_doubted:
            interface = setting.interface
            binding = bool(self._macs)
            macs = self._macs or self._macs_told_earlier(backend, interface)
            specs = backend.links(macs, binding)
            self._made |= {spec.name for spec in specs}
            self._links = self._devices.ensure(specs, setting.networks)
            self._macs = {name: link.mac for name, link in self._links.items()}
            self._carrying.ensure(backend)
            indexes = {link.index: link.name for link in (*self._links.values(), *self._carrying.links.values())}
            self._reconciler.know_devices({**indexes, interface.index: interface.name})
            self._devices_doubted = False
        if reason := self._carrying.unprepared():
            raise NotYet(reason)
        return backend.attrs(self._links)

    def _macs_told_earlier(self, backend: Backend, interface: ExternalInterface) -> dict[str, str]:
        """What peers still know of an earlier run, so that a new device need not be learnt."""
        if self._told is not None:
            return backend.device_macs(self._told)
        mine = {interface.public_v4, interface.public_v6} - {None}
        for lease in self._peering.leases:
            if lease.attrs.public_ip in mine or lease.attrs.public_ipv6 in mine:
                return backend.device_macs(lease.attrs)
        return {}

    def _ask(self, attrs: LeaseAttrs, config: NetworkConfig) -> None:
        previous = self._previous if self._previous != Subnets() else None
        request = LeaseRequest(attrs, config, previous, self._underlay.addresses)
        asked = self._asked
        if asked is None or (asked.attrs, asked.config) != (attrs, config):
            self._asked = request
            self._manager.want(request)

    def _converge(self, backend: Backend, setting: Setting, own: Subnets) -> None:
        if not (self._peering.moved or self._reconciler.doubtful or self._converged_for != (setting, own)):
            return
        now = self._clock.now()
        if self._reconciler.doubtful and self._converged_for == (setting, own) and now < self._comparisons.next_at():
            return
        looked = self._reconciler.doubtful
        outcome = self._reconciler.converge(self._peering.table(backend, setting, own))
        if self._plan.vtep_filter:
            self._ruling.ask_for_filter(setting.interface.name, self._links.values(), self._peering.public_addresses())
        if looked:
            self._comparisons.ran(now, self._clock.now())
        self._converged_for = (setting, own)
        self._problems = outcome.problems | self._peering.refused()
        if outcome.refused:
            self._recheck_at = self._clock.now() + self._recheck_backoff.next_s()
        else:
            self._recheck_backoff.reset()

    def _clean_up(self, backend: Backend, setting: Setting, own: Subnets) -> None:
        """Once the new path works: devices and programs that an earlier configuration left."""
        if self._cleaned_for == setting or not self._peering.leases.complete:
            return
        links, addresses = self._kernel.links(), self._kernel.addresses()
        wanted = frozenset(self._links) | frozenset(self._carrying.links)
        # A backend whose devices are made by others names no networks: nothing there is recognised as ours.
        desired = replace(backend.desired(own, (), lambda _: False), devices=wanted)
        stale = set(leftover_links(links, addresses, desired)) | (self._made & links.keys() - wanted)
        for name in sorted(stale):
            log.info("device %s of an earlier configuration is removed", name)
            self._kernel.delete_link(name)
        for program in self._kernel.remove_programs(self._carrying.hooked()):
            log.info("%s of an earlier configuration is removed", program)
        for address in foreign_addresses(addresses, desired):
            log.warning("%s was given by somebody else and is left alone", address)
        self._made = set(self._links)
        self._cleaned_for = setting

    def _ensure_addresses(self, backend: Backend, own: Subnets) -> None:
        """The devices' own addresses, ahead of everything else that convergence brings."""
        if self._addressed == own and not self._reconciler.doubtful:
            return
        wanted = backend.desired(own, (), lambda _: False).addresses - frozenset(self._kernel.addresses())
        for failure in self._kernel.apply([Change("put", address) for address in sorted(wanted, key=str)]):
            raise failure.error
        if wanted:
            self._reconciler.doubt()
        self._addressed = own

    def _ensure_env_file(self, config: NetworkConfig, backend: Backend, own: Subnets) -> None:
        text = envfile.render(config, own, backend.mtu_bytes(), self._plan.ip_masq)
        path = Path(self._plan.subnet_file)
        try:
            current = path.read_text()
        except OSError:
            current = ""
        if current != text:
            envfile.write(path, text)
            log.info("wrote %s: %s", path, " ".join(text.split()))

    def _remember_earlier_run(self) -> None:
        path = self._plan.subnet_file
        try:
            self._previous = envfile.read_previous(path) or Subnets()
            self._previous_networks = envfile.read_networks(path) or Subnets()
        except envfile.EnvFileError as error:
            log.warning("%s; an earlier subnet is not known", error)

    # -- what others are told ---------------------------------------------

    def _is_ready(self, own: Lease) -> None:
        problems = len(self._problems.keys() | self._carrying.problems.keys())
        others = len(self._peering.leases) - (own.subnets in self._peering.leases)
        status = f"subnet {own.subnets}, {others} other leases"
        if problems:
            status += f", {problems} with problems"
        if self._restart_reason:
            status += f"; restart needed: {self._restart_reason}"
        troubles = [trouble for trouble in (self._store_problem, *self._bridges.problems.values()) if trouble]
        status = "; ".join([status, *troubles])
        if not self._health.ready:
            log.info("ready: %s", status)
        self._health.ready, self._health.reason = True, "; ".join(troubles)
        self._reporter.forget("ready")
        self._notifier.ready(status)
        self._manager.ready()
        self._was_ready = True

    def _not_ready(self, reason: str, known: bool = False) -> None:
        """Tell everybody why; what is ``known`` from the log is not logged again."""
        now = self._clock.now()
        if self._health.ready or reason != self._health.reason:
            self._waiting_since = now
        self._health.ready, self._health.reason = False, reason
        self._notifier.status(f"not ready: {reason}")
        # What is over within a second is no news.
        if not known and now - self._waiting_since >= NEWS_S:
            self._reporter.problem("ready", f"not ready: {reason}")

    def _sleep_s(self) -> float:
        now = self._clock.now()
        ends = [now + (QUIET_S if self._was_ready and self._settled else TICK_S), self._next_resync]
        if self._retry_at is not None:
            ends.append(self._retry_at)
        if self._peering.parts_at is not None:
            ends.append(self._peering.parts_at)
        if self._underlay.settled_at is not None and self._underlay.settled_at > now:
            ends.append(self._underlay.settled_at)
        if not self._health.ready and now < self._waiting_since + NEWS_S:
            ends.append(self._waiting_since + NEWS_S)
        if self._recheck_at is not None:
            ends.append(self._recheck_at)
        if self._reconciler.doubtful and self._comparisons.next_at() > now:
            ends.append(self._comparisons.next_at())
        if self._notifier.watchdog_s:
            ends.append(now + self._notifier.watchdog_s / 3)
        if self._plan.startup_timeout_s and not self._was_ready:
            ends.append(self._began + self._plan.startup_timeout_s)
        return max(0.0, min(ends) - now)
