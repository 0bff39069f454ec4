"""Thinking in one member and answering in another: what a hand-over computes, and that the budget binds."""

from dataclasses import replace

import pytest
import tiny
import torch

from nestling.engine.decode import read
from nestling.engine.engine import Engine
from nestling.engine.handover import Trail, handed_over, why_not
from nestling.engine.lean import decoder_for
from nestling.engine.prefill import last_boundary, read_segment, segment_end
from nestling.engine.settings import EngineSettings
from nestling.engine.state import RowState
from nestling.engine.weights import Weights
from nestling.events import ANSWERING, STOP, THINKING, Ended, Finished, Started, Text
from nestling.nest import Member, open_nest, write_nest
from nestling.policy import Policy
from nestling.request import Request

CHUNK = 8
SIZES = {  # of a member that is smaller along every axis that a state or a view can feel
    "nemotron_h": {"hidden": 32, "mamba": 2, "mdim": 3, "effn": 12, "q": 2},
    "mistral": {"hidden": 24, "q": 2, "ffn": 32},
    "qwen3_moe": {"hidden": 24, "q": 2, "effn": 12, "expert": 3},
}


@pytest.fixture(scope="module", params=SIZES)
def folder(request, tmp_path_factory):
    """A nest with members 100, S and D, which has a layer less; its tokenizer has think tags."""
    to = tiny.save(request.param, tmp_path_factory.mktemp("nest") / request.param, is_chatty=True)
    nest = open_nest(to)
    members = {"S": Member(name="S", sizes=SIZES[request.param]), "D": Member(name="D", sizes={"layer": 2})}
    write_nest(replace(nest, members=nest.members | members), to)
    return to


@pytest.fixture(scope="module")
def engine(folder):
    """An engine with small segments; shared by tests that leave it as it is."""
    with Engine(folder, settings=EngineSettings(chunk=CHUNK)) as engine:
        yield engine


def prompt(length=11, seed=0):
    """Tokens of a question, and the tag that opens the thoughts."""
    return (*tiny.tokens(1, length, seed=seed)[0].clamp(min=6).tolist(), 4)


def ask(engine, policy, **changes):
    """The events of an answer whose thoughts a budget ends."""
    return list(engine.submit(Request(**{"prompt": prompt(), "max_tokens": 20, "policy": policy} | changes)))


def tokens_of(events, phase):
    return [token.id for e in events if isinstance(e, Text) and e.phase == phase for token in e.tokens]


@pytest.mark.parametrize("mode", ["prefill", "shadow"])
@pytest.mark.parametrize(("think", "answer"), [("S", "100"), ("100", "S"), ("S", "S")])
def test_the_answer_is_that_of_a_fresh_run_on_prompt_and_thoughts(engine, mode, think, answer):
    policy = Policy(think=think, answer=answer, thinking_token_budget=9, handover=mode)
    events = ask(engine, policy)
    thoughts, answered = tokens_of(events, THINKING), tokens_of(events, ANSWERING)
    ended = {e.phase: e for e in events if isinstance(e, Ended)}
    assert (ended[THINKING].member, ended[ANSWERING].member) == (think, answer)
    assert len(thoughts) == 9
    fresh = Request(prompt=(*prompt(), *thoughts, 5), max_tokens=10, policy=Policy(answer=answer), is_plain=True)
    expected = tokens_of(list(engine.submit(fresh)), ANSWERING)
    assert answered == expected
    assert ended[ANSWERING].handover == (mode if think != answer else "")
    if think != answer:
        assert ended[ANSWERING].num_prefilled + ended[ANSWERING].num_reused == len(prompt()) + 10


def test_a_budget_binds_to_the_token_and_the_closing_sentence_is_written(engine):
    text = "done."
    for budget in (0, 1, 5):
        events = ask(engine, Policy(think="S", thinking_token_budget=budget, closing=text), max_tokens=30)
        ended, *again = [e for e in events if isinstance(e, Ended) and e.phase == THINKING]
        said = "".join(e.text for e in events if isinstance(e, Text) and e.phase == THINKING)
        assert ended.is_forced
        assert len(tokens_of(events, THINKING)) == budget
        assert all(e.num_tokens <= 2 for e in again)  # thoughts that begin again have no budget left
        assert ended.num_tokens == budget + 1 + (len(text) if budget else 0)
        assert said.endswith(text) or not budget
        assert isinstance(events[-1], Finished)
        assert events[-1].reasoning_tokens == ended.num_tokens + sum(e.num_tokens for e in again)


