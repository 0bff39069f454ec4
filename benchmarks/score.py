"""How much slower scoring is than the plain forward pass: tokens per second of both, and their ratio.

Random weights at the shapes of two models; plain and scored passes alternate over the same batches in one process.
The plain pass computes the last token's logits only, as the scored one does. The second ratio is of processor seconds,
which other programs on the machine do not stretch.

    python -m benchmarks.score --threads 1
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.results import hardware, markdown, put
from nestling import hf
from nestling.listen import run
from nestling.score import score

Seconds = tuple[float, float]
KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
SHAPES = {
    "nemotron_h 2.4M": {
        "model_type": "nemotron_h", "vocab_size": 512, "hidden_size": 128,
        "layers_block_type": [KINDS[letter] for letter in "MEM*EMEM-E"], "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 32, "n_groups": 2,
        "ssm_state_size": 32, "conv_kernel": 4, "chunk_size": 64, "n_routed_experts": 16, "num_experts_per_tok": 2,
        "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 192, "intermediate_size": 384,
    },
    "llama 135M": {
        "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
    },
}  # fmt: skip


def main() -> None:
    """Print one line for each shape and put the table into docs/results.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9, help="pairs of passes; the median is reported")
    parser.add_argument("--batches", type=int, default=2, help="batches in one pass")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--no-write", action="store_true", help="print only, leave docs/results.md as it is")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    title = (
        f"{options.batches} batches of {options.rows} x {options.length} tokens, median of {options.rounds} pairs of "
        f"passes, fp32; {hardware()}"
    )
    rows = [["model", "parameters", "plain, tokens/s", "scored, tokens/s", "ratio", "ratio of processor seconds"]]
    for name, config in SHAPES.items():
        model = hf.new_model(config, seed=0)
        draw = torch.Generator().manual_seed(0)
        size = (options.batches, options.rows, options.length)
        ids = torch.randint(config["vocab_size"], size, generator=draw)
        batches = [(x, torch.ones_like(x)) for x in ids]
        plain, scored = _alternate(
            lambda model=model, ids=ids: [run(model, x, logits=1) for x in ids],
            lambda model=model, batches=batches: score(model, batches),
            options.rounds,
        )
        count = sum(p.numel() for p in model.parameters())
        speeds = [ids.numel() / statistics.median(wall for wall, _ in times) for times in (plain, scored)]
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(plain, scored, strict=True)) for i in (0, 1)]
        numbers = [f"{count:,}", *(f"{one:,.0f}" for one in speeds), *(f"{one:.2f}" for one in ratios)]
        rows.append([name, *numbers])
        print(" | ".join(rows[-1]), flush=True)
    if not options.no_write:
        put("score", f"{title}\n\n{markdown(rows)}")


@torch.no_grad()
def _alternate(one: Callable, other: Callable, rounds: int) -> tuple[list[Seconds], list[Seconds]]:
    """Wall and processor seconds of each call, taken in turns after one of each to warm up."""
    one()
    other()
    times: tuple[list[Seconds], list[Seconds]] = ([], [])
    for _ in range(rounds):
        for call, taken in zip((one, other), times, strict=True):
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            taken.append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


if __name__ == "__main__":
    main()
