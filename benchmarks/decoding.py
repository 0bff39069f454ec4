"""What each process of benchmarks/decode.py measures: one engine, one member, one number of threads."""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from nestling import hf
from nestling.nest import FULL, Member, open_nest

BATCHES = (1, 16)  # answers at once
PROMPT = 8  # tokens

Answer = Callable[[int], float]  # make answers of so many tokens: seconds, without prefill where that can be told apart


def child(engine: str, threads: int, **given: Any) -> Any:
    """What one process measures."""
    hf.be_quiet()
    torch.set_num_threads(threads)
    if engine == "bandwidth":
        return _bandwidth()
    if engine in ("views", "memory", "switch"):
        return {"views": _views, "memory": _memory, "switch": _switch}[engine](**given)
    run = {"generate": _generate, "loop": _loop, "decoder": _decoder, "engine": _engine, "llama.cpp": _llama}[engine]
    short, long = given["tokens"]
    if engine in ("generate", "loop"):
        long = short + (long - short) // 4  # an order of magnitude slower
    speeds = []
    for batch in BATCHES:
        answer = run(batch, threads, **given)
        answer(short)  # what is made on first use
        seconds = answer(long) if engine in ("loop", "decoder") else answer(long) - answer(short)
        num_tokens = long - 1 if engine in ("loop", "decoder") else long - short
        speeds.append(batch * num_tokens / seconds if seconds > 0 else 0.0)
    return speeds


def _prompts(batch: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(batch)
    return torch.randint(3, vocab, (batch, PROMPT), generator=generator).tolist()


def _generate(batch: int, threads: int, *, folder: str, **rest: Any) -> Answer:
    model: Any = hf.load_model(folder, dtype="bf16")
    ids = torch.tensor(_prompts(batch, model.config.vocab_size))
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}

    def answer(number: int) -> float:
        started = time.perf_counter()
        made = model.generate(ids, max_new_tokens=number, **settings)
        assert made.shape[1] == PROMPT + number
        return time.perf_counter() - started

    return answer


def _loop(batch: int, threads: int, *, folder: str, **rest: Any) -> Answer:
    model: Any = hf.load_model(folder, dtype="bf16")
    ids = torch.tensor(_prompts(batch, model.config.vocab_size))

    @torch.inference_mode()
    def answer(number: int) -> float:
        out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
        started = time.perf_counter()
        for _ in range(number - 1):
            cache = out.get("cache", out.get("past_key_values"))
            out = model(input_ids=out.logits[:, -1:].argmax(-1), cache=cache, use_cache=True)
        return time.perf_counter() - started

    return answer


def _load(nest: str, *sizes: dict[str, int]) -> list[Any]:
    """Members of these sizes on the storage of one nest."""
    from nestling.engine.weights import Weights

    weights = Weights(open_nest(nest))
    return [weights.load(Member(name=str(i), sizes=one)) for i, one in enumerate(sizes)]


def _rows(member: Any, prompts: list[list[int]]) -> tuple[list[Any], list[int]]:
    """Rows that have read a prompt each, and the tokens that follow."""
    from nestling.engine.decode import read
    from nestling.engine.state import RowState

    rows = [RowState(member.layout, member.dtype) for _ in prompts]
    return rows, [int(read(member, row, ids).argmax()) for row, ids in zip(rows, prompts, strict=True)]


def _decoder(batch: int, threads: int, *, nest: str, sizes: dict[str, int], **rest: Any) -> Answer:
    from nestling.engine.lean import LeanDecoder

    (loaded,) = _load(nest, sizes)
    decoder = LeanDecoder(loaded, threads=threads)
    prompts = _prompts(batch, loaded.layout.sizes["vocab"])

    @torch.inference_mode()
    def answer(number: int) -> float:
        rows, tokens = _rows(loaded, prompts)
        started = time.perf_counter()
        for _ in range(number - 1):
            tokens = decoder.step(rows, tokens).argmax(-1).tolist()
        return time.perf_counter() - started

    return answer


