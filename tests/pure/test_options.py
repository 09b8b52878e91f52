from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import FrozenInstanceError
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flanneld.options import FLAGS, Options, ShowHelp, ShowVersion, describe, parse
from flanneld.usage import usage
from subnet.errors import UsageError

pytestmark = pytest.mark.pure

UPSTREAM_DEFAULTS = {
    "etcd-endpoints": "http://127.0.0.1:4001,http://127.0.0.1:2379",
    "etcd-prefix": "/coreos.com/network",
    "etcd-keyfile": "",
    "etcd-certfile": "",
    "etcd-cafile": "",
    "etcd-username": "",
    "etcd-password": "",
    "iface": "",
    "iface-regex": "",
    "iface-can-reach": "",
    "subnet-file": "/run/flannel/subnet.env",
    "public-ip": "",
    "public-ipv6": "",
    "subnet-lease-renew-margin": 60,
    "ip-masq": False,
    "ip-masq-fully-random-disable": False,
    "kube-subnet-mgr": False,
    "kube-api-url": "",
    "kubeconfig-file": "",
    "kube-annotation-prefix": "flannel.alpha.coreos.com",
    "healthz-ip": "0.0.0.0",
    "healthz-port": 0,
    "iptables-resync": 5,
    "iptables-forward-rules": True,
    "ip-blackhole-route": False,
    "net-config-path": "/etc/kube-flannel/net-conf.json",
    "set-node-network-unavailable": True,
    "v": 0,
    "vmodule": "",
    "log_backtrace_at": "",
}
OWN_DEFAULTS = {
    "log-format": "text",
    "startup-timeout": 0,
    "resync-period": 60,
    "on-lease-lost": "reacquire",
    "state-file": "",
    "offline-start": False,
    "tunnel-checksum-offload": True,
    "vtep-filter": False,
    "nexthop-objects": "auto",
    "ip-masq-exclude": "",
    "chain-prefix": "FLANNEL",
    "table-prefix": "flannel",
    "manage-sysctls": False,
    "cleanup-on-exit": False,
}
BY_NAME = {flag.name: flag for flag in FLAGS.values()}


def options(*argv: str, environ: Mapping[str, str] | None = None) -> Options:
    parsed = parse(argv, environ or {})
    assert isinstance(parsed, Options)
    return parsed


def refusal(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv, environ or {})
    return str(caught.value)


def test_every_flag_is_there_with_its_default() -> None:
    assert {flag.name: flag.default for flag in FLAGS.values()} == UPSTREAM_DEFAULTS | OWN_DEFAULTS


def test_defaults() -> None:
    found = options()
    assert found == Options()
    assert found.etcd_endpoints == ("http://127.0.0.1:4001", "http://127.0.0.1:2379")
    assert found.renew_margin_s == 3600
    assert (found.iface, found.iface_regex, found.public_ip, found.warnings) == ((), (), None, ())
    assert found.healthz_ip == IPv4Address("0.0.0.0")
    with pytest.raises(FrozenInstanceError):
        found.ip_masq = True  # type: ignore[misc]


def test_command_line() -> None:
    found = options(
        "-etcd-endpoints", "a:1,https://b:2", "--etcd-prefix=/one", "--etcd-prefix=/two/", "-iface=no0",
        "-iface", "eth0", "--iface-regex=^eth", "--ip-masq=T",
        "--subnet-lease-renew-margin=0x3b", "--iptables-resync=+07", "-v=1",
        "--healthz-port=8_0_8_1", "--healthz-ip=::1", "--public-ip=192.0.2.9", "--public-ipv6=2001:db8::9", "--",
    )  # fmt: skip
    assert found == Options(
        etcd_endpoints=("http://a:1", "https://b:2"),
        etcd_prefix="/two/",
        iface=("no0", "eth0"),
        iface_regex=("^eth",),
        ip_masq=True,
        renew_margin_s=59 * 60,
        iptables_resync_s=7,
        verbosity=1,
        healthz_port=8081,
        healthz_ip=IPv6Address("::1"),
        public_ip=IPv4Address("192.0.2.9"),
        public_ipv6=IPv6Address("2001:db8::9"),
    )


