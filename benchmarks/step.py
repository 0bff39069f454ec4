"""What a member's training step costs: slices against the full member and against masking, in one process.

Ratios within one run: each round times every case once, in turn; the median over rounds is kept. Run with `make bench`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.results import hardware, markdown, put
from nestling import hf
from nestling.budget import choices, parse_budget, uniform
from nestling.demo import reasoner
from nestling.distill import forward_kl
from nestling.elastic import ElasticModel, Run
from nestling.nest import open_nest

SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "tie_word_embeddings": True,
}  # fmt: skip
SHARES = (1.0, 0.70, 0.45, 0.25)
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model at fixed inputs."""

    name: str
    elastic: ElasticModel
    ids: Tensor  # [batch, time]
    target: Tensor  # [batch, time, vocab]  the teacher's logits
    kind: str  # of budget that the shares are taken of
    grains: dict[str, int]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=REPEATS)
    parser.add_argument("--no-write", action="store_true", help="print only, leave docs/results.md as it is")
    args = parser.parse_args()
    texts = []
    for case in (_smollm2(), _reasoner()):
        table = measure(case, args.rounds)
        title = f"{case.name}, {case.ids.shape[0]} x {case.ids.shape[1]} tokens a step, median of {args.rounds} rounds"
        texts.append(f"{title}; {hardware()}\n\n{markdown(table)}")
        print(texts[-1] + "\n", flush=True)
    if not args.no_write:
        put("step", "\n\n".join(texts))


def measure(case: Case, rounds: int) -> list[list[str]]:
    """Seconds of forward and backward pass of each member, sliced and masked, as shares of the full member's."""
    layout = case.elastic.layout
    options = choices(layout, case.elastic.config, grains=case.grains, floor=0.1, most=64)
    runs: dict[str, Run] = {}
    shares: dict[str, float] = {}
    for share in SHARES:
        budget = parse_budget(f"{case.kind}:{share}", layout, case.elastic.config)
        sizes = uniform(budget, layout, options)
        shares[f"{share:.0%}"] = layout.count(layout.sizes | sizes, active=True) / layout.count(active=True)
        runs[f"{share:.0%}"] = Run(sizes={a: n for a, n in sizes.items() if n != layout.sizes[a]})
    masked = {
        name: Run(is_soft=True, stairs={a: (torch.arange(layout.sizes[a]) < n).float() for a, n in run.sizes.items()})
        for name, run in runs.items()
    }
    calls = {(name, "slice"): run for name, run in runs.items()} | {(name, "mask"): run for name, run in masked.items()}
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for i in range(rounds + 1):
        for key, run in calls.items():
            spent = _timed(lambda run=run: _step(case, run))
            if i:  # the first round builds skeletons
                seconds[key].append(spent)
    full = statistics.median(seconds["100%", "slice"])
    rows = [["member", "active parameters", "step, sliced", "step, masked", "sliced / masked"]]
    for name in runs:
        sliced, mask = (statistics.median(seconds[name, how]) for how in ("slice", "mask"))
        rows.append([name, f"{shares[name]:.2f}", f"{sliced / full:.2f}", f"{mask / full:.2f}", f"{sliced / mask:.2f}"])
    rows.append(["(full member)", "", f"{full * 1000:.0f} ms", "", ""])
    return rows


def _step(case: Case, run: Run) -> None:
    logits = case.elastic(run, input_ids=case.ids, use_cache=False).logits
    forward_kl(logits, case.target).backward()
    case.elastic.zero_grad(set_to_none=True)


def _timed(call: Callable[[], None]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _smollm2() -> Case:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(SMOLLM2["vocab_size"], (4, 256), generator=generator)
    model = hf.new_model(SMOLLM2, seed=0)
    with torch.no_grad():
        target = model(input_ids=ids, use_cache=False).logits
    elastic = ElasticModel(model).train()
    return Case(
        name="SmolLM2-135M shapes, random weights, fp32, shares of the parameters inside the layers",
        elastic=elastic, ids=ids, target=target, kind="inner", grains={"hidden": 36, "ffn": 16, "q": 1},
    )  # fmt: skip


def _reasoner() -> Case:
    nest = open_nest(reasoner())
    model = hf.load_model(reasoner())
    ids = torch.randint(nest.layout.sizes["vocab"], (24, 192), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        target = model(input_ids=ids, use_cache=False).logits
    grains = {"hidden": 8, "effn": 8, "sffn": 8, "expert": 1, "mamba": 1, "q": 1}
    return Case(
        name="the reasoner, fp32, shares of the active parameters",
        elastic=ElasticModel(model).train(), ids=ids, target=target, kind="active", grains=grains,
    )  # fmt: skip


if __name__ == "__main__":
    main()
