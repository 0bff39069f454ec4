"""What is in a checkpoint or nest: axes, sizes, grain, members and costs, from config and headers alone. Imports no
torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from nestling.axes import grain
from nestling.cost import GIB, Cost, quantizable
from nestling.nest import Nest, open_nest
from nestling.text import columns

TILE = 16  # nvfp4 keeps one scale for each 16 values along the contracted axis


def inspect(folder: str | Path) -> dict[str, Any]:
    """Everything that `nestling inspect` says, as plain values."""
    nest = open_nest(folder)
    checkpoint = nest.checkpoint
    nest.check_cover([name for name in nest.names if not name.startswith("mtp.")])
    for place in nest.places(nest.member("full")):
        nest.check_place(place)
    full = nest.cost(nest.member("full"))
    elastic, refused = nest.layout.elastic(), nest.layout.arch.refuse(nest.config)
    axes = {
        axis: {
            "size": size,
            "is_elastic": axis in elastic and axis not in refused,
            "within": list(elastic[axis].within) if axis in elastic else [],
            "grain": {"bf16": _grain(nest, axis, 1), "nvfp4": _grain(nest, axis, TILE)} if axis in elastic else {},
        }
        for axis, size in nest.layout.sizes.items()
    }
    members = {
        member.name: {
            "sizes": member.sizes,
            "budget": member.budget,
            "is_trained": member.is_trained,
            "results": member.results,
            "note": member.note,
            **_costs(nest.cost(member)),
        }
        for member in nest.members.values()
    }
    dtypes: dict[str, int] = {}
    for entry in checkpoint.entries.values():
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.nbytes
    return {
        "architecture": nest.layout.arch.model_type,
        **_costs(full),
        "bytes_on_disk": dtypes,
        "quantization": nest.quantized.summary(nest.layout) if nest.quantized else {},
        "num_tensors": len(checkpoint.entries),
        "layers": list(nest.layout.kinds),
        "dropped_if_sorted": sorted(name for name in checkpoint.entries if name.startswith("mtp.")),
        "axes": axes,
        "members": members,
        "notes": nest.notes,
        "fingerprint": nest.fingerprint,
    }


def describe(told: dict[str, Any]) -> str:
    """The same for people."""
    axes = [["axis", "size", "grain", "ordered within", "grain in nvfp4"]] + [
        [
            axis,
            f"{one['size']:,}",
            str(one["grain"]["bf16"]),
            " ".join(one["within"]) or "-",
            str(one["grain"]["nvfp4"]),
        ]
        for axis, one in told["axes"].items()
        if one["is_elastic"]
    ]
    fixed = ", ".join(f"{axis} {one['size']:,}" for axis, one in told["axes"].items() if not one["is_elastic"])
    members = [["member", "parameters", "active", "bf16 GiB", "keeps"]] + [
        [
            name,
            f"{one['parameters']:,}",
            f"{one['active_parameters']:,}",
            f"{one['bytes']['bf16'] / GIB:.3f}",
            (", ".join(f"{axis} {n:,}" for axis, n in one["sizes"].items()) or "everything")
            + ("" if one["is_trained"] else " (untrained)"),
        ]
        for name, one in told["members"].items()
    ]
    weights = ", ".join(f"{name} {size / GIB:.3f} GiB" for name, size in told["bytes"].items())
    on_disk = ", ".join(f"{dtype} {size:,}" for dtype, size in sorted(told["bytes_on_disk"].items()))
    lines = [
        f"{told['architecture']}, {len(told['layers'])} layers, {told['num_tensors']:,} tensors",
        f"bytes on disk: {on_disk}",
        *([_quantization(told["quantization"])] if told["quantization"] else []),
        f"parameters {told['parameters']:,}, active for one token {told['active_parameters']:,}",
        f"weights: {weights}",
        f"caches: KV {told['kv_bytes_per_token']:,} bytes a token"
        + (f" + {told['window_bytes_per_token']:,} within a window of {told['window']:,}" if told["window"] else "")
        + f", SSM {told['ssm_bytes_per_sequence']:,} and conv {told['conv_bytes_per_sequence']:,} bytes a sequence",
        "",
        columns(axes, left=(0, 3)),
        f"fixed: {fixed}",
        "",
        columns(members, left=(0, 4)),
    ]
    lines += [f"{name}: {one['note']}" for name, one in told["members"].items() if one["note"]]
    lines += [f"note: {line}" for line in told["notes"]]
    if told["dropped_if_sorted"]:
        extra = len(told["dropped_if_sorted"])
        lines += ["", f"{extra} multi-token-prediction tensors: not counted above; `nestling sort` needs --drop mtp."]
    return "\n".join(lines)


def _quantization(told: dict[str, Any]) -> str:
    stored = ", ".join(f"{n:,} matrices in {kind}" for kind, n in told["matrices"].items())
    return f"quantized ({told['layout']}): {stored}; can be sliced, but not scored, sorted or trained"


def _costs(cost: Cost) -> dict[str, Any]:
    return asdict(cost)


def _grain(nest: Nest, axis: str, tile: int) -> int:
    """Legal steps of an axis when matrices that a format quantizes are cut into tiles along their contracted dim."""
    shapes = [place.shape for place in nest.layout.tensors.values() if tile == 1]
    if tile > 1:
        shapes = [shape[-1:] for _, shape, _ in quantizable(nest.layout)]
    return grain(shapes, axis, nest.layout.sizes, tile=tile)
