"""What takes minutes: the demo from beginning to end, and whether the reasoner that ships here reasons."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nestling import hf, tasks
from nestling.cli import main
from nestling.demo import reasoner
from nestling.eval import solve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def test_the_demo_runs_whole_and_shows_every_member_the_sizes_and_a_thought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "demo"
    assert main(["demo", "--tokens", "30000", "--to", str(to)]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    members = json.loads((to / "nest.json").read_text())["members"]
    assert list(members) == ["100", "70", "45", "25"]

    (head,) = (i for i, line in enumerate(lines) if line.startswith("member  "))
    assert "random cut  cut by score  trained  KL, cut  KL, trained" in lines[head]
    for line, (name, member) in zip(lines[head + 2 : head + 6], members.items(), strict=True):
        cells, results = line.split(), member["results"]
        assert cells[0] == name
        assert [int(cell.replace(",", "")) for cell in (cells[1], cells[2], cells[5])] == [
            member["parameters"], member["active_parameters"], member["bytes"]["bf16"]
        ]  # fmt: skip
        assert f"{100 * results['accuracy']:.1f} %" in line
        assert f"{100 * results['accuracy_before']:.1f} %" in line
        assert results["problems"] == 500
        if name != "100":
            assert member["active_parameters"] <= int(name) / 100 * members["100"]["active_parameters"]
            assert results["accuracy_random"] <= results["accuracy"]

    separate = sum(member["bytes"]["bf16"] for member in members.values())
    assert (
        f"one nest: {members['100']['bytes']['bf16']:,} bytes of weights; 4 separate checkpoints: {separate:,}" in out
    )
    assert "member 25, cut to " in out
    assert "loaded by stock transformers as NemotronHForCausalLM" in out
    shown = dict(re.findall(r"^  (question|thinking|answer)  +(\S.*)$", out, flags=re.MULTILINE))
    assert shown["question"] in {problem.question for problem in tasks.problems("test", 32, seed=1)}
    assert shown["thinking"]
    assert shown["answer"]

    # What it cut is a plain checkpoint, what it measured lies in the nest, and no work folder is left.
    loaded: Any = AutoModelForCausalLM.from_pretrained(f"{to}-smallest", output_loading_info=True)
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    bias = [b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    assert sum(p.numel() for p in model.parameters()) + sum(bias) == members["25"]["parameters"]
    assert AutoTokenizer.from_pretrained(f"{to}-smallest").chat_template
    assert (to / "nest" / "report" / "report.html").is_file()
    assert not Path(f"{to}.work").exists()


def test_the_reasoner_solves_most_held_out_problems_with_thinking_and_few_without() -> None:
    model, tokenizer = hf.load_model(reasoner()), hf.load_tokenizer(reasoner())
    problems = tasks.problems("test", 140)
    with_thinking = solve(model, tokenizer, problems)
    without = solve(model, tokenizer, problems, thinking_budget=0)
    # Graded once more by reasoning-gym's answers themselves: every family here has one right text.
    right = [found.strip() == one.answer for found, one in zip(with_thinking.answers, problems, strict=True)]
    assert sum(right) / len(right) == pytest.approx(with_thinking.accuracy, abs=0.01)
    assert with_thinking.num_problems == without.num_problems == 140
    assert with_thinking.accuracy >= 0.85
    assert without.accuracy < 0.40
