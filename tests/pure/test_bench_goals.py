from __future__ import annotations

import pytest

from benchmarks.scale.goals import Goal, render

pytestmark = pytest.mark.pure

GOALS = (Goal("start", "a", 2.5), Goal("memory", "m", 50, "MiB", 1, 0), Goal("put", "p", 2, "ms", 1000, 1))
ROUNDS = [{"a": 1.0, "m": 60.0, "p": 0.001}, {"a": 4.0, "m": 70.0}, {"a": 2.0, "m": 65.0}]


def test_goal_is_reached_by_the_median() -> None:
    assert render(GOALS, ROUNDS).splitlines() == [
        "| what   | goal   | median | range        | reached |",
        "| ---    | ---    | ---    | ---          | ---     |",
        "| start  | 2.5 s  | 2.00 s | 1.00 to 4.00 | yes     |",
        "| memory | 50 MiB | 65 MiB | 60 to 70     | no      |",
        "| put    | 2 ms   | 1.0 ms | 1.0 to 1.0   | yes     |",
    ]


def test_reference_is_compared_within_each_round() -> None:
    rounds = [figures | {"reference: a": reference} for figures, reference in zip(ROUNDS, (1, 2, 8), strict=True)]
    lines = render(GOALS, rounds).splitlines()
    assert lines[0] == "| what   | goal   | median | range        | reached | reference | ratio |"
    # Ratios are 1, 2 and 0.25: their median is not that of the medians, 2 to 2.
    assert lines[2] == "| start  | 2.5 s  | 2.00 s | 1.00 to 4.00 | yes     | 2.00 s    | 1.00  |"
    assert lines[3] == "| memory | 50 MiB | 65 MiB | 60 to 70     | no      |           |       |"


def test_what_was_not_measured_stays_empty() -> None:
    assert (
        render((Goal("growth", "g", 6, ""),), ROUNDS).splitlines()[2] == "| growth | 6    |        |       |         |"
    )
