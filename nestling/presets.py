"""Members of public elastic checkpoints that carry no nest.json, by architecture and exact sizes.

Such a checkpoint is sorted already: its members are the first units along each axis, and only their sizes have to be
known. A preset is found by what config.json says, never by a name. That cannot tell the elastic checkpoint from
another of the same sizes (NVIDIA's plain Nemotron 3 Nano 30B-A3B has them too), so what is cut by a preset says so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One public checkpoint and its members."""

    source: str  # where it is published
    model_type: str
    sizes: Mapping[str, int]  # axis -> size of the full model; all must agree
    members: Mapping[str, Mapping[str, int]]  # name -> elastic axis -> units kept
    notes: Mapping[str, str] = field(default_factory=dict)  # member -> what a person should know
    caution: str = ""  # what a person should know of all members but the full one


PRESETS = (
    Preset(
        source="nvidia/NVIDIA-Nemotron-Labs-3-Elastic-30B-A3B (arXiv 2605.07182)",
        model_type="nemotron_h",
        sizes={
            "layer": 52, "vocab": 131072, "hidden": 2688, "kv": 2, "q": 16, "head": 128, "group": 8, "mamba": 8,
            "mdim": 64, "state": 128, "conv": 4, "expert": 128, "effn": 1856, "sffn": 3712,
        },
        members={"30B": {}, "23B": {"hidden": 2016, "effn": 1856}, "12B": {"hidden": 1920, "effn": 960}},
        notes={"23B": "sizes inferred: the paper prints the parameters of its 23B, not its widths"},
        caution="right for the elastic checkpoint only: the plain Nemotron 3 Nano 30B-A3B has the same sizes, but is "
        "not sorted, and a cut of it answers nonsense",
    ),
)  # fmt: skip


def find_preset(model_type: str, sizes: Mapping[str, int], presets: Sequence[Preset] = PRESETS) -> Preset | None:
    """The preset of a checkpoint, if there is one."""
    for preset in presets:
        if preset.model_type == model_type and all(sizes.get(axis) == n for axis, n in preset.sizes.items()):
            return preset
    return None
