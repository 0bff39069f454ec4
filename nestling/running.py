"""The verbs that run a nest: generate, chat and serve.

What can be refused from the headers of a folder is refused before anything heavy is imported: a misspelled member is
told in a fraction of a second, not after the weights are there.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from nestling import shipped
from nestling.asking import AskSettings, conversation, prompt_of
from nestling.engine.settings import EngineSettings
from nestling.flags import add_field, add_settings, settings_of
from nestling.generate import check_raw, generate, nest_and_question
from nestling.nest import FULL, open_nest

ENGINE_FIELDS = ("dtype", "threads", "decoder")  # what one person at a terminal may want to change


def generate_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nestling generate`."""
    parser.usage = "nestling generate [NEST] QUESTION [flags]"
    parser.add_argument("words", nargs="+", metavar="[NEST] QUESTION", help="without NEST: the small one that ships")
    parser.add_argument("--json", action="store_true", help="one object with everything, for machines")
    parser.add_argument("--raw", action="store_true", help="continue the text as it stands: no template, no phases")
    _add_flags(parser)


def generate_verb(given: argparse.Namespace) -> None:
    """Ask one question."""
    folder, question = nest_and_question(given.words)
    settings = settings_of(given, AskSettings)
    if given.raw:
        check_raw(settings)
    settings.check(members_of(folder))
    try:
        with open_engine(folder, given) as engine:
            messages = () if given.raw else (*conversation(settings), {"role": "user", "content": question})
            prompt = prompt_of(engine, messages) if messages else question
            request = settings.request(engine, prompt, messages=messages)
            generate(engine, request, as_json=given.json, name=folder.name)
    except BrokenPipeError:
        # Whoever read has left, which is no failure of ours; what is still buffered must not be written on exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None


def chat_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nestling chat`."""
    parser.add_argument("nest", nargs="?", default="", help="folder; without it the small nest that ships")
    _add_flags(parser)


def chat_verb(given: argparse.Namespace) -> None:
    """Talk, in a terminal."""
    from nestling.chat import chat

    folder = Path(given.nest) if given.nest else shipped.nest()
    settings = settings_of(given, AskSettings)
    members = members_of(folder)
    settings.check(members)
    chat(lambda: open_engine(folder, given), settings, members=members, name=folder.name)


def members_of(folder: Path) -> tuple[str, ...]:
    """The names that a policy may give, the full member first: from the folder's headers alone."""
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is not a folder; expected a nest or a checkpoint.")
    return tuple(sorted(open_nest(folder).members, key=lambda name: name != FULL))


def open_engine(folder: Path, given: argparse.Namespace) -> Any:
    """The engine on a nest."""
    from nestling import hf
    from nestling.engine.engine import Engine

    hf.be_quiet()
    told = {name: getattr(given, name) for name in ENGINE_FIELDS if getattr(given, name) is not None}
    return Engine(folder, settings=EngineSettings(**told))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, AskSettings)
    for name in ENGINE_FIELDS:
        add_field(parser, EngineSettings, name)
