from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flanneld.cni import flannel
from flanneld.ctl import install_cni
from flanneld.ctl.__main__ import main as flannelctl

pytestmark = pytest.mark.pure

V4 = "FLANNEL_NETWORK=10.5.0.0/16\nFLANNEL_SUBNET=10.5.1.1/24\n"
V6 = "FLANNEL_IPV6_NETWORK=fd05::/48\nFLANNEL_IPV6_SUBNET=fd05:0:0:1::1/64\n"
REST = "FLANNEL_MTU=1450\nFLANNEL_IPMASQ=true\n"
CONF = {"name": "cbr0", "cniVersion": "0.3.1", "type": "flannel", "delegate": {"hairpinMode": True}}
RECORDER = """#!/bin/sh
{ echo "$CNI_COMMAND $CNI_CONTAINERID"; cat; echo; } >>"$0.calls"
[ ! -e "$0.fails" ] || { echo '{"code": 99, "msg": "injected"}'; exit 3; }
echo '{"cniVersion":"0.3.1","answer":"of the delegate"}'
"""


def made(env: str, conf: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "subnet.env"
    path.write_text(env)
    return flannel.delegate_config(conf, flannel.read_subnet_env(str(path)), str(path))


def test_the_usual_configuration(tmp_path: Path) -> None:
    conf = {**CONF, "delegate": {"hairpinMode": True, "isDefaultGateway": True}}
    assert made(V4 + REST, conf, tmp_path) == {
        "name": "cbr0",
        "cniVersion": "0.3.1",
        "type": "bridge",
        "hairpinMode": True,
        "isDefaultGateway": True,
        "isGateway": True,
        "ipMasq": False,
        "mtu": 1450,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": "10.5.1.0/24"}]],
            "routes": [{"dst": "10.5.0.0/16"}],
        },
    }


def test_both_families_and_lists_of_networks(tmp_path: Path) -> None:
    env = V4.replace("10.5.0.0/16", "10.5.0.0/16,10.6.0.0/16") + V6 + REST
    ipam = made(env, {**CONF, "ipam": {"dataDir": "/x", "routes": [{"dst": "192.0.2.0/24"}]}}, tmp_path)["ipam"]
    assert ipam == {
        "type": "host-local",
        "dataDir": "/x",
        "ranges": [[{"subnet": "10.5.1.0/24"}], [{"subnet": "fd05:0:0:1::/64"}]],
        "routes": [{"dst": net} for net in ("192.0.2.0/24", "10.5.0.0/16", "10.6.0.0/16", "fd05::/48")],
    }


