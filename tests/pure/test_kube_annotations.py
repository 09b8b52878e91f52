from __future__ import annotations

import json
from ipaddress import IPv4Address, IPv6Address
from typing import Any

import pytest

from subnet.kube.annotations import annotation_prefix, changes, read_attrs, wanted, with_prefix
from subnet.kube.decide import annotations_patch, condition_patch, read_operators, this_node
from subnet.kube.records import OwnNode, decode
from subnet.manager import ThisNode
from subnet.model import LeaseAttrs
from tests.support.kube import PREFIX, make_node, node_annotations

pytestmark = pytest.mark.pure

V4, V6 = IPv4Address("192.0.2.1"), IPv6Address("2001:db8::1")
DATA = {"VNI": 1, "VtepMAC": "02:00:00:00:00:01"}
TEXT = '{"VNI":1,"VtepMAC":"02:00:00:00:00:01"}'


@pytest.mark.parametrize(
    ("given", "prefix"),
    [
        ("flannel.alpha.coreos.com", "flannel.alpha.coreos.com/"),
        ("a.example.com/", "a.example.com/"),
        ("a.example.com/x", "a.example.com/x-"),
        ("a.example.com/x-", "a.example.com/x-"),
        ("org.com/9", "org.com/9-"),
    ],
)
def test_K15_prefixes(given: str, prefix: str) -> None:
    assert annotation_prefix(given) == prefix


@pytest.mark.parametrize(
    "given", ["a/b/c", "A_b", "", "/", "localhost", "a.b/C", "a..b", "ä.b", "a" * 300 + ".b", "a.b/" + "x" * 60]
)
def test_K15_prefixes_refused(given: str) -> None:
    with pytest.raises(ValueError, match=r"must be|too long"):
        annotation_prefix(given)


@pytest.mark.parametrize(
    ("attrs", "texts"),
    [
        (
            LeaseAttrs(V4, None, "vxlan", DATA),
            {"backend-type": "vxlan", "backend-data": TEXT, "public-ip": "192.0.2.1"},
        ),
        (
            LeaseAttrs(V4, V6, "vxlan", DATA, DATA),
            {
                "backend-type": "vxlan",
                "backend-data": TEXT,
                "public-ip": "192.0.2.1",
                "backend-v6-data": TEXT,
                "public-ipv6": "2001:db8::1",
            },
        ),
        (
            LeaseAttrs(None, V6, "vxlan", None, DATA),
            {"backend-type": "vxlan", "backend-v6-data": TEXT, "public-ipv6": "2001:db8::1"},
        ),
        (
            LeaseAttrs(V4, None, "host-gw"),
            {"backend-type": "host-gw", "backend-data": "null", "public-ip": "192.0.2.1"},
        ),
        (
            LeaseAttrs(V4, V6, "host-gw"),
            {
                "backend-type": "host-gw",
                "backend-data": "null",
                "public-ip": "192.0.2.1",
                "backend-v6-data": "null",
                "public-ipv6": "2001:db8::1",
            },
        ),
        (
            LeaseAttrs(None, V6, "host-gw"),
            {"backend-type": "host-gw", "backend-v6-data": "null", "public-ipv6": "2001:db8::1"},
        ),
        (LeaseAttrs(V4), {"backend-type": "", "backend-data": "null", "public-ip": "192.0.2.1"}),
        (
            LeaseAttrs(V4, None, "extension"),
            {"backend-type": "extension", "backend-data": "", "public-ip": "192.0.2.1"},
        ),
        (
            LeaseAttrs(V4, None, "extension", "a<b"),
            {"backend-type": "extension", "backend-data": '"a\\u003cb"', "public-ip": "192.0.2.1"},
        ),
    ],
)
def test_what_a_node_says(attrs: LeaseAttrs, texts: dict[str, str]) -> None:
    said = wanted(attrs, {})
    assert said == {"kube-subnet-manager": "true", **texts}
    assert read_attrs(said)[0] == attrs


def test_overwrites_are_published_as_they_are_spelt() -> None:
    said = wanted(LeaseAttrs(V4, V6, "host-gw"), {4: "203.0.113.5", 6: "2001:DB8::5"})
    assert (said["public-ip"], said["public-ipv6"]) == ("203.0.113.5", "2001:DB8::5")


