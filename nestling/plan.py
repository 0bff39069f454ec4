"""What a training run is to do: its stages, its members, and the sizes that a router may choose from."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from nestling import hf
from nestling.budget import Budget, check_reachable, choices, parse_budget
from nestling.nest import ALIASES, FULL, Member, Nest, check_sizes, parse_sizes

KERNEL = 8  # the grouped kernel of fused experts reads 16 bytes at a time: eight numbers in bf16


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Settings of `nestling train`."""

    data: str  # JSONL files with weights: "a.jsonl=0.7,b.jsonl=0.3"
    member: tuple[str, ...]  # NAME=BUDGET (active:0.45, total:2e9, bytes:16GiB,...) or NAME=SIZES (hidden=96,effn=64)
    stage: tuple[str, ...] = (
        "tokens=4e6,length=1024,batch=8,lr=1e-4",
    )  # one after the other; weights=1/1/1 full first
    pack: bool = True  # documents end to end in full rows; without: one a row, padded
    loss_on: str = "all"  # "all" tokens, or "completion": replies only, for a parent that was never taught its prompts
    members_per_batch: int = 0  # members trained under one teacher pass; 0: all of them, else drawn by their weights
    accumulate: int = 1  # batches in one optimizer step
    router: str = "learned"  # "learned", or "uniform": every axis shrinks by the same share
    router_share: float = 0.25  # share of all steps spent in the soft phase
    router_axes: str = ""  # axis=grain,... that the router may shrink; empty: every width axis
    router_floor: float = 0.25  # smallest share of an axis that the router may choose
    router_choices: int = 8  # sizes on offer per axis, at most
    router_width: int = 128  # neurons in the router's hidden layer
    router_lr: float = 1e-2  # learning rate of the router
    router_weights: float = 0.1  # share of the learning rate that the weights get in the soft phase; 0: they wait
    router_lambda: float = 1.0  # weight of the budget term
    router_hard: float = 0.004  # share of soft steps that run a hard straight-through sample instead
    router_tries: int = 16  # most probable sizes of a budget, tried as slices before one is frozen
    tolerance: float = 0.03  # how far below its budget a frozen member may lie
    warmup: int = 60  # steps
    clip: float = 1.0  # largest gradient norm
    weight_decay: float = 0.0  # of AdamW
    beta2: float = 0.98  # of AdamW; beta1 is 0.9
    dtype: str = "fp32"  # arithmetic: fp32, or bf16 under autocast; weights are fp32 while they train
    device: str = "cpu"  # cpu or cuda
    seed: int = 0  # of data order, router and draws
    checkpoint: int = 200  # steps between two checkpoints
    print_seconds: float = 15.0  # between two lines on the terminal

    def __post_init__(self) -> None:
        if self.router not in {"learned", "uniform"}:
            raise ValueError(f"router '{self.router}' is not known: expected 'learned' or 'uniform'.")
        if self.loss_on not in {"all", "completion"}:
            raise ValueError(f"loss_on '{self.loss_on}' is not known: expected 'all' or 'completion'.")
        if self.dtype not in {"fp32", "bf16"}:
            raise ValueError(f"dtype '{self.dtype}' is not known: expected fp32 or bf16.")
        if not self.clip > 0:
            raise ValueError(f"clip {self.clip} is not above 0; a large number clips nothing.")
        if self.warmup < 0 or self.router_lambda < 0 or not self.router_lr > 0:
            raise ValueError("warmup and router_lambda must be at least 0, router_lr above 0.")
        if self.router_tries < 1:
            raise ValueError("router_tries must be at least 1.")
        if not 0 <= self.router_hard <= 1 or not 0 <= self.tolerance < 1:
            raise ValueError("router_hard must lie between 0 and 1, tolerance from 0 to below 1.")
        if not 0 < self.router_share < 1:
            raise ValueError(f"router_share {self.router_share} is not between 0 and 1.")
        if not 0 <= self.router_weights <= 1:
            raise ValueError(f"router_weights {self.router_weights} is not between 0 and 1.")
        if self.accumulate < 1 or self.members_per_batch < 0 or self.checkpoint < 1:
            raise ValueError("accumulate and checkpoint must be at least 1, members_per_batch at least 0.")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A part of a run with its own context length, learning rate and weights of the members."""

    steps: int
    length: int  # tokens in one sequence
    batch: int  # sequences of one rank in one batch
    lr: float  # peak learning rate; falls to a tenth along a cosine
    weights: Mapping[str, float]  # member -> its share of the loss, or of the draws; they add up to one


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do, all of it checked."""

    members: dict[str, Member]  # those with sizes of their own
    budgets: dict[str, Budget]  # those whose sizes the router, or uniform shrinking, finds
    stages: list[Stage]
    options: dict[str, tuple[int, ...]]  # axis -> sizes on offer, the full one first
    soft_steps: int  # steps of the router's phase

    @property
    def num_steps(self) -> int:
        """Optimizer steps of all stages."""
        return sum(stage.steps for stage in self.stages)


