"""Budgets against stock models of the same sizes: their parameters, their bytes, the caches that they really fill."""

import itertools
import math
from typing import Any

import pytest
import tiny
import torch
from torch import Tensor

from nestling.budget import Budget, check_reachable, choices, choose, parse_budget, uniform
from nestling.hf import new_model

SIZES = {
    "nemotron_h": {"hidden": 40, "mamba": 2, "mdim": 3, "q": 2, "expert": 4, "effn": 16, "sffn": 12, "ffn": 20},
    "nemotron_h_bias": {"hidden": 32, "mamba": 1, "effn": 8, "ffn": 12},
    "qwen3": {"hidden": 36, "ffn": 24, "q": 1},
    "qwen2_sliding": {"hidden": 36, "ffn": 24, "q": 2},
    "mixtral": {"hidden": 40, "expert": 3, "effn": 16},
}


def parsed(name: str, text: str) -> Budget:
    return parse_budget(text, tiny.layout(name, "disk"), tiny.known(name)[1])


def small_model(name: str) -> Any:
    """The stock model at the small sizes, from a config written by hand out of the big one."""
    arch, config = tiny.known(name)
    return new_model(arch.resize(config, tiny.layout(name).sizes | SIZES[name]), seed=0)


def numbers_on_disk(model: Any) -> dict[str, int]:
    """Numbers in every stored tensor; a tied head counts once."""
    state = {name: tensor for name, tensor in model.state_dict().items() if "lm_head" not in name or not is_tied(model)}
    return {name: tensor.numel() for name, tensor in state.items()}


def is_tied(model: Any) -> bool:
    return model.config.tie_word_embeddings


@pytest.mark.parametrize("name", SIZES)
def test_total_parameters_are_those_of_a_stock_model_of_these_sizes(name: str) -> None:
    layout = tiny.layout(name)
    spent = parsed(name, "total:0.5").spent(layout, layout.sizes | SIZES[name])
    assert spent == sum(numbers_on_disk(small_model(name)).values())


@pytest.mark.parametrize("name", ["nemotron_h", "mixtral"])
def test_active_parameters_count_as_many_experts_as_a_token_uses(name: str) -> None:
    layout, model = tiny.layout(name), small_model(name)
    count = 0
    for part, n in numbers_on_disk(model).items():
        is_expert = ".experts." in part and "shared" not in part
        count += n // SIZES[name]["expert"] * model.config.num_experts_per_tok if is_expert else n
    assert parsed(name, "active:0.5").spent(layout, layout.sizes | SIZES[name]) == count


def cache_numbers(model: Any, time: int, batch: int) -> dict[str, int]:
    """Numbers in the caches that the stock model really fills."""
    with torch.no_grad():
        cache = model(input_ids=tiny.tokens(batch, time), use_cache=True).past_key_values
    found = {"kv": 0, "conv": 0, "ssm": 0}

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict | list | tuple):
            for inner in value.values() if isinstance(value, dict) else value:
                add(key, inner)
        elif isinstance(value, Tensor) and value.dim() > 1:
            kind = "conv" if "conv" in key else "kv" if key in {"keys", "values"} else "ssm"
            found[kind] += value.numel()

    for layer in cache.layers:
        for key, value in vars(layer).items():
            add(key, value)
    return found


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_bias", "qwen3", "mixtral"])
def test_bytes_are_weights_and_the_caches_that_a_stock_model_fills(name: str) -> None:
    layout, model = tiny.layout(name), small_model(name)
    held = cache_numbers(model, time=9, batch=3)
    assert held["kv"] > 0
    assert (held["ssm"] > 0) == (held["conv"] > 0) == name.startswith("nemotron_h")
    caches = 2 * held["kv"] + 2 * held["conv"] + 4 * held["ssm"]  # bf16, bf16, float32
    weights = sum(numbers_on_disk(model).values())
    for form, each in (("bf16", 2), ("fp32", 4)):
        budget = parsed(name, f"bytes:0.9,format={form},context=9,batch=3")
        assert budget.spent(layout, layout.sizes | SIZES[name]) == each * weights + caches


def test_a_sliding_window_bounds_the_cache_of_its_layers() -> None:
    name = "qwen2_sliding"
    layout, (_, config) = tiny.layout(name), tiny.known(name)
    per_layer = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]  # keys and values, bf16
    short, long = (parse_budget(f"bytes:0.9,context={n}", layout, config).spent(layout, layout.sizes) for n in (3, 50))
    num_sliding = sum(kind == "sliding_attention" for kind in config["layer_types"])
    num_full = len(config["layer_types"]) - num_sliding
    assert num_sliding > 0
    assert num_full > 0
    assert long - short == per_layer * (num_full * 47 + num_sliding * (config["sliding_window"] - 3))