def _engine(batch: int, threads: int, *, nest: str, sizes: dict[str, int], **rest: Any) -> Answer:
    from nestling.engine.engine import Engine
    from nestling.engine.settings import EngineSettings
    from nestling.events import Finished
    from nestling.policy import Policy
    from nestling.request import Request

    engine = Engine(nest, settings=EngineSettings(threads=threads, prefix_bytes=0))
    atexit.register(engine.close)  # its thread must not be inside torch when the process ends
    member = "measured" if sizes else FULL
    if sizes:
        engine.add_member(member, sizes)
    prompts = _prompts(batch, engine.nest.layout.sizes["vocab"])

    def answer(number: int) -> float:
        started = time.perf_counter()
        streams = [
            engine.submit(Request(prompt=tuple(ids), max_tokens=number, is_plain=True, policy=Policy(answer=member)))
            for ids in prompts
        ]
        for stream in streams:
            last = list(stream)[-1]
            assert isinstance(last, Finished)
            assert last.completion_tokens == number, last
        return time.perf_counter() - started

    return answer


def _llama(batch: int, threads: int, *, gguf: str, nest: str, **rest: Any) -> Answer:
    xllamacpp: Any = import_module("xllamacpp")

    params = xllamacpp.CommonParams()
    params.model.path = gguf
    params.n_ctx, params.n_parallel = 512 * batch, batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.warmup = params.fit_params = False
    params.verbosity = 1
    server = xllamacpp.Server(params)
    prompts = _prompts(batch, open_nest(nest).layout.sizes["vocab"])

    def ask(ids: list[int], number: int) -> None:
        asked = {"prompt": ids, "n_predict": number, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True}
        answer = server.handle_completions(asked)
        assert answer["usage"]["completion_tokens"] == number, answer["usage"]

    def answer(number: int) -> float:
        asking = [threading.Thread(target=ask, args=(ids, number)) for ids in prompts]
        started = time.perf_counter()
        for one in asking:
            one.start()
        for one in asking:
            one.join()
        return time.perf_counter() - started

    return answer


def _bandwidth() -> float:
    """GB/s of reading, at best: a sum reads one stream, a product of a float32 matrix with a vector several."""
    big, x, best = torch.ones(1 << 17, 1 << 10), torch.ones(1 << 10), float("inf")
    for _ in range(8):
        for read in (lambda: big.sum(), lambda: big @ x):
            started = time.perf_counter()
            read()
            best = min(best, time.perf_counter() - started)
    return big.nbytes / best / 1e9


def _views(*, nest: str, sizes: dict[str, int], folder: str, tokens: list[int], **rest: Any) -> float:
    """Speed of a member's steps from views over that from its own folder, median of alternating rounds."""
    from nestling.engine.lean import LeanDecoder

    loaded = [*_load(nest, sizes), *_load(folder, {})]
    decoders = [LeanDecoder(one, threads=1) for one in loaded]
    prompts = _prompts(1, loaded[0].layout.sizes["vocab"])
    found = []
    for _ in range(15):
        seconds = []
        for one, decoder in zip(loaded, decoders, strict=True):
            rows, following = _rows(one, prompts)
            started = time.perf_counter()
            for _ in range(tokens[1] // 2):
                decoder.step(rows, following)
            seconds.append(time.perf_counter() - started)
        found.append(seconds[1] / seconds[0])
    return sorted(found)[len(found) // 2]


def _memory(*, nest: str, members: list[dict[str, int]], **rest: Any) -> int:
    """Bytes of this process, its share of mapped files included, after each member has decoded."""
    from nestling.engine.lean import LeanDecoder

    for member in (loaded := _load(nest, *members)):
        rows, tokens = _rows(member, _prompts(1, member.layout.sizes["vocab"]))
        LeanDecoder(member).step(rows, tokens)
    lines = Path("/proc/self/smaps_rollup").read_text("utf-8").splitlines()
    assert loaded
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _switch(*, nest: str, members: list[dict[str, int]], **rest: Any) -> float:
    """Seconds of reading a context by one member after another has decoded, over those after the member itself."""
    from nestling.engine.lean import LeanDecoder

    answerer, thinker = _load(nest, *members)
    ids = torch.randint(3, 100, (256,), generator=torch.Generator().manual_seed(0)).tolist()
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(30):
        before = thinker if turn % 2 else answerer
        rows, tokens = _rows(before, [ids[:PROMPT]])
        decoder = LeanDecoder(before, threads=1)
        for _ in range(64):
            tokens = decoder.step(rows, tokens).argmax(-1).tolist()
        started = time.perf_counter()
        _rows(answerer, [ids])
        seconds[before is thinker].append(time.perf_counter() - started)
    middle = {key: sorted(found)[len(found) // 2] for key, found in seconds.items()}
    return middle[True] / middle[False]


if __name__ == "__main__":
    print(json.dumps(child(**json.loads(sys.argv[1]))))
