"""The tables at real sizes, and what a config may say: all is read from it, nothing is guessed, lies are refused."""

import copy
import re

import pytest
import tiny
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nestling import hf
from nestling.arch import ARCHITECTURES, find, kept_layers
from nestling.cost import cost
from nestling.nest import check_sizes, open_nest
from nestling.plan import plan_members

# Nemotron 3 Nano 30B-A3B, written from its description.
NANO = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52, "vocab_size": 131072, "hidden_size": 2688, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8,
    "ssm_state_size": 128, "conv_kernel": 4,
    "n_routed_experts": 128, "num_experts_per_tok": 6, "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712, "intermediate_size": 1856, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "tie_word_embeddings": False, "use_conv_bias": True,
}  # fmt: skip
PUBLISHED = [
    # hidden, routed-expert width, parameters, active parameters
    (2688, 1856, 31_577_940_288, 3_580_076_352),
    (2016, 1856, 23_683_657_248, 2_685_259_296),
    (1920, 960, 12_426_658_368, 2_082_619_968),
]


def plain(name: str, **changes: object) -> dict:
    """A config.json of a tiny variant, as a file holds it."""
    return copy.deepcopy(tiny.VARIANTS[name]) | changes


@pytest.mark.parametrize(("hidden", "effn", "parameters", "active"), PUBLISHED)
def test_the_30b_and_its_members_have_the_published_counts(hidden, effn, parameters, active):
    arch, complete = find(NANO)
    layout = arch.layout(complete)
    sizes = layout.sizes | {"hidden": hidden, "effn": effn}
    assert layout.count(sizes) == parameters
    assert layout.count(sizes, active=True) == active
    small = arch.resize(complete, sizes)
    assert cost(arch.layout(small)).parameters == parameters
    with torch.device("meta"):
        plain_config = {k: v for k, v in small.items() if k not in {"model_type", "num_hidden_layers"}}
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model("nemotron_h", **plain_config))
    bias = [b.numel() for n, b in stock.named_buffers() if n.endswith("e_score_correction_bias")]
    assert bias == [128] * 23
    assert sum(p.numel() for p in stock.parameters()) + sum(bias) == parameters


def test_the_caches_of_the_30b_have_the_same_size_in_every_member():
    arch, complete = find(NANO)
    layout = arch.layout(complete)
    costs = [cost(layout.resize({"hidden": h, "effn": e})) for h, e, _, _ in PUBLISHED]
    # 6 attention layers x 2 heads x 128 x (key and value) x 2 bytes; 23 Mamba layers x 64 heads x 64 x 128 x 4 bytes.
    assert {c.kv_bytes_per_token for c in costs} == {6144}
    assert {c.ssm_bytes_per_sequence for c in costs} == {48_234_496}
    assert {c.conv_bytes_per_sequence for c in costs} == {23 * 6144 * 4 * 2}


# Unknown architectures and parameters.


@pytest.mark.parametrize("model_type", ["gpt2", None, "llama4", "LLAMA"])
def test_an_unknown_model_type_is_refused_with_the_known_ones_and_where_to_add_it(model_type):
    with pytest.raises(ValueError, match=re.escape("docs/add-an-architecture.md")) as error:
        find({"model_type": model_type, "hidden_size": 8})
    assert all(known in str(error.value) for known in ARCHITECTURES)
    assert str(model_type) in str(error.value)


def test_a_nested_text_config_is_refused_rather_than_read_from_outside():
    with pytest.raises(ValueError, match="model_type 'llava'"):
        find({"model_type": "llava", "hidden_size": 64, "text_config": plain("llama")})


def test_a_parameter_without_a_row_is_refused_by_name():
    layout = tiny.layout("qwen3_moe", "disk")
    with pytest.raises(
        ValueError, match=r"'model\.layers\.0\.mlp\.router\.scale' in architecture 'qwen3_moe'.*nestling/arch"
    ):
        layout.check_cover([*layout.tensors, "model.layers.0.mlp.router.scale"])


def test_missing_parameters_are_listed():
    layout = tiny.layout("llama", "disk")
    with pytest.raises(ValueError, match=r"lacks 1 of \d+ parameters .*model\.norm\.weight"):
        layout.check_cover([n for n in layout.tensors if n != "model.norm.weight"])


def test_multi_token_prediction_is_refused_with_the_way_to_leave_it_out():
    layout = tiny.layout("nemotron_h", "disk")
    with pytest.raises(ValueError, match=r"2 multi-token-prediction tensors .*--drop mtp"):
        layout.check_cover([*layout.tensors, "mtp.layers.0.norm.weight", "mtp.layers.0.mixer.gate.weight"])


def test_an_mtp_tensor_does_not_hide_another_unknown_one():
    layout = tiny.layout("nemotron_h", "disk")
    with pytest.raises(ValueError, match=r"backbone\.strange"):
        layout.check_cover([*layout.tensors, "mtp.layers.0.norm.weight", "backbone.strange"])


