"""The think machine: budgets bind to the token, streams equal whole parses, answers are never empty."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.events import ANSWERING, LENGTH, STOP, THINKING, THINKING_LENGTH, TOOL_CALL
from nestling.policy import Policy
from nestling.think import Done, Force, Machine, Say, Switch, Tags

TAGS = Tags(open="<think>", close="</think>", tool_open="<tool_call>", tool_close="</tool_call>")
PIECES = [TAGS.open, TAGS.close, TAGS.tool_open, TAGS.tool_close, "<", "</", "</thi", "nk>", "<tool", "\n", "x", "{}"]
texts = st.lists(st.sampled_from(PIECES), max_size=12).map("".join)
policies = st.builds(
    Policy,
    thinking_token_budget=st.none() | st.integers(0, 12),
    answer_reserve=st.none() | st.integers(0, 8),
    closing=st.sampled_from(["", " So:"]),
)


def one(text: str) -> int:
    """Every tag and sentence is one token."""
    return 1


def machine(*, is_open: bool = True, max_tokens: int = 1000, measure=one, tags: Tags = TAGS, **policy) -> Machine:
    return Machine(Policy(**policy), tags=tags, max_tokens=max_tokens, is_open=is_open, measure=measure)


def run(machine: Machine, tokens: list[str], *, is_stopped: bool = False) -> list:
    """All that the machine says about the tokens, as many as it lets be drawn."""
    actions = machine.begin()
    for token in tokens:
        if _is_done(actions):
            break
        actions += machine.take(token)
    if is_stopped and not _is_done(actions):
        actions += machine.stop()
    return actions + machine.end()


def _is_done(actions: list) -> bool:
    return any(isinstance(action, Done) for action in actions)


def joined(actions: list) -> list[tuple[str, str]]:
    """(phase, text) of what was said, neighbors of one phase joined; switches part them."""
    said: list[list[str]] = []
    for action in actions:
        if isinstance(action, Switch):
            said.append([action.phase, ""])
        elif isinstance(action, Say):
            if not said or said[-1][0] != action.phase:
                said.append([action.phase, ""])
            said[-1][1] += action.text
    return [(phase, text) for phase, text in said if text]


def content(actions: list, phase: str = ANSWERING) -> str:
    return "".join(action.text for action in actions if isinstance(action, Say) and action.phase == phase)


def forced(actions: list) -> list[str]:
    return [action.text for action in actions if isinstance(action, Force)]


@given(texts, st.lists(st.integers(0, 100)), st.booleans())
def test_a_stream_joined_equals_the_whole_parse_for_every_split(text: str, cuts: list[int], is_open: bool):
    cuts = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    tokens = [text[i:j] for i, j in pairwise(cuts)]
    assert joined(run(machine(is_open=is_open), tokens)) == joined(run(machine(is_open=is_open), [text]))


@given(st.data())
def test_the_split_does_not_matter_for_any_tags(data: st.DataObject):
    letters = st.text("ab", min_size=1, max_size=4)
    names = ("open", "close", "tool_open", "tool_close")
    try:
        tags = Tags(**dict(zip(names, data.draw(st.tuples(letters, letters, letters, letters)), strict=True)))
    except ValueError:
        return  # one is part of another
    tokens = data.draw(st.lists(st.text("ab ", max_size=6), max_size=8))
    is_open = data.draw(st.booleans())
    expected = joined(run(machine(is_open=is_open, tags=tags), ["".join(tokens)]))
    assert joined(run(machine(is_open=is_open, tags=tags), tokens)) == expected


@given(texts, policies, st.booleans(), st.integers(1, 40), st.sampled_from([one, len]))
def test_what_was_said_is_the_parse_of_what_was_drawn_and_forced(text, policy, is_open, max_tokens, measure):
    try:
        streaming = Machine(policy, tags=TAGS, max_tokens=max_tokens, is_open=is_open, measure=measure)
    except ValueError:
        return  # a reserve larger than the answer
    actions, context = streaming.begin(), ""
    context += "".join(forced(actions))
    for token in text:
        if _is_done(actions):
            break
        new = streaming.take(token)
        context += token + "".join(forced(new))
        actions += new
    actions += streaming.end()
    assert joined(actions) == joined(run(machine(is_open=is_open, max_tokens=10**6), [context]))


@given(texts, policies, st.booleans(), st.integers(1, 40), st.sampled_from([one, len]))
def test_no_run_exceeds_its_budget_its_room_or_max_tokens(text, policy, is_open, max_tokens, measure):
    try:
        streaming = Machine(policy, tags=TAGS, max_tokens=max_tokens, is_open=is_open, measure=measure)
    except ValueError:
        return
    budget = policy.thinking_token_budget if policy.thinking_token_budget is not None else max_tokens
    actions, num_drawn = streaming.begin(), 0
    for token in text * 4:
        room = streaming.room
        assert (room > 0) != _is_done(actions)
        if _is_done(actions):
            break
        new = streaming.take(token)
        num_drawn += 1
        assert not _is_done(new) or room == 1 or any(isinstance(action, Switch) for action in new)
        actions += new
    cost = sum(measure(text) for text in forced(actions))
    assert streaming.num_tokens == num_drawn + cost <= max_tokens
    assert streaming.num_thinking <= budget


@pytest.mark.parametrize("budget", range(1, 8))
def test_the_budget_binds_to_the_token(budget: int):
    actions = run(machine(thinking_token_budget=budget), list("abcdefgh"))
    assert content(actions, THINKING) == "abcdefgh"[:budget]
    assert content(actions) == "abcdefgh"[budget:]
    assert forced(actions) == ["</think>"]


def test_a_forced_end_writes_the_closing_sentence_and_then_the_tag():
    actions = run(machine(thinking_token_budget=2, closing="\nI must answer now."), ["a", "b", "c"])
    assert joined(actions) == [(THINKING, "ab\nI must answer now."), (ANSWERING, "c")]
    assert forced(actions) == ["\nI must answer now.</think>"]


def test_thoughts_that_end_in_time_are_not_touched():
    actions = run(machine(thinking_token_budget=3), ["a", "b", "</think>", "c", "d"])
    assert joined(actions) == [(THINKING, "ab"), (ANSWERING, "cd")]
    assert not forced(actions)


def test_a_budget_of_zero_closes_the_thoughts_before_the_first_token():
    starting = machine(thinking_token_budget=0, closing="Enough.")
    assert starting.begin() == [Force("</think>"), Switch(ANSWERING)]
    assert content(run(starting, ["a"])) == "a"


def test_a_budget_of_zero_closes_thoughts_that_the_model_opens():
    actions = run(machine(thinking_token_budget=0, is_open=False), ["<think>", "a", "b"])
    assert actions[:3] == [Switch(THINKING), Force("</think>"), Switch(ANSWERING)]
    assert joined(actions) == [(ANSWERING, "ab")]


@pytest.mark.parametrize(("max_tokens", "reserve", "num_thoughts"), [(16, None, 7), (16, 4, 11), (200, None, 135)])
def test_the_reserve_is_kept_for_the_answer(max_tokens: int, reserve: int | None, num_thoughts: int):
    actions = run(machine(max_tokens=max_tokens, answer_reserve=reserve), ["x"] * 2 * max_tokens)
    assert len(content(actions, THINKING)) == num_thoughts
    assert len(content(actions)) == max_tokens - num_thoughts - 1
    assert actions[-1] == Done(LENGTH)


def test_thoughts_may_fill_everything_without_a_reserve_and_the_reason_says_so():
    actions = run(machine(max_tokens=16, answer_reserve=0), ["x"] * 20)
    assert content(actions, THINKING) == "x" * 16
    assert actions[-1] == Done(THINKING_LENGTH)


def test_a_closing_sentence_that_leaves_no_room_to_think_is_left_out():
    actions = run(machine(max_tokens=16, answer_reserve=4, closing="Much too long.", measure=len), ["x"] * 16)
    assert forced(actions) == ["</think>"]
    assert (content(actions, THINKING), content(actions)) == ("xxxx", "xxxx")


def test_thoughts_that_cannot_be_closed_in_max_tokens_say_so():
    actions = run(machine(max_tokens=6, measure=len), ["x"] * 10)
    assert content(actions, THINKING) == "xxxxxx"
    assert actions[-1] == Done(THINKING_LENGTH)


def test_thoughts_that_begin_again_are_counted_against_the_same_budget():
    script = ["a", "</think>", "b", "<think>", "c", "d", "e", "f"]
    actions = run(machine(thinking_token_budget=3), script)
    assert joined(actions) == [(THINKING, "a"), (ANSWERING, "b"), (THINKING, "c"), (ANSWERING, "def")]
    assert forced(actions) == ["</think>"]


def test_thoughts_that_begin_again_after_a_forced_end_end_at_once():
    actions = run(machine(thinking_token_budget=1, closing="Enough."), ["a", "<think>", "b", "c"])
    assert joined(actions) == [(THINKING, "aEnough."), (ANSWERING, "bc")]
    assert forced(actions) == ["Enough.</think>", "</think>"]


def test_an_orphan_closing_tag_splits_thoughts_if_the_prompt_opened_them():
    assert joined(run(machine(), ["x</think>y"])) == [(THINKING, "x"), (ANSWERING, "y")]


@pytest.mark.parametrize("text", ["x</think>y", "x</think></think>y"])
def test_an_orphan_closing_tag_is_dropped_from_an_answer(text: str):
    assert joined(run(machine(is_open=False), list(text))) == [(ANSWERING, "xy")]


@pytest.mark.parametrize("text", ["<think>a</think>b", "\n<think>a</think>b"])
def test_the_model_may_open_its_thoughts_itself(text: str):
    assert joined(run(machine(is_open=False), list(text))) == [(THINKING, "a"), (ANSWERING, "b")]


def test_an_opening_tag_that_repeats_the_prompts_is_dropped():
    assert joined(run(machine(), ["<think>", "a", "</think>", "b"])) == [(THINKING, "a"), (ANSWERING, "b")]


def test_a_tool_call_inside_thoughts_ends_them():
    actions = run(machine(), ["a", "<tool_call>", "{</think>}", "</tool_call>", "b"])
    assert joined(actions) == [(THINKING, "a"), (TOOL_CALL, "{</think>}"), (ANSWERING, "b")]


def test_nothing_is_forced_inside_a_tool_call():
    actions = run(machine(thinking_token_budget=3), ["a", "<tool_call>", *"{'name': 'add'}", "</tool_call>"])
    assert joined(actions) == [(THINKING, "a"), (TOOL_CALL, "{'name': 'add'}")]
    assert not forced(actions)


def test_a_tool_call_at_the_last_token_of_the_budget_is_not_cut():
    actions = run(machine(thinking_token_budget=2), ["a", "b<tool_call>{", "}", "</tool_call>"])
    assert joined(actions) == [(THINKING, "ab"), (TOOL_CALL, "{}")]


def test_a_tool_call_at_max_tokens_says_length():
    actions = run(machine(max_tokens=4, is_open=False), ["<tool_call>", "{", "1", "2", "3"])
    assert joined(actions) == [(TOOL_CALL, "{12")]
    assert Done(LENGTH) in actions


def test_a_tool_call_without_a_closing_tag_runs_to_the_end():
    tags = Tags(open="[THINK]", close="[/THINK]", tool_open="[TOOL_CALLS]")
    actions = run(machine(tags=tags), ["a", "[/THINK]", "b", "[TOOL_CALLS]", "f", "{}"], is_stopped=True)
    assert joined(actions) == [(THINKING, "a"), (ANSWERING, "b"), (TOOL_CALL, "f{}")]


def test_blank_text_between_a_closing_tag_and_a_tool_call_is_no_answer():
    actions = run(machine(), list("a</think>\n\n<tool_call>{}</tool_call>\n<tool_call>[]</tool_call>"))
    assert joined(actions) == [(THINKING, "a"), (TOOL_CALL, "{}"), (TOOL_CALL, "[]")]


def test_a_token_may_carry_several_tags_and_text():
    actions = run(machine(), ["a</think>b<think>c</think>d<tool_call>{}</tool_call>e"])
    assert [phase for phase, _ in joined(actions)] == [THINKING, ANSWERING, THINKING, ANSWERING, TOOL_CALL, ANSWERING]
    assert [text for _, text in joined(actions)] == ["a", "b", "c", "d", "{}", "e"]


def test_a_tag_that_has_begun_when_the_budget_is_spent_is_completed():
    actions = run(machine(thinking_token_budget=6, measure=len, closing="Enough."), list("a</thixyz"))
    assert forced(actions) == ["nk>"]
    assert joined(actions) == [(THINKING, "a"), (ANSWERING, "xyz")]


def test_text_like_the_beginning_of_a_tag_that_is_one_token_stays_text():
    actions = run(machine(thinking_token_budget=2), ["a", "</thi", "b"])
    assert forced(actions) == ["</think>"]
    assert joined(actions) == [(THINKING, "a</thi"), (ANSWERING, "b")]


@pytest.mark.parametrize("script", [["a"], ["a", "</th"], []])
def test_a_stop_token_inside_thoughts_lets_the_answer_begin(script: list[str]):
    stopping = machine()
    actions = run(stopping, script, is_stopped=True)
    assert forced(actions) == ["</think>"]
    assert stopping.phase == ANSWERING
    assert content(actions, THINKING) == "".join(script)
    assert not _is_done(actions)
    assert stopping.take("b") == [Say(ANSWERING, "b")]
    assert stopping.stop() == [Done(STOP)]


def test_text_that_is_held_back_is_given_at_the_end():
    assert joined(run(machine(is_open=False), list("a</thi"), is_stopped=True)) == [(ANSWERING, "a</thi")]
    assert joined(run(machine(is_open=False), ["\n"], is_stopped=True)) == [(ANSWERING, "\n")]


def test_text_is_not_held_back_longer_than_it_may_be_a_tag():
    streaming = machine()
    assert streaming.take("a <") == [Say(THINKING, "a ")]
    assert streaming.take("b") == [Say(THINKING, "<b")]


def test_a_model_without_tags_only_answers():
    actions = run(machine(tags=Tags(), is_open=False, max_tokens=20), list("<think>a</think>"))
    assert joined(actions) == [(ANSWERING, "<think>a</think>")]


@pytest.mark.parametrize(
    ("tags", "match"),
    [
        ({"open": "<think>"}, "stands alone"),
        ({"tool_close": "</tool>"}, "no tag opens"),
        ({"open": "<t>", "close": "</t>", "tool_open": "<t>call"}, "is part of"),
        ({"open": "<t>", "close": "<t>"}, "is part of"),
    ],
)
def test_tags_that_cannot_be_told_apart_are_refused(tags: dict[str, str], match: str):
    with pytest.raises(ValueError, match=match):
        Tags(**tags)


def test_a_prompt_inside_thoughts_needs_a_tag_that_ends_them():
    with pytest.raises(ValueError, match="no tag is known that closes them"):
        machine(tags=Tags(), is_open=True)


def test_a_closing_sentence_with_a_tag_in_it_is_refused():
    with pytest.raises(ValueError, match="contains the tag '</think>'"):
        machine(closing="Enough.</think>")
