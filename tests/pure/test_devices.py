from __future__ import annotations

import errno
from collections.abc import Collection, Sequence
from dataclasses import replace
from ipaddress import IPv4Address, ip_address, ip_interface, ip_network

import pytest

from backends.dataplane.devices import DeviceKeeper, Mend, mend, random_mac, rebuild_reason
from backends.dataplane.model import (
    Address,
    Change,
    Ip6Tunnel,
    Ipip,
    Link,
    LinkSpec,
    Route,
    Tunnel,
    Vxlan,
    Wireguard,
    WireguardPeer,
)
from backends.dataplane.packed import Entries, Packer
from backends.dataplane.ports import Failure, See
from subnet.errors import KernelError
from subnet.model import IPAddress

pytestmark = pytest.mark.pure

MAC = "02:00:00:00:00:01"
OTHER_MAC = "02:00:00:00:00:02"
VXLAN = Vxlan(1, 8472, ip_address("192.0.2.1"), 2)
SPEC = LinkSpec("flannel.1", 4, replace(VXLAN, port=0), 1450, MAC)
LINK = Link("flannel.1", 5, "vxlan", MAC, 1450, True, VXLAN)


@pytest.mark.parametrize(
    ("link", "says"),
    [
        (LINK, ""),
        (replace(LINK, kind="ipip", tunnel=Ipip(None)), "kind ipip"),
        (replace(LINK, tunnel=replace(VXLAN, vni=9)), "VNI 9"),
        (replace(LINK, tunnel=replace(VXLAN, lower_index=3)), "lower device index 3"),
        (replace(LINK, tunnel=replace(VXLAN, local=ip_address("192.0.2.77"))), "local address 192.0.2.77"),
        (replace(LINK, tunnel=replace(VXLAN, port=8473)), "port 8473"),
        (replace(LINK, tunnel=replace(VXLAN, gbp=True)), "GBP True"),
        (replace(LINK, tunnel=replace(VXLAN, multicast=True)), "a multicast group"),
        (replace(LINK, tunnel=replace(VXLAN, l2miss=True)), "l2miss"),
        (replace(LINK, kind="bridge", tunnel=None), "kind bridge"),
        (replace(LINK, mtu_bytes=1400), ""),
        (replace(LINK, tunnel=replace(VXLAN, learning=True)), ""),
    ],
    ids=lambda value: f"V12-{value}" if isinstance(value, str) else None,
)
def test_only_what_cannot_be_changed_in_place_needs_a_new_device(link: Link, says: str) -> None:
    assert rebuild_reason(link, SPEC) == says


def test_V19_a_port_of_its_own_needs_a_new_device() -> None:
    assert rebuild_reason(LINK, replace(SPEC, tunnel=replace(VXLAN, port=8473))) == "port 8472"


@pytest.mark.parametrize(
    ("link", "spec", "change"),
    [
        (LINK, SPEC, Mend()),
        (replace(LINK, mtu_bytes=1400), SPEC, Mend(mtu_bytes=1450)),
        (replace(LINK, up=False), SPEC, Mend(up=True)),
        (replace(LINK, tunnel=replace(VXLAN, learning=True)), SPEC, Mend(learning=False)),
        (replace(LINK, mac=OTHER_MAC), SPEC, Mend()),
        (replace(LINK, mac=OTHER_MAC), replace(SPEC, binding=True), Mend(mac=MAC)),
        (replace(LINK, mac=OTHER_MAC), replace(SPEC, binding=True, mac=""), Mend()),
    ],
)
def test_the_rest_is_changed_in_place(link: Link, spec: LinkSpec, change: Mend) -> None:
    assert mend(link, spec) == change


def test_random_mac_is_unicast_and_locally_administered() -> None:
    assert random_mac(lambda bits: (1 << bits) - 1) == "fe:ff:ff:ff:ff:ff"
    assert random_mac(lambda bits: 0) == "02:00:00:00:00:00"
    assert random_mac() != random_mac()


