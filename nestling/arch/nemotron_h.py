"""Nemotron-H hybrids: each layer is one mixer, either Mamba-2, attention, a mixture of experts or a plain
feed-forward layer."""

from __future__ import annotations

from collections.abc import Sequence

from nestling.arch.table import Architecture, Config, Elastic, Rows, per_layer

INNER = "group mamba mdim"  # Mamba heads within groups; each head has mdim channels
STATES = "group state"  # B and C are shared by the heads of a group
PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
SPELLINGS = {"mamba": "linear_attention", "attention": "full_attention"}

MAMBA = {
    "mixer.in_proj.weight": f"{INNER} + {INNER} + {STATES} + {STATES} + group mamba, hidden",  # z, x, B, C, dt
    "mixer.conv1d.weight": f"{INNER} + {STATES} + {STATES}, 1, conv",
    "mixer.A_log": "group mamba",
    "mixer.D": "group mamba",
    "mixer.dt_bias": "group mamba",
    "mixer.norm.weight": INNER,
    "mixer.out_proj.weight": f"hidden, {INNER}",
}
ATTENTION = {
    "mixer.q_proj.weight": "kv q head, hidden",
    "mixer.k_proj.weight": "kv head, hidden",
    "mixer.v_proj.weight": "kv head, hidden",
    "mixer.o_proj.weight": "hidden, kv q head",
}


def _rows(config: Config, spelling: str) -> Rows:
    root = {"disk": "backbone", "memory": "model"}[spelling]
    stream = "latent" if config.get("moe_latent_size") is not None else "hidden"  # what the experts read and write
    mamba, mlp = dict(MAMBA), {"mixer.up_proj.weight": "ffn, hidden", "mixer.down_proj.weight": "hidden, ffn"}
    moe = {
        "mixer.gate.weight": "expert, hidden",
        "mixer.gate.e_score_correction_bias": "expert",
        "mixer.shared_experts.up_proj.weight": "sffn, hidden",
        "mixer.shared_experts.down_proj.weight": "hidden, sffn",
    }
    if spelling == "disk":
        moe |= {
            "mixer.experts.{expert}.up_proj.weight": f"effn, {stream}",
            "mixer.experts.{expert}.down_proj.weight": f"{stream}, effn",
        }
    else:
        moe |= {
            "mixer.experts.up_proj": f"expert, effn, {stream}",
            "mixer.experts.down_proj": f"expert, {stream}, effn",
        }
    if stream == "latent":
        moe |= {"mixer.fc1_latent_proj.weight": "latent, hidden", "mixer.fc2_latent_proj.weight": "hidden, latent"}
    if config["use_conv_bias"]:
        mamba |= {"mixer.conv1d.bias": f"{INNER} + {STATES} + {STATES}"}
    if config["use_bias"]:
        mamba |= {
            "mixer.in_proj.bias": f"{INNER} + {INNER} + {STATES} + {STATES} + group mamba",
            "mixer.out_proj.bias": "hidden",
        }
    if config["mlp_bias"]:
        mlp |= {"mixer.up_proj.bias": "ffn", "mixer.down_proj.bias": "hidden"}
        moe |= {"mixer.shared_experts.up_proj.bias": "sffn", "mixer.shared_experts.down_proj.bias": "hidden"}
        if stream == "latent":
            moe |= {"mixer.fc1_latent_proj.bias": "latent", "mixer.fc2_latent_proj.bias": "hidden"}
    mixers = {"linear_attention": mamba, "full_attention": ATTENTION, "moe": moe, "mlp": mlp}
    rows = {
        kind: {f"{root}.layers.{{layer}}.{name}": shape for name, shape in ({"norm.weight": "hidden"} | mixer).items()}
        for kind, mixer in mixers.items()
    }
    rows[""] = {f"{root}.embeddings.weight": "vocab, hidden", f"{root}.norm_f.weight": "hidden"}
    if not config["tie_word_embeddings"]:
        rows[""]["lm_head.weight"] = "vocab, hidden"
    return rows


