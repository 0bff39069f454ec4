"""The shapes of what a format stores for each block of values, from the plain shape of the matrix.

NVFP4 keeps two codes a byte and one scale for each 16 values along the contracted dim; FP8 may keep one scale for each
tile of 128 x 128. The blocks run along the *flattened* dim, which may be a product of axes ("kv q head") or several
parts side by side. A cut is legal if it keeps whole blocks, which is a matter of integer arithmetic: where it is, the
result is a shape in named axes that `take` cuts like any other; where it is not, the error says which axis is at fault.
"""

from __future__ import annotations

from math import gcd, prod

from nestling.axes import Block, Dim, Factor, Keep, Sizes, dims


class CutBlock(ValueError):
    """A cut along `axis` goes through a block."""

    def __init__(self, axis: str, size: int, why: str) -> None:
        super().__init__(why)
        self.axis, self.size, self.why = axis, size, why


def per_block(dim: Dim, every: int, sizes: Sizes, keep: Keep) -> Dim:
    """One entry for each `every` positions along a dim, the last perhaps of fewer. Raises CutBlock."""
    if every == 1:
        return dim
    cut = [_innermost_cut(block, sizes, keep) for block in dim]
    (total,) = dims((dim,), sizes)
    if all(place is None for place in cut):
        return _whole(dim, every) or ((_number(-(-total // every)),),)
    lengths = [prod(factor.size(sizes) for factor in block) for block in dim]
    if any(length % every for length in lengths[:-1]):
        axis, size = next(
            (block[i].axis, keep[block[i].axis]) for block, i in zip(dim, cut, strict=True) if i is not None
        )
        raise CutBlock(axis, size if isinstance(size, int) else -1, "its parts do not all begin at a block")
    return tuple(
        _block(block, every, sizes, keep, place) if place is not None else (_number(-(-length // every)),)
        for block, place, length in zip(dim, cut, lengths, strict=True)
    )


def _block(block: Block, every: int, sizes: Sizes, keep: Keep, place: int) -> Block:
    """The same for one product of axes whose innermost cut axis is factor number `place`."""
    factor, rule = block[place], keep[block[place].axis]
    inner = prod(f.size(sizes) for f in block[place + 1 :])
    outer = prod(f.size(sizes) for f in block[:place])
    full = factor.size(sizes)
    step, entries = every // gcd(every, inner), inner // gcd(every, inner)
    size = rule if isinstance(rule, int) else int(rule.shape[-1])
    if full % step and (outer > 1 or entries > 1):
        raise CutBlock(factor.axis, size, "a block holds values of two units of the axes around it")
    if size % step:
        raise CutBlock(factor.axis, size, f"{size} is not a multiple of {step}")
    return (*block[:place], Factor(factor.axis, 1, step), *([_number(entries)] if entries > 1 else []))


def _whole(dim: Dim, every: int) -> Dim | None:
    """For a dim that nothing cuts and that is one axis, the shape that keeps its name."""
    factors = [factor for block in dim for factor in block]
    if len(factors) > 1 or not factors[0].axis or factors[0].every > 1:
        return None
    return ((Factor(factors[0].axis, 1, every),),)


def _innermost_cut(block: Block, sizes: Sizes, keep: Keep) -> int | None:
    """The number of the innermost factor that `keep` makes smaller or reorders."""
    places = [i for i, f in enumerate(block) if f.axis in keep and not _is_whole(keep[f.axis], sizes[f.axis])]
    return places[-1] if places else None


def _is_whole(rule: object, size: int) -> bool:
    return isinstance(rule, int) and rule == size


def _number(n: int) -> Factor:
    return Factor("", n)
