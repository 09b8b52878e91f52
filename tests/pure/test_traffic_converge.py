from __future__ import annotations

import logging
from dataclasses import replace
from ipaddress import ip_network

import pytest

from flanneld.traffic.converge import Converger
from flanneld.traffic.detect import Host
from flanneld.traffic.render import Saved
from flanneld.traffic.rules import Pair, TrafficPolicy
from flanneld.traffic.settle import Settler
from subnet.clock import SystemClock
from subnet.errors import RuleError
from subnet.model import Family
from subnet.report import Reporter
from tests.support.fake_firewall import FakeFirewall, FakeWatch
from tests.support.restore import Tables

pytestmark = pytest.mark.pure

V4 = Pair(ip_network("10.5.0.0/16"), ip_network("10.5.7.0/24"))
V6 = Pair(ip_network("fc00:5::/48"), ip_network("fc00:5:0:7::/64"))
POLICY = TrafficPolicy(V4, masquerade=True)
STRAY = "-j FLANNEL-FWD"


@pytest.fixture
def firewall() -> FakeFirewall:
    return FakeFirewall()


def settler(firewall: FakeFirewall, other: FakeFirewall | None = None, watch: FakeWatch | None = None) -> Settler:
    reporter = Reporter(logging.getLogger("test"), SystemClock())
    others = (converger(other),) if other is not None else ()
    return Settler(Host(converger(firewall), others, watch, ""), reporter)


def converger(firewall: FakeFirewall) -> Converger:
    return Converger(firewall, Reporter(logging.getLogger("test"), SystemClock()))


def test_F13_a_failed_batch_is_followed_by_one_that_cannot_fail(firewall: FakeFirewall) -> None:
    fire = converger(firewall)
    fire.converge(POLICY, 4)
    firewall.tables[4]["filter"]["FORWARD"].append(STRAY)
    firewall.tables[4]["nat"]["FLANNEL-POSTRTG"].clear()
    firewall.applied.clear()

    def faster(tables: Tables) -> None:
        tables["filter"]["FORWARD"] = [r for r in tables["filter"]["FORWARD"] if r != STRAY]
        if not firewall.applied[:-1]:
            tables["filter"]["FORWARD"].append("-j ACCEPT")

    firewall.meanwhile = faster
    assert fire.converge(POLICY, 4)
    assert firewall.applied == [False, True]
    assert len(firewall.tables[4]["nat"]["FLANNEL-POSTRTG"]) == 6
    firewall.meanwhile = lambda _: None
    assert not fire.converge(POLICY, 4)


def test_L48_random_fully_is_given_up_when_refused(firewall: FakeFirewall, caplog: pytest.LogCaptureFixture) -> None:
    firewall.refuses = "--random-fully"
    fire = converger(firewall)
    assert fire.converge(POLICY, 4)
    assert not fire.converge(POLICY, 4)
    assert firewall.applied == [False, True]
    assert "refuses --random-fully" in caplog.text


def test_other_refusals_are_raised_with_their_line(firewall: FakeFirewall) -> None:
    firewall.refuses = "FLANNEL-FWD"
    with pytest.raises(RuleError, match="FLANNEL-FWD"):
        converger(firewall).converge(POLICY, 4)


def test_one_line_per_change(firewall: FakeFirewall, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    fire = converger(firewall)
    fire.converge(POLICY, 4)
    caplog.clear()
    del firewall.tables[4]["nat"]["FLANNEL-POSTRTG"][3]
    fire.converge(POLICY, 4)
    fire.converge(POLICY, 4)
    assert [r.message for r in caplog.records] == ["repaired chain FLANNEL-POSTRTG in nat: 1 rule missing (IPv4)"]


def test_a_family_that_is_off_needs_no_programs() -> None:
    firewall = FakeFirewall(families=[4])
    settler(firewall).settle(POLICY)
    assert firewall.tables[6] == {}


def test_a_family_that_is_off_is_cleared(firewall: FakeFirewall) -> None:
    subject = settler(firewall)
    subject.settle(replace(POLICY, v6=V6))
    firewall.tables[6]["filter"]["FORWARD"].append("-s fc00:9::/32 -j DROP")
    subject.settle(POLICY)
    rules = [r for chains in firewall.tables[6].values() for texts in chains.values() for r in texts]
    assert rules == ["-s fc00:9::/32 -j DROP"]


def test_F04_nothing_is_read_while_nothing_changed(firewall: FakeFirewall) -> None:
    watch = FakeWatch()
    subject = settler(firewall, watch=watch)
    subject.settle(POLICY)
    firewall.reads = 0
    subject.settle(POLICY)
    assert firewall.reads == 0
    watch.number += 1
    subject.settle(POLICY)
    assert firewall.reads == 1
    subject.settle(POLICY)
    assert firewall.reads == 1


def test_rules_that_do_not_stay_are_a_problem(firewall: FakeFirewall) -> None:
    class Undone(FakeFirewall):
        def read(self, family: Family) -> Saved:
            self.tables[family].clear()
            return super().read(family)

    with pytest.raises(RuleError, match="another program"):
        settler(Undone()).settle(POLICY)


def test_F09_rules_in_the_other_variant_go(firewall: FakeFirewall) -> None:
    other = FakeFirewall()
    settler(other).settle(POLICY)
    other.tables[4]["nat"]["POSTROUTING"].append("-s 10.9.0.0/16 -j MASQUERADE")
    settler(firewall, other).settle(POLICY)
    assert len(firewall.tables[4]["nat"]["FLANNEL-POSTRTG"]) == 6
    left = [r for chains in other.tables[4].values() for texts in chains.values() for r in texts]
    assert left == ["-s 10.9.0.0/16 -j MASQUERADE"]


def test_one_family_failing_does_not_stop_the_other() -> None:
    class NoIPv4(FakeFirewall):
        def read(self, family: Family) -> Saved:
            if family == 4:
                raise RuleError("IPv4 broken")
            return super().read(family)

    firewall = NoIPv4()
    with pytest.raises(RuleError, match="IPv4 broken"):
        settler(firewall).settle(replace(POLICY, v6=V6))
    assert firewall.tables[6]["filter"]["FLANNEL-FWD"]
