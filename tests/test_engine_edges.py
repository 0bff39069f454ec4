"""What an engine meets outside of its own tests: odd text, threads of others, a door just wide enough."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from nestling import hf, shipped
from nestling.cli import main
from nestling.engine.engine import Engine
from nestling.engine.settings import EngineSettings
from nestling.events import Finished, Text
from nestling.nest import open_nest
from nestling.policy import Policy
from nestling.request import Request

PROMPT = "<|user|>96+92-8<|assistant|><think>"
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def engine():
    """An engine on the nest that ships; shared by tests that leave it as it is."""
    with Engine(shipped.nest()) as engine:
        yield engine


def texts(stream):
    """The texts of an answer by phase."""
    found = {}
    for event in stream:
        if isinstance(event, Text):
            found[event.phase] = found.get(event.phase, "") + event.text
    assert isinstance(event, Finished), event
    return found


def test_a_question_with_half_a_character_is_refused_and_not_a_traceback(engine, capsys):
    with pytest.raises(ValueError, match="not valid Unicode"):
        engine.submit(Request(prompt="1+1\ud83d", max_tokens=4))
    assert main(["generate", os.fsdecode(b"\xff 1+1")]) == 2
    assert "not valid Unicode" in capsys.readouterr().err


def test_a_chat_goes_on_after_a_line_that_is_no_text():
    ran = subprocess.run(
        [sys.executable, "-m", "nestling", "chat"], input=b"\xff\xfe\n1+1\n", capture_output=True, cwd=ROOT, timeout=120
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert b"not valid Unicode" in ran.stdout
    assert b"answering" in ran.stdout


@pytest.mark.parametrize("stop", ["END", ("",), (1,), None])
def test_stop_strings_that_cannot_be_meant_are_refused_and_not_passed_over(engine, stop):
    with pytest.raises(ValueError, match="stop is"):
        engine.submit(Request(prompt=PROMPT, max_tokens=4, stop=stop))


@pytest.mark.parametrize(
    "settings",
    [EngineSettings(max_rows=1, max_waiting=0), EngineSettings(max_tokens_in_flight=30)],
    ids=["rows", "tokens"],
)
def test_whoever_has_read_the_end_of_an_answer_may_ask_again_at_once(settings):
    with Engine(shipped.nest(), settings=settings) as engine:
        for _ in range(50):
            texts(engine.submit(Request(prompt="<think>1+1", max_tokens=20)))


def test_a_skeleton_leaves_the_default_dtype_of_other_threads_alone(monkeypatch):
    changed = []
    monkeypatch.setattr(torch, "set_default_dtype", changed.append)
    model = hf.skeleton(open_nest(shipped.nest()).config)
    assert model.config.dtype == torch.bfloat16
    assert not changed


def test_a_default_dtype_that_another_thread_sets_changes_no_answer(engine):
    request = Request(prompt=PROMPT, max_tokens=100)
    expected = texts(engine.submit(request))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = texts(engine.submit(replace(request)))
    finally:
        torch.set_default_dtype(before)
    assert found == expected


@pytest.mark.parametrize("pattern", ["M", "E", "-", "M-"])
def test_a_member_without_attention_runs_on_the_stock_modules(pattern, tmp_path, monkeypatch):
    monkeypatch.setitem(tiny.VARIANTS, "bare", tiny._hybrid(pattern))
    model = tiny.model("bare")
    model.save_pretrained(tmp_path)
    tiny.add_sidecars(tmp_path)
    ids = tiny.tokens(1, 9)[0].tolist()
    with Engine(tmp_path, settings=EngineSettings(decoder="stock", chunk=4)) as engine:
        events = list(engine.submit(Request(prompt=tuple(ids), max_tokens=3, is_plain=True, logprobs=0)))
    for token in [token for event in events if isinstance(event, Text) for token in event.tokens]:
        logits = tiny.logits(model, torch.tensor([ids]))[0, -1]
        assert token.id == int(logits.argmax())
        ids.append(token.id)
    assert isinstance(events[-1], Finished)


def test_a_cut_whose_values_lie_apart_is_copied_for_the_lean_decoder(tmp_path):
    tiny.save("nemotron_h_bias", tmp_path, is_chatty=True)
    with Engine(tmp_path, settings=EngineSettings(decoder="lean")) as engine:
        engine.add_member("S", {"mdim": 1, "mamba": 1})
        stock = Engine(tmp_path, settings=EngineSettings(decoder="stock"))
        stock.add_member("S", {"mdim": 1, "mamba": 1})
        with stock:
            request = Request(prompt=(5, 6, 7), max_tokens=8, is_plain=True, policy=Policy(answer="S"))
            assert texts(engine.submit(request)) == texts(stock.submit(request))
