"""What llama.cpp calls the parts of each architecture, what it stores otherwise, and what it cannot run.

Facts alone, found in llama.cpp's reader and checked by loading files into it (tests/test_gguf.py): names, the keys that
hold sizes, the few tensors whose values or dims stand in another order, and the models that it would load and compute
otherwise than transformers does, or abort on.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor

from nestling.arch import Config, Layout

# model_type -> general.architecture. nemotron_h with expert layers is an architecture of its own there.
NAMES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe", "nemotron_h": "nemotron_h",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens": "token_embd", "backbone.embeddings": "token_embd", "lm_head": "output",
    "model.norm": "output_norm", "backbone.norm_f": "output_norm",
}  # fmt: skip
INSIDE = {  # within a layer, experts without their number: all experts of a layer become one tensor
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.experts.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.w3": "ffn_up_exps", "block_sparse_moe.experts.w2": "ffn_down_exps",
    "norm": "attn_norm", "mixer.in_proj": "ssm_in", "mixer.conv1d": "ssm_conv1d", "mixer.A_log": "ssm_a",
    "mixer.D": "ssm_d", "mixer.dt_bias": "ssm_dt.bias", "mixer.norm": "ssm_norm", "mixer.out_proj": "ssm_out",
    "mixer.q_proj": "attn_q", "mixer.k_proj": "attn_k", "mixer.v_proj": "attn_v", "mixer.o_proj": "attn_output",
    "mixer.gate": "ffn_gate_inp", "mixer.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mixer.experts.up_proj": "ffn_up_exps", "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.shared_experts.up_proj": "ffn_up_shexp", "mixer.shared_experts.down_proj": "ffn_down_shexp",
    "mixer.fc1_latent_proj": "ffn_latent_down", "mixer.fc2_latent_proj": "ffn_latent_up",
    "mixer.up_proj": "ffn_up", "mixer.down_proj": "ffn_down",
}  # fmt: skip
MATRICES = re.compile(r"token_embd|output\.|attn_(q|k|v|output)\.|ffn_(gate|up|down|latent)(?!_inp)|ssm_(in|out)\.")
# Key -> product of axes that it holds; written where the member's tensors have those axes.
SIZES = {
    "vocab_size": "vocab", "embedding_length": "hidden", "attention.head_count": "kv q",
    "attention.key_length": "head", "attention.value_length": "head",
    "expert_count": "expert", "expert_feed_forward_length": "effn", "expert_shared_feed_forward_length": "sffn",
    "moe_latent_size": "latent", "ssm.conv_kernel": "conv", "ssm.inner_size": "group mamba mdim",
    "ssm.state_size": "state", "ssm.time_step_rank": "group mamba", "ssm.group_count": "group",
}  # fmt: skip
HYBRID = "nemotron_h"
ROPES = ("default", "linear", "llama3")


def gguf_name(layout: Layout) -> str:
    """`general.architecture` of a model."""
    name = NAMES[layout.arch.model_type]
    return f"{name}_moe" if name == HYBRID and "moe" in layout.kinds else name


def rename(name: str) -> str:
    """The GGUF name of a tensor; all experts of a layer have the same."""
    stem, _, end = name.rpartition(".")
    inside = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\.(.+)", name)
    if inside is None:
        return f"{OUTSIDE[stem]}.{end}"
    layer, tail = inside[1], re.sub(r"experts\.\d+\.", "experts.", inside[2])
    if tail in INSIDE:  # a parameter that is not called weight or bias: its whole name is in the table
        return f"blk.{layer}.{INSIDE[tail]}"
    stem, _, end = tail.rpartition(".")
    if stem not in INSIDE:
        raise ValueError(
            f"GGUF has no name for '{name}'. If experts are fused in the files, load and save the model with "
            "transformers: it writes one tensor for each expert."
        )
    return f"blk.{layer}.{INSIDE[stem]}.{end}"


def stored_shape(name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape in the file of a tensor that has `shape` here."""
    if name.endswith(("ssm_a", "ssm_d")):
        return (*shape, 1)
    if name.endswith("ssm_conv1d.weight"):
        return shape[0], shape[2]
    if name.endswith("ssm_norm.weight"):
        return sizes["group"], shape[0] // sizes["group"]
    return shape


