from __future__ import annotations

import pytest

from benchmarks.udp.__main__ import METRICS, against, routes_table, table
from benchmarks.udp.node import subnet, underlay
from benchmarks.udp.node import table as routes
from benchmarks.udp.pairs import Variant

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("more", [0, 5_000, 50_000])
def test_those_that_are_sent_to_come_last_and_are_nobody_elses(more: int) -> None:
    found = routes(1, more)
    assert len(found) == more + 2
    assert list(found.items())[-2:] == [(subnet(2), underlay(2)), (subnet(3), underlay(2))]
    assert subnet(1) not in found
    assert list(routes(2, more))[-1] == subnet(1)


def test_ratios_are_those_of_the_rounds() -> None:
    plain, native = Variant("plain", "plain"), Variant("native", "native")
    found = {
        plain: {name: [1.0, 2.0, 4.0] for name, _, _ in METRICS},
        native: {name: [5.0, 20.0, 12.0] for name, _, _ in METRICS},
        Variant("plain", "plain", containers=True): {name: [1.0, 1.0, 1.0] for name, _, _ in METRICS},
        Variant("bpf", "bpf", containers=True): {name: [7.0, 8.0, 9.0] for name, _, _ in METRICS},
    }
    lines = table(found).splitlines()
    assert lines[2].startswith("| plain | 2.00 (1.00–4.00) | 1.00 |")
    assert lines[3].startswith("| native | 12.00 (5.00–20.00) | 5.00 |")
    assert len(lines) == 4
    between = table(found, containers=True).splitlines()
    assert between[0].count("÷ plain") == 3
    assert between[2].startswith("| plain | 1.00 (1.00–1.00) | 1.00 |")
    assert between[3].startswith("| bpf | 8.00 (7.00–9.00) | 8.00 |")
    assert against(found, "native", "plain").startswith("native ÷ plain: TCP, 1 stream 5.00; TCP, 4 streams 5.00;")
    routed = {Variant(path, path, more): [100.0, 50.0] for path in ("plain", "native") for more in (0, 5_000, 50_000)}
    routed[Variant("native", "native", 50_000)] = [300.0, 200.0]
    assert routes_table(routed).splitlines()[-1] == "| 50000 | 75 | 250 | 3.50 |"
    assert Variant("native", "plain", 7).name == "native with plain, 7 routes"
