from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from flanneld import __version__
from flanneld.options import Options, parse
from subnet.config import parse_network_config
from subnet.kube.settings import KubeSettings, check
from subnet.model import NetworkConfig
from tests.support import chart, programs

pytestmark = pytest.mark.pure

SCHEMA = json.loads((chart.CHART / "values.schema.json").read_text())
MANIFEST = list(yaml.safe_load_all((chart.CHART.parent / "kube-flannel.yml").read_text()))
IN_POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}
NOTHING: dict[str, Any] = {}


def flannel(**values: Any) -> dict[str, Any]:
    return {"flannel": values}


def the(kind: str, changes: dict[str, Any] = NOTHING) -> Any:
    assert chart.violations(chart.merged(chart.default_values(), changes), SCHEMA) == []
    (found,) = [made for made in chart.objects(changes) if made["kind"] == kind]
    return found


def spec(changes: dict[str, Any] = NOTHING) -> Any:
    return the("DaemonSet", changes)["spec"]["template"]["spec"]


def main(changes: dict[str, Any] = NOTHING) -> Any:
    return next(made for made in spec(changes)["containers"] if made["name"] == "kube-flannel")


def init(name: str, changes: dict[str, Any] = NOTHING) -> Any:
    return next((made for made in spec(changes)["initContainers"] if made["name"] == name), None)


def host_path(name: str, changes: dict[str, Any]) -> str:
    found: str = next(v for v in spec(changes)["volumes"] if v["name"] == name)["hostPath"]["path"]
    return found


def options(changes: dict[str, Any] = NOTHING) -> Options:
    found = parse(main(changes)["args"], {})
    assert isinstance(found, Options)
    assert found.warnings == ()
    return found


def config(changes: dict[str, Any] = NOTHING) -> NetworkConfig:
    text = the("ConfigMap", changes)["data"]["net-conf.json"]
    found = parse_network_config(text, "net-conf.json", check_pools=False)
    assert found.warnings == ()
    return found


def json_read(made: Any) -> Any:
    """The object with a ConfigMap's files as what they say, not how."""
    if made["kind"] != "ConfigMap":
        return made
    return made | {"data": {name: json.loads(text) for name, text in made["data"].items()}}


def test_defaults_are_the_manifest() -> None:
    # Upstream's chart and manifest differ in the tolerations.
    rendered = {made["kind"]: made for made in chart.objects({})}
    wanted = {made["kind"]: made for made in MANIFEST if made["kind"] != "Namespace"}
    tolerations = [{"effect": effect, "operator": "Exists"} for effect in ("NoExecute", "NoSchedule")]
    wanted["DaemonSet"]["spec"]["template"]["spec"]["tolerations"] = tolerations
    assert {kind: json_read(made) for kind, made in rendered.items()} == {
        kind: json_read(made) for kind, made in wanted.items()
    }


def test_arguments_and_environment_are_taken() -> None:
    assert (options().kube_subnet_mgr, options().ip_masq, options().healthz_port) == (True, True, 8081)
    env = {entry["name"]: entry.get("value", "given") for entry in main()["env"]}
    settings = KubeSettings(node_name=env["NODE_NAME"], pod_name=env["POD_NAME"], pod_namespace=env["POD_NAMESPACE"])
    check(settings, {**env, **IN_POD})


def test_objects_are_in_the_release_s_namespace() -> None:
    made = chart.objects({}, namespace="net")
    assert {one["metadata"]["namespace"] for one in made if not one["kind"].startswith("Cluster")} == {"net"}
    (binding,) = [one for one in made if one["kind"] == "ClusterRoleBinding"]
    assert binding["subjects"][0]["namespace"] == "net"


VXLAN = {"vni": 7, "mtu": 1400, "GBP": True, "directRouting": True, "macPrefix": "0E-2B", "backendPort": 4789}
PSK = 'abc"\\<é>=='
WIREGUARD = {"mtu": 1380, "backendPort": 51900, "backendPortv6": 51901, "psk": PSK, "keepaliveInterval": 25}

EVERYTHING: dict[str, Any] = {
    "global": {"imagePullSecrets": [{"name": "s"}]},
    "podCidrv6": "fd00:10:244::/56",
    "netpol": {"enabled": True},
    "flannel": {
        **WIREGUARD,
        "backend": "wireguard",
        "tunnelMode": "separate",
        "flannel_cni": {"image": {"repository": "r/p", "tag": "1"}},
        "nodeSelector": {"pool": "true"},
        "args": ["--kube-subnet-mgr", "--iface-regex=^eth[0-9]$"],
    },
}


