"""Policies measured: the frontier, what is said of it, and a whole small sweep that is stopped and goes on."""

import json
import random
from pathlib import Path

import pytest

from nestling import shipped, tasks
from nestling.checkpoint import check_destination
from nestling.cli import main
from nestling.engine.engine import Engine
from nestling.engine.settings import EngineSettings
from nestling.policies.frontier import Row, contest, frontier, verdict
from nestling.policies.notes import Notes
from nestling.policies.page import evaluate_policies, read_policies
from nestling.policies.settings import PolicySettings
from nestling.policies.solving import asked, solve_together
from nestling.policies.sweep import notes_file, policies_of, policy_of

SMALL = PolicySettings(
    problems=7, budgets=("8", "0", "none"), timed=1, handover_problems=3, replays=("4",), max_thinking=120
)


def row(think: str, answer: str, seconds: float, solved: str, budget: int | None = None) -> Row:
    """solved: a letter a problem, x for solved."""
    return Row(
        think=think, answer=answer, budget=budget, solved=tuple(letter == "x" for letter in solved),
        thinking_tokens=1.0, answer_tokens=1.0, forced=0.0, seconds=seconds, first_seconds=seconds,
    )  # fmt: skip


def test_the_frontier_is_what_no_other_policy_beats() -> None:
    draw = random.Random(0)
    for _ in range(50):
        rows = [row("1", "1", draw.randint(1, 9), "x" * (n := draw.randint(0, 9)) + "." * (9 - n)) for _ in range(20)]
        best = frontier(rows)
        for one in rows:
            beaten = any(
                other.accuracy >= one.accuracy
                and other.seconds <= one.seconds
                and (other.accuracy, other.seconds) != (one.accuracy, one.seconds)
                for other in rows
            )
            same = any((one.accuracy, one.seconds) == (other.accuracy, other.seconds) for other in best)
            assert same == (not beaten)
        assert [one.seconds for one in best] == sorted(one.seconds for one in best)


def test_a_policy_is_compared_with_the_most_accurate_that_takes_no_longer() -> None:
    slow, quick, slower = row("1", "1", 2.0, "xx.."), row("1", "1", 1.0, "x..."), row("1", "1", 9.0, "xxxx")
    found = contest([row("2", "1", 3.0, "xxx.")], [slow, quick, slower])
    assert found is not None
    assert (found.other, found.gain) == (slow, 0.25)
    assert contest([row("2", "1", 0.5, "xxxx")], [slow]) is None


def test_a_gain_that_chance_explains_is_no_win_and_a_clear_one_is() -> None:
    base = "x." * 50
    small = contest([row("2", "1", 1.0, "xx" + base[2:])], [row("1", "1", 1.0, base)])
    large = contest([row("2", "1", 1.0, "x" * 100)], [row("1", "1", 1.0, base)])
    assert small is not None
    assert large is not None
    assert not small.is_won
    assert large.is_won


def test_the_verdict_says_who_wins_as_the_numbers_do() -> None:
    members = ["100", "45"]
    alone, mixed = row("100", "100", 2.0, "x." * 50), row("45", "100", 2.0, "x" * 100)
    told = "\n".join(verdict([alone, mixed, row("45", "45", 1.0, "." * 100)], members))
    assert "S->L (a smaller member thinks and the full one answers) beats L->L" in told
    assert "+50.0 points" in told
    told = "\n".join(verdict([alone, row("45", "100", 2.0, "." * 100)], members))
    assert "S->L (a smaller member thinks and the full one answers) does not beat L->L" in told
    assert "a smaller one thinks (S->L): 0" in told


def test_every_policy_comes_once_and_nobody_thinks_with_a_budget_of_zero() -> None:
    keys = list(policies_of(("100", "45"), SMALL.limits))
    assert len(keys) == len(set(keys)) == 4 + 4 + 2
    assert keys[0] == ("100", "100", None)
    assert {key[:2] for key in keys if key[2] == 0} == {("100", "100"), ("45", "45")}


def test_thoughts_that_end_within_a_budget_give_what_they_give_without_one() -> None:
    problems = tasks.problems("test", 14)
    with Engine(shipped.nest(), settings=EngineSettings(max_waiting=99)) as engine:
        wanted = asked(engine.tokenizer, problems)
        free, bound = (
            solve_together(engine, wanted, policy_of(("45", "100", budget), SMALL), SMALL) for budget in (None, 60)
        )
    within = [i for i, one in enumerate(free) if one.thinking_tokens - 1 <= 60]
    assert within
    assert len(within) < 14
    assert [free[i].answer for i in within] == [bound[i].answer for i in within]
    assert all(one.thinking_tokens <= 61 for one in bound)


def test_findings_outlive_a_run_and_a_half_written_line_counts_as_none(tmp_path: Path) -> None:
    file = tmp_path / "found.jsonl"
    Notes(file, {"seed": 1}).note("a", 1)
    with file.open("a") as open_file:
        open_file.write('["b", ')
    assert Notes(file, {"seed": 1}).found == {"a": 1}
    with pytest.raises(ValueError, match="other settings or another nest"):
        Notes(file, {"seed": 2})


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--policies",), "--policies needs --to"),
        (("--policies", "--to", "out", "--heldout", "a=b"), "--heldout has no effect with --policies"),
        (("--problems", "7", "--rows", "4"), "--rows has no effect without --policies"),
        (("--policies", "--to", "out", "--budgets", "some"), "'some' is neither a number of tokens nor 'none'"),
        (("--policies", "--to", "out", "--problems", "3"), "expected no more than those"),
        (("--policies", "--to", "out", "--budgets", "500"), "so it never binds"),
        (("--policies", "--to", "out", "--replays", "0"), "replay '0'"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    argv: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["eval", str(shipped.nest()), *argv]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_sweep_that_was_stopped_goes_on_and_writes_table_figure_and_numbers(tmp_path: Path) -> None:
    to = tmp_path / "out"
    lines: list[str] = []

    def stop_soon(line: str) -> None:
        lines.append(line)
        if len(lines) == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_policies(SMALL, shipped.nest(), to, say=stop_soon)
    assert not to.exists()
    kept = notes_file(to).read_text()
    assert len(kept.splitlines()) == 1 + 5
    text = evaluate_policies(SMALL, shipped.nest(), to, say=lambda _: None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out"]
    assert sorted(file.name for file in to.iterdir()) == ["policies.json", "policies.md", "policies.png"]
    assert text.rstrip("\n") == (to / "policies.md").read_text().rstrip("\n")
    told = json.loads((to / "policies.json").read_text())
    assert len(told["policies"]) == 16 + 16 + 4
    rows, compared, members, settings = read_policies(to)
    assert (members, settings) == (["100", "70", "45", "25"], SMALL)
    assert [one.name for one in frontier(rows)] == told["frontier"]
    assert all(one.seconds > one.first_seconds > 0 for one in rows)
    # Exact ways give exact answers; the first 5 policies are those of the run that was stopped.
    assert {(one.differing, one.kl) for one in compared if one.way in ("prefill", "shadow")} == {(0.0, 0.0)}
    first = [json.loads(line)[1]["solved"] for line in kept.splitlines()[1:]]
    assert [[int(x) for x in one.solved] for one in rows[:5]] == first


def test_a_folder_of_policies_is_replaced_when_told_to(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "policies.json").write_text("{}")
    with pytest.raises(ValueError, match="exists"):
        check_destination(tmp_path / "out", overwrite=False)
    check_destination(tmp_path / "out", overwrite=True)