def test_environment() -> None:
    found = options(
        environ={
            "FLANNELD_ETCD_ENDPOINTS": "http://a:1",
            "FLANNELD_IFACE": "eth0,eth1",
            "FLANNELD_IP_MASQ": "true",
            "FLANNELD_V": "3",
            "FLANNELD_LOG_BACKTRACE_AT": "loop.py:4",
            "FLANNELD_SUBNET_LEASE_RENEW_MARGIN": "2",
            "FLANNELD_IPTABLES_FORWARD_RULES": "",
            "IP_MASQ": "maybe",
        }
    )
    assert found == Options(
        etcd_endpoints=("http://a:1",),
        iface=("eth0,eth1",),
        ip_masq=True,
        verbosity=3,
        log_backtrace_at="loop.py:4",
        renew_margin_s=120,
    )


def test_command_line_beats_environment() -> None:
    environ = {"FLANNELD_IP_MASQ": "true", "FLANNELD_IFACE": "eth1", "FLANNELD_HEALTHZ_PORT": "nonsense"}
    assert options("--ip-masq=false", "--iface=eth0", "--healthz-port=0", environ=environ) == Options(iface=("eth0",))


VALUES: dict[str, st.SearchStrategy[str]] = {
    "etcd-endpoints": st.sampled_from(["http://a:1", "b", "https://c:3,d:4"]),
    "iface-regex": st.sampled_from(["^eth0$", "[[:alpha:]]", r"a\z"]),
    "public-ip": st.ip_addresses(v=4).map(str),
    "public-ipv6": st.ip_addresses(v=6).map(str),
    "subnet-lease-renew-margin": st.integers(-2, 1500).map(str),
    "iface-can-reach": st.ip_addresses().map(str),
    "healthz-ip": st.ip_addresses().map(str),
    "log-format": st.sampled_from(["text", "json", "klog", "xml"]),
    "on-lease-lost": st.sampled_from(["reacquire", "exit", "panic"]),
    "vmodule": st.sampled_from(["vxlan=2", "a=1,b=2", "a"]),
    "log_backtrace_at": st.sampled_from(["a.py:1", "a"]),
}
KIND_VALUES: dict[str, st.SearchStrategy[str]] = {
    "bool": st.sampled_from(["1", "t", "T", "TRUE", "true", "True", "0", "f", "F", "FALSE", "false", "False", "maybe"]),
    "int": st.integers(-10, 70000).map(str),
    "string": st.text(min_size=1),
}


def outcome(argv: Sequence[str], environ: Mapping[str, str], source: str) -> Options | str:
    try:
        return options(*argv, environ=environ)
    except UsageError as error:
        return str(error).replace(source, "SOURCE")


