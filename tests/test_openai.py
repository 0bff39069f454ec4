"""OpenAI's requests become the runtime's, and events become OpenAI's answers."""

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from test_template import HERMES, TOOLS

from nestling import thinking_budget
from nestling.events import ANSWERING, THINKING, TOOL_CALL, Ended, Finished, Started, Text, Token
from nestling.openai import IGNORED, NEUTRAL, ChatRequest, Served, read_chat, read_completion
from nestling.policy import Policy
from nestling.replies import ChatForm, CompletionForm, parse_calls
from nestling.sampling import Sampling
from nestling.template import Template
from nestling.think import Tags

ECHO = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<think>"
    "{{ '</think>' if enable_thinking == false }}"
)
TAGS = Tags(open="<think>", close="</think>", tool_open="<tool_call>", tool_close="</tool_call>")
HELLO = [{"role": "user", "content": "Hello"}]


def find(model: str) -> Policy:
    """A server with the members S and L, in which L does everything unless told."""
    think, arrow, answer = model.rpartition(":")[2].partition("->")
    if model in ("", "nest"):
        return Policy(closing="Enough.")
    return Policy(think=think, answer=answer if arrow else think, closing="Enough.")


SERVED = Served(template=Template(ECHO), find=find, max_tokens=100)


def chat(**fields) -> object:
    return read_chat({"messages": HELLO} | fields, SERVED)


def complete(**fields) -> object:
    return read_completion({"prompt": "Hello"} | fields, SERVED)


def test_a_chat_becomes_a_request():
    asked = chat(
        model="nest", max_completion_tokens=50, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=3, stop="x",
        stop_token_ids=[7], logprobs=True, top_logprobs=2, stream=True, thinking_token_budget=9,
        elastic={"think": "S", "answer": "L", "handover": "shadow", "answer_reserve": 5, "closing": "So:"},
    )  # fmt: skip
    (request,) = asked.requests
    assert request.prompt == "<user>Hello<think>"
    assert request.max_tokens == 50
    assert request.sampling == Sampling(temperature=0.5, top_p=0.9, min_p=0.1, seed=3)
    expected = Policy(
        think="S", answer="L", handover="shadow", answer_reserve=5, closing="So:", thinking_token_budget=9
    )
    assert request.policy == expected
    assert (request.stop, request.stop_tokens, request.logprobs) == (("x",), (7,), 2)
    assert request.messages == tuple(HELLO)
    assert asked.is_stream
    assert not request.is_plain


def test_what_a_request_does_not_say_is_as_the_server_has_it():
    (request,) = chat().requests
    assert (request.max_tokens, request.sampling, request.logprobs) == (100, Sampling(), None)
    assert request.policy == find("")


@pytest.mark.parametrize(("model", "think", "answer"), [("nest", "", ""), ("S", "S", "S"), ("nest:S->L", "S", "L")])
def test_a_models_id_names_who_thinks_and_who_answers(model: str, think: str, answer: str):
    (request,) = chat(model=model).requests
    assert (request.policy.think, request.policy.answer) == (think, answer)


def test_an_id_and_elastic_that_disagree_are_both_named():
    with pytest.raises(ValueError, match=r"model \('S'\) and elastic.think \('L'\) disagree"):
        chat(model="S", elastic={"think": "L"})


@pytest.mark.parametrize(
    "off", [{"enable_thinking": False}, {"thinking_token_budget": 0}, {"reasoning_effort": "none"}]
)
def test_no_thinking_is_told_to_the_template_too(off: dict):
    (request,) = chat(**off).requests
    assert request.prompt.endswith("<think></think>")
    assert request.policy.thinking_token_budget == 0


def test_an_effort_is_a_share_of_max_tokens():
    (request,) = chat(reasoning_effort="medium", max_tokens=80).requests
    assert request.policy.thinking_token_budget == 40


def test_developers_are_the_system():
    (request,) = chat(messages=[{"role": "developer", "content": "Be brief."}, *HELLO]).requests
    assert request.prompt == "<system>Be brief.<user>Hello<think>"


