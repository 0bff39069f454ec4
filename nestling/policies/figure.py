"""Accuracy against latency: every policy a dot, the frontier a line through those that no other beats."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from nestling.policies.frontier import Row, frontier
from nestling.report.drawing import LINE, SMALL, WIDTH, Look, entitle, inches, place, rule, sheet, spread, write

ARROW = "\u2192"
MARGIN = 1.12  # of the axes, beyond the outermost dots


def draw(rows: Sequence[Row], members: Sequence[str], look: Look) -> Figure:
    """A dot's inside is the thinker's color and its ring the answerer's; where both are one member it is plain and its
    budgets are joined. members: from the largest to the smallest."""
    figure = sheet(4.15)
    ax = place(figure, 0.62, 0.42, WIDTH - 0.62 - 1.45, 2.75)
    theme = look.theme
    best = frontier(rows)
    ax.set_xscale("log")
    ax.set_xlim(min(row.seconds for row in rows) / MARGIN, max(row.seconds for row in rows) * MARGIN)
    top = max(row.accuracy for row in rows)
    ax.set_ylim(-0.02, min(1.02, 1.08 * top + 0.01))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{1000 * x:.0f}"))
    ax.xaxis.set_minor_formatter(FuncFormatter(_minor))
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, 0, symbol=" %"))
    ax.set_xlabel("milliseconds a problem, solved alone (logarithmic)")
    ax.grid(axis="y")
    for name in members:
        alone = sorted((row for row in rows if row.think == row.answer == name), key=_budget)
        ax.plot([r.seconds for r in alone], [r.accuracy for r in alone], color=look.colors[name], linewidth=0.9)
    x, y = [], []
    for row in best:
        x, y = [*x, row.seconds, row.seconds], [*y, y[-1] if y else row.accuracy, row.accuracy]
    ax.plot([*x, ax.get_xlim()[1]], [*y, y[-1]], color=theme.ink, linewidth=1.1, linestyle=(0, (4, 2)))
    for row in rows:
        ax.plot(
            [row.seconds], [row.accuracy], marker="o", markersize=4.5 if row in best else 3.4, linestyle="",
            markerfacecolor=look.colors[row.think], markeredgecolor=look.colors[row.answer], markeredgewidth=1.3,
            zorder=4 if row in best else 3,
        )  # fmt: skip
    entitle(ax, "Accuracy", "problems solved, by policy")
    _label(ax, best, look)
    _legend(ax, members, look)
    return figure


def _budget(row: Row) -> float:
    return math.inf if row.budget is None else row.budget


def _minor(x: float, _: object) -> str:
    """Between powers of ten only what fits."""
    digit = f"{x:e}"[0]
    return f"{1000 * x:.0f}" if digit in "25" else ""


def _label(ax: Axes, best: Sequence[Row], look: Look) -> None:
    """Names of the frontier's policies beside the panel, at their height."""
    width, height = inches(ax)
    bottom, top = ax.get_ylim()
    wanted = [(row.accuracy - bottom) / (top - bottom) for row in best]
    for row, y, at in zip(best, wanted, spread(wanted, [LINE / height] * len(best), -0.05, 1.1), strict=True):
        rule(ax, [1 + 0.02 / width, 1 + 0.12 / width], [y, at], look.theme.muted, 0.6)
        budget = "no budget" if row.budget is None else f"budget {row.budget}"
        text = f"{row.think}{ARROW}{row.answer}" if row.think != row.answer else row.think
        write(ax, 1 + 0.15 / width, at, f"{text}, {budget}", va="center", fontsize=SMALL)


def _legend(ax: Axes, members: Sequence[str], look: Look) -> None:
    width, height = inches(ax)
    y = -0.56 / height
    write(ax, 0, y, "inside: who thinks   ring: who answers   line: one member does both", fontsize=SMALL, va="center")
    for i, name in enumerate(members):
        x = 0.05 / width + i * 0.62 / width
        ax.plot(
            [x], [y - 0.17 / height], marker="o", markersize=4.5, color=look.colors[name], transform=ax.transAxes,
            clip_on=False,
        )  # fmt: skip
        write(ax, x + 0.08 / width, y - 0.17 / height, name, fontsize=SMALL, va="center")
