"""Measured policies, which of them are worth it, and the answer in words. Numbers in, text out; nothing is run here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SURE = 1.96  # standard errors: what chance alone exceeds once in twenty times


@dataclass(frozen=True, kw_only=True)
class Row:
    """A policy and what was measured of it."""

    think: str
    answer: str
    budget: int | None
    solved: tuple[bool, ...]  # problem by problem
    thinking_tokens: float  # mean of a problem, the closing tag included
    answer_tokens: float
    forced: float  # share of problems whose thoughts the budget cut
    seconds: float = math.nan  # mean of a problem, solved alone
    first_seconds: float = math.nan  # until the first token of the answer

    @property
    def accuracy(self) -> float:
        """Share of problems solved."""
        return sum(self.solved) / len(self.solved)

    @property
    def name(self) -> str:
        """As it is written everywhere: 25->100, 64."""
        return f"{self.think}->{self.answer}, {'no budget' if self.budget is None else self.budget}"


def frontier(rows: Iterable[Row]) -> list[Row]:
    """Those for which no other is as accurate and as fast and better in one of the two; the fastest first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (row.seconds, -row.accuracy)):
        if not found or row.accuracy > found[-1].accuracy:
            found.append(row)
    return found


@dataclass(frozen=True, kw_only=True)
class Contest:
    """A policy against the most accurate of the others that take no longer."""

    row: Row
    other: Row
    gain: float  # accuracy of `row` less that of `other`
    error: float  # standard error of the gain, over problems, which both solved

    @property
    def is_won(self) -> bool:
        """More than chance explains."""
        return self.gain > SURE * self.error


def contest(rows: Sequence[Row], others: Sequence[Row]) -> Contest | None:
    """The best that any of `rows` does against the most accurate of `others` that takes no longer."""
    best = None
    for row in rows:
        rivals = [other for other in others if other.seconds <= row.seconds]
        if not rivals:
            continue
        other = max(rivals, key=lambda other: other.accuracy)
        gain, error = _paired(row.solved, other.solved)
        if best is None or gain > best.gain:
            best = Contest(row=row, other=other, gain=gain, error=error)
    return best


def verdict(rows: Sequence[Row], members: Sequence[str]) -> list[str]:
    """What the measurements say, sentence by sentence. members: from the largest to the smallest."""
    rank = {name: i for i, name in enumerate(members)}
    best = frontier(rows)
    full = members[0]
    alone = [row for row in rows if row.think == row.answer == full]
    up = [row for row in rows if row.answer == full and row.think != full and row.budget != 0]
    down = [row for row in rows if row.think == full and row.answer != full and row.budget != 0]
    same = [row for row in rows if row.think == row.answer]
    kinds = {
        "the full member alone (L->L)": [row for row in best if row.think == row.answer == full],
        "a smaller member alone (S->S)": [row for row in best if row.think == row.answer != full],
        "a smaller one thinks (S->L)": [row for row in best if rank[row.think] > rank[row.answer]],
        "a larger one thinks (L->S)": [row for row in best if rank[row.think] < rank[row.answer]],
    }
    counts = "; ".join(f"{kind}: {len(found)}" for kind, found in kinds.items())
    said = [
        f"On the frontier, fastest first: {', '.join(f'{row.name} ({_percent(row)})' for row in best)}.",
        f"By kind, of {len(best)}: {counts}.",
    ]
    said += _duel("S->L", "L->L", "a smaller member thinks and the full one answers", up, alone)
    said += _duel("L->S", "L->L", "the full member thinks and a smaller one answers", down, alone)
    mixed = [row for row in rows if row.think != row.answer and row.budget != 0]
    said += _duel("a pair of different members", "every single member", "two members share the work", mixed, same)
    return said


def _duel(kind: str, other_kind: str, what: str, rows: Sequence[Row], others: Sequence[Row]) -> list[str]:
    if not rows or not others:
        return []
    found = contest(rows, others)
    if found is None:
        return [f"{kind} against {other_kind}: every {kind} policy is faster than the fastest of {other_kind}."]
    points, error = 100 * found.gain, 100 * SURE * found.error
    wins = "beats" if found.is_won else "does not beat"
    return [
        f"{kind} ({what}) {wins} {other_kind}: at its best, {found.row.name} solves {_percent(found.row)} in "
        f"{1000 * found.row.seconds:.0f} ms, and {found.other.name} {_percent(found.other)} in "
        f"{1000 * found.other.seconds:.0f} ms: {points:+.1f} points, +-{error:.1f} (95 %, paired over "
        f"{len(found.row.solved)} problems"
        + (f"; the best of {len(rows)} tried, so chance had {len(rows)} goes)." if found.is_won else ").")
    ]


def _paired(one: Sequence[bool], other: Sequence[bool]) -> tuple[float, float]:
    """Mean of the differences, and its standard error."""
    differences = [int(a) - int(b) for a, b in zip(one, other, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    variance = sum((d - mean) ** 2 for d in differences) / max(n - 1, 1)
    return mean, math.sqrt(variance / n)


def _percent(row: Row) -> str:
    return f"{100 * row.accuracy:.1f} %"
