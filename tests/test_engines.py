"""Members in the engines that people run: cut from a nest, loaded by nothing but the engine, compared with stock
transformers.

The nests are the reasoner that ships with the package and, for a dense model with a real vocabulary, SmolLM2 as
examples/smollm2.sh builds it; without that folder a small Llama with the same traits stands in. vLLM runs in an
environment of its own, which `make vllm` makes: it wants an older transformers.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import test_gguf
import tiny
import torch

from nestling import hf
from nestling.demo import reasoner
from nestling.nest import Member, open_nest
from nestling.slice import slice as slice_member
from nestling.to_gguf import write_gguf

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
SMOLLM2 = ROOT / "runs" / "smollm2"
SMALLEST = {"hidden": 96, "q": 2, "mamba": 2, "expert": 6, "effn": 64, "sffn": 96}  # of the reasoner, untrained

# Log-probabilities of the prompt's tokens and a greedy answer, from vLLM, as JSON on the last line.
RUN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams

folder, ids = sys.argv[1], json.loads(sys.argv[2])
model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, max_num_seqs=1, seed=0)
asked = SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=0, ignore_eos=True)
(found,) = model.generate([{"prompt_token_ids": ids}], asked)
told = [one[token].logprob for token, one in zip(ids[1:], found.prompt_logprobs[1:], strict=True)]
print(json.dumps({"prompt": told, "answer": list(found.outputs[0].token_ids)}))
"""


@pytest.fixture(scope="module", params=["reasoner", "llama"])
def member(request, tmp_path_factory):
    """A nest, one of its members and a prompt's ids."""
    if request.param == "reasoner":
        nest, one = open_nest(reasoner()), Member(name="S", sizes=SMALLEST)
        text = "<|user|>What is 12 + 34?<|assistant|><think>"
    elif (SMOLLM2 / "nest" / "nest.json").is_file():
        nest, text = open_nest(SMOLLM2 / "nest"), "Rivers run to the"
        one = min(nest.members.values(), key=lambda one: nest.cost(one).parameters)
    else:
        # The traits of SmolLM2 at a hundredth of its size: tied embeddings, grouped heads, its split into words.
        folder = tmp_path_factory.mktemp("llama") / "nest"
        sizes = {"hidden_size": 128, "head_dim": 32, "num_attention_heads": 4, "intermediate_size": 96}
        test_gguf.with_tokenizer(test_gguf.byte_level("smollm"), folder, **sizes)
        nest, one = open_nest(folder), Member(name="S", sizes={"ffn": 64, "hidden": 96, "q": 1})
        text = "The lazy dog"
    return nest, one, hf.load_tokenizer(nest.folder)(text)["input_ids"]


def expected(folder, ids):
    """Log-probabilities after every token of ids, [time, vocab], and twelve greedy tokens, from stock transformers."""
    model = hf.load_model(folder)
    x = torch.tensor([ids])
    answer = model.generate(x, attention_mask=torch.ones_like(x), max_new_tokens=12, do_sample=False, eos_token_id=None)
    return torch.log_softmax(tiny.logits(model, x)[0].float(), -1), answer[0, len(ids) :].tolist()


def compare_with_vllm(folder, ids, table, answer):
    """Log-probabilities of the prompt's own tokens, and the greedy answer."""
    # In one process, so that an error is seen here; 1 GiB of cache instead of a share of all memory.
    here = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    run = subprocess.run([VLLM, "-c", RUN_VLLM, str(folder), json.dumps(ids)], capture_output=True, text=True, env=here)
    assert run.returncode == 0, run.stderr[-3000:]
    (line,) = (line for line in run.stdout.splitlines() if line.startswith('{"prompt"'))
    found = json.loads(line)
    told = table[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    assert found["prompt"] == pytest.approx(told.tolist(), abs=2e-3)
    assert found["answer"] == answer


def test_a_member_loads_in_stock_transformers_and_answers(member, tmp_path):
    nest, one, ids = member
    folder = slice_member(nest, one, tmp_path / "out")
    table, answer = expected(folder, ids)
    assert table.isfinite().all()
    assert len(answer) == 12
    assert hf.load_tokenizer(folder).decode(answer)


def test_a_member_as_gguf_gives_llama_cpp_the_log_probabilities_of_transformers(member, tmp_path):
    import engines

    nest, one, ids = member
    file = write_gguf(nest, one, tmp_path / "out.gguf", gguf_type="f32")
    folder = slice_member(nest, one, tmp_path / "out")
    table, answer = expected(folder, ids)
    tokenizer = hf.load_tokenizer(folder)
    with engines.served(file) as server:
        for n in (1, len(ids) // 2, len(ids)):
            found = engines.next_token(server, ids[:n], table.shape[-1])
            assert (found - table[n - 1]).abs().max() < 2e-3
        assert engines.tokenized(server, tokenizer.decode(ids)) == ids
        assert engines.generated(server, ids, 12) == tokenizer.decode(answer, skip_special_tokens=True)


def test_a_member_as_q8_0_stays_within_two_hundredths_of_a_nat_of_transformers(member, tmp_path):
    import engines

    nest, one, ids = member
    file = write_gguf(nest, one, tmp_path / "out.gguf", gguf_type="q8_0")
    table, _ = expected(slice_member(nest, one, tmp_path / "out"), ids)
    with engines.served(file) as server:
        # Kullback-Leibler, as a rounded router may choose another expert, which moves unlikely tokens a lot.
        for n in (1, len(ids) // 2, len(ids)):
            found = engines.next_token(server, ids[:n], table.shape[-1])
            assert (table[n - 1].exp() * (table[n - 1] - found)).sum() < 0.02


def test_a_dense_member_gives_vllm_the_log_probabilities_and_the_answer_of_transformers(member, tmp_path):
    nest, one, ids = member
    if not VLLM.is_file():
        pytest.skip("vLLM has an environment of its own, which is not there: make vllm")
    if "moe" in nest.layout.kinds:
        pytest.skip("vLLM runs nemotron_h with experts on GPUs only")
    folder = slice_member(nest, one, tmp_path / "out")
    table, answer = expected(folder, ids)
    compare_with_vllm(folder, ids, table, answer)


def test_a_dense_hybrid_member_runs_in_vllm(tmp_path):
    if not VLLM.is_file():
        pytest.skip("vLLM has an environment of its own, which is not there: make vllm")
    # Sizes that vLLM's kernels take: heads of 32 and a state of 16.
    changes = {
        "layers_block_type": test_gguf.kinds("M-*-M"), "hidden_size": 64, "head_dim": 32, "num_attention_heads": 4,
        "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "conv_kernel": 4,
        "chunk_size": 16, "intermediate_size": 96, **test_gguf.NO_FLOOR,
    }  # fmt: skip
    tiny.model("nemotron_h", **changes).save_pretrained(tmp_path / "nest")
    tiny.add_sidecars(tmp_path / "nest")
    nest = open_nest(tmp_path / "nest")
    folder = slice_member(nest, Member(name="S", sizes={"hidden": 48, "ffn": 64, "mamba": 2}), tmp_path / "out")
    ids = tiny.tokens(1, 9)[0].tolist()
    table, answer = expected(folder, ids)
    compare_with_vllm(folder, ids, table, answer)
