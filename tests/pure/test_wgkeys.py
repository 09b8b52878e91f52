from __future__ import annotations

import base64
import logging
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import wgkeys
from subnet.errors import ConfigError

pytestmark = pytest.mark.pure

RAW = bytes(range(1, 33))


def text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@given(st.binary(min_size=32, max_size=32))
def test_a_private_key_is_clamped_as_rfc_7748_says(raw: bytes) -> None:
    key = base64.b64decode(wgkeys.clamped(raw))
    assert key[0] & 7 == 0
    assert key[31] & 0xC0 == 0x40
    assert (key[0] | 7, key[1:31], key[31] | 0xC0) == (raw[0] | 7, raw[1:31], raw[31] | 0xC0)
    assert wgkeys.clamped(key) == text(key)


def test_a_key_is_made_once_and_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run" / "flannel" / "wgkey"
    with caplog.at_level(logging.DEBUG):
        key = wgkeys.private_key(path)
        assert wgkeys.private_key(path) == key
    content = path.read_bytes()
    assert content == key.encode()
    assert len(base64.b64decode(content, validate=True)) == 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o400
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o755
    assert [entry.name for entry in path.parent.iterdir()] == ["wgkey"]
    assert key not in caplog.text
    assert len(caplog.records) == 1


def test_two_nodes_have_different_keys(tmp_path: Path) -> None:
    assert wgkeys.private_key(tmp_path / "a") != wgkeys.private_key(tmp_path / "b")


def test_a_key_of_upstream_or_an_editor_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "wgkey"
    path.write_text(wgkeys.clamped(RAW) + "\n")
    assert wgkeys.private_key(path) == wgkeys.clamped(RAW)
    path.write_text(text(RAW))
    assert wgkeys.private_key(path) == wgkeys.clamped(RAW)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "0 bytes"),
        (b"not a key", "not base64"),
        (text(RAW[:31]).encode(), "31 bytes"),
        (text(RAW + b"x").encode(), "33 bytes"),
        (b"\xff\xfe secret", "not text"),
    ],
)
def test_a_spoilt_file_is_named_but_neither_shown_nor_replaced(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "wgkey"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{path}.*{reason}") as caught:
        wgkeys.private_key(path)
    if content:
        assert content.decode(errors="replace") not in str(caught.value)
    assert caught.value.__cause__ is None
    assert path.read_bytes() == content


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        wgkeys.private_key(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        wgkeys.private_key(tmp_path / "file" / "wgkey")


def test_a_file_open_to_others_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "wgkey"
    wgkeys.private_key(path)
    path.chmod(0o444)
    wgkeys.private_key(path)
    assert f"{path} can be read" in caplog.text


def test_the_environment_names_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WIREGUARD_KEY_FILE", raising=False)
    assert wgkeys.key_file() == Path("/run/flannel/wgkey")
    monkeypatch.setenv("WIREGUARD_KEY_FILE", "/etc/flannel/key")
    assert wgkeys.key_file() == Path("/etc/flannel/key")


@pytest.mark.parametrize(
    ("private", "public"),
    [
        (
            "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a",
            "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a",
        ),
        (
            "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb",
            "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f",
        ),
    ],
)
def test_a_public_key_is_the_one_of_rfc_7748(private: str, public: str) -> None:
    # The keys of both parties in section 6.1.
    assert wgkeys.public_key(text(bytes.fromhex(private))) == text(bytes.fromhex(public))
    assert wgkeys.public_key(wgkeys.clamped(bytes.fromhex(private))) == text(bytes.fromhex(public))
