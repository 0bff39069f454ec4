"""A nest: a checkpoint in stock names and layout, and beside it nest.json, which says what models it holds.

The weights are the sorted parent's, so stock loaders read the folder as the full model. Each member keeps the first
units along every axis (and some of the layers). `nest/orders.safetensors` says which of the parent's units stand
where, and `nest/router.safetensors` how the sizes were learned; both lie in a folder of their own so that no loader
takes them for weights. A plain checkpoint is a nest with one member.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nestling.arch import Architecture, Config, Layout, Place, find, kept_layers
from nestling.axes import dims, parse, to_text
from nestling.checkpoint import TORCH, Checkpoint, read_json, write_json
from nestling.cost import Cost, cost
from nestling.cut import Maps, equal_data
from nestling.formats import SIDECAR, Quantized, detect
from nestling.presets import PRESETS, Preset, find_preset

VERSION = 1
FULL = "100"  # the member that keeps everything
HEAD = "lm_head.weight"
ANGLES = ".rotary_emb.inv_freq"  # end of the names of a buffer
MAX_NAMES = 1_000_000  # experts in all layers
ALIASES = {"full": FULL, "parent": FULL}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One model of a nest."""

    name: str
    sizes: dict[str, int]  # elastic axis -> units kept; axes that are not named stay whole
    budget: str = ""  # what was asked for, such as "active:0.45"
    is_trained: bool = False
    results: dict[str, Any] = field(default_factory=dict)  # what evaluation found
    note: str = ""  # what a person should know before using it


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
    quantized: Quantized | None = None  # how the weights are stored, if not plainly

    @cached_property
    def checkpoint(self) -> Checkpoint:
        """The folder's config and headers, read once."""
        return Checkpoint(self.folder)

    @cached_property
    def has_head_twice(self) -> bool:
        """A tied head is stored a second time, equal to the embedding byte by byte."""
        entries = self.checkpoint.entries
        tied = [name for name, shape in self.layout.rows[""].items() if shape == parse("vocab, hidden")]
        if HEAD not in entries or HEAD in tied or len(tied) != 1 or tied[0] not in entries:
            return False
        one, other = entries[tied[0]], entries[HEAD]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and equal_data(one, other)

    @cached_property
    def notes(self) -> list[str]:
        """What a person should know of the folder."""
        if not self.ignored:
            return self.checkpoint.notes
        return [
            *self.checkpoint.notes,
            f"{len(self.ignored)} tensors named *{ANGLES} are left out: stock loaders compute them anew.",
        ]

    @property
    def names(self) -> set[str]:
        """The tensors that count: all in the folder, but for the second copy of a tied head and what is ignored."""
        return set(self.checkpoint.entries) - self.ignored - ({HEAD} if self.has_head_twice else set())

    @cached_property
    def ignored(self) -> set[str]:
        """Tensors that stock loaders ignore, because they compute them: old checkpoints stored the angles of RoPE."""
        return {name for name in self.checkpoint.entries if name.endswith(ANGLES)}

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
        described, _ = self.quantization(member)
        return {k: v for k, v in self.stored.items() if k in small} | changed | described

    def quantization(self, member: Member) -> tuple[Config, Config]:
        """What describes a member's quantization: keys for its config.json, and files beside it; empty if plain."""
        if self.quantized is None:
            return {}, {}
        root = self.layout.arch.layers.removesuffix("layers")
        section, sidecar = self.quantized.describe(self.layout, prefix(member), self.layers(member), memory_root=root)
        key = "quantization_config" if "quantization_config" in self.stored else "compression_config"
        return (
            {} if section is None else {key: section},
            {} if sidecar is None else {SIDECAR: sidecar},
        )

    def places(self, member: Member) -> Iterable[Place]:
        """Every tensor that a member's files hold, and where it comes from; illegal cuts are refused before the
        first."""
        keep, layers = prefix(member), self.layers(member)
        return (
            self.layout.places(keep, layers)
            if self.quantized is None
            else self.quantized.places(self.layout, keep, layers)
        )

    def check_cover(self, names: Iterable[str]) -> None:
        """Every stored tensor is one that the architecture and the quantization know, and none is missing."""
        if self.quantized is None:
            self.layout.check_cover(names)
        else:
            self.quantized.check_cover(self.layout, names)

    def check_place(self, place: Place) -> None:
        """A stored tensor has the shape that the table and the config give it, and holds weights."""
        found, expected = self.checkpoint.entries[place.source], dims(place.shape, self.layout.sizes)
        if found.shape != expected:
            raise ValueError(
                f"tensor '{place.source}' in {found.file} has shape {found.shape}, but config.json makes "
                f"{to_text(place.shape)} {expected}. One of the two belongs to another model."
            )
        if self.quantized is None and found.dtype not in TORCH:
            raise ValueError(
                f"tensor '{place.source}' in {found.file} is {found.dtype}, and config.json speaks of no quantization: "
                f"expected {', '.join(TORCH)}. Download the folder again with its quantization_config or {SIDECAR}."
            )

    def check_scales(self, member: Member) -> list[str]:
        """Every scale of what a member keeps is positive and finite; an error that lists those that are not. Returns
        warnings; none for plain weights."""
        if self.quantized is None:
            return []
        maps, entries = Maps(), self.checkpoint.entries
        return self.quantized.check_scales(
            lambda name: maps.whole(entries[name]), self.layout, self.layers(member), prefix(member)
        )

    def member_layout(self, member: Member) -> Layout:
        """The names and shapes of a member as a checkpoint of its own."""
        return self.layout.resize(self.sizes(member), self.layers(member))

    def cost(self, member: Member) -> Cost:
        """What a member costs."""
        return cost(self.member_layout(member), window=self.config.get("sliding_window") or 0)


