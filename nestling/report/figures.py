"""Figures of a nest, drawn from plain numbers; `nestling.report` decides what goes into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from nestling.report.drawing import (
    COLUMNS,
    LINE,
    SMALL,
    WIDTH,
    Look,
    brief,
    chip,
    entitle,
    fraction,
    inches,
    label_ends,
    multiples,
    place,
    rule,
    set_limits,
    sheet,
    shorten,
    smooth,
    spread,
    whole_ticks,
    width_of,
    write,
)

DASH = "\u2013"
Series = tuple[np.ndarray, np.ndarray]  # x and y


@dataclass(frozen=True, kw_only=True)
class Importance:
    """The units of one axis."""

    axis: str
    meaning: str
    curves: np.ndarray  # [layer, unit] best first, the best of each layer at one
    cuts: Mapping[str, int]  # member -> units kept


@dataclass(frozen=True, kw_only=True)
class RouterRun:
    """What the router did in the soft phase."""

    shares: Mapping[str, Mapping[str, Series]]  # axis -> member -> expected size as a share of the full one, over steps
    frozen: Mapping[str, Mapping[str, float]]  # axis -> member -> the share that it got in the end
    distance: Mapping[str, Series]  # member -> distance from its budget, over steps


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One measure of the members' quality."""

    title: str
    is_share: bool  # between 0 and 1, drawn as percent
    trained: Mapping[str, float]
    cut: Mapping[str, float] = field(default_factory=dict)  # by score, before training
    random: Mapping[str, float] = field(default_factory=dict)  # at random, before training
    parent: float | None = None


def importance(panels: Sequence[Importance], look: Look) -> Figure:
    """For every axis its units, best first: a thin line for each layer, their mean thick, and each member's cut."""
    figure, places = multiples(len(panels), height=1.05, above=0.58, below=0.48, beside=0.26)
    for panel, ax in zip(panels, places, strict=True):
        size = panel.curves.shape[1]
        edges = np.arange(size + 1)
        lines = panel.curves if len(panel.curves) > 1 else ()
        for curve in lines:
            ax.stairs(curve, edges, baseline=None, color=look.theme.muted, linewidth=0.6, alpha=0.5)
        ax.stairs(panel.curves.mean(0), edges, baseline=None, color=look.theme.ink, linewidth=1.3)
        ax.set(xlim=(0, size), ylim=(0, 1.03), xlabel="units, best first")
        ax.set_xticks(whole_ticks(size))
        ax.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
        ax.xaxis.set_major_formatter(FuncFormatter(brief))
        entitle(ax, panel.axis, panel.meaning, lift=0.2)
        _mark_cuts(ax, panel.cuts, size, look)
    _label_left(places, "relative importance")
    return figure


def rectangles(counts: Mapping[str, Mapping[str, int]], look: Look) -> Figure:
    """For each kind of count the members inside each other, areas to scale, each drawing on its own scale."""
    side, above = 2.35, 0.42
    figure = sheet(len(counts) * (side + above) + 0.12)
    for i, (title, members) in enumerate(counts.items()):
        ax = place(figure, 0.12, i * (side + above) + above, side, side)
        ax.set(xlim=(0, 1), ylim=(0, 1))
        ax.set_axis_off()
        entitle(ax, title, "")
        full = max(members.values())
        names = sorted(members, key=lambda name: -members[name])
        sides = [(members[name] / full) ** 0.5 for name in names]
        for name, s in zip(names, sides, strict=True):
            ax.add_patch(
                Rectangle(
                    (0, 0), s, s, facecolor=look.colors[name], edgecolor=look.theme.paper, linewidth=1, clip_on=False
                )
            )
        heights = spread(sides, [2.4 * LINE / side] * len(names), 0.0, 1.0)
        for name, s, y in zip(names, sides, heights, strict=True):
            head = y + 0.55 * LINE / side
            rule(ax, [s, 1.0, 1.06, 1.09], [s, s, head, head], look.theme.ink, 0.5)
            rule(ax, [s], [s], look.theme.ink, 0, marker="o", markersize=2.2)
            chip(ax, 1.12, head, look.colors[name])
            write(ax, 1.15, head, shorten(name, 28), weight="bold", va="center")
            told = f"{members[name]:,}  ({100 * members[name] / full:.1f} %)"
            write(ax, 1.15, y - 0.55 * LINE / side, told, va="center", color=look.theme.muted, fontsize=SMALL)
    return figure