def test_every_budget_field_is_in_the_schema():
    assert set(thinking_budget.FIELDS) <= set(ChatRequest.model_fields)


@pytest.mark.parametrize("name", IGNORED)
def test_fields_that_change_nothing_are_accepted(name: str):
    assert chat(**{name: "anything"}).requests == chat().requests


@pytest.mark.parametrize("name", NEUTRAL)
def test_fields_that_are_not_supported_are_accepted_only_with_the_value_that_changes_nothing(name: str):
    for value in (None, *NEUTRAL[name]):
        assert chat(**{name: value}).requests == chat().requests
    with pytest.raises(ValueError, match=f"{name} is not supported: leave it out"):
        chat(**{name: 17})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"max_thoughts_budget": 5}, "'max_thoughts_budget' is not known as a thinking budget. Known: thinking_token"),
        ({"temprature": 1}, "no field 'temprature'. Did you mean 'temperature'?"),
        ({"qqqqq": 1}, "no field 'qqqqq'"),
        ({"thinking_budget": 5, "thinking_token_budget": 6}, "disagree"),
        ({"thinking_token_budget": "5"}, "thinking_token_budget: "),
        ({"temperature": "hot"}, "temperature: "),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": True}, "temperature: "),
        ({"max_tokens": 0}, "max_tokens: .*greater"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "disagree"),
        ({"stop": [""]}, "stop: a string of 0 letters"),
        ({"stop": "x" * 100_000}, "stop: a string of 100000 letters"),
        ({"stop": ["x"] * 65}, "stop: 65 strings"),
        ({"n": 9}, "9 answers are asked for at once, at most 8"),
        ({"messages": []}, "messages: "),
        ({"messages": [{"role": "wizard", "content": "x"}]}, r"messages\[0\].role is 'wizard'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "not text"),
        ({"messages": ["hello"]}, r"messages.0: "),
        ({"top_logprobs": 2}, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: "),
        ({"tools": TOOLS}, "does not tell it of tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"elastic": {"thinker": "S"}}, "no 'elastic.thinker'"),
        ({"elastic": {"think": 5}}, "elastic.think is '5'"),
        ({"elastic": {"closing": "x" * 2001}}, "elastic.closing"),
        ({"chat_template_kwargs": {"low_thinking": True}}, "does not read 'low_thinking'"),
        ({"chat_template_kwargs": {"messages": []}}, "cannot be set"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(fields: dict, match: str):
    with pytest.raises(ValueError, match=match):
        chat(**fields)


def test_several_answers_have_seeds_of_their_own():
    assert [one.sampling.seed for one in chat(n=3, seed=5).requests] == [5, 6, 7]
    asked = complete(n=2, seed=5, prompt=["a", "b"])
    assert [(one.prompt, one.sampling.seed) for one in asked.requests] == [("a", 5), ("b", 5), ("a", 6), ("b", 6)]


@pytest.mark.parametrize(
    ("prompt", "expected"), [("a", ["a"]), ([1, 2], [(1, 2)]), (["a", "b"], ["a", "b"]), ([[1], [2]], [(1,), (2,)])]
)
def test_a_prompt_is_text_or_ids_or_several(prompt: object, expected: list):
    assert [one.prompt for one in complete(prompt=prompt).requests] == expected


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], ["a", [1]], [-1], 5, {"a": 1}, None])
def test_any_other_prompt_is_refused(prompt: object):
    with pytest.raises(ValueError, match="prompt"):
        complete(prompt=prompt)


def test_a_completion_is_plain_unless_it_asks_for_phases():
    assert complete(model="S").requests[0].is_plain
    assert complete().requests[0].is_plain
    for asked in ({"thinking_token_budget": 5}, {"elastic": {}}, {"model": "nest:S->L"}, {"reasoning_effort": "low"}):
        assert not complete(**asked).requests[0].is_plain


# Answers.

FINISHED = Finished(reason="stop", prompt_tokens=10, completion_tokens=7, reasoning_tokens=4, cached_tokens=3)
CALL = '{"name": "add", "arguments": {"a": 1}}'


BAD = '{"name": "\\ud800", "arguments": {"a": 1}}'  # half of a surrogate pair, which cannot be sent


def ended(phase: str, member: str = "S") -> Ended:
    return Ended(phase=phase, member=member, num_tokens=4, seconds=0.5)


def story(*said: tuple[str, str], finished: Finished = FINISHED) -> list:
    """The events of an answer that says this."""
    events: list = []
    for phase, text in said:
        events.append(Started(phase=phase, member="S"))
        events += [Text(phase=phase, text=letter) for letter in text]
        events.append(ended(phase))
    return [*events, finished]


def reply(form: ChatForm | CompletionForm, *stories: list) -> tuple[list[dict], dict]:
    chunks = [chunk for i, events in enumerate(stories) for event in events for chunk in form.chunks(i, event)]
    return [*chunks, *form.last_chunks()], form.body()


def text_of(chunks: list[dict], key: str) -> str:
    return "".join(chunk["choices"][0]["delta"].get(key) or "" for chunk in chunks if chunk["choices"])


def test_a_chat_is_streamed_and_whole_the_same():
    form = ChatForm(model="nest", tags=TAGS, has_usage=True, is_stream=True)
    chunks, body = reply(form, story((THINKING, "hm 1"), (ANSWERING, "two")))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == body["usage"]
    message = ChatCompletion.model_validate(body | {"object": "chat.completion"}).choices[0].message
    assert message.content == text_of(chunks, "content") == "two"
    for key in ("reasoning", "reasoning_content"):
        assert getattr(message, key) == text_of(chunks, key) == "hm 1"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 4}
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["usage"]["total_tokens"] == 17
    assert chunks[-2]["choices"][0]["finish_reason"] == body["choices"][0]["finish_reason"] == "stop"
    assert chunks[-2]["nestling"] == body["nestling"]
    assert [one["phase"] for one in body["nestling"]["phases"]] == [THINKING, ANSWERING]