class FakeKernel:
    """Devices only; keeps what a kernel would keep of them."""

    def __init__(self, *links: Link) -> None:
        self.held = {link.name: link for link in links}
        self.next_index = 10
        self.sysctls = {"net/ipv6/conf/flannel.1/accept_ra": "1"}
        self.sysctls_read_only = False
        self.offload = True
        self.offload_fixed = False
        self.calls: list[str] = []
        self.addresses_held: tuple[Address, ...] = ()

    def links(self) -> dict[str, Link]:
        return dict(self.held)

    def create_link(self, spec: LinkSpec) -> None:
        self.calls.append(f"create {spec.name} {spec.mac}")
        for link in self.held.values():
            if _rivals(link.tunnel, spec.tunnel):
                raise KernelError("create", f"device {spec.name}", 17, "file exists")
        tunnel = spec.tunnel
        if isinstance(tunnel, Vxlan):
            tunnel = replace(tunnel, port=tunnel.port or 8472)
        self.held[spec.name] = Link(spec.name, self.next_index, tunnel.kind, spec.mac, spec.mtu_bytes, False, tunnel)
        self.next_index += 1

    def delete_link(self, name: str) -> None:
        self.calls.append(f"delete {name}")
        self.held.pop(name, None)

    def set_link(
        self,
        name: str,
        *,
        up: bool | None = None,
        mtu_bytes: int | None = None,
        mac: str | None = None,
        learning: bool | None = None,
        wireguard: Wireguard | None = None,
    ) -> None:
        self.calls.append(f"set {name}")
        link = self.held[name]
        self.held[name] = replace(
            link,
            up=link.up if up is None else up,
            mtu_bytes=mtu_bytes or link.mtu_bytes,
            mac=mac or link.mac,
            tunnel=wireguard or link.tunnel,
        )

    def sysctl(self, key: str) -> str | None:
        return self.sysctls.get(key)

    def set_sysctl(self, key: str, value: str) -> None:
        if self.sysctls_read_only:
            raise KernelError("write", f"/proc/sys/{key}", errno.EROFS, "Read-only file system")
        self.sysctls[key] = value

    def set_tx_checksum(self, name: str, enabled: bool) -> bool:
        self.calls.append(f"tx-checksum {enabled}")
        if not self.offload_fixed:
            self.offload = enabled
        return self.offload

    def remove_programs(self, keep: Collection[int]) -> list[str]:
        return []

    def addresses(self) -> tuple[Address, ...]:
        return self.addresses_held

    def default_routes(self) -> frozenset[Route]:
        return frozenset()

    def survey(self, devices: Collection[str], packer: Packer, see: See) -> frozenset[WireguardPeer]:
        return frozenset()

    def put(self, entries: Entries, packer: Packer) -> list[Failure]:
        return []

    def apply(self, changes: Sequence[Change]) -> list[Failure]:
        return []

    def lookup(self, target: IPAddress) -> Route:
        raise KernelError("look up route to", target, 101)


def _rivals(have: Tunnel | None, want: Tunnel) -> bool:
    if isinstance(have, Vxlan) and isinstance(want, Vxlan):
        return have.vni == want.vni
    if isinstance(have, Ipip) and isinstance(want, Ipip):
        # Whether packets travel in UDP does not tell tunnels apart (net/ipv4/ip_tunnel.c, ip_tunnel_find).
        return (have.local, have.remote) == (want.local, want.remote)
    return have == want


def test_missing_device_is_made_with_the_mac_that_peers_know() -> None:
    kernel = FakeKernel()
    links = DeviceKeeper(kernel).ensure([SPEC])
    assert links["flannel.1"].mac == MAC
    assert links["flannel.1"].up


def test_missing_device_without_history_gets_a_new_mac() -> None:
    kernel = FakeKernel()
    links = DeviceKeeper(kernel, new_mac=lambda: OTHER_MAC).ensure([replace(SPEC, mac="")])
    assert links["flannel.1"].mac == OTHER_MAC


def test_V12_equal_device_is_left_alone() -> None:
    kernel = FakeKernel(LINK)
    links = DeviceKeeper(kernel).ensure([replace(SPEC, mac=OTHER_MAC)])
    assert links["flannel.1"] == LINK
    assert kernel.calls == []


def test_V12_incompatible_device_is_rebuilt_with_its_mac() -> None:
    kernel = FakeKernel(replace(LINK, tunnel=replace(VXLAN, vni=9)))
    links = DeviceKeeper(kernel).ensure([replace(SPEC, mac=OTHER_MAC)])
    assert links["flannel.1"].index == 10
    assert links["flannel.1"].mac == MAC


def test_V04_mac_changed_behind_our_back_is_restored() -> None:
    kernel = FakeKernel(replace(LINK, mac=OTHER_MAC))
    links = DeviceKeeper(kernel).ensure([replace(SPEC, binding=True)])
    assert links["flannel.1"].mac == MAC
    assert links["flannel.1"].index == LINK.index


def test_V14_router_advertisements_are_not_accepted() -> None:
    kernel = FakeKernel()
    DeviceKeeper(kernel).ensure([SPEC])
    assert kernel.sysctls["net/ipv6/conf/flannel.1/accept_ra"] == "0"


