"""Generation, perplexity and distances against the stock library and brute force."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tiny
import torch

from nestling import eval as evaluation
from nestling import hf, tasks

REASONER = Path(evaluation.__file__).parent / "assets" / "reasoner"
EXAMPLE = Path(__file__).parents[1] / "examples" / "train_reasoner.py"
NAMES = ("llama", "nemotron_h")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_reasoner", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(example: ModuleType) -> Any:
    return example.build_tokenizer()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_unequal_prompts_gives_what_stock_generate_gives_one_by_one(name: str, tokenizer: Any) -> None:
    model = tiny.model(name, vocab_size=112)
    prompts = ["<|user|>1+2<|assistant|><think>", "7", "<|user|>gcd 12,18<|assistant|><think>12", "bits 9"]
    together = evaluation.generate_greedy(model, tokenizer, prompts, max_new_tokens=12, batch_size=3)
    for prompt, text in zip(prompts, together, strict=True):
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        stock = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0,
            eos_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        new = stock[0, ids.shape[1] :].tolist()
        if tokenizer.eos_token_id in new:
            new = new[: new.index(tokenizer.eos_token_id)]
        assert text == tokenizer.decode(new)


@pytest.mark.parametrize("name", NAMES)
def test_generation_ends_before_a_stop_token(name: str, tokenizer: Any) -> None:
    """Rows that end early leave the batch; the others go on as if nothing had happened."""
    model = tiny.model(name, vocab_size=112)
    prompts = ["12", "345", "6", "bits 77", "9*9"]
    free = evaluation.generate_greedy(model, tokenizer, prompts, max_new_tokens=10)
    texts = [tokenizer.tokenize(text) for text in free]
    longest = max(texts, key=len)
    stops = tuple({longest[len(longest) // 2], *(text[1] for text in texts[1:] if len(text) > 1)})
    stopped = evaluation.generate_greedy(model, tokenizer, prompts, max_new_tokens=10, stop=stops)
    assert stopped != free
    for text, short in zip(texts, stopped, strict=True):
        end = next((i for i, token in enumerate(text) if token in stops), len(text))
        assert short == "".join(text[:end])


def test_a_stop_that_is_not_one_token_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="is not one token"):
        evaluation.generate_greedy(tiny.shared("llama"), tokenizer, ["1"], max_new_tokens=1, stop=("</thinking>",))


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_of_a_comparison_equals_the_stock_loss(name: str) -> None:
    model = tiny.shared(name)
    blocks = tiny.tokens(batch=5, time=13)
    loss = model(input_ids=blocks, labels=blocks, use_cache=False).loss
    found = evaluation.compare(model, model, [{"input_ids": part} for part in blocks.split(2)])
    # float32 logits of other batch sizes
    assert found.loss / found.num_tokens == pytest.approx(loss.item(), rel=1e-5)


def test_kl_of_a_model_to_itself_is_zero_and_to_another_equals_brute_force() -> None:
    teacher, student = tiny.model("nemotron_h", seed=0), tiny.model("nemotron_h", seed=1)
    x = tiny.tokens(batch=3, time=9)
    mask = torch.ones_like(x)
    mask[1, 6:] = 0  # padding on the right
    labels = x.clone()
    labels[:, :4] = -100
    labels[1, 6:] = -100
    batches = [{"input_ids": x, "attention_mask": mask, "labels": labels}]
    assert evaluation.compare(teacher, teacher, batches).kl == 0.0
    total, count = 0.0, 0
    for row, length in zip(x, (9, 6, 9), strict=True):
        p = tiny.logits(teacher, row[None, :length])[0].double().softmax(-1)
        q = tiny.logits(student, row[None, :length])[0].double().softmax(-1)
        for time in range(3, length - 1):
            total += sum(float(a * (a / b).log()) for a, b in zip(p[time], q[time], strict=True))
            count += 1
    # float32 logits and log-softmax
    found = evaluation.compare(teacher, student, batches, chunk=4)
    assert (found.kl / found.num_tokens, found.num_tokens) == (pytest.approx(total / count, rel=1e-4), count)


class Seen:
    """A cache that is nothing but the tokens so far."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids

    def reorder_cache(self, rows: torch.Tensor) -> None:
        self.ids = self.ids[rows]


class Oracle(torch.nn.Module):
    """Continues every text that it was shown, whatever the padding on its left."""

    def __init__(self, rows: list[list[int]], vocab: int) -> None:
        super().__init__()
        self.rows, self.vocab, self.device = rows, vocab, torch.device("cpu")

    def forward(self, x: torch.Tensor, attention_mask: torch.Tensor, cache: Seen | None = None, **_: Any) -> Any:
        seen = x if cache is None else torch.cat([cache.ids, x], dim=1)
        logits = torch.zeros(len(seen), 1, self.vocab)
        for i, (row, mask) in enumerate(zip(seen.tolist(), attention_mask.tolist(), strict=True)):
            text = [token for token, is_real in zip(row, mask, strict=True) if is_real]
            after = [known[len(text)] for known in self.rows if known[: len(text)] == text and len(known) > len(text)]
            logits[i, 0, after[0] if after else 3] = 1.0
        return type("Output", (), {"logits": logits, "cache": Seen(seen)})()


