from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from backends import AVAILABLE
from flanneld.options import Options, parse
from subnet.config import parse_network_config
from subnet.kube.settings import KubeSettings, check
from tests.support import programs

pytestmark = pytest.mark.pure

DEPLOY = Path(__file__).parents[2] / "deploy"
OBJECTS = list(yaml.safe_load_all((DEPLOY / "kube-flannel.yml").read_text()))
KUBECTL = programs.find("kubectl")
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def the(kind: str, objects: list[Any] = OBJECTS) -> Any:
    (found,) = [made for made in objects if made["kind"] == kind]
    return found


POD = the("DaemonSet")["spec"]["template"]
(FLANNELD,) = POD["spec"]["containers"]
RIGHTS = {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]}}
INIT = {container["name"]: container for container in POD["spec"]["initContainers"]}


def options() -> Options:
    found = parse(FLANNELD["args"], {})
    assert isinstance(found, Options)
    return found


def test_arguments_and_environment_are_taken() -> None:
    found = options()
    assert (found.kube_subnet_mgr, found.ip_masq, found.warnings) == (True, True, ())
    env = {entry["name"]: entry.get("value", "given") for entry in FLANNELD["env"]}
    settings = KubeSettings(node_name=env["NODE_NAME"], pod_name=env["POD_NAME"], pod_namespace=env["POD_NAMESPACE"])
    check(settings, {**env, **IN_POD})


def test_probes_ask_where_the_daemon_answers() -> None:
    (port,) = FLANNELD["ports"]
    assert port["containerPort"] == options().healthz_port
    assert {FLANNELD[probe]["httpGet"]["path"] for probe in ("livenessProbe", "readinessProbe")} == {
        "/healthz",
        "/readyz",
    }
    assert {FLANNELD[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")} == {port["name"]}


def test_N07_configurations_are_valid() -> None:
    data = the("ConfigMap")["data"]
    config = parse_network_config(data["net-conf.json"], "net-conf.json", check_pools=False)
    assert config.warnings == ()
    assert (str(config.ipv4 and config.ipv4.network), config.backend.type) == ("10.244.0.0/16", "vxlan")
    cni = json.loads(data["cni-conf.json"])
    assert cni["cniVersion"]
    assert [plugin["type"] for plugin in cni["plugins"]] == ["flannel", "portmap"]


def test_files_are_where_they_are_looked_for() -> None:
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    for container in (FLANNELD, *INIT.values()):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes.keys()
    mounts = {mount["mountPath"].rstrip("/") for mount in FLANNELD["volumeMounts"]}
    assert {str(Path(options().subnet_file).parent), str(Path(options().net_config_path).parent)} <= mounts
    source, target = INIT["install-cni"]["args"][1:]
    assert Path(source).name in the("ConfigMap")["data"]
    assert str(Path(target).parent) in {mount["mountPath"] for mount in INIT["install-cni"]["volumeMounts"]}
    assert volumes["flannel-cfg"]["configMap"]["name"] == the("ConfigMap")["metadata"]["name"]


def test_rights_to_the_network_and_no_more() -> None:
    assert POD["spec"]["hostNetwork"] is True
    assert FLANNELD["securityContext"] == {"privileged": False, **RIGHTS}
    assert the("Namespace")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_names_agree() -> None:
    binding, account = the("ClusterRoleBinding"), the("ServiceAccount")
    assert binding["roleRef"]["name"] == the("ClusterRole")["metadata"]["name"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["metadata"]["name"], "namespace": account["metadata"]["namespace"]}
    ]
    assert POD["spec"]["serviceAccountName"] == account["metadata"]["name"]
    selected = the("DaemonSet")["spec"]["selector"]["matchLabels"]
    assert selected.items() <= POD["metadata"]["labels"].items()
    assert all(made["metadata"]["labels"]["k8s-app"] == "flannel" for made in OBJECTS)
    namespaces = {made["metadata"].get("namespace") for made in OBJECTS} - {None}
    assert namespaces == {the("Namespace")["metadata"]["name"]}


def test_image_is_this_version() -> None:
    from flanneld import __version__

    images = {container["image"] for container in (FLANNELD, *INIT.values())}
    assert images == {f"flanneld:{__version__}"}


def test_image_has_what_manifests_run() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    assert "ARG BASE=debian:12-slim" in lines
    assert [line.split()[1] for line in lines if line.startswith("FROM ")] == ["${BASE}"] * 2
    copied = [word for line in lines if line.startswith("COPY --chmod") for word in line.split()[2:-1]]
    linked = next(line for line in lines if line.startswith("RUN ln -s ")).split()[3:-1]
    assert all((DEPLOY.parent / name).is_file() for name in copied)
    there = {f"/opt/bin/{Path(name).name}" for name in (*copied, *linked)}
    # Upstream's manifest runs the second one.
    assert {FLANNELD["command"][0], "/opt/bin/install-conf", INIT["install-cni"]["command"][0]} <= there


OVERLAYS: dict[str, tuple[tuple[int, ...], bool, str]] = {
    "../base": ((4,), False, "vxlan"),
    "vxlan": ((4,), False, "vxlan"),
    "host-gw": ((4,), False, "host-gw"),
    "udp": ((4,), False, "udp"),
    "wireguard": ((4,), False, "wireguard"),
    "dual-stack": ((4, 6), False, "vxlan"),
    "nftables": ((4,), True, "vxlan"),
}


def test_overlays_are_all_tested() -> None:
    assert {path.parent.name for path in (DEPLOY / "overlays").glob("*/kustomization.yaml")} == OVERLAYS.keys() - {
        "../base"
    }


def test_overlays_name_backends_that_this_version_has() -> None:
    assert {backend for _, _, backend in OVERLAYS.values()} <= set(AVAILABLE)


@pytest.mark.skipif(KUBECTL is None, reason="needs kubectl to build overlays")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_overlays(overlay: str) -> None:
    built = subprocess.run(
        [KUBECTL or "", "kustomize", str(DEPLOY / "overlays" / overlay)], capture_output=True, text=True, check=True
    )
    objects = list(yaml.safe_load_all(built.stdout))
    assert len(objects) == len(OBJECTS)
    data = the("ConfigMap", objects)["data"]
    config = parse_network_config(data["net-conf.json"], overlay, check_pools=False)
    found = config.families, config.enable_nftables, config.backend.type
    assert found == OVERLAYS[overlay]
    assert config.warnings == ()
    assert data["cni-conf.json"] == the("ConfigMap")["data"]["cni-conf.json"]
    container = the("DaemonSet", objects)["spec"]["template"]["spec"]["containers"][0]
    context = container["securityContext"]
    assert context.pop("privileged") is (overlay == "udp")
    assert context == RIGHTS
    assert {**container, "securityContext": {}} == {**FLANNELD, "securityContext": {}}
