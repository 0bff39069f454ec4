"""A nest: a checkpoint in stock names and layout, and beside it nest.json, which says what models it holds.

The weights are the sorted parent's, so stock loaders read the folder as the full model. Each member keeps the first
units along every axis (and some of the layers). `nest/orders.safetensors` says which of the parent's units stand
where, and `nest/router.safetensors` how the sizes were learned; both lie in a folder of their own so that no loader
takes them for weights. A plain checkpoint is a nest with one member.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nestling.arch import Architecture, Config, Layout, find, kept_layers
from nestling.checkpoint import Checkpoint, read_json, write_json
from nestling.cost import Cost, cost

VERSION = 1
FULL = "100"  # the member that keeps everything
ALIASES = {"full": FULL, "parent": FULL}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model of a nest."""

    name: str
    sizes: dict[str, int]  # elastic axis -> units kept; axes that are not named stay whole
    budget: str = ""  # what was asked for, such as "active:0.45"
    is_trained: bool = False
    results: dict[str, Any] = field(default_factory=dict)  # what evaluation found


@dataclass(frozen=True, kw_only=True)
class Nest:
    """A checkpoint with its members. Sizes are those of the full model."""

    folder: Path
    stored: Config  # config.json as it stands
    config: Config  # the same with every derived size written out
    layout: Layout  # in the spelling of the files
    members: dict[str, Member]
    layer_order: tuple[int, ...]  # layers, most important first
    recipe: dict[str, Any] = field(default_factory=dict)
    parent: str = ""  # fingerprint of the parent's checkpoint
    fingerprint: str = ""  # of the weights that nest.json was written with

    def member(self, name: str) -> Member:
        """A member by name; an error that lists the names there are."""
        name = ALIASES.get(name, name)
        if name not in self.members:
            raise ValueError(f"the nest has no member '{name}'. Members: {', '.join(self.members)}.")
        return self.members[name]

    def sizes(self, member: Member) -> dict[str, int]:
        """Every axis's size in a member."""
        return self.layout.sizes | member.sizes

    def layers(self, member: Member) -> list[int]:
        """The parent's layers that a member runs, in order."""
        return kept_layers(self.layer_order, member.sizes.get("layer", len(self.layout.kinds)))

    def member_config(self, member: Member) -> Config:
        """The config.json of a member as a model of its own: the nest's own with every size written."""
        arch = self.layout.arch
        small = arch.resize(self.config, self.sizes(member), self.layers(member))
        # A stored key that `complete` spells otherwise is gone from `small`: then its new spelling must be written.
        is_respelled = bool(self.stored.keys() - small.keys())
        changed = {
            k: v
            for k, v in small.items()
            if is_respelled or k in self.stored or k in arch.config or v != self.config.get(k)
        }
        return {k: v for k, v in self.stored.items() if k in small} | changed

    def member_layout(self, member: Member) -> Layout:
        """The names and shapes of a member as a checkpoint of its own."""
        return self.layout.resize(self.sizes(member), self.layers(member))

    def cost(self, member: Member) -> Cost:
        """What a member costs."""
        return cost(self.member_layout(member), window=self.config.get("sliding_window") or 0)


def open_nest(folder: str | Path) -> Nest:
    """Read a nest, or a plain checkpoint as a nest with one member. No weights are read."""
    checkpoint = Checkpoint(folder)
    arch, config = find(checkpoint.config)
    layout = _layout_on_disk(arch, config, checkpoint)
    whole = Member(name=FULL, sizes={}, budget="all", is_trained=True)
    plain = Nest(
        folder=checkpoint.folder,
        stored=checkpoint.config,
        config=config,
        layout=layout,
        members={FULL: whole},
        layer_order=tuple(range(len(layout.kinds))),
        fingerprint=checkpoint.fingerprint(),
    )
    if not (checkpoint.folder / "nest.json").is_file():
        return plain
    told = read_json(checkpoint.folder / "nest.json")
    if told.get("format_version") != VERSION:
        raise ValueError(f"nest.json is of format {told.get('format_version')}; this Nestling reads {VERSION}.")
    lacking = [key for key in ("fingerprint", "members", "layer_order", "parent", "recipe") if key not in told]
    if lacking:
        raise ValueError(f"nest.json of '{folder}' lacks {', '.join(lacking)}: it is broken. Copy it again.")
    if told["fingerprint"] != plain.fingerprint:
        raise ValueError(
            f"nest.json was written with other weights than those in '{folder}' (fingerprint {told['fingerprint']}, "
            f"the weights have {plain.fingerprint}). Copy the whole folder again, or delete nest.json to use it as a "
            "plain model."
        )
    members = {name: Member(name=name, **entry) for name, entry in map(_read_member, told["members"].items())}
    members = {
        name: replace(member, sizes=check_sizes(layout, config, member.sizes, who=f"member '{name}'"))
        for name, member in members.items()
    }
    return replace(
        plain,
        members=members,
        layer_order=tuple(told["layer_order"]),
        recipe=told["recipe"],
        parent=told["parent"],
    )


