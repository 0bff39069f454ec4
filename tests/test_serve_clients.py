"""The clients that people use, over a real socket: openai's own and LangChain's."""

import openai
import pytest
from langchain_openai import ChatOpenAI
from serving import NEST, served

from nestling.engine.engine import Engine
from nestling.serve.models import ARROW

THOUGHTS, ANSWER = "7+8=7+8=15:15;15+7=5+7=12,1+0+1=2:22", "22"
ASKED = [{"role": "user", "content": "7+8+7"}]
BUDGETS = {
    "vLLM": {"thinking_token_budget": 9},
    "Qwen": {"thinking_budget": 9},
    "llama.cpp": {"thinking_budget_tokens": 9},
    "NIM": {"max_thinking_tokens": 9},
    "Anthropic": {"thinking": {"type": "enabled", "budget_tokens": 9}},
    "SGLang": {"custom_params": {"thinking_budget": 9}},
    "Nestling": {"elastic": {"thinking_token_budget": 9}},
}


@pytest.fixture(scope="module")
def server():
    with Engine(NEST) as engine, served(engine) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def ask(client, model="nest", **extra):
    return client.chat.completions.create(model=model, messages=ASKED, temperature=0, max_tokens=200, extra_body=extra)


def test_openai_lists_the_models(client):
    ids = [model.id for model in client.models.list()]
    assert ids[0] == "nest"
    assert f"nest:25{ARROW}100" in ids
    assert client.models.retrieve("nest:45").owned_by == "nestling"


def test_openai_gets_thoughts_answer_and_usage(client):
    whole = ask(client)
    message = whole.choices[0].message
    assert (message.content, message.reasoning, message.reasoning_content) == (ANSWER, THOUGHTS, THOUGHTS)
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens == len(THOUGHTS) + len(ANSWER) + 2  # two tags end them; a token is a letter
    assert whole.usage.completion_tokens_details.reasoning_tokens == len(THOUGHTS) + 1
    assert [phase["member"] for phase in whole.nestling["phases"]] == ["100", "100"]


@pytest.mark.parametrize("model", ["nest", "nest:45", f"nest:45{ARROW}100", f"25{ARROW}70"])
def test_a_stream_joined_is_the_whole_answer(client, model):
    whole = ask(client, model)
    chunks = list(
        client.chat.completions.create(
            model=model,
            messages=ASKED,
            temperature=0,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert not any(delta.role for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == whole.choices[0].message.reasoning
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    members = model.removeprefix("nest:").split(ARROW)
    told = next(chunk.nestling for chunk in chunks if hasattr(chunk, "nestling"))
    if model != "nest":
        assert [phase["member"] for phase in told["phases"]] == [members[0], members[-1]]


@pytest.mark.parametrize("spelling", BUDGETS)
def test_a_budget_binds_in_every_spelling(client, spelling):
    whole = ask(client, **BUDGETS[spelling])
    assert whole.choices[0].message.reasoning == THOUGHTS[:9]
    assert whole.nestling["phases"][0]["is_forced"]
    assert whole.choices[0].message.content


def test_openai_is_told_what_is_wrong(client):
    with pytest.raises(openai.BadRequestError, match="disagree"):
        ask(client, thinking_budget=3, max_thinking_tokens=4)
    with pytest.raises(openai.BadRequestError, match="'thinking_buget'"):
        ask(client, thinking_buget=3)
    with pytest.raises(openai.BadRequestError, match="Members: 100, 70, 45, 25"):
        ask(client, elastic={"think": "12B"})
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as caught:
        client.chat.completions.create(model="nest", messages=ASKED, max_tokens=10**9)
    assert caught.value.status_code == 413


def test_openai_completes_text_and_token_ids(client, server):
    text = "<|user|>7+8+7<|assistant|><think>"
    ids = server.runtime.encode(text)
    found = [
        client.completions.create(model="nest", prompt=prompt, max_tokens=200, temperature=0).choices
        for prompt in (text, ids, [text, text], [ids, ids])
    ]
    assert {one.text for choices in found for one in choices} == {f"{THOUGHTS}</think>{ANSWER}"}
    assert [len(choices) for choices in found] == [1, 1, 2, 2]
    pieces = client.completions.create(model="nest", prompt=[ids, ids], max_tokens=200, temperature=0, stream=True)
    joined = {0: "", 1: ""}
    for piece in pieces:
        for choice in piece.choices:
            joined[choice.index] += choice.text
    assert set(joined.values()) == {f"{THOUGHTS}</think>{ANSWER}"}


def test_several_answers_to_one_request_have_seeds_of_their_own(client):
    made = [
        client.chat.completions.create(
            model="nest:25", messages=ASKED, max_tokens=100, temperature=1.5, n=3, seed=seed, timeout=30
        )
        for seed in (5, 5, 6)
    ]
    thoughts = [[choice.message.reasoning for choice in one.choices] for one in made]
    assert thoughts[0] == thoughts[1]
    assert len(set(thoughts[0])) > 1
    assert thoughts[0][1] == thoughts[2][0]  # answer i has seed + i


def test_openai_gets_logprobs(client):
    whole = client.chat.completions.create(
        model="nest", messages=ASKED, max_tokens=200, temperature=0, logprobs=True, top_logprobs=3
    )
    told = whole.choices[0].logprobs.content
    assert "".join(one.token for one in told[:2]) == ANSWER
    for one in told:
        assert len(one.top_logprobs) == 3
        assert one.logprob == max(other.logprob for other in one.top_logprobs)  # greedy


@pytest.mark.parametrize("is_stream", [False, True])
def test_langchain_answers(server, is_stream):
    chat = ChatOpenAI(
        model=f"nest:45{ARROW}100", base_url=f"{server.url}/v1", api_key="none", temperature=0, max_retries=0,
        max_completion_tokens=200, stream_usage=True, extra_body={"thinking_token_budget": 64},
    )  # fmt: skip
    if is_stream:
        pieces = list(chat.stream("7+8+7"))
        assert "".join(piece.content for piece in pieces) == ANSWER
        usage = [piece.usage_metadata for piece in pieces if piece.usage_metadata][-1]
    else:
        answer = chat.invoke("7+8+7")
        assert answer.content == ANSWER
        usage = answer.usage_metadata
    assert usage["output_tokens"] == usage.get("output_token_details", {}).get("reasoning", 0) + len(ANSWER) + 1
