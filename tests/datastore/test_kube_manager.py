from __future__ import annotations

import base64
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest
import yaml

from subnet.kube import client, configfile, keeper, reader
from subnet.manager import ConfigSeen, LeasesChanged, LeasesListed, OwnLease, ThisNode
from subnet.model import Lease, Subnets
from tests.support.etcd import Tls, free_port, make_tls, until
from tests.support.kube import PREFIX, KubeApi, node_annotations
from tests.support.kube_node import CONFIG, KubeNode, kube_node, request

pytestmark = pytest.mark.datastore


@pytest.fixture
def a(kube: KubeApi, tmp_path: Path) -> Iterator[KubeNode]:
    kube.node("n1", ["10.5.1.0/24"])
    with kube_node(kube, tmp_path) as a:
        yield a


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return make_tls(tmp_path_factory.mktemp("kube"), "kube")


def served_by(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tls.cert, tls.key)
    return context


def peer(kube: KubeApi, number: int) -> None:
    kube.node(
        f"n{number}", [f"10.5.{number}.0/24"], node_annotations(f"192.0.2.{number}", f"02:00:00:00:00:{number:02x}")
    )


def sees(node: KubeNode, *numbers: int) -> None:
    until(lambda: node.numbers() == set(numbers), what=f"peers {numbers}, has {sorted(node.numbers())}")


def public_ips(node: KubeNode, name: str) -> list[str]:
    """What changes, in their order, said of a node."""
    changes = [change for event in node.all(LeasesChanged) for change in event.changes]
    return [str(change.attrs.public_ip) for change in changes if isinstance(change, Lease) and change.key == name]


def lists(kube: KubeApi) -> int:
    return len([seen for seen in kube.asked("list") if "continue" not in seen.query])


def test_takes_the_pod_cidr_publishes_and_follows_others(kube: KubeApi, a: KubeNode) -> None:
    peer(kube, 2)
    lease = a.acquire(request())
    assert (lease.subnets, lease.key) == (Subnets(IPv4Network("10.5.1.0/24")), "n1")
    assert kube.told("n1")["public-ip"] == "192.0.2.1"
    sees(a, 2)
    kube.node("broken", ["10.5.9.0/24"], node_annotations("nowhere", "02:00:00:00:00:09"))
    kube.node("broken2", ["banana"], node_annotations("192.0.2.10"))
    kube.node("unmanaged", ["10.5.8.0/24"])
    peer(kube, 3)
    sees(a, 2, 3)
    kube.change("n3", {PREFIX + "kube-subnet-manager": "false"})
    sees(a, 2)
    kube.change("n3", {PREFIX + "kube-subnet-manager": "true"}, cidrs=["10.5.4.0/24"])
    sees(a, 2, 4)
    kube.delete("n2")
    sees(a, 4)
    assert lists(kube) == 1


def test_events_come_in_order(kube: KubeApi, a: KubeNode) -> None:
    peer(kube, 2)
    sees(a, 2)
    first = next(i for i, e in enumerate(a.events) if isinstance(e, ThisNode))
    config = next(i for i, e in enumerate(a.events) if isinstance(e, ConfigSeen))
    listed = next(i for i, e in enumerate(a.events) if isinstance(e, LeasesListed))
    assert first < config < listed


def test_heartbeats_are_no_news(kube: KubeApi, a: KubeNode) -> None:
    peer(kube, 2)
    sees(a, 2)
    told = len(a.events)
    for number in range(20):
        kube.patch("n2", {"status": {"conditions": [{"type": "Ready", "lastHeartbeatTime": str(number)}]}})
    peer(kube, 3)
    sees(a, 2, 3)
    assert len(a.events) == told + 1


def test_P02_cut_watches_are_taken_up_again(kube: KubeApi, a: KubeNode, caplog: pytest.LogCaptureFixture) -> None:
    peer(kube, 2)
    sees(a, 2)
    for number in range(3, 8):
        kube.cut_watches()
        peer(kube, number)
        sees(a, *range(2, number + 1))
    assert lists(kube) == 1
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


