from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from ipaddress import ip_address

import pytest

from backends.dataplane.devices import DeviceKeeper, Mend, mend, random_mac, rebuild_reason
from backends.dataplane.model import Address, Change, Link, LinkSpec, ObservedState, Route, Vxlan
from backends.dataplane.ports import Failure
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
        (replace(LINK, vxlan=replace(VXLAN, vni=9)), "VNI 9"),
        (replace(LINK, vxlan=replace(VXLAN, lower_index=3)), "lower device index 3"),
        (replace(LINK, vxlan=replace(VXLAN, local=ip_address("192.0.2.77"))), "local address 192.0.2.77"),
        (replace(LINK, vxlan=replace(VXLAN, port=8473)), "port 8473"),
        (replace(LINK, vxlan=replace(VXLAN, gbp=True)), "GBP True"),
        (replace(LINK, vxlan=replace(VXLAN, multicast=True)), "a multicast group"),
        (replace(LINK, vxlan=replace(VXLAN, l2miss=True)), "l2miss"),
        (replace(LINK, kind="bridge", vxlan=None), "its kind is bridge"),
        (replace(LINK, mtu_bytes=1400), ""),
        (replace(LINK, vxlan=replace(VXLAN, learning=True)), ""),
    ],
    ids=lambda value: f"V12-{value}" if isinstance(value, str) else None,
)
def test_only_what_cannot_be_changed_in_place_needs_a_new_device(link: Link, says: str) -> None:
    assert rebuild_reason(link, SPEC) == says


def test_V19_a_port_of_its_own_needs_a_new_device() -> None:
    assert rebuild_reason(LINK, replace(SPEC, vxlan=replace(VXLAN, port=8473))) == "port 8472"


@pytest.mark.parametrize(
    ("link", "spec", "change"),
    [
        (LINK, SPEC, Mend()),
        (replace(LINK, mtu_bytes=1400), SPEC, Mend(mtu_bytes=1450)),
        (replace(LINK, up=False), SPEC, Mend(up=True)),
        (replace(LINK, vxlan=replace(VXLAN, learning=True)), SPEC, Mend(learning=False)),
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
        self.offload = True
        self.offload_fixed = False
        self.calls: list[str] = []

    def links(self) -> dict[str, Link]:
        return dict(self.held)

    def create_link(self, spec: LinkSpec) -> None:
        self.calls.append(f"create {spec.name} {spec.mac}")
        for link in self.held.values():
            if link.vxlan and link.vxlan.vni == spec.vxlan.vni:
                raise KernelError("create", f"device {spec.name}", 17, "file exists")
        vxlan = replace(spec.vxlan, port=spec.vxlan.port or 8472)
        self.held[spec.name] = Link(spec.name, self.next_index, "vxlan", spec.mac, spec.mtu_bytes, False, vxlan)
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
    ) -> None:
        self.calls.append(f"set {name}")
        link = self.held[name]
        self.held[name] = replace(
            link, up=link.up if up is None else up, mtu_bytes=mtu_bytes or link.mtu_bytes, mac=mac or link.mac
        )

    def sysctl(self, key: str) -> str | None:
        return self.sysctls.get(key)

    def set_sysctl(self, key: str, value: str) -> None:
        self.sysctls[key] = value

    def set_tx_checksum(self, name: str, enabled: bool) -> bool:
        self.calls.append(f"tx-checksum {enabled}")
        if not self.offload_fixed:
            self.offload = enabled
        return self.offload

    def addresses(self) -> tuple[Address, ...]:
        return ()

    def routes(self) -> frozenset[Route]:
        return frozenset()

    def observe(self, devices: Collection[str]) -> ObservedState:
        return ObservedState()

    def apply(self, changes: Sequence[Change]) -> list[Failure]:
        return []

    def lookup(self, target: IPAddress) -> Route:
        raise KernelError("look up route to", target, 101)


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
    kernel = FakeKernel(replace(LINK, vxlan=replace(VXLAN, vni=9)))
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
