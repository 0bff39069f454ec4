"""One quantized matrix on disk: which tensors stand for it, and the shape of each in named axes.

A checkpoint says nothing reliable about single matrices (lists of excluded names come in several spellings, and some
lie), but the headers do: a matrix is quantized if its codes are stored as bytes and scales lie beside it, and how its
scales are grouped shows in their shape. `find` reads that; `shapes` derives every part's shape from the matrix's own,
so that `take` cuts codes and scales together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from nestling.axes import Factor, Keep, Shape, Sizes, dims
from nestling.formats.blocks import per_block


class Header(Protocol):
    """What a file's header says of one tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Headers = Mapping[str, Header]
Form = tuple[
    str | tuple[str, int], ...
]  # "lead": dims before the matrix; "one": a dim of 1; ("row", 16): one for each 16
Tile = tuple[int, int]  # rows and columns that share a scale

PLAIN = {"F64", "F32", "BF16", "F16"}
SCALAR: tuple[Form, ...] = ((), ("one",), ("lead",), ("lead", "one"), ("lead", "one", "one"))
CHANNEL: tuple[Form, ...] = (("lead", ("row", 1), "one"), ("lead", ("row", 1)))
CODES: Form = ("lead", ("row", 1), ("col", 1))
NVFP4_BLOCK = 16
NVFP4_CODES: Form = ("lead", ("row", 1), ("col", 2))
NVFP4_SCALES: tuple[Form, ...] = (("lead", ("row", 1), ("col", NVFP4_BLOCK)),)


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """What a layout calls the tensors that stand for one matrix."""

    method: str
    packed: str  # two NVFP4 codes a byte
    global_scale: str  # of NVFP4
    packed_input: str  # activation scale beside NVFP4
    scale: str = "weight_scale"
    input: str = "input_scale"  # activation scale beside FP8


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The tensors that stand for one quantized matrix."""

    format: str  # "fp8" or "nvfp4"
    tile: Tile  # values that share a scale; 0: all of them
    codes: str  # name of the codes
    input: str  # name of the activation scale, there or not
    parts: tuple[tuple[str, Form], ...]  # name of every tensor that is there, codes first

    def shapes(self, shape: Shape, sizes: Sizes, keep: Keep) -> list[Shape]:
        """The shape of every part, from the matrix's own. Raises CutBlock if `keep` cuts through a block."""
        return [_build(form, shape, sizes, keep) for _, form in self.parts]


def find(
    name: str, shape: Shape, sizes: Sizes, headers: Headers, spelling: Spelling, tiles: Sequence[Tile]
) -> Matrix | None:
    """The matrix of parameter `name`, or None if it is stored plainly (or not at all).

    tiles: the shapes of scale tiles that the checkpoint's config speaks of.
    """
    packed = part_name(name, spelling.packed)
    if packed in headers and headers[packed].dtype == "U8":
        wanted = {spelling.scale: NVFP4_SCALES, spelling.global_scale: SCALAR}
        return _matrix("nvfp4", name, packed, NVFP4_CODES, wanted, spelling.packed_input, shape, sizes, headers, tiles)
    if name in headers and headers[name].dtype == "F8_E4M3":
        tiled: list[Form] = []
        for h, w in tiles:
            tiled += [("lead", ("row", h), ("col", w)), ("lead", ("row", h), "one", ("col", w), "one")]
        wanted = {spelling.scale: (*SCALAR, *CHANNEL, *tiled)}
        return _matrix("fp8", name, name, CODES, wanted, spelling.input, shape, sizes, headers, tiles)
    if name in headers and headers[name].dtype not in PLAIN:
        raise ValueError(
            f"'{name}' is stored as {headers[name].dtype} and is neither FP8 (F8_E4M3) nor NVFP4 (U8) with scales in "
            f"the {spelling.method} layout. Nestling cuts those two."
        )
    return None


def part_name(name: str, part: str) -> str:
    """The name of one part of a parameter's tensors: `X.weight` has `X.weight_scale`, a fused `X` has
    `X_weight_scale`."""
    if name.endswith(".weight"):
        return name.removesuffix("weight") + part
    return name if part == "weight" else f"{name}_{part}"


def _matrix(
    kind: str, name: str, codes: str, form: Form, wanted: Mapping[str, tuple[Form, ...]], input_part: str, shape: Shape,
    sizes: Sizes, headers: Headers, tiles: Sequence[Tile],
) -> Matrix:  # fmt: skip
    parts, scales = [(codes, _fit(codes, (form,), shape, sizes, headers))], []
    for part, forms in wanted.items():
        scale = part_name(name, part)
        if scale not in headers:
            raise ValueError(
                f"'{codes}' is stored as {kind}, but '{scale}' is missing: an engine would read it as zero and answer "
                "NaN. Copy the checkpoint again, or quantize it again."
            )
        scales.append(_fit(scale, forms, shape, sizes, headers))
        parts.append((scale, scales[-1]))
    if part_name(name, input_part) in headers:
        found = part_name(name, input_part)
        parts.append((found, _fit(found, SCALAR, shape, sizes, headers)))
    steps = {token[0]: token[1] for token in scales[0] if isinstance(token, tuple)}
    tile = (steps.get("row", 0), steps.get("col", 0))
    return Matrix(format=kind, tile=tile, codes=codes, input=part_name(name, input_part), parts=tuple(parts))


def _fit(name: str, forms: Sequence[Form], shape: Shape, sizes: Sizes, headers: Headers) -> Form:
    """The form whose shape at full sizes is the one in the header."""
    given, seen = tuple(headers[name].shape), []
    for form in forms:
        if "lead" in form and len(shape) == 2 and form in SCALAR:
            continue
        expected = dims(_build(form, shape, sizes, {}), sizes)
        if expected == given:
            return form
        seen.append(expected)
    raise ValueError(
        f"'{name}' has shape {given}; for a matrix of {dims(shape, sizes)} expected "
        f"{' or '.join(map(str, dict.fromkeys(seen)))}."
    )


def _build(form: Form, shape: Shape, sizes: Sizes, keep: Keep) -> Shape:
    built: list = []
    for token in form:
        if token == "lead":
            built += shape[:-2]
        elif token == "one":
            built.append(((Factor("", 1),),))
        else:
            which, every = token
            built.append(per_block(shape[-2 if which == "row" else -1], int(every), sizes, keep))
    return tuple(built)
