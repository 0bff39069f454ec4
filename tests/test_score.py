"""Scores: what is planted comes first, padding never counts, runs merge, and the model is left as it was.

The sums are compared with stock modules called on one token at a time, and with stock models that have layers cut out;
the formulas of score.py are not repeated.
"""

import dataclasses
import gc
import json
from pathlib import Path

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling import hf
from nestling.score import (
    Scores,
    ScoreSettings,
    frequency_scores,
    merge,
    random_scores,
    score,
    score_folder,
    score_layers,
    weight_norm_scores,
)

EOS = 2
MAMBA, MOE, ATTENTION, MLP = 0, 1, 2, 3  # layers of the tiny nemotron_h, "ME*-M"


def whole(ids: Tensor) -> list[tuple[Tensor, Tensor]]:
    """One batch without padding."""
    return [(ids, torch.ones_like(ids))]


def padded(ids: Tensor, left: int, right: int) -> list[tuple[Tensor, Tensor]]:
    mask = F.pad(torch.ones_like(ids), (left, right))
    return [(F.pad(ids, (left, right), value=EOS), mask)]


def assert_same(a: Scores, b: Scores, rtol: float) -> None:
    assert a.axes == b.axes
    assert a.num_tokens == b.num_tokens
    for axis, x in a.values().items():
        torch.testing.assert_close(x, b.values()[axis], rtol=rtol, atol=rtol * float(x.abs().max()))
    assert all(torch.equal(x, b.counts[axis]) for axis, x in a.counts.items())


def inputs_of(model: nn.Module, name: str, ids: Tensor) -> Tensor:
    """What a module of the stock model is given: [token, ...]."""
    seen = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tiny.logits(model, ids)
    hook.remove()
    return seen[0].flatten(0, -2)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_elastic_axis_has_finite_scores_of_the_shape_of_its_order(name: str):
    scores, layout = score(tiny.shared(name), whole(tiny.tokens())), tiny.layout(name)
    assert set(scores.axes) == layout.elastic().keys() - {"layer"}
    for axis, x in scores.values().items():
        assert x.shape == layout.order_shape(axis)
        assert x.dtype == torch.float64
        assert x.isfinite().all()
        assert x.max() > 0
        order = scores.orders()[axis]
        assert torch.equal(order.sort(-1).values, torch.arange(x.shape[-1]).expand_as(x))
        assert (x.gather(-1, order).diff(dim=-1) <= 0).all()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_scoring_computes_what_the_stock_model_computes_and_leaves_it_as_it_was(name: str):
    model, ids = tiny.model(name), tiny.tokens()
    before = tiny.logits(model, ids)
    last: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda module, args, output: last.append(output))
    score(model, whole(ids))
    hook.remove()
    torch.testing.assert_close(last[0][:, -1], before[:, -1], rtol=1e-5, atol=1e-5)  # another grouping of rows
    assert torch.equal(tiny.logits(model, ids), before)
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize(("left", "right"), [(50, 0), (0, 50), (7, 3)])
def test_padding_with_eos_on_either_side_changes_no_score(name: str, left: int, right: int):
    # One variant has a bias in Mamba's input projection, which leaks from left padding into the stock model's real
    # tokens.
    model, ids = tiny.shared(name), tiny.tokens()
    ids[:, 4] = EOS  # a real token that equals the padding
    assert_same(score(model, whole(ids)), score(model, padded(ids, left, right)), rtol=0)


