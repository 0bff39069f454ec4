"""Policies over other engines: real llama.cpp servers, and scripted ones that misbehave as real ones do."""

import asyncio
import contextlib
import socket
import time
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import END, Reply, chatted, engine, event, said

from nestling.events import ANSWERING, THINKING, Ended, Failed, Finished, Started, Text
from nestling.policy import Policy
from nestling.relay import Relay
from nestling.request import Full, Request
from nestling.sampling import Sampling
from nestling.template import Template
from nestling.think import Tags
from nestling.upstream import Broken, SseDecoder, UpstreamSettings, parse_url, read_piece

QUICK = UpstreamSettings(retries=3, backoff=0.01, max_wait=0.05, read_timeout=0.4, connect_timeout=2)
TAGS = Tags(open="<think>", close="</think>")
TEMPLATE = Template("{{ messages[0].content }}<think>", tags=TAGS)


@contextlib.contextmanager
def relay(think, answer, settings: UpstreamSettings = QUICK, template: Template | None = TEMPLATE, **options):
    with Relay(think.url, answer.url, settings=settings, template=template, **options) as made:
        yield made


def ask(made: Relay, prompt: str = "Q<think>", **fields) -> list:
    policy = fields.pop("policy", Policy(think=made.think, answer=made.answer))
    return list(made.submit(Request(prompt=prompt, max_tokens=fields.pop("max_tokens", 64), policy=policy, **fields)))


def text(events: list, phase: str) -> str:
    return "".join(one.text for one in events if isinstance(one, Text) and one.phase == phase)


def test_one_engine_thinks_and_another_answers_from_its_thoughts():
    used = {"prompt_tokens": 5, "completion_tokens": 4}
    with (
        engine(said("h", "m", "m", usage=used)) as small,
        engine(said("t", "wo")) as large,
        relay(small, large) as made,
    ):
        events = ask(made, stop=("X",), sampling=Sampling(temperature=0.5, top_k=3, seed=1))
        (first,), (second,) = small.asked, large.asked
    assert (text(events, THINKING), text(events, ANSWERING)) == ("hmm", "two")
    assert (first["path"], first["prompt"], first["stop"]) == ("/v1/completions", "Q<think>", ["</think>"])
    assert (second["prompt"], second["stop"]) == ("Q<think>hmm</think>", ["X"])
    assert (first["temperature"], first["top_k"], first["seed"]) == (0.5, 3, 1)
    assert first["max_tokens"] == 64 - 32 - 1
    assert second["max_tokens"] == 64 - 4
    kinds = [type(one) for one in events if not isinstance(one, Text)]
    assert kinds == [Started, Ended, Started, Ended, Finished]
    thought, answered = (one for one in events if isinstance(one, Ended))
    assert (thought.member, thought.num_tokens, thought.num_prefilled) == ("think", 4, 5)
    assert (answered.member, answered.handover) == ("answer", "prefill")
    finished = events[-1]
    assert (finished.reason, finished.prompt_tokens, finished.reasoning_tokens) == ("stop", 5, 4)
    assert finished.completion_tokens == 6


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": 5, "completion_tokens": 3}])
def test_the_budget_binds_and_the_closing_sentence_is_sent_on(usage: dict | None):
    # Three tokens in two pieces: the engine itself counts to the budget.
    with (
        engine(said("ab", "c", reason="length", usage=usage)) as small,
        engine(said("two")) as large,
        relay(small, large) as made,
    ):
        policy = Policy(think=made.think, answer=made.answer, thinking_token_budget=3, closing=" So:")
        events = ask(made, policy=policy)
    assert small.asked[0]["max_tokens"] == 3
    assert large.asked[0]["prompt"] == "Q<think>abc So:</think>"
    assert text(events, THINKING) == "abc So:"
    assert next(one for one in events if isinstance(one, Ended)).is_forced


