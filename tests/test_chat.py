"""The chat: its commands without a terminal, and whole conversations typed into a real one."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from nestling import shipped
from nestling.asking import AskSettings, conversation, visible
from nestling.chat import Left, Talk

ROOT = Path(__file__).parents[1]
MEMBERS = ("100", "70", "45", "25")
PATIENCE = 40.0  # seconds for what a terminal should show, on a machine that does other things too
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


@pytest.fixture
def talk() -> Talk:
    return Talk(AskSettings(), MEMBERS)


class Terminal:
    """The chat in a terminal: keys go in, the screen comes out."""

    def __init__(self, *argv: str) -> None:
        self.raw = ""
        self._mark = 0
        pid, self._terminal = pty.fork()
        if pid == 0:
            os.chdir(ROOT)
            os.execvpe(
                sys.executable, [sys.executable, "-m", "nestling", "chat", *argv], {**os.environ, "TERM": "xterm"}
            )
        self.pid = pid

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def wait_for(self, text: str) -> str:
        """Wait until the screen shows a text after what was waited for before. Returns the screen in between."""
        end = time.monotonic() + PATIENCE
        while text not in self._new:
            assert time.monotonic() < end, f"the screen does not show {text!r}, but:\n{self.raw}"
            self._read()
        shown, found, _ = self._new.partition(text)
        self._mark += len(shown) + len(found)
        return shown + found

    def end(self) -> int:
        """Wait until the process has ended. Returns its exit code."""
        end = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < end, f"the chat does not end:\n{self.raw}"
            self._read()
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._terminal)

    @property
    def _new(self) -> str:
        return ESCAPES.sub("", self.raw)[self._mark :]

    def _read(self) -> None:
        if select.select([self._terminal], [], [], 0.05)[0]:
            try:
                self.raw += os.read(self._terminal, 65536).decode(errors="replace")
            except OSError:  # the other side has closed it
                time.sleep(0.05)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    one = Terminal("--max-tokens", "900")
    yield one
    one.close()


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("/size 45", "45 thinks, 45 answers"),
        ("/think 25", "25 thinks, 100 answers"),
        ("/answer 70", "100 thinks, 70 answers"),
        ("/policy 25->100", "25 thinks, 100 answers"),
        ("/policy 25 -> 70", "25 thinks, 70 answers"),
        ("/policy", "100 thinks, 100 answers"),
        ("/budget 64", "thinking budget 64 tokens"),
        ("/budget off", "thinking budget off"),
        ("/temperature 0.7", "temperature 0.7"),
        ("/help", "/budget N"),
    ],
)
def test_a_command_tells_what_it_changed(talk: Talk, line: str, shown: str) -> None:
    assert shown in talk.command(line)


def test_a_size_replaces_thinker_and_answerer(talk: Talk) -> None:
    talk.command("/policy 25->70")
    assert "hand-over by replay 32" in talk.command("/handover replay 32")
    talk.command("/size 45")
    policy = talk.settings.policy()
    assert (policy.think, policy.answer, policy.handover, policy.replay) == ("45", "45", "replay", 32)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/size 46", "'46': expected one of the members 100, 70, 45, 25"),
        ("/size", "no name"),
        ("/policy 25", "expected THINKER->ANSWERER, such as 25->100"),
        ("/policy 25->33", "'33'"),
        ("/budget lots", "expected a number of tokens, or off"),
        ("/budget -1", "expected a number of tokens, or off"),
        ("/handover fly", "expected one of prefill, shadow, replay"),
        ("/handover replay 0", "replay is 0"),
        ("/temperature hot", "expected a number from 0 to 100"),
        ("/temperature nan", "expected a number from 0 to 100"),
        ("/budgte 4", "Did you mean /budget?"),
        ("/", "See /help"),
    ],
)
def test_a_command_that_cannot_be_done_says_why_and_changes_nothing(talk: Talk, line: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        talk.command(line)
    assert talk.settings == AskSettings()


def test_a_turn_is_kept_with_its_thoughts_and_clear_forgets_it(talk: Talk) -> None:
    talk.answered("1+1", {"thinking": "one more", "answering": "2"})
    assert talk.ask("2+2") == (
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2", "reasoning_content": "one more"},
        {"role": "user", "content": "2+2"},
    )
    talk.command("/clear")
    assert talk.ask("2+2") == ({"role": "user", "content": "2+2"},)


def test_the_system_message_stands_before_every_question() -> None:
    talk = Talk(AskSettings(system="Be brief."), MEMBERS)
    assert talk.ask("1+1")[0] == {"role": "system", "content": "Be brief."}
    assert conversation(AskSettings()) == ()


def test_quitting_leaves(talk: Talk) -> None:
    for line in ("/quit", "/exit"):
        with pytest.raises(Left):
            talk.command(line)


def test_a_model_cannot_move_the_cursor_or_write_markup() -> None:
    assert visible("a\x1b[2Jb\r\n\tc\x9b") == "a\\x1b[2Jb\\x0d\n\tc\\x9b"
    console = Console(force_terminal=True, highlight=False)
    with console.capture() as capture:
        console.out(visible("[red]x[/red]\x1b[2J"), end="")
    assert capture.get() == "[red]x[/red]\\x1b[2J"


def test_a_conversation_in_a_terminal(terminal: Terminal) -> None:
    terminal.wait_for("members 100, 70, 45, 25")
    terminal.wait_for("> ")
    terminal.type("/size 45\r")
    terminal.wait_for("45 thinks, 45 answers")
    terminal.wait_for("> ")
    terminal.type("/size 46\r")
    terminal.wait_for("'46': expected one of")
    terminal.wait_for("> ")
    terminal.type("12+34\r")
    told = terminal.wait_for("tokens/s")
    assert re.search(r"(thinking|answering) +45 +\d+ tokens", told)
    terminal.wait_for("> ")
    terminal.type("/clear\r")
    terminal.wait_for("the conversation is forgotten")
    terminal.wait_for("> ")
    terminal.type("/quit\r")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.raw


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Terminal]:
    """A chat with a nest whose answers end at max_tokens only."""
    shutil.copytree(shipped.nest(), tmp_path / "endless")
    config = tmp_path / "endless" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": 111}))
    one = Terminal(str(tmp_path / "endless"), "--max-tokens", "900")
    yield one
    one.close()


def test_control_c_cancels_the_answer_and_not_the_chat(endless: Terminal) -> None:
    terminal = endless
    terminal.wait_for("> ")
    terminal.type("12+34\r")
    terminal.wait_for("12+34")
    before = len(terminal.raw)
    while len(terminal.raw) < before + 20:  # the answer has begun
        terminal._read()
    terminal.type("\x03")
    terminal.wait_for("cancelled; this question is not part of the conversation")
    terminal.wait_for("> ")
    terminal.type("/policy\r")
    terminal.wait_for("thinking budget off")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.end() == 0
    assert "Traceback" not in terminal.raw


def test_lines_from_a_pipe_are_a_conversation_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nestling", "chat", "--size", "25", "--max-tokens", "40"],
        input="/policy 25->45\n12+34\n/nothing\n",
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "25 thinks, 45 answers" in done.stdout
    assert "tokens/s" in done.stdout
    assert "there is no /nothing" in done.stdout
    assert "\x1b" not in done.stdout
