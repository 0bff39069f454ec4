"""What a nest folder holds that a report can show, and what it lacks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from nestling.cost import Cost
from nestling.nest import FULL, Member, Nest

WHEN = {"_random": "cut at random", "_before": "cut by score", "": "trained"}  # ends of the keys of results


@dataclass(kw_only=True)
class Found:
    """What the nest folder holds."""

    nest: Nest
    members: list[Member]  # the largest first
    costs: dict[str, Cost]
    scores: dict[str, np.ndarray]  # axis -> [layer or 1, unit] best first, summed over what encloses a unit in a layer
    log: list[dict[str, Any]]
    missing: list[str] = field(default_factory=list)


def find(nest: Nest) -> Found:
    """Read what there is, and note what there is not."""
    costs = {name: nest.cost(member) for name, member in nest.members.items()}
    members = sorted(nest.members.values(), key=lambda m: (m.name != FULL, -costs[m.name].active_parameters))
    found = Found(nest=nest, members=members, costs=costs, scores=_read_scores(nest), log=_read_log(nest.folder))
    say = found.missing.append
    if len(members) == 1:
        say("members besides the full model. `nestling build PARENT --member NAME=active:SHARE --to NEST` makes them.")
    if not found.scores:
        say("the importance of the units. `nestling build` leaves its scores in the nest.")
    if not found.log:
        say("the log of a training run. `nestling train NEST --to TRAINED` and `nestling build` write it.")
    elif not any("router" in record for record in found.log):
        say("the router. The run had no phase for it: sizes were given, or every axis shrank by the same share.")
    strangers = {name for record in found.log for name in record["loss"]} - nest.members.keys()
    if strangers:
        say(f"members {', '.join(sorted(strangers))}, which the training log names and the nest does not have.")
    makers = {
        "accuracy": "--problems 500",
        "perplexity": "--heldout NAME=FILE.jsonl",
        "kl": "--heldout NAME=FILE.jsonl",
    }
    for key, option in makers.items():
        for end, when in WHEN.items():
            lacking = [m.name for m in members if key + end not in m.results]
            if lacking:
                whom = "all members" if len(lacking) == len(members) else ", ".join(lacking)
                say(f"{key}, {when}, of {whom}. `nestling build PARENT {option} --to NEST` measures it.")
    return found


def _read_scores(nest: Nest) -> dict[str, np.ndarray]:
    """Scores along every axis, best first, one line a layer; layers without the axis left out."""
    folder = nest.folder / "nest" / "scores"
    if not folder.is_dir():
        return {}
    from nestling.score import Scores  # loads torch and transformers, which nothing else here needs

    scores = Scores.load(folder)
    scores.check_fits(nest.layout)
    lines = {}
    for axis, values in scores.values().items():
        ordered = -np.sort(-values.numpy(), axis=-1)
        has_layers = nest.layout.arch.elastic[axis].within[:1] == ("layer",)
        ordered = ordered.reshape(len(ordered) if has_layers else 1, -1, ordered.shape[-1]).sum(1)
        ordered = ordered[ordered.max(-1) > 0]
        if len(ordered):
            lines[axis] = ordered
    return lines


def _read_log(folder: Path) -> list[dict[str, Any]]:
    file = folder / "nest" / "train.jsonl"
    if not file.is_file():
        return []
    records = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if not isinstance(record, dict) or not {"step", "phase", "loss", "tokens"} <= record.keys():
            raise ValueError(f"line {number} of '{file}' is not the record of a step: {line[:80]!r}.")
        records.append(record)
    return records
