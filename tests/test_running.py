"""The verbs that run a nest, on the one that ships: what they print where, and what they refuse before loading it."""

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from nestling import shipped
from nestling.cli import main

ROOT = Path(__file__).parents[1]
QUESTION = "96+92-8"
NESTLING = [sys.executable, "-m", "nestling"]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process; the exit code, standard output and standard error."""

    def go(*argv: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(one) for one in argv])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return go


def test_the_answer_alone_is_on_standard_output_and_each_phase_has_a_line_on_standard_error(run: Run) -> None:
    code, out, err = run("generate", QUESTION, "--think", 45, "--answer", 100)
    assert code == 0
    assert re.fullmatch(r"\d+\n", out)
    thoughts, thinking, answering = err.splitlines()
    assert out.strip() in thoughts
    assert re.match(r"thinking +45 +\d+ tokens .* tokens/s", thinking)
    assert re.match(r"answering +100 +\d+ tokens .* tokens/s .*hand-over by prefill", answering)
    assert "\x1b" not in err


def test_a_budget_binds_to_the_token_and_the_phase_says_so(run: Run) -> None:
    code, out, err = run("generate", QUESTION, "--thinking-budget", 16)
    assert code == 0
    assert out.strip()
    assert re.search(r"thinking +100 +17 tokens .*\(cut by the budget\)", err)  # the closing tag is one of them


def test_json_has_the_texts_and_the_phases_and_is_all_of_standard_output(run: Run) -> None:
    code, out, err = run("generate", QUESTION, "--size", 45, "--json")
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert [(phase["phase"], phase["member"]) for phase in told["phases"]] == [("thinking", "45"), ("answering", "45")]
    assert told["thinking"]
    assert told["answering"]
    assert sum(phase["num_tokens"] for phase in told["phases"]) == told["finish"]["completion_tokens"]


def test_a_raw_text_is_continued_as_stock_generate_continues_it(run: Run) -> None:
    text = "<|user|>gcd 12,18<|assistant|><think>"
    _, out, _ = run("generate", text, "--raw", "--max-tokens", 30)
    tokenizer = AutoTokenizer.from_pretrained(shipped.nest())
    model: Any = AutoModelForCausalLM.from_pretrained(shipped.nest(), dtype="auto")
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    stock = model.generate(ids, max_new_tokens=30, do_sample=False)
    assert out == tokenizer.decode(stock[0, ids.shape[1] :]).removesuffix(tokenizer.eos_token) + "\n"


def test_a_question_of_a_dash_is_read_from_standard_input(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("generate", QUESTION, "--max-tokens", 8)[1]
    monkeypatch.setattr("sys.stdin", io.StringIO(QUESTION + "\n"))
    assert run("generate", shipped.nest(), "-", "--max-tokens", 8)[1] == told


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--think", "33", QUESTION), "there is no member '33'. Members: 100, 70, 45, 25."),
        (("no-such-folder", QUESTION), "'no-such-folder' is not a folder"),
        (("what", "is", "this"), "Put the question in quotes"),
        ((str(ROOT),), "is a folder and the question is missing"),
        (("",), "the question is empty"),
        (("--handover", "guess", QUESTION), "handover 'guess' is not known"),
        (("--thinking-budget", "-1", QUESTION), "thinking_token_budget is -1"),
        (("--temperature", "nan", QUESTION), "temperature is nan"),
        (("--max-tokens", "0", QUESTION), "max_tokens is 0"),
        (("--max-tokens", "10", "--answer-reserve", "11", QUESTION), "answer_reserve 11 is more than max_tokens 10"),
        (("--raw", "--thinking-budget", "4", QUESTION), "--thinking-budget has no effect with --raw"),
        (("--max-tokens", "5000", QUESTION), "1,024"),
        (("9+" * 5000,), "1,024"),
    ],
)
def test_a_request_that_cannot_be_done_exits_with_two_and_says_why(run: Run, argv: tuple[str, ...], why: str) -> None:
    code, out, err = run("generate", *argv)
    assert (code, out) == (2, "")
    assert why in err


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("--think", "33"), "there is no member '33'"),
        (("--port", "99999"), "port is 99999"),
        (("--think", "http://localhost:1"), "Engines behind URLs need both"),
        (("--upstream-retries", "3"), "--upstream settings have no effect without URLs"),
        (("--think", "http://a", "--answer", "http://a", "--max-rows", "3"), "settings of the engine have no effect"),
        (("no-such-folder",), "'no-such-folder' is not a folder"),
    ],
)
def test_a_server_that_cannot_be_is_refused(run: Run, argv: tuple[str, ...], why: str) -> None:
    code, _, err = run("serve", *argv)
    assert code == 2
    assert why in err


@contextmanager
def serving(*argv: str) -> Iterator[str]:
    """A server process; gives its URL. Told to stop, it ends well."""
    command = [*NESTLING, "serve", "--port", "0", *argv]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert " at http" in line, server.stderr and server.stderr.read()
        try:
            yield line.split()[-1]
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=60)
    assert server.returncode == 0


def test_the_shipped_nest_is_served_and_a_second_server_relays_to_it(run: Run) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 200}
    elastic = {"elastic": {"think": "45", "answer": "100"}}
    with serving() as url, serving("--think", f"{url}#nest:45", "--answer", f"{url}#nest:100") as relay:
        here = httpx.post(f"{url}/v1/chat/completions", json=asked | elastic, timeout=60).json()
        there = httpx.post(f"{relay}/v1/chat/completions", json=asked, timeout=60).json()
    told = json.loads(run("generate", QUESTION, "--think", 45, "--answer", 100, "--max-tokens", 200, "--json")[1])
    for reply in (here, there):
        message = reply["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == (told["thinking"], told["answering"])


def test_what_the_headers_show_is_refused_before_torch_is_loaded() -> None:
    code = "import sys; from nestling.cli import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    for argv in (["generate", "--think", "33", QUESTION], ["chat", "--size", "33"], ["serve", "--think", "33"]):
        done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert "no member '33'" in done.stderr


def test_a_package_without_its_nest_says_how_to_make_one(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shipped, "files", lambda _: tmp_path)
    code, _, err = run("generate", QUESTION)
    assert code == 2
    assert "nestling demo --to" in err


def test_a_reader_that_leaves_ends_it_without_a_word() -> None:
    command = [*NESTLING, "generate", QUESTION]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True) as done:
        assert done.stdout is not None
        assert done.stderr is not None
        done.stdout.close()
        err = done.stderr.read()
    assert done.returncode == 1
    assert "Traceback" not in err
    assert "roken pipe" not in err


def test_on_a_terminal_the_first_answer_is_there_within_ten_seconds() -> None:
    terminal, inside = pty.openpty()
    begun = time.monotonic()
    done = subprocess.run(
        [*NESTLING, "generate", QUESTION], stdout=inside, stderr=inside, stdin=inside, cwd=ROOT, timeout=60
    )
    seconds = time.monotonic() - begun
    screen = os.read(terminal, 10_000).decode()
    os.close(inside)
    os.close(terminal)
    assert done.returncode == 0
    assert "tokens/s" in screen
    assert seconds < 10 or os.getloadavg()[0] > 2, "a machine that is busy otherwise is no measure"
