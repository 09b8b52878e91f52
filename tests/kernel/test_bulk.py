from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest

from backends.dataplane.diff import diff
from backends.dataplane.model import (
    PROTO_FLANNEL,
    Change,
    DesiredState,
    FdbEntry,
    Neighbour,
    ObservedState,
    Route,
)
from backends.dataplane.packed import Entries
from backends.dataplane.reconcile import PUT_ORDER
from backends.dataplane.table import WantedTable
from backends.kernel import bulk, nexthops, rtnl, sockets
from backends.kernel.netlink import NetlinkKernel
from backends.kernel.sockets import NetlinkSocket
from tests.support.netns import Namespace

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

DEVICE = "flannel.1"
BASE = DesiredState(frozenset({DEVICE}), "eth0", frozenset({ip_network("10.0.0.0/8")}))


@pytest.fixture
def host(namespace: Namespace) -> Iterator[Namespace]:
    namespace.ip("link add eth0 type veth peer name far0")
    namespace.ip("addr add 192.0.2.1/24 dev eth0")
    namespace.ip("link set eth0 up")
    namespace.ip("link set far0 up")
    namespace.ip(f"link add {DEVICE} type vxlan id 1 dev eth0 local 192.0.2.1 dstport 8472 nolearning")
    namespace.ip(f"link set {DEVICE} up")
    with namespace.inside():
        yield namespace


@pytest.fixture
def make(host: Namespace) -> Iterator[Callable[[bulk.Mode], NetlinkKernel]]:
    made: list[NetlinkKernel] = []

    def kernel(mode: bulk.Mode) -> NetlinkKernel:
        made.append(NetlinkKernel(nexthop_objects=mode))
        return made[-1]

    yield kernel
    for one in made:
        one.close()


@pytest.fixture
def kernel(make: Callable[[bulk.Mode], NetlinkKernel]) -> NetlinkKernel:
    if not nexthops_known():
        pytest.skip("the kernel has no nexthop objects")
    return make("always")


def nexthops_known() -> bool:
    channel = NetlinkSocket(socket.NETLINK_ROUTE)
    try:
        return bool(channel.buffers(nexthops.dump(), "nexthop objects")) and bulk.COMPAT_MODE.exists()
    finally:
        channel.close()


def _peer(n: int) -> list[Neighbour | FdbEntry | Route]:
    base, mac = ip_address(f"10.{5 + n // 256}.{n % 256}.0"), f"02:00:00:00:{n // 256:02x}:{n % 256:02x}"
    route = Route(ip_network(f"{base}/24"), DEVICE, base, onlink=True)
    return [Neighbour(DEVICE, base, mac), FdbEntry(DEVICE, mac, ip_address(0xC6120000 + n)), route]


def _table(numbers: range) -> WantedTable:
    table = WantedTable(BASE)
    for n in numbers:
        table.put_objects(str(n), (n, ""), _peer(n))
    return table


def _ordered(entries: Entries) -> Entries:
    return {key: entries[key] for kind in PUT_ORDER for key in entries if key[:1] == kind}


def _routes(host: Namespace) -> dict[str, dict[str, Any]]:
    return {route["dst"]: route for route in host.ip_json(f"-4 route show dev {DEVICE}")}


def _objects(host: Namespace) -> dict[int, str]:
    return {one["id"]: one["gateway"] for one in host.ip_json("nexthop show")}


@pytest.mark.parametrize("mode", ["always", "never"])
def test_many_entries_are_there_and_are_found_again(
    host: Namespace, make: Callable[[bulk.Mode], NetlinkKernel], mode: bulk.Mode
) -> None:
    kernel, table = make(mode), _table(range(1, 1201))
    assert kernel.put(_ordered(table.entries), table.packer) == []
    routes = _routes(host)
    assert len(routes) == 1200
    shown = {(r["dst"], r["gateway"], tuple(r["flags"])) for r in routes.values()}
    assert shown == {(str(p[2].destination), str(p[0].address), ("onlink",)) for p in map(_peer, range(1, 1201))}  # type: ignore[union-attr]
    assert len(_objects(host)) == (1200 if mode == "always" and nexthops_known() else 0)
    seen = Entries()
    kernel.survey([DEVICE], table.packer, seen.update)
    assert {key: seen.get(key) for key in table.entries} == table.entries
    anew = make(mode)
    assert diff(anew.observe([DEVICE]), table.desired()) == ()
    assert anew.default_routes() == frozenset()
    host.ip("route add default via 192.0.2.254")
    (default,) = anew.default_routes()
    assert (default.device, str(default.gateway)) == ("eth0", "192.0.2.254")


def test_few_routes_have_their_gateway_inside(host: Namespace, make: Callable[[bulk.Mode], NetlinkKernel]) -> None:
    kernel, table = make("auto"), _table(range(1, 100))
    assert kernel.put(_ordered(table.entries), table.packer) == []
    assert _objects(host) == {}
    more = _table(range(100, 1300))
    assert kernel.put(_ordered(more.entries), more.packer) == []
    assert _objects(host) == {}  # it was decided at the start


