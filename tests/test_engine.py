"""The engine end to end: its answers are those of stock `generate`, whatever else runs at the same time."""

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from dataclasses import replace

import pytest
import tiny
import torch

from nestling import hf
from nestling.engine.engine import Engine
from nestling.engine.settings import EngineSettings
from nestling.events import ANSWERING, CANCELLED, LENGTH, STOP, Ended, Failed, Finished, Started, Text
from nestling.nest import Member, open_nest, write_nest
from nestling.policy import Policy
from nestling.request import Full, Request, TooLong
from nestling.sampling import Sampling
from nestling.slice import slice as slice_member

LENGTHS = (3, 9, 1, 17, 30)  # of the prompts that run together


@pytest.fixture(scope="session")
def nests(tmp_path_factory):
    """The folder of a nest of a variant, with a smaller member "S" and its slice beside it; to read only."""
    root = tmp_path_factory.mktemp("nests")

    def folder(name):
        to = root / name
        if not to.exists():
            nest = open_nest(tiny.save(name, to, is_chatty=True))
            sizes = tiny.random_sizes(nest.layout, torch.Generator().manual_seed(1))
            members = nest.members | {"S": Member(name="S", sizes=sizes)}
            write_nest(replace(nest, members=members), to)
            slice_member(open_nest(to), members["S"], root / f"{name}-S")
        return to

    return folder


@pytest.fixture(scope="module")
def engine(nests):
    """An engine on a hybrid nest; shared by tests that leave it as it is."""
    with Engine(nests("nemotron_h"), settings=EngineSettings(chunk=16)) as engine:
        yield engine


def prompt(length, seed=0):
    return tuple(tiny.tokens(1, length, seed=seed)[0].tolist())


def plain(ids, member="", **changes):
    return Request(**{"prompt": ids, "max_tokens": 8, "policy": Policy(answer=member), "is_plain": True} | changes)


def generated(stream):
    """The tokens of an answer, and its last event."""
    events = list(stream)
    ids = [token.id for event in events if isinstance(event, Text) for token in event.tokens]
    return ids, events[-1]


def stock(folder, ids, max_tokens=8):
    """What stock `generate` gives, without the token that ends it."""
    model = hf.load_model(folder)
    out = model.generate(torch.tensor([ids]), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0)
    return [i for i in out[0, len(ids) :].tolist() if i != 2]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_greedy_answers_of_a_mixed_batch_are_those_of_stock_generate(name, nests):
    folder = nests(name)
    with Engine(folder) as engine:
        streams = [engine.submit(plain(prompt(n), member)) for n in LENGTHS for member in ("100", "S")]
        found = [generated(stream)[0] for stream in streams]
    folders = [one for _ in LENGTHS for one in (folder, folder.parent / f"{name}-S")]
    lengths = [n for n in LENGTHS for _ in range(2)]
    assert found == [stock(one, prompt(n)) for one, n in zip(folders, lengths, strict=True)]


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_long_prompts_are_read_in_segments_and_answered_as_by_stock_generate(name, nests):
    with Engine(nests(name), settings=EngineSettings(chunk=8)) as engine:
        found = [generated(engine.submit(plain(prompt(n))))[0] for n in (9, 10, 33, 50)]
    assert found == [stock(nests(name), prompt(n)) for n in (9, 10, 33, 50)]


def test_rows_that_join_and_leave_change_no_answer(engine):
    alone = {n: generated(engine.submit(plain(prompt(n), max_tokens=n)))[0] for n in range(2, 24)}
    streams = {n: engine.submit(plain(prompt(n), "S" if n % 3 == 0 else "100", max_tokens=n)) for n in range(2, 24)}
    for n in range(2, 24, 5):
        streams[n].cancel()
    for n, stream in streams.items():
        ids, last = generated(stream)
        if n % 3 == 0:
            continue
        assert ids == alone[n][: len(ids)]
        assert last.reason in ({CANCELLED, LENGTH, STOP} if n % 5 == 2 else {LENGTH, STOP})
        assert len(ids) == len(alone[n]) or n % 5 == 2


