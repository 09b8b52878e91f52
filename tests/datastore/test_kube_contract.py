from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import pytest

from tests.support.kube import KubeApi, make_node

pytestmark = [pytest.mark.datastore, pytest.mark.kube_contract]

NODES = "/api/v1/nodes"
STRATEGIC = "application/strategic-merge-patch+json"


@dataclass
class Api:
    """Either server, spoken to in plain HTTP. The real one: KUBE_API_URL, KUBE_API_TOKEN, KUBE_API_CA."""

    url: str
    token: str = ""
    stub: KubeApi | None = None
    made: list[str] = field(default_factory=list)

    def connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        if parts.scheme == "http":
            return http.client.HTTPConnection(parts.netloc, timeout=20)
        context = ssl.create_default_context(cafile=os.environ.get("KUBE_API_CA"))
        return http.client.HTTPSConnection(parts.netloc, timeout=20, context=context)

    def send(
        self,
        method: str,
        path: str,
        query: dict[str, Any] | None = None,
        *,
        body: Any = None,
        kind: str = "",
        token: str = "",
    ) -> http.client.HTTPResponse:
        connection = self.connection()
        given = token or self.token
        headers = {"Authorization": f"Bearer {given}"} if given else {}
        if body is not None:
            headers["Content-Type"] = kind or "application/json"
        url = f"{path}?{urlencode(query)}" if query else path
        connection.request(method, url, None if body is None else json.dumps(body), headers)
        return connection.getresponse()

    def call(self, method: str, path: str, query: dict[str, Any] | None = None, **more: Any) -> tuple[int, Any]:
        answer = self.send(method, path, query, **more)
        return answer.status, json.load(answer)

    def create(self, number: int, **annotations: str) -> str:
        name = f"fl-contract-{os.getpid()}-{number}"
        status, _ = self.call("POST", NODES, body=make_node(name, [f"10.99.{number}.0/24"], annotations))
        assert status == 201
        self.made.append(name)
        return name

    def version(self) -> str:
        return str(self.call("GET", NODES, {"limit": 1})[1]["metadata"]["resourceVersion"])

    def watch(self, version: str, seconds: int = 1, **query: Any) -> list[dict[str, Any]]:
        answer = self.send("GET", NODES, {"watch": 1, "resourceVersion": version, "timeoutSeconds": seconds, **query})
        assert answer.status == 200
        return [json.loads(line) for line in answer.read().splitlines()]


@pytest.fixture(params=["stub", *(["real"] if os.environ.get("KUBE_API_URL") else [])])
def api(request: pytest.FixtureRequest) -> Iterator[Api]:
    if request.param == "stub":
        with KubeApi() as stub:
            yield Api(stub.url, stub=stub)
        return
    api = Api(os.environ["KUBE_API_URL"], os.environ.get("KUBE_API_TOKEN", ""))
    yield api
    for name in api.made:
        api.send("DELETE", f"{NODES}/{name}")


def mine(api: Api, events: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (e["type"], e["object"]["metadata"]["name"]) for e in events if e["object"]["metadata"].get("name") in api.made
    ]


def test_lists_in_pages(api: Api) -> None:
    for number in range(3):
        api.create(number)
    found, token, pages = [], "", 0
    while True:
        status, page = api.call("GET", NODES, {"limit": 2, **({"continue": token} if token else {})})
        assert status == 200
        assert int(page["metadata"]["resourceVersion"]) > 0
        found += [item["metadata"]["name"] for item in page["items"]]
        pages += 1
        token = page["metadata"].get("continue", "")
        assert bool(token) == (page["metadata"].get("remainingItemCount", 0) > 0)
        assert len(page["items"]) == 2 or not token
        if not token:
            break
    assert pages >= 2
    assert set(api.made) <= set(found)
    assert len(found) == len(set(found))


def test_items_of_a_list_carry_no_kind_but_managed_fields(api: Api) -> None:
    name = api.create(1)
    item = next(i for i in api.call("GET", NODES)[1]["items"] if i["metadata"]["name"] == name)
    assert "kind" not in item
    assert "apiVersion" not in item
    assert item["metadata"]["managedFields"]
    assert item["metadata"]["uid"]
    assert item["metadata"]["creationTimestamp"].endswith("Z")
    assert item["spec"]["podCIDRs"] == [item["spec"]["podCIDR"]]


def test_watch_tells_what_happened_since_a_version(api: Api) -> None:
    version = api.version()
    first = api.create(1)
    api.call("PATCH", f"{NODES}/{first}/status", body={"metadata": {"annotations": {"a.b/c": "d"}}}, kind=STRATEGIC)
    api.send("DELETE", f"{NODES}/{first}")
    events = api.watch(version)
    assert mine(api, events) == [("ADDED", first), ("MODIFIED", first), ("DELETED", first)]
    assert all(e["object"]["kind"] == "Node" and e["object"]["apiVersion"] == "v1" for e in events)
    versions = [int(e["object"]["metadata"]["resourceVersion"]) for e in events]
    assert versions == sorted(versions)
    assert versions[0] > int(version)


def test_watch_ends_in_order_after_its_time(api: Api) -> None:
    began = time.monotonic()
    assert api.watch(api.version(), 1) == []
    assert 0.9 <= time.monotonic() - began < 10


