"""Write a member of a nest as one GGUF file, which llama.cpp and what is built on it load.

GGUF holds weights, sizes, tokenizer and chat template in a single file, in llama.cpp's own names and layouts. Tensors
are cut, rearranged and converted one block of rows at a time, so memory stays small whatever the parent's size. What
llama.cpp would compute otherwise than transformers is refused, or said aloud where it only matters beyond a limit.

Matrices get the type that is asked for; norms, biases, routers and the small Mamba parameters stay float32, because
llama.cpp expects that. The vocabulary is in gguf_vocab.py.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from nestling.arch import Config, Layout, Place
from nestling.axes import axes_of, count, dims, parse, take
from nestling.checkpoint import TORCH, Checkpoint, new_folder
from nestling.gguf_vocab import import_gguf, read_vocabulary
from nestling.nest import Member, Nest

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("f32", "f16", "bf16", "q8_0")
ROW_BLOCK = 1 << 24  # values converted at once: 64 MiB as float32

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


def write_gguf(
    nest: Nest,
    member: Member,
    to: str | Path,
    *,
    gguf_type: str = "bf16",
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Write `member` as GGUF to the file `to`, or into the folder `to` if it does not end in .gguf. Returns the file.

    say: told of everything that is not as asked, such as a matrix whose rows do not fill whole q8_0 blocks.
    """
    to = Path(to)
    if to.suffix != ".gguf":
        with new_folder(to, overwrite=overwrite, source=nest.folder) as folder:
            name = f"{to.resolve().name}-{gguf_type}.gguf"
            _write_file(nest, member, folder / name, gguf_type, say)
        return to / name
    if to.exists() and not overwrite:
        raise ValueError(f"'{to}' exists. Choose another file, or pass --overwrite to replace it.")
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    try:
        _write_file(nest, member, part, gguf_type, say)
        part.replace(to)
    finally:
        part.unlink(missing_ok=True)
    return to


