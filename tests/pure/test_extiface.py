from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address, ip_interface, ip_network

import pytest

from backends.dataplane.model import Address, Link, Route
from flanneld.extiface import HostView, Wish, candidates, choose, inventory, still_there
from subnet.errors import InterfaceError, KernelError
from subnet.model import Family, IPAddress

pytestmark = pytest.mark.pure

V4: tuple[Family, ...] = (4,)
V6: tuple[Family, ...] = (6,)
DUAL: tuple[Family, ...] = (4, 6)


def _view(
    devices: Mapping[str, Sequence[str]],
    *,
    default: str | None = None,
    default6: str | None = None,
    reach: tuple[str, str] | None = None,
    mtu_bytes: int = 1500,
    more: Sequence[Address] = (),
) -> HostView:
    links = {
        name: Link(name, index, "veth", "02:00:00:00:00:01", mtu_bytes, True) for index, name in enumerate(devices, 2)
    }
    links["lo"] = Link("lo", 1, "", "", 65536, True, loopback=True)
    addresses = [Address("lo", ip_interface("127.0.0.1/8"), scope="host"), Address("lo", ip_interface("::1/128"))]
    addresses += [Address(name, ip_interface(text)) for name, texts in devices.items() for text in texts]
    routes = []
    if default:
        routes.append(Route(ip_network("0.0.0.0/0"), default, ip_address("192.0.2.254")))
    if default6:
        routes.append(Route(ip_network("::/0"), default6, ip_address("2001:db8:1::fe")))

    def lookup(target: IPAddress) -> Route:
        if reach is None:
            raise KernelError("look up route to", target, 101, "network is unreachable")
        return Route(ip_network(target), reach[0], source=ip_address(reach[1]))

    return HostView(links, [*addresses, *more], routes, lookup)


TWO = {"eth0": ["198.51.100.1/24", "2001:db8:2::1/64"], "eth1": ["192.0.2.1/24", "2001:db8:1::1/64"]}


def _chosen(wish: Wish, view: HostView, families: Sequence[Family] = V4) -> tuple[str, str | None, str | None]:
    found = choose(wish, families, view)
    return found.name, str(found.v4) if found.v4 else None, str(found.v6) if found.v6 else None


@pytest.mark.parametrize(
    ("wish", "families", "expected"),
    [
        (Wish(iface=("eth1",)), V4, ("eth1", "192.0.2.1", None)),
        (Wish(iface=("192.0.2.1",)), V4, ("eth1", "192.0.2.1", None)),
        (Wish(iface=("nosuch0", "eth1")), V4, ("eth1", "192.0.2.1", None)),
        (Wish(iface=("nosuch0",), iface_regex=("^eth1$",)), V4, ("eth1", "192.0.2.1", None)),
        (Wish(iface_regex=(r"192\.0\.2\.",)), V4, ("eth1", "192.0.2.1", None)),
        (Wish(iface_regex=("1",)), V4, ("eth0", "198.51.100.1", None)),
        (Wish(), V4, ("eth0", "198.51.100.1", None)),
        (Wish(), V6, ("eth0", None, "2001:db8:2::1")),
        (Wish(), DUAL, ("eth0", "198.51.100.1", "2001:db8:2::1")),
        (Wish(iface=("eth1",)), DUAL, ("eth1", "192.0.2.1", "2001:db8:1::1")),
        (Wish(iface=("192.0.2.1",)), DUAL, ("eth1", "192.0.2.1", "2001:db8:1::1")),
        (Wish(iface=("2001:db8:1::1",)), DUAL, ("eth1", "192.0.2.1", "2001:db8:1::1")),
        (Wish(iface=("2001:db8:1::1",)), V6, ("eth1", None, "2001:db8:1::1")),
        (Wish(iface_regex=(r"192\.0\.2\.|2001:db8:1:",)), DUAL, ("eth1", "192.0.2.1", "2001:db8:1::1")),
        (Wish(public_ip=ip_address("192.0.2.1")), V4, ("eth1", "192.0.2.1", None)),  # type: ignore[arg-type]
        (Wish(public_ipv6=ip_address("2001:db8:1::1")), V6, ("eth1", None, "2001:db8:1::1")),  # type: ignore[arg-type]
    ],
    ids=[
        "name",
        "address",
        "first-that-fits",
        "regex-after-names",
        "S05-regex-on-address",
        "addresses-before-names",
        "default-route",
        "default-route-v6",
        "default-route-dual",
        "name-dual",
        "S07-v4-address",
        "S07-v6-address",
        "v6-address",
        "regex-dual",
        "S03-public-ip",
        "public-ipv6",
    ],
)
def test_every_way_to_say_it(wish: Wish, families: Sequence[Family], expected: tuple[str, str, str]) -> None:
    assert _chosen(wish, _view(TWO, default="eth0", default6="eth0"), families) == expected