def test_every_answer_has_its_reserve(engine):
    events = ask(engine, Policy(answer_reserve=6), max_tokens=16)
    answered = [e for e in events if isinstance(e, Ended) and e.phase == ANSWERING]
    assert events[-1].completion_tokens <= 16
    assert answered[0].num_tokens == 6 or events[-1].reason == STOP
    assert [e.phase for e in events if isinstance(e, Started)] == [THINKING, ANSWERING]


@pytest.mark.parametrize("length", range(2, 30))
def test_segments_end_at_the_same_places_however_long_the_context_grows(length):
    ends = []
    while not ends or ends[-1] < length:
        ends.append(segment_end(ends[-1] if ends else 0, length, CHUNK))
    assert ends[-1] == length
    assert all(end % CHUNK == 0 for end in ends[:-1])
    assert length - (ends[-2] if len(ends) > 1 else 0) >= 2
    assert set(ends[:-1]) <= {segment_end(start, length + 7, CHUNK) for start in [0, *ends]}
    assert last_boundary(length, CHUNK) == (ends[-2] if len(ends) > 1 else 0)


@pytest.mark.parametrize("which", ["stock", "auto"])
def test_a_state_that_read_along_is_bit_equal_with_one_that_read_at_once(folder, which):
    weights = Weights(open_nest(folder))
    member = weights.load(weights.nest.member("100"))
    decoder = decoder_for(member, decoder=which)
    ids = tiny.tokens(1, 45)[0].tolist()
    fresh, along = (RowState(member.layout, member.dtype) for _ in range(2))
    with torch.inference_mode():
        while fresh.length < 45:
            expected = read_segment(decoder, fresh, ids, CHUNK)
        for known in range(3, 46):
            while along.length < last_boundary(known, CHUNK):
                read_segment(decoder, along, ids[:known], CHUNK)
        assert along.length == 40
        assert torch.equal(read_segment(decoder, along, ids, CHUNK), expected)
        assert equal(along, fresh)
        whole = RowState(member.layout, member.dtype)
        torch.testing.assert_close(read(member, whole, ids), expected, rtol=0, atol=2e-5)  # one pass: other shapes


def equal(one, other):
    """Whether two states are the same bit for bit."""
    n = one.length
    same = [torch.equal(one.keys[i][:, :n], other.keys[i][:, :n]) for i in one.keys]
    same += [torch.equal(one.values[i][:, :n], other.values[i][:, :n]) for i in one.values]
    same += [torch.equal(one.conv[i], other.conv[i]) and torch.equal(one.ssm[i], other.ssm[i]) for i in one.ssm]
    return n == other.length and all(same)


def test_replay_between_equals_is_exact_and_reads_only_the_last_tokens(folder):
    """A state handed to the same member, and tokens read again on top of it, is as if nothing had happened."""
    weights = Weights(open_nest(folder))
    member = weights.load(weights.nest.member("100"))
    ids = tiny.tokens(1, 40)[0].tolist()
    with torch.inference_mode():
        state, trail = RowState(member.layout, member.dtype), Trail(6)
        for i in range(40):
            read(member, state, ids[i : i + 1])
            trail.note(state)
        new = handed_over(state, trail, member, member, length=40)
        assert 40 - 2 * 6 < new.length <= 40 - 6
        for i in range(new.length, 40):
            read(member, new, ids[i : i + 1])
        assert equal(new, state)
        assert len(trail.marks) <= 3


