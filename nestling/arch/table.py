"""What an architecture is to Nestling: four small tables, and the layout of a concrete checkpoint that follows from
them.

`rows` gives every parameter's shape by name, `config` which keys hold which sizes, `elastic` which axes may shrink,
`state` what one sequence carries. A `Layout` is those tables with a concrete config's sizes filled in: it lists every
tensor's name and shape, counts them, and says which tensor of the parent each tensor of a smaller model comes from.

Files on disk and model objects may spell the same parameters differently (one tensor for each expert on disk, all
experts in one tensor in memory). Each spelling is a set of rows; counts always use the first.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from nestling.axes import Keep, Shape, Sizes, axes_of, count, parse

if TYPE_CHECKING:
    from torch import Tensor

Config = dict[str, Any]  # config.json, as read
Rows = dict[str, dict[str, str]]  # layer kind ("" for outside the layers) -> name pattern -> shape


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """An axis that may shrink.

    within: the enclosing axes in whose units it has an order of its own; `layer` first if each layer sorts by itself.
    least: config key whose value is the smallest legal size (an expert count cannot fall below top-k).
    at_least: the smallest size that the stock class can run with.
    """

    within: tuple[str, ...] = ()
    least: str = ""
    at_least: int = 1


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One family of models. See docs/add-an-architecture.md."""

    model_type: str
    config: dict[str, str]  # config key -> product of axes that it holds
    elastic: dict[str, Elastic]
    rows: dict[str, Callable[[Config], Rows]]  # spelling -> rows at a config; "disk" first, "memory" always there
    kinds: Callable[[Config], list[str]]  # the kind of every layer
    complete: Callable[
        [Config], Config
    ]  # the config with derived sizes and old spellings written out; errors if it lies
    keep_layers: Callable[[Config, Sequence[int]], Config]  # the config with only these layers
    state: dict[str, dict[str, str]]  # layer kind -> state's name -> shape; states named `kv` are held for each token
    norms: dict[str, str]  # module pattern (in memory) -> the product of axes that it normalizes over
    layers: str  # module pattern of the list of layers (in memory)
    active: str = ""  # config key that says how many experts a token uses
    quantized: tuple[str, ...] = ()  # ends of the disk names of matrices that fp8 and nvfp4 store in few bits
    multiples: dict[str, str] = field(default_factory=dict)  # key -> key that the stock config wants it a multiple of
    refuse: Callable[[Config], dict[str, str]] = field(default=lambda config: {})  # axis -> why it cannot shrink here

    def whole(self, config: Config) -> Config:
        """The config with sizes such as 56.0, which some tools write, as whole numbers; an error for what is none."""
        found = dict(config)
        for key in (*self.config, self.active, "num_hidden_layers", "sliding_window", "max_window_layers"):
            value = config.get(key)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                found[key] = value = int(value)
            if type(value) is not int or value < (1 if key in self.config else 0):
                reason = (
                    "Sizes that differ by layer are not supported: no stock class of this architecture reads them."
                    if isinstance(value, (list, dict))
                    else "Correct config.json, or download it again."
                )
                raise ValueError(f"{key} = {json.dumps(value)[:60]} is not one whole number above zero. {reason}")
        for key, kind in {"tie_word_embeddings": bool, "layer_types": list, "layers_block_type": list}.items():
            if config.get(key) is not None and not isinstance(config[key], kind):
                raise ValueError(f"{key} is {json.dumps(config[key])[:60]}, expected a {kind.__name__}.")
        return found

    def check_loads(self, config: Config) -> None:
        """Refuse a complete config that the stock class does not take."""
        for key, other in self.multiples.items():
            size, step = config[key], config[other]
            if size % step:
                below, above = size // step * step, -(-size // step) * step
                raise ValueError(
                    f"{key} = {size} is not a multiple of {other} = {step}: the stock {self.model_type} config refuses "
                    f"it, so the folder could not be loaded. Nearest: {f'{below} or ' if below else ''}{above}."
                )

    def sizes(self, config: Config) -> dict[str, int]:
        """The size of every axis, read from a complete config."""
        products = {key: parse(text)[0][0] for key, text in self.config.items() if config.get(key) is not None}
        sizes: dict[str, int] = {"layer": len(self.kinds(config))}
        unsolved = dict(products)
        while unsolved:
            for key, product in unsolved.items():
                unknown = [f.axis for f in product if f.axis not in sizes]
                known = 1
                for factor in product:
                    known *= sizes.get(factor.axis, 1)
                if len(unknown) > 1:
                    continue
                if config[key] % known:
                    raise ValueError(
                        f"{key} = {config[key]} is not a multiple of {known}, the size of its other axes. "
                        f"It holds '{self.config[key]}'."
                    )
                if unknown:
                    sizes[unknown[0]] = config[key] // known
                elif config[key] != known:
                    raise ValueError(f"{key} = {config[key]}, but its axes '{self.config[key]}' give {known}.")
                del unsolved[key]
                break
            else:
                raise AssertionError(f"config table of {self.model_type} does not determine {sorted(unsolved)}")
        return sizes

    def resize(self, config: Config, sizes: Sizes, layers: Sequence[int] | None = None) -> Config:
        """The config of a smaller model: every size written, also those that a stock config would derive."""
        small = copy.deepcopy(config)
        for key, text in self.config.items():
            if config.get(key) is not None:
                small[key] = int(count(parse(text), sizes))
        return small if layers is None else self.keep_layers(small, layers)

    def layout(self, config: Config, spelling: str = "disk") -> Layout:
        """The names and shapes of a checkpoint with this config. The config must be complete."""
        rows, counted = (
            {
                kind: {name: parse(shape) for name, shape in rows.items()}
                for kind, rows in self.rows[which](config).items()
            }
            for which in (spelling, "disk")
        )
        return Layout(
            arch=self,
            sizes=self.sizes(config),
            kinds=tuple(self.kinds(config)),
            rows=rows,
            counted=counted,
            num_active=config.get(self.active) if self.active else None,
        )

    def smallest(self, config: Config, axis: str) -> int:
        """The least units of an axis that a model can run with."""
        rule = self.elastic[axis]
        return max(rule.at_least, config.get(rule.least, 1) if rule.least else 1)

    def within(self) -> dict[str, tuple[str, ...]]:
        """For each elastic axis, the axes that its order is nested in."""
        return {axis: elastic.within for axis, elastic in self.elastic.items()}


