"""The layout of compressed-tensors (llm-compressor, vLLM): `quantization_config` of config.json with groups of targets
and a list of modules to ignore; `weight_packed`, `weight_scale`, `weight_global_scale` and activation scales beside
each matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nestling.formats.matrix import NVFP4_BLOCK, Spelling, Tile

METHOD = "compressed-tensors"
FORMATS = ("float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision")
SPELLING = Spelling(
    method=METHOD,
    packed="weight_packed",
    global_scale="weight_global_scale",
    packed_input="input_global_scale",
)


def check(section: Mapping[str, Any]) -> tuple[Tile, ...]:
    """Refuse what cannot be cut bit for bit. Returns the tiles of values that share a scale."""
    groups = section.get("config_groups") or {}
    named = [section.get("format"), *(group.get("format") for group in groups.values())]
    for name in named:
        if name is not None and name not in FORMATS:
            raise ValueError(f"compressed-tensors format '{name}' is not one that Nestling can cut: {_known()}.")
    if section.get("transform_config"):
        raise ValueError(
            "the quantization has a transform_config (rotations of the activations): a member keeps some units only, "
            "and a rotation mixes all of them. Quantize without transforms."
        )
    if (section.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError(
            f"sparse weights ({section['sparsity_config']['format']}) cannot be cut. Supported: {_known()}."
        )
    tiles = []
    for group, scheme in groups.items():
        weights = scheme.get("weights")
        if weights is None:
            continue
        bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
        is_fp8 = bits == 8 and strategy in ("tensor", "channel", "block", "group")
        is_nvfp4 = bits == 4 and strategy in ("tensor_group", "group") and size == NVFP4_BLOCK
        if weights.get("type") != "float" or not weights.get("symmetric", True) or not (is_fp8 or is_nvfp4):
            raise ValueError(
                f"{group} stores weights as {weights.get('type')} of {bits} bits by {strategy} (group size {size}), "
                f"which Nestling cannot cut. Supported: {_known()}."
            )
        tile = weights.get("block_structure") if strategy == "block" else [1, size]
        if is_fp8 and strategy in ("block", "group") and not _is_tile(tile):
            raise ValueError(f"{group} has tiles of {str(tile)[:80]}, expected two whole numbers, rows and columns.")
        if strategy == "block":
            height, width = weights["block_structure"]
            tiles.append((height, width))
        elif is_fp8 and strategy == "group":
            tiles.append((1, size))
    return tuple(dict.fromkeys(tiles))


def has_static_inputs(section: Mapping[str, Any]) -> bool:
    """Whether the config says that every quantized matrix has an activation scale beside it."""
    schemes = [scheme for scheme in (section.get("config_groups") or {}).values() if scheme.get("weights")]
    inputs = [scheme.get("input_activations") for scheme in schemes]
    return bool(inputs) and all(one is not None and one.get("dynamic", False) is not True for one in inputs)


def _is_tile(tile: Any) -> bool:
    return isinstance(tile, list) and len(tile) == 2 and all(type(n) is int and n > 0 for n in tile)


def _known() -> str:
    return "FP8 (float-quantized, naive-quantized), NVFP4 (nvfp4-pack-quantized), and both mixed"
