"""Tiny random models of every architecture that Nestling knows: stock classes, real folders, seconds.

Sizes are odd where the architecture allows and differ from each other, so that a cut along the wrong axis shows as a
wrong shape or a wrong number. Every parameter is drawn with enough spread that it matters for the logits.
"""

import json
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nestling.arch import ARCHITECTURES, Architecture, Layout, find
from nestling.axes import take

VOCAB = 96
FLOAT32_NAMES = ("A_log", "D", "dt_bias", "gate.weight", "e_score_correction_bias")  # kept whole when the rest is bf16
WIDE = ("hidden", "ffn", "effn", "sffn")

_DENSE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_MOE = {k: v for k, v in _DENSE.items() if k != "intermediate_size"} | {"num_experts_per_tok": 2}
_HYBRID = {
    "vocab_size": VOCAB, "hidden_size": 48, "layers_block_type": [], "tie_word_embeddings": False,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 9, "max_position_embeddings": 64,
    "mamba_num_heads": 6, "mamba_head_dim": 5, "n_groups": 2, "ssm_state_size": 7, "conv_kernel": 3, "chunk_size": 4,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20, "intermediate_size": 28, "routed_scaling_factor": 2.5,
}  # fmt: skip
_KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _hybrid(pattern: str, **changes: object) -> dict:
    return {"model_type": "nemotron_h"} | _HYBRID | {"layers_block_type": [_KINDS[k] for k in pattern]} | changes


# One plain variant of each architecture carries the architecture's own name.
VARIANTS: dict[str, dict] = {
    "llama": {"model_type": "llama"} | _DENSE,
    "llama_bias": {"model_type": "llama", "attention_bias": True, "mlp_bias": True}
    | _DENSE | {"num_key_value_heads": 3, "num_hidden_layers": 2},
    "llama_tied": {"model_type": "llama"} | _DENSE | {"tie_word_embeddings": True, "head_dim": 10, "hidden_size": 42},
    "mistral": {"model_type": "mistral", "head_dim": 12, "sliding_window": 5} | _DENSE,
    "qwen2": {"model_type": "qwen2"} | _DENSE,
    "qwen2_sliding": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    | _DENSE | {"num_hidden_layers": 4},
    "qwen3": {"model_type": "qwen3", "head_dim": 10} | _DENSE | {"tie_word_embeddings": True},
    "qwen3_bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True} | _DENSE,
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "intermediate_size": 24} | _MOE,
    "qwen3_moe": {"model_type": "qwen3_moe", "head_dim": 10, "num_experts": 5, "moe_intermediate_size": 24,
                  "intermediate_size": 36, "mlp_only_layers": [1], "norm_topk_prob": False} | _MOE,
    "qwen3_moe_step": {"model_type": "qwen3_moe", "head_dim": 8, "num_experts": 6, "moe_intermediate_size": 16,
                       "intermediate_size": 36, "decoder_sparse_step": 2, "norm_topk_prob": True,
                       "attention_bias": True}
    | _MOE | {"num_hidden_layers": 4},
    "nemotron_h": _hybrid("ME*-M"),
    "nemotron_h_bias": _hybrid("M*E-", use_conv_bias=False, use_bias=True, mlp_bias=True, norm_topk_prob=False,
                               n_groups=3, conv_kernel=4, mamba_num_heads=6, ssm_state_size=5,
                               routed_scaling_factor=1.0),
    "nemotron_h_latent": _hybrid("EM*E", moe_latent_size=16, mlp_bias=True, hidden_size=40),
}  # fmt: skip
NAMES = tuple(VARIANTS)
PLAIN = tuple(ARCHITECTURES)  # one of each architecture
ROUTED = tuple(n for n in NAMES if n.startswith(("mixtral", "qwen3_moe", "nemotron_h")))


def config(name: str, **changes: object) -> PretrainedConfig:
    """The stock config object of a variant."""
    plain = VARIANTS[name] | changes
    return AutoConfig.for_model(plain["model_type"], **{k: v for k, v in plain.items() if k != "model_type"})


