"""Policies over engines that run: nestling's own server, whose answers must be those of one engine with both members,
and llama.cpp's.
"""

import contextlib
import json
from dataclasses import replace

import httpx
import pytest
from serving import NEST, QUESTIONS, served

from nestling.engine.engine import Engine
from nestling.events import ANSWERING, THINKING, Ended, Finished, Text
from nestling.nest import open_nest
from nestling.policy import Policy
from nestling.relay import Relay
from nestling.request import Request
from nestling.to_gguf import write_gguf

SMALL, LARGE = "45", "100"
POLICIES = [
    Policy(),
    Policy(thinking_token_budget=9),
    Policy(thinking_token_budget=9, closing=" so:"),
    Policy(thinking_token_budget=0),
]


@pytest.fixture(scope="module")
def nest():
    with Engine(NEST) as engine, served(engine) as one, served(engine) as other:
        yield engine, f"{one.url}#{SMALL}", f"{other.url}/v1#{LARGE}"


@pytest.fixture(scope="module")
def relay(nest):
    with Relay(nest[1], nest[2]) as made:
        yield made


def told(events: list) -> tuple:
    """All that does not depend on who ran it: texts, tokens of each phase, the end."""
    texts = tuple(
        "".join(e.text for e in events if isinstance(e, Text) and e.phase == phase) for phase in (THINKING, ANSWERING)
    )
    phases = tuple((e.phase, e.num_tokens) for e in events if isinstance(e, Ended))
    end = events[-1]
    assert isinstance(end, Finished), end
    return texts, phases, end.reason, end.prompt_tokens, end.completion_tokens, end.reasoning_tokens


@pytest.mark.parametrize("policy", POLICIES, ids=["free", "budget", "closing", "none"])
@pytest.mark.parametrize("question", QUESTIONS[:3])
def test_two_servers_give_the_answer_of_one_engine_with_both_members(nest, relay, policy: Policy, question: str):
    engine = nest[0]
    prompt = engine.template.render([{"role": "user", "content": question}])
    assert relay.template.render([{"role": "user", "content": question}]) == prompt
    assert relay.members == (LARGE, SMALL)
    request = Request(prompt=prompt, max_tokens=150, policy=replace(policy, think=SMALL, answer=LARGE))
    assert told(list(relay.submit(request))) == told(list(engine.submit(request)))


def test_a_server_over_two_servers_answers_as_one_over_the_nest(nest, relay):
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 150, "thinking_token_budget": 20}
    with (
        served(relay, think=relay.think, answer=relay.answer) as over,
        served(nest[0], think=SMALL, answer=LARGE) as plain,
    ):
        found = [httpx.post(f"{one.url}/v1/chat/completions", json=body).json() for one in (over, plain)]
        with httpx.stream("POST", f"{over.url}/v1/chat/completions", json=body | {"stream": True}) as answer:
            lines = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    assert found[0]["choices"] == found[1]["choices"]
    message = found[0]["choices"][0]["message"]
    deltas = [line["choices"][0]["delta"] for line in lines]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]


def test_two_llama_cpp_servers_think_and_answer(nest, tmp_path):
    engines = pytest.importorskip("engines")
    opened = open_nest(NEST)
    with contextlib.ExitStack() as stack:
        urls, servers = [], []
        for name in (SMALL, LARGE):
            file = write_gguf(opened, opened.members[name], tmp_path / f"{name}.gguf", gguf_type="f32")
            servers.append(stack.enter_context(engines.served(file, context=512)))
            urls.append(servers[-1].listening_address)
        relay = stack.enter_context(Relay(*urls))
        prompt = relay.template.render([{"role": "user", "content": QUESTIONS[0]}])
        assert prompt == engines.templated(servers[0], [{"role": "user", "content": QUESTIONS[0]}])
        for policy in POLICIES:
            request = Request(
                prompt=prompt, max_tokens=150, policy=replace(policy, think=relay.think, answer=relay.answer)
            )
            events = list(relay.submit(request))
            thoughts, answer = told(events)[0]
            # The same by hand: the thoughts continue the prompt, the answer continues both.
            if policy.thinking_token_budget is None:
                ids = engines.tokenized(servers[0], prompt)
                assert thoughts
                assert engines.generated(servers[0], ids, 150).startswith(thoughts)
            ids = engines.tokenized(servers[1], f"{prompt}{thoughts}</think>")
            assert answer == engines.generated(servers[1], ids, 150)
            assert events[-1].prompt_tokens == len(engines.tokenized(servers[0], prompt))
