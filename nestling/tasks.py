"""The problems that the reasoner solves: reasoning-gym's generators and checkers, our wording and our written thoughts.

A problem is drawn by reasoning-gym and checked by its `score_answer`. We put its question into a short form (`96+92-8`
instead of two sentences), because the reasoner reads characters, and add the thoughts of `nestling.traces`.

Train, validation and test never share a question. Each split draws from its own range of seeds, and a hash of the
question decides to which split it belongs: a problem drawn for another split is passed over. So two draws that happen
to give the same sum still end on the same side.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from nestling import traces

FIRST_SEED = {"train": 1_000_000_000, "validation": 2_000_000_000, "test": 3_000_000_000}
SEED_STRIDE = 10_000_000  # draws that one `seed` of `problems` may use; 100 seeds fit into a split's range
PATIENCE = 20_000  # draws without a question of the split that is new, after which a family counts as used up
HASH_PARTS = 20  # of 20 parts of all questions, one is for test, one for validation, 18 for train


@dataclass(frozen=True)
class Problem:
    """A question with written thoughts, and what the checker needs to know."""

    family: str
    question: str
    thinking: str
    answer: str
    entry: dict[str, Any]  # reasoning-gym's own entry, for `score`


@dataclass(frozen=True)
class Family:
    """One kind of problem: a reasoning-gym data set, its settings, and how an entry becomes question and thoughts."""

    dataset: str
    settings: dict[str, Any]
    read: Callable[[dict[str, Any]], tuple[str, str]]


def _chain_sum(metadata: dict[str, Any]) -> tuple[str, str]:
    parts = metadata["expression"].split()
    terms = [(sign, int(term)) for sign, term in zip(parts[1::2], parts[2::2], strict=True)]
    return "".join(parts), traces.chain(int(parts[0]), terms)


def _products(metadata: dict[str, Any]) -> tuple[str, str]:
    a, b = (int(x) for x in metadata["expression"].split(" * "))
    return f"{a}*{b}", traces.multiply(a, b)


def _gcd(metadata: dict[str, Any]) -> tuple[str, str]:
    a, b = metadata["numbers"]
    return f"gcd {a},{b}", traces.euclid(a, b)


def _base_conversion(metadata: dict[str, Any]) -> tuple[str, str]:
    text, source, target = metadata["source_repr"], metadata["source_base"], metadata["target_base"]
    return f"{text} base {source} to {target}", traces.convert(text, source, target)


def _count_bits(metadata: dict[str, Any]) -> tuple[str, str]:
    return f"bits {metadata['number']}", traces.halve(metadata["number"])


def _caesar_cipher(metadata: dict[str, Any]) -> tuple[str, str]:
    text, rotation = metadata["cipher_text"], metadata["rotation"]
    return f"caesar {rotation}:{text}", traces.decipher(text, rotation)


def _leg_counting(metadata: dict[str, Any]) -> tuple[str, str]:
    animals = [(name, count, _legs_of(name)) for name, count in metadata["animals"].items()]
    return "legs " + ",".join(f"{count} {name}" for name, count, _ in animals), traces.legs(animals)


FAMILIES: dict[str, Family] = {
    "chain_sum": Family("chain_sum", {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 3}, _chain_sum),
    "products": Family("products", {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}, _products),
    "gcd": Family("gcd", {"min_value": 2, "max_value": 120}, _gcd),
    "base_conversion": Family(
        "base_conversion", {"min_base": 4, "max_base": 12, "min_value": 10, "max_value": 200}, _base_conversion
    ),
    "count_bits": Family("count_bits", {"min_n": 16, "max_n": 8191}, _count_bits),
    "caesar_cipher": Family("caesar_cipher", {"min_words": 1, "max_words": 3}, _caesar_cipher),
    "leg_counting": Family(
        "leg_counting", {"min_animals": 2, "max_animals": 4, "min_instances": 1, "max_instances": 15}, _leg_counting
    ),
}


def problems(split: str, count: int, *, seed: int = 0) -> list[Problem]:
    """`count` problems of "train", "validation" or "test", the families in turn.

    The same split, count and seed give the same list; another seed of the same split gives other draws.
    """
    if split not in FIRST_SEED:
        raise ValueError(f"split {split!r} is not one of {', '.join(FIRST_SEED)}.")
    if not 0 <= seed < 100:
        raise ValueError(f"seed {seed} is outside 0..99: each split has room for 100 seeds.")
    streams = [_draw(name, split, seed) for name in FAMILIES]
    return [next(streams[i % len(streams)]) for i in range(count)]


def split_of(question: str) -> str:
    """The split to which a question belongs, wherever it was drawn."""
    part = int.from_bytes(hashlib.blake2b(question.encode(), digest_size=8).digest()) % HASH_PARTS
    return {0: "test", 1: "validation"}.get(part, "train")


def score(problem: Problem, answer_text: str) -> float:
    """What reasoning-gym's checker gives for an answer: 1.0 means solved, less is partial credit."""
    dataset = _dataset(problem.family, 0)
    return float(dataset.score_answer(answer_text.strip(), problem.entry))


def messages(problem: Problem, *, with_thinking: bool = True) -> list[dict[str, str]]:
    """The problem as a chat for a tokenizer's chat template; without thinking the assistant answers at once."""
    reply = {"role": "assistant", "content": problem.answer}
    if with_thinking:
        reply["reasoning_content"] = problem.thinking
    return [{"role": "user", "content": problem.question}, reply]


def write_jsonl(path: str | Path, split: str, count: int, *, seed: int = 0) -> None:
    """Write `{"messages": [...]}`, one problem a line: training data for `nestling train` and `nestling build`."""
    with open(path, "w", encoding="utf-8") as file:
        for problem in problems(split, count, seed=seed):
            file.write(json.dumps({"messages": messages(problem)}) + "\n")


def _draw(family: str, split: str, seed: int) -> Iterator[Problem]:
    """Problems of one family and split. Training may meet a question again, the held-out splits never do."""
    dataset = _dataset(family, FIRST_SEED[split] + seed * SEED_STRIDE)
    seen: set[str] = set()
    last = 0
    for i in range(SEED_STRIDE):
        entry = dataset[i]
        question, thinking = FAMILIES[family].read(entry["metadata"])
        if i - last > PATIENCE:
            break
        if split_of(question) != split or question in seen:
            continue
        if split != "train":
            seen.add(question)
        last = i
        yield Problem(family, question, thinking, entry["answer"], entry)
    raise ValueError(f"{family} has only {len(seen)} {split} problems: ask for {len(seen) * len(FAMILIES)} or fewer.")


@cache
def _dataset(family: str, seed: int) -> Any:
    reasoning_gym = _import_reasoning_gym()
    return reasoning_gym.create_dataset(
        FAMILIES[family].dataset, seed=seed, size=SEED_STRIDE, **FAMILIES[family].settings
    )


def _legs_of(animal: str) -> int:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return ANIMALS[animal]


def _import_reasoning_gym() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise ImportError("the reasoner's problems need reasoning-gym: pip install nestling[reasoner]") from error
    return reasoning_gym
