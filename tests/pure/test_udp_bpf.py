from __future__ import annotations

import errno
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from pathlib import Path
from typing import Any

import pytest

from backends import load_backend
from backends.api import CarryingBackend, ExternalInterface, Setting
from backends.dataplane.model import KeptTun, Link
from backends.dataplane.ports import Kernel
from backends.kernel import bpf, tcfilter
from backends.kernel.bpf import Bytecode, Map, MapKind
from backends.kernel.tcfilter import Attached, Hook
from backends.udp.bpf import BpfBackend, bytecode
from backends.udp.bpf import carrier as carriers
from backends.udp.bpf.carrier import BpfCarrier, BpfSpec
from backends.udp.bpf.programs import Kept, Programs, Settings, lease_entries, peer_entries
from backends.udp.carrier import UdpCarrier, _left
from backends.udp.user import BothFamilies, UdpBackend
from subnet.config import parse_network_config
from subnet.errors import ConfigError, KernelError
from subnet.model import IPAddress, IPNetwork, Lease, LeaseAttrs, Subnets
from tests.support.fake_kernel import FakeKernel

pytestmark = pytest.mark.pure

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "backends" / "udp" / "bpf" / "datapath.c"
NETWORK = IPv4Network("10.5.0.0/16")
LOCAL = IPv4Address("192.0.2.1")
OWN = Subnets(IPv4Network("10.5.1.0/24"))
HAZARD = "eth0 (veth) hands packets on with unfinished checksums"
SETTINGS = Settings(LOCAL, 8285, 2, 7, 1472, False)


def nothing() -> None:
    return None


def setting(path: str, more: str = "", index: int = 2) -> Setting:
    text = f'{{"Network":"{NETWORK}"{more},"Backend":{{"Type":"udp","DataPath":"{path}"}}}}'
    v6 = IPv6Address("2001:db8::1")
    interface = ExternalInterface("eth0", index, 1500, LOCAL, v6, public_v4=LOCAL, public_v6=v6)
    return Setting(parse_network_config(text, "test"), interface, frozenset({NETWORK}))


def backend(more: str = "", index: int = 2) -> BpfBackend:
    made = load_backend(setting("bpf", more, index))
    assert isinstance(made, BpfBackend)
    assert isinstance(made, CarryingBackend)
    return made


# -- byte code -----------------------------------------------------------------------------------------


def test_byte_code_is_what_clang_makes_of_the_source() -> None:
    clang = next((program for program in ("clang-14", "clang") if shutil.which(program)), None)
    if clang is None:
        pytest.skip("needs clang")
    said = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout
    version = re.search(r"version (\d+)", said)
    if version is None or version[1] != "14":
        pytest.skip(f"the byte code is of clang 14, this is {version and version[1]}")
    argv = [sys.executable, str(ROOT / "scripts" / "compile-bpf"), "--clang", clang]
    made = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert made == Path(bytecode.__file__).read_text()


def test_both_byte_orders_have_the_same_programs_and_maps() -> None:
    little, big = bytecode.PROGRAMS["little"], bytecode.PROGRAMS["big"]
    assert little.keys() == big.keys() == {"encap", "decap"}
    for name in little:
        assert len(little[name].code) % 8 == len(big[name].code) % 8 == 0
        assert sorted(little[name].maps.values()) == sorted(big[name].maps.values())
        assert {*little[name].maps.values(), *little[name].values.values()} <= {"leases", "peers", "counts", "settings"}
    # A two-word load of 64 bits, and nothing else, is what names a map (bpf instruction set, BPF_LD_IMM64).
    for made in (*little.values(), *big.values()):
        assert {made.code[at * 8] for at in (*made.maps, *made.values)} == {0x18}


def test_maps_are_linked_by_their_descriptors() -> None:
    load = struct.Struct("=BBhi")
    register = 3 if sys.byteorder == "little" else 3 << 4
    other = load.pack(0xB7, register, 0, 1)
    wide = load.pack(0x18, register, 0, 0) + load.pack(0, 0, 0, 0)
    code = bpf.linked(Bytecode(other + wide + wide, {1: "leases"}, {3: "settings"}), {"leases": 11, "settings": 12})
    operations = [load.unpack_from(code, at) for at in range(0, len(code), 8)]
    assert operations[0] == load.unpack(other)
    shift = 4 if sys.byteorder == "little" else 0
    assert [(op, regs >> shift & 15, value) for op, regs, _, value in operations[1:]] == [
        (0x18, 1, 11),  # BPF_PSEUDO_MAP_FD
        (0, 0, 0),
        (0x18, 2, 12),  # BPF_PSEUDO_MAP_VALUE
        (0, 0, 0),
    ]