def test_without_a_budget_the_thinking_engine_is_never_asked():
    with engine(said("x")) as small, engine(said("two")) as large, relay(small, large) as made:
        events = ask(made, policy=Policy(think=made.think, answer=made.answer, thinking_token_budget=0))
    assert not small.asked
    assert large.asked[0]["prompt"] == "Q<think></think>"
    assert text(events, ANSWERING) == "two"


def test_an_engine_that_shows_its_tags_is_understood_too():
    with (
        engine(said("hm", "m</th", "ink>", "more of it")) as small,
        engine(said("two")) as large,
        relay(small, large) as made,
    ):
        events = ask(made)
    assert (text(events, THINKING), text(events, ANSWERING)) == ("hmm", "two")
    assert large.asked[0]["prompt"] == "Q<think>hmm</think>"


def test_thoughts_that_the_model_opens_go_to_the_thinking_engine():
    with engine(said("hm")) as small, engine(said("<think>", "..."), said("two")) as large, relay(small, large) as made:
        events = ask(made, prompt="Q")
    assert small.asked[0]["prompt"] == "Q<think>"
    assert large.asked[1]["prompt"] == "Q<think>hm</think>"
    assert (text(events, THINKING), text(events, ANSWERING)) == ("hm", "two")


def test_the_limit_of_the_answer_is_its_reason():
    with engine(said("hm")) as small, engine(said("two", reason="length")) as large, relay(small, large) as made:
        assert ask(made)[-1].reason == "length"


def test_a_plain_request_is_one_call_and_tags_are_text():
    with engine(said("a</think>b")) as small, engine(said("a</think>b")) as large, relay(small, large) as made:
        events = ask(made, prompt=(1, 2), is_plain=True)
        assert text(events, ANSWERING) == "a</think>b"
        assert large.asked[0]["prompt"] == [1, 2]
        assert not small.asked


def test_engines_that_only_chat_get_the_thoughts_as_an_answer_that_has_begun():
    hello = ({"role": "user", "content": "Q"},)
    thinking = chatted(
        {"role": "assistant"}, {"reasoning_content": "hm"}, {"reasoning_content": "m"}, {"content": "no"}
    )
    with (
        engine(thinking) as small,
        engine(chatted({"content": "two"}), owner="sglang") as large,
        relay(small, large, template=None) as made,
    ):
        assert not made.has_template
        events = ask(made, prompt="-", messages=hello)
    assert (text(events, THINKING), text(events, ANSWERING)) == ("hmm", "two")
    assert small.asked[0]["path"] == "/v1/chat/completions"
    assert small.asked[0]["messages"] == [*hello]
    assert large.asked[0]["messages"] == [*hello, {"role": "assistant", "content": "<think>hmm</think>"}]
    assert large.asked[0]["continue_final_message"] is True


# Engines that misbehave.


def failure(events: list) -> Failed:
    assert isinstance(events[-1], Failed)
    assert not any(isinstance(one, Finished) for one in events)
    return events[-1]


@pytest.mark.parametrize("ends", ["close", "abort"])
@pytest.mark.parametrize("sent", [0, 1, 2])
def test_an_engine_that_dies_in_the_middle_is_an_error_and_never_an_answer(ends: str, sent: int):
    cut = Reply(said("a", "b", "c")[:sent], ends=ends)
    with engine(said("hm")) as small, engine(cut) as large, relay(small, large) as made:
        events = ask(made)
        failed = failure(events)
    assert failed.status == 502
    assert "in the middle" in failed.message
    assert text(events, ANSWERING) == "ab"[:sent]
    assert len(large.asked) == 1


def test_an_error_in_the_stream_is_told():
    broken = [event(choices=[{"index": 0, "text": "a"}]), event(error={"message": "out of memory"})]
    with engine(broken) as small, engine(said("x")) as large, relay(small, large) as made:
        assert "out of memory" in failure(ask(made)).message