def router(run: RouterRun, look: Look) -> Figure:
    """For every axis the size that the router expects for each member, over steps; then the distance from budgets."""
    axes = list(run.shares)
    figure, places = multiples(len(axes) + bool(run.distance), height=1.2, above=0.36, below=0.48, beside=0.68)
    for axis, ax in zip(axes, places, strict=False):
        last = max(float(x[-1]) for x, _ in run.shares[axis].values())
        for name, (x, y) in run.shares[axis].items():
            ax.plot(x, y, color=look.colors[name], linewidth=1.4)
        set_limits(ax, 0, last, 0, 1.05)
        ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        ax.set_yticks([0, 0.5, 1])
        entitle(ax, axis, "share of the full size")
        label_ends(ax, {name: float(y[-1]) for name, (_, y) in run.shares[axis].items()}, look)
        for name, share in run.frozen.get(axis, {}).items():
            ax.plot(
                [last], [share], "o", color=look.colors[name], markersize=4.5, clip_on=False, zorder=5,
                markeredgecolor=look.theme.paper,
            )  # fmt: skip
    for ax in places[len(axes) :]:
        top = max(0.05, *(float(y.max()) for _, y in run.distance.values()))
        last = max(float(x[-1]) for x, _ in run.distance.values())
        for name, (x, y) in run.distance.items():
            ax.plot(x, y, ".", color=look.colors[name], markersize=2, alpha=0.35)
            ax.plot(x, smooth(y), color=look.colors[name], linewidth=1.4)
        set_limits(ax, 0, last, 0, 1.05 * top)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{100 * y:g} %"))
        ax.yaxis.set_major_locator(MaxNLocator(3))
        entitle(ax, "budget", "distance, 0 up to 5 % below")
        label_ends(ax, {name: float(smooth(y)[-1]) for name, (_, y) in run.distance.items()}, look)
    for ax in places:
        ax.set_xlabel("step")
        ax.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        ax.xaxis.set_major_formatter(FuncFormatter(brief))
        ax.grid(axis="y")
    return figure


def losses(runs: Mapping[str, Sequence[Series]], phases: Mapping[str, tuple[float, float]], look: Look) -> Figure:
    """The loss of each member over tokens, one series a phase. phases: name -> first and last tokens."""
    figure = sheet(3.5)
    ax = place(figure, 0.7, 0.5, WIDTH - 1.5, 2.5)
    ends: dict[str, float] = {}
    smoothed: list[float] = []
    for name, parts in runs.items():
        for x, y in parts:
            is_drawn = y > 0
            if not is_drawn.any():
                continue
            line = np.exp(smooth(np.log(y[is_drawn])))
            ax.plot(x[is_drawn], y[is_drawn], color=look.colors[name], linewidth=0.5, alpha=0.3)
            ax.plot(x[is_drawn], line, color=look.colors[name], linewidth=1.5)
            smoothed += line.tolist()
            ends[name] = float(line[-1])
    low, high = (min(smoothed), max(smoothed)) if smoothed else (0.1, 1.0)
    low = max(low, high * 1e-6)  # the full member starts at zero but for rounding
    last = max(end for _, end in phases.values())
    ax.set_yscale("log")
    set_limits(ax, 0, last, low / 1.6, high * 2)
    is_wide = high / low > 30
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0), numticks=8))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.xaxis.set_major_formatter(FuncFormatter(brief))
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set(xlabel="tokens", ylabel="KL to the parent, nats a token (log)")
    ax.grid(axis="y")
    entitle(ax, "Loss of each member", "", lift=0.14)
    for i, (name, (start, end)) in enumerate(phases.items()):
        if i:
            ax.axvline(start, color=look.theme.muted, linewidth=0.8, linestyle=(0, (3, 2)))
        if (end - start) / last * (WIDTH - 1.5) > width_of(name):
            middle = (start + end) / 2 / last
            write(ax, middle, 1.015, name, color=look.theme.muted, fontsize=SMALL, ha="center", va="bottom")
    label_ends(ax, ends, look)
    return figure