def test_replay_maps_each_head_to_the_same_head_and_leaves_the_rest_empty(folder):
    weights = Weights(open_nest(folder))
    small, full = (weights.load(weights.nest.member(name)) for name in ("S", "100"))
    ids = tiny.tokens(1, 20)[0].tolist()
    with torch.inference_mode():
        state, trail = RowState(small.layout, small.dtype), Trail(1)
        for i in range(20):
            read(small, state, ids[i : i + 1])
            trail.note(state)
        new = handed_over(state, trail, small, full, length=20)
        at = {length: (conv, ssm) for length, conv, ssm in trail.marks}
        for layer in new.ssm:
            heads = new.ssm[layer].view(2, 3, 5, 7)  # group, mamba, mdim, state
            assert torch.equal(heads[:, :2, :3], at[new.length][1][layer].view(2, 2, 3, 7))
            assert not heads[:, 2:].any()
            assert not heads[:, :, 3:].any()
            conv, theirs = new.conv[layer], at[new.length][0][layer]
            assert torch.equal(conv[30:], theirs[12:])  # B and C are whole
            assert torch.equal(conv[:30].view(2, 3, 5, 3)[:, :2, :3], theirs[:12].view(2, 2, 3, 3))
        for layer in new.keys:
            assert torch.equal(new.keys[layer][:, : new.length], state.keys[layer][:, : new.length])
        back = handed_over(new, Trail(1), full, small, length=20) if not new.ssm else None
        assert back is None or back.length == 19


def test_replay_answers_and_says_what_it_read(engine):
    policy = Policy(think="S", answer="100", thinking_token_budget=9, handover="replay", replay=4)
    ended = {e.phase: e for e in ask(engine, policy) if isinstance(e, Ended)}
    assert ended[ANSWERING].handover == "replay"
    assert 4 <= ended[ANSWERING].num_prefilled < 2 * 4 + CHUNK


def test_replay_is_refused_where_layers_are_missing(engine, folder):
    with pytest.raises(ValueError, match="keeps state in layers of the parent that 'D' does not have"):
        ask(engine, Policy(think="D", answer="100", handover="replay"))
    weights = Weights(open_nest(folder))
    full, shallow = (weights.load(weights.nest.member(name)) for name in ("100", "D"))
    assert not why_not(full, shallow)


def test_many_policies_at_once_change_no_answer(engine):
    policies = [
        Policy(think=think, answer=answer, thinking_token_budget=budget, handover=mode)
        for think in ("S", "100", "D")
        for answer in ("S", "100")
        for budget, mode in ((3, "prefill"), (12, "shadow"))
    ]

    def text(events):
        return [(e.phase, e.text) for e in events if isinstance(e, Text)]

    alone = [text(ask(engine, policy)) for policy in policies]
    streams = [engine.submit(Request(prompt=prompt(), max_tokens=20, policy=policy)) for policy in policies]
    assert [text(list(stream)) for stream in streams] == alone


def test_thoughts_end_at_the_closing_tag_that_the_model_writes(tmp_path):
    """The tag is a special token of the tiny tokenizer, and text all the same."""
    model, ids = tiny.model("llama"), [*range(10, 20), 4]
    model.lm_head.weight.zero_()
    model.lm_head.weight[5] = model.model(torch.tensor([ids])).last_hidden_state[
        0, -1
    ]  # closes thoughts, and only here
    model.save_pretrained(tmp_path)
    tiny.add_sidecars(tmp_path)
    with Engine(tmp_path) as engine:
        events = list(engine.submit(Request(prompt=tuple(ids), max_tokens=6)))
    (thought,) = [e for e in events if isinstance(e, Ended) and e.phase == THINKING]
    assert (thought.num_tokens, thought.is_forced) == (1, False)
    assert [e.phase for e in events if isinstance(e, Started)] == [THINKING, ANSWERING]


def test_where_thoughts_begin_is_found_at_the_prompts_end_only(engine):
    question = list(prompt()[:-1])
    n = len(question)
    assert engine._open_tag([*question, 4]) == (n, True)
    assert engine._open_tag([*question, 4, 6, 6]) == (n, True)  # white space behind the tag
    assert engine._open_tag([*question, 4, 6, 5, 6]) == (n, False)  # closed at once
    assert engine._open_tag([*question, 4, 50]) == (n + 2, False)  # a tag that somebody wrote
    assert engine._open_tag([4, *question]) == (n + 1, False)
    assert engine._open_tag(question) == (n, False)