@pytest.mark.parametrize(("accepted", "forwarding", "heard"), [("1", "1", 0), ("1", "0", 1), ("2", "1", 1)])
def test_V14_container_whose_proc_sys_is_read_only(
    accepted: str, forwarding: str, heard: int, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = FakeKernel()
    kernel.sysctls_read_only = True
    conf = "net/ipv6/conf/flannel.1"
    kernel.sysctls = {f"{conf}/accept_ra": accepted, f"{conf}/forwarding": forwarding}
    keeper = DeviceKeeper(kernel)
    for _ in range(2):
        assert "flannel.1" in keeper.ensure([SPEC])
    assert [record.levelname for record in caplog.records if "accept_ra" in record.getMessage()] == ["WARNING"] * heard


def test_V07_checksum_offload_is_switched_off_on_demand_and_after_a_rebuild() -> None:
    kernel = FakeKernel()
    keeper = DeviceKeeper(kernel, tx_checksum=False)
    keeper.ensure([SPEC])
    assert not kernel.offload
    kernel.offload = True
    kernel.delete_link("flannel.1")
    keeper.ensure([SPEC])
    assert not kernel.offload


def test_V07_driver_that_refuses_is_asked_once_and_no_failure() -> None:
    kernel = FakeKernel()
    kernel.offload_fixed = True
    keeper = DeviceKeeper(kernel, tx_checksum=False)
    keeper.ensure([SPEC])
    keeper.ensure([SPEC])
    assert kernel.calls.count("tx-checksum False") == 1


def test_device_that_holds_the_vni_under_another_name_is_named() -> None:
    rival = replace(LINK, name="vx0")
    with pytest.raises(KernelError, match="device vx0 has VNI 1 and the same port"):
        DeviceKeeper(FakeKernel(rival)).ensure([SPEC])


LOCAL = IPv4Address("192.0.2.1")
IPIP = LinkSpec("flannel.ipip", 4, Ipip(LOCAL), 1480)
IPIP_LINK = Link("flannel.ipip", 5, "ipip", "c0:00:02:01", 1480, True, Ipip(LOCAL))
TUNL0 = Link("tunl0", 3, "ipip", "00:00:00:00", 1480, True, Ipip(None))
IP6 = LinkSpec("flannel-v6.ipip", 6, Ip6Tunnel(), 1460)


@pytest.mark.parametrize(
    ("tunnel", "says"),
    [
        (Ipip(LOCAL), ""),
        (Ipip(None), "local address any"),
        (Ipip(IPv4Address("192.0.2.9")), "local address 192.0.2.9"),
        (Ipip(LOCAL, IPv4Address("192.0.2.2")), "remote address 192.0.2.2"),
        (Ipip(LOCAL, fou_port=8285), "UDP port 8285"),
    ],
)
def test_W08_ipip_device_with_other_ends_is_rebuilt(tunnel: Ipip, says: str) -> None:
    assert rebuild_reason(replace(IPIP_LINK, tunnel=tunnel), IPIP) == says
    kernel = FakeKernel(TUNL0, replace(IPIP_LINK, tunnel=tunnel))
    made = DeviceKeeper(kernel).ensure([IPIP])["flannel.ipip"]
    assert (made.tunnel, made.mtu_bytes, made.up) == (Ipip(LOCAL), 1480, True)
    assert (made.index == IPIP_LINK.index) is (says == "")
    assert kernel.held["tunl0"] == TUNL0


def test_ipip_device_gets_no_mac_and_its_mtu_is_corrected_in_place() -> None:
    kernel = FakeKernel()
    DeviceKeeper(kernel).ensure([IPIP, IP6])
    assert kernel.calls[0] == "create flannel.ipip "
    kernel = FakeKernel(replace(IPIP_LINK, mtu_bytes=1476))
    assert DeviceKeeper(kernel).ensure([IPIP])["flannel.ipip"] == IPIP_LINK
    assert kernel.calls == ["set flannel.ipip"]


def test_device_of_another_kind_is_not_taken_away() -> None:
    foreign = replace(IPIP_LINK, kind="gre", tunnel=None)
    kernel = FakeKernel(foreign)
    with pytest.raises(KernelError, match=r"flannel\.ipip: it is of kind gre, not ipip; remove it: ip link delete"):
        DeviceKeeper(kernel).ensure([IPIP])
    assert kernel.held["flannel.ipip"] == foreign


def test_ip6_device_with_fixed_ends_is_rebuilt_and_a_second_external_one_is_named() -> None:
    fixed = Link("flannel-v6.ipip", 7, "ip6tnl", "", 1460, True, Ip6Tunnel(external=False))
    assert DeviceKeeper(FakeKernel(fixed)).ensure([IP6])["flannel-v6.ipip"].tunnel == Ip6Tunnel()
    rival = Link("cilium_ipip6", 7, "ip6tnl", "", 1460, True, Ip6Tunnel())
    with pytest.raises(KernelError, match="device cilium_ipip6 is external already"):
        DeviceKeeper(FakeKernel(rival)).ensure([IP6])


def test_device_that_holds_the_local_address_is_named() -> None:
    rival = replace(IPIP_LINK, name="mytunnel")
    with pytest.raises(KernelError, match="device mytunnel has the same local address"):
        DeviceKeeper(FakeKernel(rival)).ensure([IPIP])


def test_a_device_of_an_earlier_configuration_that_holds_the_local_address_makes_room() -> None:
    left = replace(IPIP_LINK, name="flannel.fou", tunnel=Ipip(LOCAL, fou_port=8285))
    networks = frozenset({ip_network("10.5.0.0/16")})
    kernel = FakeKernel(left)
    with pytest.raises(KernelError, match=r"device flannel\.fou has the same local address"):
        DeviceKeeper(kernel).ensure([IPIP], networks)  # without an address it may be another daemon's
    kernel.addresses_held = (Address("flannel.fou", ip_interface("10.5.1.0/32")),)
    with pytest.raises(KernelError, match=r"device flannel\.fou has the same local address"):
        DeviceKeeper(kernel).ensure([IPIP], frozenset({ip_network("10.6.0.0/16")}))
    assert DeviceKeeper(kernel).ensure([IPIP], networks)["flannel.ipip"].up
    assert set(kernel.held) == {"flannel.ipip"}


WG = Wireguard(51820, "secret")
WG_SPEC = LinkSpec("flannel-wg", 4, WG, 1420)
WG_LINK = Link("flannel-wg", 5, "wireguard", "", 1420, True, replace(WG, public_key="public"))


@pytest.mark.parametrize(
    ("link", "spec", "change"),
    [
        (WG_LINK, WG_SPEC, Mend()),
        (WG_LINK, replace(WG_SPEC, tunnel=replace(WG, port=0)), Mend()),
        (WG_LINK, replace(WG_SPEC, tunnel=replace(WG, port=51999)), Mend(wireguard=replace(WG, port=51999))),
        (replace(WG_LINK, tunnel=replace(WG, private_key="other")), WG_SPEC, Mend(wireguard=WG)),
        (replace(WG_LINK, mtu_bytes=1500, up=False), WG_SPEC, Mend(mtu_bytes=1420, up=True)),
    ],
)
def test_W07_a_wireguard_device_is_never_rebuilt(link: Link, spec: LinkSpec, change: Mend) -> None:
    assert rebuild_reason(link, spec) == ""
    assert mend(link, spec) == change


def test_W07_a_lost_wireguard_device_comes_back_with_its_key_and_without_mac(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    kernel = FakeKernel(replace(WG_LINK, tunnel=replace(WG, private_key="other", port=1)))
    assert DeviceKeeper(kernel).ensure([WG_SPEC])["flannel-wg"].tunnel == WG
    kernel.delete_link("flannel-wg")
    made = DeviceKeeper(kernel).ensure([WG_SPEC])["flannel-wg"]
    assert (made.tunnel, made.mac, made.up) == (WG, "", True)
    assert "wireguard port 51820" in caplog.text
    assert "secret" not in caplog.text
    assert "other" not in caplog.text


def test_a_device_of_another_kind_is_not_taken_away() -> None:
    kernel = FakeKernel(Link("flannel-wg", 5, "bridge", MAC, 1500, True))
    with pytest.raises(KernelError, match="of kind bridge, not wireguard; remove it"):
        DeviceKeeper(kernel).ensure([WG_SPEC])
    assert kernel.calls == []


def test_a_taken_port_is_named() -> None:
    class Taken(FakeKernel):
        def set_link(self, name: str, **_: object) -> None:
            raise KernelError("set state up on", name, 98, "address already in use")

    with pytest.raises(KernelError, match="state up on flannel-wg: address already in use: UDP port 51820 is taken"):
        DeviceKeeper(Taken()).ensure([WG_SPEC])


def test_a_kernel_without_the_module_is_said() -> None:
    class Old(FakeKernel):
        def create_link(self, spec: LinkSpec) -> None:
            raise KernelError("create", f"device {spec.name}", 95, "operation not supported")

    with pytest.raises(KernelError, match=r"create device flannel-wg: .*no devices of kind wireguard; is its module"):
        DeviceKeeper(Old()).ensure([WG_SPEC])
