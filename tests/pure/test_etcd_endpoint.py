from __future__ import annotations

from pathlib import Path

import pytest

from subnet.errors import UsageError
from subnet.etcd.endpoint import Endpoint, TlsFiles, parse_endpoints
from subnet.etcd.layout import Layout, join, range_end
from subnet.etcd.settings import EtcdSettings

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("text", "endpoint", "target"),
    [
        ("http://127.0.0.1:4001", Endpoint("127.0.0.1", 4001), "ipv4:127.0.0.1:4001"),
        ("https://etcd.example:2379/", Endpoint("etcd.example", 2379, tls=True), "dns:///etcd.example:2379"),
        ("http://[fd00::1]:2379", Endpoint("fd00::1", 2379), "ipv6:[fd00::1]:2379"),
        ("https://[fd00::1]", Endpoint("fd00::1", 2379, tls=True), "ipv6:[fd00::1]:2379"),
        ("10.0.0.1:1234", Endpoint("10.0.0.1", 1234), "ipv4:10.0.0.1:1234"),
        ("etcd", Endpoint("etcd"), "dns:///etcd:2379"),
    ],
)
def test_endpoint(text: str, endpoint: Endpoint, target: str) -> None:
    assert parse_endpoints([text]) == (endpoint,)
    assert endpoint.target == target
    assert parse_endpoints([str(endpoint)]) == (endpoint,)


def test_E11_list_keeps_the_scheme_of_each_and_forgives_blanks() -> None:
    parsed = parse_endpoints([" http://a:1 , https://b:2,,", "http://a:1", ""])
    assert parsed == (Endpoint("a", 1), Endpoint("b", 2, tls=True))


@pytest.mark.parametrize(
    "text",
    [
        "ftp://a:1",
        "http://",
        "http://a:port",
        "http://a:70000",
        "http://::1:2379",
        "http://a:1/v3",
        "http://u:p@a:1",
        "unix:///x",
    ],
)
def test_bad_endpoint_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="etcd-endpoints") as caught:
        parse_endpoints(["http://good:1", text])
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("texts", [[], [""], [" , "]])
def test_no_endpoint_at_all(texts: list[str]) -> None:
    with pytest.raises(UsageError, match="no endpoint"):
        parse_endpoints(texts)


def test_S02_unreadable_tls_file_is_a_usage_error(tmp_path: Path) -> None:
    missing = str(tmp_path / "no.crt")
    with pytest.raises(UsageError, match=r"etcd-cafile.*no\.crt"):
        TlsFiles.read(EtcdSettings(("http://a",), cafile=missing))
    garbage = tmp_path / "garbage.crt"
    garbage.write_text("no certificate")
    with pytest.raises(UsageError, match=r"garbage\.crt"):
        TlsFiles.read(EtcdSettings(("http://a",), cafile=str(garbage)))
    with pytest.raises(UsageError, match="belong together"):
        TlsFiles.read(EtcdSettings(("http://a",), certfile=str(garbage)))


def test_password_is_in_no_text() -> None:
    assert "s3cret" not in repr(EtcdSettings(("http://a",), username="u", password="s3cret"))


@pytest.mark.parametrize(
    ("prefix", "config"),
    [
        ("/coreos.com/network", "/coreos.com/network/config"),
        ("/coreos.com/network/", "/coreos.com/network/config"),
        ("//coreos.com//network/./x/..//", "/coreos.com/network/config"),
        ("coreos.com/network", "coreos.com/network/config"),
        ("/", "/config"),
        ("", "config"),
    ],
)
def test_prefix_is_cleaned_as_go_does(prefix: str, config: str) -> None:
    layout = Layout(prefix)
    assert layout.config == config
    assert layout.subnets == config.removesuffix("config") + "subnets/"
    assert join(prefix, "config") == config


def test_range_end() -> None:
    assert range_end("/a/subnets/") == b"/a/subnets0"
    assert range_end("a\udcff") == b"b"


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("/coreos.com/network/config/", True),
        ("/coreos.com/network/Config", True),
        ("coreos.com/network/config", True),
        ("//coreos.com/network/config", True),
        ("/coreos.com/net/config", True),
        ("/coreos.com/network/config", False),
        ("/coreos.com/network/subnets/10.5.1.0-24", False),
        ("/coreos.com/other/settings", False),
    ],
)
def test_C09_near_misses(key: str, near: bool) -> None:
    assert Layout("/coreos.com/network").resembles_config(key) is near