@pytest.mark.parametrize("name", tiny.PLAIN)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_batch_of_lengths_3_and_9_equals_the_two_texts_alone(name: str, side: str):
    model, long, short = tiny.shared(name), tiny.tokens(1, 9), tiny.tokens(1, 3, seed=1)
    pad = (6, 0) if side == "left" else (0, 6)
    ((row, mask),) = padded(short, *pad)
    both = [(torch.cat([long, row]), torch.cat([torch.ones_like(long), mask]))]
    alone = merge(score(model, whole(long)), score(model, whole(short)))
    assert_same(score(model, both), alone, rtol=1e-5)  # float32 activations, other batch shapes


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_merging_two_runs_equals_one_run_over_both_data_sets(name: str):
    model, a, b = tiny.shared(name), whole(tiny.tokens(seed=1)), whole(tiny.tokens(3, 6, seed=2))
    one, merged = score(model, a + b), merge(score(model, a), score(model, b))
    assert_same(one, merged, rtol=1e-12)
    assert all(torch.equal(order, merged.orders()[axis]) for axis, order in one.orders().items())


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_scores_do_not_depend_on_how_rows_are_batched(name: str):
    model, ids = tiny.shared(name), tiny.tokens(6, 8)
    assert_same(score(model, whole(ids)), score(model, [b for row in ids.split(1) for b in whole(row)]), rtol=1e-5)


def test_only_the_last_calibration_category_counts_is_not_so_here():
    model = tiny.model("mixtral")
    embedding, gate = model.get_input_embeddings(), model.model.layers[0].mlp.gate
    # Words of the two data sets point to opposite sides, and the router of layer 0 listens to that side alone.
    model.model.layers[0].self_attn.o_proj.weight.data.zero_()
    embedding.weight.data[:, 0] = 50.0
    embedding.weight.data[50:, 0] = -50.0
    gate.weight.data.zero_()
    gate.weight.data[:, 0] = torch.tensor([9.0, 8.0, 0.0, -8.0, -9.0])
    gate.weight.data[:, 0] *= model.model.layers[0].post_attention_layernorm.weight[0].sign()
    low = whole(torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0)))
    high = whole(torch.randint(50, 96, (2, 9), generator=torch.Generator().manual_seed(0)))
    first, second = score(model, low), score(model, high)
    assert first.counts["expert"][0].tolist() == [18, 18, 0, 0, 0]
    assert second.counts["expert"][0].tolist() == [0, 0, 0, 18, 18]
    merged = merge(first, second)
    assert (0, 2) in merged.never_routed()
    assert merged.values()["expert"][0, 2] == 0
    assert merged.values()["expert"][0].count_nonzero() == 4
    assert_same(merged, score(model, low + high), rtol=1e-12)