def make_plan(settings: TrainSettings, nest: Nest, *, world: int = 1) -> Plan:
    """What these settings ask for on this nest; an error for all that cannot be met or would have no effect."""
    members, asked = plan_members(settings.member, nest)
    names = [FULL, *(text.partition("=")[0] for text in settings.member)]
    stages = parse_stages(settings.stage, names, blocks=world * settings.accumulate)
    options = router_options(
        nest, asked.values(), axes=settings.router_axes, floor=settings.router_floor, most=settings.router_choices
    )
    is_learned = bool(asked) and settings.router == "learned"
    soft_steps = count_soft_steps(stages, settings.router_share, asked) if is_learned else 0
    check_effect(settings, num_budgets=len(asked), is_soft=is_learned)
    return Plan(members=members, budgets=asked, stages=stages, options=options, soft_steps=soft_steps)


def parse_stages(texts: Sequence[str], names: Sequence[str], *, blocks: int) -> list[Stage]:
    """Stages from texts such as "tokens=4e6,length=1024,batch=8,lr=1e-4,weights=0.5/0.3/0.2".

    tokens: places in the batches, length x batch a step, padding included.

    names: the members, the full one first, in the order of the weights. blocks: batches in one optimizer step, all
    ranks.
    """
    stages = []
    for text in texts:
        given = {key: value for key, _, value in (part.partition("=") for part in text.split(","))}
        known = {"tokens", "length", "batch", "lr", "weights"}
        if (
            given.keys() - known
            or len(given) < len(text.split(","))
            or not {"tokens", "length", "batch", "lr"} <= given.keys()
        ):
            raise ValueError(
                f"cannot read stage '{text}': expected tokens=,length=,batch=,lr= and perhaps weights=a/b/c."
            )
        try:
            tokens, length, batch = (_whole(float(given[key])) for key in ("tokens", "length", "batch"))
            lr = float(given["lr"])
            weights = [float(w) for w in given["weights"].split("/")] if "weights" in given else [1.0] * len(names)
        except (ValueError, OverflowError):
            raise ValueError(f"stage '{text}' holds something that is not a number, or not a whole one.") from None
        if len(weights) != len(names):
            raise ValueError(f"stage '{text}' has {len(weights)} weights; expected one for each of {', '.join(names)}.")
        if not (min(weights) >= 0 and 0 < sum(weights) < math.inf):
            raise ValueError(f"stage '{text}': expected weights of at least 0 that are not all 0.")
        steps = tokens // (length * batch * blocks) if min(length, batch) > 0 else 0
        if steps < 1:
            raise ValueError(f"stage '{text}' makes no step: one step takes {length * batch * blocks} tokens.")
        if not 0 < lr < math.inf:
            raise ValueError(f"stage '{text}': lr is {lr}, expected a number above 0.")
        total = sum(weights)
        shares = {name: weight / total for name, weight in zip(names, weights, strict=True)}
        stages.append(Stage(steps=steps, length=length, batch=batch, lr=lr, weights=shares))
    idle = [name for name in names[1:] if not any(stage.weights[name] for stage in stages)]
    if idle:
        raise ValueError(
            f"member {', '.join(idle)} has weight 0 in every stage and would not be trained: leave it out."
        )
    return stages