@given(st.data())
def test_a_value_means_the_same_by_flag_and_by_variable(data: st.DataObject) -> None:
    flag = BY_NAME[
        data.draw(st.sampled_from(sorted(n for n in BY_NAME if not n.endswith("file") or n == "subnet-file")))
    ]
    text = data.draw(VALUES.get(flag.name, KIND_VALUES[flag.kind]))
    by_flag = outcome([f"--{flag.name}={text}"], {}, f"--{flag.name}")
    assert by_flag == outcome([], {flag.variable: text}, flag.variable)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--subnet-lease-renew-margin=0"], "--subnet-lease-renew-margin: 0 "),
        (["--subnet-lease-renew-margin=1440"], "--subnet-lease-renew-margin: 1440 "),
        (["--subnet-lease-renew-margin=-1"], "--subnet-lease-renew-margin: -1 "),
        (["--iptables-resync=0"], "--iptables-resync: 0 "),
        (["--resync-period=0"], "--resync-period: 0 "),
        (["--startup-timeout=-1"], "--startup-timeout: -1 "),
        (["--public-ip=2001:db8::1"], "--public-ip: '2001:db8::1'"),
        (["--public-ipv6=192.0.2.1"], "--public-ipv6: '192.0.2.1'"),
        (["--iface-regex=ok", "--iface-regex=["], "--iface-regex: '['"),
        (["--iface-can-reach=example.org"], "--iface-can-reach: 'example.org'"),
        (["--healthz-ip=nowhere"], "--healthz-ip: 'nowhere'"),
        (["--healthz-port=65536"], "--healthz-port: 65536"),
        (["--healthz-port=x"], "--healthz-port: 'x'"),
        (["--vmodule=x"], "--vmodule: 'x'"),
        (["--log_backtrace_at=x"], "--log_backtrace_at: 'x'"),
        (["--log-format=xml"], "--log-format: 'xml'"),
        (["--on-lease-lost=panic"], "--on-lease-lost: 'panic'"),
        (["--subnet-file="], "--subnet-file: "),
        (["--etcd-endpoints=http://a/b"], "--etcd-endpoints: endpoint 'http://a/b'"),
        (["--etcd-cafile=/nonexistent.ca"], "--etcd-cafile: cannot read '/nonexistent.ca'"),
        (["--etcd-certfile=/nonexistent.crt", "--etcd-keyfile=/nonexistent.key"], "/nonexistent.key"),
        (["--ip-masq-exclude=10.8.0.1/16"], "--ip-masq-exclude: '10.8.0.1/16' is no network"),
        (["--chain-prefix=A B"], "--chain-prefix: 'A B'"),
        (["--chain-prefix=FLANNEL-OF-THE-RED-CLUSTER"], "20 characters at most"),
        (["--table-prefix="], "--table-prefix: ''"),
        (["--kubeconfig-file=/nonexistent.conf"], "--kubeconfig-file: cannot read '/nonexistent.conf'"),
        (["--kube-annotation-prefix=a/b/c"], "--kube-annotation-prefix: 'a/b/c' must be"),
    ],
)
def test_what_waiting_cannot_cure_is_refused(argv: list[str], words: str) -> None:
    assert words in refusal(argv)


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--ifaec=eth1"], "--ifaec"),
        (["eth1"], "'eth1'"),
        (["--ip-masq", "maybe"], "'maybe'"),
        (["--ip-masq", "true"], "--ip-masq=true"),
    ],
)
def test_S14_misspelt_options_and_stray_arguments(argv: list[str], word: str) -> None:
    assert word in refusal(argv)


def test_S14_unknown_variables_are_warned_of() -> None:
    found = options(
        environ={"FLANNELD_IFAEC": "eth1", "FLANNELD_ETCD_PASSWROD": "s3cret", "FLANNELD_EMPTY": "", "FLANNELD": "x"}
    )
    assert [w.split(";")[0] for w in found.warnings] == [
        "environment variable FLANNELD_ETCD_PASSWROD belongs to no flag",
        "environment variable FLANNELD_IFAEC belongs to no flag",
    ]
    assert "FLANNELD_IFACE?" in found.warnings[1]
    assert "s3cret" not in repr(found)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FLANNELD_IP_MASQ", "maybe"),
        ("FLANNELD_HEALTHZ_PORT", "x"),
        ("FLANNELD_PUBLIC_IP", "::1"),
        ("FLANNELD_IFACE_REGEX", "["),
    ],
)
def test_bad_variables_are_named(variable: str, value: str) -> None:
    assert refusal([], {variable: value}).startswith(f"{variable}: {value!r} ")


def test_the_last_of_several_values_counts_but_each_is_checked() -> None:
    assert options("--healthz-port=1", "--healthz-port=2").healthz_port == 2
    assert "70000" in refusal(["--healthz-port=70000", "--healthz-port=2"])


def test_a_switch_that_is_off_is_available() -> None:
    assert options("--kube-subnet-mgr=false", "--ip-blackhole-route=false") == Options()


