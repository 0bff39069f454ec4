"""The laws catch wrong tables with right shapes.

A wrong table that gives every tensor its right shape loads, runs and counts; only a law tells it from the right one.
Each mutant here changes one thing in one table, such as `q kv head` for `kv q head`, and some law must fail for it,
while every law holds for the original. Sizes are equal where the mutant needs them to be. The laws are in
test_laws.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import test_laws as laws
import tiny
from transformers import PreTrainedModel

from nestling import hf
from nestling.arch import ARCHITECTURES, Architecture, Elastic
from nestling.arch.nemotron_h import INNER, STATES
from nestling.axes import dims

IN_PROJ = f"{INNER} + {INNER} + {STATES} + {STATES} + group mamba, hidden"


@dataclass(frozen=True)
class Mutant:
    """One wrong table. rows: end of a parameter's name -> the wrong shape, in every spelling that has it."""

    name: str
    base: str  # variant of tiny.py
    changes: tuple[tuple[str, Any], ...] = ()  # to the variant's config, to make sizes equal
    rows: tuple[tuple[str, str], ...] = ()
    other: Callable[[Architecture], Architecture] = lambda arch: arch
    equal: tuple[str, ...] = ()  # axes that must have one size for the wrong shape to be right

    def table(self, arch: Architecture) -> Architecture:
        """The mutated architecture."""

        def mutate(rows: Callable) -> Callable:
            def mutated(config: dict) -> dict:
                return {
                    kind: {n: next((s for end, s in self.rows if n.endswith(end)), shape) for n, shape in named.items()}
                    for kind, named in rows(config).items()
                }

            return mutated

        return self.other(replace(arch, rows={spelling: mutate(rows) for spelling, rows in arch.rows.items()}))


def _elastic(**rules: Elastic) -> Callable[[Architecture], Architecture]:
    return lambda arch: replace(arch, elastic=arch.elastic | rules)


def _config(**products: str) -> Callable[[Architecture], Architecture]:
    return lambda arch: replace(arch, config=arch.config | products)


def _stale_kinds(arch: Architecture) -> Architecture:
    """Depth cuts that forget the list of layer kinds."""
    return replace(arch, keep_layers=lambda config, layers: config | {
        key: config[key][: len(layers)] for key in ("layers_block_type", "layer_types") if config.get(key)
    } | {"num_hidden_layers": len(layers)})  # fmt: skip