def test_S03_public_ip_brings_its_interface_and_mtu() -> None:
    view = _view(TWO, default="eth0")
    view.links["eth1"] = Link("eth1", 3, "veth", "", 9000, True)  # type: ignore[index]
    found = choose(Wish(public_ip=ip_address("192.0.2.1")), V4, view)  # type: ignore[arg-type]
    assert (found.name, found.mtu_bytes, found.public_v4) == ("eth1", 9000, ip_address("192.0.2.1"))


def test_nat_address_beside_an_interface() -> None:
    found = choose(Wish(iface=("eth1",), public_ip=ip_address("203.0.113.5")), V4, _view(TWO))  # type: ignore[arg-type]
    assert (found.v4, found.public_v4) == (ip_address("192.0.2.1"), ip_address("203.0.113.5"))


def test_bare_nat_address_is_explained() -> None:
    with pytest.raises(InterfaceError, match=r"203\.0\.113\.5.*needs --iface"):
        choose(Wish(public_ip=ip_address("203.0.113.5")), V4, _view(TWO, default="eth0"))  # type: ignore[arg-type]


def test_S04_regex_matches_the_second_address_and_uses_it() -> None:
    view = _view({"eth0": ["203.0.113.7/24", "10.64.3.9/24"]})
    found = choose(Wish(iface_regex=(r"10\.64\..*",)), V4, view)
    assert (found.name, str(found.v4), str(found.public_v4)) == ("eth0", "10.64.3.9", "10.64.3.9")


@pytest.mark.parametrize("order", [("eth0", "eth1", "eth2"), ("eth2", "eth1", "eth0"), ("eth1", "eth0", "eth2")])
def test_S05_regex_takes_the_interface_that_matched(order: Sequence[str]) -> None:
    view = _view({name: [f"192.0.2.{name[-1]}/24"] for name in order})
    assert _chosen(Wish(iface_regex=("eth1",)), view)[0] == "eth1"
    assert _chosen(Wish(iface_regex=(r"\.1$",)), view)[0] == "eth1"


def test_S13_global_address_goes_before_link_local() -> None:
    view = _view({"eth0": ["169.254.9.9/16", "192.0.2.1/24"]}, default="eth0")
    assert _chosen(Wish(), view)[1] == "192.0.2.1"


def test_candidates_permanent_then_primary_then_kernel_order() -> None:
    texts = {"dynamic": "192.0.2.5/24", "secondary": "192.0.2.6/24", "plain": "192.0.2.7/24", "later": "192.0.2.8/24"}
    more = [
        Address("eth0", ip_interface(texts["dynamic"]), dynamic=True),
        Address("eth0", ip_interface(texts["secondary"]), temporary=True),
        Address("eth0", ip_interface(texts["plain"])),
        Address("eth0", ip_interface(texts["later"])),
        Address("eth0", ip_interface("192.0.2.9/24"), deprecated=True),
        Address("eth0", ip_interface("192.0.2.10/24"), tentative=True),
    ]
    found = candidates(_view({"eth0": []}, more=more), "eth0", 4)
    assert [str(a.interface) for a in found] == [
        texts["plain"], texts["later"], texts["secondary"], texts["dynamic"],
    ]  # fmt: skip


def test_can_reach_takes_the_routes_device_and_source() -> None:
    view = _view(TWO, reach=("eth1", "192.0.2.1"))
    assert _chosen(Wish(iface_can_reach=ip_address("192.0.2.254")), view) == ("eth1", "192.0.2.1", None)