def rearrange(name: str, tensor: Tensor, sizes: dict[str, int], *, is_paired: bool) -> Tensor:
    """The values in the order of the file; a view where strides allow. dim 0 stays the outermost.

    is_paired: the architecture turns dims 2i and 2i + 1 of a head together (rope); transformers stores those that turn
    together half a head apart.
    """
    if name.endswith("ssm_a"):
        return -tensor.float().exp()  # stored as a logarithm; float32 as the stock model computes it
    if is_paired and re.search(r"attn_[qk]\.", name):
        heads = sizes["kv"] * (sizes["q"] if "attn_q" in name else 1)
        return tensor.view(heads, 2, sizes["head"] // 2, *tensor.shape[1:]).transpose(1, 2)
    return tensor


def obstacles(layout: Layout, config: Config) -> list[str]:
    """Why llama.cpp would not load this model, or compute it otherwise than transformers; empty if it is as good."""
    find = _hybrid_obstacles if layout.arch.model_type == HYBRID else _decoder_obstacles
    return [reason for reason, is_there in find(layout, config).items() if is_there]


def _hybrid_obstacles(layout: Layout, config: Config) -> dict[str, bool]:
    kinds = set(layout.kinds)
    return {
        "it wants every feed-forward layer routed or none, this has both kinds": {"moe", "mlp"} <= kinds,
        "it wants at least one Mamba layer": "linear_attention" not in kinds,
        "it wants at least one attention layer": "full_attention" not in kinds,
        "it knows no bias of Mamba or attention": config["use_bias"] or config.get("attention_bias", False),
        "it knows no bias of shared experts (mlp_bias)": config["mlp_bias"] and "moe" in kinds,
        f"experts in n_group = {config['n_group']} groups have not been tried": config["n_group"] > 1,
        "mlp_hidden_act is not relu2": config.get("mlp_hidden_act", "relu2") != "relu2",
        "mamba_hidden_act is not silu": config.get("mamba_hidden_act", "silu") != "silu",
    }


def _decoder_obstacles(layout: Layout, config: Config) -> dict[str, bool]:
    kinds, model_type, sizes = set(layout.kinds), layout.arch.model_type, layout.sizes
    rope, width = rope_settings(config), sizes["kv"] * sizes["q"] * sizes["head"]
    return {
        f"rope_type '{rope['rope_type']}' is not written; known: {', '.join(ROPES)}": rope["rope_type"] not in ROPES,
        "rope turns only a part of each head": rope.get("partial_rotary_factor", 1) != 1,
        "head_dim is odd": sizes["head"] % 2 == 1,
        "hidden_act is not silu": config.get("hidden_act", "silu") != "silu",
        f"it wants 'hidden' to be heads times head_dim, here {sizes['hidden']} and {width}: cut 'hidden' and 'q' by "
        "the same share": model_type == "qwen2" and width != sizes["hidden"],
        "it wants experts in every layer (mlp_only_layers, decoder_sparse_step)": "dense" in kinds,
        "it renormalizes the chosen experts' weights, norm_topk_prob is false": model_type == "qwen3_moe"
        and not config["norm_topk_prob"],
        "it knows no attention bias": model_type in {"qwen3", "qwen3_moe"} and config["attention_bias"],
    }


def context_length(layout: Layout, config: Config) -> int:
    """The longest text, in tokens, on which llama.cpp and transformers agree."""
    longest = config["max_position_embeddings"]
    return min(longest, config["sliding_window"]) if "sliding_attention" in layout.kinds else longest


def rope_settings(config: Config) -> dict[str, Any]:
    """The rope settings in one spelling: newer configs keep them together, older ones in two places."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = told.get("rope_type", told.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **told, "rope_type": kind}


def rope_factors(layout: Layout, config: Config) -> Tensor | None:
    """What llama.cpp divides each of rope's frequencies by, float32 [head/2]; None where it is one everywhere.

    Llama 3.1: wavelengths beyond the old context over `low_freq_factor` are stretched by `factor`, those below the old
    context over `high_freq_factor` stay, and what lies between is interpolated in the frequency.
    """
    rope = rope_settings(config)
    if layout.arch.model_type == HYBRID or rope["rope_type"] != "llama3":
        return None
    head = layout.sizes["head"]
    frequency = rope["rope_theta"] ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (share + (1 - share) / rope["factor"])).float()