@pytest.mark.parametrize("name", tiny.ROUTED)
def test_expert_sums_equal_the_stock_gate_and_experts_one_token_at_a_time(name: str):
    model, ids = tiny.shared(name), tiny.tokens(2, 5)
    scores = score(model, whole(ids))
    for path, experts in model.named_modules():
        if not path.endswith(".experts"):
            continue
        layer, block = int(path.split(".")[2]), model.get_submodule(path.removesuffix(".experts"))
        num_experts, _, width = experts.down_proj.shape
        gains, counts = [[] for _ in range(num_experts)], [0] * num_experts
        neurons = torch.zeros(num_experts, width, dtype=torch.float64)
        for x in inputs_of(model, path.removesuffix("experts") + "gate", ids).split(1):
            _, weights, chosen = block.gate(x)
            inner = block.fc1_latent_proj(x) if hasattr(block, "fc1_latent_proj") else x
            for g, j in zip(weights[0].tolist(), chosen[0].tolist(), strict=True):
                if hasattr(experts, "gate_up_proj"):
                    gate, up = F.linear(inner[0], experts.gate_up_proj[j]).chunk(2)
                    h = experts.act_fn(gate) * up
                else:
                    h = experts.act_fn(F.linear(inner[0], experts.up_proj[j]))
                neurons[j] += h.abs().double()
                gains[j].append(g * float(F.linear(h, experts.down_proj[j]).square().sum() ** 0.5))
                counts[j] += 1
        means = torch.tensor([sum(g) / len(g) if g else 0.0 for g in gains], dtype=torch.float64)
        assert scores.counts["expert"][layer].tolist() == counts
        torch.testing.assert_close(scores.values()["expert"][layer], means, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(scores.values()["effn"][layer], neurons, rtol=1e-5, atol=1e-6)


def test_saliency_follows_the_sigmoid_gate_where_softmax_would_order_otherwise():
    # Logits 4 and 1: the sigmoid gates, 0.98 and 0.73, are nearly equal, so an output twice as long puts expert 1
    # first. Under softmax gates, 0.95 and 0.05, it would be expert 0.
    model = tiny.model("nemotron_h", norm_topk_prob=False)
    block = model.model.layers[MOE].mixer
    model.model.layers[MOE].norm.weight.data.zero_()
    model.model.layers[MOE].norm.weight.data[0] = 1.0
    model.model.embeddings.weight.data[:, 0] = 40.0
    model.model.layers[0].mixer.out_proj.weight.data.zero_()
    x = inputs_of(model, "model.layers.1.mixer.gate", tiny.tokens())
    assert x[:, 0].min() > 3  # every token looks the same to the router, up to length
    block.gate.weight.data.zero_()
    block.gate.weight.data[:, 0] = torch.tensor([4.0, 1.0, -9.0, -9.0, -9.0, -9.0]) / float(x[:, 0].mean())
    block.gate.e_score_correction_bias.zero_()
    block.experts.up_proj.data[:2, :, 0] = block.experts.up_proj.data[0, :, 0].abs()
    block.experts.down_proj.data[1] = 2.0 * block.experts.down_proj.data[0]
    scores = score(model, whole(tiny.tokens()))
    assert scores.orders()["expert"][MOE, :2].tolist() == [1, 0]
    weights = block.gate(x)[1].amax(0)
    assert weights.max() > 1  # the routed scaling factor is part of the gate
    softmax = block.gate(x)[0].softmax(-1).mean(0)
    assert softmax[0] > 2 * softmax[1]


def test_saliency_follows_norm_topk_prob():
    plain, normed = (tiny.model("qwen3_moe_step", norm_topk_prob=flag) for flag in (False, True))
    layer, path = 1, "model.layers.1.mlp.gate"
    once, ids = tiny.tokens(1, 1), tiny.tokens(1, 1)
    a, b = score(plain, whole(once)), score(normed, whole(once))
    p = plain.get_submodule(path)(inputs_of(plain, path, ids))[0].softmax(-1)
    kept = float(p.topk(2).values.sum())
    assert 0 < kept < 0.999
    torch.testing.assert_close(b.values()["expert"][layer] * kept, a.values()["expert"][layer], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_a_planted_dominant_head_stays_first_and_sorting_twice_changes_nothing(name: str):
    model = tiny.model(name)
    layout = tiny.layout(name)
    layer = ATTENTION if name == "nemotron_h" else 1
    parts = model.model.layers[layer].mixer if name == "nemotron_h" else model.model.layers[layer].self_attn
    kv, q, head = (layout.sizes[a] for a in ("kv", "q", "head"))
    # Attend to one's own token alone with one query head, to all tokens with the others: averages are shorter.
    values = parts.v_proj.weight.data.view(kv, head, -1)
    values[1] *= 3
    parts.q_proj.weight.data.view(kv, q, head, -1)[1, :2] = 0
    before = score(model, whole(tiny.tokens(4, 16)))
    assert before.values()["q"][layer, 1].min() > before.values()["q"][layer, 0].max()
    assert int(before.orders()["q"][layer, 1, 0]) == 2
    arch, complete = tiny.known(name)
    state = tiny.take_all(hf.state_of(model), arch, complete, {"q": before.orders()["q"]})
    after = score(tiny.load(arch, complete, state), whole(tiny.tokens(4, 16)))
    assert torch.equal(after.orders()["q"], torch.arange(q).expand(layout.order_shape("q")))


@pytest.mark.parametrize(
    ("axis", "layer", "up", "unit"),
    [("ffn", MLP, "mixer.up_proj", 11), ("sffn", MOE, "mixer.shared_experts.up_proj", 7)],
)
def test_a_planted_dominant_neuron_comes_first(axis: str, layer: int, up: str, unit: int):
    model = tiny.model("nemotron_h")
    model.model.layers[layer].get_submodule(up).weight.data[unit] *= 20
    assert int(score(model, whole(tiny.tokens())).orders()[axis][layer, 0]) == unit


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "nemotron_h"])
def test_a_planted_dominant_residual_channel_comes_first(name: str):
    model = tiny.model(name)
    for part, weight in model.named_parameters():
        if "norm" in part and weight.shape == (48,) and "layers" in part:
            weight.data[13] = 30.0
    scores = score(model, whole(tiny.tokens()))
    assert int(scores.orders()["hidden"][0]) == 13