@dataclass(frozen=True)
class Place:
    """Where a tensor of a smaller model comes from."""

    name: str  # its name in the smaller model
    source: str  # the name of the tensor that it is cut from
    shape: Shape
    units: dict[str, int]  # where the source stands along the axes in its name


@dataclass(frozen=True)
class Layout:
    """Every tensor of one checkpoint: names, shapes and sizes."""

    arch: Architecture
    sizes: dict[str, int]
    kinds: tuple[str, ...]
    rows: dict[str, dict[str, Shape]]  # layer kind -> name pattern -> shape, in this layout's spelling
    counted: dict[str, dict[str, Shape]]  # the same in the disk's spelling, where each expert has a name
    num_active: int | None = None

    def places(self, keep: Keep | None = None, layers: Sequence[int] | None = None) -> Iterator[Place]:
        """Every tensor of the model that keeps these units and layers, in order, and where it comes from."""
        keep = keep or {}
        for pattern, shape in self.rows.get("", {}).items():
            yield Place(pattern, pattern, shape, {})
        for new, old in enumerate(range(len(self.kinds)) if layers is None else layers):
            for pattern, shape in self.rows.get(self.kinds[old], {}).items():
                inner = [axis for axis in _name_axes(pattern) if axis != "layer"]
                assert len(inner) <= 1, pattern
                if not inner:
                    yield Place(pattern.format(layer=new), pattern.format(layer=old), shape, {"layer": old})
                    continue
                (axis,) = inner
                for i, unit in enumerate(_kept_units(axis, keep.get(axis), self.sizes[axis], old)):
                    yield Place(
                        pattern.format(layer=new, **{axis: i}),
                        pattern.format(layer=old, **{axis: unit}),
                        shape,
                        {"layer": old, axis: unit},
                    )

    @cached_property
    def tensors(self) -> dict[str, Place]:
        """Every tensor by name."""
        return {place.name: place for place in self.places()}

    def find(self, name: str) -> Place:
        """The row of a parameter; an error that says where to add one if there is none."""
        if name not in self.tensors:
            raise ValueError(
                f"no shape for parameter '{name}' in architecture '{self.arch.model_type}'. If it belongs to the "
                f"model, add a row to its table in nestling/arch/ (docs/add-an-architecture.md)."
            )
        return self.tensors[name]

    def check_cover(self, names: Iterable[str]) -> None:
        """Every name has a row and every row has a name; otherwise an error that lists what is off."""
        given = set(names)
        extra, missing = sorted(given - self.tensors.keys()), sorted(self.tensors.keys() - given)
        if extra and all(name.startswith("mtp.") for name in extra):
            raise ValueError(
                f"the checkpoint has {len(extra)} multi-token-prediction tensors ('{extra[0]}', ...), which "
                "Nestling cannot cut. Leave them out knowingly with --drop mtp: no multi-token prediction then."
            )
        if extra == ["lm_head.weight"]:
            raise ValueError(
                "the checkpoint holds lm_head.weight, but its config says tie_word_embeddings: true. If the head is a "
                "matrix of its own, set tie_word_embeddings to false in config.json; if it is a copy, delete it."
            )
        if extra:
            self.find(extra[0])
        if missing:
            raise ValueError(
                f"the checkpoint lacks {len(missing)} of {len(self.tensors)} parameters that its config asks for: "
                f"{', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}."
            )

    def count(
        self,
        sizes: Sizes | None = None,
        *,
        active: bool = False,
        inner: bool = False,
        layers: Sequence[int] | None = None,
    ) -> Any:
        """Parameters in all, or those that one token uses: experts in a name are then read as top-k.

        sizes: other sizes than the checkpoint's own; floats and tensors give the differentiable expected count.
        inner: only what lies inside the layers, without embedding, head and last norm.
        """
        return sum(
            self._count(pattern, shape, n, sizes or self.sizes, active)
            for pattern, shape, n in self._weighted_rows(layers)
            if not inner or "{layer}" in pattern
        )

    def _weighted_rows(self, layers: Sequence[int] | None) -> Iterator[tuple[str, Shape, int]]:
        kept = [self.kinds[i] for i in (range(len(self.kinds)) if layers is None else layers)]
        for kind, rows in self.counted.items():
            for pattern, shape in rows.items():
                yield pattern, shape, (kept.count(kind) if kind else 1)

    def _count(self, pattern: str, shape: Shape, num_layers: int, sizes: Sizes, active: bool) -> Any:
        total = count(shape, sizes) * num_layers
        for axis in _name_axes(pattern):
            if axis == "layer":
                continue
            total = total * (self.num_active if active and axis == "expert" else sizes[axis])
        return total

    def resize(self, sizes: Sizes, layers: Sequence[int] | None = None) -> Layout:
        """The layout of the model at other sizes, with only these layers."""
        kinds = self.kinds if layers is None else tuple(self.kinds[i] for i in layers)
        return replace(self, sizes={**self.sizes, **sizes, "layer": len(kinds)}, kinds=kinds)

    def elastic(self) -> dict[str, Elastic]:
        """The elastic axes that this checkpoint has."""
        present = {
            axis for kind in {"", *self.kinds} for shape in self.rows.get(kind, {}).values() for axis in axes_of(shape)
        }
        present |= {axis for kind in self.kinds for pattern in self.rows.get(kind, {}) for axis in _name_axes(pattern)}
        return {axis: rule for axis, rule in self.arch.elastic.items() if axis in present}

    def order_shape(self, axis: str) -> tuple[int, ...]:
        """The shape of an axis's order: [*enclosing axes, axis]."""
        return (*(self.sizes[a] for a in self.arch.elastic[axis].within), self.sizes[axis])


def kept_layers(order: Sequence[int], size: int) -> list[int]:
    """The layers that a depth of `size` keeps, in the order in which they run."""
    return sorted(order[:size])


def _name_axes(pattern: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", pattern)


def _kept_units(axis: str, rule: int | Tensor | None, size: int, layer: int) -> Sequence[int]:
    """Which units of an axis in a name stay, as indices of the parent."""
    if rule is None or isinstance(rule, int):
        return range(size if rule is None else rule)
    return rule[layer].tolist() if rule.dim() == 2 else rule.tolist()


def per_layer(config: Mapping[str, Any], key: str, layers: Sequence[int]) -> dict[str, Any]:
    """A config's per-layer list (or pattern string) with only these layers; empty if the config has none."""
    values = config.get(key)
    if values is None:
        return {}
    kept = [values[i] for i in layers]
    return {key: "".join(kept) if isinstance(values, str) else kept}
