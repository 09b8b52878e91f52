from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from subnet.kube.configfile import ConfigFile
from subnet.manager import ConfigSeen, StoreEvent
from tests.support.clock import ManualClock

pytestmark = pytest.mark.pure

GOOD = json.dumps({"Network": "10.5.0.0/16", "Backend": {"Type": "vxlan"}})


class Follower:
    def __init__(self, path: Path) -> None:
        self.posted: list[StoreEvent] = []
        self.file = ConfigFile(str(path), self.posted.append, ManualClock(), lambda _: True)

    def look(self) -> list[ConfigSeen]:
        before = len(self.posted)
        self.file.look()
        return [event for event in self.posted[before:] if isinstance(event, ConfigSeen)]


def test_follows_the_symlinks_of_a_config_map(tmp_path: Path) -> None:
    follower = Follower(tmp_path / "net-conf.json")
    follower.file.release()
    (tmp_path / "net-conf.json").symlink_to("..data/net-conf.json")
    for number, network in enumerate(("10.5.0.0/16", "10.6.0.0/16")):
        version = tmp_path / f"..v{number}"
        version.mkdir()
        (version / "net-conf.json").write_text(GOOD.replace("10.5.0.0/16", network))
        (tmp_path / "..tmp").symlink_to(version)
        os.replace(tmp_path / "..tmp", tmp_path / "..data")
        (seen,) = follower.look()
        assert seen.config is not None
        assert seen.config.ipv4 is not None
        assert str(seen.config.ipv4.network) == network
        assert follower.look() == []


def test_problems_name_the_file_and_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "net-conf.json"
    follower = Follower(path)
    for text, words in ((None, "No such file"), ("{", "line 1"), ('{"Network": 1}', "Network 1")):
        if text is not None:
            path.write_text(text)
        (seen,) = follower.look()
        assert seen.config is None
        assert str(path) in seen.problem
        assert words in seen.problem
        assert follower.look() == []
    assert len(caplog.records) == 3
    assert follower.file.current is None


def test_a_usable_config_waits_for_release_and_the_latest_counts(tmp_path: Path) -> None:
    path = tmp_path / "net-conf.json"
    follower = Follower(path)
    path.write_text(GOOD)
    assert follower.look() == []
    path.write_text(GOOD.replace("vxlan", "host-gw"))
    assert follower.look() == []
    assert follower.file.first(0) is follower.file.current
    follower.file.release()
    assert [
        event.config.backend.type for event in follower.posted if isinstance(event, ConfigSeen) and event.config
    ] == ["host-gw"]
    path.write_text(GOOD)
    assert len(follower.look()) == 1


def test_a_config_that_went_bad_is_not_released(tmp_path: Path) -> None:
    path = tmp_path / "net-conf.json"
    follower = Follower(path)
    path.write_text(GOOD)
    follower.look()
    path.write_text("{")
    follower.look()
    follower.file.release()
    assert [event.config for event in follower.posted if isinstance(event, ConfigSeen)] == [None]


def test_C04_lengths_and_ranges_are_warned_about(tmp_path: Path) -> None:
    path = tmp_path / "net-conf.json"
    follower = Follower(path)
    follower.file.release()
    path.write_text(json.dumps({"Network": "10.5.0.0/16", "SubnetLen": 20, "Backend": {"Type": "vxlan"}}))
    (seen,) = follower.look()
    assert seen.config is not None
    (warning,) = seen.config.warnings
    assert "SubnetLen" in warning
    assert "--node-cidr-mask-size" in warning
