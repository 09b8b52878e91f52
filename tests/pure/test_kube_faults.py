from __future__ import annotations

import base64
import json

import pytest

from subnet.errors import AccessDenied, Compacted, Conflict, DatastoreError, Unavailable, UsageError
from subnet.kube.faults import Busy, NotFound, Request, account_of, read_status, refused
from subnet.kube.records import Status
from subnet.kube.settings import KubeSettings, check

pytestmark = pytest.mark.pure

LIST = Request("list", "nodes")
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (400, DatastoreError),
        (401, AccessDenied),
        (403, AccessDenied),
        (404, NotFound),
        (409, Conflict),
        (410, Compacted),
        (422, DatastoreError),
        (429, Busy),
        (500, Unavailable),
        (504, Unavailable),
    ],
)
def test_what_a_code_means(code: int, kind: type[DatastoreError]) -> None:
    assert type(refused(LIST, code, Status(), account="a")) is kind


@pytest.mark.parametrize(
    ("code", "header", "seconds"),
    [(429, "7", 7.0), (503, "2", 2.0), (429, "", 1.0), (429, "soon", 1.0), (429, "86400", 60.0)],
)
def test_how_long_the_server_wants_to_be_left_alone(code: int, header: str, seconds: float) -> None:
    error = refused(LIST, code, Status(), account="a", retry_after=header)
    assert isinstance(error, Busy)
    assert error.retry_after_s == seconds


@pytest.mark.parametrize("code", [401, 403])
def test_K11_refusals_name_verb_resource_and_account(code: int) -> None:
    request = Request("patch", "nodes/status", "n1")
    text = str(refused(request, code, Status("why not"), account="system:serviceaccount:kube-flannel:flannel"))
    for word in ("patch", "nodes/status", "n1", "system:serviceaccount:kube-flannel:flannel", "why not", str(code)):
        assert word in text


@pytest.mark.parametrize("body", [b"", b"<html>502 Bad Gateway</html>", b"[1]", b"\xff" * 2000])
def test_answers_of_proxies_are_quoted_in_part(body: bytes) -> None:
    status = read_status(body)
    assert status.code == 0
    assert len(status.message or "") <= 300


def token(payload: object) -> str:
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in ({}, payload, {})
    )


def test_account_of_a_token() -> None:
    assert account_of(f"bearer {token({'sub': 'system:serviceaccount:a:b'})}", "?") == "system:serviceaccount:a:b"


@pytest.mark.parametrize(
    "given", ["", "Bearer opaque", "Bearer a.b.c", f"Bearer {token([1])}", f"Bearer {token({'sub': 'x' + chr(10)})}"]
)
def test_tokens_without_account(given: str) -> None:
    assert account_of(given, "somebody") == "somebody"


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        (KubeSettings(node_name="n1"), IN_POD),
        (KubeSettings(pod_name="p", pod_namespace="s"), IN_POD),
        (KubeSettings(node_name="n1", api_url="https://a"), {}),
        (KubeSettings(node_name="n1", kubeconfig_file="/k"), {}),
        (KubeSettings(node_name="n1"), {**IN_POD, "EVENT_QUEUE_DEPTH": "5000", "CONT_WHEN_CACHE_NOT_READY": "true"}),
        (KubeSettings(node_name="n1"), {**IN_POD, "EVENT_QUEUE_DEPTH": "-1"}),
    ],
)
def test_settings_that_will_do(settings: KubeSettings, environ: dict[str, str]) -> None:
    check(settings, environ)


@pytest.mark.parametrize(
    ("settings", "environ", "word"),
    [
        (KubeSettings(), IN_POD, "NODE_NAME"),
        (KubeSettings(pod_name="p"), IN_POD, "POD_NAMESPACE"),
        (KubeSettings(node_name="n1"), {}, "KUBERNETES_SERVICE_HOST"),
        (KubeSettings(node_name="n1", api_url="192.0.2.1:6443"), {}, "kube-api-url"),
        (KubeSettings(node_name="n1"), {**IN_POD, "EVENT_QUEUE_DEPTH": "many"}, "EVENT_QUEUE_DEPTH"),
    ],
)
def test_settings_that_no_waiting_cures(settings: KubeSettings, environ: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        check(settings, environ)
