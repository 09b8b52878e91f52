from __future__ import annotations

import shlex
import string
from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import load_backend
from backends.api import CarryingBackend, ExternalInterface, Setting
from backends.dataplane.model import DesiredState
from backends.extension import plan_of
from backends.extension.commands import CommandPlan, has_shell_syntax, peer_env, peer_input, words
from subnet.config import parse_network_config
from subnet.errors import ConfigError, LeaseDataError
from subnet.model import Lease, LeaseAttrs, Subnets

pytestmark = pytest.mark.pure

ENV = {"SUBNET": "10.5.2.0/24", "PUBLIC_IP": "192.0.2.2", "SPACED": "a  b", "QUOTED": "'x"}
INTERFACE = ExternalInterface("eth0", 2, 1500, ip_address("192.0.2.1"), public_v4=ip_address("198.51.100.1"))  # type: ignore[arg-type]
DUAL = Subnets(ip_network("10.5.2.0/24"), ip_network("fd05:0:0:2::/64"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("command", "argv"),
    [
        ("ip route add $SUBNET via ${PUBLIC_IP}", ["ip", "route", "add", "10.5.2.0/24", "via", "192.0.2.2"]),
        ('  x\t"$SUBNET"\n', ["x", "10.5.2.0/24"]),
        ("x '$SUBNET' \\$SUBNET", ["x", "$SUBNET", "$SUBNET"]),
        ("x a'b c'\"d e\"f", ["x", "ab cd ef"]),
        ("$SPACED $QUOTED", ["a  b", "'x"]),
        ("x '' \"\" $UNSET", ["x", "", "", ""]),
        ('x "a\\"b" "c\\d" "\\$SUBNET"', ["x", 'a"b', "c\\d", "$SUBNET"]),
        ("dev=$SUBNET.1 $1 $ ${bad-name}", ["dev=10.5.2.0/24.1", "$1", "$", "${bad-name}"]),
        ("a; b && c | d", ["a;", "b", "&&", "c", "|", "d"]),
        ('x a\\\nb "c\\\nd"', ["x", "ab", "cd"]),
        ("", []),
    ],
)
def test_words_are_a_posix_shells(command: str, argv: list[str]) -> None:
    assert words(command, ENV) == argv


@given(st.lists(st.text(string.printable)))
def test_quoted_words_come_back(argv: list[str]) -> None:
    assert words(shlex.join(argv), ENV) == argv


@given(st.text(string.ascii_letters + " \t\n'\"\\{}"))
def test_without_variables_it_is_shlex(command: str) -> None:
    try:
        expected = shlex.split(command)
    except ValueError:
        with pytest.raises(ValueError, match=r"closed|backslash"):
            words(command, {})
        return
    # POSIX drops an escaped end of line; shlex keeps it.
    if "\\\n" not in command:
        assert words(command, {}) == expected


@pytest.mark.parametrize(
    ("command", "suspicious"),
    [
        ("ip link add $IF type vxlan; ip link set $IF up", True),
        ("export VNI=1", True),
        ("a && b", True),
        ("x `date`", True),
        ("x $(date)", True),
        ("x >file", True),
        ("x 'a; b' \"c | d\" e\\;", False),
        ("ip route add $SUBNET via $PUBLIC_IP", False),
        ("/opt/exporter export", False),
    ],
)
def test_L51_commands_written_for_a_shell_are_recognised(command: str, suspicious: bool) -> None:
    assert has_shell_syntax(command) is suspicious


def setting(options: str = "") -> Setting:
    config = parse_network_config('{"Network":"10.5.0.0/16","Backend":{"Type":"extension"' + options + "}}", "/k")
    return Setting(config, INTERFACE, frozenset({ip_network("10.5.0.0/16")}))


def plan(options: str = "") -> CommandPlan:
    return plan_of(setting(options))


def test_shell_is_opted_in() -> None:
    text = ',"SubnetAddCommand":"echo $SUBNET; cat"'
    assert plan(text).argv("SubnetAddCommand", ENV) == ["echo", "10.5.2.0/24;", "cat"]
    assert plan(text).suspects() == ["SubnetAddCommand"]
    shell = plan(text + ',"ExtensionShell":true')
    assert shell.argv("SubnetAddCommand", ENV) == ["sh", "-c", "echo $SUBNET; cat"]
    assert shell.suspects() == []
    assert shell.argv("SubnetRemoveCommand", ENV) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (',"PreStartupCommand":"echo \'x"', "PreStartupCommand.*single quote is not closed"),
        (',"SubnetAddCommand":["ip"]', "SubnetAddCommand"),
        (',"CommandTimeout":0', "CommandTimeout 0.*nearest legal value is 1"),
        (',"ExtensionShell":"yes"', "ExtensionShell"),
    ],
)
def test_options_that_cannot_be_used_are_named(options: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan(options)


def test_timeout_is_thirty_seconds_unless_set() -> None:
    assert plan().timeout_s == 30
    assert plan(',"CommandTimeout":5').timeout_s == 5


def test_unknown_key_is_warned_of_and_ours_are_known() -> None:
    config = setting(',"CommandTimeout":5,"ExtensionShell":true,"ShutdownCommand":"true","SubnetAdCommand":"x"').config
    assert [w for w in config.warnings if "SubnetAdCommand" in w]
    assert len(config.warnings) == 1


def test_L51_variables_of_both_families_reach_every_command() -> None:
    own = plan().own_env(Subnets(ip_network("10.5.1.0/24")))  # type: ignore[arg-type]
    assert own == {
        "NETWORK": "10.5.0.0/16",
        "SUBNET": "10.5.1.0/24",
        "IPV6SUBNET": "::/0",
        "PUBLIC_IP": "192.0.2.1",
        "PUBLIC_IPV6": "<nil>",
    }
    assert plan().own_env(None) == {}
    attrs = LeaseAttrs(ip_address("192.0.2.2"), ip_address("2001:db8:1::2"), "extension", "a b")  # type: ignore[arg-type]
    assert peer_env(Lease(DUAL, attrs)) == {
        "SUBNET": "10.5.2.0/24",
        "IPV6SUBNET": "fd05:0:0:2::/64",
        "PUBLIC_IP": "192.0.2.2",
        "PUBLIC_IPV6": "2001:db8:1::2",
    }


def test_input_is_what_the_peer_printed() -> None:
    def lease(data: object) -> Lease:
        return Lease(DUAL, LeaseAttrs(backend_data=data), "/n/10.5.2.0-24")

    assert peer_input(lease("02:00:00:00:00:02")) == "02:00:00:00:00:02\n"
    assert peer_input(lease(None)) == "\n"
    with pytest.raises(LeaseDataError, match=r"10\.5\.2\.0-24"):
        peer_input(lease({"VNI": 1}))


def test_lease_carries_the_interface_address_and_nothing_in_the_kernel_is_ours() -> None:
    backend = load_backend(setting())
    assert isinstance(backend, CarryingBackend)
    assert backend.attrs({}) == LeaseAttrs(ip_address("192.0.2.1"), None, "extension")  # type: ignore[arg-type]
    assert backend.links({}, False) == ()
    assert backend.mtu_bytes() == 1500
    # Routes that commands make look like Go flannel's; claiming the networks would remove them.
    assert backend.desired(DUAL, (), lambda _: False) == DesiredState(frozenset(), "eth0", frozenset())
