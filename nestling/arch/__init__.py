"""The architectures that Nestling knows, by the `model_type` of their config.json."""

from __future__ import annotations

from nestling.arch.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from nestling.arch.moe import MIXTRAL, QWEN3_MOE
from nestling.arch.nemotron_h import NEMOTRON_H
from nestling.arch.table import Architecture, Config, Elastic, Layout, Place, kept_layers

ARCHITECTURES: dict[str, Architecture] = {
    arch.model_type: arch for arch in (LLAMA, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, NEMOTRON_H)
}

MAX_LAYERS = 10_000  # a config that says more is broken, and would be believed for gigabytes of names

__all__ = ["ARCHITECTURES", "Architecture", "Config", "Elastic", "Layout", "Place", "find", "kept_layers"]


def find(config: Config) -> tuple[Architecture, Config]:
    """The architecture of a config.json, and the config with every derived size written out."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise ValueError(
            f"model_type '{model_type}' is not one that Nestling knows: {', '.join(sorted(ARCHITECTURES))}. "
            "docs/add-an-architecture.md says how to add one (a table, usually under 100 lines)."
        )
    arch = ARCHITECTURES[model_type]
    config = arch.whole(config)
    num_layers = config.get("num_hidden_layers")
    if num_layers is not None and not (type(num_layers) is int and 1 <= num_layers <= MAX_LAYERS):
        raise ValueError(f"num_hidden_layers = {str(num_layers)[:40]}: expected a whole number from 1 to {MAX_LAYERS}.")
    try:
        complete = arch.complete(config)
        kinds, rows = arch.kinds(complete), arch.rows["disk"](complete)
    except KeyError as error:
        raise ValueError(f"config.json lacks {error}, which a {model_type} needs.") from None
    unknown = sorted({str(kind)[:40] for kind in kinds if not isinstance(kind, str) or kind not in rows})
    if unknown:
        raise ValueError(f"config.json lists layers of kinds that a {model_type} does not have: {', '.join(unknown)}.")
    return arch, complete
