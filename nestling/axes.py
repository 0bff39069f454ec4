"""Shapes in named axes, and the one primitive on them: `take`.

A parameter's shape is written once, as text: commas separate dims, `+` lays blocks side by side within a dim, a block
is a product of axes (outermost first), a number is itself, and `axis/16` is one entry for each 16 units. The down
projection of a feed-forward layer is "hidden, ffn"; the input projection of a Mamba layer is "group mamba mdim +
group mamba mdim + group state + group state + group mamba, hidden".

Everything that Nestling does to weights is `take` with another rule for which units stay: slicing keeps the first
units of an axis, sorting keeps all of them in a new order, sharding keeps every world-th. Counting reads the same
text with sizes in place of axes, so a count and a cut can never disagree.

This file knows no architecture, no file format and no model class.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd, lcm, prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # Counting and `nestling inspect` work on names and numbers alone; importing torch would cost them seconds.
    from torch import Tensor

Keep = Mapping[str, "int | Tensor"]  # axis -> how many units stay, or which ones (see `take`)
Sizes = Mapping[str, Any]  # axis -> size; ints for exact counts, floats or tensors for expected ones


@dataclass(frozen=True)
class Factor:
    """One factor of a block: an axis (perhaps one entry for each `every` units of it), or a fixed number."""

    axis: str  # empty for a number
    number: int  # the number itself; 1 for an axis
    every: int = 1

    def size(self, sizes: Sizes) -> Any:
        """How many entries this factor has at the given sizes; whole for ints, smooth for floats and tensors."""
        if not self.axis:
            return self.number
        if self.axis not in sizes:
            raise ValueError(f"no size for axis '{self.axis}'. Known axes: {', '.join(sorted(sizes))}.")
        size = sizes[self.axis]
        if self.every == 1:
            return size
        return -(-size // self.every) if isinstance(size, int) else size / self.every


Block = tuple[Factor, ...]
Dim = tuple[Block, ...]
Shape = tuple[Dim, ...]


@cache
def parse(text: str) -> Shape:
    """Read a shape. The empty text is a scalar: no dims."""
    if not text.strip():
        return ()
    return tuple(
        tuple(tuple(_factor(word, text) for word in block.split()) for block in dim.split("+"))
        for dim in text.split(",")
    )


def axes_of(shape: Shape) -> frozenset[str]:
    """The axes that a shape names."""
    return frozenset(factor.axis for dim in shape for block in dim for factor in block if factor.axis)


def dims(shape: Shape, sizes: Sizes) -> tuple[Any, ...]:
    """The size of every dim: the sum over its blocks of the product of their factors."""
    return tuple(sum(prod(factor.size(sizes) for factor in block) for block in dim) for dim in shape)


def count(shape: Shape, sizes: Sizes) -> Any:
    """How many numbers a tensor of this shape holds: exact for ints, differentiable for expected sizes."""
    return prod(dims(shape, sizes))


def grain(shapes: Sequence[Shape], axis: str, sizes: Sizes, *, tile: int = 1, parallel: int = 1) -> int:
    """The smallest legal step of a size along `axis`.

    Least common multiple of what touches the axis: a block that stores one entry for each n units needs multiples of
    n; a dim that a kernel or format cuts into tiles of `tile` needs every block of it to stay a whole number of
    tiles; `parallel` ranks need equal shares.
    """
    steps = [parallel]
    for shape in shapes:
        for dim in shape:
            for block in dim:
                if axis not in {factor.axis for factor in block}:
                    continue
                steps += [factor.every for factor in block if factor.axis == axis]
                rest = prod(factor.size(sizes) for factor in block if factor.axis != axis)
                steps.append(tile // gcd(tile, rest))
    return lcm(*steps)


def take(
    tensor: Tensor,
    shape: Shape,
    sizes: Sizes,
    keep: Keep,
    *,
    within: Mapping[str, tuple[str, ...]] | None = None,
    units: Mapping[str, int] | None = None,
) -> Tensor:
    """The units of `tensor` that `keep` names, in its order.

    keep: for each axis an int n (the first n units; a view where strides allow) or an int64 tensor [*enclosing, n] of
    unit
        indices, where `within[axis]` names the enclosing axes at their full sizes: `q` ordered within `kv` is [kv, n].
    units: where this tensor stands along axes that are in its name, such as {"layer": 3, "expert": 5}; an index that is
        ordered within such an axis uses that unit's row.
    Returns a view where nothing has to move, else a copy; differentiable either way. Axes that `keep` does not name
    stay.
    """
    within, units = within or {}, units or {}
    expected = dims(shape, sizes)
    if tuple(tensor.shape) != expected:
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} was given where {to_text(shape)} is {expected}.")
    keep = {axis: rule for axis, rule in keep.items() if not (isinstance(rule, int) and rule == sizes.get(axis))}
    return _take_blocks(tensor, shape, sizes, keep, within, units, dim=0)


def add_(full: Tensor, part: Tensor, shape: Shape, sizes: Sizes, keep: Mapping[str, int]) -> None:
    """Add to the first units of `full` along the axes of `keep` what `part` holds for them: the adjoint of `take`.

    part: as `take(full, shape, sizes, keep)` gives it. Nothing else of `full` is touched or read.
    """
    kept = {**sizes, **keep}
    spans = [list(_spans(dim, sizes, kept)) for dim in shape]
    for picked in itertools.product(*spans):
        x, y = full, part
        for i, (_, span, span_kept) in enumerate(picked):
            x, y = x.narrow(i, *span), y.narrow(i, *span_kept)
        for i, (block, _, _) in reversed(list(enumerate(picked))):
            x = x.unflatten(i, [factor.size(sizes) for factor in block])
            y = y.unflatten(i, [factor.size(kept) for factor in block])
        for i, length in enumerate(y.shape):
            x = x.narrow(i, 0, length)
        x.add_(y)


def _spans(dim: Dim, sizes: Sizes, kept: Sizes) -> Iterator[tuple[Block, tuple[int, int], tuple[int, int]]]:
    """Each block of a dim with its start and length at the full and at the kept sizes."""
    start, start_kept = 0, 0
    for block in dim:
        length, length_kept = (prod(factor.size(s) for factor in block) for s in (sizes, kept))
        yield block, (start, length), (start_kept, length_kept)
        start, start_kept = start + length, start_kept + length_kept


def to_text(shape: Shape) -> str:
    """A shape as it is written, for messages."""
    words = {factor: (f"{factor.axis}/{factor.every}" if factor.every > 1 else factor.axis) or str(factor.number)
             for dim in shape for block in dim for factor in block}  # fmt: skip
    return "'" + ", ".join(" + ".join(" ".join(words[f] for f in block) for block in dim) for dim in shape) + "'"


def _factor(word: str, text: str) -> Factor:
    axis, slash, every = word.partition("/")
    if axis.isdecimal() and not slash:
        return Factor("", int(axis))
    if not axis.isidentifier() or (slash and not every.isdecimal()):
        raise ValueError(f"cannot read '{word}' in shape '{text}': expected an axis, a number or axis/number.")
    return Factor(axis, 1, int(every) if slash else 1)


def _take_blocks(
    tensor: Tensor, shape: Shape, sizes: Sizes, keep: Keep, within: Mapping, units: Mapping, *, dim: int
) -> Tensor:
    """Split dims of several blocks, from `dim` on, into their blocks; take each; lay the results side by side again."""
    import torch

    while dim < len(shape) and not (len(shape[dim]) > 1 and any(f.axis in keep for block in shape[dim] for f in block)):
        dim += 1
    if dim == len(shape):
        return _take_product(tensor, shape, sizes, keep, within, units)
    lengths = [prod(factor.size(sizes) for factor in block) for block in shape[dim]]
    parts = [
        _take_blocks(part, (*shape[:dim], (block,), *shape[dim + 1 :]), sizes, keep, within, units, dim=dim + 1)
        for part, block in zip(tensor.split(lengths, dim), shape[dim], strict=True)
    ]
    return torch.cat(parts, dim)


def _take_product(tensor: Tensor, shape: Shape, sizes: Sizes, keep: Keep, within: Mapping, units: Mapping) -> Tensor:
    """Take from a tensor each of whose dims is one product of axes (or is not touched by `keep`)."""
    # One dim of `x` for each factor of a dim that is cut or encloses one; any other stays whole, one nameless factor.
    named = {*keep, *(enclosing for axis in keep for enclosing in within.get(axis, ()))}
    split = [dim[0] if len(dim) == 1 and any(f.axis in named for f in dim[0]) else () for dim in shape]
    factors = [factor for block in split for factor in (block or (Factor("", 0),))]
    lengths = [
        n for block, whole in zip(split, tensor.shape, strict=True) for n in ([f.size(sizes) for f in block] or [whole])
    ]
    x = tensor.view(lengths) if tensor.is_contiguous() else tensor.reshape(lengths)
    # An axis ordered within another is cut first, while the enclosing units still stand where the order says.
    for axis in sorted((a for a in keep if a in {f.axis for f in factors}), key=lambda a: -len(within.get(a, ()))):
        for place, factor in enumerate(factors):
            if factor.axis == axis:
                x = _take_axis(x, place, factor, keep[axis], [f.axis for f in factors], within.get(axis, ()), units)
    ends = list(x.shape)
    widths = [prod(ends.pop(0) for _ in (block or (None,))) for block in split]
    return x.reshape(widths)


def _take_axis(
    x: Tensor, place: int, factor: Factor, rule: int | Tensor, axes: list[str], within: Sequence[str], units: Mapping
) -> Tensor:
    """Cut one factor's dim, number `place` of x, to the units of `rule`."""
    import torch

    if isinstance(rule, int):
        if rule % factor.every:
            raise ValueError(
                f"size {rule} along '{factor.axis}' cuts through a block of {factor.every}. "
                f"Nearest: {rule // factor.every * factor.every} or {-(-rule // factor.every) * factor.every}."
            )
        return x.narrow(place, 0, rule // factor.every)
    index, enclosing = rule, []
    for axis in within:
        if axis in units:
            index = index.select(len(enclosing), units[axis])
        elif axis in axes:
            enclosing.append(axes.index(axis))
        else:
            raise ValueError(f"'{factor.axis}' is ordered within '{axis}', which this tensor does not have.")
    index = index.to(x.device)
    if factor.every > 1:
        index = _whole_blocks(index, factor)
    if not enclosing:
        return x.index_select(place, index)
    # Advanced indexing with one broadcast index for each enclosing dim: the row of the order that belongs to its unit.
    moved = x.movedim([*enclosing, place], list(range(len(enclosing) + 1)))
    grid = torch.meshgrid(*(torch.arange(n, device=x.device) for n in index.shape[:-1]), indexing="ij")
    return moved[(*(g.unsqueeze(-1) for g in grid), index)].movedim(
        list(range(len(enclosing) + 1)), [*enclosing, place]
    )


def _whole_blocks(index: Tensor, factor: Factor) -> Tensor:
    """Turn an index of units into one of blocks of `every` units, which must move whole."""
    import torch

    blocks = index.unflatten(-1, (-1, factor.every)) if index.shape[-1] % factor.every == 0 else None
    if blocks is None or not torch.equal(
        blocks, blocks[..., :1] // factor.every * factor.every + torch.arange(factor.every, device=index.device)
    ):
        raise ValueError(
            f"the units kept along '{factor.axis}' do not move as whole blocks of {factor.every}, but one entry "
            f"is stored for each {factor.every}."
        )
    return blocks[..., 0] // factor.every