def test_objects_are_ours_and_go_with_their_routes(host: Namespace, kernel: NetlinkKernel) -> None:
    table = _table(range(1, 5))
    kernel.put(_ordered(table.entries), table.packer)
    assert set(_objects(host).values()) == {f"10.5.{n}.0" for n in range(1, 5)}
    assert all(nexthops.FIRST_ID <= number <= nexthops.LAST_ID for number in _objects(host))
    assert {one["protocol"] for one in host.ip_json("nexthop show")} == {"142"}
    assert "10.5.1.0/24 nhid" in host.ip("route show")
    fewer = _table(range(1, 3)).desired()
    assert kernel.apply(diff(table_state(table), fewer)) == []
    assert set(_objects(host).values()) == {"10.5.1.0", "10.5.2.0"}
    assert set(_routes(host)) == {"10.5.1.0/24", "10.5.2.0/24"}


def table_state(table: WantedTable) -> ObservedState:
    wanted = table.desired()
    return ObservedState(wanted.addresses, wanted.neighbours, wanted.fdb, wanted.routes)


def test_an_unchanged_object_is_never_written_again(host: Namespace, kernel: NetlinkKernel) -> None:
    table = _table(range(1, 4))
    kernel.put(_ordered(table.entries), table.packer)
    before = _objects(host)
    route = _peer(2)[2]
    assert kernel.apply([Change("put", route)]) == []
    assert _objects(host) == before
    assert set(_routes(host)) == {f"10.5.{n}.0/24" for n in range(1, 4)}


def test_route_with_its_gateway_inside_may_become_one_with_an_object_and_back(
    host: Namespace, make: Callable[[bulk.Mode], NetlinkKernel], kernel: NetlinkKernel
) -> None:
    route = _peer(2)[2]
    plain = make("never")
    plain.apply([Change("put", route)])
    assert "nhid" not in host.ip("route show 10.5.2.0/24")
    kernel.survey([DEVICE], WantedTable(BASE).packer, lambda _: None)
    assert kernel.apply([Change("put", route)]) == []
    assert "nhid" in host.ip("route show 10.5.2.0/24")
    assert isinstance(route, Route)
    elsewhere = replace(route, gateway=ip_address("192.0.2.254"), device="eth0", onlink=False)
    assert kernel.apply([Change("put", elsewhere)]) == []
    assert "10.5.2.0/24 via 192.0.2.254 dev eth0" in host.ip("route show")
    assert _objects(host) == {}


def test_a_direct_route_outlives_the_carrier_of_its_device(host: Namespace, kernel: NetlinkKernel) -> None:
    peer = ip_address("192.0.2.9")
    direct = Route(ip_network("10.5.9.0/24"), "eth0", peer, onlink=True, protocol=PROTO_FLANNEL)  # as ipip has them
    assert kernel.apply([Change("put", _peer(1)[2]), Change("put", direct)]) == []
    assert set(_objects(host).values()) == {"10.5.1.0"}
    host.ip("link set far0 down")
    assert "linkdown" in host.ip("route show 10.5.9.0/24")


def test_objects_that_a_killed_run_left_are_removed_and_the_others_kept(
    host: Namespace, make: Callable[[bulk.Mode], NetlinkKernel], kernel: NetlinkKernel
) -> None:
    table = _table(range(1, 4))
    kernel.put(_ordered(table.entries), table.packer)
    kept = _objects(host)
    host.ip(f"nexthop add id {nexthops.FIRST_ID + 500} via 10.5.99.0 dev {DEVICE} onlink proto 142")
    host.ip(f"nexthop add id {nexthops.FIRST_ID + 501} via 10.5.98.0 dev {DEVICE} onlink")
    host.ip(f"nexthop add id 7 via 10.5.97.0 dev {DEVICE} onlink proto 142")
    anew = make("auto")
    assert diff(anew.observe([DEVICE]), table.desired()) == ()
    foreign = {nexthops.FIRST_ID + 501: "10.5.98.0", 7: "10.5.97.0"}
    assert _objects(host) == kept | foreign
    assert anew.apply([Change("put", _peer(9)[2])]) == []
    assert "nhid" in host.ip("route show 10.5.9.0/24")  # objects are what this host has
    assert _objects(host).items() >= (kept | foreign).items()


def test_lost_objects_are_made_anew(host: Namespace, kernel: NetlinkKernel) -> None:
    table = _table(range(1, 4))
    kernel.put(_ordered(table.entries), table.packer)
    host.ip(f"nexthop del id {min(_objects(host))}")
    missing = diff(kernel.observe([DEVICE]), table.desired())
    assert [str(change.target) for change in missing] == ["route 10.5.1.0/24 via 10.5.1.0 dev flannel.1 onlink"]
    assert kernel.apply(missing) == []
    assert diff(kernel.observe([DEVICE]), table.desired()) == ()


