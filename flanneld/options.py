"""The daemon's options: one table, read from the command line and the environment.

The fields of ``Options`` are the table; everything else here is derived from it.
Source: upstream main.go (init) and its pkg flagutil, SetFlagsFromEnv.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Literal, TypeAlias

from flanneld import flagvalues, goflags
from subnet.errors import UsageError
from subnet.kube.annotations import annotation_prefix
from subnet.model import IPAddress, IPNetwork

ENVIRONMENT_PREFIX = "FLANNELD_"
REDACTED = "***"
DEFAULT_STATE_FILE = "/var/lib/flannel/state.json"

_ETCD = "etcd"
_KUBERNETES = "Kubernetes"
_INTERFACE = "External interface"
_LEASES = "Leases and subnet file"
_TUNNELS = "Tunnels"
_RULES = "Traffic rules and routes"
_DAEMON = "Life of the daemon"
_HEALTH = "Health"
_LOGGING = "Logging"
GROUPS = (_ETCD, _KUBERNETES, _INTERFACE, _LEASES, _TUNNELS, _RULES, _DAEMON, _HEALTH, _LOGGING)


@dataclass(frozen=True, slots=True)
class Flag:
    """One flag, with the field of Options that it sets.

    ``default`` is spelled as on a command line. ``read`` turns one parsed value
    into what the field holds (raises ValueError), ``show`` turns it back.
    """

    name: str
    kind: goflags.Kind
    default: goflags.Value
    group: str
    text: str
    read: Callable[[Any], Any]
    show: Callable[[Any], str]
    repeatable: bool = False
    secret: bool = False

    @property
    def variable(self) -> str:
        """Return the environment variable that sets it."""
        return ENVIRONMENT_PREFIX + self.name.upper().replace("-", "_").replace(".", "_")


def _same(value: Any) -> Any:
    return value


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else str(value)


def _flag(
    name: str,
    default: goflags.Value,
    group: str,
    text: str,
    *,
    read: Callable[[Any], Any] = _same,
    show: Callable[[Any], str] = _show,
    repeatable: bool = False,
    secret: bool = False,
) -> Any:
    kind: goflags.Kind = "bool" if isinstance(default, bool) else "int" if isinstance(default, int) else "string"
    flag = Flag(name, kind, default, group, text, read, show, repeatable, secret)
    return field(default=() if repeatable else read(default), repr=not secret, metadata={"flag": flag})


@dataclass(frozen=True, slots=True)
class Options:
    """What the operator asked for, validated; the defaults are those of an empty command line.

    ``warnings`` are for people, one sentence each, without secrets.
    """

    etcd_endpoints: tuple[str, ...] = _flag(
        "etcd-endpoints",
        "http://127.0.0.1:4001,http://127.0.0.1:2379",
        _ETCD,
        "endpoints, separated by commas, each host:port, http://host:port or https://host:port",
        read=flagvalues.endpoints,
    )
    etcd_prefix: str = _flag("etcd-prefix", "/coreos.com/network", _ETCD, "key prefix of network config and leases")
    etcd_keyfile: str = _flag(
        "etcd-keyfile", "", _ETCD, "TLS client key, PEM; needs --etcd-certfile", read=flagvalues.readable_file
    )
    etcd_certfile: str = _flag(
        "etcd-certfile", "", _ETCD, "TLS client certificate, PEM; needs --etcd-keyfile", read=flagvalues.readable_file
    )
    etcd_cafile: str = _flag(
        "etcd-cafile",
        "",
        _ETCD,
        "TLS certificate authorities that endpoints must be signed by, PEM",
        read=flagvalues.readable_file,
    )
    etcd_username: str = _flag("etcd-username", "", _ETCD, "user name; used only with a password")
    etcd_password: str = _flag("etcd-password", "", _ETCD, "password; better given by its variable", secret=True)

    kube_subnet_mgr: bool = _flag(
        "kube-subnet-mgr", False, _KUBERNETES, "take subnets from the Kubernetes API, not from etcd"
    )
    kube_api_url: str = _flag("kube-api-url", "", _KUBERNETES, "API server, when not running in a pod")
    kubeconfig_file: str = _flag(
        "kubeconfig-file",
        "",
        _KUBERNETES,
        "kubeconfig file, when not running in a pod",
        read=flagvalues.readable_file,
    )
    kube_annotation_prefix: str = _flag(
        "kube-annotation-prefix",
        "flannel.alpha.coreos.com",
        _KUBERNETES,
        "prefix of the node annotations",
        read=annotation_prefix,
    )
    net_config_path: str = _flag(
        "net-config-path", "/etc/kube-flannel/net-conf.json", _KUBERNETES, "file that holds the network config"
    )
    set_node_network_unavailable: bool = _flag(
        "set-node-network-unavailable",
        True,
        _KUBERNETES,
        "set the node condition NetworkUnavailable to False when ready",
    )

    iface: tuple[str, ...] = _flag(
        "iface",
        "",
        _INTERFACE,
        "interface to reach other hosts through, by name or address; the first that fits is taken",
        repeatable=True,
    )
    iface_regex: tuple[str, ...] = _flag(
        "iface-regex",
        "",
        _INTERFACE,
        "the same by regular expression, on addresses, then on names; tried after --iface",
        read=flagvalues.pattern,
        repeatable=True,
    )
    iface_can_reach: IPAddress | None = _flag(  # noqa: RUF009
        "iface-can-reach",
        "",
        _INTERFACE,
        "the same by the route to this address; tried after --iface-regex",
        read=flagvalues.optional_address,
    )
    public_ip: IPv4Address | None = _flag(  # noqa: RUF009
        "public-ip", "", _INTERFACE, "IPv4 address that other hosts send to", read=flagvalues.public_ipv4
    )
    public_ipv6: IPv6Address | None = _flag(  # noqa: RUF009
        "public-ipv6", "", _INTERFACE, "IPv6 address that other hosts send to", read=flagvalues.public_ipv6
    )

    subnet_file: str = _flag(
        "subnet-file",
        "/run/flannel/subnet.env",
        _LEASES,
        "file to write subnet, MTU and masquerading to",
        read=flagvalues.path,
    )
    renew_margin_s: int = _flag(
        "subnet-lease-renew-margin",
        60,
        _LEASES,
        "minutes before expiry at which the lease is renewed, 1 to 1439",
        read=flagvalues.minutes_to_s(1, 1439),
        show=lambda seconds: str(seconds // 60),
    )
    on_lease_lost: Literal["reacquire", "exit"] = _flag(
        "on-lease-lost",
        "reacquire",
        _LEASES,
        "what to do when the lease is removed or taken: reacquire, or exit with an error",
        read=flagvalues.one_of("reacquire", "exit"),
    )
    state_file: str = _flag(
        "state-file",
        "",
        _LEASES,
        "file that remembers config, lease and peers; by default state.json in systemd's state directory, else "
        f"{DEFAULT_STATE_FILE} with --offline-start, else none",
    )
    offline_start: bool = _flag(
        "offline-start", False, _LEASES, "start from what --state-file remembers while the datastore does not answer"
    )

    tunnel_checksum_offload: bool = _flag(
        "tunnel-checksum-offload", True, _TUNNELS, "leave transmit checksum offload of tunnel devices on"
    )
    vtep_filter: bool = _flag(
        "vtep-filter",
        False,
        _TUNNELS,
        "take VXLAN and IP-in-IP packets from known hosts on the external interface only",
    )

    nexthop_objects: Literal["auto", "always", "never"] = _flag(
        "nexthop-objects",
        "auto",
        _TUNNELS,
        "whether IPv4 routes into tunnels name nexthop objects: auto means from 1000 peers at the start on",
        read=flagvalues.one_of("auto", "always", "never"),
    )

    ip_masq: bool = _flag("ip-masq", False, _RULES, "masquerade traffic that leaves the cluster network")
    ip_masq_fully_random_disable: bool = _flag(
        "ip-masq-fully-random-disable", False, _RULES, "never masquerade with fully random source ports"
    )
    ip_masq_exclude: tuple[IPNetwork, ...] = _flag(
        "ip-masq-exclude",
        "",
        _RULES,
        "destination network that pods reach with their own address; 0.0.0.0/0 or ::/0 for a whole family",
        read=flagvalues.network,
        repeatable=True,
    )
    iptables_resync_s: int = _flag(
        "iptables-resync",
        5,
        _RULES,
        "seconds between checks of the traffic rules, at least 1",
        read=flagvalues.between(1),
    )
    iptables_forward_rules: bool = _flag(
        "iptables-forward-rules", True, _RULES, "accept forwarded traffic of the cluster network"
    )
    ip_blackhole_route: bool = _flag(
        "ip-blackhole-route", False, _RULES, "discard traffic to own addresses that no pod has"
    )
    chain_prefix: str = _flag(
        "chain-prefix",
        "FLANNEL",
        _RULES,
        "first part of the names of iptables chains; another daemon on this host needs another",
        read=flagvalues.rule_name(20),
    )
    table_prefix: str = _flag(
        "table-prefix",
        "flannel",
        _RULES,
        "first part of the names of nftables tables; another daemon on this host needs another",
        read=flagvalues.rule_name(64),
    )
    manage_sysctls: bool = _flag(
        "manage-sysctls", False, _RULES, "switch on forwarding, and iptables for bridged packets, where they are off"
    )
    cleanup_on_exit: bool = _flag("cleanup-on-exit", False, _RULES, "remove the traffic rules at the end")

    startup_timeout_s: int = _flag(
        "startup-timeout",
        0,
        _DAEMON,
        "seconds after which a start that still waits for something ends with an error; 0 waits for ever",
        read=flagvalues.between(0),
    )
    resync_period_s: int = _flag(
        "resync-period",
        60,
        _DAEMON,
        "seconds between full comparisons with the kernel, at least 1; changes are seen at once anyway",
        read=flagvalues.between(1),
    )

    healthz_ip: IPAddress = _flag(  # noqa: RUF009
        "healthz-ip",
        "0.0.0.0",  # noqa: S104 - as upstream
        _HEALTH,
        "address that the health endpoints listen on",
        read=flagvalues.listen_address,
    )
    healthz_port: int = _flag(
        "healthz-port", 0, _HEALTH, "TCP port of /healthz and /readyz; none if 0 or less", read=flagvalues.port
    )

    log_format: Literal["text", "json", "klog"] = _flag(
        "log-format", "text", _LOGGING, "text, json or klog", read=flagvalues.one_of("text", "json", "klog")
    )
    verbosity: int = _flag("v", 0, _LOGGING, "log level: details from 2, libraries' details too from 4")
    vmodule: str = _flag(
        "vmodule", "", _LOGGING, "pattern=N,...: another level for modules that match", read=flagvalues.module_levels
    )
    log_backtrace_at: str = _flag(
        "log_backtrace_at",
        "",
        _LOGGING,
        "file:line: add a stack trace to what is logged there",
        read=flagvalues.source_line,
    )

    warnings: tuple[str, ...] = ()


FLAGS: Mapping[str, Flag] = {f.name: f.metadata["flag"] for f in fields(Options) if "flag" in f.metadata}
"""The flag of each field, in the order of help and start-up log."""

VERSION = "version"
_KINDS: dict[str, goflags.Kind] = {VERSION: "bool", **{flag.name: flag.kind for flag in FLAGS.values()}}


@dataclass(frozen=True, slots=True)
class ShowHelp:
    """The command line asks for the list of flags."""


@dataclass(frozen=True, slots=True)
class ShowVersion:
    """The command line asks for the version."""


Command: TypeAlias = Options | ShowHelp | ShowVersion


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Command:
    """Read command line (without the program's name) and environment.

    A flag that the command line does not have is set by its variable, if that
    is not empty. Raises UsageError, naming flag or variable, for everything
    that waiting cannot cure; TLS files are opened to find out.
    """
    given = goflags.parse(argv, _KINDS)
    if given is None:
        return ShowHelp()
    if given.get(VERSION, [False])[-1]:
        return ShowVersion()
    settings: dict[str, Any] = {}
    for field_name, flag in FLAGS.items():
        if flag.name in given:
            settings[field_name] = _read(field_name, f"--{flag.name}", given[flag.name])
        elif text := environ.get(flag.variable):
            settings[field_name] = _read(field_name, flag.variable, [text])
    options = Options(**settings)
    _refuse_half_a_client_certificate(options)
    return replace(
        options,
        state_file=options.state_file or _default_state_file(options, environ),
        warnings=(*_unknown_variables(environ), *_without_effect(options)),
    )


def _read(field_name: str, source: str, values: Sequence[goflags.Value]) -> Any:
    """Return what the field holds after these values, text or already parsed, were given in this order."""
    flag = FLAGS[field_name]
    try:
        found = tuple(flag.read(goflags.parse_value(flag.kind, v) if isinstance(v, str) else v) for v in values)
    except ValueError as error:
        raise UsageError(f"{source}: {error}") from error
    return found if flag.repeatable else found[-1]


def _refuse_half_a_client_certificate(options: Options) -> None:
    if bool(options.etcd_keyfile) != bool(options.etcd_certfile):
        given, missing = ("keyfile", "certfile") if options.etcd_keyfile else ("certfile", "keyfile")
        raise UsageError(f"--etcd-{given} needs --etcd-{missing}: a TLS client has both or neither")


def _default_state_file(options: Options, environ: Mapping[str, str]) -> str:
    """Where systemd says (systemd.exec(5), StateDirectory=), else nowhere unless it is needed."""
    directory = environ.get("STATE_DIRECTORY", "").split(":")[0]
    if directory:
        return f"{directory}/state.json"
    return DEFAULT_STATE_FILE if options.offline_start else ""


def _without_effect(options: Options) -> tuple[str, ...]:
    if bool(options.etcd_username) == bool(options.etcd_password):
        return ()
    given, missing = ("username", "password") if options.etcd_username else ("password", "username")
    return (f"--etcd-{given} has no effect without --etcd-{missing}",)


def _unknown_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    known = {flag.variable for flag in FLAGS.values()}
    return tuple(
        f"environment variable {name} belongs to no flag{goflags.did_you_mean(name, known)}"
        for name in sorted(environ.keys() - known - {ENVIRONMENT_PREFIX + VERSION.upper()})
        if name.startswith(ENVIRONMENT_PREFIX) and environ[name]
    )


def describe(options: Options) -> list[str]:
    """Return what differs from the defaults, as arguments of a command line; secrets are redacted."""
    described: list[str] = []
    for f in fields(Options):
        value = getattr(options, f.name)
        if f.name not in FLAGS or value == f.default:
            continue
        flag = FLAGS[f.name]
        shown = [REDACTED] if flag.secret else value if flag.repeatable else [flag.show(value)]
        described += [f"--{flag.name}={text}" for text in shown]
    return described
