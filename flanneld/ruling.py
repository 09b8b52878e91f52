"""Says which traffic rules and which port filter are wanted, and remembers whether they are in force."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from backends.dataplane.model import DEFAULT_PORT, Link, Vxlan
from flanneld.plan import Plan
from flanneld.traffic.keeper import TrafficState
from flanneld.traffic.rules import Pair, TrafficPolicy
from flanneld.traffic.vtep_rules import VtepFilter
from subnet.model import FAMILIES, IPAddress, NetworkConfig, Subnets


class Ruling:
    """Speaks to the keeper of traffic rules, which has a thread of its own."""

    def __init__(
        self,
        plan: Plan,
        want: Callable[[TrafficPolicy], None],
        want_filter: Callable[[VtepFilter | None], None],
    ) -> None:
        self._plan, self._want, self._want_filter = plan, want, want_filter
        self._policy: TrafficPolicy | None = None
        self._state: TrafficState | None = None
        self._filter: VtepFilter | None = None
        self._filter_asked = False

    def heard(self, state: TrafficState) -> None:
        """Take over what the keeper says."""
        self._state = state

    def ask(self, config: NetworkConfig, own: Subnets, networks_before: Subnets, own_before: Subnets) -> None:
        """Ask for the rules of this config and subnet, and for those of an earlier run to go."""
        pairs: dict[int, Pair] = {}
        earlier: list[Pair] = []
        for family in FAMILIES:
            pool, subnet = config.pool(family), own.of(family)
            if pool is not None and subnet is not None:
                pairs[family] = Pair(pool.network, subnet)
            network, before = networks_before.of(family), own_before.of(family)
            if network is not None and before is not None:
                earlier.append(Pair(network, before))
        policy = TrafficPolicy(
            v4=pairs.get(4),
            v6=pairs.get(6),
            masquerade=self._plan.ip_masq,
            forward=self._plan.forward_rules,
            random_fully=self._plan.random_fully,
            previous=tuple(earlier),
            masq_exclude=self._plan.masq_exclude,
            nftables=config.enable_nftables,
            chain_prefix=self._plan.chain_prefix,
            table_prefix=self._plan.table_prefix,
        )
        if policy != self._policy:
            self._policy = policy
            self._want(policy)

    @property
    def pending(self) -> bool:
        """Whether the keeper has not answered yet for what was last asked for."""
        return self._state is None or self._state.policy != self._policy

    def problem(self) -> str:
        """Return why the rules are not in force; empty: they are."""
        if self._state is None or self.pending:
            return "waiting for the traffic rules"
        return "" if self._state.ok else f"traffic rules: {self._state.problem}"

    def ask_for_filter(self, underlay: str, links: Iterable[Link], peers: frozenset[IPAddress]) -> None:
        """Say which hosts may send to the VXLAN port; without a VXLAN device there is none to protect."""
        tunnels = (link.tunnel for link in links)
        ports = {tunnel.port or DEFAULT_PORT for tunnel in tunnels if isinstance(tunnel, Vxlan)}
        wanted = VtepFilter(underlay, ports.pop(), peers) if ports else None
        if wanted != self._filter or not self._filter_asked:
            self._filter, self._filter_asked = wanted, True
            self._want_filter(wanted)
