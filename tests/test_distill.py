"""The chunked loss against torch's own `kl_div`, and what it keeps in memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from nestling.distill import check_finite, forward_kl


def logits(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return (3 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).to(dtype)


def torch_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """torch's own loss over all rows at once. student, teacher: [token, vocab]"""
    return F.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="batchmean", log_target=True)


@pytest.mark.parametrize("chunk", [None, 1, 4, 15, 100])
def test_the_chunked_loss_and_gradient_equal_torchs_over_all_tokens(chunk: int | None) -> None:
    student, teacher = logits(3, 5, 11, seed=0).requires_grad_(), logits(3, 5, 11, seed=1)
    loss = 0.7 * forward_kl(student, teacher, chunk=chunk)
    expected = 0.7 * torch_kl(student.flatten(0, 1), teacher.flatten(0, 1))
    torch.testing.assert_close(loss, expected)
    (gradient,) = torch.autograd.grad(loss, student)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, student)[0])


def test_bfloat16_logits_of_a_large_vocabulary_lose_nothing_to_chunks() -> None:
    student, teacher = (logits(6, 131072, seed=i, dtype=torch.bfloat16) for i in range(2))
    loss = forward_kl(student.requires_grad_(), teacher, chunk=2)
    loss.backward()
    exact = student.detach().double().requires_grad_()
    expected = torch_kl(exact, teacher.double())
    expected.backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)  # float32 rounding over 131072 terms
    assert student.grad is not None
    assert exact.grad is not None
    # rounded to bfloat16 (8 bits) twice: when the gradient is made and when the mean is taken
    torch.testing.assert_close(student.grad.double(), exact.grad, rtol=2**-7, atol=1e-12)


def test_masked_tokens_count_for_nothing_even_when_they_are_nan() -> None:
    student, teacher = logits(2, 4, 9, seed=0), logits(2, 4, 9, seed=1)
    mask = torch.tensor([[True, True, False, True], [False, True, True, False]])
    expected = torch_kl(student[mask], teacher[mask])
    student[~mask] = torch.nan
    student.requires_grad_()
    loss = forward_kl(student, teacher, mask=mask, chunk=3)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert student.grad is not None
    assert not student.grad[~mask].any()
    assert student.grad[mask].all()


@pytest.mark.parametrize(("student_columns", "teacher_columns"), [(12, 12), (10, 16), (16, 10), (12, 16)])
def test_padding_columns_of_the_vocabulary_count_for_nothing(student_columns: int, teacher_columns: int) -> None:
    student, teacher = logits(5, student_columns, seed=0), logits(5, teacher_columns, seed=1)
    expected = torch_kl(student[:, :10], teacher[:, :10])
    student[:, 10:], teacher[:, 10:] = 50, -torch.inf
    student.requires_grad_()
    loss = forward_kl(student, teacher, vocab=10)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert student.grad is not None
    assert student.grad[:, :10].all()
    assert not student.grad[:, 10:].any()


def test_only_the_student_is_taught() -> None:
    student, teacher = logits(4, 7, seed=0).requires_grad_(), logits(4, 7, seed=1).requires_grad_()
    forward_kl(student, teacher).backward()
    assert student.grad is not None
    assert teacher.grad is None


def test_a_student_equal_to_its_teacher_has_a_loss_and_gradient_of_exactly_zero() -> None:
    student = logits(4, 1000, seed=0, dtype=torch.bfloat16).requires_grad_()
    loss = forward_kl(student, student.detach().clone())
    loss.backward()
    assert loss.item() == 0
    assert student.grad is not None
    assert not student.grad.any()


def test_a_step_against_the_gradient_moves_the_student_to_any_random_teacher() -> None:
    student = logits(6, 20, seed=0).requires_grad_()
    losses = []
    for seed in (1, 2):
        teacher = logits(6, 20, seed=seed)
        loss = forward_kl(student, teacher)
        (gradient,) = torch.autograd.grad(loss, student)
        assert 0 < forward_kl(student - gradient, teacher) < loss
        losses.append(loss.item())
    assert losses[0] != losses[1]


class _Float32Peak(TorchDispatchMode):
    """Records the largest float32 tensor that any operation returned, in values."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_flatten(out)[0]:
            if isinstance(x, Tensor) and x.dtype == torch.float32:
                self.values = max(self.values, x.untyped_storage().nbytes() // 4)
        return out


def test_no_float32_tensor_is_larger_than_one_chunk_forward_or_backward() -> None:
    student = logits(64, 4096, seed=0, dtype=torch.bfloat16).requires_grad_()
    teacher = logits(64, 4096, seed=1, dtype=torch.bfloat16)
    with _Float32Peak() as peak:
        forward_kl(student, teacher, chunk=8, vocab=4000).backward()
    assert 0 < peak.values <= 8 * 4096


def test_a_second_backward_is_refused_rather_than_wrong() -> None:
    loss = forward_kl(logits(4, 7, seed=0).requires_grad_(), logits(4, 7, seed=1))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_logits_that_do_not_fit_are_errors_that_say_what_would() -> None:
    student, teacher = torch.zeros(2, 3, 10), torch.zeros(2, 3, 16)
    with pytest.raises(ValueError, match=r"student has 10 logits a token, the teacher 16.*at most 10"):
        forward_kl(student, teacher)
    with pytest.raises(ValueError, match=r"vocab 11: expected 1 to 10"):
        forward_kl(student, teacher, vocab=11)
    with pytest.raises(ValueError, match="same tokens"):
        forward_kl(student, torch.zeros(2, 4, 10))
    with pytest.raises(ValueError, match=r"expected \[2, 3\]"):
        forward_kl(student, student, mask=torch.ones(6, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        forward_kl(student, student, mask=torch.ones(2, 3))
    with pytest.raises(ValueError, match="counts no token"):
        forward_kl(student, student, mask=torch.zeros(2, 3, dtype=torch.bool))


def test_a_loss_that_is_not_finite_stops_with_member_step_and_remedy() -> None:
    assert check_finite(torch.tensor(0.5), member="45", step=3) == 0.5
    for value in (float("nan"), float("inf")):
        with pytest.raises(RuntimeError, match=r"member '45' is (nan|inf) at step 7.*lower lr.*fp32.*data"):
            check_finite(torch.tensor(value), member="45", step=7)
