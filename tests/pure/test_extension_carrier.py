from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from backends.extension.carrier import ExtensionCarrier
from backends.extension.commands import CommandPlan
from backends.extension.runner import Runner
from subnet.model import Lease, LeaseAttrs, Subnets

pytestmark = pytest.mark.pure

OWN = Subnets(IPv4Network("10.5.1.0/24"))
WAIT_S = 20.0
NAMES = {
    "pre": "PreStartupCommand",
    "post": "PostStartupCommand",
    "add": "SubnetAddCommand",
    "remove": "SubnetRemoveCommand",
    "shutdown": "ShutdownCommand",
}


def peer(n: int, data: object = None, kind: str = "extension") -> Lease:
    attrs = LeaseAttrs(IPv4Address(f"192.0.2.{n}"), None, kind, data)
    return Lease(Subnets(IPv4Network(f"10.5.{n}.0/24")), attrs, f"/n/10.5.{n}.0-24")


def plan(**commands: str) -> CommandPlan:
    full = {name: commands.pop(short, "") for short, name in NAMES.items()}
    assert not commands
    return CommandPlan(full, True, WAIT_S, "10.5.0.0/16", IPv4Address("192.0.2.1"), None)


def until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < ends, "it did not come"
        time.sleep(0.01)


class Site:
    """Carriers whose commands write to one file; all are closed at the end."""

    def __init__(self, directory: Path) -> None:
        self.log = directory / "log"
        self.woken = threading.Event()
        self.carriers: list[ExtensionCarrier] = []

    def start(self, made: CommandPlan) -> ExtensionCarrier:
        self.carriers.append(ExtensionCarrier(made, self.woken.set))
        return self.carriers[-1]

    def note(self, text: str) -> str:
        return f'echo "{text}" >>{self.log}'

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    for carrier in made.carriers:
        carrier.close()


def test_commands_get_their_variables_and_input_in_order(site: Site) -> None:
    variables = "$NETWORK $SUBNET $IPV6SUBNET $PUBLIC_IP $PUBLIC_IPV6"
    carrier = site.start(
        plan(
            pre="echo ' 02:00:00:00:00:01 '; echo second >&2",
            post=site.note(f"post {variables}"),
            add="read line; " + site.note(f"add {variables} $line"),
            remove="read line; " + site.note("remove $SUBNET $line"),
            shutdown=site.note("shutdown $SUBNET"),
        )
    )
    until(lambda: not carrier.unprepared())
    assert carrier.output == "02:00:00:00:00:01 \nsecond"
    carrier.carry(OWN, [peer(2, "x y"), peer(3, kind="vxlan")])
    until(lambda: not carrier.unready())
    carrier.carry(OWN, [])
    until(lambda: len(site.lines) == 3)
    carrier.close()
    assert site.lines == [
        "post 10.5.0.0/16 10.5.1.0/24 ::/0 192.0.2.1 <nil>",
        "add  10.5.2.0/24 ::/0 192.0.2.2 <nil> x y",
        "remove 10.5.2.0/24 x y",
        "shutdown 10.5.1.0/24",
    ]
    assert site.woken.is_set()


def test_nothing_to_run_is_ready_at_once_and_prints_nothing(site: Site) -> None:
    carrier = site.start(plan())
    until(lambda: not carrier.unprepared())
    assert carrier.output is None
    carrier.carry(OWN, [peer(2)])
    until(lambda: not carrier.unready())
    assert carrier.problems() == {}


def test_failure_names_command_peer_code_and_words(site: Site) -> None:
    add = '[ "$SUBNET" != 10.5.2.0/24 ] || { echo RTNETLINK answers: file exists >&2; exit 2; }'
    carrier = site.start(plan(add=add))
    carrier.carry(OWN, [peer(2), peer(3), peer(4, {"VNI": 1})])
    until(lambda: not carrier.unready())
    assert carrier.problems() == {
        "/n/10.5.2.0-24": ("SubnetAddCommand for 10.5.2.0/24 ended with exit code 2: RTNETLINK answers: file exists"),
        "/n/10.5.4.0-24": (
            "SubnetAddCommand for 10.5.4.0/24 cannot run: "
            "lease /n/10.5.4.0-24: backend data is {'VNI': 1}, not a string"
        ),
    }


