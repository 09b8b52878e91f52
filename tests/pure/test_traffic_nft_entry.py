"""Rules in the kernel's words (linux/netfilter/nf_tables.h), written here by hand."""

from __future__ import annotations

import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.traffic.look import Look, is_opaque
from flanneld.traffic.nfnetlink import attribute_list
from flanneld.traffic.nft_entry import decode, jumps
from flanneld.traffic.rules import Rule, RuleSet

pytestmark = pytest.mark.pure

REGISTER = 1


def attr(kind: int, value: bytes | str | int) -> bytes:
    if isinstance(value, int):
        value = struct.pack(">I", value & 0xFFFFFFFF)
    elif isinstance(value, str):
        value = value.encode() + b"\0"
    return (struct.pack("=HH", 4 + len(value), kind) + value).ljust((4 + len(value) + 3) & ~3, b"\0")


def expression(name: str, *parts: bytes) -> bytes:
    return attr(1, attr(1, name) + attr(2, b"".join(parts)))


def payload(offset: int, length: int) -> bytes:
    return expression("payload", attr(1, REGISTER), attr(2, 1), attr(3, offset), attr(4, length))


def bitwise(mask: bytes, xor: bytes | None = None) -> bytes:
    masks = attr(4, attr(1, mask)), attr(5, attr(1, xor or bytes(len(mask))))
    return expression("bitwise", attr(1, REGISTER), attr(2, REGISTER), attr(3, len(mask)), *masks)


def compare(value: bytes, operation: int = 0) -> bytes:
    return expression("cmp", attr(1, REGISTER), attr(2, operation), attr(3, attr(1, value)))


def verdict(code: int, chain: str = "") -> bytes:
    return expression("immediate", attr(1, 0), attr(2, attr(2, attr(1, code) + (attr(2, chain) if chain else b""))))


def host_order(number: int) -> bytes:
    return number.to_bytes(4, sys.byteorder)


META_MARK = expression("meta", attr(2, 3), attr(1, REGISTER))
COMMENT = expression("match", attr(1, "comment"), attr(2, 0), attr(3, b"flanneld masq".ljust(256, b"\0")))
COUNTER = expression("counter", attr(1, bytes(8)), attr(2, bytes(8)))
RETURN, JUMP, GOTO, ACCEPT = -5, -3, -4, 1
SAID = '-m comment --comment "flanneld masq"'
# struct nf_nat_ipv4_multi_range_compat: one range, its flags, nothing else; 0x10 is PROTO_RANDOM_FULLY.
RANGE = struct.pack("@II4s4sHH", 1, 0x10, b"", b"", 0, 0).ljust(24, b"\0")
# struct nf_nat_range of IPv6.
RANGE6 = struct.pack("@I16s16sHH", 0x10, b"", b"", 0, 0)
XT_MARK = struct.pack("@IIB", 0x4000, 0x4000, 0)


@pytest.mark.parametrize(
    ("expressions", "expected"),
    [
        (
            META_MARK + bitwise(host_order(0x4000)) + compare(host_order(0x4000)) + COMMENT + COUNTER + verdict(RETURN),
            f"-m mark --mark 0x4000/0x4000 {SAID} -j RETURN",
        ),
        (
            # Up to 1.8.7 the mark is compared by the extension.
            expression("match", attr(1, "mark"), attr(2, 1), attr(3, XT_MARK.ljust(16, b"\0"))) + verdict(RETURN),
            "-m mark --mark 0x4000/0x4000 -j RETURN",
        ),
        (
            payload(12, 3) + compare(bytes([10, 5, 7])) + payload(16, 2) + compare(bytes([10, 5])) + verdict(RETURN),
            "-s 10.5.7.0/24 -d 10.5.0.0/16 -j RETURN",
        ),
        (
            payload(12, 2) + compare(bytes([10, 5]), 1) + payload(16, 3) + compare(bytes([10, 5, 7])) + verdict(RETURN),
            "! -s 10.5.0.0/16 -d 10.5.7.0/24 -j RETURN",
        ),
        (
            payload(16, 4)
            + bitwise(bytes([240, 0, 0, 0]))
            + compare(bytes([224, 0, 0, 0]), 1)
            + expression("target", attr(1, "MASQUERADE"), attr(2, 0), attr(3, RANGE)),
            "! -d 224.0.0.0/4 -j MASQUERADE --random-fully",
        ),
        (expression("masq", attr(1, 0x10)), "-j MASQUERADE --random-fully"),
        (expression("masq"), "-j MASQUERADE"),
        (COMMENT + verdict(JUMP, "FLANNEL-POSTRTG"), f"{SAID} -j FLANNEL-POSTRTG"),
        (expression("target", attr(1, "REJECT"), attr(2, 0), attr(3, bytes(8))), "-j REJECT"),
        (payload(12, 4) + compare(bytes([10, 0, 0, 1])) + verdict(ACCEPT), "-s 10.0.0.1/32 -j ACCEPT"),
    ],
)
def test_rules_read_as_iptables_save_prints_them(expressions: bytes, expected: str) -> None:
    assert decode(expressions, 4) == expected