@pytest.mark.parametrize("junk", [b"data: no json\n\n", b"data: 5\n\n", b'data: {"a": 1}\n\n', b"\xff\xfe\n\n"])
def test_what_is_no_stream_is_an_error(junk: bytes):
    with engine([junk]) as small, engine(said("x")) as large, relay(small, large) as made:
        assert failure(ask(made)).status == 502


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_engine_is_asked_again(status: int):
    busy = Reply([b"{}"], status=status, headers={"Retry-After": "0"})
    with engine(busy, busy, said("hm")) as small, engine(said("two")) as large, relay(small, large) as made:
        assert text(ask(made), ANSWERING) == "two"
        assert len(small.asked) == 3


def test_an_engine_that_stays_busy_is_told():
    busy = Reply([b'{"error": {"message": "queue is full"}}'], status=429)
    with engine(busy) as small, engine(said("two")) as large, relay(small, large) as made:
        failed = failure(ask(made))
        assert (failed.status, len(small.asked)) == (429, QUICK.retries + 1)
    assert "queue is full" in failed.message


@pytest.mark.parametrize(("status", "told"), [(400, 400), (401, 502), (404, 502), (500, 502)])
def test_a_refusal_is_not_tried_again(status: int, told: int):
    refused = Reply([b'{"error": {"message": "no such thing"}}'], status=status)
    with engine(refused) as small, engine(said("two")) as large, relay(small, large) as made:
        failed = failure(ask(made))
        assert len(small.asked) == 1
    assert failed.status == told
    assert "no such thing" in failed.message


def test_an_engine_that_says_nothing_more_is_given_up():
    with engine(Reply(said("a")[:1], ends="hang")) as small, engine(said("x")) as large, relay(small, large) as made:
        failed = failure(ask(made))
    assert failed.status == 504
    assert "0.4 seconds" in failed.message


def test_an_engine_that_cannot_be_reached_is_an_error_at_once():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # nobody listens
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ValueError, match="cannot be reached"):
            Relay(url, url, settings=QUICK)


def test_an_engine_that_went_away_is_an_error():
    with engine(said("two")) as large, engine(said("x")) as small:
        made = Relay(small.url, large.url, settings=QUICK, template=TEMPLATE)
    with made:
        assert failure(ask(made)).status == 503


def test_cancelling_closes_the_connection():
    patient = UpstreamSettings(read_timeout=30)
    with (
        engine(Reply(said("a")[:1], ends="hang")) as small,
        engine(said("x")) as large,
        relay(small, large, settings=patient) as made,
    ):
        stream = made.submit(Request(prompt="Q<think>", max_tokens=64))
        events = iter(stream)
        seen = [next(events), next(events)]
        assert isinstance(seen[1], Text)
        stream.cancel()
        rest = list(events)
        assert rest[-1].reason == "cancelled"
        assert small.gone.wait(5)


def test_an_answer_that_is_cancelled_before_it_begins_ends():
    with engine(said("x")) as small, relay(small, small) as made:
        for _ in range(20):
            stream = made.submit(Request(prompt="Q<think>", max_tokens=64))
            stream.cancel()
            assert isinstance(list(stream)[-1], Finished)


def test_closing_ends_what_runs():
    with engine(Reply(said("a")[:1], ends="hang")) as small:
        made = Relay(small.url, small.url, settings=UpstreamSettings(), template=TEMPLATE)
        stream = made.submit(Request(prompt="Q<think>", max_tokens=64))
        made.close()
        assert list(stream)[-1].reason == "cancelled"
        with pytest.raises(Full):
            made.submit(Request(prompt="Q", max_tokens=4))


def test_a_stream_may_be_read_in_an_event_loop():
    async def read(made: Relay) -> list:
        return [one async for one in made.submit(Request(prompt="Q<think>", max_tokens=64))]

    with engine(said("hm")) as small, engine(said("two")) as large, relay(small, large) as made:
        assert text(asyncio.run(read(made)), ANSWERING) == "two"


