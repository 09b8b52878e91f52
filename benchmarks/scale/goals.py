"""Figures beside their goals, and beside those of a reference daemon. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[dict[str, float]]
REFERENCE = "reference: "
"""What the names of a reference daemon's figures start with."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure, by name, that is to be at most ``limit``, in ``unit`` after ``scale``."""

    title: str
    name: str
    limit: float
    unit: str = "s"
    scale: float = 1.0
    digits: int = 2


def render(goals: Sequence[Goal], rounds: Rounds) -> str:
    """Return a Markdown table: goal, median and range; with a reference its median, and that of the rounds' ratios."""
    reference = any(name.startswith(REFERENCE) for figures in rounds for name in figures)
    head = ("what", "goal", "median", "range", "reached", *(("reference", "ratio") if reference else ()))
    lines = [head, tuple("---" for _ in head), *(_cells(goal, rounds, reference) for goal in goals)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _cells(goal: Goal, rounds: Rounds, reference: bool) -> tuple[str, ...]:
    def shown(value: float) -> str:
        return f"{value:.{goal.digits}f}"

    values = [figures[goal.name] * goal.scale for figures in rounds if goal.name in figures]
    if not values:
        return (goal.title, f"{goal.limit:g} {goal.unit}".strip(), *("" for _ in range(5 if reference else 3)))
    middle = median(values)
    cells = (
        goal.title,
        f"{goal.limit:g} {goal.unit}".strip(),
        f"{shown(middle)} {goal.unit}".strip(),
        f"{shown(min(values))} to {shown(max(values))}",
        "yes" if middle <= goal.limit else "no",
    )
    if not reference:
        return cells
    name = REFERENCE + goal.name
    pairs = [(f[goal.name], f[name]) for f in rounds if goal.name in f and name in f]
    if not pairs:
        return (*cells, "", "")
    # Each round's own ratio: what the machine did meanwhile touches both sides.
    ratios = [own / other for own, other in pairs if other]
    return (
        *cells,
        f"{shown(median(other * goal.scale for _, other in pairs))} {goal.unit}".strip(),
        f"{median(ratios):.2f}" if ratios else "",
    )