def test_the_final_norm_says_nothing_about_the_residual_channels():
    model = tiny.model("nemotron_h")
    before = score(model, whole(tiny.tokens()), axes=("hidden",))
    model.model.norm_f.weight.data *= torch.arange(48)
    assert_same(before, score(model, whole(tiny.tokens()), axes=("hidden",)), rtol=0)


def test_planted_mamba_heads_and_channels_come_first_whatever_the_gate_block_does():
    model = tiny.model("nemotron_h")  # 2 groups x 3 heads x 5 channels
    weight = model.model.layers[MAMBA].mixer.in_proj.weight.data
    weight[:30] *= 100  # z, the gate, which lies before x and is not scored
    x = weight[30:60].view(2, 3, 5, 48)
    x[1, 2] *= 20  # head 2 of group 1
    x[:, :, 4] *= 50  # channel 4 of every head
    scores = score(model, whole(tiny.tokens(2, 1)))
    assert int(scores.orders()["mdim"][MAMBA, 0]) == 4
    assert int(scores.orders()["mamba"][MAMBA, 1, 0]) == 2
    assert scores.values()["mamba"][MAMBA, 1, 2] > 3 * scores.values()["mamba"][MAMBA, 0].max()


def test_mamba_sums_are_signed_so_a_text_and_its_negative_cancel():
    model = tiny.model("nemotron_h")
    model.model.embeddings.weight.data[4] = -model.model.embeddings.weight.data[3]
    ids = torch.tensor([[3], [4]])
    both, one = score(model, whole(ids)), score(model, whole(ids[:1]))
    assert both.values()["mdim"][MAMBA].max() < 1e-6 * one.values()["mdim"][MAMBA].max()
    assert both.values()["hidden"].min() > 0


def test_a_mamba_head_is_judged_by_its_top_channels_only():
    model = tiny.model("nemotron_h")
    x = model.model.layers[MAMBA].mixer.in_proj.weight.data[30:60].view(2, 3, 5, 48)
    x[:, :, :2] *= 100  # the top channels
    x[0, 0, :2] = 0
    x[0, 0, 2:] *= 10  # all that head 0 of group 0 has lies in the others
    few = score(model, whole(tiny.tokens(2, 1)), top_channels=2)
    every = dataclasses.replace(few, top_channels=5)
    assert few.values()["mamba"][MAMBA, 0, 0] == 0
    assert every.values()["mamba"][MAMBA, 0, 0] > 0
    assert sorted(few.orders()["mdim"][MAMBA, :2].tolist()) == [0, 1]
    total = every.values()["mamba"][MAMBA].square().sum()
    torch.testing.assert_close(total, every.values()["mdim"][MAMBA].square().sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["llama", "qwen2_sliding", "nemotron_h"])
