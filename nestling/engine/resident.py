"""What a nest holds in memory with all its members loaded: bytes that are shared, and bytes that are copied."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from nestling.engine.weights import AS_STORED, Weights
from nestling.nest import FULL, open_nest
from nestling.text import columns


def resident(folder: str | Path, *, dtype: str = AS_STORED) -> dict[str, Any]:
    """Load every member and count. Bytes are those of parameters; `copied` ones that two members share count once in
    the sum."""
    weights = Weights(open_nest(folder), dtype=dtype)
    members, loaded = {}, []
    for member in sorted(weights.nest.members.values(), key=lambda one: one.name != FULL):
        begun = time.perf_counter()
        loaded.append(one := weights.load(member))
        members[member.name] = {
            "shared_bytes": one.shared,
            "copied_bytes": one.copied,
            "shared_tensors": one.num_shared,
            "copied_tensors": one.num_copied,
            "seconds": time.perf_counter() - begun,
        }
    return {
        "dtype": str(weights.dtype).removeprefix("torch."),
        "storage_bytes": weights.nbytes,
        "copied_bytes": weights.copied_bytes,
        "of_full": (weights.nbytes + weights.copied_bytes) / weights.nbytes,
        "members": members,
    }


def describe(told: dict[str, Any]) -> str:
    """The same for people."""
    rows = [["member", "bytes shared", "bytes copied", "tensors shared", "tensors copied", "added in"]] + [
        [
            name,
            f"{one['shared_bytes']:,}",
            f"{one['copied_bytes']:,}",
            f"{one['shared_tensors']:,}",
            f"{one['copied_tensors']:,}",
            f"{1000 * one['seconds']:.0f} ms",
        ]
        for name, one in told["members"].items()
    ]
    return "\n".join(
        [
            f"resident in {told['dtype']}: {told['storage_bytes']:,} bytes of the nest, {told['copied_bytes']:,} "
            f"copied for members: {told['of_full']:.3f} of the full member",
            "",
            columns(rows),
        ]
    )