# What a config may say.


def test_sizes_that_a_stock_config_would_derive_are_written():
    arch, complete = find({k: v for k, v in plain("llama").items() if k != "num_key_value_heads"})
    small = arch.resize(complete, arch.sizes(complete) | {"hidden": 24})
    assert small["head_dim"] == 8  # a stock reader would derive 24 / 6 = 4
    assert small["num_key_value_heads"] == 6
    assert hf.config_object(small).head_dim == 8


def test_a_cut_of_the_width_leaves_mamba_heads_alone_whatever_expand_says():
    for expand in (2, 3):
        arch, complete = find(plain("nemotron_h", expand=expand))
        small = arch.resize(complete, arch.sizes(complete) | {"hidden": 36})
        model = hf.new_model(small, seed=0)
        assert model.model.layers[0].mixer.in_proj.weight.shape == (30 + 30 + 14 + 14 + 6, 36)
        assert (small["mamba_num_heads"], small["mamba_head_dim"]) == (6, 5)


def test_a_width_that_is_no_multiple_of_the_heads_needs_head_dim_written():
    with pytest.raises(ValueError, match="hidden_size = 50 is not a multiple of num_attention_heads = 6"):
        find(plain("mistral", hidden_size=50, head_dim=None))


def test_heads_that_do_not_fill_their_groups_are_refused():
    arch, complete = find(plain("llama", num_attention_heads=6, num_key_value_heads=4, head_dim=8))
    with pytest.raises(ValueError, match="num_attention_heads = 6 is not a multiple of 4"):
        arch.layout(complete)


def test_query_heads_shrink_within_their_groups():
    arch, complete = find(plain("qwen2", num_attention_heads=14, num_key_value_heads=2, hidden_size=56))
    layout = arch.layout(complete)
    assert layout.sizes["q"] == 7
    assert layout.order_shape("q") == (3, 2, 7)
    assert arch.resize(complete, layout.sizes | {"q": 5})["num_attention_heads"] == 10


def test_a_pattern_shorter_than_the_number_of_layers_is_refused():
    with pytest.raises(ValueError, match="num_hidden_layers is 5, but the config lists 4"):
        find({k: v for k, v in plain("nemotron_h").items() if k != "layers_block_type"}
             | {"hybrid_override_pattern": "ME*M", "num_hidden_layers": 5})  # fmt: skip
    with pytest.raises(ValueError, match="layer_types lists 3 layers, num_hidden_layers says 4"):
        find(plain("qwen2_sliding", layer_types=["full_attention"] * 3))


@pytest.mark.parametrize("kinds", [
    ["mamba", "moe", "attention", "mlp", "mamba"],
    ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"],
])  # fmt: skip
@pytest.mark.parametrize("key", ["layers_block_type", "layer_types"])
def test_older_spellings_of_layer_kinds_are_read(kinds, key):
    config = {k: v for k, v in plain("nemotron_h").items() if k != "layers_block_type"} | {key: kinds}
    arch, complete = find(config)
    assert arch.kinds(complete) == tiny.VARIANTS["nemotron_h"]["layers_block_type"]


def test_a_pattern_string_is_read_and_cut_with_the_layers():
    config = {k: v for k, v in plain("nemotron_h").items() if k != "layers_block_type"}
    arch, complete = find(config | {"hybrid_override_pattern": "ME*M"})
    small = arch.resize(complete, arch.sizes(complete), [0, 2, 3])
    assert small["hybrid_override_pattern"] == "M*M"
    assert small["layers_block_type"] == ["linear_attention", "full_attention", "linear_attention"]
    assert small["num_hidden_layers"] == 3
    assert find(small)[1]["layers_block_type"] == small["layers_block_type"]


@pytest.mark.parametrize(("change", "told"), [
    ({"hybrid_override_pattern": "ME*X", "layers_block_type": None}, "unknown letters"),
    ({"layers_block_type": ["linear_attention", "conv"]}, "unknown kinds"),
    ({"layers_block_type": None}, "neither layers_block_type nor hybrid_override_pattern"),
    ({"hybrid_override_pattern": "MMMMM"}, "name different layers"),
])  # fmt: skip
def test_layers_that_are_not_known_are_refused(change, told):
    with pytest.raises(ValueError, match=told):
        find(plain("nemotron_h") | change)