def _write_file(nest: Nest, member: Member, file: Path, gguf_type: str, say: Callable[[str], None]) -> None:
    gguf = import_gguf()
    layout, config = nest.member_layout(member), _effective(nest, member)
    _check(layout, config, gguf_type)
    vocabulary = read_vocabulary(nest.folder, layout.sizes["vocab"])
    plan = _plan(nest, member, layout, gguf_type)
    notes = [*_notes(layout, config, plan, gguf_type), *vocabulary.notes]
    writer = gguf.GGUFWriter(file, _name(layout))
    try:
        _add_metadata(writer, nest, member, layout, config, gguf_type)
        vocabulary.add_to(writer)
        factors = _rope_factors(layout, config)
        extra = [] if factors is None else [_Ready("rope_freqs.weight", factors)]
        for one in (*extra, *plan):
            writer.add_tensor_info(one.name, one.shape, torch.empty(0).numpy().dtype, one.nbytes, one.dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in (*extra, *plan):
            writer.write_tensor_data(one)  # type: ignore[arg-type]  # it asks for nbytes and tofile alone
        assert writer.fout is not None
        for stream in writer.fout:
            stream.flush()
            os.fsync(stream.fileno())
    finally:
        writer.close()
    for note in notes:
        say(note)


@dataclass(frozen=True, kw_only=True)
class _Planned:
    """One tensor of the file: where its values come from, and what becomes of them."""

    name: str
    shape: tuple[int, ...]  # outermost first; experts of a layer are stacked along dim 0
    dtype: Any  # gguf.GGMLQuantizationType
    places: list[Place]
    cut: Callable[[Place], Tensor]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor's data in the file."""
        values, size = import_gguf().GGML_QUANT_SIZES[self.dtype]
        return math.prod(self.shape) // values * size

    def tofile(self, stream: IO[bytes]) -> None:
        """Write the data, a block of rows at a time."""
        for place in self.places:
            tensor = self.cut(place)
            rows = max(1, ROW_BLOCK * tensor.shape[0] // max(1, tensor.numel()))
            for block in tensor.split(rows):
                stream.write(encode(block.reshape(-1, self.shape[-1]), self.dtype, self.name))


@dataclass(frozen=True)
class _Ready:
    """One small float32 tensor that is computed, not cut."""

    name: str
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> Any:
        """Always float32."""
        return import_gguf().GGMLQuantizationType.F32

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data in the file."""
        return 4 * self.tensor.numel()

    def tofile(self, stream: IO[bytes]) -> None:
        """Write the data."""
        stream.write(encode(self.tensor.reshape(1, -1), self.dtype, self.name))


def encode(rows: Tensor, dtype: Any, name: str) -> bytes | memoryview:
    """Values [row, column] as GGUF stores them: `dtype` is one of gguf's GGMLQuantizationType."""
    gguf = import_gguf()
    kinds = gguf.GGMLQuantizationType
    if dtype == kinds.F32:
        return rows.float().contiguous().numpy().data
    if dtype == kinds.F16:
        halves = rows.to(torch.float16)
        if not torch.equal(halves.isfinite(), rows.isfinite()):
            raise ValueError(f"'{name}' has values beyond 65504, the largest f16. Use --gguf-type bf16.")
        return halves.contiguous().numpy().data
    if dtype == kinds.BF16:
        return rows.to(torch.bfloat16).contiguous().view(torch.int16).numpy().data
    return gguf.quants.quantize(rows.float().contiguous().numpy(), dtype).data


def _plan(nest: Nest, member: Member, layout: Layout, gguf_type: str) -> list[_Planned]:
    """Every tensor of the file, in the order of the layers."""
    kinds = import_gguf().GGMLQuantizationType
    checkpoint = Checkpoint(nest.folder)
    nest.layout.check_cover(checkpoint.entries.keys())
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in TORCH:
            raise ValueError(
                f"tensor '{name}' is stored as {entry.dtype}. GGUF is written from {', '.join(TORCH)} weights: "
                "use the nest as it was before it was quantized."
            )
    keep = {axis: size for axis, size in member.sizes.items() if axis != "layer"}
    is_paired = NAMES[layout.arch.model_type] == "llama"
    sizes = layout.sizes

    def cut(place: Place) -> Tensor:
        tensor = take(checkpoint.read(place.source), place.shape, nest.layout.sizes, keep, units=place.units)
        return _rearrange(_rename(place.name), tensor, sizes, is_paired=is_paired)

    plan = []
    for name, group in groupby(nest.layout.places(keep, nest.layers(member)), lambda place: _rename(place.name)):
        places = list(group)
        shape = _shape(name, dims(places[0].shape, sizes), sizes)
        if "_exps." in name:
            shape = (len(places), *shape)
        dtype = kinds[gguf_type.upper()] if MATRICES.search(name) and name.endswith("weight") else kinds.F32
        if dtype == kinds.Q8_0 and shape[-1] % 32:
            dtype = kinds.BF16
        plan.append(_Planned(name=name, shape=shape, dtype=dtype, places=places, cut=cut))
    return plan


def _rename(name: str) -> str:
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


def _shape(name: str, shape: tuple[int, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape in the file of a tensor that has `shape` here."""
    if name.endswith(("ssm_a", "ssm_d")):
        return (*shape, 1)
    if name.endswith("ssm_conv1d.weight"):
        return shape[0], shape[2]
    if name.endswith("ssm_norm.weight"):
        return sizes["group"], shape[0] // sizes["group"]
    return shape


def _rearrange(name: str, tensor: Tensor, sizes: dict[str, int], *, is_paired: bool) -> Tensor:
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


def _effective(nest: Nest, member: Member) -> Config:
    """The member's config with every key that is read here, also those that a stored config leaves out."""
    return nest.layout.arch.resize(nest.config, nest.sizes(member), nest.layers(member))


def _name(layout: Layout) -> str:
    return NAMES[layout.arch.model_type] + (
        "_moe" if layout.arch.model_type == HYBRID and "moe" in layout.kinds else ""
    )


def _check(layout: Layout, config: Config, gguf_type: str) -> None:
    """Refuse what llama.cpp would compute otherwise than the stock model, or not load."""
    if gguf_type not in TYPES:
        raise ValueError(f"GGUF type '{gguf_type}' is not one of {', '.join(TYPES)}.")
    if layout.arch.model_type not in NAMES:
        raise ValueError(f"GGUF is not written for '{layout.arch.model_type}', only for {', '.join(NAMES)}.")
    wrong = [reason for is_wrong, reason in _obstacles(layout, config) if is_wrong]
    if wrong:
        raise ValueError(f"llama.cpp cannot run this member as {_name(layout)}: {'; '.join(wrong)}.")


def _obstacles(layout: Layout, config: Config) -> Iterator[tuple[bool, str]]:
    kinds, model_type = set(layout.kinds), layout.arch.model_type
    if model_type == HYBRID:
        yield {"moe", "mlp"} <= kinds, "it wants every feed-forward layer routed or none, this has both kinds"
        yield config["use_bias"] or config.get("attention_bias", False), "it knows no bias of Mamba or attention"
        yield config["mlp_bias"] and "moe" in kinds, "it knows no bias of shared experts (mlp_bias)"
        yield config["n_group"] > 1, f"experts in n_group = {config['n_group']} groups have not been tried"
        yield config.get("mlp_hidden_act", "relu2") != "relu2", "mlp_hidden_act is not relu2"
        yield config.get("mamba_hidden_act", "silu") != "silu", "mamba_hidden_act is not silu"
        return
    rope = _rope(config)
    yield (
        rope["rope_type"] not in {"default", "linear", "llama3"},
        (f"rope_type {rope['rope_type']} is not written; known: default, linear, llama3"),
    )
    yield rope.get("partial_rotary_factor", 1) != 1, "rope turns only a part of each head"
    yield layout.sizes["head"] % 2 == 1, "head_dim is odd"
    yield config.get("hidden_act", "silu") != "silu", "hidden_act is not silu"
    if model_type == "qwen3_moe":
        yield "dense" in kinds, "it wants experts in every layer (mlp_only_layers, decoder_sparse_step)"
        yield (
            not config["norm_topk_prob"],
            "it renormalizes the chosen experts' weights, norm_topk_prob is false",
        )
    if model_type in {"qwen3", "qwen3_moe"}:
        yield config["attention_bias"], "it knows no attention bias"


def _notes(layout: Layout, config: Config, plan: list[_Planned], gguf_type: str) -> Iterator[str]:
    kinds = import_gguf().GGMLQuantizationType
    odd = [one for one in plan if gguf_type == "q8_0" and one.dtype == kinds.BF16]
    if odd:
        widths = ", ".join(map(str, sorted({one.shape[-1] for one in odd})))
        yield (
            f"{len(odd)} tensors stay bf16: q8_0 wants rows of a multiple of 32, theirs have {widths} "
            f"({odd[0].name}, ...)"
        )
    if _context(layout, config) < config["max_position_embeddings"]:
        yield (
            f"context length is {config['sliding_window']}, the sliding window: llama.cpp attends to everything there, "
            "which is the same up to that length"
        )
    if "linear_attention" in layout.kinds and config.get("time_step_min", 0.001) > 1e-5:
        yield (
            f"transformers holds Mamba's time steps above time_step_min = {config.get('time_step_min', 0.001)}, "
            "llama.cpp does not: numbers differ where a step falls below"
        )


def _context(layout: Layout, config: Config) -> int:
    longest = config["max_position_embeddings"]
    return min(longest, config["sliding_window"]) if "sliding_attention" in layout.kinds else longest


def _rope(config: Config) -> dict[str, Any]:
    """The rope settings in one spelling: newer configs keep them together, older ones in two places."""
    told = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = told.get("rope_type", told.get("type", "default"))
    return {"rope_theta": config.get("rope_theta", 10000.0), **told, "rope_type": kind}


def _rope_factors(layout: Layout, config: Config) -> Tensor | None:
    """What llama.cpp divides each of rope's frequencies by, float32 [head/2]; None where it is one everywhere.

    Llama 3.1: wavelengths beyond the old context over `low_freq_factor` are stretched by `factor`, those below the old
    context over `high_freq_factor` stay, and what lies between is interpolated in the frequency.
    """
    rope = _rope(config)
    if layout.arch.model_type == HYBRID or rope["rope_type"] != "llama3":
        return None
    frequency = rope["rope_theta"] ** (
        -torch.arange(0, layout.sizes["head"], 2, dtype=torch.float64) / layout.sizes["head"]
    )
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / (share + (1 - share) / rope["factor"])).float()


def _add_metadata(
    writer: GGUFWriter, nest: Nest, member: Member, layout: Layout, config: Config, gguf_type: str
) -> None:
    gguf, arch, sizes = import_gguf(), _name(layout), layout.sizes
    kept = ", ".join(f"{axis} {size} of {nest.layout.sizes[axis]}" for axis, size in member.sizes.items())
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"member {member.name} of nest {nest.fingerprint}")
    writer.add_description(f"cut by nestling; parent {nest.parent or 'unknown'}; keeps {kept or 'everything'}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file_type = {"f32": "ALL_F32"}.get(gguf_type, f"MOSTLY_{gguf_type.upper()}")
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_context_length(_context(layout, config))
    writer.add_block_count(sizes["layer"])
    places = list(layout.places())
    present = {axis for place in places for axis in axes_of(place.shape)} | {a for p in places for a in p.units}
    for key, product in SIZES.items():
        if axes_of(parse(product)) <= present:
            writer.add_uint32(f"{arch}.{key}", count(parse(product), sizes))
    if "expert" in present:
        writer.add_expert_used_count(config[layout.arch.active])
    if layout.arch.model_type == HYBRID:
        _add_hybrid(writer, layout, config)
        return
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count_kv(sizes["kv"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    rope = _rope(config)
    writer.add_rope_dimension_count(sizes["head"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])


def _add_hybrid(writer: GGUFWriter, layout: Layout, config: Config) -> None:
    """Nemotron-H: which layer is what follows from two lists, zero where a layer has no such part."""
    sizes = layout.sizes
    width = {"moe": sizes.get("effn", 0), "mlp": sizes.get("ffn", 0)}
    writer.add_feed_forward_length([width.get(kind, 0) for kind in layout.kinds])
    writer.add_head_count_kv([sizes["kv"] if kind == "full_attention" else 0 for kind in layout.kinds])
    if "full_attention" not in layout.kinds:
        writer.add_head_count(sizes["kv"] * sizes["q"])
    writer.add_layer_norm_rms_eps(config.get("layer_norm_epsilon", 1e-5))
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))  # some releases ask for this spelling
    if "moe" in layout.kinds:
        writer.add_expert_shared_count(1)  # all shared experts together are one, of the width written above
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))
        writer.add_expert_gating_func(import_gguf().ExpertGatingFuncType.SIGMOID)
