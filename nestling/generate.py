"""`nestling generate`: one question, its thoughts and its answer as they come.

The answer goes to standard output and nothing else does, so a pipe gets the answer alone; thoughts, dimmed on a
terminal, and a line for each phase go to standard error. `--json` puts everything into one object on standard output.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from nestling import shipped
from nestling.asking import AskSettings, phase_line, visible, why_short
from nestling.events import ANSWERING, TOOL_CALL, Ended, Failed, Finished, Text
from nestling.request import Request, Runtime

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
MOST_STDIN = 16 * 1024**2  # characters; no context holds more, and what is piped may have no end


@dataclass
class Told:
    """An answer, heard to its end."""

    texts: dict[str, str] = field(default_factory=dict)  # phase -> all of it
    phases: list[Ended] = field(default_factory=list)
    finished: Finished | None = None


def nest_and_question(words: Sequence[str]) -> tuple[Path, str]:
    """What the words after the verb mean: [NEST] QUESTION; a question of `-` is read from standard input."""
    if len(words) > 2:
        raise ValueError(f"{len(words)} words were given, expected [NEST] QUESTION. Put the question in quotes.")
    *named, question = words
    if not question:
        raise ValueError("the question is empty.")
    if named and not os.path.isdir(named[0]):
        raise ValueError(
            f"'{named[0]}' is not a folder; expected [NEST] QUESTION, the question in quotes if it is several words."
        )
    if not named and os.path.isdir(question):  # of os: a long question is no path, which pathlib calls an error
        raise ValueError(f"'{question}' is a folder and the question is missing: nestling generate {question} QUESTION")
    if question == "-":
        question = sys.stdin.read(MOST_STDIN).rstrip("\n")
        if not question:
            raise ValueError("standard input has no question.")
    return Path(named[0]) if named else shipped.nest(), question


def generate(runtime: Runtime, request: Request, *, as_json: bool, name: str) -> None:
    """Ask and print. name: of the nest, for the JSON."""
    stream = runtime.submit(request)
    try:
        if as_json:
            told = listen(stream)
            print(json.dumps(_told(told, request, name), indent=2))
        else:
            told = listen(stream, out=sys.stdout, aside=sys.stderr)
            for phase in told.phases:
                print(phase_line(phase), file=sys.stderr)
            assert told.finished is not None
            short = why_short(told.finished, has_answer=bool(told.texts.get(ANSWERING)))
            if short:
                print(short, file=sys.stderr)
    except BaseException:
        stream.cancel()
        raise


def listen(stream: Any, *, out: TextIO | None = None, aside: TextIO | None = None) -> Told:
    """Read a stream to its end. out: gets the answer as it comes. aside: gets everything else."""
    told = Told()
    say: dict[str, Callable[[str], None]] = {}
    if out is not None and aside is not None:
        say = {phase: _writer(out, is_dim=False) for phase in (ANSWERING, TOOL_CALL)}
    last = out
    for event in stream:
        if isinstance(event, Text):
            told.texts[event.phase] = told.texts.get(event.phase, "") + event.text
            if out is not None and aside is not None:
                write = say.setdefault(event.phase, _writer(aside, is_dim=True))
                write(event.text)
                last = out if event.phase in (ANSWERING, TOOL_CALL) else aside
        elif isinstance(event, Ended):
            told.phases.append(event)
            if last is not None and told.texts.get(event.phase):
                print(file=last, flush=True)
        elif isinstance(event, Failed):
            raise RuntimeError(event.message)
        elif isinstance(event, Finished):
            told.finished = event
    return told


def _writer(file: TextIO, *, is_dim: bool) -> Callable[[str], None]:
    """Writes at once; on a terminal without the model's own control characters."""
    if not file.isatty():
        return lambda text: print(text, end="", file=file, flush=True)
    before, after = (DIM, PLAIN) if is_dim else ("", "")
    return lambda text: print(f"{before}{visible(text)}{after}", end="", file=file, flush=True)


def _told(told: Told, request: Request, name: str) -> dict[str, Any]:
    finished = told.finished
    assert finished is not None
    return {
        "nest": name,
        "prompt": request.prompt,
        "policy": asdict(request.policy),
        **{phase: told.texts.get(phase, "") for phase in ("thinking", "answering")},
        **({TOOL_CALL: told.texts[TOOL_CALL]} if TOOL_CALL in told.texts else {}),
        "phases": [
            asdict(phase) | {"tokens_per_second": phase.num_tokens / phase.seconds if phase.seconds else None}
            for phase in told.phases
        ],
        "finish": asdict(finished),
    }


def check_raw(settings: AskSettings) -> None:
    """Refuse what has no effect on a bare continuation, which has no phases and no template."""
    default = AskSettings()
    for name in ("think", "thinking_budget", "answer_reserve", "handover", "replay", "closing", "system"):
        if getattr(settings, name) != getattr(default, name):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} has no effect with --raw, which continues the text as it stands. Leave one out.")
