from __future__ import annotations

import socket
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address

import pytest

from backends import load_backend
from backends.api import CarryingBackend, ExternalInterface, Setting
from backends.dataplane.model import Address, Ipip, LinkSpec, Route
from backends.kernel import fdstore, fou
from backends.kernel.fdstore import FdStore
from backends.kernel.fou import FouPort
from backends.udp.fou import DEVICE, FouBackend, FouCarrier
from backends.udp.user import UdpBackend
from subnet.config import parse_network_config
from subnet.errors import ConfigError, KernelError
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.wire import encode_attrs
from tests.support.fake_kernel import FakeKernel

pytestmark = pytest.mark.pure

NETWORK = IPv4Network("10.5.0.0/16")
LOCAL = IPv4Address("192.0.2.1")
OWN = Subnets(IPv4Network("10.5.1.0/24"))
HAZARD = "eth0 (veth) hands packets on with unfinished checksums"


def nothing() -> None:
    return None


def setting(
    path: str, more: str = "", local: IPv4Address | None = LOCAL, public: IPv4Address | None = LOCAL
) -> Setting:
    text = f'{{"Network":"{NETWORK}"{more},"Backend":{{"Type":"udp","DataPath":"{path}"}}}}'
    v6 = IPv6Address("2001:db8::1")
    interface = ExternalInterface("eth0", 2, 1500, local, v6, public_v4=public, public_v6=v6)
    return Setting(parse_network_config(text, "test"), interface, frozenset({NETWORK}))


def backend(more: str = "", local: IPv4Address | None = LOCAL, public: IPv4Address | None = LOCAL) -> FouBackend:
    made = load_backend(setting("Fou", more, local, public))
    assert isinstance(made, FouBackend)
    assert isinstance(made, CarryingBackend)
    return made


def lease(number: int, kind: str = "") -> Lease:
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number}"), None, kind)
    return Lease(Subnets(IPv4Network(f"10.5.{number}.0/24")), attrs, f"10.5.{number}.0-24", revision=number)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> set[FouPort]:
    """The kernel's ports, played."""
    there: set[FouPort] = set()
    monkeypatch.setattr(fou, "ports", lambda: frozenset(there))
    monkeypatch.setattr(fou, "add", there.add)
    monkeypatch.setattr(fou, "remove", there.discard)
    return there


@pytest.mark.parametrize("path", ["auto", "user", "AUTO"])
def test_the_kernel_carries_only_where_it_was_asked_for(path: str) -> None:
    assert isinstance(load_backend(setting(path)), UdpBackend)


def test_peers_are_told_what_every_data_path_tells_them() -> None:
    attrs = backend(public=IPv4Address("203.0.113.5")).attrs({})
    assert encode_attrs(attrs) == b'{"PublicIP":"203.0.113.5","PublicIPv6":null}'


def test_one_device_for_all_peers_and_a_route_per_peer() -> None:
    made = backend(public=IPv4Address("203.0.113.5"))
    assert made.links({}, False) == (LinkSpec(DEVICE, 4, Ipip(LOCAL, fou_port=8285), 1472),)
    assert made.mtu_bytes() == 1472
    desired = made.desired(OWN, (lease(2), lease(3), lease(4, "vxlan")), lambda _: True)
    assert desired.devices == {DEVICE}
    assert desired.addresses == {Address(DEVICE, IPv4Interface("10.5.1.0/32"))}
    assert desired.routes == {
        Route(IPv4Network(f"10.5.{n}.0/24"), DEVICE, IPv4Address(f"192.0.2.{n}"), onlink=True) for n in (2, 3)
    }
    assert dict(desired.problems) == {"10.5.4.0-24": "lease 10.5.4.0-24 skipped: its node runs backend 'vxlan'"}
    assert not desired.neighbours | desired.fdb


def test_ipv6_is_reported_and_an_address_is_needed() -> None:
    both = backend(',"EnableIPv6":true,"IPv6Network":"fd05::/48"')
    problems = dict(both.desired(OWN, (), lambda _: True).problems)
    assert problems["IPv6Network"].endswith("carries IPv4 only: fd05::/48 is not connected")
    with pytest.raises(ConfigError, match="eth0 has no IPv4 address"):
        backend(local=None)


def test_a_link_that_finishes_no_packets_is_refused_with_that_reason(opened: set[FouPort]) -> None:
    carrier = FouCarrier(FouPort(LOCAL, 8285), "eth0", lambda _: HAZARD)
    with pytest.raises(KernelError) as refused:
        carrier.ensure(FakeKernel())
    assert str(refused.value) == (
        f"use DataPath fou on eth0: {HAZARD}, and peers that read them in user space would lose all but pings; "
        "switch that off with: ethtool -K eth0 tx off, or set DataPath to user"
    )
    assert opened == set()


def test_the_port_is_opened_once_and_again_when_it_was_closed(opened: set[FouPort]) -> None:
    carrier = FouCarrier(FouPort(LOCAL, 8285), "eth0", lambda _: "")
    for _ in range(2):
        assert carrier.ensure(FakeKernel()) == {}
        assert opened == {FouPort(LOCAL, 8285)}
    opened.clear()
    carrier.ensure(FakeKernel())
    assert opened == {FouPort(LOCAL, 8285)}
    carrier.close()
    assert opened == {FouPort(LOCAL, 8285)}


def test_a_port_of_the_operator_at_every_address_will_do(opened: set[FouPort]) -> None:
    everywhere = FouPort(IPv4Address(0), 8285)
    opened.add(everywhere)
    FouCarrier(FouPort(LOCAL, 8285), "eth0", lambda _: "").ensure(FakeKernel())
    assert opened == {everywhere}


def test_the_socket_that_data_path_user_left_with_the_manager_gives_the_port_free(
    opened: set[FouPort], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    left.bind(("127.0.0.1", 0))
    place, number = left.fileno(), left.getsockname()[1]
    monkeypatch.setattr(fdstore, "FIRST_FD", place)
    passed = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "flannel-udp-4"}

    def add(port: FouPort) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as kernels:
            kernels.bind((str(port.local), port.port))
        opened.add(port)

    monkeypatch.setattr(fou, "add", add)
    port = FouPort(IPv4Address("127.0.0.1"), number)
    carrier = FouCarrier(port, "eth0", lambda _: "", FdStore(passed, 1))
    left.detach()
    carrier.ensure(FakeKernel())
    assert opened == {port}


def test_an_earlier_address_loses_its_port(opened: set[FouPort]) -> None:
    first = backend().carrier(None, nothing)
    assert isinstance(first, FouCarrier)
    opened.add(first.port)
    assert backend().carrier(first, nothing) is first
    moved = backend(local=IPv4Address("192.0.2.101"))
    second = moved.carrier(first, nothing)
    assert second is not first
    assert opened == set()
