"""From any backend to any other over a restart: nothing of the old one remains, packets go the new way.

Two hosts in dual stack. The guest has what the machine's own kernel may lack.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping

import pytest

from backends.kernel.ethtool import set_tx_checksum
from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.hosts import Host
from tests.conftest import IN_GUEST
from tests.support import states, wireguard
from tests.support.segments import differences
from tests.support.site import settle
from tests.support.states import STATES

pytestmark = [
    pytest.mark.system,
    pytest.mark.stock,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

WAIT_S, READY_S = (120.0, 300.0) if IN_GUEST else (15.0, 30.0)
"""The guest is an emulated machine."""
STOCK = ("ipip", "fou")
"""What needs a kernel that the machine may not have."""


def tour(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return every ordered pair once, each beginning where the one before it ends (Hierholzer's Eulerian circuit)."""
    names = list(names)
    ahead = {name: [other for other in names if other != name] for name in names}
    trail, way = names[:1], list[str]()
    while trail:
        if ahead[trail[-1]]:
            trail.append(ahead[trail[-1]].pop())
        else:
            way.append(trail.pop())
    return list(itertools.pairwise(reversed(way)))


def here() -> list[tuple[str, str]]:
    """Return the changes to try on this kernel.

    In the guest each takes long: all between the three that only it has, or has
    in another form, and one way or the other those that the machine's own
    kernel knows.
    """
    if not IN_GUEST:
        return tour(name for name in STATES if name not in STOCK)
    return [
        ("vxlan", "ipip"),
        *tour(("ipip", "fou", "wireguard")),
        ("ipip", "host-gw"),
        ("host-gw", "fou"),
        ("fou", "vxlan"),
    ]


class Change:
    """Two hosts with a container each; ``now`` is the backend they run."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.now = lab, ""
        self.network: Mapping[int, str] = {}
        self.plain = {host: states.odd(host, states.NETWORK) for host in lab.hosts}

    def run(self, name: str) -> None:
        """Have the hosts run a backend, by a restart if it is another one."""
        if name == self.now:
            return
        # Should it fail, whoever comes next restarts.
        self.now, state, drawn = "", STATES[name], self.network
        self.network = state.network
        self.lab.etcd.configure(state.config)
        for host in self.lab.hosts:
            host.daemon.signal(signal.SIGTERM)
        for host in self.lab.hosts:
            if host.daemon.runs:
                host.daemon.wait_exit(READY_S)
        for host in self.lab.hosts:
            host.daemon.start()
            if state.network != drawn:
                # One after the other: hosts that draw at once may draw the same IPv6 subnet, as lease keys hold both.
                host.daemon.wait_ready(READY_S)
        for host in self.lab.hosts:
            host.daemon.wait_ready(READY_S)
            self._house(host)
        settle(f"state of {name}", lambda: self.difference(name), WAIT_S)
        self.now = name

    def _house(self, host: Host) -> None:
        """Give a host a container, a new one if its subnets are others."""
        if host.pods and {a.network for a in host.pod.addresses} == {a.network for a in host.gateways()}:
            return
        if host.pods:
            # A veth outlives its peer's namespace for a while, and its name is wanted again.
            host.namespace.ip("link del pod0", "link del cni0")
            host.pods.pop().namespace.delete()
        self.lab.add_pod(host)

    def difference(self, name: str) -> list[str]:
        """Return what hosts and datastore hold that they should not, or lack, or which packets are lost."""
        state, (first, second) = STATES[name], self.lab.hosts
        leases = [states.wanted_lease(state, host) for host in self.lab.hosts]
        there = sorted(self.lab.etcd.leases().values(), key=lambda lease: str(lease["PublicIP"]))
        wrong = [f"leases {there}, not {leases}"] if there != leases else []
        # Looking costs the guest a lot, of which the daemons have need meanwhile.
        for host, peer in ((first, second), (second, first)):
            if not wrong:
                want = states.wanted(state, self.lab, host, peer)
                have = states.found(host, state.network, self.plain[host])
                wrong = [f"{host}: {text}" for text in differences(want, have)]
        for (source, target), family in itertools.product(self.lab.pairs(), state.carries):
            if not wrong and source.pod.namespace.ping(target.pod.address(family), count=1)[0] != 1:
                wrong.append(f"{source} gets no answer of {target} over IPv{family}")
        return wrong


@pytest.fixture(scope="module")
def change() -> Iterator[Change]:
    # Daemons of a laboratory made for wireguard have a /run each, for wireguard-go's sockets.
    with Lab(2, config=STATES["wireguard"].config, family="dual", flags=["--ip-masq"], start=False) as lab:
        for host in lab.hosts:
            host.namespace.call(lambda: set_tx_checksum("eth0", False))  # data path fou insists
        yield Change(lab)


@pytest.mark.parametrize(("old", "new"), here(), ids=[f"{old}-to-{new}" for old, new in here()])
def test_C11_nothing_of_the_former_backend_remains(change: Change, old: str, new: str) -> None:
    if "wireguard" in (old, new) and not wireguard.possible():
        pytest.skip("neither the kernel has WireGuard nor is wireguard-go installed")
    change.run(old)
    change.run(new)
