"""The ways of hand-over side by side: is the answer the exact one, and when does it begin.

Prefill is exact and what the others are compared with. On the same thoughts (greedy, and the thinker does not know who
answers) each way's answers, and the distribution of each answer token before its text first differs from the exact
one, are compared with those by prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from nestling.engine.engine import Engine
from nestling.policies.notes import Notes
from nestling.policies.settings import PolicySettings
from nestling.policies.solving import Asked, Outcome, solve_together
from nestling.policy import PREFILL, REPLAY, SHADOW, Policy

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One way of hand-over between two members."""

    think: str
    answer: str
    way: str
    replay: int  # tokens, where the way is replay
    accuracy: float = math.nan
    lost: float = math.nan  # accuracy of prefill less this
    differing: float = math.nan  # share of answers that are not the exact ones
    kl: float = math.nan  # of the exact next-token distribution to this one, mean over answer tokens, in nats
    kl_first: float = math.nan  # the same over first tokens alone
    seconds: float = math.nan  # from the switch to the first token of the answer, alone on the machine
    why_not: str = ""  # why this way is refused between these members

    @property
    def name(self) -> str:
        """The way in words."""
        return f"replay {self.replay}" if self.way == REPLAY else self.way

    def timed(self, found: Mapping[str, Any], num_timed: int) -> Compared:
        """With the seconds that were measured meanwhile."""
        key = f"handover {self.think}->{self.answer} {self.way} {self.replay}"
        seconds = [found[f"timed {i}"].get(key) for i in range(num_timed)]
        kept = [one[2] for one in seconds if one]
        return replace(self, seconds=sum(kept) / len(kept)) if kept else self


def pairs_of(members: Sequence[str]) -> list[tuple[str, str]]:
    """Every smaller member thinks for the full one, and the full one for every smaller."""
    full, *smaller = members
    return [(name, full) for name in smaller] + [(full, name) for name in smaller]


def compared_key(think: str, answer: str, way: str, replay: int) -> str:
    """Under which the findings of a way are noted."""
    return f"compared {think}->{answer} {way} {replay}"


def compare(
    engine: Engine,
    asked: Sequence[Asked],
    pairs: Sequence[tuple[str, str]],
    settings: PolicySettings,
    notes: Notes,
    say: Say,
) -> list[Compared]:
    """All ways between all pairs."""
    ways = [(PREFILL, 16), (SHADOW, 16), *((REPLAY, int(n)) for n in settings.replays)]
    compared = []
    for think, answer in pairs:
        exact: list[Outcome] = []
        for way, number in ways:
            one = Compared(think=think, answer=answer, way=way, replay=number)
            key = compared_key(think, answer, way, number)
            if key not in notes.found:
                policy = Policy(
                    think=think, answer=answer, answer_reserve=settings.max_answer, handover=way, replay=number
                )
                exact = exact or _all(engine, asked, replace(policy, handover=PREFILL), settings)
                notes.note(key, asdict(_measure(engine, asked, policy, settings, exact, one)))
            compared.append(Compared(**notes.found[key]))
        say(f"hand-over {think}->{answer} compared")
    return compared


def _all(engine: Engine, asked: Sequence[Asked], policy: Policy, settings: PolicySettings) -> list[Outcome]:
    vocab = engine.nest.layout.sizes["vocab"]
    return solve_together(engine, asked, policy, settings, logprobs=vocab)


def _measure(
    engine: Engine,
    asked: Sequence[Asked],
    policy: Policy,
    settings: PolicySettings,
    exact: Sequence[Outcome],
    one: Compared,
) -> Compared:
    try:
        outcomes = exact if policy.handover == PREFILL else _all(engine, asked, policy, settings)
    except ValueError as error:  # no such hand-over between these two
        return replace(one, why_not=str(error))
    divergences = [_divergences(a, b) for a, b in zip(exact, outcomes, strict=True)]
    everywhere = [kl for found in divergences for kl in found]
    first = [found[0] for found in divergences if found]
    accuracy, exactly = (sum(o.is_solved for o in found) / len(found) for found in (outcomes, exact))
    return replace(
        one,
        accuracy=accuracy,
        lost=exactly - accuracy,
        differing=sum(a.answer != b.answer for a, b in zip(exact, outcomes, strict=True)) / len(exact),
        kl=sum(everywhere) / len(everywhere) if everywhere else math.nan,
        kl_first=sum(first) / len(first) if first else math.nan,
    )


def _divergences(exact: Outcome, other: Outcome) -> list[float]:
    """KL at each answer token as long as both have read the same text."""
    found = []
    for (token, p), (other_token, q) in zip(exact.first, other.first, strict=False):
        found.append(sum(math.exp(p[i]) * (p[i] - q[i]) for i in p if p[i] > -math.inf))
        if token != other_token:
            break
    return found