@pytest.mark.parametrize("how", ["in the stream", "as a status"])
def test_forgotten_versions_are_listed_anew(kube: KubeApi, a: KubeNode, how: str) -> None:
    peer(kube, 2)
    peer(kube, 3)
    sees(a, 2, 3)
    blocked = kube.fail("watch", 410 if how == "as a status" else "close")
    kube.cut_watches()
    kube.delete("n2")
    kube.change("n3", {PREFIX + "public-ip": "192.0.2.33"})
    if how == "in the stream":
        kube.forget()
    else:
        until(lambda: lists(kube) > 1, what="list")
    blocked.remove()
    sees(a, 3)
    (lease,) = a.leases.values()
    assert str(lease.attrs.public_ip) == "192.0.2.33"
    peer(kube, 4)
    sees(a, 3, 4)


def test_bookmarks_save_a_list(kube: KubeApi, a: KubeNode) -> None:
    until(lambda: kube.asked("watch"), what="watch")
    kube.bookmark_s = 0.1
    kube.cut_watches()
    until(lambda: len(kube.asked("watch")) >= 2, what="watch with quick bookmarks")
    kube.forget()
    forgotten = kube._oldest
    until(lambda: kube.marked >= forgotten, what="a bookmark")
    kube.cut_watches()
    until(lambda: int(kube.asked("watch")[-1].query["resourceVersion"]) >= forgotten, what="watch from the bookmark")
    peer(kube, 2)
    sees(a, 2)
    assert lists(kube) == 1


def test_frozen_watch_is_noticed(kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "SILENCE_S", 0.5)
    kube.bookmark_s = 0.1
    kube.node("n1", ["10.5.1.0/24"])
    with kube_node(kube, tmp_path) as a:
        sees(a)
        until(lambda: kube.asked("watch"), what="watch")
        kube.freeze()
        peer(kube, 2)
        sees(a, 2)
    assert lists(kube) == 1


def test_watch_asks_for_an_end_and_bookmarks(kube: KubeApi, a: KubeNode) -> None:
    until(lambda: kube.asked("watch"), what="watch")
    query = kube.asked("watch")[0].query
    assert query["allowWatchBookmarks"] == "true"
    assert 300 <= int(query["timeoutSeconds"]) <= 600


