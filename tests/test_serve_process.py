"""`nestling serve` as a process, on a nest and over servers: it says where it is, answers, and stops when told."""

import json
import signal
import subprocess
import sys
from pathlib import Path

from serving import NEST, chunks, question, raw_request, served, talk

from nestling.engine.engine import Engine
from nestling.relay import Relay

ROOT = Path(__file__).parents[1]
ASKED = raw_request("/v1/chat/completions", json.dumps(question("7+8+7")).encode(), "Connection: close")


def test_a_process_says_where_it_is_answers_and_stops_with_success_when_told():
    command = [sys.executable, "-m", "nestling", "serve", "--port", "0", "--think", "45", "--name", "mine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        line = process.stdout.readline()
        assert line.startswith("serving mine (100, 70, 45, 25) at http://127.0.0.1:")
        host, _, port = line.strip().rpartition("/")[2].partition(":")
        status, told = talk((host, int(port)), ASKED.replace(b'"model": "nest"', b'"model": "mine"'))
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert status == 200
    assert [phase["member"] for phase in json.loads(told)["nestling"]["phases"]] == ["45", "100"]
    assert (process.returncode, out, err) == (0, "", "")


def test_servers_over_servers_answer_as_one_engine_does():
    with (
        Engine(NEST) as engine,
        served(engine) as below,
        Relay(f"{below.url}#nest:45", f"{below.url}#nest:100") as relay,
        served(relay, think=relay.think, answer=relay.answer) as above,
    ):
        asked = question("35*58", thinking_token_budget=64, elastic={"think": "45", "answer": "100"})
        raw = raw_request("/v1/chat/completions", json.dumps(asked).encode(), "Connection: close")
        alone = json.loads(talk(below.place, raw)[1])
        asked = question("35*58", thinking_token_budget=64, stream=True)
        raw = raw_request("/v1/chat/completions", json.dumps(asked).encode(), "Connection: close")
        told = chunks(talk(above.place, raw)[1])
        models = json.loads(talk(above.place, raw_request("/v1/models", b"", "Connection: close", method="GET"))[1])
    deltas = [choice["delta"] for chunk in told for choice in chunk["choices"]]
    message = alone["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]
    assert models["data"][0]["nestling"]["handovers"] == ["prefill"]
