"""One page about a nest: its members, what they cost and can do, how they were found, and what they were made with.

The page is a single HTML file that needs nothing else: figures are inside it, light and dark, and lie beside it as PNG
files. It draws what the nest folder holds and says what is missing and which command makes it. The same nest gives the
same bytes, so there is no date, no folder name and no version on the page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nestling.checkpoint import new_folder
from nestling.nest import FULL, open_nest
from nestling.report import figures
from nestling.report.drawing import DARK, LIGHT, look, png
from nestling.report.findings import WHEN, Found, find
from nestling.report.page import Drawing, bytes_text, page, picture

Say = Callable[[str], None]
MEANING = {
    "hidden": "channels of the residual stream",
    "ffn": "neurons of a feed-forward layer",
    "effn": "neurons of an expert",
    "sffn": "neurons of the shared expert",
    "q": "query heads of a group",
    "expert": "experts of a layer",
    "mamba": "Mamba heads of a group",
    "mdim": "channels of a Mamba head",
    "layer": "layers, by what is lost without them",
}


def report(nest_folder: str | Path, to: str | Path, *, say: Say = print, overwrite: bool = False) -> Path:
    """Write report.html and its figures as PNG files into a new folder. Returns the page's path."""
    found = find(open_nest(nest_folder))
    names = [member.name for member in found.members]
    light, dark = look(names, LIGHT), look(names, DARK)
    with new_folder(to, overwrite=overwrite, source=Path(nest_folder)) as folder:
        pictures = {}
        for drawing in _drawings(found):
            image = png(drawing.draw, light)
            (folder / f"{drawing.name}.png").write_bytes(image)
            pictures[drawing.name] = picture(drawing, image, png(drawing.draw, dark))
        (folder / "report.html").write_text(page(found, pictures, light, dark), encoding="utf-8")
    for line in found.missing:
        say(f"missing: {line}")
    say(f"wrote {Path(to) / 'report.html'} with {len(pictures)} figures")
    return Path(to) / "report.html"


def _drawings(found: Found) -> list[Drawing]:
    """The figures that can be drawn."""
    active = {m.name: found.costs[m.name].active_parameters for m in found.members}
    counts = {
        "All parameters": {m.name: found.costs[m.name].parameters for m in found.members},
        "Active for each token": active,
    }
    drawings = [
        Drawing(
            name="nest", title="The nest", draw=partial(figures.rectangles, counts),
            caption="Every member lies inside the full model. Areas are to scale, each drawing on its own: "
            "the full model fills the square.",
        )
    ]  # fmt: skip
    if len(found.members) > 1:
        sizes = {m.name: found.costs[m.name].bytes["bf16"] for m in found.members}
        drawings.append(
            Drawing(
                name="bytes", title="One nest or separate checkpoints",
                draw=partial(figures.weights, sizes, told=bytes_text),
                caption="Bytes of the weights in bf16. The nest holds the full model; the others are its first units.",
            )
        )  # fmt: skip
    panels = _quality(found)
    if panels:
        drawings.append(
            Drawing(
                name="quality", title="Quality", draw=partial(figures.quality, panels, active),
                caption="What each member is worth for the parameters that a token uses. A line joins the same member "
                "before and after training.",
            )
        )  # fmt: skip
    if found.scores:
        curves = [
            figures.Importance(
                axis=axis,
                meaning=MEANING.get(axis, "units"),
                curves=lines / lines.max(-1, keepdims=True),
                cuts={m.name: found.nest.sizes(m)[axis] for m in found.members},
            )
            for axis, lines in found.scores.items()
        ]
        drawings.append(
            Drawing(
                name="importance", title="Importance along each axis", draw=partial(figures.importance, curves),
                caption="Units of every layer from the best to the least, relative to the layer's best: a thin line a "
                "layer, their mean thick. Where an axis is ordered within groups or experts, a line is their sum. "
                "A member keeps what stands to the left of its mark.",
            )
        )  # fmt: skip
    run = _router_run(found)
    if run:
        drawings.append(
            Drawing(
                name="router", title="What the router chose", draw=partial(figures.router, run),
                caption="Expected size along each axis while the router learns, as a share of the full one. Dots are "
                "the sizes that the members got. A budget met to within 5 % costs nothing and has distance zero.",
            )
        )  # fmt: skip
    if found.log:
        drawings.append(
            Drawing(
                name="losses", title="Training", draw=partial(figures.losses, *_losses(found)),
                caption="KL divergence of each member to the parent on training data: every step faint, a running "
                "mean over a thirtieth of the phase on top.",
            )
        )  # fmt: skip
    return drawings


