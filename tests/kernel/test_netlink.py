from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from backends.dataplane.diff import diff
from backends.dataplane.model import (
    PROTO_FLANNEL,
    Address,
    Change,
    DesiredState,
    FdbEntry,
    LinkSpec,
    Neighbour,
    ObservedState,
    Route,
    Vxlan,
    blackhole,
)
from backends.kernel.genl import NETLINK_GENERIC, number_of
from backends.kernel.netlink import NetlinkKernel
from backends.kernel.sockets import NetlinkSocket
from subnet.errors import KernelError
from tests.support.netns import Namespace

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

MAC = "02:11:22:33:44:55"
DEVICE = "flannel.1"


@pytest.fixture
def host(namespace: Namespace) -> Iterator[Namespace]:
    lines = [
        "link add eth0 type veth peer name far0",
        "addr add 192.0.2.1/24 dev eth0",
        "addr add 2001:db8:1::1/64 dev eth0 nodad",
        "link set eth0 up",
        "link set far0 up",
    ]
    namespace.run("ip", "-batch", "-", text="\n".join(lines))
    with namespace.inside():
        yield namespace


@pytest.fixture
def kernel(host: Namespace) -> Iterator[NetlinkKernel]:
    adapter = NetlinkKernel()
    yield adapter
    adapter.close()


def _spec(kernel: NetlinkKernel, local: str = "192.0.2.1", **vxlan: object) -> LinkSpec:
    lower = kernel.links()["eth0"].index
    address = ip_address(local)
    family = 4 if address.version == 4 else 6
    name = DEVICE if family == 4 else "flannel-v6.1"
    return LinkSpec(name, family, Vxlan(1, 0, address, lower, **vxlan), 1450 if family == 4 else 1430, MAC)  # type: ignore[arg-type]


def _tunnel(kernel: NetlinkKernel, local: str = "192.0.2.1") -> str:
    spec = _spec(kernel, local)
    kernel.create_link(spec)
    kernel.set_link(spec.name, up=True)
    return spec.name


def _desired(count: int) -> DesiredState:
    numbers = range(2, 2 + count)
    return DesiredState(
        frozenset({DEVICE}),
        "eth0",
        frozenset({ip_network("10.5.0.0/16")}),
        frozenset({Address(DEVICE, ip_interface("10.5.1.0/32"))}),
        frozenset(Neighbour(DEVICE, ip_address(f"10.5.{n}.0"), f"02:00:00:00:00:{n:02x}") for n in numbers),
        frozenset(FdbEntry(DEVICE, f"02:00:00:00:00:{n:02x}", ip_address(f"192.0.2.{n}")) for n in numbers),
        frozenset(Route(ip_network(f"10.5.{n}.0/24"), DEVICE, ip_address(f"10.5.{n}.0"), onlink=True) for n in numbers),
    )