@pytest.mark.parametrize(
    ("env", "conf", "expected"),
    [
        (V4 + REST.replace("true", "false"), {}, {"ipMasq": True}),
        (V4 + REST.replace("true", '"true"'), {}, {"ipMasq": True}),
        (
            V4 + REST,
            {"delegate": {"mtu": 1300, "ipMasq": True, "isGateway": False}},
            {"mtu": 1300, "ipMasq": True, "isGateway": False},
        ),
        (V4 + REST, {"delegate": {"type": "ptp"}}, {"type": "ptp", "isGateway": None}),
        (V4 + REST, {"ipam": {"type": "dhcp"}}, {"ipam.type": "dhcp"}),
        (V4 + REST, {"runtimeConfig": {"portMappings": []}}, {"runtimeConfig": {"portMappings": []}}),
        (V4 + REST, {"cniVersion": ""}, {"cniVersion": None}),
        (V6 + REST, {}, {"type": "bridge"}),
        ("# a comment\n\n" + V4 + REST + "OTHER=a=b\n", {}, {"mtu": 1450}),
    ],
)
def test_what_is_given_and_what_is_filled_in(
    env: str, conf: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    found = made(env, {**CONF, **conf}, tmp_path)
    found["ipam.type"] = found["ipam"]["type"]
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("env", "conf", "words"),
    [
        (REST, {}, ["FLANNEL_NETWORK or FLANNEL_IPV6_NETWORK", "FLANNEL_SUBNET or FLANNEL_IPV6_SUBNET"]),
        (V4, {}, ["FLANNEL_MTU", "FLANNEL_IPMASQ"]),
        (V4 + REST.replace("1450", "many"), {}, ["FLANNEL_MTU=many"]),
        (V4.replace("10.5.1.1/24", "here") + REST, {}, ["FLANNEL_SUBNET=here"]),
        (V4 + REST, {"delegate": {"name": "x"}}, ["'name'"]),
        (V4 + REST, {"delegate": {"ipam": {}}}, ["'ipam'"]),
        (V4 + REST, {"delegate": {"type": 1}}, ["type"]),
        (V4 + REST, {"delegate": {"type": "../sh"}}, ["type"]),
        (V4 + REST, {"delegate": []}, []),
        (V4 + REST, {"delegate": [1]}, ["delegate must be an object"]),
        (V4 + REST, {"ipam": {"routes": 1}}, ["routes"]),
    ],
)
def test_what_is_wrong_is_named(env: str, conf: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    if not words:
        made(env, {**CONF, **conf}, tmp_path)
        return
    with pytest.raises(flannel.PluginError) as caught:
        made(env, {**CONF, **conf}, tmp_path)
    assert all(word in str(caught.value) for word in words)


@dataclass
class Runtime:
    """Calls the plugin, copied alone, as a container runtime does; the delegate writes down what it is asked."""

    directory: Path

    def __post_init__(self) -> None:
        self.bin, self.data = self.directory / "bin", self.directory / "data"
        self.bin.mkdir()
        install_cni.install_plugin(self.bin)
        for name in ("bridge", "ptp"):
            (self.bin / name).write_text(RECORDER)
            (self.bin / name).chmod(0o755)
        self.env_file = self.directory / "subnet.env"
        self.env_file.write_text(V4 + REST)

    @property
    def calls(self) -> list[str]:
        path = self.bin / "bridge.calls"
        return path.read_text().splitlines() if path.exists() else []

    def call(self, command: str, container: str = "c1", conf: Any = None, **env: str) -> tuple[int, dict[str, Any]]:
        given = {**CONF, "subnetFile": str(self.env_file), "dataDir": str(self.data)} if conf is None else conf
        done = subprocess.run(
            [self.bin / "flannel"],
            input=given if isinstance(given, str) else json.dumps(given),
            env={
                "CNI_COMMAND": command,
                "CNI_CONTAINERID": container,
                "CNI_PATH": f"/nowhere:{self.bin}",
                "PATH": "/usr/bin:/bin",
                **env,
            },
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        return done.returncode, json.loads(done.stdout) if done.stdout else {}


@pytest.fixture
def runtime(tmp_path: Path) -> Runtime:
    return Runtime(tmp_path)


def test_add_and_delete_go_through_to_the_delegate(runtime: Runtime) -> None:
    assert runtime.call("ADD") == (0, {"cniVersion": "0.3.1", "answer": "of the delegate"})
    state = runtime.data / "c1"
    assert (os.stat(runtime.data).st_mode & 0o777, os.stat(state).st_mode & 0o777) == (0o700, 0o600)
    saved = json.loads(state.read_text())
    assert saved["mtu"] == 1450
    runtime.env_file.unlink()
    assert runtime.call("DEL")[0] == 0
    assert runtime.calls[0::2] == ["ADD c1", "DEL c1"]
    assert [json.loads(line) for line in runtime.calls[1::2]] == [saved, saved]
    assert not list(runtime.data.iterdir())
    assert runtime.call("DEL") == (0, {})
    assert len(runtime.calls) == 4


def test_state_directory_of_old_is_kept_and_odd_masks_do_not_matter(runtime: Runtime) -> None:
    before = os.umask(0o777)
    try:
        assert runtime.call("ADD")[0] == 0
    finally:
        os.umask(before)
    assert os.stat(runtime.data / "c1").st_mode & 0o777 == 0o600


def test_delegate_that_fails_speaks_for_itself_and_can_be_deleted_later(runtime: Runtime) -> None:
    (runtime.bin / "bridge.fails").touch()
    assert runtime.call("ADD") == (3, {"code": 99, "msg": "injected"})
    assert runtime.call("DEL") == (3, {"code": 99, "msg": "injected"})
    (runtime.bin / "bridge.fails").unlink()
    assert runtime.call("DEL")[0] == 0
    assert not list(runtime.data.iterdir())


def test_check_and_version(runtime: Runtime) -> None:
    assert runtime.call("CHECK") == (0, {})
    code, told = runtime.call("VERSION")
    assert code == 0
    assert {"0.1.0", "0.3.1", "0.4.0", "1.0.0"} <= set(told["supportedVersions"])
    assert runtime.calls == []


def test_N01_missing_subnet_env_is_named(runtime: Runtime) -> None:
    runtime.env_file.unlink()
    code, told = runtime.call("ADD")
    assert code == 1
    assert (told["cniVersion"], told["code"]) == ("0.3.1", 11)
    assert str(runtime.env_file) in told["msg"]
    assert runtime.calls == []
    assert not runtime.data.exists()


def test_missing_key_is_named(runtime: Runtime) -> None:
    runtime.env_file.write_text(V4 + "FLANNEL_IPMASQ=true\n")
    assert "FLANNEL_MTU" in runtime.call("ADD")[1]["msg"]


@pytest.mark.parametrize(
    ("command", "conf", "env", "expected"),
    [
        ("ADD", "{", {}, (6, "not JSON")),
        ("ADD", "[]", {}, (6, "not an object")),
        ("ADD", {"cniVersion": "9.0.0"}, {}, (1, "9.0.0")),
        ("ADD", None, {"CNI_CONTAINERID": "../x"}, (4, "../x")),
        ("DEL", None, {"CNI_CONTAINERID": ""}, (4, "CNI_CONTAINERID")),
        ("ADD", None, {"CNI_PATH": "/nowhere"}, (100, "bridge")),
        ("FROB", None, {}, (4, "FROB")),
        ("", None, {}, (4, "CNI_COMMAND")),
    ],
)
def test_errors_are_those_of_the_specification(
    runtime: Runtime, command: str, conf: Any, env: dict[str, str], expected: tuple[int, str]
) -> None:
    code, word = expected
    returned, told = runtime.call(command, conf=conf, **env)
    assert returned == 1
    assert told["code"] == code
    assert word in told["msg"]


def test_damaged_state_does_not_keep_a_pod_for_ever(runtime: Runtime) -> None:
    runtime.data.mkdir()
    (runtime.data / "c1").write_text("")
    assert runtime.call("DEL") == (0, {})
    assert not list(runtime.data.iterdir())


def test_state_that_cannot_be_written_is_named(runtime: Runtime) -> None:
    runtime.data.write_text("a file")
    code, told = runtime.call("ADD")
    assert (code, told["code"]) == (1, 5)
    assert str(runtime.data) in told["msg"]
    assert runtime.calls == []


def ctl(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as caught:
        flannelctl(["install-cni", *args], prog_name="flannelctl")
    return int(caught.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize("before", [None, "same", "other"])
def test_N07_configuration_is_installed_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str | None
) -> None:
    source, target = tmp_path / "cni-conf.json", tmp_path / "net.d" / "10-flannel.conflist"
    source.write_text(json.dumps({"name": "cbr0", "cniVersion": "0.3.1", "plugins": []}))
    source.chmod(0o640)
    target.parent.mkdir()
    if before:
        target.write_text(source.read_text() if before == "same" else "{}")
    assert ctl(capsys, str(source), str(target)) == (0, "")
    assert target.read_text() == source.read_text()
    assert target.stat().st_mode & 0o777 == 0o640
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize(
    ("content", "code", "word"),
    [
        ('{"name": "cbr0", "plugins": []}', 0, "cniVersion"),
        ("{", 1, "not JSON"),
        ("[]", 1, "not a JSON object"),
        (None, 1, "No such file"),
    ],
)
def test_N07_what_runtimes_would_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, code: int, word: str
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    target.write_text("before")
    if content is not None:
        source.write_text(content)
    found, text = ctl(capsys, str(source), str(target))
    assert found == code
    assert word in text
    assert str(source) in text
    assert target.read_text() == (content if code == 0 else "before")


def test_target_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "a"
    source.write_text('{"cniVersion": "1.0.0"}')
    code, text = ctl(capsys, str(source), str(tmp_path / "no" / "b"))
    assert code == 1
    assert str(tmp_path / "no" / "b") in text


@pytest.mark.parametrize("args", [[], ["a"], ["a", "b", "c"], ["--plugin", "d", "a"]])
def test_other_than_two_arguments_is_usage(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = ctl(capsys, *args)
    assert code == 1
    assert "Usage" in text


def test_plugin_is_installed_executable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ctl(capsys, "--plugin", str(tmp_path)) == (0, "")
    assert (tmp_path / "flannel").stat().st_mode & 0o777 == 0o755
    assert (tmp_path / "flannel").read_text().startswith("#!/usr/bin/python3 -ISB\n")