def test_solve_counts_what_the_checker_accepts_and_closes_thoughts_at_the_budget(tokenizer: Any) -> None:
    problems = tasks.problems("test", 14)
    rows = []
    for i, problem in enumerate(problems):
        head = evaluation.prompt(tokenizer, problem)
        answer = problem.answer if i != 5 else problem.answer + "7"
        for thinking in (problem.thinking, problem.thinking[:9]):
            rows.append(tokenizer(f"{head}{thinking}</think>{answer}<|im_end|>")["input_ids"])
        rows.append(tokenizer(f"{head}</think>?<|im_end|>")["input_ids"])
    model = Oracle(rows, len(tokenizer))
    free = evaluation.solve(model, tokenizer, problems)
    assert free.accuracy == pytest.approx(13 / 14)
    assert free.families[problems[5].family] == 0.5
    assert free.thoughts == [problem.thinking for problem in problems]
    cut = evaluation.solve(model, tokenizer, problems, thinking_budget=9, batch_size=3)
    assert cut.thoughts == [problem.thinking[:9] for problem in problems]
    assert (cut.accuracy, cut.thinking_tokens) == (free.accuracy, 10)
    assert evaluation.solve(model, tokenizer, problems, thinking_budget=0).accuracy == 0.0


def test_the_tokenizer_and_its_template_survive_saving(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "".join(map(chr, range(32, 127))) + "\n<think>1+1</think>2<|im_end|>"
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.unk_token_id not in loaded(text)["input_ids"]
    chat = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "reasoning_content": "one and one", "content": "2"},
        {"role": "user", "content": "2+2"},
        {"role": "assistant", "reasoning": "two and two", "content": "4"},
    ]
    assert loaded.apply_chat_template(chat[:3], tokenize=False, add_generation_prompt=True).endswith("<think>")
    shown = loaded.apply_chat_template(chat, tokenize=False)
    assert "one and one" not in shown
    assert shown.endswith("<think>two and two</think>4<|im_end|>")
    assert len(loaded) == 112


def test_training_with_the_lean_scan_gives_the_stock_losses_and_gradients(example: ModuleType) -> None:
    model = tiny.model("nemotron_h").requires_grad_().train()
    x = tiny.tokens(batch=3, time=13)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        return [loss.detach(), *(w.grad.clone() for w in model.parameters() if w.grad is not None)]

    stock = gradients()
    with example.lean_mamba():
        lean = gradients()
    # float32 sums in another order
    torch.testing.assert_close(lean, stock, rtol=1e-3, atol=1e-5)


def test_a_training_run_that_is_killed_and_resumed_has_the_losses_of_one_that_is_not(
    example: ModuleType, tmp_path: Path
) -> None:
    sizes = "--hidden 32 --heads 2 --mamba-heads 4 --experts 4 --expert-width 16 --shared-width 16 --layers ME*E"
    args = example.arguments([*sizes.split(), "--warmup", "2", "--steps", "6"])
    batches = [(tiny.tokens(batch=3, time=20, seed=i), tiny.tokens(batch=3, time=20, seed=i)) for i in range(6)]
    whole = example.Run(args, example.build_model(args))
    losses = [whole.step_([batch])["loss"] for batch in batches]
    first = example.Run(args, example.build_model(args))
    resumed_losses = [first.step_([batch])["loss"] for batch in batches[:3]]
    first.save(tmp_path)
    second = example.Run(args, example.build_model(args))
    second.resume_(tmp_path)
    resumed_losses += [second.step_([batch])["loss"] for batch in batches[3:]]
    assert resumed_losses == losses
    for name, w in whole.model.state_dict().items():
        assert torch.equal(w, second.model.state_dict()[name]), name


def test_the_shipped_reasoner_is_small_and_solves_more_with_thinking_than_without() -> None:
    from safetensors import safe_open

    assert sum(path.stat().st_size for path in REASONER.iterdir()) <= 8_000_000
    assert not [path for path in REASONER.iterdir() if path.suffix not in (".json", ".safetensors", ".jinja", ".md")]
    with safe_open(REASONER / "model.safetensors", "pt") as file:
        dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    exact = ("A_log", ".D", "dt_bias", "gate.weight", "e_score_correction_bias")
    assert {dtype for name, dtype in dtypes.items() if name.endswith(exact)} == {"F32"}
    assert {dtype for name, dtype in dtypes.items() if not name.endswith(exact)} == {"BF16"}
    model, tokenizer = hf.load_model(REASONER), hf.load_tokenizer(REASONER)
    problems = tasks.problems("test", 5 * len(tasks.FAMILIES), seed=1)
    with_thoughts, without = (evaluation.solve(model, tokenizer, problems, thinking_budget=n) for n in (None, 0))
    assert with_thoughts.accuracy > without.accuracy + 0.3
    assert with_thoughts.thinking_tokens > 30