@pytest.mark.parametrize(
    ("values", "backend", "members"),
    [
        ({}, "vxlan", {}),
        (
            VXLAN,
            "vxlan",
            {"VNI": 7, "MTU": 1400, "GBP": True, "DirectRouting": True, "MacPrefix": "0E-2B", "Port": 4789},
        ),
        ({"vni": 16777215}, "vxlan", {"VNI": 16777215}),
        (WIREGUARD | VXLAN, "host-gw", {}),
        (VXLAN, "udp", {"Port": 4789}),
        ({}, "ipip", {}),
        ({}, "wireguard", {}),
        (
            WIREGUARD | {"tunnelMode": "auto"},
            "wireguard",
            {
                "MTU": 1380,
                "ListenPort": 51900,
                "ListenPortV6": 51901,
                "PSK": PSK,
                "PersistentKeepaliveInterval": 25,
                "Mode": "auto",
            },
        ),
        ({"vni": 0, "mtu": 0, "backendPort": 0, "GBP": False, "directRouting": False}, "vxlan", {}),
    ],
)
def test_backend_and_its_options(values: dict[str, Any], backend: str, members: dict[str, Any]) -> None:
    found = config(flannel(backend=backend, **values)).backend
    assert found.type == backend
    assert found.options == {"Type": backend, **members}


@pytest.mark.parametrize(
    ("values", "networks", "nftables"),
    [
        ({}, ("10.244.0.0/16", None), False),
        ({"podCidr": "10.42.0.0/16"}, ("10.42.0.0/16", None), False),
        ({"podCidrv6": "fd00:10:244::/56"}, ("10.244.0.0/16", "fd00:10:244::/56"), False),
        ({"podCidr": "", "podCidrv6": "fd00:10:244::/56"}, (None, "fd00:10:244::/56"), False),
        (flannel(enableNFTables=True), ("10.244.0.0/16", None), True),
    ],
)
def test_networks_and_rules(values: dict[str, Any], networks: tuple[str | None, str | None], nftables: bool) -> None:
    found = config(values)
    assert tuple(pool and str(pool.network) for pool in (found.ipv4, found.ipv6)) == networks
    assert found.enable_nftables is nftables


def test_empty_pod_cidr_says_so() -> None:
    text = the("ConfigMap", {"podCidr": "", "podCidrv6": "fd00:10:244::/56"})["data"]["net-conf.json"]
    assert json.loads(text)["EnableIPv4"] is False


def test_health_port() -> None:
    other = flannel(healthz={"port": 18081, "livenessProbe": {"periodSeconds": 3}, "readinessProbe": None})
    assert options(other).healthz_port == 18081
    container = main(other)
    assert container["ports"] == [{"name": "healthz", "containerPort": 18081, "protocol": "TCP"}]
    assert container["livenessProbe"] == {
        "httpGet": {"path": "/healthz", "port": "healthz"},
        "initialDelaySeconds": 10,
        "periodSeconds": 3,
    }
    assert container["readinessProbe"] == {"httpGet": {"path": "/readyz", "port": "healthz"}}


def test_health_port_of_0_drops_flag_port_and_probes() -> None:
    off = flannel(healthz={"port": 0})
    assert options(off).healthz_port == 0
    assert "--healthz-port" not in " ".join(main(off)["args"])
    assert not {"ports", "livenessProbe", "readinessProbe"} & main(off).keys()


def test_images_and_pull_secrets() -> None:
    assert main()["image"] == init("install-cni")["image"] == f"flanneld:{__version__}"
    ours = flannel(image={"repository": "registry.example/net/flanneld", "tag": "9"})
    assert {main(ours)["image"], init("install-cni", ours)["image"], init("install-cni-plugin", ours)["image"]} == {
        "registry.example/net/flanneld:9"
    }
    theirs = flannel(flannel_cni={"image": {"repository": "registry.example/plugin", "tag": "v1"}})
    plugin = init("install-cni-plugin", theirs)
    assert plugin["image"] == "registry.example/plugin:v1"
    assert [*plugin["command"], *plugin["args"]] == ["cp", "-f", "/flannel", "/opt/cni/bin/flannel"]
    assert "imagePullSecrets" not in spec()
    assert spec({"global": {"imagePullSecrets": [{"name": "s"}]}})["imagePullSecrets"] == [{"name": "s"}]