def test_layer_errors_equal_models_with_the_layers_cut_out(name: str):
    model, ids = tiny.model(name), tiny.tokens()
    found = score_layers(model, padded(ids, 4, 2))
    stock = tiny.model(name)
    layers, types = list(stock.model.layers), list(getattr(stock.config, "layer_types", None) or [])
    full = tiny.logits(stock, ids)

    def error(kept: list[int]) -> float:
        stock.model.layers = nn.ModuleList(layers[i] for i in kept)
        stock.config.num_hidden_layers = len(kept)
        if types:
            stock.config.layer_types = [types[i] for i in kept]
        return float(((tiny.logits(stock, ids) - full) ** 2).sum() / (full**2).sum())

    kept = list(range(len(layers)))
    for j in kept:
        assert float(found.alone[j]) == pytest.approx(error([i for i in kept if i != j]), rel=1e-4)
    for j in reversed(found.order.tolist()):
        errors = {i: error([k for k in kept if k != i]) for i in kept}
        assert j == min(errors, key=errors.__getitem__)
        assert float(found.errors[j]) == pytest.approx(errors[j], rel=1e-4)
        kept.remove(j)
    assert torch.equal(tiny.logits(model, ids), full)


def test_a_layer_that_does_nothing_is_the_first_to_go():
    model = tiny.model("nemotron_h")
    model.model.layers[MLP].mixer.down_proj.weight.data.zero_()
    scores = score(model, whole(tiny.tokens()), axes=("layer",))
    assert scores.orders()["layer"][-1] == MLP
    assert scores.values()["layer"][MLP] == 0
    assert scores.layers is not None
    assert sorted(scores.orders()["layer"].tolist()) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("weight", "index", "said"),
    [
        ("model.layers.1.mixer.experts.up_proj", (3, 5, 0), "layer 1, expert 3, effn 5"),
        ("model.layers.1.mixer.experts.down_proj", (3, 0, 0), "layer 1, expert 3"),
        ("model.layers.2.mixer.v_proj.weight", (9, 0), "layer 2, kv 1, q 0"),
        ("model.layers.3.mixer.up_proj.weight", (7, 0), "layer 3, ffn 7"),
        ("model.layers.0.mixer.in_proj.weight", (30 + 5 * 4 + 2, 0), "layer 0, group 1, mamba 1, mdim 2"),
        ("model.layers.0.norm.weight", (6,), "layer 0, hidden 6"),
        ("model.layers.4.mixer.out_proj.weight", (3, 0), "behind the last layer, hidden 3"),
        ("model.norm_f.weight", (5,), "behind the last layer, hidden 5"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_stops_at_once_and_is_named(weight: str, index: tuple[int, ...], said: str, value: float):
    model = tiny.model("nemotron_h")
    seen, ids = [], tiny.tokens(4, 12)
    broken = model.get_parameter(weight)

    def batches():
        for number in range(5):
            seen.append(number)
            if number == 2:
                broken.data[index] = value
            yield whole(ids)[0]

    with pytest.raises(ValueError, match=f"^{said}: .* in batch 2 "):
        score(model, batches())
    assert seen == [0, 1, 2]
    assert not any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


def test_memory_is_flat_over_a_hundred_batches():
    model, alive = tiny.shared("qwen3_moe"), []

    def batches():
        for number in range(100):
            if number in (20, 99):
                gc.collect()
                alive.append(sum(x.numel() for x in gc.get_objects() if issubclass(type(x), Tensor)))
            yield whole(tiny.tokens(2, 6, seed=number))[0]

    score(model, batches())
    assert alive[1] <= alive[0]


@pytest.mark.parametrize("name", ["mixtral", "nemotron_h", "nemotron_h_latent"])
def test_a_bf16_model_is_scored_in_float64_sums_close_to_the_fp32_ones(name: str):
    ids = tiny.tokens(4, 16)
    model = tiny.model(name).to(torch.bfloat16)
    before = tiny.logits(model, ids)
    half = score(model, whole(ids))
    full = score(model.float(), whole(ids))
    assert torch.equal(tiny.logits(model.to(torch.bfloat16), ids), before)
    assert half.fingerprint == full.fingerprint
    a, b = half.values()["hidden"], full.values()["hidden"]
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.mean()))  # bf16 has 8 bits


