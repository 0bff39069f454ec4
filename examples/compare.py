"""Three questions about a nest of the reasoner, each answered by runs that differ in one thing:

    alone     are members that were trained together as good as members distilled alone, with the same tokens?
    uniform   does the learned router beat shrinking all axes by the same share, at the same budgets and tokens?
    depth     is it better to keep fewer units or fewer layers, at equal parameters?

Start from the nest that `nestling demo` made:

    python examples/compare.py --nest runs/demo --data runs/demo.data --to runs/compare

Each run is kept under --to and not repeated; the tables go to docs/results.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))  # for benchmarks.results, which is not part of the package

from benchmarks.results import hardware, markdown, put
from nestling import hf
from nestling.build import evaluate_folder
from nestling.data import padded_batches, read_documents
from nestling.demo import PROBLEMS, demo_evaluation, reasoner
from nestling.nest import FULL, Nest, open_nest
from nestling.score import score_layers
from nestling.sort import load_orders, sort
from nestling.train import TrainSettings, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nest", type=Path, default=Path("runs/demo"))
    parser.add_argument("--data", type=Path, default=Path("runs/demo.data"))
    parser.add_argument("--to", type=Path, default=Path("runs/compare"))
    parser.add_argument("--only", choices=("alone", "uniform", "depth", "tables"), default=None)
    args = parser.parse_args()
    joint = open_nest(args.nest)
    told = {k: tuple(v) if isinstance(v, list) else v for k, v in joint.recipe["train"].items()}
    base = TrainSettings(**{**told, "data": str(args.data / "train.jsonl")})
    questions = {"alone": alone, "uniform": uniform, "depth": depth}
    for name, ask in questions.items():
        if args.only in (None, name):
            ask(args, joint, base)
    if args.only in (None, "tables"):
        tables(args, joint)


def alone(args: argparse.Namespace, joint: Nest, base: TrainSettings) -> None:
    """Each member by itself: its sizes, the tokens that it saw as a slice, the same recipe."""
    for member in joint.members.values():
        if member.name == FULL:
            continue
        sizes = ",".join(f"{axis}={n}" for axis, n in member.sizes.items())
        stages = tuple(_stage(stage, weights="0/1") for stage in base.stage[1:])  # the first is the router's
        settings = _explicit(base, (f"{member.name}={sizes}",), stages)
        _run(args, f"alone-{member.name}", settings, joint)


def uniform(args: argparse.Namespace, joint: Nest, base: TrainSettings) -> None:
    """The same budgets and tokens, every axis shrunk by the same share; what the router's stage cost goes to the
    members."""
    router, first, *rest = base.stage
    tokens = sum(float(dict(part.split("=") for part in stage.split(","))["tokens"]) for stage in (router, first))
    stages = (_stage(first, tokens=f"{tokens:.0f}"), *rest)
    settings = replace(
        _explicit(base, base.member, stages), router="uniform", router_axes=base.router_axes,
        router_floor=base.router_floor, router_choices=64,
    )  # fmt: skip
    _run(args, "uniform", settings, joint)


def depth(args: argparse.Namespace, joint: Nest, base: TrainSettings) -> None:
    """A member with fewer layers and one with fewer units, at equal parameters, in one run."""
    layout, whole = joint.layout, joint.layout.count()
    order = _layer_order(args)
    sizes = range(1, len(layout.kinds))
    kept = {n: layout.resize({}, sorted(order[:n])).count() for n in sizes}
    num_layers = min(kept, key=lambda n: abs(kept[n] / whole - 0.6))
    members = (f"depth=layer={num_layers}", f"width=total:{kept[num_layers]}")
    settings = replace(base, member=members, stage=tuple(_stage(one, weights="2/1/1") for one in base.stage))
    _run(args, "depth", settings, joint, layer_order=order)


def tables(args: argparse.Namespace, joint: Nest) -> None:
    """What was found, as Markdown, into docs/results.md."""
    made = f"`python examples/compare.py`, {PROBLEMS} held-out problems, seed 0; {hardware()}"
    rows = [["member", "active parameters", "trained together", "alone, same tokens", "difference"]]
    for member in joint.members.values():
        found = args.to / f"alone-{member.name}.json"
        if member.name != FULL and found.exists():
            single = json.loads(found.read_text())[member.name]["accuracy"]
            both = member.results["accuracy"]
            active = f"{joint.cost(member).active_parameters:,}"
            rows.append([member.name, active, _share(both), _share(single), f"{100 * (both - single):+.1f}"])
    if len(rows) > 1:
        put("alone", f"Members trained together against members distilled alone. {made}\n\n{markdown(rows)}")
    if (args.to / "uniform.json").exists():
        other, theirs = json.loads((args.to / "uniform.json").read_text()), open_nest(args.to / "uniform")
        rows = [["member", "learned router: active", "solved", "KL", "uniform shrinking: active", "solved", "KL"]]
        for member in joint.members.values():
            rows.append([member.name])
            for nest, found in ((joint, member.results), (theirs, other[member.name])):
                active = nest.cost(nest.member(member.name)).active_parameters
                rows[-1] += [f"{active:,}", _share(found["accuracy"]), f"{found['kl']:.4f}"]
        put("uniform", f"The learned router against uniform shrinking. {made}\n\n{markdown(rows)}")
    if (args.to / "depth.json").exists():
        nest, found = open_nest(args.to / "depth"), json.loads((args.to / "depth.json").read_text())
        parent = found[FULL]["accuracy"]
        rows = [["member", "keeps", "parameters", "active parameters", "solved", "of the full member", "KL"]]
        for member in nest.members.values():
            cost = nest.cost(member)
            keeps = ", ".join(f"{axis} {n}" for axis, n in member.sizes.items()) or "everything"
            one = found[member.name]
            rows.append([member.name, keeps, f"{cost.parameters:,}", f"{cost.active_parameters:,}",
                         _share(one["accuracy"]), _share(one["accuracy"] / parent), f"{one['kl']:.4f}"])  # fmt: skip
        put("depth", f"Width against depth at equal parameters. {made}\n\n{markdown(rows)}")


def _run(
    args: argparse.Namespace, name: str, settings: TrainSettings, joint: Nest, *, layer_order: list[int] | None = None
) -> None:
    """Train one variant from the sorted parent and evaluate it."""
    source = args.to / f"sorted-{name}"
    if not source.exists():
        found = load_orders(joint.folder)
        if layer_order is not None:
            found["layer"] = torch.tensor(layer_order)
        sort(reasoner(), found, source)
    if not (args.to / name).exists():
        print(f"== {name}", flush=True)
        train(settings, source, args.to / name)
    result = args.to / f"{name}.json"
    if not result.exists():
        nest, text = evaluate_folder(demo_evaluation(args.data), args.to / name, parent=reasoner())
        print(text, flush=True)
        result.write_text(json.dumps({member: one.results for member, one in nest.members.items()}, indent=2) + "\n")


def _layer_order(args: argparse.Namespace) -> list[int]:
    """Layers of the parent by leave-one-out, most important first."""
    saved = args.to / "layer_order.json"
    if not saved.exists():
        model, tokenizer = hf.load_model(reasoner()), hf.load_tokenizer(reasoner())
        documents = list(itertools.islice(read_documents(args.data / "train.jsonl", tokenizer), 64))
        batches = list(padded_batches(documents, batch=32, length=192, pad_id=int(str(tokenizer.pad_token_id or 0))))
        args.to.mkdir(parents=True, exist_ok=True)
        saved.write_text(json.dumps([int(i) for i in score_layers(model, batches).order]))
    return json.loads(saved.read_text())


def _explicit(base: TrainSettings, members: tuple[str, ...], stages: tuple[str, ...]) -> TrainSettings:
    """The base recipe without a router."""
    plain = {name: f.default for name, f in TrainSettings.__dataclass_fields__.items() if name.startswith("router_")}
    return replace(base, **plain, router="learned", member=members, stage=stages)


def _stage(stage: str, **changed: object) -> str:
    """A stage of the base recipe with other values."""
    parts: dict[str, object] = {key: value for key, _, value in (part.partition("=") for part in stage.split(","))}
    return ",".join(f"{key}={value}" for key, value in (parts | changed).items())


def _share(value: float) -> str:
    return f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
