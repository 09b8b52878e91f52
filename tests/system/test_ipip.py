"""Backend ipip, in the guest: three hosts on two segments that a router joins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from flanneld.ctl.lab import Lab
from flanneld.ctl.lab.etcd import PORT
from flanneld.ctl.lab.flow import Flow
from flanneld.ctl.lab.lab import SWITCH_V4, SWITCH_V6, FamilyChoice
from flanneld.ctl.lab.tools import poll
from tests.support.damage import DAMAGE, WITHIN_S, Damage, inflict
from tests.support.pace import Watch
from tests.support.segments import DIRECT_IPIP, IPIP, Segments, differences, held
from tests.support.site import settle

pytestmark = [pytest.mark.system, pytest.mark.vm]

WAIT_S = 300.0
"""The guest is an emulated machine."""
READY_S = 600.0
V4 = "flannel.ipip"

CONFIGS: Mapping[str, tuple[Mapping[str, Any], FamilyChoice]] = {
    "dual": (IPIP, "dual"),
    "direct-dual": (DIRECT_IPIP, "dual"),
    "v4": (IPIP, "v4"),
    "v6": (IPIP, "v6"),
}


@pytest.fixture(scope="module")
def built() -> Iterator[Segments]:
    # Hosts of one family reach the store by one of these.
    stores = f"--etcd-endpoints=http://{SWITCH_V4}:{PORT},http://[{SWITCH_V6}]:{PORT}"
    with Lab(3, family="dual", flags=(stores,), start=False, ready_timeout_s=READY_S) as lab:
        segments = Segments(lab, *CONFIGS["dual"])
        segments.join()
        lab.start()
        yield segments


@pytest.fixture(scope="module")
def watch(built: Segments, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    watch = Watch(built.first, tmp_path_factory.mktemp("watch") / "monitor")
    yield watch
    watch.close()


@pytest.fixture(scope="module", params=list(CONFIGS))
def segments(built: Segments, request: pytest.FixtureRequest) -> Segments:
    """The hosts with a config each; DirectRouting alone is followed without a restart."""
    backend, family = CONFIGS[request.param]
    if built.family != family:
        built.change(backend, family, WAIT_S)
    elif built.backend != backend:
        built.choose(backend, family)
    return built


dual = pytest.mark.parametrize("segments", ["dual"], indirect=True)


def test_state_is_the_documented_one_and_full_packets_pass_both_ways(segments: Segments) -> None:
    settle("entries", segments.lacking, WAIT_S)
    settle("packets", segments.silent, WAIT_S)
    overhead = 20 if segments.family == "v4" else 40
    assert {segments.underlay(host) for host in segments.lab.hosts} == {segments.families}
    for host in segments.lab.hosts:
        assert host.subnet_env()["FLANNEL_MTU"] == str(1500 - overhead)


def test_lease_has_addresses_and_no_data(segments: Segments) -> None:
    v4, v6 = ("192.0.2.1", "192.0.2.2", "198.51.100.3"), ("2001:db8:1::1", "2001:db8:1::2", "2001:db8:2::3")
    # Those of addresses that the hosts had under an earlier config run out by themselves.
    here = {str(a.ip) for host in segments.lab.hosts for a in host.addresses}
    leases = [v for v in segments.lab.etcd.leases().values() if here & {v["PublicIP"], v["PublicIPv6"]}]
    found = sorted(leases, key=lambda value: (value["PublicIP"], str(value["PublicIPv6"])))
    assert found == [
        {
            "PublicIP": v4[n] if 4 in segments.families else "0.0.0.0",
            "PublicIPv6": v6[n] if 6 in segments.families else None,
            "BackendType": "ipip",
        }
        for n in range(3)
    ]


@dual
def test_a_peer_of_upstream_is_reached_over_ipv4_and_its_end_leaves_nothing(segments: Segments) -> None:
    first, etcd = segments.first, segments.lab.etcd
    want = segments.wanted(first)
    etcd.forge("10.5.200.0-24", {"PublicIP": "192.0.2.99", "PublicIPv6": None, "BackendType": "ipip"})
    more = want | {f"route 10.5.200.0/24 via 192.0.2.99 dev {V4} onlink"}
    settle("its route", lambda: differences(more, held(first)), WAIT_S)
    etcd.delete(f"{etcd.prefix}/subnets/10.5.200.0-24")
    settle("its end", lambda: differences(want, held(first)), WAIT_S)


@dual
def test_restart_does_not_interrupt(segments: Segments) -> None:
    first, far = segments.first, segments.far
    with Flow(first.pod.namespace, far.pod.namespace, far.pod.address(6), rate_per_s=20) as flow:
        poll("datagrams", flow.flowing, WAIT_S)
        mark = flow.sent
        first.daemon.restart(timeout_s=READY_S)
        poll("more", lambda: flow.sent > mark + 20, WAIT_S)
    assert flow.lost(mark) == 0


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_repaired(segments: Segments, watch: Watch, damage: Damage) -> None:
    first = segments.first
    lines = damage.lines(segments)
    if not any(lines):
        pytest.skip("ipip has nothing of that kind")
    want = segments.wanted(first)
    settle("entries before", lambda: differences(want, held(first)), WAIT_S)
    with watch.timing() as timing:
        inflict(first, lines)
        settle("entries", lambda: differences(want, held(first)), WAIT_S)
    assert timing.seconds <= WITHIN_S, timing
    settle("packets", lambda: segments.silent(echo=False), WAIT_S)
    assert first.daemon.exit_code is None


def test_W08_devices_of_others_and_of_other_backends() -> None:
    single = {"Network": "10.5.0.0/16", "Backend": {"Type": "ipip"}}
    with Lab(1, config=single, start=False) as lab:
        (host,) = lab.hosts
        host.namespace.ip(f"link add {V4} type dummy")
        host.daemon.start()
        reason = f"device {V4}: it is of kind dummy, not ipip; remove it: ip link delete {V4}"
        poll("the reason", lambda: reason in host.daemon.notify.status, READY_S)
        # Replaced by one without local address, beside the kernel's fallback device.
        host.namespace.ip(f"link del {V4}", "link set tunl0 up", f"link add {V4} type ipip local any dev eth0")
        host.daemon.wait_ready(READY_S)
        link = host.namespace.link(V4)
        assert link is not None
        assert (link["linkinfo"]["info_data"]["local"], link["mtu"]) == ("192.0.2.1", 1480)
        assert host.subnet_env()["FLANNEL_MTU"] == "1480"
        assert host.namespace.link("tunl0") is not None
        assert host.daemon.stop(WAIT_S) == 0
        lab.etcd.configure({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})
        host.daemon.start()
        host.daemon.wait_ready(READY_S)
        poll("the end of the earlier device", lambda: host.namespace.link(V4) is None, WAIT_S)
        assert host.namespace.link("flannel.1") is not None
        assert host.namespace.link("tunl0") is not None