SQUARE = (("intermediate_size", 48),)
MUTANTS = (
    # attention
    Mutant("query heads outside their group", "llama", rows=(("q_proj.weight", "q kv head, hidden"),)),
    Mutant("query heads outside their group everywhere", "llama",
           rows=(("q_proj.weight", "q kv head, hidden"), ("o_proj.weight", "hidden, q kv head"))),
    Mutant("head outermost in queries", "mistral", rows=(("q_proj.weight", "head q kv, hidden"),)),
    Mutant("head between kv and q in the output", "qwen3", rows=(("o_proj.weight", "hidden, kv head q"),)),
    Mutant("head outside kv in keys", "mixtral", rows=(("k_proj.weight", "head kv, hidden"),)),
    Mutant("head outside kv in a key bias", "qwen2", rows=(("k_proj.bias", "head kv"),)),
    Mutant("query bias in another order", "qwen2", rows=(("q_proj.bias", "q kv head"),)),
    Mutant("keys cut like queries", "llama", (("num_attention_heads", 8), ("num_key_value_heads", 8)),
           rows=(("k_proj.weight", "q head kv, hidden"),)),
    # feed-forward
    Mutant("down projection transposed", "llama", SQUARE, rows=(("mlp.down_proj.weight", "ffn, hidden"),),
           equal=("hidden", "ffn")),
    Mutant("gate projection transposed", "qwen3", SQUARE, rows=(("mlp.gate_proj.weight", "hidden, ffn"),),
           equal=("hidden", "ffn")),
    Mutant("up projection's bias forgotten", "llama_bias", rows=(("up_proj.bias", "56"),)),
    Mutant("norm's weight forgotten", "qwen2", rows=(("model.norm.weight", "48"),)),
    Mutant("embedding and vocabulary exchanged", "llama", (("hidden_size", tiny.VOCAB),),
           rows=(("embed_tokens.weight", "hidden, vocab"),), equal=("hidden", "vocab")),
    # experts
    Mutant("w1 transposed", "mixtral", SQUARE,
           rows=(("w1.weight", "hidden, effn"), ("gate_up_proj", "expert, hidden + effn, effn")),
           equal=("hidden", "effn")),
    Mutant("w2 transposed on disk only", "mixtral", SQUARE, rows=(("w2.weight", "effn, hidden"),),
           equal=("hidden", "effn")),
    Mutant("gate and up interleaved", "qwen3_moe", rows=(("gate_up_proj", "expert, effn 2, hidden"),)),
    Mutant("gate and up as one block of half the units", "qwen3_moe",
           rows=(("gate_up_proj", "expert, 24 + effn, hidden"),)),
    Mutant("experts and their units exchanged", "nemotron_h", (("n_routed_experts", 8), ("moe_intermediate_size", 8)),
           rows=(("experts.up_proj", "effn, expert, hidden"),), equal=("expert", "effn")),
    Mutant("correction bias not cut", "nemotron_h", rows=(("e_score_correction_bias", "6"),)),
    Mutant("router rows not cut", "mixtral", rows=(("gate.weight", "5, hidden"),)),
    Mutant("shared expert cut as a routed one", "nemotron_h", (("moe_shared_expert_intermediate_size", 24),),
           rows=(("shared_experts.up_proj.weight", "effn, hidden"),
                 ("shared_experts.down_proj.weight", "hidden, effn")),
           equal=("sffn", "effn")),
    Mutant("latent experts read the stream", "nemotron_h_latent", (("moe_latent_size", 40),),
           rows=(("experts.up_proj", "expert, effn, hidden"), ("experts.{expert}.up_proj.weight", "effn, hidden")),
           equal=("hidden", "latent")),
    # Mamba
    Mutant("heads outside groups", "nemotron_h", rows=(("A_log", "mamba group"),)),
    Mutant("dt bias with heads outside groups", "nemotron_h", rows=(("dt_bias", "mamba group"),)),
    Mutant("channels outermost in the norm", "nemotron_h", rows=(("mixer.norm.weight", "mdim group mamba"),)),
    Mutant("channels outside heads in the output", "nemotron_h",
           rows=(("out_proj.weight", "hidden, group mdim mamba"),)),
    Mutant("B and C before x in the convolution", "nemotron_h",
           rows=(("conv1d.weight", f"{STATES} + {STATES} + {INNER}, 1, conv"),)),
    Mutant("B and C before x in the convolution's bias", "nemotron_h",
           rows=(("conv1d.bias", f"{STATES} + {INNER} + {STATES}"),)),
    Mutant("dt first in the input projection", "nemotron_h",
           rows=(("in_proj.weight", f"group mamba + {INNER} + {INNER} + {STATES} + {STATES}, hidden"),)),
    Mutant("B and C between z and x", "nemotron_h",
           rows=(("in_proj.weight", f"{INNER} + {STATES} + {STATES} + {INNER} + group mamba, hidden"),)),
    Mutant("B and C cut as heads", "nemotron_h", (("ssm_state_size", 15),),
           rows=(("in_proj.weight", f"{INNER} + {INNER} + {INNER} + {INNER} + group mamba, hidden"),)),
    Mutant("state outside groups in B and C", "nemotron_h",
           rows=(("in_proj.weight", IN_PROJ.replace("group state", "state group")),)),
    Mutant("D not cut", "nemotron_h", rows=(("mixer.D", "6"),)),
    # the other tables
    Mutant("width ordered in every layer anew", "llama", other=_elastic(hidden=Elastic(within=("layer",)))),
    Mutant("shared experts ordered within experts", "nemotron_h",
           other=_elastic(sffn=Elastic(within=("layer", "expert")))),
    Mutant("two config keys exchanged", "qwen3_moe", (("intermediate_size", 24),),
           other=_config(intermediate_size="effn", moe_intermediate_size="ffn"), equal=("ffn", "effn")),
    Mutant("shared and routed widths exchanged", "nemotron_h", (("moe_shared_expert_intermediate_size", 24),),
           other=_config(moe_intermediate_size="sffn", moe_shared_expert_intermediate_size="effn"),
           equal=("sffn", "effn")),
    Mutant("gated norm not corrected", "nemotron_h",
           other=lambda arch: replace(arch, norms={
               p: a for p, a in arch.norms.items() if not p.endswith("mixer.norm")})),
    Mutant("last norm not corrected", "llama",
           other=lambda arch: replace(arch, norms={p: a for p, a in arch.norms.items() if p != "model.norm"})),
    Mutant("stale layer kinds", "nemotron_h", other=_stale_kinds),
    Mutant("stale sliding layers", "qwen2_sliding", other=_stale_kinds),
    Mutant("keys without values in the cache", "llama",
           other=lambda arch: replace(arch, state={k: {"kv": "kv head"} for k in arch.state})),
    Mutant("B without C in the convolution's state", "nemotron_h",
           other=lambda arch: replace(arch, state=arch.state | {
               "linear_attention": {"ssm": f"{INNER}, state", "conv": f"{INNER} + {STATES}, conv"}})),
)  # fmt: skip


