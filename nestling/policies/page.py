"""What was measured, as files: policies.json with every number, policies.md with the tables and what they say, and the
figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nestling.checkpoint import new_folder
from nestling.policies.figure import draw
from nestling.policies.frontier import Row, frontier, verdict
from nestling.policies.handover import Compared
from nestling.policies.settings import PolicySettings
from nestling.policies.sweep import notes_file, sweep
from nestling.report.drawing import LIGHT, look, png

Say = Callable[[str], None]


def evaluate_policies(
    settings: PolicySettings, folder: str | Path, to: str | Path, *, say: Say = print, overwrite: bool = False
) -> str:
    """Measure a nest's policies and write everything to `to`. Returns the page."""
    rows, compared, members = sweep(settings, folder, to, say=say, overwrite=overwrite)
    text = page(rows, compared, members, settings)
    with new_folder(to, overwrite=overwrite, source=Path(folder)) as new:
        told = {
            "settings": asdict(settings),
            "members": members,
            "policies": [asdict(row) | {"accuracy": row.accuracy, "name": row.name} for row in rows],
            "frontier": [row.name for row in frontier(rows)],
            "handovers": [asdict(one) for one in compared],
        }
        (new / "policies.json").write_text(json.dumps(_finite(told), indent=1) + "\n", "utf-8")
        (new / "policies.md").write_text(text + "\n", "utf-8")
        (new / "policies.png").write_bytes(png(lambda chosen: draw(rows, members, chosen), look(members, LIGHT)))
    notes_file(to).unlink(missing_ok=True)
    return text


def read_policies(folder: Path) -> tuple[list[Row], list[Compared], list[str], PolicySettings]:
    """What `evaluate_policies` wrote."""
    told = json.loads((folder / "policies.json").read_text("utf-8"))
    rows = []
    for one in told["policies"]:
        values = {k: v for k, v in one.items() if k not in ("accuracy", "name")}
        rows.append(Row(**{**values, "solved": tuple(values["solved"])}))
    unknown: Any = math.nan
    compared = [Compared(**{k: unknown if v is None else v for k, v in one.items()}) for one in told["handovers"]]
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told["settings"].items()}
    return rows, compared, told["members"], PolicySettings(**settings)


def page(rows: Sequence[Row], compared: Sequence[Compared], members: Sequence[str], settings: PolicySettings) -> str:
    """The tables and what they say, as Markdown."""
    return "\n\n".join(
        [
            how(settings),
            "\n".join(f"- {line}" for line in (*verdict(rows, members), *_switch(compared))),
            _table(_sweep_rows(rows, members, settings)),
            "Time to the first token of the answer, and what hand-over by replay costs:",
            _table(_handover_rows(compared)),
        ]
    )


def how(settings: PolicySettings) -> str:
    """How it was measured, in two sentences."""
    return (
        f"Accuracy: {settings.problems} held-out problems, greedy, {settings.rows} at once through the engine (an "
        f"answer does not depend on what else runs). Latency: mean of {settings.timed} of the problems, solved one at "
        "a time by all policies in turn, prompt to last token, hand-over included, no state kept from earlier answers. "
        f"Without a budget thoughts are cut at {settings.max_thinking} tokens."
    )


def _switch(compared: Sequence[Compared]) -> list[str]:
    """What the switch alone takes, over all pairs."""
    means = {}
    for one in compared:
        if math.isfinite(one.seconds):
            means.setdefault(one.name, []).append(1000 * one.seconds)
    told = ", ".join(f"{name} {sum(found) / len(found):.1f} ms" for name, found in means.items())
    return (
        [f"From the end of the thoughts to the first token of the answer, mean over the pairs: {told}."] if told else []
    )


def _sweep_rows(rows: Sequence[Row], members: Sequence[str], settings: PolicySettings) -> list[list[str]]:
    """A line for each pair, a column for each budget; those on the frontier in bold."""
    best, limits = frontier(rows), settings.limits[::-1]
    found = {(row.think, row.answer, row.budget): row for row in rows}
    heads = ["no budget" if n is None else f"budget {n}" for n in limits]
    table = [["thinks -> answers", *heads]]
    for think in members:
        for answer in members:
            cells = []
            for budget in limits:
                row = found.get((think, answer, budget))
                text = "" if row is None else f"{100 * row.accuracy:.1f} %, {1000 * row.seconds:.0f} ms"
                cells.append(f"**{text}**" if row in best else text)
            table.append([f"{think} -> {answer}", *cells])
    return table


def _handover_rows(compared: Sequence[Compared]) -> list[list[str]]:
    table = [
        ["thinks -> answers", "hand-over", "first answer token", "solved", "lost", "other answers", "KL", "KL, first"]
    ]
    for one in compared:
        name = f"{one.think} -> {one.answer}"
        if one.why_not:
            table.append([name, one.name, "refused", *[""] * 5])
            continue
        table.append(
            [
                name,
                one.name,
                f"{1000 * one.seconds:.1f} ms",
                f"{100 * one.accuracy:.1f} %",
                f"{100 * one.lost:.1f} points",
                f"{100 * one.differing:.1f} %",
                f"{max(one.kl, 0.0):.4f}",
                f"{max(one.kl_first, 0.0):.4f}",
            ]
        )
    return table


def _table(rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def _finite(told: Any) -> Any:
    """JSON has no NaN: what was not measured is null."""
    if isinstance(told, dict):
        return {k: _finite(v) for k, v in told.items()}
    if isinstance(told, list | tuple):
        return [_finite(v) for v in told]
    return None if isinstance(told, float) and not math.isfinite(told) else told
