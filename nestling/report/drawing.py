"""What the figures of a report are drawn with: themes, colors, panels placed in inches, and labels that do not touch.

One width and one type size, narrow enough for a phone. A member has the same color everywhere: one ramp from the
largest to the smallest, readable without color vision and in print. Labels stand beside what they name and are moved
apart where they would touch. The same numbers give the same bytes. Nothing here uses pyplot, so other users of
matplotlib notice nothing.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

WIDTH = 5.6  # inches
DPI = 168
SIZE = 8.5  # points, of titles; the rest is smaller
SMALL = 7.5
LINE = 1.35 * SMALL / 72  # inches from one label to the next below it
COLUMNS = 2  # of small multiples
ELLIPSIS = "\u2026"


@dataclass(frozen=True, kw_only=True)
class Theme:
    """Colors of the paper and of what is not a member."""

    paper: str
    ink: str
    muted: str
    faint: str
    ramp: tuple[float, float]  # where the largest and the smallest member stand on viridis


LIGHT = Theme(paper="#ffffff", ink="#1c2126", muted="#5f6771", faint="#dde1e6", ramp=(0.02, 0.82))
DARK = Theme(paper="#171a1f", ink="#e8eaed", muted="#a0a8b1", faint="#363c44", ramp=(0.4, 0.98))


@dataclass(frozen=True, kw_only=True)
class Look:
    """A theme and the members' colors in it."""

    theme: Theme
    colors: Mapping[str, str]


def look(names: Sequence[str], theme: Theme) -> Look:
    """Colors for members, given from the largest to the smallest."""
    where = np.linspace(*theme.ramp, max(2, len(names)))
    ramp = matplotlib.colormaps["viridis"]
    return Look(theme=theme, colors={name: to_hex(ramp(float(x))) for name, x in zip(names, where, strict=False)})


@contextmanager
def style(theme: Theme) -> Iterator[None]:
    """Inside, figures are drawn in a theme, whatever the user's own settings are; these come back afterwards."""
    settings = {
        "figure.facecolor": theme.paper, "axes.facecolor": theme.paper, "savefig.facecolor": theme.paper,
        "text.color": theme.ink, "axes.labelcolor": theme.muted, "axes.edgecolor": theme.muted, "axes.linewidth": 0.6,
        "xtick.color": theme.muted, "ytick.color": theme.muted, "xtick.major.size": 2.5, "ytick.major.size": 2.5,
        "xtick.major.width": 0.6, "ytick.major.width": 0.6, "xtick.minor.size": 0, "ytick.minor.size": 0,
        "xtick.labelsize": SMALL, "ytick.labelsize": SMALL, "axes.labelsize": SMALL, "font.size": SIZE,
        "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "grid.color": theme.faint, "grid.linewidth": 0.6, "text.parse_math": False, "agg.path.chunksize": 10_000,
    }  # fmt: skip
    with matplotlib.style.context(["default", settings]):
        yield


def png(draw: Callable[[Look], Figure], look: Look) -> bytes:
    """The bytes of a figure, without a date or a version in them."""
    with style(look.theme):
        out = io.BytesIO()
        draw(look).savefig(out, format="png", dpi=DPI, metadata={"Software": None})
    return out.getvalue()


def sheet(height: float) -> Figure:
    figure = Figure(figsize=(WIDTH, height))
    FigureCanvasAgg(figure)
    return figure