def _whole(number: float) -> int:
    if not number.is_integer():
        raise ValueError(number)
    return int(number)


def count_soft_steps(stages: Sequence[Stage], share: float, names: Collection[str]) -> int:
    """Steps of the router's phase; an error if it could not learn a budget, or if no step were left for the members.

    share: of all steps. names: the members that the router chooses for.
    """
    total = sum(stage.steps for stage in stages)
    steps = max(1, round(share * total))
    if steps >= total:
        raise ValueError(
            f"the router takes {steps} of the run's {total} steps, and none is left for the members: give the "
            "stages more tokens, or lower router_share."
        )
    starts = [sum(stage.steps for stage in stages[:i]) for i in range(len(stages))]
    soft = [stage for stage, start in zip(stages, starts, strict=True) if start < steps]
    for stage in soft:
        if not any(stage.weights[name] for name in names):
            raise ValueError(
                f"no budget has a weight in a stage that the router learns in (the first {steps} steps): give one to "
                f"{' or '.join(names)} there."
            )
    for name in names:
        if not any(stage.weights[name] for stage in soft):
            raise ValueError(
                f"member '{name}' has weight 0 while the router learns (the first {steps} steps), so its sizes would "
                "be drawn at random: give it a weight there, or sizes of its own."
            )
    return steps


def learning_rate(step: int, stage: Stage, first: int, *, warmup: int, since: int = 0) -> float:
    """Linear warm-up from step `since` on, and within each stage a cosine from its lr to a tenth of it.

    since: the run's first step, or the first that trains slices: what the weights did under the router's masks, if
    they moved at all, was another problem.
    """
    through = (step - first) / max(1, stage.steps - 1)
    cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * through)) / 2
    return stage.lr * cosine * min(1.0, (step - since + 1) / max(1, warmup))


def plan_members(texts: tuple[str, ...], nest: Nest) -> tuple[dict[str, Member], dict[str, Budget]]:
    """What each member asks for: explicit sizes, or a budget for the router to meet."""
    sized: dict[str, Member] = {}
    asked: dict[str, Budget] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        if not equals or not name:
            raise ValueError(
                f"cannot read member '{text}': expected NAME=BUDGET or NAME=SIZES, such as 45=active:0.45."
            )
        if name in {FULL, *ALIASES}:
            raise ValueError(f"member '{name}' is the full model, which is always trained: choose another name.")
        if name in sized or name in asked:
            raise ValueError(f"member '{name}' is given twice.")
        if ":" in rest:
            asked[name] = parse_budget(rest, nest.layout, nest.config)
        else:
            sizes = check_sizes(nest.layout, nest.config, parse_sizes(rest), who=f"member '{name}'")
            crooked = {a: n for a, n in sizes.items() if a in ("hidden", "effn") and n % KERNEL}
            if crooked and "expert" in nest.layout.sizes:
                given = ", ".join(f"{a}={n}" for a, n in crooked.items())
                raise ValueError(
                    f"member '{name}': {given} is not a multiple of {KERNEL}, "
                    "and the kernel of fused experts reads 16 bytes at a time."
                )
            if not _is_taken(nest, sizes):
                raise ValueError(
                    f"member '{name}': the stock config refuses {rest}. A step of 'hidden' that it takes beside any "
                    f"number of heads: {default_grains(nest)['hidden']}."
                )
            sized[name] = Member(name=name, sizes=sizes, budget=rest)
    return sized, asked