def prefix(member: Member) -> dict[str, int]:
    """The units that a member keeps along each axis but the layers."""
    return {axis: size for axis, size in member.sizes.items() if axis != "layer"}


def open_nest(folder: str | Path, *, presets: Sequence[Preset] = PRESETS) -> Nest:
    """Read a nest, or a plain checkpoint as a nest with one member. No weights are read.

    presets: public elastic checkpoints that have members without a nest.json.
    """
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
        quantized=_quantized(checkpoint),
    )
    if not (checkpoint.folder / "nest.json").is_file():
        preset = find_preset(arch.model_type, layout.sizes, presets)
        members = plain.members | (_preset_members(preset) if preset else {})
        return _opened(replace(plain, members=members), checkpoint)
    told = read_json(checkpoint.folder / "nest.json")
    _check_told(told, plain)
    members = {name: Member(name=name, **entry) for name, entry in map(_read_member, told["members"].items())}
    members = {
        name: replace(member, sizes=check_sizes(layout, config, member.sizes, who=f"member '{name}'"))
        for name, member in members.items()
    }
    nest = replace(
        plain,
        members=members,
        layer_order=tuple(told["layer_order"]),
        recipe=told["recipe"],
        parent=told["parent"],
    )
    return _opened(nest, checkpoint)


def open_plain_nest(folder: str | Path, *, verb: str) -> Nest:
    """The same for a step that computes with the weights; quantized ones are refused."""
    nest = open_nest(folder)
    check_plain(nest, verb=verb)
    return nest