def test_K03_long_list_is_cut_in_the_middle_and_goes_on_there(
    kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, pages = 11_999, 24
    for number in range(count):
        high, low = divmod(number, 250)
        told = node_annotations(f"198.51.{high}.{low}", f"02:00:00:00:{high:02x}:{low:02x}")
        kube.node(f"m{number:05}", [f"10.{high + 1}.{low}.0/24"], told)
    kube.node("n1", ["10.200.1.0/24"])
    served = kube._route

    def cut_once(handler: Any, seen: Any, cut: bool) -> None:
        served(handler, seen, len(kube.asked("list")) == pages // 2)

    monkeypatch.setattr(kube, "_route", cut_once)
    with kube_node(kube, tmp_path, {**CONFIG, "Network": "10.0.0.0/8"}) as a:
        until(lambda: len(a.leases) == count, 60, what="all leases")
        asked = kube.asked("list")
        for number in range(50):
            kube.change("m00007", {PREFIX + "public-ip": f"203.0.113.{number}"})
        wanted = [f"203.0.113.{number}" for number in range(50)]
        until(lambda: public_ips(a, "m00007") == wanted, what="changes in order")
    assert {seen.query["limit"] for seen in asked} == {"500"}
    tokens = [seen.query.get("continue", "") for seen in asked]
    assert len(tokens) == pages + 1
    assert tokens[pages // 2 - 1] == tokens[pages // 2]
    assert len(set(tokens)) == pages


def test_page_that_fails_is_asked_again_alone(kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "PAGE", 2)
    for number in range(2, 8):
        peer(kube, number)
    served = kube._route

    def fails_once(handler: Any, seen: Any, cut: bool) -> None:
        if len(kube.asked("list")) == 2:
            handler.status(500, "injected")
        else:
            served(handler, seen, cut)

    monkeypatch.setattr(kube, "_route", fails_once)
    with kube_node(kube, tmp_path) as a:
        sees(a, *range(2, 8))
    tokens = [seen.query.get("continue", "") for seen in kube.asked("list")]
    assert tokens[0] == ""
    assert tokens[1] == tokens[2] != ""
    assert len(tokens) == 4


def test_server_that_forgets_between_pages_gives_all_at_once(
    kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "PAGE", 2)
    for number in range(2, 8):
        peer(kube, number)
    listed = kube._list

    def forgetful(handler: Any, seen: Any, cut: bool) -> None:
        listed(handler, seen, cut)
        kube.forget()

    monkeypatch.setattr(kube, "_list", forgetful)
    with kube_node(kube, tmp_path) as a:
        sees(a, *range(2, 8))
    asked = [seen.query for seen in kube.asked("list")]
    assert "limit" not in asked[-1]
    assert "continue" not in asked[-1]
    assert len(asked) == 5


def test_K11_refusal_is_named_at_once_and_cured_by_the_right(
    kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reader, "REFUSED_RETRY_S", 0.4)
    fault = kube.fail("list", 403)
    kube.node("n1", ["10.5.1.0/24"])
    with kube_node(kube, tmp_path) as a:
        until(lambda: a.state is not None, 5, "refusal")
        assert a.state is not None
        assert not a.state.reachable
        for word in ("list nodes", "forbidden", 'User "system:anonymous"', "a client without credentials"):
            assert word in a.state.problem
        time.sleep(1)
        assert len(kube.asked("list")) <= 4
        fault.remove()
        a.acquire(request())
    assert [r for r in caplog.records if "forbidden" in r.getMessage()]


def test_K11_patch_alone_refused(kube: KubeApi, a: KubeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "REFUSED_RETRY_S", 0.3)
    fault = kube.fail("patch", 403)
    a.manager.want(request())
    until(lambda: a.all(OwnLease), 5, "reason")
    assert "patch nodes/status n1 is forbidden" in a.all(OwnLease)[0].problem
    fault.remove()
    until(lambda: a.own is not None, what="own lease")


def test_patches_that_fail_are_repeated(kube: KubeApi, a: KubeNode) -> None:
    for action in (409, "close"):
        kube.fail("patch", action, times=1)
    kube.fail("patch", 429, times=1, retry_after="1")
    a.acquire(request())
    asked = kube.asked("patch")
    assert len(asked) == 4
    assert asked[3].at - asked[2].at >= 1
    assert len(kube.patches("n1")) == 1


def test_patches_are_strategic_merges_of_the_status(kube: KubeApi, a: KubeNode) -> None:
    a.acquire(request())
    (patch,) = kube.asked("patch")
    assert patch.path == "/api/v1/nodes/n1/status"
    assert patch.headers["content-type"] == "application/strategic-merge-patch+json"
    assert set(json.loads(patch.body)) == {"metadata"}


def test_condition_is_set_when_ready(kube: KubeApi, a: KubeNode) -> None:
    a.acquire(request())
    assert kube.condition("n1") is None
    a.manager.ready()
    until(lambda: kube.condition("n1"), what="condition")
    condition = kube.condition("n1")
    assert condition is not None
    assert condition["status"] == "False"
    assert condition["lastTransitionTime"].startswith("20")


@pytest.mark.parametrize("spec", [{"podCIDR": "10.5.1.0/24"}, {"podCIDR": "", "podCIDRs": ["10.5.1.0/24"]}])
def test_K01_pod_cidr_that_comes_late_is_taken_from_either_field(
    kube: KubeApi, tmp_path: Path, spec: dict[str, Any]
) -> None:
    kube.node("n1")
    with kube_node(kube, tmp_path) as a:
        a.manager.want(request())
        until(lambda: a.all(OwnLease), what="reason")
        assert all(word in a.all(OwnLease)[0].problem for word in ("n1", "spec.podCIDR", "--allocate-node-cidrs"))
        kube.patch_spec("n1", spec)
        until(lambda: a.own is not None, what="own lease")


def test_K15_daemons_with_prefixes_of_their_own_do_not_see_each_other(kube: KubeApi, tmp_path: Path) -> None:
    for number in (1, 2):
        kube.node(f"n{number}", [f"10.5.{number}.0/24"])
    prefixes = {"a.example.com/": "02:00:00:00:01:0a", "a.example.com/x-": "02:00:00:00:01:0b"}
    for prefix, mac in prefixes.items():
        with kube_node(kube, tmp_path, prefix=prefix) as a, kube_node(kube, tmp_path, node_name="n2") as other:
            a.acquire(request(mac=mac))
            sees(other)
            assert str(a.acquire(request(mac=mac)).subnets) == "10.5.1.0/24"
    found = kube.nodes["n1"]["metadata"]["annotations"]
    assert {prefix: mac in found[f"{prefix}backend-data"] for prefix, mac in prefixes.items()} == dict.fromkeys(
        prefixes, True
    )
    assert not kube.told("n1")


def test_K14_overwrites_are_followed(kube: KubeApi, a: KubeNode) -> None:
    a.acquire(request())
    for overwrite, published in (("203.0.113.5", "203.0.113.5"), (None, "192.0.2.1")):
        kube.change("n1", {PREFIX + "public-ip-overwrite": overwrite})
        until(lambda: kube.told("n1")["public-ip"] == published, what=f"published {published}")  # noqa: B023


def test_lost_annotations_come_back(kube: KubeApi, a: KubeNode) -> None:
    a.acquire(request())
    before = kube.told("n1")
    kube.change("n1", {PREFIX + name: None for name in before})
    until(lambda: kube.told("n1") == before, what="annotations")


def test_S08_addresses_that_operators_want(kube: KubeApi, tmp_path: Path) -> None:
    kube.node("n1", ["10.5.1.0/24"], {PREFIX + "node-public-ip": "198.51.100.7"})
    with kube_node(kube, tmp_path) as a:
        until(lambda: a.config, what="config")
        assert a.this is not None
        assert str(a.this.public_ip) == "198.51.100.7"
        kube.change("n1", {PREFIX + "node-public-ip": None})
        until(lambda: a.this == ThisNode(), what="annotation gone")


def test_K13_alloc_neither_lists_nor_watches(kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "OWN_POLL_S", 0.1)
    monkeypatch.setattr(reader, "OWN_POLL_WAITING_S", 0.1)
    config = {**CONFIG, "Backend": {"Type": "alloc"}}
    kube.node("n1")
    peer(kube, 2)
    with kube_node(kube, tmp_path, config) as a:
        until(lambda: a.all(LeasesListed), what="empty list")
        a.manager.want(request(config=config))
        until(lambda: a.all(OwnLease), what="reason")
        kube.change("n1", cidrs=["10.5.1.0/24"])
        until(lambda: a.own is not None, what="own lease")
        kube.change("n1", {PREFIX + "public-ip-overwrite": "203.0.113.5"})
        until(lambda: kube.told("n1")["public-ip"] == "203.0.113.5", what="overwrite")
        assert a.all(LeasesListed)[0].leases == ()
    assert {seen.verb for seen in kube.requests} == {"get", "patch"}
    assert {seen.query["resourceVersion"] for seen in kube.asked("get")} == {"0"}


def test_K10_pod_look_up_is_repeated(kube: KubeApi, tmp_path: Path) -> None:
    kube.node("n7", ["10.5.7.0/24"])
    fault = kube.fail("get", 500)
    with kube_node(kube, tmp_path, node_name="", pod_name="ds-x", pod_namespace="kube-flannel") as a:
        until(lambda: len(kube.asked("get")) >= 3, what="several look-ups")
        fault.remove()
        until(lambda: len(kube.asked("get")) >= 5, what="pod that does not exist")
        kube.pods["kube-flannel/ds-x"] = {"metadata": {"name": "ds-x"}, "spec": {"nodeName": "n7"}}
        assert str(a.acquire(request()).subnets) == "10.5.7.0/24"


def test_K10_server_that_comes_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: Tls) -> None:
    monkeypatch.setattr(client, "CONNECT_S", 0.5)
    monkeypatch.setattr(client, "ANSWER_S", 0.5)
    api = KubeApi(served_by(tls))
    api.port = free_port()
    api.node("n1", ["10.5.1.0/24"])
    kubeconfig = write_kubeconfig(tmp_path, api.url, tls)
    with kube_node("", tmp_path, kubeconfig_file=str(kubeconfig)) as a:
        until(lambda: a.state is not None and "refused" in a.state.problem, what="refusal in words")
        with socket.create_server(("127.0.0.1", api.port)):
            until(lambda: a.state is not None and "timed out" in a.state.problem, what="silence in words")
        api.start()
        fault = api.fail("list", "hang")
        until(lambda: len(api.asked("list")) >= 2, what="list that hangs")
        fault.remove()
        try:
            a.acquire(request())
        finally:
            api.stop()


def write_kubeconfig(directory: Path, url: str, tls: Tls, **user: Any) -> Path:
    ca = base64.b64encode(tls.ca.read_bytes()).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "here",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority-data": ca}}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
    }
    path = directory / "admin.conf"
    path.write_text(json.dumps(document))
    return path


def test_kubeconfig_with_token_and_a_url_that_overrides_its_server(tmp_path: Path, tls: Tls) -> None:
    with KubeApi(served_by(tls)) as api:
        api.tokens = {"t0ken"}
        api.node("n1", ["10.5.1.0/24"])
        kubeconfig = write_kubeconfig(tmp_path, "https://127.0.0.1:1", tls, token="t0ken")
        with kube_node(api, tmp_path, kubeconfig_file=str(kubeconfig)) as a:
            a.acquire(request())


def test_kubeconfig_with_client_certificate_leaves_no_copies(
    tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    context = served_by(tls)
    context.load_verify_locations(tls.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    pair = {
        "client-certificate-data": base64.b64encode(tls.cert.read_bytes()).decode(),
        "client-key-data": base64.b64encode(tls.key.read_bytes()).decode(),
    }
    with KubeApi(context) as api:
        api.node("n1", ["10.5.1.0/24"])
        kubeconfig = write_kubeconfig(tmp_path, api.url, tls, **pair)
        with kube_node("", tmp_path, kubeconfig_file=str(kubeconfig)) as a:
            a.acquire(request())
            assert list(scratch.iterdir())
    assert not list(scratch.iterdir())


def test_bad_kubeconfig_is_named_without_its_secrets_and_read_again(
    kube: KubeApi, tmp_path: Path, tls: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    kube.node("n1", ["10.5.1.0/24"])
    path = tmp_path / "admin.conf"
    path.write_text("users: [{user: {token: s3cret}}\n")
    with kube_node("", tmp_path, kubeconfig_file=str(path)) as a:
        until(lambda: a.state is not None, what="reason")
        assert a.state is not None
        assert str(path) in a.state.problem
        write_kubeconfig(tmp_path, kube.url, tls)
        a.acquire(request())
    assert "s3cret" not in caplog.text


def test_service_account_whose_token_is_replaced(tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch) -> None:
    token = tmp_path / "token"
    token.write_text("first\n")
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(tls.ca))
    monkeypatch.setattr(reader, "REFUSED_RETRY_S", 0.2)
    with KubeApi(served_by(tls)) as api:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api.port))
        api.tokens = {"first"}
        api.node("n1", ["10.5.1.0/24"])
        with kube_node("", tmp_path) as a:
            a.acquire(request())
            api.tokens = {"second"}
            token.write_text("second")
            api.cut_watches()
            peer(api, 2)
            sees(a, 2)


def test_server_certificate_of_a_stranger_is_refused(tmp_path: Path, tls: Tls) -> None:
    other = make_tls(tmp_path, "other")
    with KubeApi(served_by(other)) as api:
        kubeconfig = write_kubeconfig(tmp_path, api.url, tls)
        with kube_node("", tmp_path, kubeconfig_file=str(kubeconfig)) as a:
            until(lambda: a.state is not None, what="reason")
            assert a.state is not None
            assert "certificate verify failed" in a.state.problem


def test_config_changes_are_noticed(kube: KubeApi, a: KubeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configfile, "LOOK_EACH_S", 0.05)
    until(lambda: a.config, what="config")
    a.write_config({**CONFIG, "Backend": {"Type": "vxlan", "MTU": 1400}})
    until(
        lambda: a.config and a.config.config and a.config.config.backend.options.get("MTU") == 1400,
        what="changed config",
    )
    a.write_config("{")
    until(lambda: a.config and a.config.config is None, what="broken config")
    assert a.config is not None
    assert str(a.path) in a.config.problem


def test_config_that_comes_late(kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configfile, "LOOK_EACH_S", 0.05)
    kube.node("n1", ["10.5.1.0/24"])
    with kube_node(kube, tmp_path, None) as a:
        until(lambda: a.config, what="reason")
        assert a.config is not None
        assert a.config.config is None
        a.write_config(CONFIG)
        a.acquire(request())


def test_own_node_deleted_and_made_again(kube: KubeApi, a: KubeNode) -> None:
    a.acquire(request())
    kube.delete("n1")
    until(lambda: a.own is None, what="lease lost")
    kube.node("n1", ["10.5.9.0/24"])
    until(lambda: a.own is not None and str(a.own.subnets) == "10.5.9.0/24", what="lease of the new node")
    assert kube.told("n1")["public-ip"] == "192.0.2.1"


def test_underlay_changes_make_it_ask_anew(kube: KubeApi, a: KubeNode) -> None:
    a.acquire(request())
    until(lambda: kube.asked("watch"), what="watch")
    kube.freeze()
    a.manager.underlay_changed()
    peer(kube, 2)
    sees(a, 2)


def test_an_underlay_change_counts_for_a_watch_that_has_no_answer_yet(
    kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, asked = kube.answer, threading.Event()

    def late(handler: Any, seen: Any) -> None:
        if seen.verb == "watch":
            asked.wait(20)
        answer(handler, seen)

    monkeypatch.setattr(kube, "answer", late)
    kube.node("n1", ["10.5.1.0/24"])
    with kube_node(kube, tmp_path) as a:
        a.acquire(request())
        until(lambda: kube.asked("watch"), what="watch")
        kube.freeze()
        a.manager.underlay_changed()
        asked.set()
        peer(kube, 2)
        sees(a, 2)


def test_close_ends_the_threads_at_once(kube: KubeApi, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    kube.node("n1", ["10.5.1.0/24"])
    with kube_node(kube, tmp_path) as a:
        a.acquire(request())
        until(lambda: kube.asked("watch"), what="watch")
        mine = {t for t in threading.enumerate() if t.name in ("net-conf", "kube-watch", "kube-node")} - before
        assert len(mine) == 3
        began = time.monotonic()
        a.manager.close()
        assert time.monotonic() - began < 1
        until(lambda: not any(t.is_alive() for t in mine), 2, "threads gone")


def test_rights_of_the_manifest_are_those_that_are_used(
    kube: KubeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "OWN_POLL_WAITING_S", 0.1)
    manifest = Path(__file__).parents[2] / "deploy" / "kube-flannel.yml"
    role = next(made for made in yaml.safe_load_all(manifest.read_text()) if made["kind"] == "ClusterRole")
    granted = {(res, verb) for rule in role["rules"] for res in rule["resources"] for verb in rule["verbs"]}

    kube.node("n1", ["10.5.1.0/24"])
    kube.pods["kube-flannel/ds-x"] = {"metadata": {"name": "ds-x"}, "spec": {"nodeName": "n1"}}
    for kind in ("vxlan", "alloc"):
        config = {**CONFIG, "Backend": {"Type": kind}}
        with kube_node(kube, tmp_path, config, node_name="", pod_name="ds-x", pod_namespace="kube-flannel") as a:
            a.acquire(request(config=config))
            a.manager.ready()
            until(lambda: kube.condition("n1"), what="condition")
    parts = [(seen.path.split("/"), seen.verb) for seen in kube.requests]
    used = {("pods" if "pods" in p else "nodes/status" if p[-1] == "status" else "nodes", verb) for p, verb in parts}
    assert used == granted
