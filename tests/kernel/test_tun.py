from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from backends.kernel import tun
from subnet.errors import KernelError
from tests.support.netns import Namespace

pytestmark = [pytest.mark.kernel, pytest.mark.stock]

ROOT = Path(__file__).parents[2]


def test_the_first_free_name_is_taken_and_given_back(namespace: Namespace) -> None:
    with namespace.inside():
        first, second = tun.open_tun("flannel%d"), tun.open_tun("flannel%d", offloads=True)
    assert (first.name, second.name) == ("flannel0", "flannel1")
    shown = {link["ifname"]: link for link in namespace.ip_json("-d link show type tun")}
    for name, vnet_hdr in (("flannel0", first.vnet_hdr), ("flannel1", second.vnet_hdr)):
        data = shown[name]["linkinfo"]["info_data"]
        assert data["type"] == "tun"
        assert (data["pi"], data["persist"], data["multi_queue"]) == (False, False, False)
        assert data["vnet_hdr"] is vnet_hdr
    assert first.vnet_hdr is False
    first.close()
    assert [link["ifname"] for link in namespace.ip_json("link show type tun")] == ["flannel1"]
    with namespace.inside():
        again = tun.open_tun("flannel%d")
    assert again.name == "flannel0"
    again.close()
    second.close()
    assert namespace.ip_json("link show type tun") == []


def test_without_segmentation_offload_the_rest_remains(namespace: Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = tun._offered
    monkeypatch.setattr(tun, "_offered", lambda fd, flags: not flags & tun.TUN_F_USO4 and offered(fd, flags))
    with namespace.inside():
        device = tun.open_tun("flannel%d", offloads=True)
    device.close()
    assert (device.vnet_hdr, device.tso, device.uso) == (True, True, False)


def test_U02_a_missing_device_node_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tun, "NODE", tmp_path / "tun")
    with pytest.raises(KernelError, match=rf"open {tmp_path}/tun: the device node is missing; make it with: mkdir"):
        tun.open_tun("flannel%d")


def test_U02_a_missing_capability_is_named(namespace: Namespace) -> None:
    code = "from backends.kernel.tun import open_tun; open_tun('flannel%d')"
    argv = namespace.argv("setpriv", "--bounding-set", "-net_admin", sys.executable, "-c", code)
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "CAP_NET_ADMIN" in done.stderr
    assert "flannel%d" in done.stderr


def test_a_node_that_is_no_tun_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(tun, "NODE", Path("/dev/null"))
    with pytest.raises(KernelError, match="create device flannel%d"):
        tun.open_tun("flannel%d")
    assert len(os.listdir("/proc/self/fd")) == before
