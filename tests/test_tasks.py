"""The problems: right for reasoning-gym, apart from one another, and readable as chats."""

import itertools
import json
import re
from pathlib import Path

import pytest

from nestling import tasks, traces


@pytest.fixture(scope="module")
def drawn() -> dict[str, list[tasks.Problem]]:
    return {split: tasks.problems(split, 30 * len(tasks.FAMILIES), seed=3) for split in tasks.FIRST_SEED}


def test_every_answer_scores_one_and_another_problems_answer_does_not(drawn: dict[str, list[tasks.Problem]]) -> None:
    for problem in drawn["train"]:
        assert tasks.score(problem, problem.answer) == 1.0
        assert tasks.score(problem, problem.answer + "1") < 1.0
        assert tasks.score(problem, "") < 1.0


def test_thoughts_hold_the_answer(drawn: dict[str, list[tasks.Problem]]) -> None:
    """What the last steps say is the answer, or spells it: read off without arithmetic of our own."""
    for problem in drawn["train"]:
        steps = problem.thinking.split(";")
        if problem.family == "gcd":
            read = steps[-1].split("*")[1].split("=")[0]
        elif problem.family == "caesar_cipher":
            read = "".join(step[-1] for step in problem.thinking.split(","))
        elif problem.family == "base_conversion":
            rests = [step.split(":")[1].split("+")[-1] for step in steps[1:]]
            read = "".join(traces.DIGITS[int(rest)] for rest in reversed(rests))
        else:
            read = re.split("[=:]", problem.thinking)[-1]
        assert tasks.score(problem, read) == 1.0, problem


def test_every_written_equation_is_true(drawn: dict[str, list[tasks.Problem]]) -> None:
    for problem in drawn["train"]:
        equations = []
        for step in re.split("[;:,]", re.sub("[A-Za-z ]", "", problem.thinking)):
            # A sum stands before its first column: `12-45=-(45-12)5-2=3` has the column `5-2=3`.
            stated = re.fullmatch(r"(-?\d+[+-]\d+)=(-?\([\d+-]+\))?(\d+[+-]\d+(?:[+-]1)?=\d+)", step)
            if stated:
                equations += [stated[3], f"{stated[1]}={stated[2] or stated[1]}"]
            elif "=" in step:
                equations.append(step)
        assert equations or problem.family == "count_bits"
        for equation in equations:
            values = [eval(side) for side in equation.split("=")]
            assert len(set(values)) == 1, (equation, problem)


def test_no_question_of_a_split_occurs_in_another(drawn: dict[str, list[tasks.Problem]]) -> None:
    questions = {split: {problem.question for problem in problems} for split, problems in drawn.items()}
    assert not questions["train"] & questions["validation"]
    assert not questions["train"] & questions["test"]
    assert not questions["validation"] & questions["test"]
    for split, problems in drawn.items():
        assert {tasks.split_of(problem.question) for problem in problems} == {split}


def test_held_out_questions_do_not_repeat(drawn: dict[str, list[tasks.Problem]]) -> None:
    for split in ("validation", "test"):
        assert len({problem.question for problem in drawn[split]}) == len(drawn[split])


def test_seeds_of_splits_lie_in_ranges_that_do_not_touch() -> None:
    ranges = sorted((first, first + 100 * tasks.SEED_STRIDE) for first in tasks.FIRST_SEED.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ranges))


def test_the_same_seed_gives_the_same_problems_and_another_gives_others() -> None:
    first, again, other = (tasks.problems("test", 28, seed=seed) for seed in (0, 0, 1))
    assert first == again
    assert [problem.question for problem in first] != [problem.question for problem in other]
    assert {problem.family for problem in first} == set(tasks.FAMILIES)


def test_a_family_that_is_used_up_says_how_many_problems_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "PATIENCE", 100)
    with pytest.raises(ValueError, match=r"has only \d+ test problems: ask for \d+ or fewer"):
        tasks.problems("test", 5000)


@pytest.mark.parametrize(("split", "seed"), [("dev", 0), ("test", 100), ("test", -1)])
def test_an_unknown_split_or_seed_is_refused(split: str, seed: int) -> None:
    with pytest.raises(ValueError, match=r"not one of|outside"):
        tasks.problems(split, 1, seed=seed)


def test_jsonl_has_one_chat_a_line(tmp_path: Path) -> None:
    tasks.write_jsonl(tmp_path / "data.jsonl", "train", 9)
    lines = [json.loads(line) for line in (tmp_path / "data.jsonl").read_text("utf-8").splitlines()]
    chats = [tasks.messages(problem) for problem in tasks.problems("train", 9)]
    assert [line["messages"] for line in lines] == chats
    assert [message["role"] for message in chats[0]] == ["user", "assistant"]
    assert "reasoning_content" not in tasks.messages(tasks.problems("train", 1)[0], with_thinking=False)[1]
