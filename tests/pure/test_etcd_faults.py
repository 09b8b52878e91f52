from __future__ import annotations

import pytest

from subnet.errors import AccessDenied, Compacted, Conflict, DatastoreError, Unavailable
from subnet.etcd.faults import Kind, kind, translate

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("code", "text", "error", "words"),
    [
        ("UNAVAILABLE", "connect: refused", Unavailable, "refused"),
        ("UNAVAILABLE", "etcdserver: no leader", Unavailable, "no leader"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Unavailable, "Deadline"),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", AccessDenied, "authentication failed"),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", AccessDenied, "demands authentication to read /x"),
        (
            "INVALID_ARGUMENT",
            "etcdserver: authentication failed, invalid user ID or password",
            AccessDenied,
            "wrong user name or password",
        ),
        ("PERMISSION_DENIED", "etcdserver: permission denied", AccessDenied, "permission denied to read /x"),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", DatastoreError, "NOSPACE"),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", Compacted, "compacted"),
        ("NOT_FOUND", "etcdserver: requested lease not found", Conflict, "lease not found"),
        ("UNIMPLEMENTED", "", DatastoreError, "v3 API"),
        ("INVALID_ARGUMENT", "etcdserver: too many operations", DatastoreError, "cannot read /x: too many"),
    ],
)
def test_E18_each_fault_has_its_class_and_words(code: str, text: str, error: type[Exception], words: str) -> None:
    raised = translate(code, text, "http://192.0.2.254:2379", "read /x", "flannel")
    assert type(raised) is error
    assert words in str(raised)
    assert str(raised).startswith("http://192.0.2.254:2379: ")


def test_kinds() -> None:
    assert kind("UNAVAILABLE", "") is Kind.TRANSPORT
    assert kind("UNAUTHENTICATED", "") is Kind.TOKEN
    assert kind("INVALID_ARGUMENT", "etcdserver: revision of auth store is old") is Kind.TOKEN
    assert kind("PERMISSION_DENIED", "") is Kind.FINAL
