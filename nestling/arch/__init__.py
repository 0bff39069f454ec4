"""The architectures that Nestling knows, by the `model_type` of their config.json."""

from __future__ import annotations

from nestling.arch.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from nestling.arch.moe import MIXTRAL, QWEN3_MOE
from nestling.arch.nemotron_h import NEMOTRON_H
from nestling.arch.table import Architecture, Config, Elastic, Layout, Place, kept_layers

ARCHITECTURES: dict[str, Architecture] = {
    arch.model_type: arch for arch in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, NEMOTRON_H)
}

__all__ = ["ARCHITECTURES", "Architecture", "Config", "Elastic", "Layout", "Place", "find", "kept_layers"]


def find(config: Config) -> tuple[Architecture, Config]:
    """The architecture of a config.json, and the config with every derived size written out."""
    model_type = config.get("model_type")
    if model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type '{model_type}' is not one that Nestling knows: {', '.join(sorted(ARCHITECTURES))}. "
            "docs/add-an-architecture.md says how to add one (a table, usually under 100 lines)."
        )
    arch = ARCHITECTURES[model_type]
    return arch, arch.complete(config)
