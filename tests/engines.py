"""llama.cpp, as the wheel xllamacpp brings it, for tests: load a GGUF file, ask it for tokens and log-probabilities."""

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

llama = pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")


@contextmanager
def served(file: Path, *, context: int = 256) -> Iterator[Any]:
    """A llama.cpp server in this process, with everything in float32 that can be."""
    params = llama.CommonParams()
    params.model.path = str(file)
    params.n_ctx, params.n_parallel = context, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = llama.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    params.verbosity = 1
    yield llama.Server(params)


def next_token(server: Any, ids: list[int], num_tokens: int) -> Tensor:
    """Log-probabilities of the token after `ids`: [vocab], of raw logits."""
    asked = {"prompt": ids, "n_predict": 1, "n_probs": num_tokens, "temperature": 0.0, "cache_prompt": False}
    (content,) = server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
    found = torch.full((num_tokens,), float("-inf"))
    for one in content["top_logprobs"]:
        found[one["id"]] = one["logprob"]
    return found


def generated(server: Any, ids: list[int], num_tokens: int) -> str:
    """What follows `ids`, greedily."""
    asked = {"prompt": ids, "n_predict": num_tokens, "temperature": 0.0, "cache_prompt": False}
    return server.handle_completions(asked)["choices"][0]["text"]


def tokenized(server: Any, text: str, *, with_special: bool = False) -> list[int]:
    """The ids of a text; special tokens in the text are always seen. with_special: what starts or ends every text."""
    return _post(server, "tokenize", {"content": text, "add_special": with_special, "parse_special": True})["tokens"]


def templated(server: Any, messages: list[dict[str, str]]) -> str:
    """The prompt that the file's chat template makes."""
    return _post(server, "apply-template", {"messages": messages})["prompt"]


def _post(server: Any, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        f"{server.listening_address}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)