def place(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches from the top left."""
    w, h = figure.get_size_inches()
    return figure.add_axes((left / w, 1 - (top + height) / h, width / w, height / h))


def multiples(n: int, *, height: float, above: float, below: float, beside: float) -> tuple[Figure, list[Axes]]:
    """A figure with n small panels of this height in inches, and the room around each."""
    rows = -(-n // COLUMNS)
    figure = sheet(rows * (height + above + below))
    left = 0.62
    width = WIDTH / COLUMNS - left - beside
    return figure, [
        place(
            figure,
            (i % COLUMNS) * WIDTH / COLUMNS + left,
            (i // COLUMNS) * (height + above + below) + above,
            width,
            height,
        )
        for i in range(n)
    ]


def set_limits(ax: Axes, left: float, right: float, bottom: float, top: float) -> None:
    ax.set(xlim=(left, right if right > left else left + 1), ylim=(bottom, top))


def inches(ax: Axes) -> tuple[float, float]:
    """Width and height of axes."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    box, (w, h) = ax.get_position(), figure.get_size_inches()
    return box.width * w, box.height * h


def fraction(ax: Axes, y: float) -> float:
    """Where a value stands between the bottom and the top of the axes."""
    return float(ax.transAxes.inverted().transform(ax.transData.transform((0, y)))[1])


def write(ax: Axes, x: float, y: float, text: str, **style: object) -> None:
    ax.text(x, y, text, transform=ax.transAxes, **style)  # type: ignore[arg-type]


def rule(ax: Axes, x: Sequence[float], y: Sequence[float], color: str, width: float, **style: object) -> None:
    """A line in fractions of the axes, which may leave them."""
    ax.add_line(
        Line2D(x, y, color=color, linewidth=width, transform=ax.transAxes, clip_on=False, **style)  # type: ignore[arg-type]
    )


def chip(ax: Axes, x: float, y: float, color: str) -> None:
    rule(ax, [x], [y], color, 0, marker="s", markersize=5)


def entitle(ax: Axes, title: str, meaning: str, lift: float = 0.0) -> None:
    """A title, and what it means, from the left edge of the panel, `lift` inches higher than usual."""
    _, height = inches(ax)
    name = ax.text(0, 1 + (0.12 + lift) / height, title, transform=ax.transAxes, weight="bold")
    style = {"color": ax.xaxis.label.get_color(), "fontsize": SMALL, "va": "bottom"}
    ax.annotate(meaning, xy=(1, 0), xycoords=name, xytext=(5, 0.3), textcoords="offset points", **style)


def label_ends(ax: Axes, ends: Mapping[str, float], look: Look) -> None:
    """Each series' name behind its end, the names moved apart."""
    _, height = inches(ax)
    wanted = [min(max(fraction(ax, y), 0.0), 1.0) for y in ends.values()]
    width, _ = inches(ax)
    for name, y, at in zip(ends, wanted, spread(wanted, [LINE / height] * len(ends), -0.1, 1.1), strict=True):
        rule(ax, [1 + 0.03 / width, 1 + 0.12 / width], [y, at], look.colors[name], 1.2)
        write(ax, 1 + 0.15 / width, at, shorten(name, 6), va="center", fontsize=SMALL, weight="bold")


def spread(wanted: Sequence[float], lengths: Sequence[float], low: float, high: float) -> list[float]:
    """Middles for labels of these lengths, as near to the wanted ones as they can be without touching, in low..high.

    The nearest in squares: isotonic regression on the middles less what stands before them. Labels that are too many
    for the room start at `low` and go on beyond `high`.
    """
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    offsets = [0.0]
    for i, j in itertools.pairwise(order):
        offsets.append(offsets[-1] + (lengths[i] + lengths[j]) / 2)
    pools: list[tuple[float, int]] = []  # mean and count
    for place, i in enumerate(order):
        mean, count = wanted[i] - offsets[place], 1
        while pools and pools[-1][0] > mean:
            other, n = pools.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        pools.append((mean, count))
    starts = [mean for mean, count in pools for _ in range(count)]
    first = low + lengths[order[0]] / 2
    last = max(first, high - lengths[order[-1]] / 2 - offsets[-1])
    found = [0.0] * len(wanted)
    for place, i in enumerate(order):
        found[i] = min(max(starts[place], first), last) + offsets[place]
    return found


def smooth(y: np.ndarray) -> np.ndarray:
    """A centered running mean over a thirtieth of the series, less at its ends."""
    reach = min(len(y) // 60, 200)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    i = np.arange(len(y))
    start, end = np.maximum(i - reach, 0), np.minimum(i + reach + 1, len(y))
    return (sums[end] - sums[start]) / (end - start)


def shorten(name: str, limit: int) -> str:
    """A name of at most `limit` characters."""
    return name if len(name) <= limit else name[: limit - 1] + ELLIPSIS


def width_of(text: str) -> float:
    """Inches that small bold type takes, rather too many than too few."""
    return 0.7 * SMALL / 72 * len(text)


def brief(value: float, place: object = None) -> str:
    """A count for a tick: 950, 12 k, 1.2 M."""
    for unit, letter in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit and (unit > 1e3 or abs(value) >= 1e4):
            return f"{value / unit:.3g}{letter}"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.3g}"


def whole_ticks(size: int) -> list[int]:
    """Zero, the full size and a few whole numbers between."""
    inner = [int(n) for n in MaxNLocator(4, integer=True).tick_values(0, size) if 0 < n < 0.85 * size]
    return [0, *inner, size]