@pytest.mark.parametrize(
    ("machine", "pointer_bytes", "number"),
    [
        ("x86_64", 8, 321),
        ("aarch64", 8, 280),
        ("riscv64", 8, 280),
        ("ppc64le", 8, 361),
        ("s390x", 8, 351),
        ("armv7l", 4, 386),
        ("i686", 4, 357),
        ("x86_64", 4, 0),
        ("aarch64", 4, 0),
        ("pdp11", 2, 0),
    ],
)
def test_the_system_call_has_the_number_of_its_machine(machine: str, pointer_bytes: int, number: int) -> None:
    assert bpf.call_number(machine, pointer_bytes) == number


@pytest.mark.parametrize(
    ("code", "says"),
    [
        (
            errno.EPERM,
            "create bpf map leases: not permitted; the process needs the capabilities CAP_BPF and CAP_NET_ADMIN",
        ),
        (errno.ENOSYS, "create bpf map leases: the kernel has no bpf(2)"),
        (errno.ENOMEM, "create bpf map leases: cannot allocate memory"),
    ],
)
def test_a_kernel_that_refuses_is_quoted_with_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, code: int, says: str
) -> None:
    def refuse(command: int, attributes: bytes) -> int:
        raise OSError(code, "no")

    monkeypatch.setattr(bpf, "_bpf", refuse)
    with pytest.raises(KernelError) as refused:
        Map("leases", MapKind.LPM_TRIE, (8, 4), 1)
    assert str(refused.value).startswith(says)


def test_a_kernel_without_room_for_the_maps_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(command: int, attributes: bytes) -> int:
        if b"peers" in attributes:
            raise OSError(errno.EPERM, "no")
        return os.open(os.devnull, os.O_RDONLY)

    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(bpf, "_bpf", refuse)
    with pytest.raises(KernelError, match="create bpf map peers: not permitted"):
        Programs()
    assert set(os.listdir("/proc/self/fd")) == before


# -- maps ----------------------------------------------------------------------------------------------