def test_a_number_that_somebody_took_costs_one_attempt(host: Namespace, kernel: NetlinkKernel) -> None:
    table = _table(range(1, 4))
    kernel.survey([DEVICE], table.packer, lambda _: None)
    host.ip(f"nexthop add id {nexthops.FIRST_ID} via 10.5.77.0 dev {DEVICE} onlink")
    (failure,) = kernel.put(_ordered(table.entries), table.packer)
    assert failure.error.errno == errno.EEXIST
    assert str(failure.change.target).startswith("route 10.5.1.0/24")
    assert kernel.apply([failure.change]) == []
    assert diff(kernel.observe([DEVICE]), table.desired()) == ()


def test_the_object_of_a_route_that_was_gone_already_is_not_mistaken_for_another(
    host: Namespace, kernel: NetlinkKernel
) -> None:
    kernel.apply([Change("put", _peer(1)[2])])
    host.ip("route del 10.5.1.0/24")
    assert kernel.apply([Change("delete", _peer(1)[2])]) == []
    assert kernel.apply([Change("put", _peer(2)[2])]) == []
    assert _routes(host)["10.5.2.0/24"]["gateway"] == "10.5.2.0"
    assert set(_objects(host).values()) == {"10.5.2.0"}


def test_refusal_is_that_of_its_peer(host: Namespace, kernel: NetlinkKernel) -> None:
    host.ip("link add br0 type bridge")
    host.ip("link set br0 up")
    host.ip("addr add 10.5.200.0/31 dev br0")  # 10.5.200.0 is an own address now, and no gateway
    table = _table(range(1, 1201))
    (failure,) = kernel.put(_ordered(table.entries), table.packer)
    assert str(failure.change.target) == "route 10.5.200.0/24 via 10.5.200.0 dev flannel.1 onlink"
    assert len(_routes(host)) == 1199


def test_without_compatibility_mode_gateways_stay_inside(
    host: Namespace, make: Callable[[bulk.Mode], NetlinkKernel]
) -> None:
    if not nexthops_known():
        pytest.skip("the kernel has no nexthop objects")
    Path(bulk.COMPAT_MODE).write_text("0")
    kernel, table = make("always"), _table(range(1, 4))
    kernel.put(_ordered(table.entries), table.packer)
    assert _objects(host) == {}
    assert set(_routes(host)) == {f"10.5.{n}.0/24" for n in range(1, 4)}


@pytest.mark.usefixtures("host")
def test_refusals_that_overflow_the_buffer_are_all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NetlinkSocket, "_enlarge", lambda _: 1024)
    channel = NetlinkSocket(socket.NETLINK_ROUTE)
    bad = rtnl.unacknowledged(rtnl.encode(Change("put", _peer(1)[2]), 999, 0))
    index = socket.if_nametoindex(DEVICE)
    good = [bulk.neighbour(index, ip_address(0x0A060000 + n).packed, b"\2" * 6) for n in range(600)]
    messages = [message for one in good for message in (bad, one)]
    refused = channel.transact(messages)
    channel.close()
    assert {(position, code) for position, code, _ in refused} == {(at, errno.ENODEV) for at in range(0, 1200, 2)}


@pytest.mark.usefixtures("host")
def test_nothing_but_refusals_and_nothing_at_all() -> None:
    channel = NetlinkSocket(socket.NETLINK_ROUTE)
    assert channel.transact([]) == []
    bad = rtnl.unacknowledged(rtnl.encode(Change("put", _peer(1)[2]), 999, 0))
    refused = channel.transact([bad] * 3000)
    channel.close()
    assert [position for position, _, _ in sorted(refused)] == list(range(3000))


@pytest.mark.parametrize("option", ["NETLINK_CAP_ACK", "NETLINK_EXT_ACK", "NETLINK_GET_STRICT_CHK"])
def test_kernel_without_an_option_of_netlink_sockets_does(
    host: Namespace, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    monkeypatch.setattr(sockets, option, 0xFFFF)
    host.ip("neigh replace 192.0.2.9 lladdr 02:00:00:00:00:09 dev eth0 nud permanent")
    kernel, table = NetlinkKernel(nexthop_objects="never"), _table(range(1, 20))
    bad = Change("put", Route(ip_network("10.5.250.0/24"), DEVICE, ip_address("10.5.250.1")))
    assert kernel.put(_ordered(table.entries), table.packer) == []
    assert [failure.change for failure in kernel.apply([bad, Change("put", _peer(30)[0])])] == [bad]
    seen = kernel.observe([DEVICE])
    kernel.close()
    assert seen.neighbours == table.desired().neighbours | {_peer(30)[0]}
    assert seen.fdb == table.desired().fdb