def _quality(found: Found) -> list[figures.Quality]:
    """Accuracy and perplexities, or KL if there are neither."""
    results = {m.name: m.results for m in found.members}
    sources = sorted({source for r in results.values() for source in r.get("perplexity", {})})

    def gather(read: Callable[[Mapping[str, Any], str], float | None]) -> dict[str, dict[str, float]]:
        """End of a key -> member -> value."""
        read_all = {end: {name: read(r, end) for name, r in results.items()} for end in WHEN}
        return {end: {n: v for n, v in values.items() if v is not None} for end, values in read_all.items()}

    def panel(title: str, values: dict[str, dict[str, float]], *, is_share: bool, has_parent: bool = True) -> Any:
        parent = values["_before"].get(FULL, values[""].get(FULL)) if has_parent else None
        return figures.Quality(
            title=title, is_share=is_share, trained=values[""], cut=values["_before"], random=values["_random"],
            parent=parent,
        )  # fmt: skip

    panels = []
    if any("accuracy" in r for r in results.values()):
        values = gather(lambda r, end: r.get(f"accuracy{end}"))
        panels.append(panel("Problems solved", values, is_share=True))
    for source in sources:
        values = gather(lambda r, end, source=source: r.get(f"perplexity{end}", {}).get(source))
        panels.append(panel(f"Perplexity on {source}", values, is_share=False))
    if not panels and any("kl" in r for r in results.values()):
        values = gather(lambda r, end: r.get(f"kl{end}"))
        panels.append(panel("KL to the parent, nats a token", values, is_share=False, has_parent=False))
    return panels


def _router_run(found: Found) -> figures.RouterRun | None:
    """The router's part of the log as series over steps."""
    records = [record for record in found.log if "router" in record]
    full = found.nest.layout.sizes
    names = [m.name for m in found.members if any(m.name in record["router"] for record in records)]
    if not names:
        return None
    steps = np.array([record["step"] for record in records], dtype=float)
    axes = list(records[0]["router"][names[0]])
    weight = found.nest.recipe.get("train", {}).get("router_lambda") or 1.0
    distance = {}
    for name in names:
        drawn = [(r["step"], r["budget_term"][name] / weight) for r in records if name in r.get("budget_term", {})]
        if drawn:
            distance[name] = (np.array([x for x, _ in drawn], dtype=float), np.array([y for _, y in drawn]))
    return figures.RouterRun(
        shares={
            axis: {name: (steps, np.array([r["router"][name][axis] for r in records]) / full[axis]) for name in names}
            for axis in axes
        },
        frozen={
            axis: {name: found.nest.sizes(found.nest.members[name])[axis] / full[axis] for name in names}
            for axis in axes
        },
        distance=distance,
    )


def _losses(found: Found) -> tuple[dict[str, list[figures.Series]], dict[str, tuple[float, float]]]:
    """Losses of each member over tokens, a series for each phase, and the phases in tokens."""
    told = {"router": "router learns", "members": "members train"}
    phases: dict[str, tuple[float, float]] = {}
    runs: dict[str, list[figures.Series]] = {m.name: [] for m in found.members}
    start = 0.0
    for phase in dict.fromkeys(record["phase"] for record in found.log):
        records = [record for record in found.log if record["phase"] == phase]
        end = float(records[-1]["tokens"])
        phases[told.get(phase) or str(phase)] = (start, end)
        start = end
        for name, series in runs.items():
            pairs = [(r["tokens"], r["loss"][name]) for r in records if name in r["loss"]]
            if pairs:
                series.append((np.array([x for x, _ in pairs], dtype=float), np.array([y for _, y in pairs])))
    return runs, phases
