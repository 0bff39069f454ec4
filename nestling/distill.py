"""The distillation loss: how far a member's next-token distribution is from the frozen parent's.

Forward KL(teacher || student) at temperature one, without a language-model loss. Logits are the largest tensors of a
training step (tokens x vocabulary), so the loss and its gradient are made in one walk over chunks of tokens: only a
chunk is ever in float32, and what stays for the backward pass is one gradient in the student's own dtype. The gradient
reaches the student only.
"""

import math
from typing import Any

import torch
from torch import Tensor

# Logits in one chunk unless `chunk` says otherwise. 4 MiB in float32 stay in a CPU's cache: half the time of 64 MiB.
CHUNK_VALUES, CHUNK_VALUES_CPU = 2**24, 2**20


def forward_kl(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor | None = None,
    vocab: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Mean of KL(teacher || student) over the counted tokens, in nats.

    student_logits, teacher_logits: [batch, time, vocab] or [token, vocab], any float dtype
    mask: bool [batch, time] or [token], true where a token counts; None counts all
    vocab: the real vocabulary; columns from there on are padding and count for nothing in both
    chunk: tokens worked on at once

    Returns a scalar, float64 for float64 logits, else float32. Logits that are not contiguous (a slice along time) are
    copied once in their own dtype.
    """
    student, teacher = student_logits.flatten(0, -2), teacher_logits.flatten(0, -2)  # [token, vocab] each
    vocab = _check_shapes(student_logits, teacher_logits, mask, vocab)
    if mask is None:
        mask = torch.ones(student.shape[0], dtype=torch.bool, device=student.device)
    mask = mask.flatten()  # [token]
    count = int(mask.sum())
    if count == 0:
        raise ValueError("the mask counts no token; expected at least one.")
    if chunk is None:
        chunk = max(1, (CHUNK_VALUES_CPU if student.device.type == "cpu" else CHUNK_VALUES) // vocab)
    if chunk < 1:
        raise ValueError(f"chunk {chunk}: expected at least 1 token.")
    each: Any = _ForwardKL.apply(student, teacher.detach(), mask, vocab, chunk)  # [token], zero where not counted
    return each.sum() / count


def check_finite(loss: Tensor | float, *, member: str, step: int) -> float:
    """The loss as a number; a RuntimeError that says what to do when it is NaN or infinite."""
    value = float(loss)
    if not math.isfinite(value):
        raise RuntimeError(
            f"the loss of member '{member}' is {value} at step {step}. Start a new run (another --to) with a lower lr "
            "or a longer warm-up; if that does not help, run in fp32, and look at the data of this step."
        )
    return value


class _ForwardKL(torch.autograd.Function):
    """KL of each token. The gradient, softmax(student) - softmax(teacher), is made while the chunk is at hand."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, mask: Tensor, vocab: int, chunk: int) -> Tensor:
        dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
        each = torch.empty(student.shape[0], dtype=dtype, device=student.device)  # [token]
        gradient = torch.zeros_like(student) if ctx.needs_input_grad[0] else None  # [token, vocab]
        for start in range(0, student.shape[0], chunk):
            rows = slice(start, start + chunk)
            ignored = ~mask[rows]
            s = _log_softmax(student[rows, :vocab], dtype)
            t = _log_softmax(teacher[rows, :vocab], dtype)
            p = t.exp()
            each[rows] = t.sub_(s).mul_(p).sum(-1).masked_fill_(ignored, 0)
            if gradient is not None:
                gradient[rows, :vocab] = s.exp_().sub_(p).masked_fill_(ignored[:, None], 0)
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return each

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        (gradient,) = ctx.saved_tensors
        # in place: a second [token, vocab] would be the peak; torch refuses another backward over a changed tensor
        return gradient.mul_(grads[0][:, None]), None, None, None, None


def _log_softmax(logits: Tensor, dtype: torch.dtype) -> Tensor:
    # not torch's log_softmax: on CPU it adds float32 in sequence, 1e-5 off at 131072 columns; logsumexp is 10x closer
    x = logits.to(dtype, copy=True)
    return x.sub_(x.logsumexp(-1, keepdim=True))


def _check_shapes(student: Tensor, teacher: Tensor, mask: Tensor | None, vocab: int | None) -> int:
    """The number of columns to compare."""
    if student.shape[:-1] != teacher.shape[:-1] or student.dim() < 2:
        raise ValueError(
            f"student logits {list(student.shape)}, teacher logits {list(teacher.shape)}: "
            "expected [batch, time, vocab] or [token, vocab] over the same tokens."
        )
    if mask is not None and mask.shape != student.shape[:-1]:
        raise ValueError(f"mask {list(mask.shape)} does not fit the logits; expected {list(student.shape[:-1])}.")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask is {mask.dtype}; expected torch.bool, true where a token counts.")
    smaller = min(student.shape[-1], teacher.shape[-1])
    if vocab is None and student.shape[-1] != teacher.shape[-1]:
        raise ValueError(
            f"the student has {student.shape[-1]} logits a token, the teacher {teacher.shape[-1]}: "
            f"one of them is padded. Give vocab, the tokenizer's real size, at most {smaller}."
        )
    if vocab is not None and not 1 <= vocab <= smaller:
        raise ValueError(f"vocab {vocab}: expected 1 to {smaller}, the columns that student and teacher both have.")
    return smaller if vocab is None else vocab
