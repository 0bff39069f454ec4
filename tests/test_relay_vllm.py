"""Policies over vLLM on the CPU, in the environment that `make vllm` makes."""

import os
import socket
import subprocess
import time
from pathlib import Path

import httpx
import pytest
import test_gguf

from nestling.events import ANSWERING, THINKING, Ended, Finished, Text
from nestling.policy import Policy
from nestling.relay import Relay
from nestling.request import Request
from nestling.template import Template

VLLM = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not VLLM.is_file(), reason="there is no vLLM here: make vllm"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "nest"
    sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 96}
    sizes |= {"max_position_embeddings": 256}
    test_gguf.with_tokenizer(test_gguf.byte_level("smollm"), folder, **sizes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    here = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = (folder.parent / "log").open("w")
    command = [
        VLLM,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(folder),
        *flags,
        "--max-model-len",
        "256",
        "--max-num-seqs",
        "4",
    ]
    process = subprocess.Popen(command, env=here, stdout=log, stderr=log)
    try:
        end = time.monotonic() + 600
        while True:
            assert process.poll() is None, (folder.parent / "log").read_text()[-3000:]
            assert time.monotonic() < end, "vLLM did not start"
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)
        log.close()


def text(events: list, phase: str) -> str:
    return "".join(one.text for one in events if isinstance(one, Text) and one.phase == phase)


def test_vllm_thinks_up_to_its_budget_and_answers_from_prompt_thoughts_and_tag(url: str):
    template = Template("{{ messages[0].content }}<think>", added=("<think>", "</think>"))
    with Relay(url, url, template=template) as relay:
        policy = Policy(think=relay.think, answer=relay.answer, thinking_token_budget=5, closing=" So:")
        events = list(relay.submit(Request(prompt="The lazy dog<think>", max_tokens=60, policy=policy)))
    thoughts = text(events, THINKING)
    assert isinstance(events[-1], Finished), events[-1]
    asked = {"temperature": 0, "add_special_tokens": False, "skip_special_tokens": False}
    by_hand = httpx.post(f"{url}/v1/completions", json=asked | {"prompt": "The lazy dog<think>", "max_tokens": 5})
    assert thoughts == by_hand.json()["choices"][0]["text"] + " So:"
    assert next(one for one in events if isinstance(one, Ended)).is_forced
    room = 60 - next(one for one in events if isinstance(one, Ended)).num_tokens
    prompt = f"The lazy dog<think>{thoughts}</think>"
    by_hand = httpx.post(f"{url}/v1/completions", json=asked | {"prompt": prompt, "max_tokens": room})
    assert text(events, ANSWERING) == by_hand.json()["choices"][0]["text"]


def test_a_chat_goes_through_the_template_of_vllm(url: str):
    with Relay(url, url) as relay:
        assert not relay.has_template
        request = Request(prompt="-", max_tokens=12, messages=({"role": "user", "content": "The lazy dog"},))
        events = list(relay.submit(request))
    assert isinstance(events[-1], Finished), events[-1]
    assert events[-1].prompt_tokens > 5
