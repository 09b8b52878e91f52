"""Every backend that kernels carry, on two segments joined by a router, in each combination of families."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flanneld.ctl.lab import Lab
from tests.support.damage import DAMAGE, WITHIN_S, Damage, inflict
from tests.support.segments import DIRECT, HOST_GW, VXLAN, Segments, differences, held
from tests.support.site import lacks, settle

pytestmark = pytest.mark.system

CONFIGS = {
    f"{name}-{family}": (backend, family)
    for name, backend in (("vxlan", VXLAN), ("direct", DIRECT), ("host-gw", HOST_GW))
    for family in ("v4", "dual", "v6")
}


@pytest.fixture(scope="module", params=list(CONFIGS.values()), ids=list(CONFIGS))
def segments(request: pytest.FixtureRequest) -> Iterator[Segments]:
    backend, family = request.param
    with Lab(3, family=family, start=False) as lab:
        segments = Segments(lab, backend, family)
        segments.join()
        lab.start()
        yield segments


def test_state_is_the_documented_one_and_full_packets_pass_both_ways(segments: Segments) -> None:
    settle("entries", segments.lacking, 20)
    settle("packets", segments.silent, 20)
    assert {segments.underlay(host) for host in segments.lab.hosts} == {segments.families}


def test_I01_a_family_that_is_off_is_not_named(segments: Segments) -> None:
    env = segments.first.subnet_env()
    assert ("FLANNEL_SUBNET" in env, "FLANNEL_IPV6_SUBNET" in env) == (4 in segments.families, 6 in segments.families)
    assert ("FLANNEL_NETWORK" in env, "FLANNEL_IPV6_NETWORK" in env) == (4 in segments.families, 6 in segments.families)


def test_H04_a_peer_behind_a_router_is_named_and_holds_up_nobody(segments: Segments) -> None:
    if segments.kind != "host-gw":
        pytest.skip("only host-gw needs a shared segment")
    told = [f"via {address.ip} dev eth0" for address in segments.far.addresses]
    settle("words in the log", lacks(segments.first.daemon.log, *told), 20)
    settle("status", lacks(lambda: segments.first.daemon.notify.status or "", "with problems"), 20)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_repaired(segments: Segments, damage: Damage) -> None:
    first = segments.first
    want = segments.wanted(first)
    settle("entries before", lambda: differences(want, held(first)), 20)
    lines = damage.lines(segments)
    if not any(lines):
        pytest.skip(f"{segments.kind} has nothing of that kind")
    inflict(first, lines)
    settle("entries", lambda: differences(want, held(first)), WITHIN_S)
    settle("packets", segments.silent, 5)
    assert first.daemon.exit_code is None