def test_watch_of_a_future_version_is_silent(api: Api) -> None:
    assert api.watch(str(int(api.version()) + 1_000_000), 1) == []


def test_list_of_a_future_version_times_out(api: Api) -> None:
    answer = api.send("GET", NODES, {"resourceVersion": int(api.version()) + 1_000_000})
    body = json.load(answer)
    assert (answer.status, body["reason"]) == (504, "Timeout")
    assert answer.headers["Retry-After"] == "1"


def test_strategic_merge_patch_of_the_status_stores_annotations(api: Api) -> None:
    name = api.create(1, **{"a.example/keep": "1", "a.example/drop": "2"})
    patch = {"metadata": {"annotations": {"a.example/drop": None, "a.example/new": "3"}}}
    status, node = api.call("PATCH", f"{NODES}/{name}/status", body=patch, kind=STRATEGIC)
    assert status == 200
    stored = api.call("GET", f"{NODES}/{name}")[1]
    for seen in (node, stored):
        told = {k: v for k, v in seen["metadata"]["annotations"].items() if k.startswith("a.example/")}
        assert told == {"a.example/keep": "1", "a.example/new": "3"}


def test_strategic_merge_patch_merges_conditions_by_type(api: Api) -> None:
    name = api.create(1)
    when = "2026-01-01T00:00:00Z"
    for kind, reason in (("Ready", "A"), ("NetworkUnavailable", "B"), ("NetworkUnavailable", "C")):
        condition = {"type": kind, "status": "False", "reason": reason, "lastTransitionTime": when}
        patch = {"status": {"conditions": [condition]}}
        assert api.call("PATCH", f"{NODES}/{name}/status", body=patch, kind=STRATEGIC)[0] == 200
    conditions = api.call("GET", f"{NODES}/{name}")[1]["status"]["conditions"]
    assert {c["type"]: c["reason"] for c in conditions} == {"Ready": "A", "NetworkUnavailable": "C"}


def test_patch_without_change_keeps_the_version(api: Api) -> None:
    name = api.create(1, **{"a.example/x": "1"})
    patch = {"metadata": {"annotations": {"a.example/x": "1"}}}
    before = api.call("GET", f"{NODES}/{name}")[1]["metadata"]["resourceVersion"]
    node = api.call("PATCH", f"{NODES}/{name}/status", body=patch, kind=STRATEGIC)[1]
    assert node["metadata"]["resourceVersion"] == before


@pytest.mark.parametrize("path", [f"{NODES}/no-such-node", "/api/v1/namespaces/default/pods/no-such-pod"])
def test_missing_objects(api: Api, path: str) -> None:
    status, body = api.call("GET", path)
    assert (status, body["kind"], body["reason"], body["code"]) == (404, "Status", "NotFound", 404)
    assert "not found" in body["message"]


def test_initial_events_are_refused_in_the_stream_or_served(api: Api) -> None:
    query = {"sendInitialEvents": "true", "resourceVersionMatch": "NotOlderThan", "allowWatchBookmarks": "true"}
    events = api.watch("", 1, **query)
    assert events[0]["type"] in ("ERROR", "ADDED", "BOOKMARK")


def test_forgotten_versions(api: Api) -> None:
    if api.stub is None:
        pytest.skip("a real server forgets when its etcd is compacted")
    for number in range(3):
        api.create(number)
    version = api.version()
    token = api.call("GET", NODES, {"limit": 1})[1]["metadata"]["continue"]
    api.stub.forget()

    status, body = api.call("GET", NODES, {"limit": 1, "continue": token})
    assert (status, body["reason"]) == (410, "Expired")
    rest = api.call("GET", NODES, {"continue": body["metadata"]["continue"]})[1]
    assert [item["metadata"]["name"] for item in rest["items"]] == api.made[1:]

    status, body = api.call("GET", NODES, {"resourceVersion": version, "resourceVersionMatch": "Exact"})
    assert (status, body["reason"], body["code"]) == (410, "Expired", 410)

    events = api.watch(version)
    assert [(e["type"], e["object"]["reason"], e["object"]["code"]) for e in events] == [("ERROR", "Expired", 410)]


def test_bookmarks_come_where_they_are_allowed(api: Api) -> None:
    if api.stub is None:
        pytest.skip("a real server sends one each minute")
    api.stub.bookmark_s = 0.2
    version = api.version()
    assert api.watch(version, 1) == []
    events = api.watch(version, 1, allowWatchBookmarks="true")
    assert {e["type"] for e in events} == {"BOOKMARK"}
    assert {e["object"]["metadata"]["resourceVersion"] for e in events} == {version}


def test_strangers(api: Api) -> None:
    if api.stub is not None:
        api.stub.tokens = {"good"}
    status, body = api.call("GET", NODES, token="bad")
    assert (status, body["reason"]) == (401, "Unauthorized")
    anonymous = Api(api.url, stub=api.stub)
    status, body = anonymous.call("GET", NODES)
    assert (status, body["reason"]) == (403, "Forbidden")
    assert 'User "system:anonymous" cannot list resource "nodes"' in body["message"]


def test_other_patch_types_are_told_apart(api: Api) -> None:
    name = api.create(1)
    answer = api.send("PATCH", f"{NODES}/{quote(name)}/status", body={}, kind="text/plain")
    assert answer.status == 415