def write_nest(nest: Nest, folder: Path) -> None:
    """Write nest.json for weights that already lie in `folder`."""
    entries = {}
    for member in nest.members.values():
        spent = nest.cost(member)
        entries[member.name] = {k: v for k, v in asdict(member).items() if k != "name"} | {
            "parameters": spent.parameters,
            "active_parameters": spent.active_parameters,
            "bytes": spent.bytes,
        }
    write_json(
        folder / "nest.json",
        {
            "format_version": VERSION,
            "architecture": nest.layout.arch.model_type,
            "sizes": nest.layout.sizes,
            "members": entries,
            "layer_order": list(nest.layer_order),
            "parent": nest.parent,
            "fingerprint": Checkpoint(folder).fingerprint(),
            "recipe": nest.recipe,
        },
    )


def check_sizes(layout: Layout, config: Config, sizes: Mapping[str, Any], *, who: str) -> dict[str, int]:
    """The sizes as whole numbers; those that no member can have are refused, with the nearest that it can."""
    checked: dict[str, int] = {}
    elastic, refused = layout.elastic(), layout.arch.refuse(config)
    for axis, size in sizes.items():
        if axis not in elastic:
            raise ValueError(
                f"{who} names axis '{axis}', which cannot shrink here. Elastic axes: {', '.join(elastic)}."
            )
        full = layout.sizes[axis]
        if isinstance(size, float) and size.is_integer():
            size = int(size)
        if not isinstance(size, int) or isinstance(size, bool):
            raise ValueError(f"{who} asks for {size} units of '{axis}': expected a whole number from 1 to {full}.")
        if not 1 <= size <= full:
            raise ValueError(f"{who} asks for {size} units of '{axis}', the nest has {full}.")
        if axis in refused and size != full:
            raise ValueError(f"'{axis}' cannot shrink in this model: {refused[axis]}.")
        least = layout.arch.smallest(config, axis)
        if size < least:
            raise ValueError(
                f"{who} asks for {size} units of '{axis}', but every token needs {least} ({elastic[axis].least})."
            )
        checked[axis] = size
    return checked


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes from a text such as "hidden=1920,effn=960"."""
    sizes = {}
    for part in text.split(","):
        axis, equals, size = part.partition("=")
        if not equals:
            raise ValueError(f"cannot read sizes '{text}': expected axis=size, such as hidden=1920,effn=960.")
        try:
            number = float(size)
        except ValueError:
            raise ValueError(f"size '{size}' of axis '{axis}' is not a number.") from None
        if not number.is_integer():
            raise ValueError(f"size {size} of axis '{axis}' is not a whole number.")
        sizes[axis.strip()] = int(number)
    return sizes


def _layout_on_disk(arch: Architecture, config: Config, checkpoint: Checkpoint) -> Layout:
    """The layout in the spelling that the files use: transformers can also save experts fused, as they are in
    memory."""
    layouts = [arch.layout(config, spelling) for spelling in arch.rows]
    return max(layouts, key=lambda layout: len(layout.tensors.keys() & checkpoint.entries.keys()))


def _read_member(item: tuple[str, Any]) -> tuple[str, dict[str, Any]]:
    name, entry = item
    fields = {"sizes", "budget", "is_trained", "results"}
    if not isinstance(entry, dict) or not fields <= entry.keys():
        raise ValueError(
            f"nest.json: member '{name}' is {json.dumps(entry)[:80]}, expected an object with {sorted(fields)}."
        )
    return name, {key: entry[key] for key in fields}