@pytest.mark.parametrize("name", ["qwen3_moe", "nemotron_h"])
def test_scores_survive_the_disk_bit_for_bit(name: str, tmp_path: Path):
    scores = score(tiny.shared(name), whole(tiny.tokens()), layers=True)
    scores.save(tmp_path)
    read = Scores.load(tmp_path)
    assert_same(scores, read, rtol=0)
    assert all(torch.equal(order, read.orders()[axis]) for axis, order in scores.orders().items())
    plain = {f.name for f in dataclasses.fields(Scores)} - {"sums", "counts", "layers"}
    assert {key: getattr(read, key) for key in plain} == {key: getattr(scores, key) for key in plain}


def test_a_folder_without_scores_of_this_format_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match=r"no scores\.json"):
        Scores.load(tmp_path)
    score(tiny.shared("llama"), whole(tiny.tokens())).save(tmp_path)
    told = json.loads((tmp_path / "scores.json").read_text())
    (tmp_path / "scores.json").write_text(json.dumps(told | {"format_version": 99}))
    with pytest.raises(ValueError, match="format 1"):
        Scores.load(tmp_path)
    (tmp_path / "scores.json").write_text(json.dumps(told | {"sizes": told["sizes"] | {"ffn": 8}}))
    with pytest.raises(ValueError, match="'ffn' is"):
        Scores.load(tmp_path)


def test_runs_of_different_models_are_not_merged():
    ids = whole(tiny.tokens())
    one = score(tiny.shared("llama"), ids)
    with pytest.raises(ValueError, match="different architecture"):
        merge(one, score(tiny.shared("qwen2"), ids))
    with pytest.raises(ValueError, match="different sizes"):
        merge(one, score(tiny.shared("llama_tied"), ids))
    with pytest.raises(ValueError, match="different fingerprint"):
        merge(one, score(tiny.model("llama", seed=1), ids))
    with pytest.raises(ValueError, match="different axes"):
        merge(one, score(tiny.shared("llama"), ids, axes=("ffn",)))
    with pytest.raises(ValueError, match="order of layers cannot be merged"):
        merge(*[score(tiny.shared("llama"), ids, layers=True)] * 2)
    with pytest.raises(ValueError, match="only sums over activations"):
        merge(*[random_scores(tiny.layout("llama"), 0)] * 2)
    with pytest.raises(ValueError, match="Score this model"):
        one.check_fits(tiny.layout("llama_tied"))
    one.check_fits(tiny.layout("llama", "disk"))


def test_a_request_that_cannot_be_met_says_what_can():
    model, ids = tiny.shared("llama"), tiny.tokens()
    with pytest.raises(ValueError, match=r"'expert' cannot shrink.*Known: hidden, ffn, q, layer"):
        score(model, whole(ids), axes=("expert",))
    with pytest.raises(ValueError, match="no tokens"):
        score(model, [(ids, torch.zeros_like(ids))])
    with pytest.raises(ValueError, match=r"ids \(2, 11\) and mask \(2, 10\)"):
        score(model, [(ids, torch.ones_like(ids)[:, 1:])])
    with pytest.raises(ValueError, match="top_channels is 6"):
        score(tiny.shared("nemotron_h"), whole(ids), top_channels=6)
    with pytest.raises(ValueError, match="no routing counts"):
        frequency_scores(score(model, whole(ids)))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_random_scores_are_seeded_and_cover_every_axis(name: str):
    layout = tiny.layout(name)
    a, b, c = random_scores(layout, 0), random_scores(layout, 0), random_scores(layout, 1)
    assert set(a.axes) == layout.elastic().keys()
    for axis in a.axes:
        assert a.values()[axis].shape == layout.order_shape(axis)
        assert torch.equal(a.values()[axis], b.values()[axis])
        assert not torch.equal(a.values()[axis], c.values()[axis])


