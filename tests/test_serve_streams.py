"""Streams and their ends: who hangs up cancels the work, who does not read is not waited for, and a server that stops
says so. Nothing is held afterwards.
"""

import json
import shutil
import socket

import pytest
from serving import NEST, chunks, question, raw_request, served, talk, wait_until

from nestling.engine.engine import Engine
from nestling.engine.settings import EngineSettings

LONG = {"max_tokens": 1000}


@pytest.fixture(scope="module")
def engine():
    with Engine(NEST) as engine:
        yield engine


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """An engine whose model never ends an answer by itself, and is slow."""
    folder = shutil.copytree(NEST, tmp_path_factory.mktemp("nests") / "endless")
    (folder / "generation_config.json").write_text("{}")
    with Engine(folder, settings=EngineSettings(decoder="stock")) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with served(engine) as server:
        yield server


def request(*headers, path="/v1/chat/completions", **fields):
    return raw_request(path, json.dumps(question("7+8+7") | fields).encode(), *headers)


def is_idle(server):
    stats = server.runtime.stats()
    held = (stats.rows_running, stats.rows_waiting, stats.tokens_in_flight, stats.row_bytes)
    return not any(held) and not server.app.hall.deliveries and not server.app.guard.num_requests


def sent_in(server, **fields):
    """A connection on which a request was sent; read the answer from it."""
    peer = socket.create_connection(server.place, timeout=30)
    peer.sendall(request(**fields))
    return peer


def test_hanging_up_at_any_byte_of_a_stream_gives_everything_back(server):
    _, whole = talk(server.place, request("Connection: close", stream=True))
    length = len(whole) + 200  # and the head
    for cut in [*range(0, 400, 7), *range(400, length, max(1, length // 60))]:
        with sent_in(server, stream=True) as peer:
            left = cut
            while left and (part := peer.recv(left)):
                left -= len(part)
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, as a crash sends it
    wait_until(lambda: is_idle(server))
    assert talk(server.place, request("Connection: close", stream=True))[1].count(b"data: ") == whole.count(b"data: ")


def test_hanging_up_in_the_middle_of_a_request_leaves_nothing(server):
    sent = request(stream=True)
    for cut in range(0, len(sent), 5):
        with socket.create_connection(server.place) as peer:
            peer.sendall(sent[:cut])
    wait_until(lambda: is_idle(server))


@pytest.mark.parametrize("is_stream", [True, False])
def test_hanging_up_cancels_the_work(endless, is_stream):
    with served(endless) as server:
        with sent_in(server, stream=is_stream, **LONG) as peer:
            wait_until(lambda: endless.stats().rows_running == 1)
            if is_stream:
                assert peer.recv(10)
        wait_until(lambda: is_idle(server), seconds=3.0)  # uncancelled it runs for many


def test_hanging_up_while_the_prompt_is_read_cancels_it(endless):
    prompt = {"messages": [{"role": "user", "content": "7+" * 400 + "7"}], "max_tokens": 200}
    with served(endless) as server:
        with sent_in(server, stream=True, **prompt):
            wait_until(lambda: endless.stats().tokens_in_flight > 0)
        wait_until(lambda: is_idle(server), seconds=3.0)


def test_a_cancelled_answer_counts_as_aborted(endless):
    with served(endless) as server:
        with sent_in(server, stream=True, **LONG) as peer:
            assert peer.recv(10)
        wait_until(lambda: is_idle(server))
        metrics = server.app.metrics.page().decode()
        assert 'vllm:request_success_total{finished_reason="abort",model_name="nest"} 1.0' in metrics


def test_metrics_count_what_answers_say(engine):
    with served(engine) as server:
        fields = {"elastic": {"think": "45", "answer": "100"}, "thinking_token_budget": 9}
        told = json.loads(talk(server.place, request("Connection: close", **fields))[1])
        page = server.app.metrics.page().decode().splitlines()
        found = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in page if not line.startswith("#")}
        name = 'model_name="nest"'
        usage, (thinking, answering) = told["usage"], told["nestling"]["phases"]
        assert found[f"vllm:prompt_tokens_total{{{name}}}"] == usage["prompt_tokens"]
        assert found[f"vllm:generation_tokens_total{{{name}}}"] == usage["completion_tokens"]
        assert found[f'nestling:tokens_total{{member="45",{name},phase="thinking"}}'] == thinking["tokens"]
        assert found[f'nestling:tokens_total{{member="100",{name},phase="answering"}}'] == answering["tokens"]
        assert found[f"nestling:forced_ends_total{{{name}}}"] == 1
        assert found[f'nestling:reprefilled_tokens_total{{mode="prefill",{name}}}'] == answering["prefilled"] > 9
        seconds = found[f'nestling:handover_seconds_sum{{mode="prefill",{name}}}']
        assert seconds == pytest.approx(answering["handover_seconds"])
        assert found[f"vllm:time_to_first_token_seconds_count{{{name}}}"] == 1


def test_a_reader_that_does_not_read_is_not_waited_for(endless):
    with Engine(endless.nest.folder) as quick, served(quick, write_timeout=0.3, max_choices=64) as server:
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            peer.connect(server.place)
            peer.sendall(request(stream=True, n=64, logprobs=True, top_logprobs=20, **LONG))  # megabytes
            wait_until(lambda: server.app.hall.deliveries)
            wait_until(lambda: is_idle(server), seconds=60)
            assert b'finished_reason="abort"' in server.app.metrics.page()
        assert talk(server.place, request("Connection: close", max_tokens=9))[0] == 200


def test_more_than_is_admitted_is_refused_and_asked_to_come_again(endless):
    narrow = EngineSettings(max_rows=1, max_waiting=1, max_tokens_in_flight=2500, decoder="stock")
    with (
        Engine(endless.nest.folder, settings=narrow) as engine,
        served(engine) as server,
    ):
        with sent_in(server, stream=True, **LONG) as first:
            assert first.recv(10)
            with sent_in(server, stream=True, **LONG):
                wait_until(lambda: engine.stats().rows_waiting == 1)
                status, told = talk(server.place, request("Connection: close"))
                assert status == 429
                assert json.loads(told)["error"]["type"] == "rate_limit_error"
        wait_until(lambda: is_idle(server))
        with sent_in(server, stream=True, **LONG) as first, sent_in(server, stream=True, n=2, **LONG) as second:
            assert first.recv(10)
            assert second.recv(15) == b"HTTP/1.1 429 To"  # one of the two would fit: none is begun
        wait_until(lambda: is_idle(server))


def test_a_server_that_stops_tells_its_streams(endless):
    with served(endless, grace=0.1) as server:
        stream, whole = sent_in(server, stream=True, **LONG), sent_in(server, **LONG)
        with stream, whole:
            assert stream.recv(10)
            wait_until(lambda: server.runtime.stats().rows_running == 2)
            server.server.stop()
            told, rest = stream.makefile("rb").read(), whole.makefile("rb").read()
    assert b"shutting down" in told
    assert b"[DONE]" not in told
    assert rest.startswith(b"HTTP/1.1 503 ")
    assert b"shutting down" in rest


def test_a_short_answer_ends_whole_while_the_server_stops(engine):
    with served(engine, grace=20.0) as server, sent_in(server, stream=True) as peer:
        assert peer.recv(10)
        server.server.stop()
        told = peer.makefile("rb").read()
    assert told.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_thoughts_that_are_not_asked_for_are_not_sent(server):
    _, told = talk(server.place, request("Connection: close", stream=True, include_reasoning=False))
    assert not any(choice["delta"].get("reasoning") for chunk in chunks(told) for choice in chunk["choices"])