def test_cni_configuration_and_directories() -> None:
    conf = '{\n  "name": "other",\n  "cniVersion": "1.0.0"\n}\n'
    assert the("ConfigMap", flannel(cniConf=conf))["data"]["cni-conf.json"] == conf
    elsewhere = flannel(cniBinDir="/usr/libexec/cni", cniConfDir="/var/lib/cni/net.d")
    assert host_path("cni-plugin", elsewhere) == "/usr/libexec/cni"
    assert host_path("cni", elsewhere) == "/var/lib/cni/net.d"
    assert init("install-cni") is not None
    assert init("install-cni", flannel(skipCNIConfigInstallation=True)) is None
    assert init("install-cni-plugin", flannel(skipCNIConfigInstallation=True)) is not None


def test_arguments_resources_and_where_it_runs() -> None:
    assert options(flannel(args=["--kube-subnet-mgr", "--iface=eth1", "--manage-sysctls"])).iface == ("eth1",)
    limits = {"limits": {"memory": "200Mi"}, "requests": {"cpu": "1"}}
    assert main(flannel(resources=limits))["resources"] == {
        "limits": {"memory": "200Mi"},
        "requests": {"cpu": "1", "memory": "100Mi"},
    }
    assert "resources" not in main(flannel(resources=None))
    only = [{"key": "a", "operator": "Exists"}]
    assert spec(flannel(tolerations=only))["tolerations"] == only
    assert "tolerations" not in spec(flannel(tolerations=[]))
    assert "nodeSelector" not in spec()
    assert spec(flannel(nodeSelector={"pool": "true"}))["nodeSelector"] == {"pool": "true"}


@pytest.mark.parametrize(("backend", "privileged"), [("vxlan", False), ("wireguard", False), ("udp", True)])
def test_privileged_only_where_a_device_file_is_opened(backend: str, privileged: bool) -> None:
    context = main(flannel(backend=backend))["securityContext"]
    assert context == {
        "privileged": privileged,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "NET_RAW"]},
    }


def rights(role: Any) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_network_policies() -> None:
    on = {"netpol": {"enabled": True, "args": ["--v=4"], "image": {"repository": "r/netpol", "tag": "v2"}}}
    assert [made["name"] for made in spec()["containers"]] == ["kube-flannel"]
    container = next(made for made in spec(on)["containers"] if made["name"] == "kube-network-policies")
    assert (container["image"], container["args"]) == ("r/netpol:v2", ["--v=4"])
    assert container["securityContext"]["privileged"] is True
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/lib/modules"]
    assert host_path("lib-modules", on) == "/lib/modules"
    assert "lib-modules" not in {volume["name"] for volume in spec()["volumes"]}
    more = rights(the("ClusterRole", on)) - rights(the("ClusterRole"))
    assert ("networking.k8s.io", "networkpolicies", "watch") in more
    assert ("", "namespaces", "list") in more


def test_rights_are_those_of_the_manifest() -> None:
    assert rights(the("ClusterRole")) == rights(next(made for made in MANIFEST if made["kind"] == "ClusterRole"))


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"podCIDR": "10.0.0.0/16"}, "podCIDR"),
    ({"podCidr": 10}, "podCidr"),
    (flannel(backendport=8472), "backendport"),
    (flannel(backendPort="8472"), "backendPort"),
    (flannel(backendPort=70000), "backendPort"),
    (flannel(backend="vxlam"), "backend"),
    (flannel(vni=1 << 24), "vni"),
    (flannel(mtu=1400.5), "mtu"),
    (flannel(GBP="true"), "GBP"),
    (flannel(tunnelMode="both"), "tunnelMode"),
    (flannel(psk=0), "psk"),
    (flannel(enableNFTables="yes"), "enableNFTables"),
    (flannel(args="--ip-masq"), "args"),
    (flannel(args=[]), "args"),
    (flannel(cniConf={"name": "cbr0"}), "cniConf"),
    (flannel(cniBinDir="opt/cni"), "cniBinDir"),
    (flannel(healthz={"port": "8081"}), "port"),
    (flannel(healthz={"probe": {}}), "probe"),
    (flannel(tolerations={"operator": "Exists"}), "tolerations"),
    (flannel(nodeSelector={"a": True}), "nodeSelector"),
    ({"global": {"imagePullSecrets": ["s"]}}, "imagePullSecrets"),
    ({"netpol": {"enabled": "no"}}, "enabled"),
]


