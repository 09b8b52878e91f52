"""The owner thread: one loop that brings host and datastore to what is wanted, again and again.

Start-up is nothing special: it is the first time that every step succeeds.
Each round walks the same steps from the network config to readiness and stops
at the first one that has to wait; events only say that a round is due.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from backends import load_backend
from backends.api import Backend, Carrier, CarryingBackend, ExternalInterface, Setting
from backends.dataplane.devices import DeviceKeeper
from backends.dataplane.diff import leftover_links
from backends.dataplane.model import Address, Change, DesiredState, Link, Route
from backends.dataplane.ports import Kernel, KernelEvent, LinkSeen, ObjectSeen, Overflow
from backends.dataplane.reconcile import Reconciler
from flanneld.extiface import Wish
from flanneld.healthz import Health
from flanneld.inbox import Event, Inbox, KernelEvents, Wake
from flanneld.liveconfig import restart_reason
from flanneld.peering import Peering
from flanneld.systemd import Notifier
from flanneld.traffic.keeper import TrafficState
from flanneld.traffic.rules import Pair, TrafficPolicy
from flanneld.underlay import Underlay
from subnet import envfile
from subnet.clock import Backoff, Clock
from subnet.errors import ConfigError, FlannelError, InterfaceError, KernelError
from subnet.manager import (
    ConfigSeen,
    LeaseRequest,
    LeasesChanged,
    LeasesListed,
    OwnLease,
    StoreState,
    SubnetManager,
)
from subnet.model import FAMILIES, IPNetwork, Lease, LeaseAttrs, NetworkConfig, Subnets
from subnet.report import Reporter

log = logging.getLogger(__name__)

TICK_S = 5.0
"""Longest sleep: subnet.env is looked at so often."""
NEWS_S = 1.0
"""A reason to wait is logged once it has lasted so long."""
HURRY_S = 0.2
"""A pending retry is brought forward to this when the host changed."""
COMPARE_SHARE = 4.0
"""After a comparison of t seconds the next one waits for this many t, so that churn cannot eat the host."""


class NotYet(FlannelError):
    """A step cannot be taken yet; the text is what people are told."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The options that the loop acts on."""

    wish: Wish
    subnet_file: str
    ip_masq: bool = False
    forward_rules: bool = True
    random_fully: bool = True
    resync_s: float = 60.0
    startup_timeout_s: float = 0.0
    tunnel_checksum_offload: bool = True


