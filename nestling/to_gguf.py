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
from nestling.checkpoint import TORCH, check_free, new_folder
from nestling.gguf_arch import (
    HYBRID,
    MATRICES,
    NAMES,
    SIZES,
    context_length,
    gguf_name,
    obstacles,
    rearrange,
    rename,
    rope_factors,
    rope_settings,
    stored_shape,
)
from nestling.gguf_vocab import import_gguf, read_vocabulary
from nestling.nest import Member, Nest, check_plain, prefix
from nestling.stored import check_cover

if TYPE_CHECKING:
    from gguf import GGUFWriter

TYPES = ("f32", "f16", "bf16", "q8_0")
ROW_BLOCK = 1 << 24  # values converted at once: 64 MiB as float32


def write_gguf(
    nest: Nest,
    member: Member,
    to: str | Path,
    *,
    gguf_type: str = "bf16",
    overwrite: bool = False,
    drop: str = "",
    say: Callable[[str], None] = print,
) -> Path:
    """Write `member` as GGUF to the file `to`, or into the folder `to` if it does not end in .gguf. Returns the file.

    drop: a prefix of tensor names to leave out knowingly, such as "mtp".
    say: told of everything that is not as asked, such as a matrix whose rows do not fill whole q8_0 blocks.
    """
    to = Path(to)
    check_plain(nest, verb="slice --format gguf")
    check_cover(nest, drop=drop)
    for place in nest.places(member):
        nest.check_place(place)
    if to.suffix != ".gguf":
        with new_folder(to, overwrite=overwrite, source=nest.folder) as folder:
            name = f"{to.resolve().name}-{gguf_type}.gguf"
            _write_file(nest, member, folder / name, gguf_type, say)
        return to / name
    check_free(to, overwrite=overwrite)
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
    writer = gguf.GGUFWriter(file, gguf_name(layout))
    try:
        _add_metadata(writer, nest, member, layout, config, gguf_type)
        vocabulary.add_to(writer)
        every = [*_computed(layout, config), *plan]
        for one in every:
            writer.add_tensor_info(one.name, one.shape, torch.empty(0).numpy().dtype, one.nbytes, one.dtype)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for one in every:
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
    checkpoint = nest.checkpoint
    for name, entry in checkpoint.entries.items():
        if entry.dtype not in TORCH:
            raise ValueError(
                f"tensor '{name}' is stored as {entry.dtype}. GGUF is written from {', '.join(TORCH)} weights: "
                "use the nest as it was before it was quantized."
            )
    keep = prefix(member)
    is_paired = NAMES[layout.arch.model_type] == "llama"
    sizes = layout.sizes

    def cut(place: Place) -> Tensor:
        tensor = take(checkpoint.read(place.source), place.shape, nest.layout.sizes, keep, units=place.units)
        return rearrange(rename(place.name), tensor, sizes, is_paired=is_paired)

    plan = []
    for name, group in groupby(nest.layout.places(keep, nest.layers(member)), lambda place: rename(place.name)):
        places = list(group)
        shape = stored_shape(name, dims(places[0].shape, sizes), sizes)
        if "_exps." in name:
            shape = (len(places), *shape)
        dtype = kinds[gguf_type.upper()] if MATRICES.search(name) and name.endswith("weight") else kinds.F32
        if dtype == kinds.Q8_0 and shape[-1] % 32:
            dtype = kinds.BF16
        plan.append(_Planned(name=name, shape=shape, dtype=dtype, places=places, cut=cut))
    return plan


def _effective(nest: Nest, member: Member) -> Config:
    """The member's config with every key that is read here, also those that a stored config leaves out."""
    return nest.layout.arch.resize(nest.config, nest.sizes(member), nest.layers(member))


def _check(layout: Layout, config: Config, gguf_type: str) -> None:
    """Refuse what llama.cpp would compute otherwise than the stock model, or not load."""
    if gguf_type not in TYPES:
        raise ValueError(f"GGUF type '{gguf_type}' is not one of {', '.join(TYPES)}.")
    if layout.arch.model_type not in NAMES:
        raise ValueError(f"GGUF is not written for '{layout.arch.model_type}', only for {', '.join(NAMES)}.")
    wrong = obstacles(layout, config)
    if wrong:
        raise ValueError(f"llama.cpp cannot run this member as {gguf_name(layout)}: {'; '.join(wrong)}.")


def _notes(layout: Layout, config: Config, plan: list[_Planned], gguf_type: str) -> Iterator[str]:
    kinds = import_gguf().GGMLQuantizationType
    odd = [one for one in plan if gguf_type == "q8_0" and one.dtype == kinds.BF16]
    if odd:
        widths = ", ".join(map(str, sorted({one.shape[-1] for one in odd})))
        yield (
            f"{len(odd)} tensors stay bf16: q8_0 wants rows of a multiple of 32, theirs have {widths} "
            f"({odd[0].name}, ...)"
        )
    if context_length(layout, config) < config["max_position_embeddings"]:
        yield (
            f"context length is {config['sliding_window']}, the sliding window: llama.cpp attends to everything there, "
            "which is the same up to that length"
        )
    if "linear_attention" in layout.kinds and config.get("time_step_min", 0.001) > 1e-5:
        yield (
            f"transformers holds Mamba's time steps above time_step_min = {config.get('time_step_min', 0.001)}, "
            "llama.cpp does not: numbers differ where a step falls below"
        )


def _computed(layout: Layout, config: Config) -> Iterator[_Ready]:
    """Tensors that llama.cpp wants and the checkpoint does not have."""
    sizes = layout.sizes
    if layout.arch.model_type == HYBRID and not config["use_conv_bias"]:
        width = sizes["group"] * (sizes["mamba"] * sizes["mdim"] + 2 * sizes["state"])
        for layer, kind in enumerate(layout.kinds):
            if kind == "linear_attention":
                yield _Ready(f"blk.{layer}.ssm_conv1d.bias", torch.zeros(width))  # it adds one without looking
    factors = rope_factors(layout, config)
    if factors is not None:
        yield _Ready("rope_freqs.weight", factors)


def _add_metadata(
    writer: GGUFWriter, nest: Nest, member: Member, layout: Layout, config: Config, gguf_type: str
) -> None:
    gguf, arch, sizes = import_gguf(), gguf_name(layout), layout.sizes
    kept = ", ".join(f"{axis} {size} of {nest.layout.sizes[axis]}" for axis, size in member.sizes.items())
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"member {member.name} of nest {nest.fingerprint}")
    writer.add_description(f"cut by nestling; parent {nest.parent or 'unknown'}; keeps {kept or 'everything'}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    file_type = {"f32": "ALL_F32"}.get(gguf_type, f"MOSTLY_{gguf_type.upper()}")
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_context_length(context_length(layout, config))
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
    rope = rope_settings(config)
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
    writer.add_layer_norm_rms_eps(config.get("layer_norm_epsilon", 1e-5))
    writer.add_layer_norm_eps(config.get("layer_norm_epsilon", 1e-5))  # some releases ask for this spelling
    if "moe" in layout.kinds:
        writer.add_expert_shared_count(1)  # all shared experts together are one, of the width written above
        writer.add_expert_weights_norm(config.get("norm_topk_prob", True))
        writer.add_expert_weights_scale(config.get("routed_scaling_factor", 1.0))
        writer.add_expert_gating_func(import_gguf().ExpertGatingFuncType.SIGMOID)