@cache
def _base(name: str, changes: tuple) -> tuple[PreTrainedModel, Architecture, dict]:
    model = tiny.model(name, **dict(changes))
    arch, complete = hf.architecture_of(model)
    return model, arch, complete


def caught_by(mutant: Mutant, arch: Architecture, folder: Path) -> str:
    """The first law that fails for this table of the mutant's model; empty if all of them hold."""
    model, _, complete = _base(mutant.base, mutant.changes)
    axes = tuple(laws.width_axes(arch, complete))
    whole = (*axes, "kv", *(["group"] if "group" in arch.sizes(complete) else []))
    num_layers = len(model.model.layers)

    def cover() -> None:
        laws.check_cover(arch, complete, {n: tuple(t.shape) for n, t in hf.state_of(model).items()}, "memory")

    def sort() -> None:
        for axis in axes:
            laws.check_sort(arch, complete, model, (axis,), seed=1)

    def cut() -> None:
        laws.check_by_hand(arch, complete, model, axes, seed=1)
        laws.check_by_hand(arch, complete, model, whole, seed=2)

    def depth() -> None:
        for left_out in range(num_layers):
            laws.check_depth(arch, complete, model, [i for i in range(num_layers) if i != left_out])

    def files() -> None:
        if not (folder / "parent").exists():
            model.save_pretrained(folder / "parent")
        laws.check_files(folder / "parent", folder / arch.model_type / str(id(arch)), num_members=1)

    def masked() -> None:
        fresh = tiny.model(mutant.base, **dict(mutant.changes))
        laws.check_masked(fresh, tiny.random_sizes(arch.layout(complete, "memory"), laws.generator(7), axes))

    def count() -> None:
        laws.check_count(arch, complete, tiny.random_sizes(arch.layout(complete, "memory"), laws.generator(3), axes))

    def caches() -> None:
        laws.check_caches(arch, complete, model)

    for law in (cover, count, sort, cut, depth, caches, masked, files):
        try:
            law()
        except (AssertionError, ValueError, RuntimeError, KeyError, IndexError) as error:
            return f"{law.__name__}: {type(error).__name__}"
    return ""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_a_wrong_table_with_right_shapes_is_caught_by_a_law(mutant, tmp_path, monkeypatch, record_property):
    _, arch, complete = _base(mutant.base, mutant.changes)
    wrong = mutant.table(arch)
    monkeypatch.setitem(ARCHITECTURES, arch.model_type, wrong)
    sizes = arch.sizes(complete)
    assert len({sizes[axis] for axis in mutant.equal}) <= 1, "the wrong shape must be right at these sizes"
    if mutant.rows:
        for spelling in wrong.rows:
            right, mutated = arch.layout(complete, spelling), wrong.layout(complete, spelling)
            assert [*right.tensors] == [*mutated.tensors]
            assert all(_dims(right, n) == _dims(mutated, n) for n in right.tensors), "the mutant's shapes must be right"
    caught = caught_by(mutant, wrong, tmp_path)
    record_property("caught by", caught)
    assert caught, "no law sees this mutant"
    print(f"{mutant.name}: {caught}")


BASES = sorted({(m.base, m.changes) for m in MUTANTS})


@pytest.mark.parametrize(("base", "changes"), BASES, ids=[f"{b}-{len(c)}-{i}" for i, (b, c) in enumerate(BASES)])
def test_the_right_table_passes_every_law_at_the_mutants_sizes(base, changes, tmp_path):
    _, arch, _ = _base(base, changes)
    assert caught_by(Mutant("none", base, changes), arch, tmp_path) == ""


def _dims(layout, name: str) -> tuple:
    return dims(layout.tensors[name].shape, layout.sizes)


def test_at_least_twelve_mutants_are_tried():
    assert len({m.name for m in MUTANTS}) == len(MUTANTS) >= 12
    assert {tiny.VARIANTS[m.base]["model_type"] for m in MUTANTS} == ARCHITECTURES.keys()