def test_hanging_command_is_killed_and_the_others_go_on(site: Site) -> None:
    add = f'[ "$SUBNET" != 10.5.2.0/24 ] || {{ {site.note("hangs")}; sleep 1000 & wait; }}; {site.note("$SUBNET")}'
    carrier = site.start(replace(plan(add=add), timeout_s=1.0))
    carrier.carry(OWN, [peer(2), peer(3)])
    until(lambda: not carrier.unready())
    assert site.lines == ["hangs", "10.5.3.0/24"]
    assert "was killed after 1 s" in carrier.problems()["/n/10.5.2.0-24"]


def test_missing_program_is_named(site: Site) -> None:
    carrier = site.start(replace(plan(pre="/no/such/program $X"), shell=False))
    until(lambda: "cannot be started" in carrier.unprepared())
    assert "/no/such/program" in carrier.unprepared()
    assert carrier.output is None


def test_failed_start_is_tried_again(site: Site) -> None:
    flag = site.log.with_name("flag")
    carrier = site.start(plan(pre=f"test -e {flag}", post=f"test -e {flag}2"))
    until(lambda: "ended with exit code 1" in carrier.unprepared())
    flag.touch()
    until(lambda: not carrier.unprepared())
    carrier.carry(OWN, [])
    until(lambda: "PostStartupCommand ended with exit code 1" in carrier.unready())
    flag.with_name("flag2").touch()
    until(lambda: not carrier.unready())


@pytest.mark.parametrize("name", ["pre", "post", "add"])
def test_closing_ends_what_runs_and_still_runs_the_shutdown_command(site: Site, name: str) -> None:
    carrier = site.start(plan(**{name: "echo $$ >>%s; sleep 1000" % site.log, "shutdown": site.note("shutdown")}))  # noqa: UP031
    carrier.carry(OWN, [peer(2)])
    until(lambda: len(site.lines) == 1)
    began = time.monotonic()
    carrier.close()
    assert time.monotonic() - began < 1.9
    assert site.lines[1:] == ["shutdown"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(site.lines[0]), 0)


def test_shutdown_command_that_hangs_is_killed_in_time(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    carrier = site.start(plan(shutdown="echo $$ >>%s; sleep 1000" % site.log))  # noqa: UP031
    carrier.close()
    assert "ShutdownCommand was killed after 1." in caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(int(site.lines[0]), 0)


def test_owner_is_not_held_up_by_a_command(site: Site) -> None:
    carrier = site.start(plan(pre=f"{site.note('runs')}; sleep 1000"))
    until(lambda: site.lines == ["runs"])
    began = time.monotonic()
    carrier.carry(OWN, [peer(2)])
    assert carrier.unready() == carrier.unprepared() == "PreStartupCommand is running"
    assert carrier.problems() == {}
    assert time.monotonic() - began < 5


def test_background_child_does_not_hold_up_its_command(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    result = Runner().run(["sh", "-c", f"sleep 1000 & echo $! >{pid_file}; echo done"], {}, "\n", WAIT_S)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert (result.output, result.problem) == ("done", "")


def test_endless_output_is_cut_and_the_message_short() -> None:
    result = Runner().run(["sh", "-c", "yes | head -c 1000000; exit 1"], {}, "\n", WAIT_S)
    assert len(result.output) == (64 << 10) - 1  # the last line ends with a trimmed newline
    assert len(result.problem) < 300


def test_command_ended_by_a_signal_is_a_failure() -> None:
    assert Runner().run(["sh", "-c", "kill -9 $$"], {}, "\n", WAIT_S).problem == "was ended by signal 9"


def test_environment_is_inherited() -> None:
    result = Runner().run(["sh", "-c", "echo $PATH $SUBNET"], {"SUBNET": "10.5.2.0/24"}, "\n", WAIT_S)
    assert result.output == f"{os.environ['PATH']} 10.5.2.0/24"


def test_commands_run_where_no_directory_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nonexistent"])
    assert Runner().run(["cat"], {}, "through\n", WAIT_S).output == "through"