def test_the_reason_says_on_which_phase_the_limit_fell():
    cut = Finished(reason="thinking_length", prompt_tokens=1, completion_tokens=1, reasoning_tokens=1)
    _, body = reply(ChatForm(model="nest"), story((THINKING, "hm"), finished=cut))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["nestling"]["reason"] == "thinking_length"
    assert body["choices"][0]["message"]["content"] == ""


def test_thoughts_may_be_left_out():
    chunks, body = reply(ChatForm(model="nest", has_thoughts=False), story((THINKING, "hm"), (ANSWERING, "two")))
    assert "hm" not in json.dumps([*chunks, body])


def test_a_tool_call_is_one_if_the_request_had_tools():
    form = ChatForm(model="nest", tags=TAGS, has_tools=True)
    chunks, body = reply(form, story((THINKING, "hm"), (TOOL_CALL, CALL), (TOOL_CALL, CALL)))
    calls = body["choices"][0]["message"]["tool_calls"]
    assert [call["function"] for call in calls] == [{"name": "add", "arguments": '{"a": 1}'}] * 2
    assert len({call["id"] for call in calls}) == 2
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", [])]
    assert [call["index"] for call in deltas] == [0, 1]
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    assert body["choices"][0]["message"]["content"] is None
    ChatCompletion.model_validate(body)


@pytest.mark.parametrize(("has_tools", "text"), [(False, CALL), (True, "no json"), (True, '{"nme": 1}'), (True, BAD)])
def test_what_is_no_call_is_content_with_its_tags(has_tools: bool, text: str):
    form = ChatForm(model="nest", tags=TAGS, has_tools=has_tools)
    chunks, body = reply(form, story((ANSWERING, "a"), (TOOL_CALL, text)))
    assert body["choices"][0]["message"]["content"] == f"a<tool_call>{text}</tool_call>" == text_of(chunks, "content")
    assert body["choices"][0]["finish_reason"] == "stop"


@given(st.text() | st.recursive(st.none() | st.integers(), lambda x: st.lists(x) | st.dictionaries(
    st.sampled_from(["name", "arguments", "parameters"]), x | st.text())).map(json.dumps))  # fmt: skip
