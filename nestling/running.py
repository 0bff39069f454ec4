"""The verbs that run a nest: generate, chat and serve.

What can be refused from the headers of a folder is refused before anything heavy is imported: a misspelled member is
told in a fraction of a second, not after the weights are there.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from pathlib import Path
from typing import Any

from nestling import shipped
from nestling.asking import AskSettings, conversation, prompt_of
from nestling.engine.settings import EngineSettings
from nestling.flags import add_field, add_settings, read_recipe, settings_of
from nestling.generate import check_raw, generate, nest_and_question
from nestling.nest import FULL, open_nest
from nestling.serve.settings import ServeSettings

UPSTREAM = "upstream_"  # before the names of the settings of other engines, which are also the server's
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


def serve_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nestling serve`."""
    parser.add_argument(
        "nest", nargs="?", default="", help="folder; without it the small nest that ships, or engines behind URLs"
    )
    from nestling.upstream import UpstreamSettings

    add_settings(parser, ServeSettings, EngineSettings)
    for field in dataclasses.fields(UpstreamSettings):
        add_field(parser, UpstreamSettings, field.name, prefix=UPSTREAM)


def serve_verb(given: argparse.Namespace) -> None:
    """Serve a nest, or other engines under the same policies, until told to stop."""
    from nestling.upstream import UpstreamSettings

    told = read_recipe(given, ServeSettings, EngineSettings)
    settings: ServeSettings = settings_of(given, ServeSettings, told)
    settings.check()
    engine_settings: EngineSettings = settings_of(given, EngineSettings, told)
    fields = {field.name: getattr(given, UPSTREAM + field.name) for field in dataclasses.fields(UpstreamSettings)}
    upstream = UpstreamSettings(**{name: value for name, value in fields.items() if value is not None})
    urls = [one for one in (settings.think, settings.answer) if "://" in one]
    if len(urls) == 1:
        raise ValueError("--think and --answer: one is a URL and the other is not. Engines behind URLs need both.")
    if urls and engine_settings != EngineSettings():
        raise ValueError("settings of the engine have no effect where other engines do the work. Leave them out.")
    if not urls and upstream != UpstreamSettings():
        raise ValueError("--upstream settings have no effect without URLs in --think and --answer.")
    folder = Path(given.nest) if given.nest or urls else shipped.nest()
    members = members_of(folder) if given.nest or not urls else ()
    if not urls:
        settings.policy().check(members)
    from nestling.serve.run import run

    say = functools.partial(print, flush=True)  # whoever waits for the line reads a pipe
    if urls:
        runtime = _open_relay(settings, upstream, Path(given.nest) if given.nest else None)
        settings = dataclasses.replace(settings, think=runtime.think, answer=runtime.answer)
        run(settings, nest=folder.name or "relay", runtime=runtime, say=say)
    else:
        run(settings, nest=folder.name, runtime=_open(folder, engine_settings), say=say)


def members_of(folder: Path) -> tuple[str, ...]:
    """The names that a policy may give, the full member first: from the folder's headers alone."""
    if not folder.is_dir():
        raise ValueError(f"'{folder}' is not a folder; expected a nest or a checkpoint.")
    return tuple(sorted(open_nest(folder).members, key=lambda name: name != FULL))


def open_engine(folder: Path, given: argparse.Namespace) -> Any:
    """The engine on a nest."""
    told = {name: getattr(given, name) for name in ENGINE_FIELDS if getattr(given, name) is not None}
    return _open(folder, EngineSettings(**told))


def _open(folder: Path, settings: EngineSettings) -> Any:
    from nestling import hf
    from nestling.engine.engine import Engine

    hf.be_quiet()
    return Engine(folder, settings=settings)


def _open_relay(settings: ServeSettings, upstream: Any, folder: Path | None) -> Any:
    """Other engines as a runtime. folder: whose chat template makes the prompts, if it is not to be theirs."""
    from nestling.relay import Relay

    template = None
    if folder is not None:
        from nestling import hf
        from nestling.template import template_of

        template = template_of(hf.load_tokenizer(folder))
    return Relay(settings.think, settings.answer, settings=upstream, template=template)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    add_settings(parser, AskSettings)
    for name in ENGINE_FIELDS:
        add_field(parser, EngineSettings, name)
