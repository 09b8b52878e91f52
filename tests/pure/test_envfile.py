from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subnet.config import parse_network_config
from subnet.envfile import EnvFileError, read_networks, read_previous, render, write
from subnet.model import NetworkConfig, Subnets

pytestmark = pytest.mark.pure

V6_MEMBERS = '"EnableIPv6":true,"IPv6Network":"2001:cafe:42::/56"'
V4 = parse_network_config('{"Network":"10.42.0.0/16"}', "test")
V6 = parse_network_config(f'{{"EnableIPv4":false,{V6_MEMBERS}}}', "test")
DUAL = parse_network_config(f'{{"Network":"10.42.0.0/16",{V6_MEMBERS}}}', "test")
NET4, NET6 = IPv4Network("10.42.0.0/24"), IPv6Network("2001:cafe:42::/64")
TEXT = """\
FLANNEL_NETWORK=10.42.0.0/16
FLANNEL_SUBNET=10.42.0.1/24
FLANNEL_IPV6_NETWORK=2001:cafe:42::/56
FLANNEL_IPV6_SUBNET=2001:cafe:42::1/64
FLANNEL_MTU=1450
FLANNEL_IPMASQ=true
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "flannel" / "subnet.env"


@pytest.fixture
def narrow_umask() -> Iterator[None]:
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def previous(tmp_path: Path, text: str) -> Subnets | None:
    file = tmp_path / "subnet.env"
    file.write_text(text, encoding="utf-8")
    return read_previous(file)


@pytest.mark.parametrize(
    ("config", "subnets", "ip_masq", "expected"),
    [
        (DUAL, Subnets(NET4, NET6), True, TEXT),
        (
            V4,
            Subnets(NET4),
            False,
            "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=false\n",
        ),
        (
            V6,
            Subnets(None, NET6),
            True,
            "FLANNEL_IPV6_NETWORK=2001:cafe:42::/56\nFLANNEL_IPV6_SUBNET=2001:cafe:42::1/64\n"
            "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
        ),
        (
            V4,
            Subnets(NET4, NET6),
            True,
            "FLANNEL_NETWORK=10.42.0.0/16\nFLANNEL_SUBNET=10.42.0.1/24\nFLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n",
        ),
    ],
    ids=["dual", "v4", "v6", "v6-off"],
)
def test_render(config: NetworkConfig, subnets: Subnets, ip_masq: bool, expected: str) -> None:
    assert render(config, subnets, 1450, ip_masq) == expected


@pytest.mark.usefixtures("narrow_umask")
def test_N01_directories_are_made_and_modes_do_not_depend_on_the_umask(path: Path) -> None:
    write(path, TEXT)
    assert path.read_text() == TEXT
    assert mode(path) == 0o644
    assert mode(path.parent) == mode(path.parent.parent) == 0o755
    assert os.listdir(path.parent) == ["subnet.env"]


def test_existing_modes_are_kept(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.parent.chmod(0o700)
    path.write_text("old")
    path.chmod(0o600)
    write(path, TEXT)
    assert path.read_text() == TEXT
    assert (mode(path), mode(path.parent)) == (0o600, 0o700)


def test_readers_of_the_old_file_never_see_a_part_of_the_new_one(path: Path) -> None:
    write(path, "old\n")
    with path.open() as reader:
        write(path, TEXT)
        assert reader.read() == "old\n"


def test_N01_failures_name_the_path_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "directory").mkdir()
    read_only = Path("/proc/flannel/subnet.env")
    below_a_file = tmp_path / "file" / "subnet.env", tmp_path / "file" / "sub" / "subnet.env"
    for target in (*below_a_file, tmp_path / "directory", read_only):
        with pytest.raises(EnvFileError, match=f"^cannot write {target}: [A-Z]"):
            write(target, TEXT)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


def test_what_is_written_is_read_back(path: Path) -> None:
    write(path, TEXT)
    assert read_previous(path) == Subnets(NET4, NET6)
    assert read_networks(path) == Subnets(IPv4Network("10.42.0.0/16"), IPv6Network("2001:cafe:42::/56"))


def test_missing_file_is_none(path: Path) -> None:
    assert read_previous(path) is None
    assert read_networks(path) is None


def test_unreadable_file_is_an_error_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(EnvFileError, match=f"^cannot read {tmp_path}: Is a directory"):
        read_previous(tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "FLANNEL_SUBNET=10.5.72.1/24",
        "FLANNEL_SUBNET=10.5.72.0/24",
        'FLANNEL_SUBNET="10.5.72.1/24"',
        "FLANNEL_SUBNET='10.5.72.1/24'",
        "export FLANNEL_SUBNET=10.5.72.1/24",
        "  export  FLANNEL_SUBNET = 10.5.72.1/24  ",
        "FLANNEL_SUBNET=10.5.72.1/24 # ours",
        'FLANNEL_SUBNET="10.5.72.1/24" # ours',
        "# a comment\n\nnonsense\n=x\nFLANNEL_SUBNET=10.5.72.1/24\r\nFLANNEL_MTU=1450",
        "FLANNEL_SUBNET=10.5.72.1/24,",
        "FLANNEL_SUBNET=x,10.5.72.1/24,10.5.0.0",
        "FLANNEL_SUBNET=fd00::1/64,10.5.72.1/24",
        "FLANNEL_SUBNET=10.9.9.1/24\nFLANNEL_SUBNET=10.5.72.1/24",
        "FLANNEL_SUBNET=10.5.72.1/24\n#FLANNEL_SUBNET=10.9.9.1/24",
        "FLANNEL_SUBNET=10.5.72.1/24\nFLANNEL_IPV6_SUBNET=10.9.9.1/24",
    ],
)
def test_dotenv_syntax(tmp_path: Path, line: str) -> None:
    assert previous(tmp_path, line) == Subnets(IPv4Network("10.5.72.0/24"))


@pytest.mark.parametrize(
    "line",
    [
        *("", "FLANNEL_SUBNET=", "FLANNEL_SUBNET", "#FLANNEL_SUBNET=10.5.72.1/24", "XFLANNEL_SUBNET=10.5.72.1/24"),
        *("FLANNEL_SUBNET=10.5.72.1", "FLANNEL_SUBNET=10.5.72.1/33", "FLANNEL_SUBNET=010.5.72.1/24"),
        *("FLANNEL_SUBNET=10.5.72.1/24,10.5.73.1/24", 'FLANNEL_SUBNET="10.5.72.1/24', "FLANNEL_NETWORK=10.5.0.0/16"),
        *("FLANNEL_SUBNET=fd00::1/64", "FLANNEL_IPV6_SUBNET=10.5.72.1/24", "FLANNEL_IPV6_SUBNET=fe80::1%eth0/64"),
    ],
)
def test_anything_but_one_cidr_of_the_right_family_counts_as_none(tmp_path: Path, line: str) -> None:
    assert previous(tmp_path, line) is None


@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda text: f"FLANNEL_SUBNET={text}".encode(errors="replace"))
)
@settings(max_examples=100, deadline=None)
def test_any_file_can_be_read(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    file = tmp_path_factory.getbasetemp() / "any.env"
    file.write_bytes(content)
    found = read_previous(file)
    assert found is None or found.v4 is not None or found.v6 is not None
