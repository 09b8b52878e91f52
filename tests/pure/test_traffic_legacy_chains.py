"""A legacy table built here by hand, as libiptc lays it out."""

from __future__ import annotations

import struct
from contextlib import suppress
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.traffic.entry import encode
from flanneld.traffic.legacy_chains import Table
from flanneld.traffic.rules import Rule, RuleSet

pytestmark = pytest.mark.pure

OURS = RuleSet("filter", "FLANNEL-FWD", "FORWARD", Rule("FLANNEL-FWD"), (), frozenset())
ACCEPT, RETURN = -2, -5
HEAD_BYTES = 112
"""sizeof(struct ipt_entry)."""


def standard(verdict: int, rule: Rule | None = None) -> bytes:
    """An entry with a verdict, or with the place of the chain that it jumps to."""
    entry = encode(rule or Rule(""), 4)
    head = entry[: struct.unpack_from("@H", entry, 88)[0]]
    return head + struct.pack("@H29sBi4x", 40, b"", 0, verdict)


def error(name: bytes) -> bytes:
    """The entry before a chain's first, and the last of a table."""
    head = bytearray(encode(Rule(""), 4)[:HEAD_BYTES])
    struct.pack_into("@HH", head, 88, HEAD_BYTES, HEAD_BYTES + 64)
    return bytes(head) + struct.pack("@H29sB30s2x", 64, b"ERROR", 0, name)


PLAIN = len(standard(ACCEPT))


def table(hook: list[bytes], chains: dict[bytes, list[bytes]]) -> Table:
    data, entries, policies = b"", [0] * 5, [0] * 5
    for number in (1, 2, 3):
        entries[number] = len(data)
        data += b"".join(hook) if number == 2 else b""
        policies[number] = len(data)
        data += standard(ACCEPT)
    for name, rules in chains.items():
        data += error(name) + b"".join(rules) + standard(RETURN)
    return Table(4, data + error(b"ERROR"), tuple(entries), tuple(policies))


def first_of_ours(hook_bytes: int) -> int:
    return hook_bytes + 3 * PLAIN + HEAD_BYTES + 64


FROM = Rule("", source=ip_network("10.5.0.0/16"))


def test_chains_are_found_by_name_and_jumps_by_place() -> None:
    first = first_of_ours(2 * PLAIN)
    made = table([standard(first), standard(RETURN)], {b"FLANNEL-FWD": [standard(ACCEPT, FROM)], b"OTHER": []})
    look = made.look(OURS)
    assert look.chains == {
        "FORWARD": ("-j FLANNEL-FWD", "-j RETURN"),
        "FLANNEL-FWD": ("-s 10.5.0.0/16 -j ACCEPT",),
    }
    assert look.jumps == {"FLANNEL-FWD": 1}
    assert look.tells_all(OURS, understood=True)


def test_a_jump_from_another_chain_is_counted() -> None:
    first = first_of_ours(PLAIN)
    made = table([standard(first)], {b"FLANNEL-FWD": [], b"OTHER": [standard(first, FROM)]})
    look = made.look(OURS)
    assert look.jumps == {"FLANNEL-FWD": 2}
    assert not look.tells_all(OURS, understood=True)


def test_without_our_chain_there_are_no_jumps_to_it() -> None:
    look = table([standard(RETURN)], {b"FLANNEL-FWD-2": [], b"XFLANNEL-FWD": []}).look(OURS)
    assert look.chains == {"FORWARD": ("-j RETURN",)}
    assert look.jumps == {}


def test_a_rule_without_a_target_only_counts() -> None:
    made = table([standard(2 * PLAIN), standard(ACCEPT)], {})
    assert made.look(OURS).chains["FORWARD"] == ("-m opaque", "-j ACCEPT")


@given(st.binary(max_size=600), st.integers(0, 600))
def test_bytes_that_are_no_table_are_refused_or_read(data: bytes, end: int) -> None:
    with suppress(ValueError, struct.error):
        Table(4, data, (0,) * 5, (end,) * 5).look(OURS)
