"""The notation and `take`, on small numbers that can be checked by eye, and by properties of any right answer."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nestling.axes import add_, axes_of, count, dims, grain, parse, take, to_text

SIZES = {"a": 4, "b": 3, "c": 6, "h": 5}


@given(
    st.lists(
        st.lists(
            st.lists(st.sampled_from(["a", "b", "c", "h", "2", "7", "c/2"]), min_size=1, max_size=3),
            min_size=1,
            max_size=3,
        ),
        max_size=3,
    )
)
@settings(max_examples=60, deadline=None)
def test_a_shape_written_as_text_and_read_again_is_the_same_shape(words):
    text = ", ".join(" + ".join(" ".join(block) for block in dim) for dim in words)
    shape = parse(text)
    assert parse(to_text(shape)[1:-1]) == shape
    assert len(shape) == len(words)
    assert axes_of(shape) == {w.split("/")[0] for dim in words for block in dim for w in block if not w.isdecimal()}
    # A tensor of these dims has as many numbers as the count says.
    assert torch.empty(dims(shape, SIZES), device="meta").numel() == count(shape, SIZES)


def test_the_empty_text_is_a_scalar_that_holds_one_number():
    assert parse("") == ()
    assert count(parse(""), {}) == 1
    scalar = torch.tensor(3.0)
    assert torch.equal(take(scalar, parse(""), {}, {"a": 1}), scalar)


@pytest.mark.parametrize("text", ["a-b", "a/b", "3/2", "a/", "b/2 + ?", "a,,b c?"])
def test_what_cannot_be_read_is_named(text):
    with pytest.raises(ValueError, match="cannot read"):
        parse(text)


def test_an_axis_without_a_size_is_named_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no size for axis 'x'\. Known axes: a, b, c, h"):
        dims(parse("a, x"), SIZES)


def test_a_tensor_of_another_shape_is_refused_with_both_shapes():
    with pytest.raises(ValueError, match=r"shape \(4, 4\) was given where 'a, b' is \(4, 3\)"):
        take(torch.zeros(4, 4), parse("a, b"), SIZES, {"a": 2})


def test_a_prefix_cut_of_an_outer_axis_is_a_view():
    w = torch.arange(60.0).view(12, 5)
    for shape, keep in ((parse("a b, h"), {"a": 2}), (parse("c 2, h"), {"h": 3}), (parse("a b, h"), {"a": 2, "h": 4})):
        cut = take(w, shape, SIZES, keep)
        assert cut.data_ptr() == w.data_ptr()
    assert take(w, parse("a b, h"), SIZES, {"a": 4, "b": 3, "z": 1}).data_ptr() == w.data_ptr()


def test_a_cut_inside_a_product_takes_the_units_of_every_outer_one():
    w = torch.arange(12.0)  # a=4 outer, b=3 inner
    assert take(w, parse("a b"), SIZES, {"b": 2}).tolist() == [0, 1, 3, 4, 6, 7, 9, 10]
    assert take(w, parse("b a"), SIZES, {"b": 2}).tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    assert take(w, parse("a b"), SIZES, {"a": torch.tensor([3, 0])}).tolist() == [9, 10, 11, 0, 1, 2]


def test_blocks_side_by_side_are_cut_each_for_itself():
    w = torch.arange(8.0)
    assert take(w, parse("a + a"), SIZES, {"a": 2}).tolist() == [0, 1, 4, 5]
    assert take(w, parse("a + 4"), SIZES, {"a": 1}).tolist() == [0, 4, 5, 6, 7]
    both = torch.arange(8.0 * 7).view(8, 7)
    assert torch.equal(take(both, parse("a + a, b + a"), SIZES, {"a": 1}), both[[0, 4]][:, [0, 1, 2, 3]])


def test_an_order_within_an_enclosing_axis_uses_that_units_row():
    w = torch.arange(12.0)
    order = torch.tensor([[2, 0], [1, 2], [0, 1], [0, 2]])
    within = {"b": ("a",)}
    assert take(w, parse("a b"), SIZES, {"b": order}, within=within).tolist() == [2, 0, 4, 5, 6, 7, 9, 11]
    # The enclosing axis may stand behind, in another dim, or in the tensor's name.
    assert take(w.view(4, 3), parse("a, b"), SIZES, {"b": order}, within=within).tolist() == [
        [2, 0],
        [4, 5],
        [6, 7],
        [9, 11],
    ]
    flipped = w.view(4, 3).T.contiguous()
    assert take(flipped, parse("b, a"), SIZES, {"b": order}, within=within).T.tolist() == [
        [2, 0],
        [4, 5],
        [6, 7],
        [9, 11],
    ]
    assert take(torch.arange(3.0), parse("b"), SIZES, {"b": order}, within=within, units={"a": 1}).tolist() == [1, 2]


def test_an_order_within_an_axis_that_is_cut_too_follows_its_units():
    w = torch.arange(12.0).view(4, 3)
    order = torch.tensor([[2, 1, 0], [0, 1, 2], [1, 0, 2], [0, 2, 1]])
    keep = {"a": torch.tensor([2, 0]), "b": order[:, :2]}
    assert take(w, parse("a, b"), SIZES, keep, within={"b": ("a",)}).tolist() == [[7, 6], [2, 1]]


def test_an_order_within_two_axes_uses_the_row_of_both():
    order = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(0)).argsort(-1)
    w = torch.arange(24.0).view(2, 4, 3)
    expected = torch.stack([torch.stack([w[i, j][order[i, j]] for j in range(4)]) for i in range(2)])
    within = {"b": ("l", "a")}
    sizes = SIZES | {"l": 2}
    assert torch.equal(take(w, parse("l, a, b"), sizes, {"b": order}, within=within), expected)
    assert torch.equal(
        take(w[1].T.contiguous(), parse("b, a"), sizes, {"b": order}, within=within, units={"l": 1}).T, expected[1]
    )


def test_an_order_within_an_axis_that_the_tensor_does_not_have_is_refused():
    with pytest.raises(ValueError, match="'b' is ordered within 'a', which this tensor does not have"):
        take(torch.zeros(3), parse("b"), SIZES, {"b": torch.zeros(4, 2, dtype=torch.long)}, within={"b": ("a",)})


def test_blocks_of_units_move_whole_or_not_at_all():
    scales = torch.arange(3.0)  # one for each two units of c
    shape = parse("c/2")
    assert take(scales, shape, SIZES, {"c": 4}).tolist() == [0, 1]
    assert take(scales, shape, SIZES, {"c": torch.tensor([4, 5, 0, 1])}).tolist() == [2, 0]
    with pytest.raises(ValueError, match=r"size 3 along 'c' cuts through a block of 2\. Nearest: 2 or 4"):
        take(scales, shape, SIZES, {"c": 3})
    for broken in ([5, 4, 0, 1], [1, 2], [0, 1, 2]):
        with pytest.raises(ValueError, match="do not move as whole blocks of 2"):
            take(scales, shape, SIZES, {"c": torch.tensor(broken)})


def test_take_is_differentiable_and_the_rest_gets_zero():
    w = torch.randn(8, 5, requires_grad=True)
    take(w, parse("a + a, h"), SIZES, {"a": 2, "h": torch.tensor([4, 0])}).sum().backward()
    expected = torch.zeros(8, 5)
    for i in (0, 1, 4, 5):
        expected[i, [4, 0]] = 1
    assert torch.equal(w.grad, expected)


@pytest.mark.parametrize("text", ["a, h", "a + a, h", "h, a h", "h + a h + a, 3, a", "a/2, h"])
def test_adding_a_slice_back_is_what_autograd_does_to_the_whole(text: str):
    sizes, keep = {"a": 8, "h": 5}, {"a": 4, "h": 3}
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(dims(parse(text), sizes), generator=generator, requires_grad=True)
    part = take(w, parse(text), sizes, keep)
    gradient = torch.randn(part.shape, generator=generator)
    part.backward(gradient)
    full = torch.ones_like(w)
    add_(full, gradient, parse(text), sizes, keep)
    assert torch.equal(full, 1 + w.grad)


def test_take_works_on_a_tensor_that_is_not_contiguous():
    w = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        take(w.T, parse("a b, h"), SIZES, {"b": 2, "h": 2}),
        take(w.T.contiguous(), parse("a b, h"), SIZES, {"b": 2, "h": 2}),
    )


@given(st.integers(1, 4), st.integers(1, 3), st.permutations(range(4)))
@settings(max_examples=40, deadline=None)
def test_a_permutation_and_its_inverse_undo_each_other(n, m, order):
    w = torch.arange(24.0).view(12, 2)
    there = torch.tensor(order)
    moved = take(w, parse("a b, 2"), SIZES, {"a": there})
    assert torch.equal(take(moved, parse("a b, 2"), SIZES, {"a": there.argsort()}), w)
    # Sorting and then keeping a prefix is keeping the first units of the order.
    assert torch.equal(
        take(moved, parse("a b, 2"), SIZES, {"a": n, "b": m}), take(w, parse("a b, 2"), SIZES, {"a": there[:n], "b": m})
    )


def test_an_expected_count_is_smooth_and_agrees_with_the_exact_one():
    shape = parse("a b + 2 c, h")
    assert count(shape, SIZES) == (12 + 12) * 5
    a = torch.tensor(2.5, requires_grad=True)
    expected = count(shape, SIZES | {"a": a})
    expected.backward()
    assert expected.item() == (2.5 * 3 + 12) * 5
    assert a.grad.item() == 15
    assert count(parse("c/4"), {"c": 6}) == 2  # the last block is not full
    assert count(parse("c/4"), {"c": 6.0}) == 1.5


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 16]), st.sampled_from([1, 2, 3]))
@settings(max_examples=60, deadline=None)
def test_grain_is_the_smallest_step_that_keeps_every_block_whole(b, c, tile, parallel):
    sizes = {"a": 48, "b": b, "c": c}
    shapes = [parse("a b, c"), parse("c, a + a"), parse("a/4"), parse("b")]

    def is_legal(n: int) -> bool:
        return n % 4 == 0 and n % parallel == 0 and n * b % tile == 0 and n % tile == 0

    step = grain(shapes, "a", sizes, tile=tile, parallel=parallel)
    assert step == next(n for n in range(1, 1000) if is_legal(n))
    assert all(is_legal(k * step) for k in range(1, 5))
    assert grain([parse("b")], "a", sizes) == 1
    assert math.lcm(step, 1) == step
