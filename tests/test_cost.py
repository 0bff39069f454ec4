"""Bytes, against counts made another way: stock models, stock caches, and sums written out by hand."""

import pytest
import test_laws as laws
import tiny
import torch

from nestling.arch import find
from nestling.cost import FORMATS, cost, memory, parse_bytes, weight_bytes


@pytest.mark.parametrize("name", tiny.NAMES)
def test_costs_equal_what_the_stock_model_and_its_caches_hold(name):
    model, layout = tiny.shared(name), tiny.layout(name, "disk")
    stored = {id(p): p.numel() for p in model.parameters()} | {
        id(b): b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")
    }
    told = cost(layout, window=getattr(model.config, "sliding_window", None) or 0)
    assert told.parameters == sum(stored.values())
    assert told.bytes["fp32"] == 4 * told.parameters
    assert told.bytes["bf16"] == 2 * told.parameters
    time = 3
    held = laws.stock_caches(model, time)
    assert (told.kv_bytes_per_token + told.window_bytes_per_token) * time == 2 * held["kv"]
    assert told.conv_bytes_per_sequence == 2 * held["conv"]
    assert told.ssm_bytes_per_sequence == 4 * held["ssm"]


@pytest.mark.parametrize("name", ["mistral", "qwen2_sliding"])
def test_a_sliding_window_bounds_the_cache_as_in_the_stock_model(name):
    model, layout, time = tiny.shared(name), tiny.layout(name), 12
    window = model.config.sliding_window
    told = cost(layout, window=window)
    assert told.window == window < time
    # The stock cache keeps window - 1 past tokens; the newest is in flight.
    held = laws.stock_caches(model, time)["kv"]
    assert 2 * held == told.kv_bytes_per_token * time + told.window_bytes_per_token * (window - 1)
    no_weights = (
        memory(layout, layout.sizes, weight_format="bf16", context=time, batch=1, window=window) - told.bytes["bf16"]
    )
    assert no_weights == told.kv_bytes_per_token * time + told.window_bytes_per_token * window


# Which matrices the few-bit formats store, said independently of the tables: the modules that do the big products.
QUANTIZED_MODULES = {
    "llama": ("gate_proj", "up_proj", "down_proj"), "mistral": ("gate_proj", "up_proj", "down_proj"),
    "qwen2": ("gate_proj", "up_proj", "down_proj"), "qwen3": ("gate_proj", "up_proj", "down_proj"),
    "mixtral": ("gate_up_proj", "down_proj"), "qwen3_moe": ("gate_up_proj", "gate_proj", "up_proj", "down_proj"),
    "nemotron_h": ("up_proj", "down_proj", "in_proj", "out_proj"),
}  # fmt: skip


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize(("weight_format", "bits"), [("fp8", 8), ("nvfp4", 4.5)])
def test_few_bit_formats_store_the_feed_forward_matrices_and_leave_the_rest_at_sixteen(name, weight_format, bits):
    model, layout = tiny.shared(name), tiny.layout(name, "disk")
    kinds = getattr(model.config, "layers_block_type", [])
    expected = 0.0
    state = {
        n: t for n, t in model.state_dict().items() if not (n == "lm_head.weight" and model.config.tie_word_embeddings)
    }
    for part, w in state.items():
        words = part.split(".")
        matrix = w.dim() >= 2 and any(word in QUANTIZED_MODULES[model.config.model_type] for word in words)
        layer = int(words[2]) if words[1] == "layers" else -1
        feeds_attention = layer >= 0 and "mixer" in words and kinds[layer] == "linear_attention" and (
            kinds[layer + 1 : layer + 2] == ["full_attention"])  # fmt: skip
        expected += w.numel() * (bits if matrix and not feeds_attention else 16) / 8
    assert weight_bytes(layout, layout.sizes, weight_format) == pytest.approx(expected, abs=1e-6)


def test_memory_is_the_weights_and_the_caches_of_every_sequence():
    layout = tiny.layout("nemotron_h", "disk")
    # Two Mamba layers: 6 heads x 5 channels x 7 states in float32, and 30 + 14 + 14 rows of 3 in bf16. One attention
    # layer: 2 heads x 9, keys and values, in bf16, for each token.
    mamba = 2 * (6 * 5 * 7 * 4 + 58 * 3 * 2)
    attention = 2 * 9 * 2 * 2
    weights = 2 * sum(p.numel() for p in tiny.shared("nemotron_h").parameters()) + 2 * 6  # and six correction biases
    assert memory(layout, layout.sizes, weight_format="bf16", context=100, batch=7) == weights + 7 * (
        mamba + 100 * attention
    )
    without = memory(layout, layout.sizes, weight_format="bf16", context=100, batch=7, layers=[1, 2, 3])
    assert without == 2 * layout.count(layers=[1, 2, 3]) + 7 * 100 * attention


def test_memory_is_differentiable_in_expected_sizes_and_agrees_with_the_exact_one():
    layout = tiny.layout("nemotron_h", "disk")
    for weight_format in FORMATS:
        exact = memory(layout, layout.sizes, weight_format=weight_format, context=9, batch=2)
        smooth = {a: torch.tensor(float(n), requires_grad=True) for a, n in layout.sizes.items()}
        soft = memory(layout, smooth, weight_format=weight_format, context=9, batch=2)
        assert soft.item() == pytest.approx(exact, rel=1e-6)
        soft.backward()
        for axis in ("hidden", "mamba", "mdim", "q", "expert", "effn", "sffn", "ffn"):
            more = memory(
                layout, layout.sizes | {axis: layout.sizes[axis] + 1}, weight_format=weight_format, context=9, batch=2
            )
            assert smooth[axis].grad.item() > 0
            if axis not in ("q",):  # each is linear in its size
                assert smooth[axis].grad.item() == pytest.approx(more - exact, rel=1e-4)


def test_a_smaller_member_never_costs_more():
    layout, draws = tiny.layout("nemotron_h", "disk"), torch.Generator().manual_seed(0)
    whole = cost(layout)
    for _ in range(5):
        sizes = tiny.random_sizes(layout, draws, tuple(a for a in layout.elastic() if a != "layer"))
        small = cost(layout.resize(sizes))
        assert small.parameters < whole.parameters
        assert small.active_parameters < whole.active_parameters
        assert all(small.bytes[f] < whole.bytes[f] for f in FORMATS)


def test_active_parameters_do_not_depend_on_how_many_experts_there_are_but_for_the_router():
    few, many = (find(tiny.VARIANTS["mixtral"] | {"num_local_experts": n}) for n in (4, 12))
    active = [arch.layout(c).count(active=True) for arch, c in (few, many)]
    assert active[1] - active[0] == 3 * 8 * 48  # eight more router rows in each of three layers


def test_an_unknown_weight_format_is_refused_with_the_known_ones():
    layout = tiny.layout("llama")
    with pytest.raises(ValueError, match="'int4' is not one of fp32, bf16, fp8, nvfp4"):
        weight_bytes(layout, layout.sizes, "int4")


@pytest.mark.parametrize(("text", "number"), [
    ("123456", 123456), ("16GiB", 17179869184), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("2k", 2000),
    ("1TB", 10**12), (" 3 mib ", 3145728), ("7B", 7),
])  # fmt: skip
def test_bytes_are_read_from_text(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize("text", ["", "GiB", "-3GB", "12 apples", "1PB", "1.2.3GB", "1e9", "."])
def test_text_that_is_no_number_of_bytes_is_refused(text):
    with pytest.raises(ValueError, match="as bytes"):
        parse_bytes(text)
