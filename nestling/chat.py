"""`nestling chat`: a conversation in a terminal. Thoughts are dimmed, answers plain, and behind each stands who wrote
it and how fast; who thinks, who answers and for how long can be changed between two questions.

Ctrl-C ends the answer that is running, Ctrl-D ends the chat. The nest is loaded while the first question is typed.
"""

from __future__ import annotations

import difflib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from nestling.asking import AskSettings, change, conversation, phase_line, prompt_of, visible, why_short
from nestling.events import ANSWERING, CANCELLED, THINKING, TOOL_CALL, Ended, Failed, Finished, Text

HELP = """\
/size NAME            this member thinks and answers
/think NAME           this member thinks
/answer NAME          this member answers
/policy NAME->NAME    the first thinks, the second answers
/budget N             at most N tokens of thinking; 0: none; off: all that there is room for
/handover MODE [N]    prefill or shadow (exact), replay (approximate, the answerer reads the last N tokens again)
/temperature X        0: always the likeliest token
/clear                forget the conversation
/help  /quit
Ctrl-C cancels a running answer, Ctrl-D leaves. A question that begins with a slash is written with two."""
STYLES = {THINKING: "dim", ANSWERING: "", TOOL_CALL: "yellow"}


class Left(Exception):
    """The person has left the chat."""


class Talk:
    """A conversation and its settings; no terminal."""

    def __init__(self, settings: AskSettings, members: Sequence[str]) -> None:
        self.settings, self.members = settings, members
        self.messages: list[dict[str, str]] = []
        self._commands: dict[str, Callable[[str], str]] = {
            "size": lambda name: self._change(size=self._member(name), think="", answer=""),
            "think": lambda name: self._change(think=self._member(name)),
            "answer": lambda name: self._change(answer=self._member(name)),
            "policy": self._policy,
            "budget": self._budget,
            "handover": self._handover,
            "temperature": self._temperature,
            "clear": self._clear,
            "help": lambda _: HELP,
            "quit": _leave,
            "exit": _leave,
        }

    def command(self, line: str) -> str:
        """Do what a line such as `/think 45` says. Returns what to tell; ValueError for what cannot be."""
        name, _, rest = line.removeprefix("/").strip().partition(" ")
        if name not in self._commands:
            near = difflib.get_close_matches(name, self._commands, 1)
            raise ValueError(f"there is no /{name}. " + (f"Did you mean /{near[0]}?" if near else "See /help."))
        return self._commands[name](rest.strip())

    def describe(self) -> str:
        """The settings in a line."""
        policy = self.settings.policy()
        full = self.members[0]
        told = f"{policy.think or full} thinks, {policy.answer or full} answers"
        budget = policy.thinking_token_budget
        told += ", thinking budget " + ("off" if budget is None else f"{budget} tokens")
        if (policy.think or full) != (policy.answer or full):
            told += f", hand-over by {policy.handover}" + (f" {policy.replay}" if policy.handover == "replay" else "")
        return told + (f", temperature {self.settings.temperature:g}" if self.settings.temperature else "")

    def ask(self, question: str) -> tuple[dict[str, str], ...]:
        """The conversation with one more question; kept by `answered` only."""
        return (*conversation(self.settings), *self.messages, {"role": "user", "content": question})

    def answered(self, question: str, texts: dict[str, str]) -> None:
        """A turn is over. Its thoughts are kept: the template drops those of earlier turns."""
        reply = {"role": "assistant", "content": texts.get(ANSWERING, "") + texts.get(TOOL_CALL, "")}
        if texts.get(THINKING):
            reply["reasoning_content"] = texts[THINKING]
        self.messages += [{"role": "user", "content": question}, reply]

    def _change(self, **values: Any) -> str:
        self.settings = change(self.settings, self.members, **values)
        return self.describe()

    def _member(self, name: str) -> str:
        if name not in self.members:
            given = f"'{name}'" if name else "no name"
            raise ValueError(f"{given}: expected one of the members {', '.join(self.members)}.")
        return name

    def _policy(self, text: str) -> str:
        if not text:
            return self.describe()
        think, arrow, answer = (part.strip() for part in text.partition("->"))
        if not arrow:
            raise ValueError(f"'{text}' is not a policy: expected THINKER->ANSWERER, such as {self._example()}.")
        return self._change(think=self._member(think), answer=self._member(answer))

    def _budget(self, text: str) -> str:
        if text != "off" and not (text.isascii() and text.isdigit()):
            raise ValueError(f"'{text}' is not a budget: expected a number of tokens, or off.")
        return self._change(thinking_budget=None if text == "off" else int(text))

    def _handover(self, text: str) -> str:
        mode, _, number = text.partition(" ")
        if number and not (number.isascii() and number.isdigit()):
            raise ValueError(f"'{number}' is not a number of tokens: expected /handover replay N.")
        return self._change(handover=mode, **({"replay": int(number)} if number else {}))

    def _temperature(self, text: str) -> str:
        try:
            return self._change(temperature=float(text))
        except ValueError as error:
            raise ValueError(f"temperature '{text}': expected a number from 0 to 100.") from error

    def _clear(self, _: str) -> str:
        self.messages.clear()
        return "the conversation is forgotten"

    def _example(self) -> str:
        return f"{self.members[-1]}->{self.members[0]}"


