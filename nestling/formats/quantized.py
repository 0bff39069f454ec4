"""A checkpoint whose matrices are stored in few bits: which tensors it has, and how each is cut.

Cuts are `take` again: for every place of the plain layout this lists the tensors that stand for it, each with its own
shape in named axes, so codes and scales are cut together and every kept block is bit for bit the parent's. Nothing is
decoded, so nothing is rounded: a cut that does not keep whole blocks is refused with the nearest that do.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from nestling.axes import Factor, Keep, Shape
from nestling.formats import compressed_tensors, modelopt
from nestling.formats.blocks import CutBlock
from nestling.formats.matrix import Headers, Matrix, Spelling, Tile, find
from nestling.formats.names import Module, Renamer, check_kinds, rebuild
from nestling.formats.scales import SCALES, check_values, unequal_global_scales

if TYPE_CHECKING:
    from nestling.formats.scales import Read

CACHE = ("k_scale", "v_scale", "q_scale", "output_scale")  # beside k_proj and v_proj, or beside the attention module
SHOWN = 5  # names in one message
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer or expert, in a name


class Place(Protocol):
    """Where a tensor of a smaller model comes from: arch.Place, by its fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def units(self) -> dict[str, int]: ...


class Layout(Protocol):
    """The plain names and shapes of a checkpoint: arch.Layout, by what is used of it."""

    @property
    def sizes(self) -> dict[str, int]: ...
    def places(self, keep: Keep | None = None, layers: Sequence[int] | None = None) -> Iterator[Any]: ...
    def check_cover(self, names: Iterable[str]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """What a quantized checkpoint stores beside and instead of plain matrices."""

    spelling: Spelling
    tiles: tuple[Tile, ...]
    has_static_inputs: bool  # the description says that activations have fixed scales
    section: dict[str, Any] | None  # quantization_config of config.json
    sidecar: dict[str, Any] | None  # hf_quant_config.json
    headers: Headers
    _found: dict[tuple[str, Shape], Matrix | None] = field(default_factory=dict, compare=False, repr=False)

    def matrix(self, layout: Layout, place: Place) -> Matrix | None:
        """The tensors that stand for a place of the plain layout; None if it is stored plainly."""
        if len(place.shape) < 2:
            return None
        key = (place.source, place.shape)
        if key not in self._found:  # each of thousands of experts is asked for several times
            self._found[key] = find(*key, layout.sizes, self.headers, self.spelling, self.tiles)
        return self._found[key]

    def places(self, layout: Layout, keep: Keep, layers: Sequence[int] | None) -> list[Any]:
        """Every stored tensor of the model that keeps these units and layers, and where it comes from.

        All places are known before the first is cut: an illegal cut or a missing scale is an error here.
        """
        plain = [(place, self.matrix(layout, place)) for place in layout.places(keep, layers)]
        self._check_inputs([matrix for _, matrix in plain if matrix])
        places: list[Any] = []
        for place, matrix in plain:
            if matrix is None:
                places.append(place)
            else:
                try:
                    shapes = matrix.shapes(place.shape, layout.sizes, keep)
                except CutBlock as cut:
                    raise ValueError(_refusal(cut, place.source, matrix, plain, layout, keep)) from None
                for (source, _), shape in zip(matrix.parts, shapes, strict=True):
                    places.append(replace(place, name=_moved(source, place), source=source, shape=shape))
            for source in self._cache_scales(place.source):
                shape = tuple(((Factor("", n),),) for n in self.headers[source].shape)
                places.append(replace(place, name=_moved(source, place), source=source, shape=shape))
        return places

    def check_cover(self, layout: Layout, names: Iterable[str]) -> None:
        """Every stored tensor belongs to a row of the plain layout, every row is stored, every matrix has its
        scales."""
        given = set(names)
        known: set[str] = set()
        present: set[str] = set()
        matrices = []
        for place in layout.places():
            matrix = self.matrix(layout, place)
            parts = [name for name, _ in matrix.parts] if matrix else [place.source]
            matrices += [matrix] if matrix else []
            present |= {place.source} if parts[0] in given else set()
            known |= {*parts, *self._cache_scales(place.source)}
        stray = sorted(name for name in given - known if not name.startswith("mtp.") and _is_ours(name))
        if stray:
            raise ValueError(
                f"{len(stray)} tensors belong to no quantized matrix in the {self.spelling.method} layout that can be "
                f"cut: {', '.join(stray[:SHOWN])}{', ...' if len(stray) > SHOWN else ''}. Nothing is left out in "
                "silence: is the matrix beside them missing, or stored in another way (experts joined into one tensor)?"
            )
        layout.check_cover(present | (given - known))
        self._check_inputs(matrices)

    def check_scales(self, read: Read, layout: Layout, layers: Sequence[int] | None, keep: Keep) -> list[str]:
        """Every scale of what is kept is positive and finite. Returns warnings.

        read: gives the bytes of a stored tensor by name.
        """
        places = list(layout.places(keep, layers))
        found = {place.source: matrix for place in places if (matrix := self.matrix(layout, place))}
        check_values(read, self.headers, found, [name for place in places for name in self._cache_scales(place.source)])
        return unequal_global_scales(read, self.headers, found)

    def describe(
        self, layout: Layout, keep: Keep, layers: Sequence[int] | None, *, memory_root: str
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """The description for the model that keeps these units and layers: quantization_config of config.json, and
        hf_quant_config.json; None for what the parent does not have.

        memory_root: what stands before `layers.` in the names of modules in memory.
        """
        kept = {place.source: place.name for place in layout.places(keep, layers) if len(place.shape) > 1}
        modules: dict[str, Module] = {}
        for place in layout.places():
            if len(place.shape) > 1:
                old, new = _module(place.source), _module(kept.get(place.source, ""))
                is_quantized = self.matrix(layout, place) is not None
                modules.setdefault(old, Module(old=old, new=new, is_quantized=is_quantized))
        renamer = Renamer(list(modules.values()), memory_root=memory_root)
        section = None if self.section is None else rebuild(self.section, renamer, exclude_key="ignore")
        if self.sidecar is None:
            return section, None
        inner = rebuild(self.sidecar.get("quantization") or {}, renamer, exclude_key="exclude_modules")
        return section, {**self.sidecar, "quantization": inner}

    def summary(self, layout: Layout) -> dict[str, Any]:
        """What is stored how, in numbers, for people."""
        counts: dict[str, int] = {}
        for place in layout.places():
            matrix = self.matrix(layout, place)
            if matrix:
                tile = "" if matrix.format == "nvfp4" or not any(matrix.tile) else _tile_text(matrix.tile)
                counts[matrix.format + tile] = counts.get(matrix.format + tile, 0) + 1
        return {"layout": self.spelling.method, "matrices": counts}

    def _cache_scales(self, source: str) -> list[str]:
        """Scales of an attention cache that lie beside a projection, or beside the module that holds it."""
        for part in ("q", "k", "v"):
            end = f"{part}_proj.weight"
            if source.endswith(f".{end}"):
                module, attention = source.removesuffix("weight"), source.removesuffix(end)
                names = [module + scale for scale in CACHE] + [f"{attention}{part}_scale"]
                return [name for name in names if name in self.headers]
        return []

    def _check_inputs(self, matrices: Sequence[Matrix]) -> None:
        """Activation scales are there for all matrices of the same name in all layers and experts, or for none."""
        alike: dict[tuple[str, str], list[str]] = {}
        for matrix in matrices:
            role = "" if self.has_static_inputs else NUMBER.sub("", matrix.codes)
            alike.setdefault((matrix.format, role), []).append(matrix.input)
        for (kind, _), names in alike.items():
            lacking = [name for name in names if name not in self.headers]
            if lacking and (self.has_static_inputs or len(lacking) < len(names)):
                raise ValueError(
                    f"{len(lacking)} of {len(names)} matrices in {kind} lack their activation scale, such as "
                    f"{', '.join(lacking[:SHOWN])}: an engine would read it as zero and answer NaN. Calibrate and "
                    "quantize again (every expert has to see a token), or copy the checkpoint again."
                )


def detect(config: Mapping[str, Any], sidecar: Mapping[str, Any] | None, headers: Headers) -> Quantized | None:
    """How a checkpoint is quantized; None if it is plain. What cannot be cut is refused here.

    config: config.json. sidecar: hf_quant_config.json, if the folder has one.
    """
    section = config.get("quantization_config") or config.get("compression_config")
    if section is None and sidecar is None:
        return None
    for told, where in ((section, "quantization_config of config.json"), (sidecar, modelopt.SIDECAR)):
        if told is not None:
            check_kinds(told, where)
    method = (section or {}).get("quant_method")
    if method is None:
        is_modelopt = sidecar is not None or "quant_algo" in (section or {})
        method = modelopt.METHOD if is_modelopt else compressed_tensors.METHOD
    plain = {"section": None if section is None else dict(section), "headers": headers}
    if method == compressed_tensors.METHOD and section is not None:
        return Quantized(
            spelling=compressed_tensors.SPELLING,
            tiles=compressed_tensors.check(section),
            has_static_inputs=compressed_tensors.has_static_inputs(section),
            sidecar=None,
            **plain,
        )
    if method in (modelopt.METHOD, "modelopt_fp4", "modelopt_mixed"):
        return Quantized(
            spelling=modelopt.SPELLING,
            tiles=modelopt.check(section, sidecar),
            has_static_inputs=modelopt.has_static_inputs(section, sidecar),
            sidecar=None if sidecar is None else dict(sidecar),
            **plain,
        )
    raise ValueError(
        f"the checkpoint is quantized by '{method}', which Nestling cannot cut. Supported: compressed-tensors "
        f"({', '.join(compressed_tensors.FORMATS)}) and modelopt ({', '.join(modelopt.ALGORITHMS)}). Use the "
        "checkpoint that it was made from."
    )


def _refusal(
    cut: CutBlock, source: str, matrix: Matrix, plain: Sequence[tuple[Any, Matrix | None]], layout: Layout, keep: Keep
) -> str:
    """The message for an illegal cut, with the nearest sizes that every matrix allows."""
    alike = {(place.shape, one.tile, tuple(form for _, form in one.parts)): one for place, one in plain if one}

    def is_legal(size: int) -> bool:
        try:
            for (shape, _, _), one in alike.items():
                one.shapes(shape, layout.sizes, {**keep, cut.axis: size})
        except CutBlock:
            return False
        return True

    full = layout.sizes[cut.axis]
    below = next((n for n in range(cut.size - 1, 0, -1) if is_legal(n)), None)
    above = next((n for n in range(cut.size + 1, full + 1) if is_legal(n)), None)
    nearest = [str(n) for n in (below, above) if n is not None]
    what = f"{matrix.tile[1]} values" if matrix.tile[0] <= 1 else f"tile of {_tile_text(matrix.tile).strip(' ()')}"
    return (
        f"size {cut.size} along '{cut.axis}' cuts through a block of '{source}': {matrix.format} keeps one scale for "
        f"every {what}, and {cut.why}. Nearest: {' or '.join(nearest) or f'{full}, the full size'}."
    )


def _tile_text(tile: Tile) -> str:
    height, width = (str(n) if n else "all" for n in tile)
    return f" ({height} x {width})"


def _moved(source: str, place: Place) -> str:
    """The name in the member of a tensor that lies beside `place.source`."""
    base = place.source.removesuffix(".weight")
    if source.startswith(base):
        return place.name.removesuffix(".weight") + source[len(base) :]
    stem, _, suffix = source.rpartition(".")  # beside the module that holds the projection
    assert base.startswith(stem), (source, place.source)
    return place.name.removesuffix(".weight").rpartition(".")[0] + f".{suffix}"


def _module(name: str) -> str:
    return name.removesuffix(".weight") if name.endswith(".weight") else name.rpartition(".")[0]


def _is_ours(name: str) -> bool:
    """Whether a name is one that quantization adds."""
    last = name.rpartition(".")[2]
    return last.endswith((*SCALES, "_scale_inv", "_zero_point", "_packed", "_shape", "_g_idx")) or last in (
        "g_idx",
        "qweight",
    )