def test_many_answers_at_once_do_not_mix():
    with engine(said("hm")) as small, engine(said("two")) as large, relay(small, large) as made:
        streams = [made.submit(Request(prompt=f"{i}<think>", max_tokens=64)) for i in range(30)]
        assert all(text(list(stream), ANSWERING) == "two" for stream in streams)
        assert sorted(one["prompt"] for one in large.asked) == sorted(f"{i}<think>hm</think>" for i in range(30))


def test_no_more_are_admitted_than_may_run():
    with engine(Reply(ends="hang")) as small, relay(small, small, max_running=2) as made:
        held = [made.submit(Request(prompt="Q", max_tokens=4)) for _ in range(2)]
        with pytest.raises(Full):
            made.submit(Request(prompt="Q", max_tokens=4))
        held[0].cancel()
        list(held[0])
        end = time.monotonic() + 5
        while time.monotonic() < end:
            with contextlib.suppress(Full):
                made.submit(Request(prompt="Q", max_tokens=4)).cancel()
                break
        else:
            pytest.fail("no place became free")


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"policy": Policy(think="M")}, "no member 'M'"),
        ({"policy": Policy(handover="shadow")}, "needs both members in one engine"),
        ({"logprobs": 1}, "logprobs"),
        ({"prompt": (1, 2)}, "token ids"),
        ({"sampling": Sampling(temperature=-1)}, "temperature"),
        ({"policy": Policy(answer_reserve=100)}, "answer_reserve"),
    ],
)
def test_what_cannot_be_done_is_refused_before_it_begins(fields: dict, match: str):
    with engine(said("x")) as small, relay(small, small) as made, pytest.raises(ValueError, match=match):
        ask(made, **fields)
    assert not small.asked


@pytest.mark.parametrize("url", ["", "localhost:8000", "file:///etc/passwd", "http://", "http://a b", "ftp://x"])
def test_what_is_no_url_of_an_engine_is_refused(url: str):
    with pytest.raises(ValueError, match="is no URL"):
        parse_url(url)


def test_an_engines_key_is_sent():
    with engine(said("x")) as small, relay(small, small, settings=UpstreamSettings(key="secret")) as made:
        ask(made)
    assert "authorization: bearer secret" in small.asked[0]["head"].lower()


@given(st.lists(st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\n\r"), max_size=5)),
       st.lists(st.integers(0, 200), max_size=8), st.sampled_from([b"\n", b"\r\n"]))  # fmt: skip
def test_events_do_not_depend_on_how_bytes_are_cut(texts: list, cuts: list, line: bytes):
    raw = b"".join(b"data: " + text.encode() + line + line for text in texts)
    decoder = SseDecoder()
    places = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    found = [one for i, j in pairwise(places) for one in decoder.add(raw[i:j])]
    assert found == texts


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["text", "delta", "content", "finish_reason", "stop_reason"]), inner, max_size=3
        )
    ),
)


@given(st.dictionaries(st.sampled_from(["choices", "usage", "error", "id"]), anything))
def test_any_chunk_is_read_or_an_error(told: dict):
    with contextlib.suppress(Broken):
        piece = read_piece(told)
        assert piece.reason in ("", "stop", "length")
        assert (piece.text + piece.thoughts + piece.stop).encode() is not None


def test_half_of_a_surrogate_pair_is_not_sent_on():
    assert read_piece({"choices": [{"text": "a\ud83d"}]}).text == "a?"


@pytest.mark.parametrize("count", [-5, 0, 10**9])
def test_an_engine_that_miscounts_changes_no_text(count: int):
    used = {"prompt_tokens": count, "completion_tokens": count}
    with (
        engine(said("hm", usage=used)) as small,
        engine(said("t", "wo", usage=used)) as large,
        relay(small, large) as made,
    ):
        events = ask(made)
    assert (text(events, THINKING), text(events, ANSWERING)) == ("hm", "two")
    assert 0 < events[-1].completion_tokens <= 64


def test_a_done_without_a_reason_is_no_end():
    with engine([said("a")[0], END]) as small, relay(small, small) as made:
        assert "in the middle" in failure(ask(made)).message