def test_a_seed_draws_the_same_answer_whatever_else_runs(engine):
    sampling = Sampling(temperature=1.3, top_p=0.95, top_k=40, min_p=0.01, seed=5)
    alone = generated(engine.submit(plain(prompt(7), sampling=sampling)))[0]
    noise = [engine.submit(plain(prompt(n), sampling=Sampling(temperature=1.0))) for n in range(3, 12)]
    again = generated(engine.submit(plain(prompt(7), sampling=sampling)))[0]
    assert again == alone
    others = {
        tuple(generated(engine.submit(plain(prompt(7), sampling=replace(sampling, seed=i))))[0]) for i in range(8)
    }
    assert len(others) > 1
    for stream in noise:
        generated(stream)


def test_logprobs_are_those_of_the_model(engine, nests):
    events = list(engine.submit(plain(prompt(9), max_tokens=3, logprobs=4)))
    tokens = [token for event in events if isinstance(event, Text) for token in event.tokens]
    model, ids = hf.load_model(nests("nemotron_h")), list(prompt(9))
    for token in tokens:
        expected = tiny.logits(model, torch.tensor([ids]))[0, -1].log_softmax(-1)
        assert abs(token.logprob - expected[token.id].item()) < 1e-4
        assert [i for i, _, _ in token.top] == expected.topk(4).indices.tolist()
        ids.append(token.id)


def test_events_tell_phase_text_and_usage(engine):
    events = list(engine.submit(plain(prompt(9), max_tokens=5)))
    assert events[0] == Started(phase=ANSWERING, member="100")
    *_, ended, finished = events
    assert isinstance(ended, Ended)
    assert (ended.num_tokens, ended.num_prefilled, ended.handover) == (5, 9, "")
    assert finished == Finished(reason=LENGTH, prompt_tokens=9, completion_tokens=5, reasoning_tokens=0)


def test_text_ends_before_a_stop_string_that_is_spread_over_tokens(engine):
    whole = "".join(e.text for e in engine.submit(plain(prompt(9), max_tokens=12)) if isinstance(e, Text))
    stop = whole[4:7]
    events = list(engine.submit(plain(prompt(9), max_tokens=12, stop=("never there", stop))))
    assert "".join(e.text for e in events if isinstance(e, Text)) == whole[: whole.index(stop)]
    assert (events[-1].reason, events[-1].stop) == (STOP, stop)


def test_a_stop_token_ends_an_answer_and_is_no_text(engine):
    ids, _ = generated(engine.submit(plain(prompt(9))))
    events = list(engine.submit(plain(prompt(9), stop_tokens=(ids[3],))))
    first = ids.index(ids[3])
    assert [t.id for e in events if isinstance(e, Text) for t in e.tokens] == ids[:first]
    assert (events[-1].reason, events[-1].completion_tokens) == (STOP, first + 1)


def test_an_event_loop_reads_many_streams(engine):
    async def collect(stream):
        return "".join([event.text async for event in stream if isinstance(event, Text)])

    async def both():
        return await asyncio.gather(*(collect(engine.submit(plain(prompt(n)))) for n in LENGTHS))

    expected = ["".join(e.text for e in engine.submit(plain(prompt(n))) if isinstance(e, Text)) for n in LENGTHS]
    assert asyncio.run(both()) == expected


def test_what_is_not_admitted_is_refused_before_anything_begins(nests):
    settings = EngineSettings(max_rows=1, max_waiting=1, max_tokens_in_flight=200, max_prompt=40)
    with Engine(nests("llama"), settings=settings) as engine:
        with pytest.raises(TooLong, match="has 41 tokens, 40 are"):
            engine.submit(plain(prompt(41)))
        with pytest.raises(TooLong, match="more than the 64"):
            engine.submit(plain(prompt(40), max_tokens=25))
        with pytest.raises(ValueError, match="max_tokens is 0"):
            engine.submit(plain(prompt(4), max_tokens=0))
        with pytest.raises(ValueError, match="token 96"):
            engine.submit(plain((5, 96)))
        with pytest.raises(ValueError, match="no member 'XL'"):
            engine.submit(plain(prompt(4), "XL"))
        with pytest.raises(Full):
            [engine.submit(plain(prompt(10), max_tokens=50)) for _ in range(4)]


