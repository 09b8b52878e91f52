"""From nodes to leases: which subnet a node has, and which leases follow from all of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from subnet.errors import FlannelError
from subnet.gojson import show
from subnet.iptext import as_subnets, parse_cidr
from subnet.kube.annotations import MANAGED, PUBLIC, read_attrs, with_prefix
from subnet.kube.records import Node
from subnet.model import Family, IPNetwork, Lease, NetworkConfig, Subnets

MOST_CIDRS = 2
"""One per address family (Kubernetes, Node v1 core, podCIDRs)."""

Change: TypeAlias = Lease | Subnets


class NoSubnet(FlannelError):
    """The node has no subnet that can be used; the text says why, and ``waiting`` whether that may just be early."""

    def __init__(self, text: str, waiting: bool) -> None:
        super().__init__(text)
        self.waiting = waiting


def own_subnets(name: str, cidrs: Sequence[str], config: NetworkConfig) -> Subnets:
    """Return the node's own subnet in each enabled family. Raises NoSubnet.

    The order of the pod CIDRs does not matter. All of them are inside the
    cluster's networks.
    """
    if not cidrs:
        raise NoSubnet(
            f"node {name} has no pod CIDR yet: neither spec.podCIDRs nor spec.podCIDR is set; usual causes: "
            "kube-controller-manager runs without --allocate-node-cidrs=true and --cluster-cidr "
            "(kubeadm: --pod-network-cidr), or its --cluster-cidr has no free range left",
            waiting=True,
        )
    if len(cidrs) > MOST_CIDRS:
        raise NoSubnet(
            f"node {name} has {len(cidrs)} pod CIDRs, at most one per family is possible: {', '.join(cidrs)}",
            waiting=False,
        )
    found: list[IPNetwork] = []
    for text in cidrs:
        try:
            found.append(parse_cidr(text))
        except ValueError as error:
            raise NoSubnet(f"node {name}: pod CIDR {show(text)}: {error}", waiting=False) from error
    chosen = [_of_family(name, found, family, config) for family in config.families]
    return as_subnets(chosen)


def _of_family(name: str, found: Sequence[IPNetwork], family: Family, config: NetworkConfig) -> IPNetwork:
    pool = config.pool(family)
    subnet = next((network for network in found if network.version == family), None)
    if subnet is None:
        raise NoSubnet(
            f"node {name} has no IPv{family} pod CIDR, only {', '.join(map(str, found))}; "
            f"the network config enables IPv{family}: let the cluster assign one, or set EnableIPv{family} to false",
            waiting=False,
        )
    if pool is not None and not _inside(subnet, pool.network):
        key = "Network" if family == 4 else "IPv6Network"
        raise NoSubnet(
            f"node {name}: pod CIDR {subnet} is not inside {key} {pool.network}; "
            f"--cluster-cidr of kube-controller-manager and {key} must agree",
            waiting=False,
        )
    return subnet


def _inside(subnet: IPNetwork, network: IPNetwork) -> bool:
    return subnet.prefixlen >= network.prefixlen and subnet.network_address in network


def lease_of(node: Node, prefix: str, families: Sequence[Family]) -> tuple[Lease | None, str]:
    """Return the lease that a node's object amounts to, and what is wrong with it, empty if nothing is.

    A node that is not managed by flannel has no lease, and nothing is wrong
    with that. A node that lacks something in one family has a lease of the
    other. The lease's revision is the node's age: of two nodes with one pod
    CIDR the older one is right, whoever looks.
    """
    ours = with_prefix(node.annotations, prefix)
    if ours.get(MANAGED) != "true":
        return None, ""
    attrs, broken = read_attrs(ours)
    networks, problems = _networks(node.spec.cidrs)
    usable: list[IPNetwork] = []
    for family in families:
        subnet = next((network for network in networks if network.version == family), None)
        if family in broken:
            problems.append(broken[family])
        elif subnet is None:
            problems.append(f"it has no IPv{family} pod CIDR")
        elif attrs.public(family) is None:
            problems.append(f"it has no annotation {PUBLIC[family]}")
        else:
            usable.append(subnet)
    problem = "; ".join(problems)
    if not usable:
        return None, problem
    meta = node.metadata
    return Lease(as_subnets(usable), attrs, meta.name, revision=meta.created_s), problem


def _networks(cidrs: Sequence[str]) -> tuple[list[IPNetwork], list[str]]:
    networks: list[IPNetwork] = []
    problems: list[str] = []
    for text in cidrs:
        try:
            networks.append(parse_cidr(text))
        except ValueError as error:
            problems.append(f"pod CIDR {show(text)}: {error}")
    return networks, problems


@dataclass
class NodeBook:
    """The leases of all nodes by name. Two nodes may claim one subnet; then the older one has it.

    Every operation but ``replace`` takes the same time however many nodes there are.
    """

    _leases: dict[str, Lease] = field(default_factory=dict)
    _claims: dict[Subnets, set[str]] = field(default_factory=dict)

    def replace(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Forget everything and take these; returns one lease per subnet."""
        self._leases, self._claims = {}, {}
        for lease in leases:
            self._leases[lease.key] = lease
            self._claims.setdefault(lease.subnets, set()).add(lease.key)
        return tuple(holder for subnets in self._claims if (holder := self.holder(subnets)) is not None)

    def put(self, name: str, lease: Lease | None) -> tuple[Change, ...]:
        """Set the lease of a node, None if it has none any more; returns what changes, removals first."""
        before = self._leases.get(name)
        if before == lease:
            return ()
        touched = {known.subnets: self.holder(known.subnets) for known in (before, lease) if known is not None}
        if before is not None:
            del self._leases[name]
            self._drop_claim(before.subnets, name)
        if lease is not None:
            self._leases[name] = lease
            self._claims.setdefault(lease.subnets, set()).add(name)
        removed: list[Change] = []
        written: list[Change] = []
        for subnets, held_by in touched.items():
            holder = self.holder(subnets)
            if holder is None:
                removed.append(subnets)
            elif holder != held_by:
                written.append(holder)
        return (*removed, *written)

    def _drop_claim(self, subnets: Subnets, name: str) -> None:
        claims = self._claims[subnets]
        claims.discard(name)
        if not claims:
            del self._claims[subnets]

    def holder(self, subnets: Subnets) -> Lease | None:
        """Return the lease that counts for a subnet."""
        claims = self._claims.get(subnets, ())
        return min((self._leases[name] for name in claims), key=lambda lease: (lease.revision, lease.key), default=None)
