"""Cuts in blocks are what `take` gives on the whole tensor: for every architecture, axis and block size, bit by bit."""

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from safetensors.torch import save_file

from nestling.axes import dims, parse, take
from nestling.cut import BLOCK, Maps, cut, equal_data, first_not_finite, spans
from nestling.shards import Entry, read_header


def copied(entry: Entry, shape, sizes, keep, limit: int) -> np.ndarray:
    """A tensor's cut, put together from blocks of at most `limit` bytes."""
    maps, parts, what = Maps(), [], cut(shape, sizes, keep)
    for span in spans(entry, what, limit):
        # A block is larger than asked only if it is a single value.
        assert span.nbytes <= limit or (span.num_rows == 1 and span.kept <= 8)
        part = np.empty(span.nbytes, np.uint8)
        maps.copy(span, part)
        assert not span.is_whole or np.array_equal(part, maps.values(span).reshape(-1))
        parts.append(part)
    return np.concatenate([np.empty(0, np.uint8), *parts])


@pytest.mark.parametrize("limit", [1, 100, BLOCK])
@pytest.mark.parametrize("spelling", ["disk", "memory"])
@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_cut_in_blocks_is_take_on_the_whole_for_every_tensor_and_axis(name, spelling, limit, tmp_path):
    layout = tiny.layout(name, spelling)
    draws = torch.Generator().manual_seed(0)
    shapes = {place.name: dims(place.shape, layout.sizes) for place in layout.tensors.values()}
    if limit == 1:  # a block a value is slow: one layer of each kind shows it
        firsts = {layout.kinds.index(kind) for kind in layout.kinds}
        shapes = {
            n: s for n, s in shapes.items() if layout.tensors[n].units.get("layer", 0) in firsts and "embed" not in n
        }
    state = {n: torch.randn(shape, generator=draws) for n, shape in shapes.items()}
    save_file(state, tmp_path / "all.safetensors")
    entries = read_header(tmp_path / "all.safetensors")
    widths = [axis for axis in layout.elastic() if axis != "layer"]
    rules = [tiny.random_sizes(layout, draws)] + [{axis: max(1, layout.sizes[axis] // 2)} for axis in widths]
    for keep in [{}, *rules] if limit > 1 else rules[:1]:
        keep = {axis: n for axis, n in keep.items() if axis != "layer"}
        for part, tensor in state.items():
            shape = layout.tensors[part].shape
            expected = take(tensor, shape, layout.sizes, keep)
            found = copied(entries[part], shape, layout.sizes, keep, limit)
            assert cut(shape, layout.sizes, keep).shape == tuple(expected.shape), part
            assert found.tobytes() == expected.contiguous().numpy().tobytes(), (part, keep)


SHAPES = ("a", "a, b", "a b, c", "a b c", "a + a b, c", "a, b + c", "a, b c + b, c", "3 a, 1, b", "", "b, a/2", "a/2 c")


@settings(max_examples=300, deadline=None)
@given(
    text=some.sampled_from(SHAPES), sizes=some.tuples(*[some.integers(1, 4)] * 3),
    kept=some.tuples(*[some.integers(1, 4)] * 3), limit=some.integers(1, 40),
    dtype=some.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.float64]),
)  # fmt: skip
def test_any_product_and_any_block_is_cut_as_take_cuts_it(text, sizes, kept, limit, dtype, tmp_path_factory):
    shape = parse(text)
    step = 2 if "/" in text else 1
    full = dict(zip("abc", (n * step for n in sizes), strict=True))
    keep = {axis: min(n * step, full[axis]) for axis, n in zip("abc", kept, strict=True)}
    tensor = torch.randint(0, 200, dims(shape, full), generator=torch.Generator().manual_seed(0)).to(dtype)
    file = Path(tmp_path_factory.getbasetemp()) / "drawn.safetensors"
    save_file({"pad": torch.zeros(1, dtype=torch.uint8), "x": tensor}, file)
    found = copied(read_header(file)["x"], shape, full, keep, limit)
    expected = take(tensor, shape, full, keep)
    assert found.tobytes() == expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_row_that_is_larger_than_a_block_is_cut_inside(tmp_path):
    tensor = torch.arange(2 * 3000, dtype=torch.int32).view(2, 3000)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    entry, shape, sizes = read_header(tmp_path / "x.safetensors")["x"], parse("a, b c"), {"a": 2, "b": 3, "c": 1000}
    found = copied(entry, shape, sizes, {"c": 700}, limit=256)
    assert found.tobytes() == take(tensor, shape, sizes, {"c": 700}).contiguous().numpy().tobytes()


def test_a_cut_through_a_block_names_the_two_nearest_sizes():
    with pytest.raises(ValueError, match=r"size 40 along 'a' cuts through a block of 16\. Nearest: 32 or 48\."):
        cut(parse("b, a/16"), {"a": 64, "b": 2}, {"a": 40})


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [("F64", torch.float64), ("F32", torch.float32), ("BF16", torch.bfloat16), ("F16", torch.float16),
     ("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)],
)  # fmt: skip
def test_infinities_and_nan_are_found_in_every_type_and_nothing_else_is(dtype, kind):
    info = torch.finfo(kind)
    finite = torch.tensor([0.0, -1.0, 1.5, info.max, info.min, info.tiny], dtype=torch.float64).to(kind)
    assert first_not_finite(finite.view(torch.uint8).numpy(), dtype) is None
    wrong = [float("nan"), float("-nan")] + ([] if dtype == "F8_E4M3" else [float("inf"), float("-inf")])
    for value in wrong:
        held = torch.cat([finite.double(), torch.tensor([value], dtype=torch.float64)]).to(kind)
        assert first_not_finite(held.view(torch.uint8).numpy(), dtype) == 6


def test_equal_data_is_equal_bytes(tmp_path):
    one, other = torch.zeros(5, 7), torch.zeros(5, 7)
    other[4, 6] = 1e-30
    save_file({"a": one, "b": one.clone(), "c": other}, tmp_path / "x.safetensors")
    entries = read_header(tmp_path / "x.safetensors")
    assert equal_data(entries["a"], entries["b"])
    assert not equal_data(entries["a"], entries["c"])
