"""Mixture-of-experts decoders with gated experts: Mixtral, Qwen3-MoE. One tensor for each expert on disk, fused in
memory."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.arch import llama
from nestling.arch.table import Architecture, Config, Elastic, Rows

ELASTIC = {
    "hidden": Elastic(),
    "q": Elastic(within=("layer", "kv")),
    "expert": Elastic(within=("layer",), least="num_experts_per_tok"),
    "effn": Elastic(within=("layer", "expert")),
    "layer": Elastic(),
}
FUSED = {
    "model.layers.{layer}.mlp.gate.weight": "expert, hidden",
    "model.layers.{layer}.mlp.experts.gate_up_proj": "expert, effn + effn, hidden",
    "model.layers.{layer}.mlp.experts.down_proj": "expert, hidden, effn",
}
MIXTRAL_DISK = {
    "model.layers.{layer}.block_sparse_moe.gate.weight": "expert, hidden",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight": "effn, hidden",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight": "effn, hidden",
    "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight": "hidden, effn",
}
QWEN3_DISK = {
    "model.layers.{layer}.mlp.gate.weight": "expert, hidden",
    "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight": "effn, hidden",
    "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": "effn, hidden",
    "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight": "hidden, effn",
}


def _mixtral_rows(config: Config, experts: dict[str, str]) -> Rows:
    layer = llama.ATTENTION | experts
    return {"": llama.outside(config), "full_attention": layer, "sliding_attention": layer}


def _mixtral_complete(config: Config) -> Config:
    return llama.complete({"num_local_experts": 8, "num_experts_per_tok": 2, **config})


def _qwen3_rows(config: Config, experts: dict[str, str]) -> Rows:
    bias = llama.ATTENTION_BIAS | llama.OUTPUT_BIAS if config["attention_bias"] else {}
    shared = llama.ATTENTION | llama.HEAD_NORMS | bias
    return {"": llama.outside(config), "moe": shared | experts, "dense": shared | llama.FEED_FORWARD}


def _qwen3_complete(config: Config) -> Config:
    config = {"decoder_sparse_step": 1, "num_experts_per_tok": 8, "norm_topk_prob": False, **config}
    if config.get("num_experts") is None:
        config["num_experts"] = config.pop("num_local_experts", 128)  # the spelling that newer transformers save
    config["mlp_only_layers"] = config.get("mlp_only_layers") or []
    return llama.complete(config)


def _qwen3_kinds(config: Config) -> list[str]:
    step, dense = config["decoder_sparse_step"], set(config["mlp_only_layers"])
    return ["moe" if i not in dense and (i + 1) % step == 0 else "dense" for i in range(config["num_hidden_layers"])]


def _qwen3_keep_layers(config: Config, layers: Sequence[int]) -> Config:
    # The kinds followed from the layers' positions, which change: name the dense ones.
    kept = [_qwen3_kinds(config)[i] for i in layers]
    dense = [i for i, kind in enumerate(kept) if kind == "dense"]
    return config | {"mlp_only_layers": dense, "decoder_sparse_step": 1, "num_hidden_layers": len(layers)}


MIXTRAL = Architecture(
    model_type="mixtral",
    config={k: v for k, v in llama.CONFIG.items() if v != "ffn"}
    | {"intermediate_size": "effn", "num_local_experts": "expert"},
    elastic=ELASTIC,
    rows={
        "disk": lambda config: _mixtral_rows(config, MIXTRAL_DISK),
        "memory": lambda config: _mixtral_rows(config, FUSED),
    },
    kinds=llama.kinds,
    complete=_mixtral_complete,
    keep_layers=llama.keep_layers,
    state=llama.STATE,
    norms=llama.NORMS,
    layers="model.layers",
    active="num_experts_per_tok",
    quantized=("w1.weight", "w2.weight", "w3.weight"),
)
QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    config=llama.CONFIG | {"num_experts": "expert", "moe_intermediate_size": "effn"},
    elastic=ELASTIC | {"ffn": Elastic(within=("layer",))},
    rows={"disk": lambda config: _qwen3_rows(config, QWEN3_DISK), "memory": lambda config: _qwen3_rows(config, FUSED)},
    kinds=_qwen3_kinds,
    complete=_qwen3_complete,
    keep_layers=_qwen3_keep_layers,
    state={"moe": llama.STATE["full_attention"], "dense": llama.STATE["full_attention"]},
    norms=llama.NORMS,
    layers="model.layers",
    active="num_experts_per_tok",
    quantized=("gate_proj.weight", "up_proj.weight", "down_proj.weight"),  # in experts and in dense layers
)
