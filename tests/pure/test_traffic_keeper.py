from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import ip_network

import pytest

from flanneld.traffic.converge import Converger
from flanneld.traffic.detect import Host
from flanneld.traffic.keeper import TrafficKeeper, TrafficState
from flanneld.traffic.rules import Pair, TrafficPolicy
from flanneld.traffic.runner import Runner
from subnet.clock import Clock, SystemClock
from subnet.errors import RuleError
from subnet.report import Reporter
from tests.support.fake_firewall import FakeFirewall, FakeWatch
from tests.support.traffic import until

pytestmark = pytest.mark.pure

POLICY = TrafficPolicy(Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24")), masquerade=True)
NEVER_S = 3600.0


class NoPrograms(Runner):
    def find(self, *_: str) -> str | None:
        return None


class Bench:
    def __init__(self) -> None:
        self.firewall, self.watch = FakeFirewall(), FakeWatch()
        self.states: queue.Queue[TrafficState] = queue.Queue()
        self.failures = 0
        self.keeper = TrafficKeeper(SystemClock(), NEVER_S, runner=NoPrograms(), find_host=self.find_host)

    def find_host(self, _: bool, __: Runner, clock: Clock) -> Host:
        if self.failures:
            self.failures -= 1
            raise RuleError("no iptables program found")
        reporter = Reporter(logging.getLogger("test"), clock)
        return Host(Converger(self.firewall, reporter), (), self.watch, "")

    def next(self) -> TrafficState:
        return self.states.get(timeout=10)

    def chain(self) -> int:
        return len(self.firewall.tables[4]["nat"]["FLANNEL-POSTRTG"])


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.keeper.close()


def test_each_policy_is_answered_once(bench: Bench) -> None:
    bench.keeper.start(bench.states.put)
    off = replace(POLICY, masquerade=False)
    bench.keeper.want(POLICY)
    assert bench.next() == TrafficState(POLICY, True)
    bench.keeper.want(POLICY)
    bench.keeper.want(off)
    assert bench.next() == TrafficState(off, True)
    assert bench.states.empty()


def test_a_policy_wanted_before_the_start_counts(bench: Bench) -> None:
    bench.keeper.want(POLICY)
    bench.keeper.start(bench.states.put)
    assert bench.next() == TrafficState(POLICY, True)


def test_L42_a_host_without_programs_is_a_problem_until_they_come(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.failures = 2
    bench.keeper.start(bench.states.put)
    bench.keeper.want(POLICY)
    state = bench.next()
    assert not state.ok
    assert "no iptables" in state.problem
    assert bench.next() == TrafficState(POLICY, True)
    said = [r for r in caplog.records if r.levelno == logging.WARNING and "no iptables" in r.message]
    assert len(said) == 1


def test_news_is_answered_before_the_period(bench: Bench) -> None:
    bench.keeper.start(bench.states.put)
    bench.keeper.want(POLICY)
    bench.next()
    bench.firewall.tables[4]["nat"]["FLANNEL-POSTRTG"].clear()
    bench.watch.number += 1
    bench.watch.tell()
    until(bench.chain, 6)
    assert bench.states.empty()


def test_a_program_that_is_at_work_is_not_interrupted(bench: Bench) -> None:
    bench.keeper.start(bench.states.put)
    bench.keeper.want(POLICY)
    bench.next()
    reads, told_at = bench.firewall.reads, time.monotonic()
    bench.watch.number += 1
    bench.watch.tell()
    until(lambda: bench.firewall.reads > reads, True)
    assert time.monotonic() - told_at > 0.08


def test_own_changes_are_no_reason_to_look_again(bench: Bench) -> None:
    bench.keeper.start(bench.states.put)
    bench.keeper.want(POLICY)
    bench.next()
    reads = bench.firewall.reads
    bench.watch.tell()
    bench.keeper.want(replace(POLICY, previous=(POLICY.v4,)))  # type: ignore[arg-type]
    bench.next()
    assert bench.firewall.reads == reads + 2


def test_a_failure_while_running_is_told_and_recovered_from(bench: Bench) -> None:
    bench.keeper.start(bench.states.put)
    bench.keeper.want(POLICY)
    bench.next()
    bench.firewall.refuses = "FLANNEL-POSTRTG"
    bench.firewall.tables[4]["nat"]["FLANNEL-POSTRTG"].clear()
    bench.watch.number += 1
    bench.watch.tell()
    state = bench.next()
    assert (state.policy, state.ok) == (POLICY, False)
    assert "FLANNEL-POSTRTG" in state.problem
    bench.firewall.refuses = "\0"
    assert bench.next() == TrafficState(POLICY, True)
    assert bench.chain() == 6


def test_without_news_the_keeper_goes_on(bench: Bench) -> None:
    bench.keeper.start(bench.states.put)
    bench.keeper.want(POLICY)
    bench.next()
    bench.watch.broken = True
    bench.watch.tell()
    until(lambda: bench.watch.closed, True)
    off = POLICY.nothing()
    bench.keeper.want(off)
    assert bench.next() == TrafficState(off, True)


@pytest.mark.parametrize("before", [lambda _: None, lambda b: b.keeper.want(POLICY)], ids=["idle", "busy"])
def test_close_ends_the_thread(bench: Bench, before: Callable[[Bench], None]) -> None:
    bench.keeper.start(bench.states.put)
    before(bench)
    bench.keeper.close()
    assert bench.keeper._thread is not None
    assert not bench.keeper._thread.is_alive()