def build(stock: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """A stock model with every parameter drawn at random, in evaluation mode."""
    model = AutoModelForCausalLM.from_config(stock).eval()
    draw_(model, torch.Generator().manual_seed(seed))
    return model.requires_grad_(False)


def model(name: str, seed: int = 0, **changes: object) -> PreTrainedModel:
    """A new model of a variant; the same seed gives the same weights."""
    return build(config(name, **changes), seed)


@cache
def shared(name: str) -> PreTrainedModel:
    """The model of a variant with seed 0, for tests that only read it."""
    return model(name)


@cache
def known(name: str) -> tuple[Architecture, dict]:
    """The table of a variant and its complete config."""
    return find({"model_type": VARIANTS[name]["model_type"], **config(name).to_dict()})


def layout(name: str, spelling: str = "memory") -> Layout:
    """The layout of a variant."""
    arch, complete = known(name)
    return arch.layout(complete, spelling)


def draw_(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw every parameter and stored buffer, norms, biases and router included."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if "norm" in name and tensor.dim() == 1:
                drawn = 1 + 0.4 * noise
            elif name.endswith("e_score_correction_bias"):
                drawn = 0.08 * noise  # enough to change choices, not enough to silence an expert
            elif tensor.dim() == 1:
                drawn = 0.5 * noise
            elif "embed" in name:
                drawn = noise
            else:
                drawn = 1.5 * noise / tensor.shape[-1] ** 0.5
            tensor.copy_(drawn)


def tokens(batch: int = 2, time: int = 11, seed: int = 0) -> Tensor:
    """Token ids: [batch, time]."""
    return torch.randint(3, VOCAB, (batch, time), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def logits(model: torch.nn.Module, x: Tensor | None = None) -> Tensor:
    """The stock model's logits on the tokens of this file: [batch, time, vocab]."""
    return model(input_ids=tokens() if x is None else x, use_cache=False).logits


def save(name: str, folder: Path, *, seed: int = 0, is_mixed: bool = False, is_chatty: bool = False) -> Path:
    """A real folder, written by the stock class.

    is_mixed: bf16, but what real checkpoints keep in float32 stays so. is_chatty: with tokenizer, chat template,
    generation config and the files that other tools lay beside them.
    """
    made = model(name, seed)
    if is_mixed:
        for part, tensor in (*made.named_parameters(), *made.named_buffers()):
            if tensor.is_floating_point() and not part.endswith(FLOAT32_NAMES):
                tensor.data = tensor.data.to(torch.bfloat16)
        made.config.dtype = torch.bfloat16
    made.save_pretrained(folder)
    if is_chatty:
        add_sidecars(folder)
    return folder


def add_sidecars(folder: Path) -> None:
    """A character tokenizer with a chat template, and what else lies beside weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    letters = ["<pad>", "<s>", "</s>", "<unk>", "<think>", "</think>", *map(chr, range(32, 122))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        additional_special_tokens=["<think>", "</think>"],
    )  # fmt: skip
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}<think>"
    tokenizer.save_pretrained(folder)
    GenerationConfig(max_new_tokens=7, eos_token_id=2, pad_token_id=0).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps({"kind": "none"}), "utf-8")
    (folder / "modeling_own.py").write_text("# remote code of the parent\n", "utf-8")
    (folder / "LICENSE").write_text("a license\n", "utf-8")


def random_orders(layout: Layout, generator: torch.Generator, axes: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """For each elastic axis an order drawn anew in every enclosing unit: int64 of `layout.order_shape(axis)`."""
    orders = {}
    for axis in layout.elastic() if axes is None else axes:
        shape = layout.order_shape(axis)
        orders[axis] = torch.rand(shape, generator=generator).argsort(-1)
    return orders


def random_sizes(layout: Layout, generator: torch.Generator, axes: tuple[str, ...] | None = None) -> dict[str, int]:
    """Legal sizes of the elastic axes, each smaller than the full one where it can be.

    The wide axes keep at least four: with one unit a matrix becomes a vector, and another kernel multiplies it.
    """
    sizes = {}
    for axis in layout.elastic() if axes is None else axes:
        full = layout.sizes[axis]
        least = (layout.num_active or 1) if axis == "expert" else 4 if axis in WIDE else 1
        sizes[axis] = int(torch.randint(least, full, (1,), generator=generator)) if least < full else full
        if layout.num_active and axis in ("hidden", "effn"):
            sizes[axis] -= sizes[axis] % 4  # torch.grouped_mm, on which fused experts run, wants rows of whole 16 bytes
    if layout.arch.model_type == "llama" and {"hidden", "q"} & sizes.keys():
        # The stock LlamaConfig refuses a width that is no multiple of the number of heads, head_dim or not.
        merged = layout.sizes | sizes
        heads = merged["kv"] * merged["q"]
        sizes["hidden"] = max(heads, merged["hidden"] // heads * heads)
    return sizes


def take_all(
    state: dict[str, Tensor], arch: Architecture, complete: dict, keep: dict, *, layers: list[int] | None = None,
    spelling: str = "memory",
) -> dict[str, Tensor]:  # fmt: skip
    """`take` on every tensor of a model."""
    whole = arch.layout(complete, spelling)
    return {
        place.name: take(
            state[place.source], place.shape, whole.sizes, keep, within=arch.within(), units=place.units
        )
        for place in whole.places(keep, layers)
    }  # fmt: skip


def load(arch: Architecture, complete: dict, state: dict[str, Tensor]) -> PreTrainedModel:
    """The stock class at a complete config with this state; anything missing, extra or misshapen is an error."""
    stock = AutoConfig.for_model(
        complete["model_type"], **{k: v for k, v in complete.items() if k not in {"model_type", "transformers_version"}}
    )
    small = AutoModelForCausalLM.from_config(stock).eval().requires_grad_(False)
    missing, unexpected = small.load_state_dict(state, strict=False)
    tied = {"lm_head.weight"} if stock.tie_word_embeddings else set()
    assert set(missing) <= tied, missing
    assert not unexpected, unexpected
    return small