def test_can_reach_by_ipv6_with_ipv4_enabled() -> None:
    view = _view(TWO, reach=("eth1", "2001:db8:1::1"))
    assert _chosen(Wish(iface_can_reach=ip_address("2001:db8:9::1")), view) == ("eth1", "192.0.2.1", None)


@pytest.mark.parametrize(
    ("wish", "families", "says"),
    [
        (Wish(iface=("nosuch0",)), V4, "nosuch0"),
        (Wish(iface=("192.0.2.77",)), V4, "no interface has address 192.0.2.77"),
        (Wish(iface_regex=("^wg",)), V4, "matches no address and no name"),
        (Wish(iface_can_reach=ip_address("192.0.2.254")), V4, "network is unreachable"),
        (Wish(), V4, "no IPv4 default route"),
        (Wish(iface=("eth2",)), DUAL, "eth2 has no IPv6 address"),
        (Wish(iface=("eth3",)), V4, "eth3 has no IPv4 address"),
    ],
)
def test_O03_every_miss_tells_what_exists(wish: Wish, families: Sequence[Family], says: str) -> None:
    view = _view({**TWO, "eth2": ["10.0.0.1/8"], "eth3": []})
    with pytest.raises(InterfaceError) as caught:
        choose(wish, families, view)
    assert says in str(caught.value)
    for part in ("eth0 (up; 198.51.100.1/24", "eth1", "lo (up; 127.0.0.1/8"):
        assert part in str(caught.value)


def test_S07_addresses_on_two_interfaces_are_refused() -> None:
    view = _view({"eth0": ["192.0.2.1/24"], "eth1": ["2001:db8:1::1/64"]})
    with pytest.raises(InterfaceError, match="eth0 has no IPv6 address"):
        choose(Wish(iface=("192.0.2.1",)), DUAL, view)


def test_default_routes_on_two_interfaces_are_refused_for_dual_stack() -> None:
    with pytest.raises(InterfaceError, match="different interfaces: eth0, eth1"):
        choose(Wish(), DUAL, _view(TWO, default="eth0", default6="eth1"))


def test_default_route_over_a_down_interface_does_not_count() -> None:
    view = _view(TWO, default="eth0")
    view.links["eth0"] = Link("eth0", 2, "veth", "", 1500, False)  # type: ignore[index]
    with pytest.raises(InterfaceError, match="no IPv4 default route"):
        choose(Wish(), V4, view)


def test_default_route_with_the_lowest_metric_wins() -> None:
    view = _view(TWO)
    routes = [
        Route(ip_network("0.0.0.0/0"), "eth0", ip_address("198.51.100.254"), metric=200),
        Route(ip_network("0.0.0.0/0"), "eth1", ip_address("192.0.2.254"), metric=100),
    ]
    assert choose(Wish(), V4, HostView(view.links, view.addresses, routes, view.lookup)).name == "eth1"


def test_multipath_default_route_uses_its_first_hop() -> None:
    view = _view(TWO)
    route = Route(ip_network("0.0.0.0/0"), "eth1", ip_address("192.0.2.254"), type="multipath")
    assert choose(Wish(), V4, HostView(view.links, view.addresses, [route], view.lookup)).name == "eth1"


def test_mtu_zero_is_refused() -> None:
    with pytest.raises(InterfaceError, match="MTU 0"):
        choose(Wish(iface=("eth0",)), V4, _view(TWO, mtu_bytes=0))


def test_still_there_sees_a_lost_address_and_a_new_device() -> None:
    chosen = choose(Wish(iface=("eth1",)), V4, _view(TWO))
    assert still_there(chosen, _view(TWO))
    assert not still_there(chosen, _view({"eth0": [], "eth1": ["192.0.2.31/24"]}))
    assert not still_there(chosen, _view({"eth1": ["192.0.2.1/24"]}))
    assert not still_there(chosen, _view({"eth0": []}))


def test_inventory_shows_state_and_addresses() -> None:
    assert "eth1 (up; 192.0.2.1/24, 2001:db8:1::1/64)" in inventory(_view(TWO))
