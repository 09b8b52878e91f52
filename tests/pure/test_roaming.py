from __future__ import annotations

from dataclasses import replace
from ipaddress import ip_address, ip_network

import pytest

from backends.dataplane.model import Endpoint, WireguardPeer
from backends.kernel.roaming import Roaming
from backends.kernel.wgnl import PeerSeen

pytestmark = pytest.mark.pure

INDEX, NOW_S = 7, 1_000_000.0
TOLD = Endpoint(ip_address("192.0.2.2"), 51820)
MOVED = Endpoint(ip_address("198.51.100.9"), 40001)
PEER = WireguardPeer("flannel-wg", "K2", TOLD, (ip_network("10.5.2.0/24"),))


def seen(endpoint: Endpoint | None, age_s: float, sent_bytes: int = 100) -> PeerSeen:
    return PeerSeen(replace(PEER, endpoint=endpoint), NOW_S - age_s, sent_bytes)


def written() -> Roaming:
    roaming = Roaming()
    assert roaming.observe(INDEX, [], NOW_S) == []
    assert roaming.to_write(INDEX, PEER)
    roaming.wrote(INDEX, PEER)
    return roaming


@pytest.mark.parametrize("keepalive_s", [0, 25])
def test_W12_a_live_endpoint_that_moved_counts_as_written(keepalive_s: int) -> None:
    roaming = written()
    assert roaming.observe(INDEX, [seen(MOVED, 10)], NOW_S) == [TOLD]
    assert not roaming.to_write(INDEX, replace(PEER, keepalive_s=keepalive_s))


def test_W12_a_changed_lease_rewrites_the_endpoint() -> None:
    roaming = written()
    roaming.observe(INDEX, [seen(MOVED, 10)], NOW_S)
    elsewhere = replace(PEER, endpoint=Endpoint(ip_address("192.0.2.77"), 51820))
    assert roaming.to_write(INDEX, elsewhere)
    roaming.wrote(INDEX, elsewhere)
    assert not roaming.to_write(INDEX, elsewhere)


def test_an_idle_peer_is_left_alone_however_old_its_handshake_is() -> None:
    roaming = written()
    assert roaming.observe(INDEX, [seen(MOVED, 10)], NOW_S) == [TOLD]
    assert roaming.observe(INDEX, [seen(MOVED, 5000)], NOW_S) == [TOLD]
    assert not roaming.to_write(INDEX, PEER)


def test_a_peer_that_is_sent_to_and_does_not_answer_gets_the_leases_endpoint_again() -> None:
    roaming = written()
    assert roaming.observe(INDEX, [seen(MOVED, 179, 100)], NOW_S) == [TOLD]
    assert roaming.observe(INDEX, [seen(MOVED, 181, 500)], NOW_S) == [MOVED]
    assert roaming.to_write(INDEX, PEER)


def test_after_a_restart_a_working_endpoint_is_taken_over_untouched() -> None:
    roaming = Roaming()
    assert roaming.observe(INDEX, [seen(MOVED, 60)], NOW_S) == [MOVED]
    assert not roaming.to_write(INDEX, PEER)
    roaming.wrote(INDEX, PEER)
    assert roaming.observe(INDEX, [seen(MOVED, 61)], NOW_S) == [TOLD]


@pytest.mark.parametrize(("endpoint", "age_s"), [(MOVED, 181), (MOVED, NOW_S), (None, 1)])
def test_after_a_restart_an_endpoint_that_does_not_work_is_replaced(endpoint: Endpoint | None, age_s: float) -> None:
    roaming = Roaming()
    assert roaming.observe(INDEX, [seen(endpoint, age_s)], NOW_S) == [endpoint]
    assert roaming.to_write(INDEX, PEER)


def test_a_peer_that_was_away_starts_from_the_lease() -> None:
    roaming = written()
    roaming.observe(INDEX, [], NOW_S)
    assert roaming.to_write(INDEX, PEER)
    roaming.wrote(INDEX, PEER)
    roaming.forget(INDEX, PEER)
    assert roaming.to_write(INDEX, PEER)
    assert roaming.observe(INDEX, [seen(None, NOW_S)], NOW_S) == [None]


def test_devices_are_told_apart() -> None:
    roaming = written()
    roaming.observe(INDEX + 1, [], NOW_S)
    assert not roaming.to_write(INDEX, PEER)
    assert roaming.to_write(INDEX + 1, PEER)


def silent(roaming: Roaming, age_s: float, sent_bytes: int, now_s: float) -> bool:
    said = PeerSeen(PEER, now_s - age_s, sent_bytes)
    shown, unheard = roaming.shown(INDEX, [said], now_s)
    assert shown == {PEER}
    assert unheard <= shown
    return bool(unheard)


def test_a_peer_that_never_answers_is_told_of_after_three_handshakes() -> None:
    roaming = written()
    never = NOW_S
    assert not silent(roaming, never, 0, NOW_S)
    assert not silent(roaming, never + 5, 148, NOW_S + 5)
    assert not silent(roaming, never + 19, 592, NOW_S + 19)
    assert silent(roaming, never + 20, 592, NOW_S + 20)
    assert silent(roaming, never + 900, 592, NOW_S + 900)
    assert not silent(roaming, 1, 800, NOW_S + 901)
    assert not silent(roaming, 100, 900, NOW_S + 1000)


def test_idle_peers_are_not_called_silent() -> None:
    roaming = written()
    for at in (0, 60, 600):
        assert not silent(roaming, NOW_S, 0, NOW_S + at)
    assert not silent(roaming, 1, 500, NOW_S + 601)
    assert not silent(roaming, 400, 500, NOW_S + 1000)
    assert not silent(roaming, 460, 648, NOW_S + 1060)
    assert not silent(roaming, 1, 900, NOW_S + 1061)
