from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flanneld.ctl import docker_opts

pytestmark = pytest.mark.pure

ENV = "FLANNEL_NETWORK=10.1.0.0/16\nFLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_MTU=1472\nFLANNEL_IPMASQ=false\n"
BIP, MASQ, MTU = "--bip=10.1.74.1/24", "--ip-masq=true", "--mtu=1472"


@pytest.fixture(autouse=True)
def quiet_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("DOCKER_", "FLANNEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(docker_opts, "_ip_route", lambda: "default via 192.0.2.254 dev eth0\n10.1.74.0/24 dev cni0\n")


def run(directory: Path, *flags: str, env: str | None = ENV) -> tuple[int, str | None]:
    source, target = directory / "subnet.env", directory / "docker.env"
    target.unlink(missing_ok=True)
    if env is not None:
        source.write_text(env)
    code = docker_opts.main(["-f", str(source), "-d", str(target), *flags])
    return code, target.read_text() if target.exists() else None


@pytest.mark.parametrize("flags", [c for n in range(5) for c in itertools.combinations(["-i", "-c", "-m", "-k"], n)])
def test_N04_every_flag_combination(tmp_path: Path, flags: tuple[str, ...]) -> None:
    both = "-i" not in flags and "-c" not in flags
    expected = ""
    if both or "-i" in flags:
        expected += f'DOCKER_OPT_BIP="{BIP}"\n'
        expected += "" if "-m" in flags else f'DOCKER_OPT_IPMASQ="{MASQ}"\n'
        expected += f'DOCKER_OPT_MTU="{MTU}"\n'
    if both or "-c" in flags:
        key = "CUSTOM_KEY" if "-k" in flags else "DOCKER_OPTS"
        expected += f'{key}=" {BIP} {"" if "-m" in flags else MASQ + " "}{MTU}"\n'
    argv = [word for flag in flags for word in ([flag, "CUSTOM_KEY"] if flag == "-k" else [flag])]
    assert run(tmp_path, *argv) == (0, expected)


def test_documented_output(tmp_path: Path) -> None:
    assert run(tmp_path) == (
        0,
        'DOCKER_OPT_BIP="--bip=10.1.74.1/24"\n'
        'DOCKER_OPT_IPMASQ="--ip-masq=true"\n'
        'DOCKER_OPT_MTU="--mtu=1472"\n'
        'DOCKER_OPTS=" --bip=10.1.74.1/24 --ip-masq=true --mtu=1472"\n',
    )


@pytest.mark.parametrize(("masq", "option"), [("true", "--ip-masq=false"), ("false", "--ip-masq=true")])
def test_N04_ip_masq_is_inverted(tmp_path: Path, masq: str, option: str) -> None:
    assert run(tmp_path, "-c", env=f"FLANNEL_IPMASQ={masq}\n") == (0, f'DOCKER_OPTS=" {option}"\n')


@pytest.mark.parametrize("value", ["yes", "True", "1"])
def test_N04_other_ip_masq_writes_nothing(tmp_path: Path, value: str) -> None:
    assert run(tmp_path, env=f"FLANNEL_SUBNET=10.1.74.1/24\nFLANNEL_IPMASQ={value}\n") == (1, None)
    assert run(tmp_path, "-m", "-c", env=f"FLANNEL_MTU=1\nFLANNEL_IPMASQ={value}\n") == (0, 'DOCKER_OPTS=" --mtu=1"\n')


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (None, 'DOCKER_OPTS=""\n'),
        ("", 'DOCKER_OPTS=""\n'),
        ("# flannel\nFLANNEL_MTU=1472\n", 'DOCKER_OPT_MTU="--mtu=1472"\nDOCKER_OPTS=" --mtu=1472"\n'),
        ('export FLANNEL_MTU="1472" # quoted\n', 'DOCKER_OPT_MTU="--mtu=1472"\nDOCKER_OPTS=" --mtu=1472"\n'),
    ],
)
def test_N04_missing_or_partial_env_file(tmp_path: Path, env: str | None, expected: str) -> None:
    assert run(tmp_path, env=env) == (0, expected)


@pytest.mark.parametrize(
    "flags",
    [["-h"], ["-?"], ["-x"], ["--help"], ["-f"], ["-k"], ["-k", "no-name"], ["stray"], ["-i", "stray"], ["-ix"]],
)
def test_N04_anything_else_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert run(tmp_path, *flags) == (1, None)
    assert capsys.readouterr().err.startswith("flannelctl docker-opts [-f ")


def test_environment_joins_in_name_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_OPT_DEBUG", "--debug")
    monkeypatch.setenv("DOCKER_OPT_ZONE", "--label a=b")
    monkeypatch.setenv("DOCKER_OPTS", "--x")
    monkeypatch.setenv("OTHER_DOCKER_OPT_A", "--not")
    assert run(tmp_path, "-m") == (
        0,
        f'DOCKER_OPT_BIP="{BIP}"\nDOCKER_OPT_DEBUG="--debug"\nDOCKER_OPT_MTU="{MTU}"\nDOCKER_OPT_ZONE="--label a=b"\n'
        f'DOCKER_OPTS="--x  {BIP} --debug {MTU} --label a=b"\n',
    )
    assert run(tmp_path, "-ck", "ELSE", env="ELSE=--y\n") == (0, 'ELSE="--y  --debug --label a=b"\n')


@pytest.mark.parametrize(
    ("route", "code"),
    [
        ("10.1.74.0/24 via 192.0.2.7 dev eth0", 1),
        ("10.1.74.0/24 dev docker0 proto kernel scope link src 10.1.74.1", 0),
        ("10.1.7.0/24 via 10.1.7.0 dev flannel.1 onlink", 0),
        ("default via 192.0.2.7 dev eth0", 0),
    ],
)
def test_own_subnet_behind_a_gateway_fails_after_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, route: str, code: int
) -> None:
    monkeypatch.setattr(docker_opts, "_ip_route", lambda: f"{route}\n")
    assert run(tmp_path, "-c") == (code, f'DOCKER_OPTS=" {BIP} {MASQ} {MTU}"\n')


def test_unwritable_output_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docker_opts.main(["-f", str(tmp_path / "none"), "-d", str(tmp_path / "no" / "where")]) == 1
    assert str(tmp_path / "no" / "where") in capsys.readouterr().err


def test_command_line_without_path(tmp_path: Path) -> None:
    (tmp_path / "subnet.env").write_text(ENV)
    root = str(Path(docker_opts.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-m", "flanneld.ctl", "docker-opts", "-f", "subnet.env", "-d", "/dev/stdout", "-mck", "A"],
        cwd=tmp_path,
        env={"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f'A=" {BIP} {MTU}"\n', "")
    usage = subprocess.run([sys.executable, "-m", "flanneld.ctl", "docker-opts", "--help"], cwd=root, check=False)
    assert usage.returncode == 1
