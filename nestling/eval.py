"""How good a model is: problems solved by generation, perplexity, and distance to a teacher.

All of it works on any causal language model of transformers. Decoding is greedy and batched: prompts are padded on the
left, attention and Mamba layers both leave padding out, so a batch gives what single prompts give (up to rounding).
Thinking budgets here are the plain kind: cut the thoughts after so many tokens and close them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from nestling import tasks

END_OF_THOUGHT = "</think>"


@dataclass(frozen=True)
class Report:
    """What `solve` measured. Accuracies are shares of problems solved, between 0 and 1; tokens are means a problem."""

    accuracy: float
    families: dict[str, float]
    num_problems: int
    thinking_tokens: float  # generated before </think>, the closing tag included
    answer_tokens: float
    answers: list[str] = field(repr=False)
    thoughts: list[str] = field(repr=False)


@torch.inference_mode()
def generate_greedy(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    batch_size: int = 256,
    stop: Sequence[str] = (),
) -> list[str]:
    """The most likely continuation of each prompt, up to and without the first stop token.

    stop: tokens that end a continuation, besides the tokenizer's end-of-sequence token. Special tokens written in the
    prompts are read as such; nothing is added.
    """
    stops = torch.tensor(_stop_ids(tokenizer, stop), device=model.device)
    ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    out = [""] * len(ids)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for i, new in zip(chosen, _decode(model, [ids[i] for i in chosen], max_new_tokens, stops), strict=True):
            out[i] = tokenizer.decode(new)
    return out


def solve(
    model: Any,
    tokenizer: Any,
    problems: Sequence[tasks.Problem],
    *,
    thinking_budget: int | None = None,
    max_thinking: int = 256,
    max_answer: int = 40,
    batch_size: int = 256,
) -> Report:
    """Let the model think and answer, and check the answers with reasoning-gym.

    thinking_budget: tokens of thought after which </think> is forced; 0 closes the thoughts at once, None leaves the
    model free up to `max_thinking`.
    """
    prompts = [prompt(tokenizer, problem) for problem in problems]
    limit = max_thinking if thinking_budget is None else thinking_budget
    thoughts = [""] * len(prompts)
    if limit:
        thoughts = generate_greedy(
            model, tokenizer, prompts, max_new_tokens=limit, batch_size=batch_size, stop=(END_OF_THOUGHT,)
        )
    closed = [head + thought + END_OF_THOUGHT for head, thought in zip(prompts, thoughts, strict=True)]
    answers = generate_greedy(model, tokenizer, closed, max_new_tokens=max_answer, batch_size=batch_size)
    solved = [tasks.score(problem, answer) == 1.0 for problem, answer in zip(problems, answers, strict=True)]
    families = {problem.family: [] for problem in problems}
    for problem, is_solved in zip(problems, solved, strict=True):
        families[problem.family].append(is_solved)
    return Report(
        accuracy=_mean(solved),
        families={name: _mean(values) for name, values in families.items()},
        num_problems=len(problems),
        thinking_tokens=_mean([_num_tokens(tokenizer, thought) + 1 for thought in thoughts]),
        answer_tokens=_mean([_num_tokens(tokenizer, answer) + 1 for answer in answers]),
        answers=answers,
        thoughts=thoughts,
    )


def prompt(tokenizer: Any, problem: tasks.Problem) -> str:
    """The problem as the chat template puts it, up to and with the opening <think>."""
    question = tasks.messages(problem)[:1]
    return tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)


@dataclass(frozen=True)
class Comparison:
    """A student beside its teacher: sums over the tokens that count, in nats."""

    kl: float  # KL(teacher || student)
    loss: float  # -log of the student's probability of the token that follows
    num_tokens: int


@torch.inference_mode()
def compare(teacher: Any, student: Any, batches: Iterable[dict[str, Tensor]], *, chunk: int = 4096) -> Comparison:
    """KL and loss of one pass each: float32 terms in chunks of tokens, summed in float64.

    batches: dicts with `input_ids` [batch, time] and, where there is padding, `attention_mask`. Where a batch has
    `labels`, only positions that predict a label other than -100 count; without, all that predict a real token.
    """
    kl, loss, count = 0.0, 0.0, 0
    for batch in batches:
        inputs = {name: batch[name].to(teacher.device) for name in ("input_ids", "attention_mask") if name in batch}
        counts = _counted(batch).to(teacher.device)
        after = inputs["input_ids"].roll(-1, dims=1)[counts]
        p = teacher(**inputs, use_cache=False).logits[counts]  # [token, vocab]
        q = student(**inputs, use_cache=False).logits[counts]
        for p_part, q_part, told in zip(p.split(chunk), q.split(chunk), after.split(chunk), strict=True):
            log_p, log_q = p_part.float().log_softmax(-1), q_part.float().log_softmax(-1)
            kl += F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1).double().sum().item()
            loss += F.nll_loss(log_q, told, reduction="none").double().sum().item()
        count += int(counts.sum())
    return Comparison(kl, loss, count)


def _decode(model: Any, ids: list[list[int]], max_new_tokens: int, stops: Tensor) -> list[list[int]]:
    """Greedy decoding of one batch, padded on the left; returns the new tokens before the first stop token."""
    longest = max(len(row) for row in ids)
    x = torch.tensor([[0] * (longest - len(row)) + row for row in ids], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids], device=model.device)
    rows = torch.arange(len(ids), device=model.device)  # which prompts are still in the batch
    has_ended = torch.zeros_like(rows, dtype=torch.bool)
    new: list[list[int]] = [[] for _ in ids]
    given: dict[str, Any] = {}
    for _ in range(max_new_tokens):
        out = model(x, attention_mask=mask, use_cache=True, logits_to_keep=1, **given)
        cache = out.cache
        x = out.logits[:, -1].argmax(-1, keepdim=True)  # [batch, 1]
        has_ended |= torch.isin(x[:, 0], stops)
        for row, token, is_over in zip(rows.tolist(), x[:, 0].tolist(), has_ended.tolist(), strict=True):
            if not is_over:
                new[row].append(token)
        if has_ended.all():
            break
        mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
        if 2 * int(has_ended.sum()) >= len(rows):
            # Long thoughts are few: half the rows mean half the work for the rest of the batch.
            kept = (~has_ended).nonzero()[:, 0]
            cache.reorder_cache(kept)
            x, mask, rows, has_ended = x[kept], mask[kept], rows[kept], has_ended[kept]
        given = {"cache": cache}
    return new


def _stop_ids(tokenizer: Any, stop: Sequence[str]) -> list[int]:
    ids = [tokenizer.eos_token_id]
    for text in stop:
        token = tokenizer.convert_tokens_to_ids(text)
        if token is None or (token == tokenizer.unk_token_id and text != tokenizer.unk_token):
            raise ValueError(f"stop {text!r} is not one token of this tokenizer.")
        ids.append(token)
    return ids


def _counted(batch: dict[str, Tensor]) -> Tensor:
    """[batch, time], true where the next token's prediction counts."""
    if "labels" in batch:
        after = batch["labels"][:, 1:] != -100
    else:
        after = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, 1:] != 0
    return F.pad(after, (0, 1))


def _num_tokens(tokenizer: Any, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
