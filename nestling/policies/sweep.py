"""The sweep: accuracy of every policy on all problems, many at once; latency on some of them, one at a time.

Decoding is greedy and the engine's answers do not depend on what else runs, so accuracy may be measured in a full
batch. Latency may not: each timed problem is solved alone, by all policies in turn, so that whatever the machine does
meanwhile falls on all of them alike; no state is kept from one answer to the next.

Where a member's thoughts ended by themselves within a budget, that budget changes nothing, and the outcome without one
is taken: it is the same, token for token. With a budget of zero nobody thinks, so only the answering member counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nestling import tasks
from nestling.checkpoint import check_destination
from nestling.engine.engine import Engine
from nestling.engine.settings import EngineSettings
from nestling.nest import Nest, open_nest
from nestling.policies.frontier import Row
from nestling.policies.handover import Compared, compare, compared_key, pairs_of
from nestling.policies.notes import Notes
from nestling.policies.settings import PolicySettings
from nestling.policies.solving import Asked, Outcome, asked, solve_alone, solve_together
from nestling.policy import Policy

Say = Callable[[str], None]
Key = tuple[str, str, int | None]  # thinker, answerer, budget


def policies_of(members: Sequence[str], limits: Sequence[int | None]) -> Iterator[Key]:
    """Every policy once, those without a budget first."""
    for budget in limits:
        for think in members:
            for answer in members:
                if budget != 0 or think == answer:
                    yield think, answer, budget


def sweep(
    settings: PolicySettings, folder: str | Path, to: str | Path, *, say: Say = print, overwrite: bool = False
) -> tuple[list[Row], list[Compared], list[str]]:
    """Measure everything. Returns the policies, the ways of hand-over, and the members from the largest to the
    smallest. Findings are kept beside `to` until it is written."""
    settings.check()
    check_destination(Path(to), overwrite=overwrite, source=Path(folder))
    nest = open_nest(folder)
    members = by_size(nest)
    about = {"settings": asdict(settings), "nest": nest.fingerprint, "members": members}
    notes = Notes(notes_file(to), about)
    keys = list(policies_of(members, settings.limits))
    problems = tasks.problems("test", settings.problems)
    with Engine(folder, settings=_many(settings)) as engine:
        wanted = asked(engine.tokenizer, problems)
        for i, key in enumerate(keys):
            if _name(key) not in notes.found:
                notes.note(_name(key), _solve(engine, wanted, key, settings, notes))
            say(f"{i + 1} of {len(keys)}  {_told(key, notes)}")
        pairs = pairs_of(members)
        compared = compare(engine, wanted[: settings.handover_problems], pairs, settings, notes, say)
    with Engine(folder, settings=EngineSettings(max_rows=1, prefix_bytes=0)) as engine:
        _time(engine, wanted[: settings.timed], keys, pairs, settings, notes, say)
    rows = [_row(key, notes, settings) for key in keys]
    return rows, [one.timed(notes.found, settings.timed) for one in compared], members


def by_size(nest: Nest) -> list[str]:
    """Members from the largest to the smallest."""
    return sorted(nest.members, key=lambda name: -nest.cost(nest.members[name]).active_parameters)


def notes_file(to: str | Path) -> Path:
    """Where findings are kept until everything is measured."""
    return Path(to).with_name(Path(to).name + ".found.jsonl")


def policy_of(key: Key, settings: PolicySettings, *, handover: str = "prefill", replay: int = 16) -> Policy:
    """The policy of a key, its answer's reserve as large as an answer may get."""
    think, answer, budget = key
    return Policy(
        think=think,
        answer=answer,
        thinking_token_budget=budget,
        answer_reserve=settings.max_answer,
        handover=handover,
        replay=replay,
    )


def _many(settings: PolicySettings) -> EngineSettings:
    return EngineSettings(
        max_rows=settings.rows, max_waiting=settings.problems, max_tokens_in_flight=2**31, prefix_bytes=256 * 1024**2
    )


def _solve(engine: Engine, asked: Sequence[Asked], key: Key, settings: PolicySettings, notes: Notes) -> dict[str, Any]:
    """Columns over the problems: solved, tokens of thinking and answer, forced."""
    think, answer, budget = key
    free = notes.found.get(_name((think, answer, None))) if budget is not None else None
    is_same = [
        free is not None and budget is not None and not free["forced"][i] and free["thinking"][i] - 1 <= budget
        for i in range(len(asked))
    ]
    outcomes: Iterator[Outcome] = iter(
        solve_together(
            engine,
            [one for one, same in zip(asked, is_same, strict=True) if not same],
            policy_of(key, settings),
            settings,
        )
    )
    found: dict[str, list[Any]] = {"solved": [], "thinking": [], "answer": [], "forced": []}
    for i, same in enumerate(is_same):
        if same:
            assert free is not None
            values = [free[name][i] for name in found]
        else:
            one = next(outcomes)
            values = [int(one.is_solved), one.thinking_tokens, one.answer_tokens, int(one.is_forced)]
        for column, value in zip(found.values(), values, strict=True):
            column.append(value)
    return found


def _time(
    engine: Engine,
    asked: Sequence[Asked],
    keys: Sequence[Key],
    pairs: Sequence[tuple[str, str]],
    settings: PolicySettings,
    notes: Notes,
    say: Say,
) -> None:
    ways = [("prefill", 16), ("shadow", 16), *(("replay", int(n)) for n in settings.replays)]
    runs = {_name(key): policy_of(key, settings) for key in keys}
    runs |= {
        f"handover {think}->{answer} {way} {replay}": policy_of(
            (think, answer, None), settings, handover=way, replay=replay
        )
        for think, answer in pairs
        for way, replay in ways
        if not notes.found[compared_key(think, answer, way, replay)]["why_not"]
    }
    for policy in runs.values():  # everything once, so that nothing is timed that happens only the first time
        if f"timed {len(asked) - 1}" not in notes.found:
            solve_alone(engine, asked[0], policy, settings)
    for i, one in enumerate(asked):
        if f"timed {i}" in notes.found:
            continue
        told = {}
        for name, policy in runs.items():
            seconds, first, outcome = solve_alone(engine, one, policy, settings)
            told[name] = [seconds, first, outcome.handover_seconds]
        notes.note(f"timed {i}", told)
        say(f"timed {i + 1} of {len(asked)} problems, {len(runs)} ways each")


def _row(key: Key, notes: Notes, settings: PolicySettings) -> Row:
    found = notes.found[_name(key)]
    timed = [notes.found[f"timed {i}"][_name(key)] for i in range(settings.timed)]
    think, answer, budget = key
    return Row(
        think=think,
        answer=answer,
        budget=budget,
        solved=tuple(map(bool, found["solved"])),
        thinking_tokens=_mean(found["thinking"]),
        answer_tokens=_mean(found["answer"]),
        forced=_mean(found["forced"]),
        seconds=_mean([seconds for seconds, _, _ in timed]),
        first_seconds=_mean([first for _, first, _ in timed]),
    )


def _name(key: Key) -> str:
    think, answer, budget = key
    return f"{think}->{answer} {'none' if budget is None else budget}"


def _told(key: Key, notes: Notes) -> str:
    found = notes.found[_name(key)]
    return (
        f"{_name(key):>16}  {100 * _mean(found['solved']):5.1f} %  {_mean(found['thinking']):5.1f} tokens of thinking"
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
