"""What a member is made of as files: every tensor that will be stored, where it is cut from, and its config.

Between the table (`Layout.places`: parameters) and the files (tensors) stand three questions: which tensors the folder
must hold, which of them a member stores and in which shapes, and what its config.json says. A number format that stores
one matrix as several tensors answers them differently, so the nest is asked; nothing else changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nestling.arch import Place
from nestling.axes import Shape, axes_of
from nestling.checkpoint import read_json
from nestling.cut import Cut, cut
from nestling.formats import SIDECAR
from nestling.nest import HEAD, Member, Nest, prefix
from nestling.shards import BYTES, Entry

HEADS = {"kv", "q", "head", "group", "mamba", "mdim"}  # axes that reach a width only together
KERNEL_BYTES = 16
TILE = 16  # values; what few-bit formats and the kernels of most engines take a width in


@dataclass(frozen=True)
class Stored:
    """One tensor of a member: where it is cut from, and what it will be."""

    place: Place
    source: Entry
    cut: Cut

    @property
    def entry(self) -> Entry:
        """What it will be; file and start still say where it comes from."""
        return replace(self.source, shape=self.cut.shape)


def plan(nest: Nest, member: Member, *, drop: str = "") -> list[Stored]:
    """Every tensor of a member, in order. Names and shapes of the nest are checked; no weight is read.

    drop: a prefix of tensor names to leave out knowingly, such as "mtp".
    """
    checkpoint = nest.checkpoint
    check_cover(nest, drop=drop)
    keep, found = prefix(member), []
    cuts: dict[Shape, Cut] = {}  # thousands of tensors have a handful of shapes
    for place in nest.places(member):
        source = checkpoint.entries[place.source]
        if place.shape not in cuts:
            cuts[place.shape] = cut(place.shape, nest.layout.sizes, keep)
        nest.check_place(place)
        found.append(Stored(place, source, cuts[place.shape]))
    nest.layout.arch.check_loads(nest.member_config(member))
    return found


def stored_config(nest: Nest, member: Member, *, drop: str = "") -> dict[str, Any]:
    """The config.json of a member as a model of its own."""
    config = nest.member_config(member)
    if drop == "mtp" and "num_nextn_predict_layers" in config:
        config["num_nextn_predict_layers"] = 0
    return config


def check_cover(nest: Nest, *, drop: str = "") -> None:
    """The folder holds exactly the tensors that the table lists, but for what is dropped knowingly."""
    dropped = {name for name in nest.names if drop and name.startswith(f"{drop}.")}
    if drop and not dropped:
        raise ValueError(f"--drop {drop} has no effect: no tensor of '{nest.folder}' starts with '{drop}.'.")
    nest.check_cover(nest.names - dropped)


def notes(nest: Nest, member: Member) -> list[str]:
    """What a person should know before a member is cut."""
    found = [*nest.notes]
    if member.note:
        found.append(f"member {member.name}: {member.note}.")
    if not member.is_trained:
        found.append(f"member {member.name} is an untrained size: nothing was tuned for it, so measure it before use.")
    if nest.quantized is None and (nest.folder / SIDECAR).is_file():
        found.append(f"{SIDECAR} speaks of quantized weights, and there are none: it is left out.")
    if nest.has_head_twice:
        found.append(f"{HEAD} is a copy of the tied embedding: it is stored once.")
    widths = {axis for shape in nest.layout.rows.values() for row in shape.values() for axis in axes_of(row[-1:])}
    for axis, size in member.sizes.items():
        if axis in widths - HEADS and size % TILE and not nest.layout.sizes[axis] % TILE:
            found.append(
                f"size {size} along '{axis}' is not a multiple of {TILE}: fp8 and nvfp4 cannot store it, and vLLM has "
                "met widths that it rounds up (vllm-project/vllm#36926)."
            )
    half = any(BYTES[entry.dtype] == 2 for entry in nest.checkpoint.entries.values())
    step = KERNEL_BYTES // (2 if half else 4)
    for axis in ("hidden", "effn") if "expert" in nest.layout.sizes and nest.quantized is None else ():
        if (size := member.sizes.get(axis, 0)) % step:
            found.append(
                f"size {size} along '{axis}' is not a multiple of {step}: stock transformers may not run the experts, "
                f"as the kernel of fused ones reads {KERNEL_BYTES} bytes at a time."
            )
    for name in remote_code(nest.stored):
        if not (nest.folder / name).is_file():
            found.append(f"config.json names remote code in {name}, which is not in '{nest.folder}'.")
    return found


def remote_code(config: Mapping[str, Any]) -> list[str]:
    """The files of a config's auto_map that should lie beside it."""
    told = config.get("auto_map")
    told = told if isinstance(told, dict) else {}
    values = [v for value in told.values() for v in (value if isinstance(value, list) else [value])]
    names = {str(value).rpartition(".")[0] for value in values if value and "--" not in str(value)}
    return sorted(f"{name}.py" for name in names if name.isidentifier())


def config_changes(nest: Nest, config: Mapping[str, Any]) -> list[str]:
    """A line for each key of config.json that a slice changes."""
    before = read_json(Path(nest.folder) / "config.json")
    lines = []
    for key in dict.fromkeys([*before, *config]):
        if not is_same(before, config, key):
            old, new = (json.dumps(one[key]) if key in one else "(absent)" for one in (before, config))
            lines.append(f"{key}: {_short(old)} -> {_short(new)}")
    return lines


def is_same(one: Mapping[str, Any], other: Mapping[str, Any], key: str) -> bool:
    """Two configs say the same under a key, or both nothing; NaN is NaN."""
    if key not in one or key not in other:
        return key not in one and key not in other
    return json.dumps(one[key], sort_keys=True) == json.dumps(other[key], sort_keys=True)


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:40]} ... ({len(text)} characters)"