@pytest.mark.parametrize("changes", [{}, EVERYTHING])
def test_notes_can_be_printed(changes: dict[str, Any]) -> None:
    values = chart.merged(chart.default_values(), changes)
    text = chart.render(
        (chart.CHART / "templates" / "NOTES.txt").read_text(), {"Values": values, "Release": {"Namespace": "net"}}
    )
    assert "label namespace net " in text
    assert ("python3" in text) is (changes == {})


@pytest.mark.parametrize(("changes", "word"), WRONG)
def test_wrong_values_are_refused(changes: dict[str, Any], word: str) -> None:
    (found,) = chart.violations(chart.merged(chart.default_values(), changes), SCHEMA)
    assert word in found


def test_every_value_has_a_type() -> None:
    def untyped(values: Any, schema: Any, where: str) -> list[str]:
        known = schema.get("properties", {})
        if not isinstance(values, dict) or not known:
            return []
        return [f"{where}.{name}" for name in values if name not in known] + [
            path for name in values if name in known for path in untyped(values[name], known[name], f"{where}.{name}")
        ]

    assert untyped(chart.default_values(), SCHEMA, "") == []


def test_version_is_this_one() -> None:
    found = yaml.safe_load((chart.CHART / "Chart.yaml").read_text())
    assert {found["version"], found["appVersion"], chart.default_values()["flannel"]["image"]["tag"]} == {__version__}


@pytest.mark.parametrize(
    "template",
    [
        "{{ include 'x' . }}",
        "{{ .Values.a | upper }}",
        "{{ .Chart.Name }}",
        "{{ .Values.number }}",
        "{{ .Values.none }}",
        "{{- if and .Values.a .Values.a }}{{- end }}",
        "{{- range .Values.a }}{{- end }}",
        "{{- if .Values.a }}",
        "{{ .Values.a -}} x",
        "{{ .Values.a.b.c }}",
        "{{.Values.a}}",
    ],
)
def test_renderer_refuses_what_it_does_not_know(template: str) -> None:
    with pytest.raises(chart.Refused):
        chart.render(template, {"Values": {"a": "x", "number": 1}})


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("a {{ .Values.a }} b", "a x b"),
        ("a\n  {{- if .Values.a }}\n  b\n  {{- else }}\n  c\n  {{- end }}\nd", "a\n  b\nd"),
        ("{{ if .Values.no }}1{{ else if .Values.a }}2{{ else if .Values.a }}3{{ else }}4{{ end }}", "2"),
        ('{{ if eq .Values.a "y" }}1{{ else }}{{ if not .Values.no }}2{{ end }}{{ end }}', "2"),
        ("{{ if .Values.no }}{{ if .Values.a }}1{{ else }}2{{ end }}{{ end }}-", "-"),
        ("k:\n  {{- .Values.list | toYaml | nindent 2 }}", "k:\n  - 1\n  - b"),
    ],
)
def test_renderer(template: str, text: str) -> None:
    assert chart.render(template, {"Values": {"a": "x", "no": "", "list": [1, "b"]}}) == text


HELM = programs.find("helm")
needs_helm = pytest.mark.skipif(HELM is None, reason="needs helm to compare with")


def helm(changes: dict[str, Any], directory: Path) -> subprocess.CompletedProcess[str]:
    path = directory / "values.yaml"
    path.write_text(json.dumps(changes))
    command = [HELM or "", "template", "f", str(chart.CHART), "-n", "kube-flannel", "-f", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_helm
@pytest.mark.parametrize(
    "changes",
    [
        {},
        EVERYTHING,
        flannel(**VXLAN, healthz={"port": 0}, skipCNIConfigInstallation=True, tolerations=[], resources=None),
        {"podCidr": "", "podCidrv6": "fd00::/48", **flannel(backend="vxlan", vni=10_000_000)},
        flannel(backend="udp", backendPort=8286),
    ],
)
def test_helm_makes_the_same_objects(changes: dict[str, Any], tmp_path: Path) -> None:
    def by_kind(made: list[Any]) -> dict[str, Any]:
        return {one["kind"]: json_read(one) for one in made if one}

    done = helm(changes, tmp_path)
    assert done.returncode == 0, done.stderr
    assert by_kind(list(yaml.safe_load_all(done.stdout))) == by_kind(chart.objects(changes))


@needs_helm
@pytest.mark.parametrize(("changes", "word"), WRONG)
def test_helm_refuses_the_same_values(changes: dict[str, Any], word: str, tmp_path: Path) -> None:
    done = helm(changes, tmp_path)
    assert done.returncode != 0
    assert word in done.stderr