def test_any_text_is_a_call_or_none(text: str):
    for name, arguments in parse_calls(text) or []:
        assert (name + arguments).encode()


def test_seeds_that_are_no_longer_seeds_are_refused():
    with pytest.raises(ValueError, match="64 bits"):
        chat(n=2, seed=2**63 - 1)


def test_a_prompt_with_several_answers_counts_once():
    form = ChatForm(model="nest", num_choices=2)
    _, body = reply(form, story((ANSWERING, "a")), story((ANSWERING, "b")))
    assert body["usage"]["prompt_tokens"] == 10
    assert body["usage"]["completion_tokens"] == 14
    assert [one["message"]["content"] for one in body["choices"]] == ["a", "b"]
    form = CompletionForm(model="nest", num_choices=2, num_prompts=2)
    _, body = reply(form, story((ANSWERING, "a")), story((ANSWERING, "b")))
    assert body["usage"]["prompt_tokens"] == 20


@pytest.mark.parametrize(
    ("is_open", "said", "expected"),
    [
        (True, [(THINKING, "hm"), (ANSWERING, "two")], "hm</think>two"),
        (True, [(ANSWERING, "two")], "</think>two"),
        (False, [(THINKING, "hm"), (ANSWERING, "two")], "<think>hm</think>two"),
        (False, [(ANSWERING, "two")], "two"),
        (True, [(THINKING, "hm"), (TOOL_CALL, "{}"), (ANSWERING, "x")], "hm<tool_call>{}</tool_call>x"),
        (True, [(THINKING, "a"), (ANSWERING, "b"), (THINKING, "c")], "a</think>b<think>c"),
    ],
)
def test_the_text_of_a_completion_has_its_tags(is_open: bool, said: list, expected: str):
    form = CompletionForm(model="nest", tags=TAGS, is_open=(is_open,))
    chunks, body = reply(form, story(*said))
    assert body["choices"][0]["text"] == expected == "".join(chunk["choices"][0]["text"] for chunk in chunks)
    Completion.model_validate(body)


def test_logprobs_are_told_as_each_endpoint_has_them():
    token = Token(id=5, text="t\u00f6", logprob=-0.5, top=((5, "t\u00f6", -0.5), (6, "b", -1.5)))
    events = [
        Text(phase=ANSWERING, text="t\u00f6", tokens=(token,)),
        Text(phase=ANSWERING, text="t\u00f6", tokens=(token,)),
    ]
    _, body = reply(ChatForm(model="nest", has_logprobs=True), [*events, FINISHED])
    told = ChatCompletion.model_validate(body).choices[0].logprobs.content or []
    assert [(one.token, one.logprob, len(one.top_logprobs)) for one in told] == [("t\u00f6", -0.5, 2)] * 2
    assert bytes(told[0].bytes).decode() == "t\u00f6"
    chunks, body = reply(CompletionForm(model="nest", has_logprobs=True), [*events, FINISHED])
    told = Completion.model_validate(body).choices[0].logprobs
    assert (told.tokens, told.text_offset) == (["t\u00f6"] * 2, [0, 2])
    assert chunks[1]["choices"][0]["logprobs"]["text_offset"] == [2]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from([*ChatRequest.model_fields, *NEUTRAL, *IGNORED, "prompt", "other"])


@given(st.dictionaries(names, anything, max_size=5))
def test_any_body_is_read_or_refused(body: dict):
    with contextlib.suppress(ValueError):
        read_chat({"messages": HELLO} | body, SERVED)
    with contextlib.suppress(ValueError):
        read_completion({"prompt": "x"} | body, SERVED)


def test_tools_reach_the_template():
    served = Served(template=Template(HERMES), find=find)
    (request,) = read_chat({"messages": HELLO, "tools": TOOLS}, served).requests
    assert '"name": "add"' in request.prompt
    (request,) = read_chat({"messages": HELLO, "tools": TOOLS, "tool_choice": "none"}, served).requests
    assert "Tools" not in request.prompt