def test_only_what_differs_is_written_and_only_ours_is_removed() -> None:
    have = {
        "public-ip": "192.0.2.1",
        "backend-type": "host-gw",
        "public-ipv6": "2001:db8::1",
        "backend-v6-data": "null",
        "public-ip-overwrite": "203.0.113.5",
    }
    want = {"public-ip": "192.0.2.1", "backend-type": "vxlan", "kube-subnet-manager": "true"}
    assert changes(have, want) == {
        "backend-type": "vxlan",
        "kube-subnet-manager": "true",
        "public-ipv6": None,
        "backend-v6-data": None,
    }
    assert changes(want, want) == {}
    assert annotations_patch({"public-ip": "1.2.3.4", "public-ipv6": None}, "a.b/") == {
        "metadata": {"annotations": {"a.b/public-ip": "1.2.3.4", "a.b/public-ipv6": None}}
    }


@pytest.mark.parametrize(
    ("texts", "families"),
    [
        ({"public-ip": "no"}, {4}),
        ({"public-ip": "2001:db8::1"}, {4}),
        ({"public-ipv6": "192.0.2.1"}, {6}),
        ({"backend-data": "{"}, {4}),
        ({"public-ip": "no", "backend-v6-data": "[1"}, {4, 6}),
        ({"public-ip": "0.0.0.0"}, set()),
        ({}, set()),
    ],
)
def test_broken_annotations_spoil_one_family(texts: dict[str, str], families: set[int]) -> None:
    good = with_prefix(node_annotations("192.0.2.9", "02:00:00:00:00:09", "2001:db8::9", "02:00:00:00:06:09"), PREFIX)
    attrs, broken = read_attrs({**good, **texts})
    assert set(broken) == families
    assert (attrs.public_ip is None) == (4 in families or texts.get("public-ip") == "0.0.0.0")
    assert (attrs.public_ipv6 is None) == (6 in families)


def own(told: dict[str, Any], conditions: list[dict[str, Any]] | None = None) -> OwnNode:
    node = make_node("n1", ["10.5.1.0/24"], told)
    node["status"]["conditions"] = conditions
    return decode(json.dumps(node).encode(), OwnNode)


def test_operators_annotations() -> None:
    told = node_annotations("192.0.2.9", "02:00:00:00:00:09") | {
        PREFIX + "node-public-ip": "198.51.100.1",
        PREFIX + "node-public-ipv6": "198.51.100.1",
        PREFIX + "public-ip-overwrite": "nowhere",
    }
    this, problems = this_node(own(told), PREFIX)
    assert this.public_ip == IPv4Address("198.51.100.1")
    assert this.public_ipv6 is None
    assert this.told is not None
    assert this.told.backend_data == {"VNI": 1, "VtepMAC": "02:00:00:00:00:09"}
    assert len(problems) == 2
    assert all(word in " ".join(problems) for word in ("node-public-ipv6", "public-ip-overwrite", "nowhere"))
    assert read_operators({"public-ip-overwrite": "203.0.113.5"}).overwrite == {4: "203.0.113.5"}


def test_a_new_node_has_told_nothing() -> None:
    assert this_node(own({}), PREFIX) == (ThisNode(), ())
    assert this_node(None, PREFIX) == (ThisNode(), ())


def test_another_prefix_is_another_daemon() -> None:
    node = own({f"b.example/{name}": text for name, text in with_prefix(node_annotations("192.0.2.9"), PREFIX).items()})
    assert this_node(node, "a.example/") == (ThisNode(), ())
    assert this_node(node, "b.example/")[0].told is not None


def test_condition_keeps_its_time_of_transition() -> None:
    now = "2026-02-02T00:00:00Z"
    before = {"type": "NetworkUnavailable", "status": "False", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    other = {"type": "Ready", "status": "False", "lastTransitionTime": "2020-01-01T00:00:00Z"}
    fresh = {
        "type": "NetworkUnavailable",
        "status": "False",
        "lastHeartbeatTime": now,
        "lastTransitionTime": now,
        "reason": "FlannelIsUp",
        "message": "Flannel is running on this node",
    }
    assert condition_patch(own({}, [other]), now) == {"status": {"conditions": [fresh]}}
    assert condition_patch(own({}, [other, {**before, "status": "True"}]), now) == {"status": {"conditions": [fresh]}}
    kept = {**fresh, "lastTransitionTime": "2026-01-01T00:00:00Z"}
    assert condition_patch(own({}, [other, before]), now) == {"status": {"conditions": [kept]}}