def test_device_is_the_documented_one(host: Namespace, kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    (shown,) = host.ip_json(f"-d link show dev {DEVICE}")
    info = shown["linkinfo"]["info_data"]
    assert (info["id"], info["local"], info["link"], info["port"]) == (1, "192.0.2.1", "eth0", 8472)
    assert (info["learning"], info["ttl"], info["ageing"], info["udp_csum"]) == (False, 0, 300, True)
    assert not any(info.get(key) for key in ("proxy", "rsc", "l2miss", "l3miss", "gbp", "group", "remote", "tos"))
    assert (shown["mtu"], shown["address"], shown.get("txqlen", 0)) == (1450, MAC, 0)
    assert "UP" in shown["flags"]


def test_gbp_and_learning_and_port_are_what_was_asked_for(host: Namespace, kernel: NetlinkKernel) -> None:
    spec = _spec(kernel, learning=True, gbp=True)
    lower = kernel.links()["eth0"].index
    local = ip_address("192.0.2.1")
    kernel.create_link(LinkSpec(spec.name, 4, Vxlan(7, 8473, local, lower, True, True), 1350, MAC))
    (shown,) = host.ip_json(f"-d link show dev {DEVICE}")
    info = shown["linkinfo"]["info_data"]
    assert (info["id"], info["port"], info["learning"], info["gbp"], shown["mtu"]) == (7, 8473, True, True, 1350)
    link = kernel.links()[DEVICE]
    assert link.tunnel == Vxlan(7, 8473, local, lower, True, True)
    kernel.set_link(DEVICE, learning=False, mtu_bytes=1300, mac="02:00:00:00:00:77")
    link = kernel.links()[DEVICE]
    assert isinstance(link.tunnel, Vxlan)
    assert (link.tunnel.learning, link.mtu_bytes, link.mac) == (False, 1300, "02:00:00:00:00:77")


def test_desired_state_reads_back_with_other_tools(host: Namespace, kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    desired = _desired(2)
    assert kernel.apply(diff(kernel.observe([DEVICE]), desired)) == []
    assert host.ip(f"-4 route show dev {DEVICE}").splitlines() == [
        "10.5.2.0/24 via 10.5.2.0 onlink ",
        "10.5.3.0/24 via 10.5.3.0 onlink ",
    ]
    neighbours = {(n["dst"], n["lladdr"], *n["state"]) for n in host.ip_json(f"neigh show dev {DEVICE}")}
    assert neighbours == {
        ("10.5.2.0", "02:00:00:00:00:02", "PERMANENT"),
        ("10.5.3.0", "02:00:00:00:00:03", "PERMANENT"),
    }
    entries = {
        (e["mac"], e["dst"], e["state"]) for e in json.loads(host.run("bridge", "-j", "fdb", "show", "dev", DEVICE))
    }
    assert entries == {
        ("02:00:00:00:00:02", "192.0.2.2", "permanent"),
        ("02:00:00:00:00:03", "192.0.2.3", "permanent"),
    }
    (shown,) = host.ip_json(f"-4 addr show dev {DEVICE}")
    (address,) = shown["addr_info"]
    assert (address["local"], address["prefixlen"], address["scope"], "broadcast" in address) == (
        "10.5.1.0",
        32,
        "global",
        False,
    )


def test_applying_twice_finds_nothing_to_do(kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    desired = _desired(40)
    kernel.apply(diff(kernel.observe([DEVICE]), desired))
    assert diff(kernel.observe([DEVICE]), desired) == ()
    fewer = _desired(5)
    kernel.apply(diff(kernel.observe([DEVICE]), fewer))
    assert diff(kernel.observe([DEVICE]), fewer) == ()


def test_more_changes_than_fit_one_batch(kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    desired = _desired(240)
    assert kernel.apply(diff(ObservedState(), desired)) == []
    assert diff(kernel.observe([DEVICE]), desired) == ()


def test_ipv6_entries(host: Namespace, kernel: NetlinkKernel) -> None:
    name = _tunnel(kernel, "2001:db8:1::1")
    gateway = ip_address("fd05:0:0:2::")
    desired = DesiredState(
        frozenset({name}),
        "eth0",
        frozenset({ip_network("fd05::/48")}),
        frozenset({Address(name, ip_interface("fd05:0:0:1::/128"))}),
        frozenset({Neighbour(name, gateway, "02:66:00:00:00:02")}),
        frozenset({FdbEntry(name, "02:66:00:00:00:02", ip_address("2001:db8:1::2"))}),
        frozenset({Route(ip_network("fd05:0:0:2::/64"), name, gateway, onlink=True)}),
    )
    assert kernel.apply(diff(kernel.observe([name]), desired)) == []
    assert diff(kernel.observe([name]), desired) == ()
    (route,) = [r for r in host.ip_json(f"-6 route show dev {name}") if r["dst"] == "fd05:0:0:2::/64"]
    assert (route["gateway"], route["metric"], route["flags"]) == ("fd05:0:0:2::", 1024, ["onlink"])


def test_one_refused_change_does_not_stop_the_others(kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    bad = Change("put", Route(ip_network("10.5.77.0/24"), DEVICE, ip_address("10.5.77.0")))
    nowhere = Change("put", Neighbour("nosuch0", ip_address("10.5.4.0"), MAC))
    good = diff(ObservedState(), _desired(3))
    failures = kernel.apply((good[0], bad, nowhere, *good[1:]))
    assert {f.change for f in failures} == {bad, nowhere}
    assert "Nexthop has invalid gateway" in str(next(f.error for f in failures if f.change == bad))
    assert diff(kernel.observe([DEVICE]), _desired(3)) == ()


def test_deleting_what_is_gone_is_success(kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    everything = [Change("delete", c.target) for c in diff(ObservedState(), _desired(2))]
    assert kernel.apply(everything) == []
    kernel.delete_link("nosuch0")


def test_V13_entries_of_the_kernel_are_neither_seen_nor_touched(host: Namespace, kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    host.run("bridge", "fdb", "append", "00:00:00:00:00:00", "dev", DEVICE, "dst", "192.0.2.9", "self", "permanent")
    host.run("bridge", "fdb", "append", "33:33:00:00:00:01", "dev", DEVICE, "dst", "192.0.2.9", "self", "permanent")
    assert kernel.observe([DEVICE]).fdb == frozenset()
    kernel.apply(diff(kernel.observe([DEVICE]), _desired(1)))
    shown = host.run("bridge", "fdb", "show", "dev", DEVICE)
    assert "00:00:00:00:00:00 dst 192.0.2.9" in shown
    assert "33:33:00:00:00:01 dst 192.0.2.9" in shown


def test_neighbours_that_are_not_permanent_are_not_ours(host: Namespace, kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    host.ip(f"neigh add 10.5.2.0 lladdr {MAC} dev {DEVICE} nud reachable")
    observed = kernel.observe([DEVICE])
    assert observed.neighbours == frozenset()
    kernel.apply(diff(observed, _desired(1)))
    (entry,) = host.ip_json(f"neigh show dev {DEVICE}")
    assert (entry["lladdr"], entry["state"]) == ("02:00:00:00:00:02", ["PERMANENT"])


def test_foreign_routes_survive_beside_ours(host: Namespace, kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    host.ip("route add 172.16.9.0/24 via 192.0.2.254 dev eth0")
    host.ip("route add 10.7.1.0/24 via 192.0.2.254 dev eth0")
    host.ip("route add 10.5.9.0/24 via 192.0.2.9 dev eth0 proto 142")
    host.ip("route add 10.5.8.0/24 via 192.0.2.8 dev eth0 table 77")
    kernel.apply(diff(kernel.observe([DEVICE]), _desired(1)))
    shown = host.ip("route show table all")
    for kept in ("172.16.9.0/24", "10.7.1.0/24", "10.5.8.0/24"):
        assert kept in shown
    assert "10.5.9.0/24" not in shown


def test_look_up_names_device_gateway_and_source(host: Namespace, kernel: NetlinkKernel) -> None:
    host.ip("route add default via 192.0.2.254")
    near, far = kernel.lookup(ip_address("192.0.2.7")), kernel.lookup(ip_address("198.51.100.7"))
    assert (near.device, near.gateway, near.source) == ("eth0", None, ip_address("192.0.2.1"))
    assert (far.device, far.gateway) == ("eth0", ip_address("192.0.2.254"))
    host.ip("route del default")
    with pytest.raises(KernelError, match=r"198\.51\.100\.7.*unreachable"):
        kernel.lookup(ip_address("198.51.100.7"))


def test_addresses_come_in_the_kernels_order_with_their_marks(host: Namespace, kernel: NetlinkKernel) -> None:
    host.ip("addr add 192.0.2.9/24 dev eth0")
    host.ip("addr add 203.0.113.7/24 dev eth0 valid_lft 1000 preferred_lft 0")
    found = [a for a in kernel.addresses() if a.device == "eth0" and a.family == 4]
    assert [str(a.interface) for a in found] == ["192.0.2.1/24", "203.0.113.7/24", "192.0.2.9/24"]
    assert [a.temporary for a in found] == [False, False, True]
    assert [a.deprecated for a in found] == [False, True, False]
    assert [a.dynamic for a in found] == [False, True, False]


def test_default_route_over_two_gateways_is_seen(host: Namespace, kernel: NetlinkKernel) -> None:
    host.ip("route add default nexthop via 192.0.2.253 dev eth0 nexthop via 192.0.2.254 dev eth0")
    (route,) = kernel.default_routes()
    assert (route.device, route.type, route.gateway) == ("eth0", "multipath", ip_address("192.0.2.253"))


def test_V07_checksum_offload_reads_back(host: Namespace, kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    assert kernel.set_tx_checksum(DEVICE, False) is False
    assert kernel.set_tx_checksum(DEVICE, True) is True
    with pytest.raises(KernelError, match="nosuch0"):
        kernel.set_tx_checksum("nosuch0", False)


def test_V14_sysctl_of_a_device_with_a_dot_in_its_name(kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    kernel.set_sysctl(f"net/ipv6/conf/{DEVICE}/accept_ra", "0")
    assert kernel.sysctl(f"net/ipv6/conf/{DEVICE}/accept_ra") == "0"
    assert kernel.sysctl("net/ipv6/conf/nosuch0/accept_ra") is None


def test_kernel_errors_carry_errno_and_object(kernel: NetlinkKernel) -> None:
    _tunnel(kernel)
    with pytest.raises(KernelError, match=r"create device flannel\.1: file exists") as caught:
        kernel.create_link(_spec(kernel))
    assert caught.value.errno == 17
    with pytest.raises(KernelError, match="nosuch0"):
        kernel.set_link("nosuch0", up=True)


def test_routes_marked_as_ours_on_a_foreign_device(host: Namespace, kernel: NetlinkKernel) -> None:
    route = Route(ip_network("10.5.2.0/24"), "eth0", ip_address("192.0.2.2"), protocol=PROTO_FLANNEL)
    desired = DesiredState(frozenset(), "eth0", frozenset({ip_network("10.5.0.0/16")}), routes=frozenset({route}))
    assert kernel.apply(diff(kernel.observe([]), desired)) == []
    assert "10.5.2.0/24 via 192.0.2.2 dev eth0 proto 142" in host.ip("route show")
    assert diff(kernel.observe([]), desired) == ()


@pytest.mark.parametrize(("text", "bridge"), [("10.5.1.0/24", "10.5.1.1/24"), ("fc00:5:0:1::/64", "fc00:5:0:1::1/64")])
def test_L49_a_blackhole_route_beside_a_bridge(host: Namespace, kernel: NetlinkKernel, text: str, bridge: str) -> None:
    subnet = ip_network(text)
    assert kernel.apply([Change("put", blackhole(subnet))]) == []
    assert blackhole(subnet) in kernel.observe([]).routes
    with pytest.raises(KernelError):
        kernel.lookup(subnet[9])
    host.ip("link add cni0 type bridge")
    host.ip("link set cni0 up")
    host.ip(f"addr add {bridge} dev cni0 nodad" if ":" in bridge else f"addr add {bridge} dev cni0")
    assert kernel.lookup(subnet[9]).device == "cni0"
    assert blackhole(subnet) in kernel.observe([]).routes
    assert kernel.apply([Change("put", blackhole(subnet))]) == []
    host.ip("link del cni0")
    assert [r for r in kernel.observe([]).routes if r.destination == subnet] == [blackhole(subnet)]
    assert kernel.apply([Change("delete", blackhole(subnet))] * 2) == []
    assert [r for r in kernel.observe([]).routes if r.destination == subnet] == []


def test_scope_of_a_route_without_gateway_is_corrected_in_place(host: Namespace, kernel: NetlinkKernel) -> None:
    wanted = Route(ip_network("10.5.0.0/16"), "eth0", protocol=PROTO_FLANNEL, scope="link")
    host.ip("route add 10.5.0.0/16 dev eth0 proto 142 scope global")
    desired = DesiredState(frozenset(), "eth0", frozenset({ip_network("10.4.0.0/14")}), routes=frozenset({wanted}))
    changes = diff(kernel.observe([]), desired)
    assert changes == (Change("put", wanted),)
    assert kernel.apply(changes) == []
    assert host.ip("-4 route show proto 142").splitlines() == ["10.5.0.0/16 dev eth0 scope link "]
    assert diff(kernel.observe([]), desired) == ()
    assert kernel.apply([Change("put", replace(wanted, scope="global"))]) == []
    assert host.ip("-4 route show proto 142").splitlines() == ["10.5.0.0/16 dev eth0 "]
    assert kernel.apply([Change("delete", wanted)]) == []
    assert host.ip("-4 route show proto 142") == ""


def test_H02_ipv6_route_of_another_device_is_replaced(host: Namespace, kernel: NetlinkKernel) -> None:
    name = _tunnel(kernel, "2001:db8:1::1")
    route = Route(ip_network("fd05:0:0:2::/64"), name, ip_address("fd05:0:0:2::"), onlink=True)
    host.ip("-6 route add fd05:0:0:2::/64 via 2001:db8:1::fe dev eth0")
    desired = DesiredState(frozenset({name}), "eth0", frozenset({ip_network("fd05::/48")}), routes=frozenset({route}))
    assert kernel.apply(diff(kernel.observe([name]), desired)) == []
    assert diff(kernel.observe([name]), desired) == ()


def test_protocols_of_generic_netlink_have_numbers() -> None:
    with closing(NetlinkSocket(NETLINK_GENERIC)) as channel:
        assert number_of(channel, "nlctrl") == 16  # GENL_ID_CTRL, the only one that is the same everywhere
        assert number_of(channel, "flannel-test") == 0