def quality(panels: Sequence[Quality], active: Mapping[str, int], look: Look) -> Figure:
    """What the members are worth for their active parameters, before and after training, beside the parent."""
    height, above, below, width = 1.95, 0.78, 0.5, WIDTH - 1.6
    figure = sheet(len(panels) * (height + above + below) + 0.25)
    low, high = min(active.values()), max(active.values())
    pad = 0.06 * (high - low) or 0.1 * high
    kinds: dict[str, dict[str, object]] = {  # drawn in this order
        "random": {"marker": "x", "markersize": 5.5, "markeredgewidth": 1.4},
        "cut": {"marker": "o", "markersize": 6.5, "markerfacecolor": look.theme.paper, "markeredgewidth": 1.4},
        "trained": {"marker": "o", "markersize": 6.5},
    }
    for i, panel in enumerate(panels):
        ax = place(figure, 0.7, i * (height + above + below) + above, width, height)
        series = {kind: getattr(panel, kind) for kind in kinds}
        values = [v for points in series.values() for v in points.values()] + [panel.parent] * (
            panel.parent is not None
        )
        set_limits(ax, low - pad, high + pad, *_reach(ax, values, is_share=panel.is_share))
        ax.set(xlabel="active parameters")
        ax.xaxis.set_major_formatter(FuncFormatter(brief))
        ax.xaxis.set_major_locator(MaxNLocator(5))
        ax.grid(axis="y")
        if panel.parent is not None:
            ax.axhline(panel.parent, color=look.theme.muted, linewidth=0.9, linestyle=(0, (4, 2)))
            told = f"parent {_told(panel.parent, is_share=panel.is_share)}"
            write(ax, 1.02, fraction(ax, panel.parent), told, va="center", color=look.theme.muted, fontsize=SMALL)
        entitle(ax, panel.title, "", lift=0.4)
        measured = [name for name in active if any(name in points for points in series.values())]
        shown = [shorten(name, max(4, 48 // len(measured))) for name in measured]
        results = [_told(panel.trained.get(name), is_share=panel.is_share) for name in measured]
        where = [(active[name] - low + pad) / (high - low + 2 * pad) for name in measured]
        lengths = [(max(width_of(a), width_of(b)) + 0.12) / width for a, b in zip(shown, results, strict=True)]
        for name, label, told, x, at in zip(
            measured, shown, results, where, spread(where, lengths, -0.1, 1.1), strict=True
        ):
            rule(ax, [at, x, x], [1.03, 0.99, 0.0], look.theme.faint, 0.8, zorder=1)
            write(ax, at, 1.0 + 0.2 / height, label, ha="center", weight="bold", fontsize=SMALL)
            write(ax, at, 1.0 + 0.07 / height, told, ha="center", color=look.theme.muted, fontsize=SMALL)
            across = [points[name] for points in series.values() if name in points]
            ax.plot([active[name]] * 2, [min(across), max(across)], color=look.colors[name], linewidth=1, alpha=0.6)
            for kind, points in series.items():
                if name in points:
                    style = {"color": look.colors[name], "clip_on": False, "zorder": 4, **kinds[kind]}
                    ax.plot([active[name]], [points[name]], linestyle="none", **style)
    told = {"trained": "after training", "cut": "cut by score", "random": "cut at random"}
    used = [kind for kind in reversed(kinds) if any(getattr(panel, kind) for panel in panels)]
    legend = place(figure, 0.7, figure.get_size_inches()[1] - 0.26, width, 0.2)
    legend.set_axis_off()
    x = 0.0
    for kind in used:
        style = {"color": look.theme.ink, **kinds[kind]}
        legend.add_line(Line2D([x + 0.02], [0.5], linestyle="none", transform=legend.transAxes, clip_on=False, **style))
        write(legend, x + 0.05, 0.5, told[kind], va="center", color=look.theme.muted, fontsize=SMALL)
        x += 0.1 + width_of(told[kind]) / width
    return figure


def weights(sizes: Mapping[str, int], look: Look, told: Callable[[float], str]) -> Figure:
    """Bytes of one nest, its members inside each other, against those of separate checkpoints, end to end."""
    width, height = WIDTH - 0.24, 0.34
    figure = sheet(1.88)
    ax = place(figure, 0.12, 0.34, width, 1.3)
    ax.set_axis_off()
    total, full = sum(sizes.values()), max(sizes.values())
    set_limits(ax, 0, total, 0, 1.3)
    names = sorted(sizes, key=lambda name: -sizes[name])
    for i, name in enumerate(names):
        tall = height * (1 - 0.7 * i / len(names))
        ax.add_patch(
            Rectangle(
                (0, 0.94), sizes[name], tall, facecolor=look.colors[name], edgecolor=look.theme.paper, linewidth=0.7
            )
        )
    write(ax, 0, 1.0 + 0.06 / 1.3, f"One nest: {told(full)}", weight="bold")
    start = 0
    for name in names:
        ax.add_patch(
            Rectangle(
                (start, 0.26),
                sizes[name],
                height,
                facecolor=look.colors[name],
                edgecolor=look.theme.paper,
                linewidth=0.7,
            )
        )
        start += sizes[name]
    many = f"{len(names)} separate checkpoints" if len(names) > 1 else "One checkpoint"
    write(ax, 0, 0.66 / 1.3, f"{many}: {told(total)}", weight="bold")
    ends = np.cumsum([sizes[name] for name in names]).tolist()
    middles = [(end - sizes[name] / 2) / total for name, end in zip(names, ends, strict=True)]
    shown = [shorten(name, max(4, 60 // len(names))) for name in names]
    lengths = [(max(width_of(a), width_of(told(sizes[b]))) + 0.12) / width for a, b in zip(shown, names, strict=True)]
    for name, label, x, at in zip(names, shown, middles, spread(middles, lengths, 0.0, 1.0), strict=True):
        rule(ax, [x, x, at], [0.25 / 1.3, 0.19 / 1.3, 0.12 / 1.3], look.theme.muted, 0.6)
        write(ax, at, 0.1 / 1.3, label, ha="center", va="top", weight="bold", fontsize=SMALL)
        write(ax, at, -0.04 / 1.3, told(sizes[name]), ha="center", va="top", color=look.theme.muted, fontsize=SMALL)
    return figure


def _label_left(places: Sequence[Axes], text: str) -> None:
    for ax in places[::COLUMNS]:
        ax.set_ylabel(text)


def _mark_cuts(ax: Axes, cuts: Mapping[str, int], size: int, look: Look) -> None:
    """A line where each member cuts; members that cut at the same unit share the line and the label."""
    width, height = inches(ax)
    shared: dict[int, list[str]] = {}
    for name, n in cuts.items():
        shared.setdefault(n, []).append(name)
    limit = max(3, int((width + 0.4) / (0.7 * SMALL / 72) / max(1, len(cuts))) - 2)
    labels = [
        "all" if len(names) == len(cuts) > 1 else ", ".join(shorten(name, limit) for name in names)
        for names in shared.values()
    ]
    wanted = [n / size for n in shared]
    lengths = [(width_of(label) + 0.06) / width for label in labels]
    places = spread(wanted, lengths, -0.25, 1.04)
    for (n, names), label, at, length in zip(shared.items(), labels, places, lengths, strict=True):
        x = n / size
        near = min(max(x, at - length / 2 + 0.03), at + length / 2 - 0.03)
        for i, name in enumerate(names):
            rule(ax, [x, x], [i / len(names), (i + 1) / len(names)], look.colors[name], 1.6, zorder=3)
        rule(ax, [x, near], [1.0, 1 + 0.08 / height], look.theme.muted, 0.6)
        write(ax, at, 1 + 0.11 / height, label, ha="center", fontsize=SMALL, weight="bold")


def _reach(ax: Axes, values: Sequence[float], *, is_share: bool) -> tuple[float, float]:
    """Set the scale of a measure and return its limits."""
    low, high = min(values), max(values)
    if is_share:
        ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
        ax.set_yticks(np.linspace(0, 1, 6))
        return 0.0, 1.0
    if low > 0 and high / low > 20:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 1000 else (1.0, 2.0, 5.0), numticks=8))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
        return low / 1.3, high * 1.3
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:,g}"))
    return max(0.0, low - 0.1 * (high - low) - 0.02 * high), high + 0.1 * (high - low) + 0.02 * high


def _told(value: float | None, *, is_share: bool) -> str:
    return DASH if value is None else f"{100 * value:.1f} %" if is_share else f"{value:,.2f}"
