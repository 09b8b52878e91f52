"""The daemon with the rights that the manifest gives its container, and on file systems as a runtime mounts them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flanneld.ctl.lab.hosts import OWN_COMMAND
from tests.support.echoes import all_answer
from tests.support.kube_lab import kube_lab
from tests.support.kube_node import DUAL
from tests.support.site import settle

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(shutil.which("etcd") is None, reason="needs etcd"),
]

MANIFEST = Path(__file__).parents[2] / "deploy" / "kube-flannel.yml"
CAPABILITY_BITS = {"NET_ADMIN": 12, "NET_RAW": 13}
"""capability.h."""

# What a runtime does for a container that is not privileged: /proc/sys is read-only, and so is the root if it is asked
# for; host paths are mounted on top. The command line follows the directory.
CONTAINER = """
set -e
mount --bind "$0" "$0"
mount -t tmpfs tmpfs /run
touch /run/xtables.lock
mount --bind /run/xtables.lock /run/xtables.lock
mount -o remount,bind,ro /run
mount --bind /proc/sys /proc/sys
mount -o remount,bind,ro /proc/sys
mount -o remount,bind,ro /
exec "$@"
"""


def security() -> dict[str, Any]:
    made = next(one for one in yaml.safe_load_all(MANIFEST.read_text()) if one["kind"] == "DaemonSet")
    (container,) = made["spec"]["template"]["spec"]["containers"]
    found: dict[str, Any] = container["securityContext"]
    return found


@pytest.mark.parametrize(
    "config",
    [DUAL, {**DUAL, "EnableNFTables": True}, {**DUAL, "Backend": {"Type": "host-gw"}}],
    ids=["vxlan", "nftables", "host-gw"],
)
def test_rights_of_the_manifest_are_enough(config: dict[str, Any]) -> None:
    context = security()
    assert context["readOnlyRootFilesystem"] is True
    assert context["capabilities"]["drop"] == ["ALL"]
    added = context["capabilities"]["add"]
    rights = ",".join(["-all", *(f"+{name.lower()}" for name in added)])
    with kube_lab(2, config, flags=["--ip-masq", "--healthz-port=8081"]) as (lab, api):
        for host in lab.hosts:
            daemon = host.daemon
            daemon.command = (
                *("unshare", "--mount", "--propagation", "private", "sh", "-c", CONTAINER, str(daemon.directory)),
                *("setpriv", "--bounding-set", rights, "--inh-caps=-all", *OWN_COMMAND),
            )
        lab.start()
        first, second = lab.hosts
        all_answer(lab.hosts, 4, 6)
        for family in (4, 6):
            assert first.pod.ping(second.pod, family)[0] == 3
        for host in lab.hosts:
            status = Path(f"/proc/{host.daemon.pid}/status").read_text()
            assert int(status.split("CapEff:")[1].split()[0], 16) == sum(1 << CAPABILITY_BITS[name] for name in added)
            settle("condition", lambda h=host: not api.condition(h.name), 10)  # type: ignore[misc]
            nft = bool(config.get("EnableNFTables"))
            rules = host.run("nft", "list", "ruleset") if nft else "\n".join(host.namespace.iptables_save())
            assert ("flannel-ipv4" if nft else "FLANNEL-POSTRTG") in rules
            assert host.daemon.stop() == 0