def test_every_per_layer_list_is_shortened_by_the_same_layers():
    arch, complete = find(plain("qwen2_sliding") | {"layer_types": ["full_attention", "sliding_attention"] * 2})
    small = arch.resize(complete, arch.sizes(complete), [1, 2])
    assert small["layer_types"] == ["sliding_attention", "full_attention"]
    assert small["num_hidden_layers"] == 2
    arch, complete = find(plain("qwen3_moe_step"))  # layers 1 and 3 have experts, by position
    small = arch.resize(complete, arch.sizes(complete), [1, 2, 3])
    assert arch.kinds(small) == ["moe", "dense", "moe"]
    stock = hf.new_model(small, seed=0)
    assert [hasattr(layer.mlp, "experts") for layer in stock.model.layers] == [True, False, True]


def test_kept_layers_run_in_their_own_order():
    assert kept_layers([3, 0, 2, 1], 3) == [0, 2, 3]


def test_layers_of_several_kinds_are_each_known_by_their_own_parameters():
    layout = tiny.layout("qwen3_moe", "disk")
    has_experts = [any(f"layers.{i}.mlp.experts" in n for n in layout.tensors) for i in range(3)]
    assert has_experts == [True, False, True]
    assert "model.layers.1.mlp.down_proj.weight" in layout.tensors
    assert "ffn" in layout.elastic()
    assert "effn" in layout.elastic()
    all_experts = tiny.known("qwen3_moe")[0].layout(find(plain("qwen3_moe", mlp_only_layers=[]))[1])
    assert "ffn" not in all_experts.elastic()  # what no layer has cannot shrink


@pytest.mark.parametrize("change", [{"num_experts_per_tok": [2, 1, 2, 2]}, {"num_key_value_heads": [2, 2, 1]},
                                    {"moe_intermediate_size": [24, 16, 24, 16]}])  # fmt: skip
def test_sizes_that_differ_from_layer_to_layer_are_refused(change):
    def read() -> None:
        arch, complete = find(plain("nemotron_h") | change)
        arch.layout(complete)

    with pytest.raises(ValueError, match=next(iter(change))):
        read()


# Sizes that a member may not have.


def refuse(name: str, sizes: dict, told: str, **changes: object) -> None:
    arch, complete = find(plain(name, **changes))
    with pytest.raises(ValueError, match=told):
        check_sizes(arch.layout(complete), complete, sizes, who="member 'S'")


def test_grouped_routers_refuse_to_lose_experts():
    refuse("nemotron_h", {"expert": 4}, "n_group = 3", n_group=3, topk_group=2)
    arch, complete = find(plain("nemotron_h", n_group=3, topk_group=2))
    check_sizes(arch.layout(complete), complete, {"expert": 6, "hidden": 32}, who="member 'S'")


@pytest.mark.parametrize("name", tiny.ROUTED)
def test_fewer_experts_than_a_token_needs_are_refused(name):
    refuse(name, {"expert": 1}, "needs 2")
    arch, complete = tiny.known(name)
    check_sizes(arch.layout(complete), complete, {"expert": 2}, who="member 'S'")


def test_one_expert_is_refused_where_the_stock_router_cannot_run_with_one():
    # The stock nemotron_h router ranks groups by their two best experts, so one expert fails when it runs.
    with pytest.raises(RuntimeError, match="out of range"):
        tiny.logits(tiny.model("nemotron_h", n_routed_experts=1, num_experts_per_tok=1))
    refuse("nemotron_h", {"expert": 1}, "expert", num_experts_per_tok=1)


def test_llama_heads_that_do_not_divide_the_width_are_refused_as_the_stock_config_does(parents):
    # 4 of 6 heads at a width of 42: stock LlamaConfig refuses it even with head_dim written.
    with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
        tiny.config("llama", hidden_size=42, num_attention_heads=4, head_dim=8)
    with pytest.raises(ValueError, match="member 'S': the stock config refuses"):
        plan_members(("S=hidden=42,q=2",), open_nest(parents("llama")))
    assert plan_members(("S=hidden=40,q=2",), open_nest(parents("llama")))[0]["S"].sizes == {"hidden": 40, "q": 2}


@pytest.mark.parametrize(("sizes", "told"), [
    ({"kv": 1}, "names axis 'kv', which cannot shrink here. Elastic axes: hidden, ffn, q, layer"),
    ({"expert": 2}, "names axis 'expert'"),
    ({"hidden": 49}, "asks for 49 units of 'hidden', the nest has 48"),
    ({"hidden": 0}, "asks for 0 units"),
    ({"hidden": -1}, "asks for -1 units"),
    ({"hidden": 23.5}, "expected a whole number from 1 to 48"),
    ({"hidden": True}, "expected a whole number"),
    ({"hidden": "24"}, "expected a whole number"),
    ({"hidden": [24, 12, 24]}, "expected a whole number"),
])  # fmt: skip
def test_sizes_that_no_member_can_have_are_refused(sizes, told):
    refuse("mistral", sizes, re.escape(told))


def test_a_whole_float_is_accepted():
    check_sizes(tiny.layout("mistral"), tiny.known("mistral")[1], {"hidden": 32.0}, who="member 'S'")