def _complete(config: Config) -> Config:
    """Old spellings of the layer kinds become the current one; flags get the values that transformers assumes."""
    config = {
        "tie_word_embeddings": False,
        "use_conv_bias": True,
        "use_bias": False,
        "mlp_bias": False,
        "n_group": 1,
        **config,
    }
    pattern = config.get("hybrid_override_pattern")
    given = config.pop("layer_types", None) or config.get("layers_block_type")
    if given is None and pattern is None:
        raise ValueError(
            "the config has neither layers_block_type nor hybrid_override_pattern: the layers are unknown."
        )
    if given is None:
        assert isinstance(pattern, str)
        unknown = sorted(set(pattern) - PATTERN.keys())
        if unknown:
            raise ValueError(f"hybrid_override_pattern has unknown letters {unknown}; known: {sorted(PATTERN)}.")
        given = [PATTERN[letter] for letter in pattern]
    kinds = [SPELLINGS.get(kind, kind) for kind in given]
    unknown = sorted(set(kinds) - set(PATTERN.values()))
    if unknown:
        raise ValueError(f"layers_block_type has unknown kinds {unknown}; known: {sorted(PATTERN.values())}.")
    num_layers = config.get("num_hidden_layers", len(kinds))
    if num_layers != len(kinds):
        raise ValueError(f"num_hidden_layers is {num_layers}, but the config lists {len(kinds)} layers.")
    if pattern is not None and [PATTERN.get(letter) for letter in pattern] != kinds:
        raise ValueError(f"hybrid_override_pattern '{pattern}' and layers_block_type name different layers: {kinds}.")
    return config | {"layers_block_type": kinds, "num_hidden_layers": len(kinds)}


def _keep_layers(config: Config, layers: Sequence[int]) -> Config:
    lists = per_layer(config, "layers_block_type", layers) | per_layer(config, "hybrid_override_pattern", layers)
    return config | lists | {"num_hidden_layers": len(layers)}


def _refuse(config: Config) -> dict[str, str]:
    if config["n_group"] > 1:
        return {
            "expert": f"the router chooses among n_group = {config['n_group']} groups of experts, and a "
            "group that loses experts unevenly routes wrongly"
        }
    return {}


NEMOTRON_H = Architecture(
    model_type="nemotron_h",
    config={
        "vocab_size": "vocab",
        "hidden_size": "hidden",
        "num_key_value_heads": "kv",
        "num_attention_heads": "kv q",
        "head_dim": "head",
        "n_groups": "group",
        "mamba_num_heads": "group mamba",
        "mamba_head_dim": "mdim",
        "ssm_state_size": "state",
        "conv_kernel": "conv",
        "n_routed_experts": "expert",
        "moe_intermediate_size": "effn",
        "moe_shared_expert_intermediate_size": "sffn",
        "moe_latent_size": "latent",
        "intermediate_size": "ffn",
    },
    elastic={
        "hidden": Elastic(),
        "mamba": Elastic(within=("layer", "group")),
        "mdim": Elastic(within=("layer",)),
        "q": Elastic(within=("layer", "kv")),
        "expert": Elastic(within=("layer",), least="num_experts_per_tok", at_least=2),  # its router ranks groups by two
        "effn": Elastic(within=("layer", "expert")),
        "sffn": Elastic(within=("layer",)),
        "ffn": Elastic(within=("layer",)),
        "layer": Elastic(),
    },
    rows={"disk": lambda config: _rows(config, "disk"), "memory": lambda config: _rows(config, "memory")},
    kinds=lambda config: list(config["layers_block_type"]),
    complete=_complete,
    keep_layers=_keep_layers,
    state={
        "full_attention": {"kv": "kv head + kv head"},
        "linear_attention": {"ssm": f"{INNER}, state", "conv": f"{INNER} + {STATES} + {STATES}, conv"},
    },
    norms={
        "model.layers.{layer}.norm": "hidden",
        "model.layers.{layer}.mixer.norm": INNER,
        "model.norm_f": "hidden",
    },
    layers="model.layers",
    active="num_experts_per_tok",
    quantized=("up_proj.weight", "down_proj.weight", "in_proj.weight", "out_proj.weight"),
    refuse=_refuse,
)