def chat(
    open_engine: Callable[[], Any],
    settings: AskSettings,
    *,
    members: Sequence[str],
    name: str,
    console: Console | None = None,
) -> None:
    """Talk until the person leaves. name: of the nest."""
    console = console or Console(highlight=False)
    talk = Talk(settings, members)
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(open_engine)
        try:
            console.out(f"{name}: members {', '.join(members)}. {talk.describe()}.\n/help tells more.", style="cyan")
            _converse(console, talk, opening)
        except Left:
            pass
        finally:
            if opening.exception() is None:
                opening.result().close()


def _converse(console: Console, talk: Talk, opening: Future[Any]) -> None:
    while True:
        line = _read_line(console)
        try:
            if not line:
                continue
            if line.startswith("/") and not line.startswith("//"):
                console.out(talk.command(line), style="cyan")
                continue
            _answer(console, talk, opening.result(), line[1:] if line.startswith("//") else line)
        except ValueError as error:
            if opening.done() and opening.exception() is error:
                raise
            console.out(visible(str(error)), style="red")
        except KeyboardInterrupt:
            console.out("\nthe nest is still being loaded", style="cyan")


def _read_line(console: Console) -> str:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (input() then edits and remembers lines)
    try:
        return input("\n> " if sys.stdin.isatty() else "").strip()
    except KeyboardInterrupt:
        console.out("\n(Ctrl-D or /quit leaves)", style="cyan")
        return ""
    except EOFError:
        if sys.stdin.isatty():
            console.out("")
        raise Left from None


def _answer(console: Console, talk: Talk, engine: Any, question: str) -> None:
    """One turn. An answer that was cancelled or broke off is not kept in the conversation."""
    messages = talk.ask(question)
    stream = engine.submit(talk.settings.request(engine, prompt_of(engine, messages), messages=messages))
    texts: dict[str, str] = {}
    with _cancelled_by_control_c(stream):
        for event in stream:
            if isinstance(event, Text):
                texts[event.phase] = texts.get(event.phase, "") + event.text
                console.out(visible(event.text), style=STYLES[event.phase] or None, highlight=False, end="")
            elif isinstance(event, Ended):
                console.out(("\n" if texts.get(event.phase) else "") + phase_line(event), style="blue")
            elif isinstance(event, Failed):
                console.out(f"\n{visible(event.message)}\nThis question is not part of the conversation.", style="red")
                return
            elif isinstance(event, Finished):
                short = why_short(event, has_answer=bool(texts.get(ANSWERING)))
                if event.reason == CANCELLED:
                    short += "; this question is not part of the conversation"
                else:
                    talk.answered(question, texts)
                if short:
                    console.out(short, style="cyan")


@contextmanager
def _cancelled_by_control_c(stream: Any) -> Iterator[None]:
    """Ctrl-C cancels the stream, which then ends as it always does, instead of breaking whatever runs."""
    before = signal.signal(signal.SIGINT, lambda *_: stream.cancel())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(_: str) -> str:
    raise Left
