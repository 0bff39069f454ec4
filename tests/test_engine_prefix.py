"""Turns of a conversation: what was read for one is not read again for the next, and no answer changes by it."""

from dataclasses import replace

import pytest
import tiny
import torch

from nestling.engine.decode import read
from nestling.engine.engine import Engine
from nestling.engine.prefix import Prefixes
from nestling.engine.settings import EngineSettings
from nestling.engine.state import RowState
from nestling.engine.weights import Weights
from nestling.events import ANSWERING, Ended, Text
from nestling.nest import Member, open_nest, write_nest
from nestling.policy import Policy
from nestling.request import Request

CHUNK = 4
OPEN, CLOSE = 4, 5  # the think tags of the tiny tokenizer


@pytest.fixture(scope="module", params=["nemotron_h", "mistral"])
def folder(request, tmp_path_factory):
    """A nest with a smaller member."""
    to = tiny.save(request.param, tmp_path_factory.mktemp("nest") / request.param, is_chatty=True)
    nest = open_nest(to)
    write_nest(replace(nest, members=nest.members | {"S": Member(name="S", sizes={"hidden": 32})}), to)
    return to


@pytest.fixture(scope="module")
def weights(folder):
    return Weights(open_nest(folder))


def turns(engine, policy, num_turns=3):
    """A conversation whose prompts leave earlier thoughts out: for each turn its texts, and its last event."""
    told, context = [], []
    for turn in range(num_turns):
        context += tiny.tokens(1, 7, seed=turn)[0].clamp(min=6).tolist()
        events = list(engine.submit(Request(prompt=(*context, OPEN), max_tokens=9, policy=policy)))
        told.append(([(e.phase, e.text) for e in events if isinstance(e, Text)], events))
        context += [t.id for e in events if isinstance(e, Text) and e.phase == ANSWERING for t in e.tokens]
    return told


@pytest.mark.parametrize(("think", "answer"), [("", ""), ("S", "100")])
@pytest.mark.parametrize("mode", ["prefill", "shadow"])
def test_answers_with_and_without_kept_states_are_equal_turn_by_turn(folder, think, answer, mode):
    policy = Policy(think=think, answer=answer, thinking_token_budget=3, handover=mode)
    with Engine(folder, settings=EngineSettings(chunk=CHUNK)) as engine:
        kept = turns(engine, policy)
        stats = engine.stats()
    with Engine(folder, settings=EngineSettings(chunk=CHUNK, prefix_bytes=0)) as engine:
        afresh = turns(engine, policy)
        assert engine.stats().num_reused == 0
    assert [texts for texts, _ in kept] == [texts for texts, _ in afresh]
    assert stats.num_prefix_hits >= 2
    for turn, (_, events) in enumerate(kept):
        first = next(e for e in events if isinstance(e, Ended))
        assert (first.num_reused > 0) == (turn > 0)
        assert events[-1].cached_tokens == first.num_reused
        assert first.num_reused + first.num_prefilled == events[-1].prompt_tokens
        if think != answer:
            second = next(e for e in events if isinstance(e, Ended) and e.phase == ANSWERING)
            assert (second.num_reused > 0) == (turn > 0)


def test_a_kept_state_is_the_last_one_before_the_tag(folder):
    def cached(*ids, member="100"):
        request = Request(prompt=(*ids, OPEN), max_tokens=4, policy=Policy(think=member))
        return list(engine.submit(request))[-1].cached_tokens

    with Engine(folder, settings=EngineSettings(chunk=CHUNK)) as engine:
        assert cached(*range(10, 23)) == 0
        assert [key for key in engine.prefixes._kept if key[0] == "100"] == [("100", tuple(range(10, 22)))]
        assert cached(*range(10, 22), 50, 51) == 12
        assert cached(*range(10, 18), 9, *range(19, 23)) == 0  # differs within: a state cannot be cut back
        assert cached(*range(10, 23), member="S") == 0
        assert cached(*range(10, 23), member="S") == 12


def state_after(weights, ids):
    member = weights.load(weights.nest.member("100"))
    state = RowState(member.layout, member.dtype)
    read(member, state, ids)
    return member, state


def test_a_hit_gives_a_copy_with_everything_in_it(weights):
    ids = tiny.tokens(1, 12)[0].tolist()
    member, state = state_after(weights, ids[:8])
    prefixes = Prefixes(10**6)
    prefixes.keep("100", ids, state)
    expected = read(member, state, ids[8:])
    for _ in range(2):
        found = prefixes.find("100", ids, limit=11)
        assert found.length == 8
        assert torch.equal(read(member, found, ids[8:]), expected)
    assert prefixes.find("100", ids, limit=7) is None
    assert prefixes.find("S", ids, limit=11) is None
    assert (prefixes.num_hits, prefixes.num_misses, prefixes.num_reused) == (2, 2, 16)


def test_the_least_recently_used_states_are_given_up_first(weights):
    ids = tiny.tokens(4, 8).tolist()
    states = [state_after(weights, row)[1] for row in ids]
    size = states[0].copy().nbytes
    prefixes = Prefixes(3 * size)
    for row, state in zip(ids[:3], states, strict=False):
        prefixes.keep("100", row, state)
    assert prefixes.find("100", ids[0], limit=8) is not None
    prefixes.keep("100", ids[3], states[3])
    assert prefixes.nbytes == 3 * size
    assert prefixes.find("100", ids[1], limit=8) is None
    assert all(prefixes.find("100", ids[i], limit=8) is not None for i in (0, 2, 3))
    none = Prefixes(size - 1)
    none.keep("100", ids[0], states[0])
    assert none.nbytes == 0