def test_memory_of_answers_that_ended_or_were_cancelled_is_given_back(nests):
    # The stock decoder is slow enough for the answer to be seen on its way.
    with Engine(nests("nemotron_h"), settings=EngineSettings(decoder="stock")) as engine:
        generated(engine.submit(plain(prompt(9))))
        stream = engine.submit(plain(prompt(9), max_tokens=50))
        iterator = iter(stream)
        while not isinstance(next(iterator), Text):
            pass
        held = [weakref.ref(answer.state) for answer in engine._scheduler.answers]
        assert held
        stream.cancel()
        list(iterator)
        generated(engine.submit(plain(prompt(3), max_tokens=2)))  # a turn later
        gc.collect()
        assert all(state() is None for state in held)
        assert engine.stats().row_bytes == 0


def test_a_stream_that_nobody_holds_is_cancelled(nests):
    with Engine(nests("nemotron_h"), settings=EngineSettings(max_rows=1)) as engine:
        del [engine.submit(plain(prompt(9), max_tokens=50)) for _ in range(3)][:]
        gc.collect()
        _, last = generated(engine.submit(plain(prompt(9), max_tokens=2)))
        assert last.reason == LENGTH
        assert engine.stats().rows_waiting == 0


def test_logits_that_are_not_numbers_are_an_error_of_that_answer_alone(nests):
    with Engine(nests("llama"), settings=EngineSettings(decoder="stock")) as engine:
        engine._running["S"].loaded.model.get_input_embeddings().weight = torch.nn.Parameter(
            torch.full_like(engine._running["S"].loaded.model.get_input_embeddings().weight, float("nan"))
        )
        broken, sound = engine.submit(plain(prompt(9), "S")), engine.submit(plain(prompt(9)))
        last = list(broken)[-1]
        assert isinstance(last, Failed)
        assert "not finite" in last.message
        assert generated(sound)[1].reason in (LENGTH, STOP)


def test_closing_ends_what_runs_and_what_waits(nests):
    engine = Engine(nests("llama"), settings=EngineSettings(max_rows=2))
    streams = [engine.submit(plain(prompt(9), max_tokens=50)) for _ in range(5)]
    engine.close()
    assert all(isinstance(list(stream)[-1], Finished) for stream in streams)
    with pytest.raises(Full):
        engine.submit(plain(prompt(9)))
    assert "nestling-engine" not in {thread.name for thread in threading.enumerate() if thread is engine._thread}


def test_a_process_that_ends_in_the_middle_of_an_answer_does_not_abort(nests):
    code = f"""
import atexit, os
from nestling.engine.engine import Engine
from nestling.request import Request
atexit.register(lambda: os._exit(7 if engine._thread.is_alive() else 0))  # runs last
engine = Engine({str(nests("nemotron_h"))!r})
stream = engine.submit(Request(prompt=(5, 6, 7), max_tokens=60, is_plain=True))
next(iter(stream))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_member_is_added_while_others_run(nests):
    with Engine(nests("nemotron_h")) as engine:
        running = engine.submit(plain(prompt(9), max_tokens=30))
        before = {name: dict(one.loaded.model.named_parameters()) for name, one in engine._running.items()}
        engine.add_member("XS", {"hidden": 16, "effn": 8})
        assert engine.members == ("100", "S", "XS")
        generated(engine.submit(plain(prompt(9), "XS")))
        generated(running)
        for name, parameters in before.items():
            assert all(p is parameters[n] for n, p in engine._running[name].loaded.model.named_parameters())
