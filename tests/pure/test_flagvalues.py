from __future__ import annotations

import os
import re
import warnings
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld import flagvalues

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://192.0.2.1:2379", ["http://192.0.2.1:2379"]),
        ("https://etcd-0.example.org:4001/", ["https://etcd-0.example.org:4001"]),
        ("HTTPS://Etcd:1", ["https://Etcd:1"]),
        ("192.0.2.1:4001", ["http://192.0.2.1:4001"]),
        ("etcd", ["http://etcd:2379"]),
        ("https://etcd", ["https://etcd:2379"]),
        ("http://[2001:db8::1]:2379", ["http://[2001:db8::1]:2379"]),
        ("[2001:db8::1]", ["http://[2001:db8::1]:2379"]),
        (" http://a:1 ,, https://b:2 , ", ["http://a:1", "https://b:2"]),
    ],
)
def test_endpoints(text: str, expected: list[str]) -> None:
    assert flagvalues.endpoints(text) == tuple(expected)


@pytest.mark.parametrize(
    "bad",
    [
        "unix:///run/etcd.sock",
        "http://",
        "http://:2379",
        "http://a:0",
        "http://a:65536",
        "http://a:x",
        "http://a/v3",
        "http://a:1?x=1",
        "http://a:1#x",
        "http://[2001:db8::1",
        "http://[2001::db8::1]:1",
        "http://2001:db8::1",
        "a b",
    ],
)
def test_bad_endpoints_are_named(bad: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(bad))) as caught:
        flagvalues.endpoints(f"http://good:1,{bad}")
    assert "good" not in str(caught.value)


@pytest.mark.parametrize("text", ["", " ", ",", " , ,"])
def test_an_empty_list_of_endpoints_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no endpoint"):
        flagvalues.endpoints(text)


@pytest.mark.parametrize(
    "text",
    [
        "http://user:s3cret@a:1",
        "user:s3cret@a",
        "http://u:s3cret,x@a",
        "http://a,http://u:s3cret@b/x",
        "http//u:s3cret@b",
    ],
)
def test_credentials_in_endpoints_are_refused_and_not_quoted(text: str) -> None:
    with pytest.raises(ValueError, match="--etcd-password") as caught:
        flagvalues.endpoints(text)
    assert "s3cret" not in str(caught.value)


def test_public_addresses() -> None:
    assert flagvalues.public_ipv4("192.0.2.1") == IPv4Address("192.0.2.1")
    assert flagvalues.public_ipv6("2001:db8::1") == IPv6Address("2001:db8::1")
    assert flagvalues.public_ipv4("") is None
    assert flagvalues.public_ipv6("") is None


@pytest.mark.parametrize(
    "text", ["2001:db8::1", "192.0.2", "192.0.2.01", "host", "192.0.2.1/24", "0.0.0.0", "224.0.0.1", " 192.0.2.1"]
)
def test_bad_public_ipv4(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        flagvalues.public_ipv4(text)


@pytest.mark.parametrize("text", ["192.0.2.1", "fe80::1%eth0", "::", "ff02::1", "2001:db8::1/64", "[2001:db8::1]"])
def test_bad_public_ipv6(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        flagvalues.public_ipv6(text)


def test_listen_address() -> None:
    assert flagvalues.listen_address("") == IPv4Address("0.0.0.0")
    assert flagvalues.listen_address("::1") == IPv6Address("::1")
    with pytest.raises(ValueError, match="localhost"):
        flagvalues.listen_address("localhost")


def test_ranges() -> None:
    assert flagvalues.port(65535) == 65535
    assert flagvalues.port(-1) == -1
    assert flagvalues.minutes_to_s(1, 1439)(1439) == 1439 * 60
    for read, number in [
        (flagvalues.port, 65536),
        (flagvalues.between(1), 0),
        (flagvalues.minutes_to_s(1, 1439), 0),
        (flagvalues.minutes_to_s(1, 1439), 1440),
    ]:
        with pytest.raises(ValueError, match=str(number)):
            read(number)


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("^eth0$", "eth0", "eth01"),
        (r"^eth\d\z", "eth0", "eth01"),
        (r"192\.0\.2\..*", "192.0.2.1", "192.0.3.1"),
        ("(?i)^ETH", "eth0", "wlan0"),
        ("^[[:alpha:]]+$", "eth", "eth0"),
        ("^[^[:digit:]]+$", "eth", "eth0"),
        ("^[[:alpha:][:digit:]_]+$", "eth_0", "eth-0"),
        (r"^[[:punct:]]$", "]", "a"),
        ("^[]a]$", "]", "b"),
        ("^[^]a]$", "b", "]"),
        ("^[[]$", "[", "a"),
        (r"^[\]]$", "]", "a"),
        (r"^\[:alpha:\]$", "[:alpha:]", "a"),
        ("^[:alpha:]$", "p", "b"),
        ("^(?P<n>eth)0$", "eth0", "eth1"),
    ],
)
def test_patterns_mean_what_they_mean_in_go(pattern: str, matching: str, other: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = re.compile(flagvalues.pattern(pattern))
    assert compiled.search(matching)
    assert not compiled.search(other)


@pytest.mark.parametrize(
    "bad", ["[", "(", "*", "a**", r"\C", r"\pL", r"\Qa\E", "[[:nosuch:]]", "[[:^alpha:]]", "(?U)a", "a\\"]
)
def test_bad_patterns_are_refused(bad: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        flagvalues.pattern(bad)


@given(st.text(alphabet=r"[]^\z:alph-a.*+?(){}|$", max_size=20))
def test_a_pattern_compiles_or_is_refused(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        try:
            translated = flagvalues.pattern(text)
        except ValueError:
            return
        re.compile(translated)


def test_module_levels() -> None:
    assert flagvalues.parse_module_levels("vxlan=4, etcd*=2,") == (("vxlan", 4), ("etcd*", 2))
    assert flagvalues.parse_module_levels("") == ()


@pytest.mark.parametrize("bad", ["vxlan", "vxlan=", "=2", "vxlan=x", "vxlan=-1", "a=1=2"])
def test_bad_module_levels(bad: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(bad))):
        flagvalues.module_levels(f"ok=1,{bad}")


@pytest.mark.parametrize("text", ["", "loop.py:40"])
def test_source_line(text: str) -> None:
    assert flagvalues.source_line(text) == text


@pytest.mark.parametrize(
    "bad", ["loop.py", "loop.py:", ":40", "loop.py:0", "loop.py:x", "loop:40", "a.py:1:2", "loop.py:-1"]
)
def test_bad_source_lines(bad: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(bad))):
        flagvalues.source_line(bad)


def test_readable_file(tmp_path: Path) -> None:
    good = tmp_path / "ca.pem"
    good.write_text("x")
    assert flagvalues.readable_file(str(good)) == str(good)
    assert flagvalues.readable_file("") == ""
    for bad in (tmp_path / "nonexistent", tmp_path):
        with pytest.raises(ValueError, match=re.escape(os.fspath(bad))):
            flagvalues.readable_file(str(bad))
