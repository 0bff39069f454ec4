"""The main job in one go: score a parent, sort it, train the members, evaluate them, write the report.

Every step leaves a folder in `TO.work`, so a build that was stopped goes on where it was. The nest appears at `TO` at
the end, with its scores, its training log and its report inside.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from nestling import hf, tasks
from nestling.checkpoint import check_destination, new_folder, read_json, write_json
from nestling.data import Stream, read_documents
from nestling.eval import compare, solve
from nestling.nest import FULL, Member, Nest, open_nest, open_plain_nest, write_nest
from nestling.padded import stream_of
from nestling.plan import Plan, TrainSettings, make_plan
from nestling.report import report
from nestling.score import Scores, ScoreSettings, random_scores, score_folder
from nestling.slice import slice as cut_member
from nestling.sort import sort
from nestling.text import columns, duration, percent
from nestling.train import train

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """Settings of `nestling build`, beside those of training."""

    score_tokens: int = 200_000  # calibration tokens
    score_length: int = 1024  # tokens in one calibration sequence
    score_batch: int = 8  # calibration sequences at once
    problems: int = 0  # held-out problems of the reasoner's tasks to solve with each member; 0: none
    max_thinking: int = 256  # tokens of thought before </think> is forced
    heldout: str = ""  # NAME=FILE.jsonl,... : KL to the parent and perplexity on each
    heldout_tokens: int = 50_000  # tokens of each held-out file
    heldout_length: int = 512  # tokens in one held-out block
    random_baseline: bool = True  # also evaluate members cut from randomly ordered units


def build(
    settings: BuildSettings, training: TrainSettings, parent: str | Path, to: str | Path, *, say: Say = print,
    overwrite: bool = False,
) -> Nest:  # fmt: skip
    """Make a nest from a parent and evaluate it. Returns the nest."""
    to = Path(to)
    if Path(parent).resolve().is_relative_to(to.resolve()):
        raise ValueError(f"'{to}' would replace the parent '{parent}', which is read. Choose another folder.")
    check_destination(to, overwrite=overwrite)
    # What would fail after minutes of work fails here, before there is a work folder that holds on to its settings.
    heldout = _heldout_blocks(settings, parent, loss_on=training.loss_on, pack=training.pack)
    plan = _check_plan(training, parent)
    clock, work = time.monotonic(), to.with_name(to.name + ".work")
    work.mkdir(parents=True, exist_ok=True)
    _check_same(work / "build.json", {**asdict(settings), **asdict(training), "parent": open_nest(parent).fingerprint})

    def step(folder: str, what: str, make: Callable[[Path], Any]) -> Path:
        if not (work / folder).exists():
            say(f"[{duration(time.monotonic() - clock)}] {what}")
            make(work / folder)
        return work / folder

    scoring = ScoreSettings(
        tokens=settings.score_tokens,
        length=settings.score_length,
        batch=settings.score_batch,
        layers=any("layer" in member.sizes for member in plan.members.values()),
        pack=training.pack,
        dtype=training.dtype,
        device=training.device,
        seed=training.seed,
    )

    def make_scores(at: Path) -> None:
        score_folder(scoring, parent=Path(parent), data=training.data, to=at, say=say)

    scores = step("scores", "score: one pass over the calibration data", make_scores)
    known = Scores.load(scores)
    known.check_fits(open_nest(parent).layout, open_nest(parent).fingerprint)
    orders = known.orders()
    sorted_ = step("sorted", "sort: best units first", lambda at: sort(parent, orders, at))
    trained = step("trained", "train: router, then members", lambda at: train(training, sorted_, at, say=say))
    nest = open_nest(trained)
    teacher = hf.load_model(parent, device=training.device)

    def measure(file: str, what: str, folder: Path, members: Mapping[str, Member]) -> dict[str, dict[str, Any]]:
        def make(at: Path) -> None:
            write_json(at, evaluate(settings, open_nest(folder), members, teacher, heldout, say=say))

        return read_json(step(file, f"evaluate: {what}", make))

    found = {"": measure("trained.json", "members after training", trained, nest.members)}
    found["_before"] = measure("before.json", "the same sizes cut by score, without training", sorted_, nest.members)
    if settings.random_baseline:
        refused = nest.layout.arch.refuse(nest.config)
        drawn = random_scores(nest.layout, seed=training.seed).orders()
        seeded = {axis: order for axis, order in drawn.items() if axis not in refused}
        shuffled = step("shuffled", "sort: at random, for comparison", lambda at: sort(parent, seeded, at))
        smaller = {name: member for name, member in nest.members.items() if name != FULL}
        found["_random"] = measure("random.json", "the same sizes cut at random", shuffled, smaller)
    members = {}
    for name, member in nest.members.items():
        told = {f"{k}{when}": v for when, some in found.items() for k, v in some.get(name, {}).items()}
        members[name] = replace(member, results=told)
    with new_folder(to, overwrite=overwrite) as folder:
        shutil.copytree(trained, folder, dirs_exist_ok=True)
        shutil.copytree(scores, folder / "nest" / "scores")
        write_nest(replace(nest, members=members, recipe=nest.recipe | {"build": asdict(settings)}), folder)
        report(folder, folder / "nest" / "report", say=lambda line: None)
    shutil.rmtree(work)
    nest = open_nest(to)
    say(f"[{duration(time.monotonic() - clock)}] done: {to}, report in {to / 'nest' / 'report' / 'report.html'}")
    return nest


def evaluate(
    settings: BuildSettings,
    nest: Nest,
    members: Mapping[str, Member],
    teacher: Any,
    heldout: Mapping[str, tuple[Tensor, Tensor]],
    *,
    say: Say = print,
) -> dict[str, dict[str, Any]]:
    """What each member can do, as the plain checkpoint that `slice` writes, loaded by its stock class."""
    tokenizer = hf.load_tokenizer(nest.folder)
    hf.check_vocabulary(teacher, tokenizer)
    problems = tasks.problems("test", settings.problems) if settings.problems else []
    found: dict[str, dict[str, Any]] = {}
    for name, member in members.items():
        with tempfile.TemporaryDirectory() as scratch:
            model = hf.load_model(cut_member(nest, member, Path(scratch) / "member"), device=str(teacher.device))
        one: dict[str, Any] = {}
        if heldout:
            sums = {source: compare(teacher, model, _batches(*blocks)) for source, blocks in heldout.items()}
            if not all(math.isfinite(x.kl + x.loss) for x in sums.values()):
                raise RuntimeError(f"member {name} gives logits that are NaN or infinite on held-out text.")
            one["kl"] = sum(x.kl for x in sums.values()) / sum(x.num_tokens for x in sums.values())
            one["perplexity"] = {source: math.exp(min(x.loss / x.num_tokens, 700.0)) for source, x in sums.items()}
        if problems:
            solved = solve(model, tokenizer, problems, max_thinking=settings.max_thinking)
            one |= {"accuracy": solved.accuracy, "accuracy_by_family": solved.families, "problems": solved.num_problems}
            one["thinking_tokens"] = solved.thinking_tokens
        found[name] = one
        solved_share = f", {percent(one['accuracy'])} of {one['problems']} problems solved" if problems else ""
        say(f"  {name}: KL {_number(one.get('kl'), 'z.4f')}{solved_share}")
    return found


def evaluate_folder(
    settings: BuildSettings, folder: str | Path, *, parent: str | Path, pack: bool | None = None,
    loss_on: str | None = None, device: str = "cpu", say: Say = print,
) -> tuple[Nest, str]:  # fmt: skip
    """Measure every member of a nest against a parent. Returns the nest with results, and them as text.

    pack, loss_on: how held-out text is read, as in training; by default as the nest's recipe says, else packed and all.
    """
    nest, _ = open_plain_nest(folder, verb="eval"), open_plain_nest(parent, verb="eval")
    recipe = nest.recipe.get("train", {})
    heldout = _heldout_blocks(
        settings, folder, loss_on=loss_on or str(recipe.get("loss_on", "all")),
        pack=bool(recipe.get("pack", True)) if pack is None else pack,
    )  # fmt: skip
    found = evaluate(settings, nest, nest.members, hf.load_model(parent, device=device), heldout, say=say)
    nest = replace(nest, members={name: replace(member, results=found[name]) for name, member in nest.members.items()})
    return nest, members_table(nest)


def members_table(nest: Nest) -> str:
    """The members with their costs and what was measured, as text."""
    rows = members_rows(nest)
    place = rows[0].index("keeps")  # too wide for a terminal
    return columns([row[:place] + row[place + 1 :] for row in rows])


def members_rows(nest: Nest) -> list[list[str]]:
    """The members with their sizes, costs and what was measured, a row each under a row of heads."""
    sources = sorted({s for m in nest.members.values() for s in m.results.get("perplexity", {})})
    has_problems = any("accuracy" in m.results for m in nest.members.values())
    measured = [("KL, cut", "kl_before", ""), ("KL, trained", "kl", "")]
    if has_problems:
        cuts = [("random cut", "accuracy_random"), ("cut by score", "accuracy_before"), ("trained", "accuracy")]
        measured = [(head, key, "%") for head, key in cuts] + measured
    else:
        ends = [("cut", "perplexity_before"), ("trained", "perplexity")]
        measured = [(f"{one} ppl, {when}", key, one) for one in sources for when, key in ends] + measured
    whole = nest.cost(nest.member(FULL)).active_parameters
    rows = [["member", "parameters", "active", "bf16 bytes", "keeps", *(head for head, _, _ in measured)]]
    for member in nest.members.values():
        cost = nest.cost(member)
        share = percent(cost.active_parameters / whole)
        keeps = ", ".join(f"{axis} {n}" for axis, n in member.sizes.items()) or "everything"
        row = [member.name, f"{cost.parameters:,}", f"{cost.active_parameters:,} ({share})"]
        row += [f"{cost.bytes['bf16']:,}", keeps]
        for _, key, what in measured:
            value = member.results.get(key)
            if what == "%":
                row.append(percent(value))
            else:
                row.append(_number((value or {}).get(what), ".2f") if what else _number(value, "z.4f"))
        rows.append(row)
    return rows


def _check_plan(training: TrainSettings, parent: str | Path) -> Plan:
    """What training would refuse, before anything is scored."""
    nest = open_plain_nest(parent, verb="build")
    nest.check_cover(nest.names)
    Stream(training.data, hf.load_tokenizer(parent), length=1)
    return make_plan(training, nest)


def _check_same(file: Path, told: dict[str, Any]) -> None:
    """A build goes on only with the settings that it was started with."""
    told = json.loads(json.dumps(told))
    if not file.exists():
        write_json(file, told)
    before = read_json(file)
    changed = sorted(key for key in told if before.get(key) != told[key])
    if changed:
        raise ValueError(
            f"'{file.parent}' holds an unfinished build with other settings ({', '.join(changed)}). Use the same "
            "settings to go on, or delete the folder to start anew."
        )


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)


def _batches(ids: Tensor, labels: Tensor) -> list[dict[str, Tensor]]:
    pairs = zip(ids.split(16), labels.split(16), strict=True)
    return [{"input_ids": rows, "labels": told} for rows, told in pairs]


def _heldout_blocks(
    settings: BuildSettings, parent: str | Path, *, loss_on: str, pack: bool
) -> dict[str, tuple[Tensor, Tensor]]:
    """Held-out tokens by source, each file at most once: ids and labels (-100 where a token does not count).

    Values are two tensors [block, time].
    """
    if not settings.problems and not settings.heldout:
        raise ValueError("nothing to evaluate with: give --heldout NAME=FILE.jsonl, or --problems for the reasoner.")
    tokenizer, found = hf.load_tokenizer(parent), {}
    # A comma or an equals sign may also stand in a path: a source begins where a name and its equals sign do.
    for part in re.split(r",(?=[^,=/]+=)", settings.heldout) if settings.heldout else []:
        name, equals, path = part.partition("=")
        if not equals:
            raise ValueError(f"cannot read held-out source '{part}': expected NAME=FILE.jsonl.")
        if name in found:
            raise ValueError(f"held-out source '{name}' is given twice.")
        available = sum(len(document) for document in read_documents(path, tokenizer))
        length = min(settings.heldout_length, settings.heldout_tokens, available)
        if length < 2:
            raise ValueError(
                f"held-out source '{path}' has {available} tokens; with heldout_tokens {settings.heldout_tokens} and "
                f"heldout_length {settings.heldout_length} that is too few for one block."
            )
        stream = stream_of([f"{path}=1"], tokenizer, pack=pack, length=length, loss_on=loss_on)
        wanted = min(available, settings.heldout_tokens)
        rows: list[tuple[Tensor, Tensor]] = []
        while stream.num_tokens + (length if pack else 1) <= wanted:
            ids, _, counted = stream.next_rows(1)
            labels = torch.full_like(ids, -100)
            labels[:, 1:] = ids[:, 1:].where(counted[:, :-1], labels[:, 1:])
            rows.append((ids[0], labels[0]))
        if not any((told != -100).any() for _, told in rows):
            raise ValueError(
                f"nothing in held-out source '{path}' counts with loss_on '{loss_on}' in blocks of {length} tokens: "
                "raise heldout_length."
            )
        ids = pad_sequence([one for one, _ in rows], batch_first=True)
        labels = pad_sequence([one for _, one in rows], batch_first=True, padding_value=-100)
        found[name] = ids, labels
    return found
