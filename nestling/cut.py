"""Cut the first units along axes out of files, in blocks of bounded size, without loading a tensor.

`take` (in axes.py) says what a cut is. Where every axis keeps its *first* units, what stays of each dim is a list of
runs, and a tensor is rows of which some stay, each with some of its columns. That can be copied from a mapped file
block by block, whatever the type of the values: this file does it in bytes. The tests hold it to `take`, bit by bit.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from nestling.axes import Dim, Shape, Sizes, dims
from nestling.shards import BYTES, NOT_FINITE, Entry

if TYPE_CHECKING:
    import numpy as np

Run = tuple[int, int]  # where it starts, how many
Prefix = Mapping[str, int]  # axis -> how many of its first units stay; axes that are not named stay whole

BLOCK = 4 * 1024**2  # bytes that one thread holds at a time: what fits its cache is written at once


@dataclass(frozen=True)
class Cut:
    """What stays of one tensor: some rows, and of each some columns. Numbers count values, not bytes."""

    shape: tuple[int, ...]  # of what stays
    rows: tuple[Run, ...]
    columns: tuple[Run, ...]  # within a row
    width: int  # of a row before the cut

    @property
    def kept(self) -> int:
        """Values that stay of a row."""
        return sum(n for _, n in self.columns)


@dataclass(frozen=True)
class Span:
    """A block of rows of one tensor in a file, in bytes."""

    source: Entry
    start: int  # of the first row
    num_rows: int
    width: int  # of a row in the file
    columns: tuple[Run, ...]
    kept: int  # of a row, after the cut

    @property
    def nbytes(self) -> int:
        """Bytes that stay."""
        return self.num_rows * self.kept

    @property
    def is_whole(self) -> bool:
        """Nothing is left out between the first byte and the last."""
        return self.kept == self.width


def cut(shape: Shape, sizes: Sizes, keep: Prefix) -> Cut:
    """The rows and columns that stay of a tensor of this shape."""
    small = dims(shape, {**sizes, **keep})
    if not shape:
        return Cut((), ((0, 1),), ((0, 1),), 1)
    *leading, last = [runs(dim, sizes, keep) for dim in shape]
    *outer, width = dims(shape, sizes)
    rows: list[Run] = [(0, 1)]
    for size, kept in zip(outer, leading, strict=True):
        rows = _product(rows, kept, size)
    if last == [(0, width)]:
        # A row without a gap needs no row: one value a row lets blocks end anywhere.
        return Cut(small, tuple((a * width, n * width) for a, n in rows), ((0, 1),), 1)
    return Cut(small, tuple(rows), tuple(last), width)


def runs(dim: Dim, sizes: Sizes, keep: Prefix) -> list[Run]:
    """What stays of a dim."""
    found: list[Run] = []
    begin = 0
    for block in dim:
        kept, size = [(0, 1)], 1
        for factor in reversed(block):
            n = keep.get(factor.axis)
            full = factor.size(sizes)
            if n is not None and n % factor.every and n != sizes[factor.axis]:
                raise ValueError(
                    f"size {n} along '{factor.axis}' cuts through a block of {factor.every}. "
                    f"Nearest: {n // factor.every * factor.every} or {-(-n // factor.every) * factor.every}."
                )
            kept = _product([(0, full if n is None else -(-n // factor.every))], kept, size)
            size *= full
        for start, n in kept:
            _append(found, begin + start, n)
        begin += size
    return found


def spans(source: Entry, what: Cut, limit: int = BLOCK) -> Iterator[Span]:
    """The cut of a tensor in a file, in blocks of at most `limit` bytes."""
    size = BYTES[source.dtype]
    rows, columns, width = what.rows, what.columns, what.width
    if what.kept * size > limit:  # even one row is too much: go by its runs instead
        rows = tuple((row * width + start, n) for a, m in rows for row in range(a, a + m) for start, n in columns)
        columns, width = ((0, 1),), 1
    kept = sum(n for _, n in columns) * size
    in_bytes = tuple((a * size, n * size) for a, n in columns)
    most = max(1, limit // kept) if kept else 1
    for begin, n in rows if kept else ():
        for row in range(begin, begin + n, most):
            start = source.start + row * width * size
            yield Span(source, start, min(most, begin + n - row), width * size, in_bytes, kept)


class Maps:
    """Files mapped for reading, each once."""

    def __init__(self) -> None:
        self._maps: dict[Path, mmap.mmap] = {}

    def map(self, file: Path) -> mmap.mmap:
        """The whole file, mapped."""
        if file not in self._maps:
            with file.open("rb") as stream:
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[file]

    @cached_property
    def _page(self) -> int:
        return mmap.ALLOCATIONGRANULARITY

    def advise(self, span: Span, advice: int) -> None:
        """Tell the system what will happen to a span's pages."""
        begin = span.start // self._page * self._page
        self.map(span.source.file).madvise(advice, begin, span.start + span.num_rows * span.width - begin)

    def values(self, span: Span) -> np.ndarray:
        """The rows of a span as they lie in the file: uint8 [row, width]; a view of the mapping."""
        import numpy as np

        flat = np.frombuffer(self.map(span.source.file), np.uint8, span.num_rows * span.width, span.start)
        return flat.reshape(span.num_rows, span.width)

    def whole(self, source: Entry) -> np.ndarray:
        """A tensor as it lies in the file: uint8 [bytes]; a view of the mapping."""
        import numpy as np

        return np.frombuffer(self.map(source.file), np.uint8, source.nbytes, source.start)

    def copy(self, span: Span, out: np.ndarray) -> None:
        """Write what stays of a span to out: uint8 [bytes that stay]."""
        rows, kept, at = self.values(span), out.reshape(span.num_rows, span.kept), 0
        for begin, n in span.columns:
            kept[:, at : at + n] = rows[:, begin : begin + n]
            at += n


def equal_data(one: Entry, other: Entry) -> bool:
    """Whether two tensors of the same type and shape hold the same bytes, read block by block."""
    whole, maps = Cut(one.shape, ((0, prod(one.shape)),), ((0, 1),), 1), Maps()
    pairs = zip(spans(one, whole), spans(other, whole), strict=True)
    return all(bool((maps.values(a) == maps.values(b)).all()) for a, b in pairs)


def first_not_finite(values: np.ndarray, dtype: str) -> int | None:
    """Where the first infinity or NaN stands among values given as bytes: uint8 [bytes]; None if there is none."""
    import numpy as np

    if dtype not in NOT_FINITE:
        return None
    bits = values.view(f"u{BYTES[dtype]}")
    mask = np.array(NOT_FINITE[dtype], bits.dtype)
    wrong = (bits & mask) == mask
    return int(wrong.argmax()) if wrong.any() else None


def _product(outer: Sequence[Run], inner: Sequence[Run], size: int) -> list[Run]:
    """Runs of a dim of `size` inside every index of the runs of an enclosing one."""
    if list(inner) == [(0, size)]:
        return [(a * size, n * size) for a, n in outer]
    found: list[Run] = []
    for a, n in outer:
        for i in range(a, a + n):
            for start, length in inner:
                _append(found, i * size + start, length)
    return found


def _append(found: list[Run], start: int, n: int) -> None:
    """Add a run, joined to the last one where they touch."""
    if found and sum(found[-1]) == start:
        found[-1] = (found[-1][0], found[-1][1] + n)
    elif n:
        found.append((start, n))
