"""Dense decoders: Llama, Mistral, Qwen2, Qwen3. Attention with grouped key-value heads, then a gated feed-forward
layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from nestling.arch.table import Architecture, Config, Elastic, Rows, per_layer

# "q" is query heads per key-value head, so heads shrink within their group and keep sharing its keys and values.
CONFIG = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "num_key_value_heads": "kv",
    "num_attention_heads": "kv q",
    "head_dim": "head",
    "intermediate_size": "ffn",
}
ELASTIC = {
    "hidden": Elastic(),
    "ffn": Elastic(within=("layer",)),
    "q": Elastic(within=("layer", "kv")),
    "layer": Elastic(),
}
ATTENTION = {
    "model.layers.{layer}.self_attn.q_proj.weight": "kv q head, hidden",
    "model.layers.{layer}.self_attn.k_proj.weight": "kv head, hidden",
    "model.layers.{layer}.self_attn.v_proj.weight": "kv head, hidden",
    "model.layers.{layer}.self_attn.o_proj.weight": "hidden, kv q head",
    "model.layers.{layer}.input_layernorm.weight": "hidden",
    "model.layers.{layer}.post_attention_layernorm.weight": "hidden",
}
ATTENTION_BIAS = {
    "model.layers.{layer}.self_attn.q_proj.bias": "kv q head",
    "model.layers.{layer}.self_attn.k_proj.bias": "kv head",
    "model.layers.{layer}.self_attn.v_proj.bias": "kv head",
}
OUTPUT_BIAS = {"model.layers.{layer}.self_attn.o_proj.bias": "hidden"}
HEAD_NORMS = {
    "model.layers.{layer}.self_attn.q_norm.weight": "head",
    "model.layers.{layer}.self_attn.k_norm.weight": "head",
}
FEED_FORWARD = {
    "model.layers.{layer}.mlp.gate_proj.weight": "ffn, hidden",
    "model.layers.{layer}.mlp.up_proj.weight": "ffn, hidden",
    "model.layers.{layer}.mlp.down_proj.weight": "hidden, ffn",
}
FEED_FORWARD_BIAS = {
    "model.layers.{layer}.mlp.gate_proj.bias": "ffn",
    "model.layers.{layer}.mlp.up_proj.bias": "ffn",
    "model.layers.{layer}.mlp.down_proj.bias": "hidden",
}
STATE = {
    "full_attention": {"kv": "kv head + kv head"},
    "sliding_attention": {"kv": "kv head + kv head"},
}
NORMS = {
    "model.layers.{layer}.input_layernorm": "hidden",
    "model.layers.{layer}.post_attention_layernorm": "hidden",
    "model.norm": "hidden",
}
QUANTIZED = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")


def outside(config: Config) -> dict[str, str]:
    """The rows outside the layers; a tied head is the embedding and has no row."""
    rows = {"model.embed_tokens.weight": "vocab, hidden", "model.norm.weight": "hidden"}
    return rows if config["tie_word_embeddings"] else rows | {"lm_head.weight": "vocab, hidden"}


def complete(config: Config, *, is_tied: bool = False) -> Config:
    """Write out the sizes that transformers would derive, before anything is cut."""
    config = {"tie_word_embeddings": is_tied, "attention_bias": False, "mlp_bias": False, **config}
    heads = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None:
        if config["hidden_size"] % heads:
            raise ValueError(
                f"head_dim is not given and hidden_size = {config['hidden_size']} is not a multiple of "
                f"num_attention_heads = {heads}. Write head_dim into config.json."
            )
        config["head_dim"] = config["hidden_size"] // heads
    num_layers = config["num_hidden_layers"]
    for key in ("layer_types",):
        if config.get(key) is not None and len(config[key]) != num_layers:
            raise ValueError(f"{key} lists {len(config[key])} layers, num_hidden_layers says {num_layers}.")
    return config


def kinds(config: Config) -> list[str]:
    """Full or sliding attention for each layer; the same weights, but another cache."""
    num_layers = config["num_hidden_layers"]
    if config.get("layer_types"):
        return list(config["layer_types"])
    uses_window = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    first = config.get("max_window_layers", 0)
    return ["sliding_attention" if uses_window and i >= first else "full_attention" for i in range(num_layers)]


def keep_layers(config: Config, layers: Sequence[int]) -> Config:
    """The config with only these layers."""
    kept = per_layer(config, "layer_types", layers)
    if not kept and config.get("max_window_layers") is not None:
        # Which layers slide followed from their position, which is about to change.
        kept = {"layer_types": [kinds(config)[i] for i in layers]}
    return config | kept | {"num_hidden_layers": len(layers)}


def _rows(config: Config, *, attention: dict[str, str], biases: Callable[[Config], dict[str, str]]) -> Rows:
    layer = attention | FEED_FORWARD | biases(config)
    return {"": outside(config), "full_attention": layer, "sliding_attention": layer}


def _llama_biases(config: Config) -> dict[str, str]:
    attention = ATTENTION_BIAS | OUTPUT_BIAS if config["attention_bias"] else {}
    return attention | (FEED_FORWARD_BIAS if config["mlp_bias"] else {})


def _qwen3_biases(config: Config) -> dict[str, str]:
    return ATTENTION_BIAS | OUTPUT_BIAS if config["attention_bias"] else {}


def _dense(
    model_type: str,
    attention: dict[str, str],
    biases: Callable[[Config], dict[str, str]],
    *,
    multiples: dict[str, str] | None = None,
) -> Architecture:
    rows = partial(_rows, attention=attention, biases=biases)
    return Architecture(
        model_type=model_type,
        config=CONFIG,
        elastic=ELASTIC,
        rows={"disk": rows, "memory": rows},
        kinds=kinds,
        complete=complete,
        keep_layers=keep_layers,
        state=STATE,
        norms=NORMS,
        layers="model.layers",
        quantized=QUANTIZED,
        multiples=multiples or {},
    )


LLAMA = _dense("llama", ATTENTION, _llama_biases, multiples={"hidden_size": "num_attention_heads"})
MISTRAL = _dense("mistral", ATTENTION, lambda config: {})
QWEN2 = _dense("qwen2", ATTENTION, lambda config: ATTENTION_BIAS)
QWEN3 = _dense("qwen3", ATTENTION | HEAD_NORMS, _qwen3_biases)