def test_flags_of_kubernetes_mode_are_taken(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "admin.conf"
    kubeconfig.touch()
    found = options(
        "--kube-subnet-mgr",
        "--kube-api-url=http://a",
        f"--kubeconfig-file={kubeconfig}",
        "--kube-annotation-prefix=c.example",
        "--net-config-path=/d",
    )
    assert found.kube_subnet_mgr
    assert (found.kube_api_url, found.kubeconfig_file, found.net_config_path) == ("http://a", str(kubeconfig), "/d")
    assert found.kube_annotation_prefix == "c.example/"


def test_tls_files(tmp_path: Path) -> None:
    key, certificate = tmp_path / "client.key", tmp_path / "client.crt"
    key.touch()
    certificate.touch()
    assert options(f"--etcd-cafile={key}").etcd_cafile == str(key)
    assert options(f"--etcd-keyfile={key}", f"--etcd-certfile={certificate}").etcd_certfile == str(certificate)
    assert "--etcd-keyfile needs --etcd-certfile" in refusal([f"--etcd-keyfile={key}"])
    assert "--etcd-certfile needs --etcd-keyfile" in refusal([], {"FLANNELD_ETCD_CERTFILE": str(certificate)})


@pytest.mark.parametrize(("given", "missing"), [("username", "password"), ("password", "username")])
def test_half_of_the_credentials_is_warned_of(given: str, missing: str) -> None:
    assert options(f"--etcd-{given}=x").warnings == (f"--etcd-{given} has no effect without --etcd-{missing}",)
    assert options("--etcd-username=x", "--etcd-password=y").warnings == ()


def test_help_and_version() -> None:
    assert parse(["--help"], {"FLANNELD_IP_MASQ": "maybe"}) == ShowHelp()
    assert parse(["-h"], {}) == ShowHelp()
    assert parse(["--version"], {"FLANNELD_IP_MASQ": "maybe"}) == ShowVersion()
    assert parse(["--version", "--healthz-port=70000"], {}) == ShowVersion()
    assert isinstance(parse(["--version", "--version=false"], {}), Options)
    assert options(environ={"FLANNELD_VERSION": "true"}) == Options()


def test_description_is_the_command_line() -> None:
    argv = [
        "--etcd-endpoints=http://a:1,https://b:2",
        "--iface=eth0",
        "--iface=eth1",
        "--iface-can-reach=2001:db8::1",
        "--public-ip=192.0.2.1",
        "--subnet-lease-renew-margin=90",
        "--ip-masq=true",
        "--ip-masq-exclude=10.8.0.0/16",
        "--ip-masq-exclude=fc00:8::/48",
        "--iptables-forward-rules=false",
        "--v=2",
    ]
    assert describe(options(*argv)) == argv
    assert describe(Options()) == []


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_password_is_nowhere(by_variable: bool) -> None:
    argv, environ = (["--etcd-password=s3cret"], {}) if not by_variable else ([], {"FLANNELD_ETCD_PASSWORD": "s3cret"})
    found = options(*argv, environ=environ)
    assert found.etcd_password == "s3cret"
    assert "s3cret" not in repr(found) + str(found) + " ".join(found.warnings)
    assert describe(found) == ["--etcd-password=***"]


def test_endpoints_with_a_password_are_refused_without_showing_it() -> None:
    assert "s3cret" not in refusal(["--etcd-endpoints=http://root:s3cret@a:1"])
    assert "s3cret" not in refusal([], {"FLANNELD_ETCD_ENDPOINTS": "http://root:s3cret@a:1"})


def test_usage_has_every_flag_in_its_group() -> None:
    text = usage()
    for name, default in (UPSTREAM_DEFAULTS | OWN_DEFAULTS).items():
        assert f"  --{name}" in text
        assert str(default) in text or str(default).lower() in text
    assert (
        text.index("etcd:\n") < text.index("--etcd-prefix") < text.index("Kubernetes:\n") < text.index("--kube-api-url")
    )
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize(
    ("argv", "directory", "expected"),
    [
        ([], None, ""),
        (["--offline-start"], None, "/var/lib/flannel/state.json"),
        ([], "/var/lib/flannel", "/var/lib/flannel/state.json"),
        (["--offline-start"], "/srv/one:/srv/two", "/srv/one/state.json"),
        (["--state-file=/srv/x"], "/var/lib/flannel", "/srv/x"),
        (["--state-file=/srv/x", "--offline-start"], None, "/srv/x"),
    ],
)
def test_place_of_the_state_file(argv: list[str], directory: str | None, expected: str) -> None:
    environ = {} if directory is None else {"STATE_DIRECTORY": directory}
    assert options(*argv, environ=environ).state_file == expected