@pytest.mark.parametrize(("form", "bits"), [("fp8", 8), ("nvfp4", 4.5)])
def test_few_bit_formats_shrink_experts_and_projections_but_no_mixer_that_feeds_attention(
    form: str, bits: float
) -> None:
    name = "nemotron_h_bias"  # M*E-: the first layer feeds attention
    layout, model = tiny.layout(name), small_model(name)
    count = 0.0
    for part, n in numbers_on_disk(model).items():
        is_matrix = any(word in part for word in ("up_proj", "down_proj", "in_proj", "out_proj")) and "bias" not in part
        count += n * (bits / 8 if is_matrix and ".layers.0." not in part else 2)
    spent = parsed(name, f"bytes:0.9,format={form}").spent(layout, layout.sizes | SIZES[name])
    state = parsed(name, "bytes:0.9").spent(layout, layout.sizes | SIZES[name]) - 2 * sum(
        numbers_on_disk(model).values()
    )
    assert spent == pytest.approx(count + state, abs=0.5)


@pytest.mark.parametrize("kind", ["active", "total", "inner", "bytes"])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3"])
def test_the_cost_is_differentiable_in_every_size(name: str, kind: str) -> None:
    layout = tiny.layout(name)
    budget = parsed(name, f"{kind}:0.5" + (",format=nvfp4,context=7" if kind == "bytes" else ""))
    axes = [axis for axis in SIZES[name] if not (kind == "active" and axis == "expert")]
    sizes = {axis: torch.tensor(SIZES[name][axis] + 0.3, dtype=torch.float64, requires_grad=True) for axis in axes}
    cost = budget.spent(layout, layout.sizes | sizes)
    gradients = dict(zip(axes, torch.autograd.grad(cost, list(sizes.values())), strict=True))
    for axis in axes:
        ends = [
            float(
                budget.spent(layout, layout.sizes | {a: s.detach() + (h if a == axis else 0) for a, s in sizes.items()})
            )
            for h in (-1e-3, 1e-3)
        ]
        # Central differences of a polynomial of degree three in each size: exact but for h squared.
        assert float(gradients[axis]) == pytest.approx((ends[1] - ends[0]) / 2e-3, rel=1e-5)
        assert gradients[axis] > 0


