"""From figures to a table that people read. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

Rounds = Sequence[dict[str, float]]


@dataclass(frozen=True, slots=True)
class Row:
    """A measured figure, and the reference figure of the same round it is compared with, if there is one."""

    title: str
    name: str
    reference_title: str = ""
    reference: str = ""
    scale: float = 1.0
    unit: str = "s"
    digits: int = 2


def render(rows: Sequence[Row], rounds: Rounds) -> str:
    """Return a Markdown table: median, least and greatest of each figure, its reference, and the median ratio."""
    head = ("what", "median", "range", "reference", "median", "ratio")
    lines = [head, tuple("---" for _ in head), *(_cells(row, rounds) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def _cells(row: Row, rounds: Rounds) -> tuple[str, ...]:
    values = [figures[row.name] * row.scale for figures in rounds]
    measured = (row.title, f"{median(values):.{row.digits}f} {row.unit}")
    spread = f"{min(values):.{row.digits}f} to {max(values):.{row.digits}f}"
    if not row.reference:
        return (*measured, spread, "", "", "")
    references = [figures[row.reference] * row.scale for figures in rounds]
    # Each round's own ratio: what the machine did meanwhile touches both sides.
    ratios = [value / reference for value, reference in zip(values, references, strict=True)]
    shown = f"{median(references):.{row.digits}f} {row.unit}"
    return (*measured, spread, row.reference_title, shown, f"{median(ratios):.2f}")
