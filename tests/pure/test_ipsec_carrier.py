from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address
from typing import Any

import pytest

from backends.ipsec import carrier as module
from backends.ipsec.carrier import IpsecCarrier
from backends.ipsec.connections import Association, Connection, Terms
from backends.ipsec.vici import CharonError, RefusedError
from flanneld.ctl.lab.tools import poll
from tests.pure.test_ipsec import OWN, PSK, TERMS, connection, lease
from tests.support.clock import ManualClock

pytestmark = pytest.mark.pure


REMOVED: list[tuple[object, ...]] = []


class FakeVici:
    """What charon would hold."""

    def __init__(self, *left: str) -> None:
        self.held: dict[str, Connection | None] = dict.fromkeys(left)
        self.owners: set[str] = set()
        self.initiated: list[str] = []
        self.found: dict[str, Association] = {}
        self.refuses: set[str] = set()
        self.dead = threading.Event()

    def close(self) -> None: ...

    def abort(self) -> None:
        self.dead.set()

    def _alive(self) -> None:
        if self.dead.is_set():
            raise CharonError("charon did not answer")

    def names(self) -> list[str]:
        self._alive()
        return list(self.held)

    def load_psk(self, owner: str, psk: str) -> None:
        assert psk == PSK
        self.owners.add(owner)

    def unload_psk(self, owner: str) -> None:
        self.owners.discard(owner)

    def load(self, connection: Connection) -> None:
        self._alive()
        if connection.name in self.refuses:
            raise RefusedError(f"charon could not load {connection.name}: invalid value")
        self.held[connection.name] = connection

    def drop(self, name: str) -> None:
        del self.held[name]

    def initiate(self, connection: Connection) -> None:
        self.initiated.append(connection.name)

    def associations(self) -> dict[str, Association]:
        self._alive()
        return dict(self.found)


class FakeCharon:
    """A process that is there again at each call; ``faults`` are what the next calls say instead."""

    def __init__(self, *controls: FakeVici, faults: int = 0) -> None:
        self.controls, self.faults = list(controls), faults
        self.current: FakeVici | None = None
        self.ended = False

    def connect(self) -> FakeVici:
        if self.faults:
            self.faults -= 1
            raise CharonError("charon (strongSwan) is nowhere")
        self.current = self.controls.pop(0)
        return self.current

    def running(self) -> bool:
        return self.current is not None and not self.current.dead.is_set()

    def end(self, within_s: float) -> None:
        self.ended = True


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RESTART_S", (0.01,))
    monkeypatch.setattr(module, "CHECK_S", 0.01)
    monkeypatch.setattr(module, "ALIVE_S", 0.01)
    monkeypatch.setattr(module, "read_policies", frozenset)
    monkeypatch.setattr(module, "remove_associations", lambda *ends: REMOVED.append(ends))
    REMOVED.clear()


@contextmanager
def running(process: FakeCharon, clock: ManualClock | None = None) -> Iterator[IpsecCarrier]:
    carrier = IpsecCarrier(TERMS, lambda: None, process, clock)  # type: ignore[arg-type]
    try:
        yield carrier
    finally:
        carrier.close()
        assert process.ended


def until(what: str, probe: Callable[[], Any]) -> None:
    poll(what, probe, 10, 0.005)


def test_charon_gets_the_connections_and_secrets_that_peers_need_and_no_others() -> None:
    theirs = dict.fromkeys(("an operator's", "192.0.2.1-to-hq", "192.0.2.11-10.5.1.0/24-10.5.9.0/24-192.0.2.9"))
    control = FakeVici("192.0.2.1-10.5.1.0/24-10.5.9.0/24-192.0.2.9", *theirs)
    with running(FakeCharon(control)) as carrier:
        assert carrier.unready()
        carrier.carry(OWN, [lease(2), lease(3), lease(4, "udp")])
        until("ready", lambda: not carrier.unready())
        assert control.held == {**theirs, **{connection(n).name: connection(n) for n in (2, 3)}}
        assert control.owners == {"192.0.2.1", "192.0.2.2", "192.0.2.3"}
        carrier.carry(OWN, [lease(3)])
        until("the end of one", lambda: list(control.held) == [*theirs, connection(3).name])
        until("the end of its secret", lambda: control.owners == {"192.0.2.1", "192.0.2.3"})
        assert [str(peer) for _, peer in REMOVED] == ["192.0.2.9", "192.0.2.2"]
    assert tuple(map(str, REMOVED[-1])) == ("192.0.2.1", "None")


def test_a_host_that_gives_one_of_two_subnets_back_keeps_the_associations_of_the_other() -> None:
    control = FakeVici()
    with running(FakeCharon(control)) as carrier:
        carrier.carry(OWN, [lease(2), lease(3, public="192.0.2.2")])
        until("both", lambda: len(control.held) == 2)
        carrier.carry(OWN, [lease(3, public="192.0.2.2")])
        until("the end of one", lambda: len(control.held) == 1)
        carrier.carry(OWN, [])
        until("the end of the other", lambda: not control.held and REMOVED)
        assert [str(peer) for _, peer in REMOVED] == ["192.0.2.2"]


def test_a_charon_that_died_is_told_everything_again(caplog: pytest.LogCaptureFixture) -> None:
    first, second = FakeVici(), FakeVici()
    with running(FakeCharon(first, second, faults=2)) as carrier:
        carrier.carry(OWN, [lease(2)])
        until("the first", lambda: connection(2).name in first.held and not carrier.unready())
        first.dead.set()
        until("the second", lambda: connection(2).name in second.held and not carrier.unready())
        assert second.owners == {"192.0.2.1", "192.0.2.2"}
    assert "nowhere" in caplog.text


def test_one_refused_connection_does_not_hold_up_the_others() -> None:
    control = FakeVici()
    control.refuses = {connection(2).name}
    with running(FakeCharon(control)) as carrier:
        carrier.carry(OWN, [lease(2), lease(3)])
        until("the other", lambda: connection(3).name in control.held)
        until("the reason", lambda: "invalid value" in carrier.problems().get(connection(2).name, ""))


def test_W10_peers_without_association_are_begun_again_and_told_of() -> None:
    control, clock = FakeVici(), ManualClock()
    two, three = connection(2), connection(3)
    control.found = {two.name: Association(negotiating=False, installed=True)}
    with running(FakeCharon(control), clock) as carrier:
        carrier.carry(OWN, [lease(2), lease(3)])
        until("another beginning", lambda: three.name in control.initiated)
        assert carrier.problems() == {}
        clock.pass_s(20)
        until("the report", lambda: list(carrier.problems()) == [three.name])
        assert "192.0.2.3 for 10.5.3.0/24" in carrier.problems()[three.name]
        control.found[three.name] = Association(negotiating=False, installed=True)
        until("its end", lambda: carrier.problems() == {})
        assert two.name not in control.initiated


def test_other_terms_are_another_carrier() -> None:
    assert Terms(IPv4Address("192.0.2.1"), IPv4Address("192.0.2.1"), "y" * 96, encap=False) != TERMS
