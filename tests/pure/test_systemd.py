from __future__ import annotations

import configparser
import shutil
import subprocess
from pathlib import Path

import pytest

from flanneld.ctl.docker_opts import assignments

pytestmark = pytest.mark.pure

DIRECTORY = Path(__file__).parents[2] / "systemd"
UNIT = DIRECTORY / "flanneld.service"


def read(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None, delimiters=("=",))
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(path.read_text())
    return parser


def test_readiness_is_the_daemons_word_and_may_take_long() -> None:
    service = read(UNIT)["Service"]
    assert (service["Type"], service["NotifyAccess"]) == ("notify", "main")
    assert service["TimeoutStartSec"] == "infinity"
    assert int(service["WatchdogSec"]) >= 30


def test_a_restart_keeps_subnet_env_and_an_ordered_end_is_none() -> None:
    service = read(UNIT)["Service"]
    assert (service["RuntimeDirectory"], service["RuntimeDirectoryPreserve"]) == ("flannel", "yes")
    assert service["Restart"] == "on-failure"
    assert service["RestartPreventExitStatus"] == "2"


def test_docker_starts_afterwards_and_is_not_dragged_along() -> None:
    unit = read(UNIT)
    assert unit["Unit"]["Before"] == "docker.service"
    assert "RequiredBy" not in unit["Install"]
    drop_in = read(DIRECTORY / "docker.service.d" / "flannel.conf")
    assert drop_in["Unit"]["After"] == drop_in["Unit"]["Wants"] == "flanneld.service"
    assert "Requires" not in drop_in["Unit"]
    written = "docker-opts -k DOCKER_NETWORK_OPTIONS -d " + drop_in["Service"]["EnvironmentFile"]
    assert written in UNIT.read_text()
    assert drop_in["Service"]["ExecStart"].endswith(" $DOCKER_NETWORK_OPTIONS")


def test_confinement_leaves_what_the_daemon_needs() -> None:
    service = read(UNIT)["Service"]
    assert set(service["CapabilityBoundingSet"].split()) == {"CAP_NET_ADMIN", "CAP_NET_RAW"}
    assert set(service["RestrictAddressFamilies"].split()) == {"AF_NETLINK", "AF_UNIX", "AF_INET", "AF_INET6"}
    assert service["ProtectKernelTunables"] == "no"  # /proc/sys/net is written
    assert service["DeviceAllow"] == "/dev/net/tun rw"
    assert "PrivateDevices" not in service
    assert service["ReadWritePaths"] == "/run"


def test_environment_example_names_real_flags() -> None:
    options = pytest.importorskip("flanneld.options")
    text = (DIRECTORY / "flanneld.default").read_text().replace("\n#FLANNEL", "\nFLANNEL")
    named = {name: value for name, value in assignments(text).items() if name.startswith("FLANNELD_")}
    assert set(named) <= {flag.variable for flag in options.FLAGS.values()}
    assert "FLANNELD_ETCD_ENDPOINTS" in named


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / "flanneld.service"
    text = UNIT.read_text().replace("#ExecStartPost", "ExecStartPost")
    unit.write_text(
        text.replace("/usr/local/bin/flanneld ", f"{program} ").replace("/usr/local/bin/flannelctl ", f"{program} ")
    )
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    about_it = [line for line in (done.stdout + done.stderr).splitlines() if "flanneld.service" in line]
    assert about_it == []
    unit.write_text(text.replace("NotifyAccess=main", "NotifyAccess=nobody"))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, check=False)
    assert "notify access" in (done.stdout + done.stderr).lower()