class Owner:
    """Owns leases, devices and kernel entries. Belongs to the thread that makes it."""

    def __init__(
        self,
        plan: Plan,
        *,
        kernel: Kernel,
        manager: SubnetManager,
        traffic_want: Callable[[TrafficPolicy], None],
        inbox: Inbox,
        health: Health,
        notifier: Notifier,
        clock: Clock,
    ) -> None:
        self._plan, self._kernel = plan, kernel
        self._manager, self._traffic_want = manager, traffic_want
        self._inbox, self._health, self._notifier, self._clock = inbox, health, notifier, clock
        self._reporter = Reporter(log, clock)
        self._carrier_reporter = Reporter(log, clock, again_s=600)
        self._reconciler = Reconciler(kernel, Reporter(log, clock, again_s=600))
        self._devices = DeviceKeeper(kernel, tx_checksum=plan.tunnel_checksum_offload)
        self._underlay = Underlay(kernel, plan.wish, clock)
        self._peering = Peering(kernel, clock)
        self._backoff = Backoff(first_s=0.2, ceiling_s=10)
        self._recheck_backoff = Backoff(first_s=0.5, ceiling_s=10)
        self.exit_code = 0
        """What the process is to end with when the loop ended by itself."""

        self._config: NetworkConfig | None = None
        self._config_problem = "network config was not read yet"
        self._own: Lease | None = None
        self._own_problem = "asking for a subnet lease"
        self._fatal = ""
        self._store_problem = "datastore was not reached yet"
        self._traffic: TrafficState | None = None

        self._backend: Backend | None = None
        self._backend_of: Setting | None = None
        self._links: dict[str, Link] = {}
        self._carrier: Carrier | None = None
        self._carried: dict[str, Link] = {}
        self._carrier_problems: Mapping[str, str] = {}
        self._carried_for: tuple[Setting, Subnets] | None = None
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
        self._policy: TrafficPolicy | None = None
        self._was_ready = False
        self._waiting_since = 0.0
        self._began = clock.now()
        self._next_resync = self._began + plan.resync_s
        self._retry_at: float | None = None
        self._recheck_at: float | None = None
        self._compare_at = 0.0
        self._alive_at = 0.0

        self._remember_earlier_run()

    def run(self, stop: threading.Event) -> None:
        """Go round until told to stop, or until ``exit_code`` says why it ended."""
        try:
            self._go_round(stop)
        finally:
            if self._carrier is not None:
                self._carrier.close()

    def _go_round(self, stop: threading.Event) -> None:
        while not stop.is_set() and not self.exit_code:
            self._round()
            limit = self._plan.startup_timeout_s
            if limit and not self._was_ready and self._clock.now() - self._began >= limit:
                log.error("not ready within --startup-timeout=%g s: %s", limit, self._health.reason)
                self.exit_code = 1
                return
            for event in self._inbox.drain(self._sleep_s()):
                self._take(event)

    # -- what happened ----------------------------------------------------

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
            case StoreState():
                self._store_problem = event.problem
            case TrafficState():
                self._traffic = event
            case _:
                pass
        if not isinstance(event, KernelEvents):
            self._retry_at = None

    def _take_kernel(self, event: KernelEvent) -> None:
        mine = self._links.keys() | self._made | self._carried.keys()
        interface = self._underlay.interface
        if isinstance(event, Overflow):
            self._doubt_everything()
        elif isinstance(event, LinkSeen):
            if event.name in mine:
                self._devices_doubted = True
                self._reconciler.doubt()
            if interface is None or event.name == interface.name or event.index == interface.index:
                self._doubt_interface()
                self._reconciler.doubt()
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

    def _take_config(self, event: ConfigSeen) -> None:
        if event.config is None:
            self._config_problem = event.problem
            if self._own is not None:
                self._reporter.problem("config", f"{event.problem}; the earlier network config stays in force")
            else:
                self._config = None
            return
        self._reporter.solved("config", "the network config can be used again")
        if event.config == self._config:
            return
        reason = restart_reason(self._config, event.config) if self._config and self._own else ""
        if reason:
            self._reporter.problem("restart", f"network config changed, restart needed: {reason}")
            return
        self._reporter.solved("restart", "the network config is the one in force again")
        log.info("network config %s", "changed, followed live" if self._config else "read")
        for warning in event.config.warnings:
            log.warning("network config: %s", warning)
        self._config = event.config

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
        if self._retry_at is not None and now < self._retry_at:
            return
        self._retry_at = None
        try:
            self._advance()
        except NotYet as waiting:
            self._not_ready(str(waiting))
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
        attrs = self._ensure_devices(backend, interface)
        self._ask(attrs, config)
        own = self._own
        if own is None:
            raise NotYet(self._own_problem or "waiting for a subnet lease")
        self._ask_for_rules(config, own.subnets)
        problem = self._rules_problem()
        # Not held up by rules in trouble: peers do not wait for them.
        carrier_problem = self._carry(backend, setting, own.subnets)
        problem = problem or carrier_problem
        if not problem:
            self._ensure_addresses(backend, own.subnets)
            self._ensure_env_file(config, backend, own.subnets)
        self._converge(backend, setting, own.subnets)
        self._clean_up(setting)
        if problem:
            raise NotYet(problem)
        self._is_ready(own)

    def _usable_config(self) -> NetworkConfig:
        if self._config is None:
            problem = self._store_problem or self._config_problem
            raise NotYet(f"waiting for the network config: {problem}")
        if self._config.enable_nftables:
            raise NotYet("EnableNFTables is not available in this version; set it to false")
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
        if self._backend is None or self._backend_of != setting:
            self._backend = load_backend(setting)
            self._backend_of = setting
            self._devices_doubted = True
        return self._backend

    def _ensure_devices(self, backend: Backend, interface: ExternalInterface) -> LeaseAttrs:
        if self._devices_doubted:
            binding = bool(self._macs)
            macs = self._macs or self._macs_told_earlier(backend, interface)
            specs = backend.links(macs, binding)
            self._made |= {spec.name for spec in specs}
            self._links = self._devices.ensure(specs)
            self._macs = {name: link.mac for name, link in self._links.items()}
            self._carried = self._ensure_carrier(backend)
            indexes = {link.index: link.name for link in (*self._links.values(), *self._carried.values())}
            self._reconciler.know_devices({**indexes, interface.index: interface.name})
            self._devices_doubted = False
        if self._carrier is not None and (reason := self._carrier.unprepared()):
            raise NotYet(reason)
        return backend.attrs(self._links)

    def _ensure_carrier(self, backend: Backend) -> dict[str, Link]:
        earlier = self._carrier
        if isinstance(backend, CarryingBackend):
            self._carrier = backend.carrier(earlier, self._wake)
        else:
            self._close_carrier()
        if self._carrier is not earlier:
            self._carried_for = None
        return self._carrier.ensure(self._kernel) if self._carrier is not None else {}

    def _close_carrier(self) -> None:
        if self._carrier is not None:
            self._carrier.close()
        self._carrier, self._carrier_problems = None, {}

    def _wake(self) -> None:
        self._inbox.post(Wake())

    def _carry(self, backend: Backend, setting: Setting, own: Subnets) -> str:
        """Tell the carrier what to carry; return why packets do not flow yet, empty if they do."""
        carrier = self._carrier
        if carrier is None:
            return ""
        if self._peering.moved or self._carried_for != (setting, own):
            carrier.carry(own, self._peering.peers(backend, setting, own))
            self._carried_for = (setting, own)
        self._carrier_problems = carrier.problems()
        for topic, text in self._carrier_problems.items():
            self._carrier_reporter.problem(topic, text)
        self._carrier_reporter.forget_except(self._carrier_problems)
        return carrier.unready()

    def _macs_told_earlier(self, backend: Backend, interface: ExternalInterface) -> dict[str, str]:
        """What peers still know of an earlier run, so that a new device need not be learnt."""
        mine = {interface.public_v4, interface.public_v6} - {None}
        for lease in self._peering.leases.all():
            if {lease.attrs.public_ip, lease.attrs.public_ipv6} & mine:
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
        if self._reconciler.doubtful and self._converged_for == (setting, own) and now < self._compare_at:
            return
        looked = self._reconciler.doubtful
        outcome = self._reconciler.converge(self._peering.table(backend, setting, own))
        if looked:
            self._compare_at = self._clock.now() + COMPARE_SHARE * (self._clock.now() - now)
        self._converged_for = (setting, own)
        self._problems = outcome.problems | self._peering.refused()
        if outcome.refused:
            self._recheck_at = self._clock.now() + self._recheck_backoff.next_s()
        else:
            self._recheck_backoff.reset()

    def _clean_up(self, setting: Setting) -> None:
        """Once the new path works: devices that an earlier configuration left."""
        if self._cleaned_for == setting or not self._peering.leases.complete:
            return
        links, addresses = self._kernel.links(), self._kernel.addresses()
        wanted = frozenset(self._links)
        desired = DesiredState(wanted, setting.interface.name, setting.networks)
        stale = set(leftover_links(links, addresses, desired)) | (self._made & links.keys() - wanted)
        for name in sorted(stale):
            log.info("device %s of an earlier configuration is removed", name)
            self._kernel.delete_link(name)
        self._made = set(wanted)
        self._cleaned_for = setting

    def _ask_for_rules(self, config: NetworkConfig, own: Subnets) -> None:
        pairs: dict[int, Pair] = {}
        earlier: list[Pair] = []
        for family in FAMILIES:
            pool, subnet = config.pool(family), own.of(family)
            if pool is not None and subnet is not None:
                pairs[family] = Pair(pool.network, subnet)
            network, before = self._previous_networks.of(family), self._previous.of(family)
            if network is not None and before is not None:
                earlier.append(Pair(network, before))
        policy = TrafficPolicy(
            v4=pairs.get(4),
            v6=pairs.get(6),
            masquerade=self._plan.ip_masq,
            forward=self._plan.forward_rules,
            random_fully=self._plan.random_fully,
            previous=tuple(earlier),
        )
        if policy != self._policy:
            self._policy = policy
            self._traffic_want(policy)

    def _rules_problem(self) -> str:
        """Return why the rules are not in force; empty: they are.

        At the start they are waited for: pods may come once subnet.env is
        there, and peers after it. Later on, and when rules are in trouble,
        peers do not wait.
        """
        state = self._traffic
        if state is None or state.policy != self._policy:
            if self._converged_for is None:
                raise NotYet("waiting for the traffic rules")
            return "waiting for the traffic rules"
        return "" if state.ok else f"traffic rules: {state.problem}"

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
        problems = len(self._problems.keys() | self._carrier_problems.keys())
        status = f"subnet {own.subnets}, {max(len(self._peering.leases) - 1, 0)} other leases"
        if problems:
            status += f", {problems} with problems"
        if self._store_problem:
            status += f"; {self._store_problem}"
        if not self._health.ready:
            log.info("ready: %s", status)
        self._health.ready, self._health.reason = True, self._store_problem
        self._was_ready = True
        self._reporter.forget("ready")
        self._notifier.ready(status)

    def _not_ready(self, reason: str) -> None:
        now = self._clock.now()
        if self._health.ready or reason != self._health.reason:
            self._waiting_since = now
        self._health.ready, self._health.reason = False, reason
        self._notifier.status(f"not ready: {reason}")
        # What is over within a second is no news.
        if now - self._waiting_since >= NEWS_S:
            self._reporter.problem("ready", f"not ready: {reason}")

    def _sleep_s(self) -> float:
        now = self._clock.now()
        ends = [now + TICK_S, self._next_resync]
        if self._retry_at is not None:
            ends.append(self._retry_at)
        if self._underlay.settled_at is not None and self._underlay.settled_at > now:
            ends.append(self._underlay.settled_at)
        if not self._health.ready and now < self._waiting_since + NEWS_S:
            ends.append(self._waiting_since + NEWS_S)
        if self._recheck_at is not None:
            ends.append(self._recheck_at)
        if self._reconciler.doubtful and self._converged_for is not None:
            ends.append(self._compare_at)
        if self._notifier.watchdog_s:
            ends.append(now + self._notifier.watchdog_s / 3)
        if self._plan.startup_timeout_s and not self._was_ready:
            ends.append(self._began + self._plan.startup_timeout_s)
        return max(0.0, min(ends) - now)