def test_amounts_are_shares_up_to_one_and_numbers_above() -> None:
    layout = tiny.layout("nemotron_h")
    full = layout.count()
    assert parsed("nemotron_h", "total:0.5").target == pytest.approx(full / 2)
    assert parsed("nemotron_h", "total:1").target == full
    assert parsed("nemotron_h", f"total:{full - 3}").target == full - 3
    assert parsed("nemotron_h", "total:1.5e4").target == 15000
    assert parsed("nemotron_h", "bytes:16KiB").target == 16 * 1024
    given = parsed("nemotron_h", "bytes:16KB,format=nvfp4,context=32,batch=4")
    assert (given.target, given.weight_format, given.context, given.batch) == (16000, "nvfp4", 32, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.5", "expected active:AMOUNT, total:AMOUNT, inner:AMOUNT, bytes:AMOUNT"),
        ("speed:0.5", "cannot read budget 'speed:0.5'"),
        ("active:half", "'half' is not a positive amount"),
        ("active:0", "not a positive amount"),
        ("active:-0.5", "not a positive amount"),
        ("active:nan", "not a positive amount"),
        ("active:inf", "more than the full model's"),
        ("total:9e9", "more than the full model's .* nothing to cut"),
        ("active:0.5,context=8", r"unknown options \['context'\]; 'active' takes \[\]"),
        ("bytes:0.5,contxt=8", r"unknown options \['contxt'\]; 'bytes' takes \['batch', 'context', 'format'\]"),
        ("bytes:0.5,format=int3", "'int3' is not one of fp32, bf16, fp8, nvfp4"),
        ("bytes:0.5,context=-1", "'-1' is not a whole number"),
        ("bytes:16XB", "cannot read '16XB' as bytes"),
    ],
)
def test_a_budget_that_cannot_be_read_or_met_says_what_would(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parsed("nemotron_h", text)


def offered(name: str, floor: float = 0.25) -> dict[str, tuple[int, ...]]:
    grains = {"hidden": 8, "effn": 8, "ffn": 4, "expert": 1, "q": 1}
    layout = tiny.layout(name)
    return choices(
        layout,
        tiny.known(name)[1],
        grains={a: g for a, g in grains.items() if a in layout.elastic()},
        floor=floor,
        most=4,
    )


def test_an_unreachable_budget_names_the_nearest_that_can_be_met() -> None:
    layout = tiny.layout("nemotron_h")
    options = offered("nemotron_h", floor=0.5)
    smallest = layout.count(layout.sizes | {axis: min(sizes) for axis, sizes in options.items()})
    with pytest.raises(ValueError, match=rf"cannot be met.*{smallest:,}, {smallest / layout.count():.3f} of the full"):
        check_reachable(parsed("nemotron_h", "total:0.2"), layout, options)
    check_reachable(parsed("nemotron_h", f"total:{smallest}"), layout, options)
    with pytest.raises(ValueError, match="cannot be met"):
        check_reachable(parsed("nemotron_h", f"total:{smallest - 1}"), layout, options)


@pytest.mark.parametrize("most", [2, 3, 8, 100])
@pytest.mark.parametrize("floor", [0.1, 0.25, 0.6])
def test_choices_start_with_the_full_size_and_are_multiples_down_to_the_floor(most: int, floor: float) -> None:
    layout, (_, config) = tiny.layout("nemotron_h"), tiny.known("nemotron_h")
    grains = {"hidden": 5, "mamba": 1, "expert": 1, "effn": 4, "ffn": 3}
    for axis, sizes in choices(layout, config, grains=grains, floor=floor, most=most).items():
        full = layout.sizes[axis]
        assert sizes[0] == full
        assert list(sizes) == sorted(set(sizes), reverse=True)
        assert 2 <= len(sizes) <= most
        assert all(n % grains[axis] == 0 and n >= floor * full for n in sizes[1:])
        if axis == "expert":
            assert min(sizes) >= config["num_experts_per_tok"]
        legal = [n for n in range(1, full) if n % grains[axis] == 0 and n >= floor * full]
        legal = [n for n in legal if axis != "expert" or n >= config["num_experts_per_tok"]]
        assert min(sizes) == min(legal)
        if most == 100:
            assert list(sizes[1:]) == legal[::-1]


@pytest.mark.parametrize("text", ["active:0.7", "active:0.45", "total:0.6", "bytes:0.5,format=nvfp4,context=20"])
@pytest.mark.parametrize("tolerance", [0.03, 0.0])
def test_the_chosen_sizes_are_the_most_preferred_near_the_budget(text: str, tolerance: float) -> None:
    name = "nemotron_h"
    layout, options, budget = tiny.layout(name), offered(name), parsed(name, text)
    generator = torch.Generator().manual_seed(0)
    liked = {a: torch.randn(len(n), generator=generator).log_softmax(-1) for a, n in options.items()}
    scored = []
    for picks in itertools.product(*(range(len(n)) for n in options.values())):
        sizes = {axis: options[axis][i] for axis, i in zip(options, picks, strict=True)}
        liking = math.fsum(float(liked[axis][i]) for axis, i in zip(options, picks, strict=True))
        scored.append((budget.spent(layout, layout.sizes | sizes), liking, sizes))
    fitting = [one for one in scored if one[0] <= budget.target]
    near = [one for one in fitting if one[0] >= budget.target * (1 - tolerance)]
    best = max(near, key=lambda one: one[1]) if near else max(fitting, key=lambda one: one[0])
    assert bool(near) == (tolerance > 0)
    (found,) = choose(budget, layout, options, liked, tolerance=tolerance)
    assert budget.spent(layout, layout.sizes | found) == best[0]
    assert found == best[2]
    ranked = sorted(near, key=lambda one: -one[1])[:5] if near else [best]
    assert choose(budget, layout, options, liked, tolerance=tolerance, count=5) == [sizes for *_, sizes in ranked]


@pytest.mark.parametrize("name", ["nemotron_h", "qwen3", "mixtral"])
@pytest.mark.parametrize("share", [0.95, 0.7, 0.5])
def test_the_uniform_baseline_never_exceeds_its_budget(name: str, share: float) -> None:
    layout, options, budget = tiny.layout(name), offered(name), parsed(name, f"active:{share}")
    sizes = uniform(budget, layout, options)
    assert budget.spent(layout, layout.sizes | sizes) <= budget.target
    assert all(n in options[axis] for axis, n in sizes.items())
    shares = [n / layout.sizes[axis] for axis, n in sizes.items()]
    assert min(shares) < 1
    # Every axis lies within one step of a common share.
    steps = [max(a - b for a, b in itertools.pairwise(n)) / n[0] for n in options.values()]
    assert max(shares) - min(shares) <= max(steps) + 0.05


def test_a_budget_of_everything_keeps_everything() -> None:
    name = "qwen3"
    layout, options = tiny.layout(name), offered(name)
    assert uniform(parsed(name, "total:1.0"), layout, options) == {axis: sizes[0] for axis, sizes in options.items()}
