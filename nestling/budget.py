"""Budgets: what a member may cost, in parameters (active, all, inside the layers) or in bytes of weights and caches.

    active:0.45                                     a share of the full model's active parameters
    total:12.4e9                                    a number of parameters
    inner:0.75                                      a share of what lies inside the layers: no embedding, no head
    bytes:16GiB,format=nvfp4,context=32768,batch=4  weights in a format plus the caches of `batch` sequences

The same formulas serve a person's request, the router's loss (on expected sizes) and the choice among whole sizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nestling.arch import Config, Layout
from nestling.axes import Sizes
from nestling.cost import FORMATS, memory, parse_bytes

KINDS = ("active", "total", "inner", "bytes")


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a member may cost."""

    text: str
    kind: str  # one of KINDS
    target: float  # parameters or bytes
    weight_format: str = "bf16"
    context: int = 0  # tokens held in the caches of one sequence
    batch: int = 1  # sequences held at once
    window: int = 0  # the model's sliding window, in tokens

    def spent(self, layout: Layout, sizes: Sizes) -> Any:
        """The cost of these sizes in the budget's own unit: whole for ints, differentiable for expected sizes."""
        if self.kind == "bytes":
            return memory(
                layout,
                sizes,
                weight_format=self.weight_format,
                context=self.context,
                batch=self.batch,
                window=self.window,
            )
        if self.kind == "inner":
            return layout.count(sizes, inner=True)
        return layout.count(sizes, active=self.kind == "active")


def parse_budget(text: str, layout: Layout, config: Config) -> Budget:
    """Read a budget; a number up to 1 is a share of the full model's cost."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in KINDS:
        raise ValueError(f"cannot read budget '{text}': expected {', '.join(f'{k}:AMOUNT' for k in KINDS)}.")
    amount, *options = rest.split(",")
    given = {name: value for name, _, value in (option.partition("=") for option in options)}
    known = {"format", "context", "batch"} if kind == "bytes" else set()
    if given.keys() - known:
        raise ValueError(
            f"budget '{text}' has unknown options {sorted(given.keys() - known)}; '{kind}' takes {sorted(known)}."
        )
    if given.get("format", "bf16") not in FORMATS:
        raise ValueError(f"budget '{text}': format '{given['format']}' is not one of {', '.join(FORMATS)}.")
    budget = Budget(
        text=text,
        kind=kind,
        target=math.inf,
        weight_format=given.get("format", "bf16"),
        context=_whole(given.get("context", "0"), text),
        batch=_whole(given.get("batch", "1"), text),
        window=config.get("sliding_window") or 0,
    )
    full = budget.spent(layout, layout.sizes)
    try:
        number = float(amount)
    except ValueError:
        number = float(parse_bytes(amount)) if kind == "bytes" else math.nan
    if not number > 0:
        raise ValueError(f"budget '{text}': '{amount}' is not a positive amount.")
    target = number * full if number <= 1 else number
    if target > full * (1 + 1e-9):
        raise ValueError(f"budget '{text}' is more than the full model's {full:,.0f}: there is nothing to cut.")
    return Budget(**{**budget.__dict__, "target": target})


def choices(
    layout: Layout, config: Config, *, grains: Mapping[str, int], floor: float, most: int
) -> dict[str, tuple[int, ...]]:
    """The sizes that a router may choose from, per axis, the full size first.

    grains: axis -> step, for the axes that take part; floor: smallest share of an axis; most: sizes per axis at most.
    """
    found = {}
    for axis, grain in grains.items():
        full = layout.sizes[axis]
        least = max(math.ceil(floor * full), layout.arch.smallest(config, axis))
        steps = [n for n in range(full - full % grain, least - 1, -grain) if n < full]
        if len(steps) > most - 1:
            steps = [steps[round((i + 1) * len(steps) / (most - 1)) - 1] for i in range(most - 1)]
        if steps:
            found[axis] = (full, *steps)
    return found


def check_reachable(budget: Budget, layout: Layout, options: Mapping[str, Sequence[int]]) -> None:
    """An error if even the smallest sizes on offer cost more than the budget."""
    smallest = layout.sizes | {axis: min(sizes) for axis, sizes in options.items()}
    least = budget.spent(layout, smallest)
    if least > budget.target:
        full = budget.spent(layout, layout.sizes)
        raise ValueError(
            f"budget '{budget.text}' ({budget.target:,.0f}) cannot be met: the smallest sizes on offer cost "
            f"{least:,.0f}, {least / full:.3f} of the full model. Ask for more, or lower the floor of the axes."
        )


def choose(
    budget: Budget,
    layout: Layout,
    options: Mapping[str, Sequence[int]],
    preference: Mapping[str, Tensor],
    *,
    tolerance: float,
    count: int = 1,
) -> list[dict[str, int]]:
    """The whole sizes that a router's preference and a budget agree on, best first.

    preference: axis -> [choices] log-probabilities. Among all combinations whose cost lies within `tolerance` below the
    budget, the `count` that the router finds most probable; if none lies there, the one nearest below.
    """
    axes = list(options)
    found: list[tuple[float, float, dict[str, int]]] = []  # whether it is close; log-probability or cost; sizes
    # All combinations at once would be gigabytes for eight axes of eight sizes: the outer axes are walked.
    outer = next(i for i in range(len(axes) + 1) if math.prod(len(options[a]) for a in axes[i:]) <= 1_000_000)
    inner = axes[outer:]
    grid = torch.cartesian_prod(*(torch.arange(len(options[a])) for a in inner)).view(-1, len(inner))
    varied = {a: torch.tensor(options[a], dtype=torch.float64)[grid[:, i]] for i, a in enumerate(inner)}
    liking = sum((preference[a].double().cpu()[grid[:, i]] for i, a in enumerate(inner)), torch.zeros(len(grid)))
    for places in itertools.product(*(range(len(options[a])) for a in axes[:outer])):
        held = {a: options[a][k] for a, k in zip(axes, places, strict=False)}
        spent = budget.spent(layout, {**layout.sizes, **held, **varied}) + torch.zeros(len(grid), dtype=torch.float64)
        liked = liking + sum(float(preference[a][k]) for a, k in zip(axes, places, strict=False))
        fits = spent <= budget.target * (1 + 1e-9)
        close = fits & (spent >= budget.target * (1 - tolerance))
        rank, values, wanted = (1.0, liked, close) if close.any() else (0.0, spent, fits)
        best = torch.where(wanted, values, -math.inf).topk(min(count if rank else 1, int(wanted.sum())))
        for value, i in zip(best.values.tolist(), best.indices.tolist(), strict=True):
            found.append((rank, value, held | {a: int(varied[a][i]) for a in inner}))
        found = sorted(found, key=lambda one: one[:2], reverse=True)[:count]
    assert found, "checked by check_reachable"
    return [sizes for rank, _, sizes in found if rank == found[0][0]]


def uniform(budget: Budget, layout: Layout, options: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """The baseline without a router: every axis shrinks by the same share, as far as the sizes on offer allow."""
    best: tuple[float, dict[str, int]] | None = None
    for share in torch.linspace(1.0, 0.0, 401).tolist():
        sizes = {a: min(n, key=lambda size: abs(size - share * layout.sizes[a])) for a, n in options.items()}
        spent = budget.spent(layout, layout.sizes | sizes)
        if spent <= budget.target * (1 + 1e-9) and (best is None or spent > best[0]):
            best = (spent, sizes)
    assert best is not None, "checked by check_reachable"
    return best[1]


def _whole(text: str, budget: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"budget '{budget}': '{text}' is not a whole number.")
    return int(text)
