"""Plain text for terminals: aligned columns, bytes and durations."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Rows as aligned columns, the first row as their heads. left: columns that align left; the others align right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i in left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in [lines[0], "-" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def percent(share: float | None) -> str:
    """A share as a percentage with one decimal; a dash if it was not measured."""
    return "-" if share is None else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds."""
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
