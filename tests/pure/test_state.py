from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subnet import statefile
from subnet.model import Lease, LeaseAttrs, Subnets
from subnet.state import State, StateError, decode, encode

pytestmark = pytest.mark.pure

OWN = Lease(
    Subnets(IPv4Network("10.5.85.0/24"), IPv6Network("fd05:0:0:b::/64")),
    LeaseAttrs(
        IPv4Address("192.0.2.1"),
        IPv6Address("2001:db8:1::1"),
        "vxlan",
        {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"},
        {"VNI": 1, "VtepMAC": "02:00:00:00:00:02"},
    ),
    "/coreos.com/network/subnets/10.5.85.0-24&fd05:0:0:b::-64",
    7587891274,
    42,
)
PEER = Lease(
    Subnets(IPv4Network("10.5.2.0/24")), LeaseAttrs(IPv4Address("192.0.2.2"), backend_type="host-gw"), "/k", 0, 9
)
STATE = State("etcd /coreos.com/network", 1796000000, '{"Network":"10.5.0.0/16"}', OWN, (PEER,))

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
v4 = st.builds(
    lambda n, length: IPv4Network((n, length), strict=False), st.integers(1 << 24, (1 << 32) - 1), st.integers(8, 31)
)
v6 = st.builds(
    lambda n, length: IPv6Network((n, length), strict=False),
    st.integers(1 << 112, (1 << 128) - 1),
    st.integers(16, 127),
)
subnets = st.builds(Subnets, v4, st.none() | v6) | st.builds(Subnets, st.none(), v6)
attrs = st.builds(
    LeaseAttrs,
    st.none() | st.integers(1, (1 << 32) - 1).map(IPv4Address),
    st.none() | st.integers(0, (1 << 128) - 1).map(IPv6Address),
    texts,
    json_values,
    json_values,
)
leases = st.builds(Lease, subnets, attrs, texts, st.integers(0, (1 << 63) - 1), st.integers(0, (1 << 63) - 1))
states = st.builds(
    State, texts, st.integers(0, 1 << 33), texts, st.none() | leases, st.lists(leases, max_size=3).map(tuple)
)


@given(states)
def test_what_is_encoded_is_decoded(state: State) -> None:
    assert decode(encode(state)) == state


def test_keys_and_values_are_those_of_the_datastore() -> None:
    record = json.loads(encode(STATE))
    assert record["version"] == 1
    assert record["own"]["subnet"] == "10.5.85.0-24&fd05:0:0:b::-64"
    assert record["own"]["value"] == (
        '{"PublicIP":"192.0.2.1","PublicIPv6":"2001:db8:1::1","BackendType":"vxlan",'
        '"BackendData":{"VNI":1,"VtepMAC":"02:00:00:00:00:01"},"BackendV6Data":{"VNI":1,"VtepMAC":"02:00:00:00:00:02"}}'
    )


@given(st.binary(max_size=60))
def test_any_bytes_are_refused_politely(text: bytes) -> None:
    with pytest.raises(StateError):
        decode(text)


@given(st.integers(0, len(encode(STATE)) - 2))
def test_truncated_text_is_refused(length: int) -> None:
    with pytest.raises(StateError):
        decode(encode(STATE)[:length])


@pytest.mark.parametrize(
    ("member", "value", "told"),
    [
        ("version", 2, "version 2"),
        ("version", None, "version is null"),
        ("version", True, "version is true"),
        ("datastore", 5, "datastore is 5"),
        ("seen_at_s", -1, "seen_at_s is -1"),
        ("seen_at_s", 10**20, "seen_at_s is 1000"),
        ("seen_at_s", 1.5, "seen_at_s is 1.5"),
        ("config", {}, "config is {}"),
        ("peers", None, "peers is null"),
        ("own", [], r"a lease is \[\]"),
        ("own", {"subnet": "10.5.85.0/24", "value": "{}"}, "10.5.85.0/24"),
        ("own", {"subnet": "10.5.85.0-24", "value": "no"}, "lease value"),
        ("own", {"subnet": "10.5.85.0-24", "value": "{}", "key": 1}, "key is 1"),
    ],
)
def test_wrong_members_are_named(member: str, value: Any, told: str) -> None:
    record = json.loads(encode(STATE)) | {member: value}
    with pytest.raises(StateError, match=told):
        decode(json.dumps(record).encode())


@pytest.mark.parametrize("bad", [None, {}, {"subnet": "10.5.9.0/24"}, {"subnet": "10.5.9.0-24", "value": "{"}])
def test_a_bad_peer_does_not_take_the_others_along(bad: Any) -> None:
    record = json.loads(encode(STATE))
    record["peers"].insert(0, bad)
    assert decode(json.dumps(record).encode()).peers == (PEER,)


def test_a_peer_that_cannot_be_encoded_does_not_take_the_others_along() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    hostile = Lease(Subnets(IPv4Network("10.5.3.0/24")), LeaseAttrs(IPv4Address("192.0.2.3"), None, "vxlan", deep))
    state = State(STATE.datastore, STATE.seen_at_s, STATE.config, OWN, (hostile, PEER))
    assert decode(encode(state)) == STATE


def test_the_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    path = tmp_path / "flannel" / "state.json"
    with umask(0):
        statefile.write(path, STATE)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert statefile.read(path) == STATE
    assert os.listdir(path.parent) == ["state.json"]


def test_no_file_is_no_state(tmp_path: Path) -> None:
    assert statefile.read(tmp_path / "state.json") is None


@pytest.mark.parametrize("mode", [0o640, 0o602, 0o644])
def test_a_file_for_others_is_refused_and_made_private_by_the_next_write(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "state.json"
    statefile.write(path, STATE)
    path.chmod(mode)
    with pytest.raises(StateError, match=f"{path}: has mode {mode:04o}"):
        statefile.read(path)
    statefile.write(path, STATE)
    assert statefile.read(path) == STATE


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    path.touch(mode=0o600)
    with pytest.raises(StateError, match=str(path)):
        statefile.read(path)


def test_what_cannot_be_written_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"file/state\.json: cannot be written: "):
        statefile.write(tmp_path / "file" / "state.json", STATE)
    (tmp_path / "directory").mkdir()
    with pytest.raises(StateError, match="directory: is no regular file"):
        statefile.write(tmp_path / "directory", STATE)
    assert sorted(os.listdir(tmp_path)) == ["directory", "file"]


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