def test_layers_without_an_axis_score_zero_and_keep_their_order():
    for scores in (random_scores(tiny.layout("nemotron_h"), 0), score(tiny.shared("nemotron_h"), whole(tiny.tokens()))):
        values, orders = scores.values(), scores.orders()
        for axis, layer in {"ffn": MLP, "q": ATTENTION, "expert": MOE}.items():
            for other in {0, 1, 2, 3, 4} - {layer}:
                assert not values[axis][other].any()
                assert torch.equal(
                    orders[axis][other], torch.arange(orders[axis].shape[-1]).expand_as(orders[axis][other])
                )
            assert values[axis][layer].all()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_weight_norms_of_all_layers_and_of_the_rest_add_up_to_the_whole_model(name: str):
    model = tiny.shared(name)
    values = weight_norm_scores(model).values()
    layers = model.model.layers.state_dict().values()
    total = sum(float(w.double().square().sum()) for w in layers)
    assert float(values["layer"].square().sum()) == pytest.approx(total, rel=1e-9)


def test_weight_norms_rise_with_exactly_the_unit_that_was_scaled():
    model = tiny.model("nemotron_h")
    before = weight_norm_scores(model).values()
    model.model.layers[MOE].mixer.experts.down_proj.data[4, :, 9] *= 3
    model.model.layers[MAMBA].mixer.in_proj.weight.data[30 + 5 * 4 + 2] *= 3  # x of group 1, head 1, channel 2
    rose = {axis: (x > before[axis]).nonzero().tolist() for axis, x in weight_norm_scores(model).values().items()}
    assert rose["effn"] == [[MOE, 4, 9]]
    assert rose["expert"] == [[MOE, 4]]
    assert rose["mamba"] == [[MAMBA, 1, 1]]
    assert rose["mdim"] == [[MAMBA, 2]]
    assert rose["layer"] == [[MAMBA], [MOE]]
    assert not rose["q"]
    assert not rose["ffn"]


def test_frequency_scores_count_every_real_token_once_for_each_active_expert():
    model, ids = tiny.shared("nemotron_h"), tiny.tokens()
    counts = frequency_scores(score(model, padded(ids, 5, 5))).values()["expert"]
    assert counts.sum(-1).tolist() == [0, 2 * ids.numel(), 0, 0, 0]


def test_scoring_a_folder_writes_scores_that_know_their_model_data_and_settings(tmp_path: Path):
    parent = tiny.save("nemotron_h", tmp_path / "parent", is_chatty=True)
    lines = [json.dumps({"text": "the owl saw what the cat did " * (1 + i % 5)}) for i in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines), "utf-8")
    said: list[str] = []
    settings = ScoreSettings(tokens=200, length=25, batch=4, layers=True, layer_tokens=100)
    made = score_folder(
        settings, parent=parent, data=str(tmp_path / "data.jsonl"), to=tmp_path / "scores", say=said.append
    )
    read = Scores.load(tmp_path / "scores")
    assert_same(made, read, rtol=0)
    assert read.num_tokens == 200
    assert read.runs[0]["length"] == 25
    assert read.runs[0]["data"].endswith("data.jsonl")
    assert any("200 tokens" in line for line in said)
    assert any("layers, most important first" in line for line in said)
    other = score_folder(
        dataclasses.replace(settings, tokens=10**6, layers=False),
        parent=parent, data=str(tmp_path / "data.jsonl"), to=tmp_path / "all", say=said.append,
    )  # fmt: skip
    assert any("the data ends after" in line for line in said)
    assert 1000 < other.num_tokens < 10**6
    with pytest.raises(ValueError, match="exists"):
        score_folder(settings, parent=parent, data=str(tmp_path / "data.jsonl"), to=tmp_path / "all", say=said.append)