def test_rules_of_ipv6() -> None:
    network = bytes.fromhex("fc0000050000")
    expressions = (
        payload(8, 6)
        + compare(network)
        + payload(24, 16)
        + bitwise(b"\xff".ljust(16, b"\0"))
        + compare(b"\xff".ljust(16, b"\0"), 1)
        + COMMENT
        + expression("target", attr(1, "MASQUERADE"), attr(2, 0), attr(3, RANGE6))
    )
    assert decode(expressions, 6) == f"-s fc00:5::/48 ! -d ff00::/8 {SAID} -j MASQUERADE --random-fully"


@pytest.mark.parametrize(
    "expressions",
    [
        expression("meta", attr(2, 16), attr(1, REGISTER)) + compare(b"\x06") + verdict(ACCEPT),
        payload(9, 1) + compare(b"\x06") + verdict(ACCEPT),
        payload(12, 4) + bitwise(bytes([255, 0, 255, 0])) + compare(bytes([10, 0, 1, 0])) + verdict(ACCEPT),
        payload(12, 2) + compare(b"\x0a\x05") + payload(12, 2) + compare(b"\x0a\x06") + verdict(ACCEPT),
        META_MARK + compare(host_order(0x4000)) + verdict(RETURN),
        META_MARK + bitwise(host_order(0x4000)) + compare(host_order(0x4000), 1) + verdict(RETURN),
        META_MARK + bitwise(host_order(0x4000), host_order(1)) + compare(host_order(0x4000)) + verdict(RETURN),
        payload(12, 2) + compare(b"\x0a\x05", 2) + verdict(ACCEPT),
        verdict(GOTO, "FLANNEL-FWD"),
        verdict(ACCEPT) + verdict(ACCEPT),
        COUNTER,
        expression("limit") + verdict(ACCEPT),
        expression("masq", attr(2, 8)),
        expression("target", attr(1, "LOG"), attr(2, 0), attr(3, bytes(32))),
        expression("target", attr(1, "MASQUERADE"), attr(2, 0), attr(3, RANGE.replace(b"\x10", b"\x04"))),
    ],
)
def test_a_rule_that_says_anything_else_is_opaque(expressions: bytes) -> None:
    assert is_opaque(decode(expressions, 4))


def test_an_opaque_rule_still_names_the_chain_it_leads_to() -> None:
    limited = expression("limit") + verdict(JUMP, "FLANNEL-FWD")
    assert decode(limited, 4) == decode(verdict(GOTO, "FLANNEL-FWD"), 4) == "-m opaque -j FLANNEL-FWD"
    assert list(jumps(limited)) == list(jumps(verdict(GOTO, "FLANNEL-FWD"))) == ["FLANNEL-FWD"]
    assert list(jumps(COMMENT + verdict(ACCEPT))) == []


@given(st.binary(max_size=200))
def test_whatever_bytes_there_are_a_text_comes_out(data: bytes) -> None:
    assert isinstance(decode(data, 4), str)
    assert isinstance(decode(attr(1, attr(1, "cmp") + attr(2, data)), 6), str)
    assert all(isinstance(name, str) for name in jumps(data))
    assert len(list(attribute_list(data))) <= len(data) // 4


OURS = RuleSet("filter", "FLANNEL-FWD", "FORWARD", Rule("FLANNEL-FWD"), (), frozenset())


@pytest.mark.parametrize(
    ("ours", "hook", "jumps_there_are", "understood", "expected"),
    [
        (["-j ACCEPT"], ["-j FLANNEL-FWD"], 1, False, True),
        (["-j ACCEPT"], ["-m opaque -j DOCKER", "-m opaque"], 0, False, True),
        (["-j ACCEPT"], ["-j FLANNEL-FWD", "-j FLANNEL-FWD"], 2, False, True),
        (["-j ACCEPT"], ["-j FLANNEL-FWD"], 2, True, False),
        (["-m opaque"], ["-j FLANNEL-FWD"], 1, False, False),
        (["-m opaque"], ["-j FLANNEL-FWD"], 1, True, True),
        (["-j ACCEPT"], ["-m opaque -j FLANNEL-FWD"], 1, True, False),
    ],
    ids=["as wanted", "others", "twice", "jump from elsewhere", "ours or a stray", "a stray", "unreadable jump"],
)
def test_a_look_knows_when_it_has_not_seen_all(
    ours: list[str], hook: list[str], *, jumps_there_are: int, understood: bool, expected: bool
) -> None:
    look = Look({"FLANNEL-FWD": tuple(ours), "FORWARD": tuple(hook)}, {"FLANNEL-FWD": jumps_there_are})
    assert look.tells_all(OURS, understood=understood) is expected


def test_a_look_at_absent_chains_tells_all() -> None:
    assert Look({}, {}).tells_all(OURS, understood=False)