def check_plain(nest: Nest, *, verb: str) -> None:
    """Refuse quantized weights for a step that computes with them."""
    if nest.quantized is not None:
        told = ", ".join(
            f"{n} matrices in {kind}" for kind, n in nest.quantized.summary(nest.layout)["matrices"].items()
        )
        raise ValueError(
            f"'{nest.folder}' is quantized ({nest.quantized.spelling.method}: {told}), and `nestling {verb}` needs "
            "plain weights (BF16 or FP32). Use the checkpoint that it was made from, and quantize last. Quantized "
            "checkpoints can be inspected and sliced."
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
        if axis.strip() in sizes:
            raise ValueError(f"sizes '{text}' name axis '{axis.strip()}' twice. Give one size for it.")
        sizes[axis.strip()] = int(number)
    return sizes


def _layout_on_disk(arch: Architecture, config: Config, checkpoint: Checkpoint) -> Layout:
    """The layout in the spelling that the files use: transformers can also save experts fused, as they are in
    memory."""
    layouts = [arch.layout(config, spelling) for spelling in arch.rows]
    num_names = layouts[0].sizes.get("expert", 1) * len(layouts[0].kinds)
    if num_names > MAX_NAMES:
        raise ValueError(f"config.json of '{checkpoint.folder}' asks for {num_names:,} experts in all: it is broken.")
    names = {name.removesuffix("_packed") for name in checkpoint.entries}  # how compressed-tensors marks 4-bit codes
    return max(layouts, key=lambda layout: len(layout.tensors.keys() & names))


def _quantized(checkpoint: Checkpoint) -> Quantized | None:
    sidecar, dtypes = checkpoint.folder / SIDECAR, {entry.dtype for entry in checkpoint.entries.values()}
    is_told = sidecar.is_file() and not dtypes <= TORCH.keys()  # beside plain weights it is a leftover
    return detect(checkpoint.config, read_json(sidecar) if is_told else None, checkpoint.entries)


def _opened(nest: Nest, checkpoint: Checkpoint) -> Nest:
    """The nest with the headers that are read already: of 6,000 tensors they take a while."""
    vars(nest)["checkpoint"] = checkpoint
    return nest


def _preset_members(preset: Preset) -> dict[str, Member]:
    members = {}
    for name, sizes in preset.members.items():
        note = "; ".join(filter(None, (preset.notes.get(name), preset.caution if sizes else "")))
        members[name] = Member(
            name=name, sizes=dict(sizes), budget=f"preset of {preset.source}", is_trained=True, note=note
        )
    return members


def _check_told(told: Mapping[str, Any], plain: Nest) -> None:
    """nest.json is of the format that we read, and was written with these weights."""
    where = f"nest.json of '{plain.folder}'"
    if told.get("format_version") != VERSION:
        raise ValueError(
            f"nest.json is of format {str(told.get('format_version'))[:40]}; this Nestling reads {VERSION}."
        )
    kinds = {"fingerprint": str, "members": dict, "layer_order": list, "parent": str, "recipe": dict}
    lacking = [key for key in kinds if key not in told]
    if lacking:
        raise ValueError(f"{where} lacks {', '.join(lacking)}: it is broken. Copy it again.")
    for key, kind in kinds.items():
        if not isinstance(told[key], kind):
            raise ValueError(
                f"{where}: {key} is a {type(told[key]).__name__}, expected a {kind.__name__}: it is broken."
            )
    if told["fingerprint"] != plain.fingerprint:
        raise ValueError(
            f"nest.json was written with other weights than those in '{plain.folder}' (fingerprint "
            f"{told['fingerprint'][:40]}, the weights have {plain.fingerprint}). Copy the whole folder again, or "
            "delete nest.json to use it as a plain model."
        )
    facts = {"architecture": plain.layout.arch.model_type, "sizes": plain.layout.sizes}
    for key, fact in facts.items():
        if told.get(key, fact) != fact:
            raise ValueError(
                f"{where}: {key} is {str(told[key])[:80]}, but config.json makes it {str(fact)[:80]}. One of them "
                "was edited: copy both again."
            )
    order, num_layers = told["layer_order"], len(plain.layout.kinds)
    if not all(type(i) is int for i in order) or sorted(order) != list(range(num_layers)):
        raise ValueError(
            f"{where}: layer_order is {str(order)[:80]}, expected each of the {num_layers} layers once, counted from 0."
        )


def _read_member(item: tuple[str, Any]) -> tuple[str, dict[str, Any]]:
    name, entry = item
    kinds = {"sizes": dict, "budget": str, "is_trained": bool, "results": dict}
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), kind) for key, kind in kinds.items()):
        raise ValueError(
            f"nest.json: member '{name[:80]}' is {json.dumps(entry)[:80]}, expected an object with "
            f"{', '.join(f'{key} ({kind.__name__})' for key, kind in kinds.items())}."
        )
    return name, {key: entry[key] for key in kinds} | {"note": str(entry.get("note", ""))}
