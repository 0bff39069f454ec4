"""The layout of NVIDIA Model Optimizer: `hf_quant_config.json`, or `quantization_config` of config.json with
`quant_method: modelopt`, or both; `weight` (bytes), `weight_scale`, `weight_scale_2` and `input_scale` beside each
matrix, `k_scale` and `v_scale` for an FP8 cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nestling.formats.matrix import Spelling, Tile

METHOD = "modelopt"
SIDECAR = "hf_quant_config.json"
TILES: tuple[Tile, ...] = ((128, 128),)
ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "FP8_BLOCK_SCALES",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
)
WITHOUT_INPUTS = ("FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "W4A16_NVFP4")
SPELLING = Spelling(method=METHOD, packed="weight", global_scale="weight_scale_2", packed_input="input_scale")


def check(section: Mapping[str, Any] | None, sidecar: Mapping[str, Any] | None) -> tuple[Tile, ...]:
    """Refuse what cannot be cut bit for bit. Returns the tiles of values that share a scale."""
    told = {where: _algorithm(one) for where, one in (("config.json", section), (SIDECAR, sidecar)) if one}
    named = {name for name in told.values() if name}
    if len(named) > 1:
        raise ValueError(f"{SIDECAR} and config.json name different algorithms: {told}. Which files belong together?")
    for one in (section, (sidecar or {}).get("quantization")):
        named |= {_upper(layer.get("quant_algo")) for layer in ((one or {}).get("quantized_layers") or {}).values()}
    unknown = sorted(named - {*ALGORITHMS, "", "UNQUANTIZED"})
    if unknown:
        raise ValueError(
            f"modelopt algorithm {', '.join(unknown)} is not one that Nestling can cut: {', '.join(ALGORITHMS)}."
        )
    return TILES


def has_static_inputs(section: Mapping[str, Any] | None, sidecar: Mapping[str, Any] | None) -> bool:
    """Whether the description says that every quantized matrix has an activation scale beside it."""
    return (_algorithm(section or {}) or _algorithm(sidecar or {})) == "NVFP4"


def _algorithm(told: Mapping[str, Any]) -> str:
    return _upper(told.get("quantization", told).get("quant_algo"))


def _upper(name: str | None) -> str:
    return (name or "").upper()
