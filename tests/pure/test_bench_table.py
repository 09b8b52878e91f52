from __future__ import annotations

import pytest

from benchmarks.table import Row, render

pytestmark = pytest.mark.pure


def test_median_range_and_the_ratio_of_each_round() -> None:
    rounds = [{"a": 1.0, "b": 1.0, "m": 2e6}, {"a": 6.0, "b": 2.0, "m": 4e6}, {"a": 4.0, "b": 8.0, "m": 3e6}]
    rows = (Row("start", "a", "bare", "b"), Row("flow", "m", scale=1e-6, unit="Mbit/s", digits=0))
    # Ratios are 1, 3 and 0.5: their median is not that of the medians, 4 to 2.
    assert render(rows, rounds).splitlines() == [
        "| what  | median   | range        | reference | median | ratio |",
        "| ---   | ---      | ---          | ---       | ---    | ---   |",
        "| start | 4.00 s   | 1.00 to 6.00 | bare      | 2.00 s | 1.00  |",
        "| flow  | 3 Mbit/s | 2 to 4       |           |        |       |",
    ]
