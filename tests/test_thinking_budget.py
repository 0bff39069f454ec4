"""Every spelling of a thinking budget means the same; what is not understood is named."""

import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.thinking_budget import EFFORTS, NUMBERS, SHARES, SWITCHES, UNLIMITED, Asked, find, sounds_like_one


def body(*pairs: tuple[str, object]) -> dict:
    """Fields by their dotted names."""
    made: dict = {}
    for name, value in pairs:
        outer, _, inner = name.partition(".")
        if inner:
            made.setdefault(outer, {})[inner] = value
        else:
            made[outer] = value
    return made


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("tokens", [0, 64])
def test_every_spelling_gives_the_same_budget(name: str, tokens: int):
    assert find(body((name, tokens))) == Asked(tokens=tokens, is_set=True)


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_turns_thinking_off(name: str):
    off = "disabled" if name == "thinking.type" else False
    assert find(body((name, off))) == Asked(tokens=0, is_set=True, is_on=False)
    on = "enabled" if name == "thinking.type" else True
    assert find(body((name, on))) == Asked(is_on=True)
    assert find(body((name, on))).budget(100) is None


@pytest.mark.parametrize("name", EFFORTS)
def test_an_effort_is_a_share_of_max_tokens(name: str):
    found = {effort: find(body((name, effort))).budget(1000) for effort in SHARES}
    assert found == {"none": 0, "minimal": 100, "low": 200, "medium": 500, "high": 800, "xhigh": None, "max": None}


@pytest.mark.parametrize("name", NUMBERS)
def test_no_limit_is_spelled_minus_one_where_its_server_spells_it_so(name: str):
    if name in UNLIMITED:
        assert find(body((name, -1))) == Asked(is_set=True)
    else:
        with pytest.raises(ValueError, match=f"{name} is -1: expected a whole number"):
            find(body((name, -1)))


@given(st.lists(st.tuples(st.sampled_from(sorted(NUMBERS)), st.integers(0, 2)), min_size=1, max_size=4))
def test_spellings_that_agree_are_one_and_those_that_disagree_are_both_named(pairs: list):
    told = dict(pairs)
    if len(set(told.values())) == 1:
        assert find(body(*pairs)).tokens == next(iter(told.values()))
    else:
        with pytest.raises(ValueError, match="disagree") as refused:
            find(body(*pairs))
        named = [rf"(?<![\w.]){re.escape(name)} \({value}\)" for name, value in told.items()]
        assert sum(bool(re.search(one, str(refused.value))) for one in named) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("enable_thinking", False), ("thinking_token_budget", 8)),
        (("enable_thinking", True), ("thinking_token_budget", 0)),
        (("chat_template_kwargs.enable_thinking", False), ("reasoning_effort", "low")),
        (("reasoning_effort", "none"), ("thinking_budget", 5)),
        (("reasoning_effort", "low"), ("reasoning.effort", "high")),
        (("thinking.type", "disabled"), ("thinking.budget_tokens", 5)),
    ],
)
def test_a_switch_and_a_budget_that_disagree_are_both_named(one: tuple, other: tuple):
    with pytest.raises(ValueError, match="disagree") as refused:
        find(body(one, other))
    assert one[0] in str(refused.value)
    assert other[0] in str(refused.value)


def test_a_number_beside_an_effort_wins():
    assert find(body(("reasoning_effort", "low"), ("thinking_token_budget", 7))).budget(1000) == 7


def test_nothing_said_is_no_limit():
    asked = find({"model": "x", "thinking": None, "reasoning_effort": None})
    assert asked == Asked()
    assert not asked.says


@pytest.mark.parametrize(
    ("told", "match"),
    [
        ({"nvext": {"max_thinking": 5}}, "'nvext.max_thinking' is not known"),
        ({"custom_params": {"budget": 5}}, "custom_params"),
        ({"thinking": True}, "thinking is True: expected an object"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type is 'sometimes': expected enabled"),
        ({"thinking_token_budget": True}, "whole number"),
        ({"thinking_token_budget": 1.5}, "whole number"),
        ({"thinking_token_budget": "5"}, "whole number"),
        ({"enable_thinking": 1}, "true or false"),
        ({"reasoning_effort": "huge"}, "expected one of none, minimal"),
    ],
)
def test_what_is_not_understood_is_named(told: dict, match: str):
    with pytest.raises(ValueError, match=match):
        find(told)


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3)
objects = st.dictionaries(st.sampled_from(["type", "effort", "x"]), leaves, max_size=2)
fields = st.sampled_from(["thinking", "nvext", "reasoning", "enable_thinking", "thinking_budget"])


@given(st.dictionaries(fields, leaves | objects | st.lists(leaves, max_size=2)))
def test_any_json_is_read_or_refused(told: dict):
    with contextlib.suppress(ValueError):
        found = find(told)
        assert found.tokens is None or found.tokens >= 0


def test_unknown_names_that_sound_like_budgets_are_known():
    assert sounds_like_one("maxReasoningTokens")
    assert not sounds_like_one("user")
