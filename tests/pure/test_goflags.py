from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld import goflags
from subnet.errors import UsageError

pytestmark = pytest.mark.pure

KINDS: dict[str, goflags.Kind] = {"masq": "bool", "port": "int", "file": "string", "iface": "string"}


def parse(argv: Sequence[str]) -> dict[str, list[goflags.Value]]:
    given = goflags.parse(argv, KINDS)
    assert given is not None
    return given


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ([], {}),
        (["-file=a"], {"file": ["a"]}),
        (["--file=a"], {"file": ["a"]}),
        (["-file", "a"], {"file": ["a"]}),
        (["--file", "a"], {"file": ["a"]}),
        (["--file="], {"file": [""]}),
        (["--file", ""], {"file": [""]}),
        (["--file=a=b"], {"file": ["a=b"]}),
        (["--file", "--masq"], {"file": ["--masq"]}),
        (["--file", "--"], {"file": ["--"]}),
        (["--file", "-h"], {"file": ["-h"]}),
        (["--file=a", "-file=b"], {"file": ["a", "b"]}),
        (["--iface=a", "--masq", "--iface", "b"], {"iface": ["a", "b"], "masq": [True]}),
        (["--masq"], {"masq": [True]}),
        (["--masq", "--masq=0"], {"masq": [True, False]}),
        (["--port", "-5"], {"port": [-5]}),
        (["--masq", "--"], {"masq": [True]}),
        (["--"], {}),
    ],
)
def test_syntax(argv: list[str], expected: dict[str, list[goflags.Value]]) -> None:
    assert parse(argv) == expected


@pytest.mark.parametrize("text", ["1", "t", "T", "TRUE", "true", "True"])
def test_true(text: str) -> None:
    assert parse([f"--masq={text}"]) == {"masq": [True]}


@pytest.mark.parametrize("text", ["0", "f", "F", "FALSE", "false", "False"])
def test_false(text: str) -> None:
    assert parse([f"--masq={text}"]) == {"masq": [False]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("00", 0),
        ("-0", 0),
        ("+5", 5),
        ("-5", -5),
        ("+05", 5),
        ("010", 8),
        ("0o17", 15),
        ("0O17", 15),
        ("0x3c", 60),
        ("0X3C", 60),
        ("-0xf", -15),
        ("0b101", 5),
        ("0B101", 5),
        ("8_0_8_1", 8081),
        ("0x_ff", 255),
        ("0_7", 7),
        ("0b1_0", 2),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
    ],
)
def test_integers(text: str, expected: int) -> None:
    assert parse([f"--port={text}"]) == {"port": [expected]}


@pytest.mark.parametrize(
    "text",
    [
        *["", " ", "x", "1.0", "1e3", "08", "0x", "0b", "0b2", "0o8", "0xg", "_1", "1_", "1__0", "0x1_", "_0x1"],
        *["+", "-", "+-1", "--1", " 1", "1 ", "1\n", "٣", "9223372036854775808", "-9223372036854775809"],
    ],
)
def test_bad_integers_name_flag_and_value(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse([f"--port={text}"])
    assert str(caught.value).startswith(f"--port: {text!r} ")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--masq=maybe"], ["--masq", "maybe"]),
        (["--masq="], ["--masq", "''"]),
        (["--masq=yes"], ["--masq", "yes"]),
        (["--masq=TrUe"], ["--masq", "TrUe"]),
        (["--file"], ["--file", "needs a value"]),
        (["--port"], ["--port", "needs a value"]),
        (["---x"], ["---x"]),
        (["-=x"], ["-=x"]),
        (["--=x"], ["--=x"]),
        (["--ifaec=eth0"], ["--ifaec", "did you mean --iface?"]),
        (["-ifaec", "eth0"], ["--ifaec", "did you mean --iface?"]),
        (["eth1"], ["'eth1'"]),
        (["-"], ["'-'"]),
        ([""], ["''"]),
        (["--", "eth1"], ["'eth1'"]),
        (["--masq", "--", "--port=1", "x"], ["'--port=1'", "'x'"]),
        (["eth1", "--masq", "eth2"], ["'eth1'", "'eth2'"]),
        (["--masq", "true"], ["'true'", "--masq=true"]),
        (["--masq", "0"], ["'0'", "--masq=0"]),
        (["--masq", "maybe"], ["'maybe'"]),
        (["eth1", "--port=x"], ["--port", "'x'"]),
    ],
)
def test_S14_mistakes_are_named(argv: list[str], words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize("argv", [["--fiel=s3cret"], ["---fiel=s3cret"], ["-zzzzz=s3cret"]])
def test_values_of_unknown_flags_are_not_quoted(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert "s3cret" not in str(caught.value)


def test_no_suggestion_when_nothing_is_close() -> None:
    with pytest.raises(UsageError) as caught:
        parse(["--zzzzzzz"])
    assert str(caught.value) == "unknown flag --zzzzzzz"


@pytest.mark.parametrize("flag", ["-h", "--h", "-help", "--help", "-h=x"])
def test_help(flag: str) -> None:
    assert goflags.parse(["--masq", flag, "--nosuch"], KINDS) is None


def test_mistakes_before_help_win() -> None:
    with pytest.raises(UsageError):
        goflags.parse(["--nosuch", "--help"], KINDS)


@given(st.integers(-(2**63), 2**63 - 1), st.sampled_from(["d", "#x", "#o", "#b", "_d", "+d", "#_x"]))
def test_every_spelling_of_an_integer(number: int, spelling: str) -> None:
    assert goflags.parse_value("int", format(number, spelling)) == number


@given(st.lists(st.text()))
def test_any_text_reaches_a_string_flag(values: list[str]) -> None:
    argv = [argument for value in values for argument in ("--file", value)]
    assert parse(argv) == ({"file": values} if values else {})


@given(st.lists(st.text(alphabet="-=amskqfile01 \n")))
def test_nothing_but_usage_errors(argv: list[str]) -> None:
    try:
        found = goflags.parse(argv, KINDS)
    except UsageError:
        return
    assert found is None or found.keys() <= KINDS.keys()