def default_grains(nest: Nest) -> dict[str, int]:
    """Steps for every width axis: 1 for heads and experts, else a power of two near an eighth of the axis, up to 16."""
    refused = nest.layout.arch.refuse(nest.config)
    counted = {"q", "mamba", "expert"}
    least: dict[str, int] = {"hidden": KERNEL, "effn": KERNEL} if "expert" in nest.layout.sizes else {}
    grains = {
        axis: 1 if axis in counted else max(least.get(axis, 1), min(16, 2 ** int(math.log2(max(1, size // 8)))))
        for axis in nest.layout.elastic()
        if (size := nest.layout.sizes[axis]) and axis != "layer" and axis not in refused
    }
    heads = _head_counts(nest)
    while not all(_is_taken(nest, {"hidden": grains["hidden"], "q": n}) for n in heads):
        grains["hidden"] += 1
    return grains


def router_options(
    nest: Nest, budgets: Collection[Budget], *, axes: str, floor: float, most: int
) -> dict[str, tuple[int, ...]]:
    """The sizes on offer for every axis that may shrink; an error if a budget lies beyond them.

    axes: "axis=grain,..."; empty for every width axis. floor: smallest share of an axis. most: sizes per axis at most.
    """
    if not budgets:
        return {}
    if not 0 < floor <= 1 or most < 2:
        raise ValueError(f"router_floor is {floor} (expected above 0, up to 1), router_choices {most} (at least 2).")
    known = default_grains(nest)
    grains = parse_sizes(axes) if axes else known
    wrong = [axis for axis in grains if axis not in known or grains[axis] < 1]
    if wrong:
        steps = ", ".join(f"{axis}={step}" for axis, step in known.items())
        raise ValueError(
            f"the router cannot shrink {', '.join(wrong)} so. Axes and the steps that they have here: {steps}."
        )
    options = choices(nest.layout, nest.config, grains=grains, floor=floor, most=most)
    if "q" in options:
        options["q"] = tuple(n for n in options["q"] if n in _head_counts(nest))
    still = grains.keys() - options.keys()
    if axes and still:
        raise ValueError(
            f"router_axes has no size of {', '.join(sorted(still))} between router_floor and the full one."
        )
    for width, heads in itertools.product(options.get("hidden", ()), options.get("q", ())):
        if not _is_taken(nest, {"hidden": width, "q": heads}):
            raise ValueError(
                f"router_axes hidden={grains['hidden']} offers hidden {width} beside q {heads}, which the stock config "
                f"refuses. A step that it takes: hidden={known['hidden']}."
            )
    for budget in budgets:
        check_reachable(budget, nest.layout, options)
    return options


def _head_counts(nest: Nest) -> list[int]:
    """The sizes of `q` that the stock config takes at the full width."""
    return [n for n in range(1, nest.layout.sizes.get("q", 0) + 1) if _is_taken(nest, {"q": n})]


def _is_taken(nest: Nest, sizes: Mapping[str, int]) -> bool:
    """Whether the stock config takes these sizes: Llama's wants a width that is a multiple of its number of heads."""
    small = nest.layout.arch.resize(nest.config, {**nest.layout.sizes, **sizes})
    return hf.takes_config({key: small[key] for key in ("model_type", *nest.layout.arch.config) if key in small})


def check_effect(settings: TrainSettings, *, num_budgets: int, is_soft: bool) -> None:
    """A setting that nothing would read is an error."""
    bounds = {"router_axes", "router_floor", "router_choices"}  # these also bound the uniform baseline
    changed = {
        name
        for name, one in TrainSettings.__dataclass_fields__.items()
        if name.startswith(("router_", "tolerance")) and getattr(settings, name) != one.default
    }
    if not num_budgets and (changed or settings.router != "learned"):
        raise ValueError(f"{sorted(changed) or 'router'} would have no effect: every member has explicit sizes.")
    if not is_soft and changed - bounds:
        raise ValueError(f"{', '.join(sorted(changed - bounds))} would have no effect with router 'uniform'.")
    if settings.members_per_batch > len(settings.member):
        raise ValueError(
            f"members_per_batch is {settings.members_per_batch}, the nest has {len(settings.member) + 1} members: 0 "
            "trains all of them on every batch, weighted."
        )