def test_settings_are_laid_out_as_the_source_reads_them() -> None:
    told = re.search(r"extern const volatile struct \{(.*?)\} settings;", SOURCE.read_text(), re.DOTALL)
    assert told is not None
    declared = re.findall(r"(u\d+) ([^;]+);", told[1])
    fields = [(name.strip(), int(kind[1:]) // 8) for kind, names in declared for name in names.split(",")]
    assert fields == [("local", 4), ("external", 4), ("tun", 4), ("mtu", 4), ("port", 2), ("allow_unknown", 2)]
    raw = Settings(LOCAL, 0x1234, 2, 7, 1472, True).packed()
    assert raw == LOCAL.packed + struct.pack("=III", 2, 7, 1472) + b"\x12\x34" + struct.pack("=H", 1)


def test_leases_are_prefixes_and_peers_their_addresses() -> None:
    table: dict[IPNetwork, IPAddress] = {
        IPv4Network("10.5.2.0/24"): IPv4Address("192.0.2.2"),
        IPv4Network("10.5.3.0/25"): IPv4Address("192.0.2.2"),
    }
    assert lease_entries(table) == {
        struct.pack("=I", 24) + bytes([10, 5, 2, 0]): bytes([192, 0, 2, 2]),
        struct.pack("=I", 25) + bytes([10, 5, 3, 0]): bytes([192, 0, 2, 2]),
    }
    assert list(peer_entries(table)) == [bytes([192, 0, 2, 2])]


class FakeMap:
    """Holds what it is given, and refuses on demand."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.written: list[int] = []
        self.full = False

    def put(self, entries: Mapping[bytes, bytes]) -> None:
        if self.full:
            raise KernelError("write to", "bpf map", errno.ENOSPC, "no space left on device")
        self.written.append(len(entries))
        self.held |= entries

    def remove(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            del self.held[key]


def test_only_what_differs_is_written_and_a_refusal_is_made_up_for() -> None:
    fake = FakeMap()
    kept = Kept(fake)  # type: ignore[arg-type]
    kept.put({b"a": b"1", b"b": b"1"})
    kept.put({b"a": b"1", b"b": b"2", b"c": b"1"})
    kept.put({b"a": b"1"})
    assert fake.written == [2, 2]
    kept.drop_except({b"a": b"", b"c": b""})
    assert fake.held == {b"a": b"1", b"c": b"1"}
    fake.full = True
    with pytest.raises(KernelError, match="no space left"):
        kept.put({b"d": b"1"})
    fake.full = False
    kept.put({b"d": b"1"})
    assert fake.held[b"d"] == b"1"


# -- the backend ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["auto", "user", "AUTO"])
def test_programs_carry_only_where_that_was_asked_for(path: str) -> None:
    assert type(load_backend(setting(path))) is UdpBackend


def test_ipv6_goes_through_a_pump_and_alone_it_is_refused() -> None:
    both = backend(',"EnableIPv6":true,"IPv6Network":"fd05::/48"').carrier(None, nothing)
    assert isinstance(both, BothFamilies)
    assert type(both.carriers[6]) is UdpCarrier
    assert not both.carriers[6].spec.kept
    assert isinstance(both.carriers[4], BpfCarrier)
    with pytest.raises(ConfigError, match=r"DataPath 'bpf' is for IPv4, which the config does not enable"):
        backend(',"EnableIPv4":false,"EnableIPv6":true,"IPv6Network":"fd05::/48"')


def test_the_lease_and_the_routes_are_those_of_every_data_path() -> None:
    assert backend().attrs({}) == LeaseAttrs(LOCAL)
    assert backend().mtu_bytes() == 1472


def test_an_external_interface_that_was_made_anew_has_another_carrier(monkeypatch: pytest.MonkeyPatch) -> None:
    discarded: list[object] = []

    def discard(self: BpfCarrier) -> None:
        discarded.append(self)

    monkeypatch.setattr(BpfCarrier, "discard", discard)
    first = backend().carrier(None, nothing)
    assert backend().carrier(first, nothing) is first
    assert first.hooked() == {2}
    second = backend(index=5).carrier(first, nothing)
    assert discarded == [first]
    assert second.hooked() == {5}
    third = load_backend(setting("user")).carrier(second, nothing)  # type: ignore[attr-defined]
    assert type(third) is UdpCarrier
    assert discarded == [first, second]


class FakePrograms(Programs):
    """Notes what happens to programs."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.earlier = False

    def load(self, settings: Settings) -> None:
        self.heard.append(f"load tun {settings.tun}")

    def know(self, table: Mapping[IPNetwork, IPAddress]) -> None:
        self.heard.append(f"know {' '.join(map(str, table))}")

    def at_work(self) -> bool:
        return self.earlier

    def attach(self) -> list[Attached]:
        self.heard.append("attach")
        return []

    def detach(self) -> None:
        self.heard.append("detach")

    def stats(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        self.heard.append("close")


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> tuple[BpfCarrier, FakePrograms, FakeKernel]:
    """A carrier whose programs are played, and whose pump is none."""
    fake = FakePrograms()
    monkeypatch.setattr(carriers, "Programs", lambda: fake)
    tun = Link("flannel0", 7, "tun", "", 1472, True)

    def ensure(self: UdpCarrier, kernel: Kernel) -> dict[str, Link]:
        return {tun.name: tun}

    monkeypatch.setattr(UdpCarrier, "ensure", ensure)
    spec = BpfSpec(LOCAL, 8285, 1472, NETWORK, kept=True, external="eth0", external_index=2)
    return BpfCarrier(spec, unfinished=lambda _: ""), fake, FakeKernel()


def lease(number: int) -> Lease:
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{number}"), None)
    return Lease(Subnets(IPv4Network(f"10.5.{number}.0/24")), attrs, f"10.5.{number}.0-24", revision=number)


def test_programs_take_their_place_once_they_know_the_peers(
    played: tuple[BpfCarrier, FakePrograms, FakeKernel],
) -> None:
    carrier, fake, kernel = played
    carrier.ensure(kernel)
    assert fake.heard == ["load tun 7"]
    carrier.carry(OWN, [lease(2), lease(3)])
    assert fake.heard[1:] == ["know 10.5.2.0/24 10.5.3.0/24", "attach"]
    carrier.carry(OWN, [lease(2)])
    carrier.ensure(kernel)
    assert fake.heard[3:] == ["know 10.5.2.0/24", "load tun 7", "attach"]
    carrier.close()
    assert fake.heard[6:] == ["close"]


@pytest.mark.parametrize("earlier", [True, False])
def test_remembered_peers_take_nothing_from_an_earlier_run(
    played: tuple[BpfCarrier, FakePrograms, FakeKernel], earlier: bool
) -> None:
    carrier, fake, kernel = played
    fake.earlier = earlier
    carrier.ensure(kernel)
    carrier.carry(OWN, [lease(2)], complete=False)
    carrier.ensure(kernel)
    assert ("attach" in fake.heard) is not earlier
    carrier.carry(OWN, [lease(2)])
    assert "attach" in fake.heard


def test_given_up_programs_are_detached_before_they_are_closed(
    played: tuple[BpfCarrier, FakePrograms, FakeKernel],
) -> None:
    carrier, fake, kernel = played
    carrier.ensure(kernel)
    carrier.discard()
    assert fake.heard[1:] == ["detach", "close"]


def test_a_link_that_finishes_no_packets_is_refused_with_that_reason(
    played: tuple[BpfCarrier, FakePrograms, FakeKernel],
) -> None:
    _, fake, kernel = played
    spec = BpfSpec(LOCAL, 8285, 1472, NETWORK, kept=True, external="eth0", external_index=2)
    with pytest.raises(KernelError) as refused:
        BpfCarrier(spec, unfinished=lambda _: HAZARD).ensure(kernel)
    assert str(refused.value) == (
        f"use DataPath bpf on eth0: {HAZARD}, and peers that read them in user space would lose all but pings; "
        "switch that off with: ethtool -K eth0 tx off, or set DataPath to user"
    )
    assert fake.heard == []


# -- places --------------------------------------------------------------------------------------------


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> dict[Hook, Attached]:
    """What is attached, played."""
    there: dict[Hook, Attached] = {}

    def attach(hook: Hook, name: str, fd: int, number: int) -> Attached:
        there[hook] = Attached(hook, name, number)
        return there[hook]

    monkeypatch.setattr(tcfilter, "attached", lambda: tuple(there.values()))
    monkeypatch.setattr(tcfilter, "attach", attach)
    monkeypatch.setattr(tcfilter, "detach", lambda one: there.pop(one.hook))
    return there


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Programs of a kernel that numbers what is loaded."""
    numbers = iter(range(100, 200))

    def call(command: int, attributes: bytes) -> int:
        return os.open(os.devnull, os.O_RDONLY) if command == bpf.MAP_CREATE else 0

    def load(name: str, code: Bytecode, maps: object) -> bpf.Program:
        return bpf.Program(os.open(os.devnull, os.O_RDONLY), next(numbers))

    monkeypatch.setattr(bpf, "_bpf", call)
    monkeypatch.setattr(bpf, "load", load)
    one = Programs()
    yield one
    one.close()


def test_each_program_has_its_place_and_is_put_where_it_is_missing(
    places: dict[Hook, Attached], made: Programs
) -> None:
    made.load(SETTINGS)
    assert not made.at_work()
    assert [(str(one.hook), one.name) for one in made.attach()] == [
        ("ingress of device index 2", "decap"),
        ("egress of device index 7", "encap"),
    ]
    assert made.at_work()
    assert made.attach() == []
    made.load(SETTINGS)
    assert made.attach() == []
    del places[Hook(7, True)]
    assert [one.name for one in made.attach()] == ["encap"]
    made.load(Settings(LOCAL, 8285, 2, 8, 1472, False))
    assert [one.hook for one in made.attach()] == [Hook(2, False), Hook(8, True)]
    places[Hook(9, True)] = Attached(Hook(9, True), "another's", 1)
    made.detach()
    assert set(places) == {Hook(7, True), Hook(9, True)}  # the first belongs to a device that has gone


def test_programs_of_an_earlier_run_are_at_work_until_replaced(places: dict[Hook, Attached], made: Programs) -> None:
    places[Hook(2, False)] = Attached(Hook(2, False), "flanneld-decap", 1)
    places[Hook(7, True)] = Attached(Hook(7, True), "flanneld-encap", 2)
    made.load(SETTINGS)
    assert made.at_work()
    assert len(made.attach()) == 2
    assert {one.program for one in places.values()} == {100, 101}


@pytest.mark.parametrize(
    ("links", "name"),
    [
        ({}, "flannel%d"),
        ({"flannel0": KeptTun()}, "flannel0"),
        ({"flannel0": None, "flannel1": KeptTun()}, "flannel1"),
        ({"flannel.1": KeptTun(), "flannel-v6.0": KeptTun(), "tun0": KeptTun()}, "flannel%d"),
    ],
    ids=["none", "left", "in use", "others"],
)
def test_a_device_that_an_earlier_run_left_is_used(links: Mapping[str, Any], name: str) -> None:
    made = {n: Link(n, 3, "tun", "", 1472, True, tunnel) for n, tunnel in links.items()}
    assert _left(made, "flannel%d") == name


def test_what_a_missing_module_means(monkeypatch: pytest.MonkeyPatch) -> None:
    class Channel:
        """A kernel without classifier."""

        def __init__(self, protocol: int) -> None: ...

        def request(self, encoders: list[Callable[[int], bytes]]) -> list[tuple[int, int, str]]:
            (kind,) = struct.unpack_from("=H", encoders[0](1), 4)
            return [(0, errno.ENOENT, "TC classifier not found")] if kind == 44 else []

        def dump(self, request: bytes, what: str) -> list[object]:
            return []

        def close(self) -> None: ...

    monkeypatch.setattr(tcfilter, "NetlinkSocket", Channel)
    with pytest.raises(KernelError, match=r"the kernel has no cls_bpf; load it with: modprobe cls_bpf"):
        tcfilter.attach(Hook(2, False), "decap", 3, 4)
