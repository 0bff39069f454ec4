"""How fast members decode: stock `generate`, a bare loop over the stock modules, Nestling, and llama.cpp.

All run the same member in the width of weights that its nest stores, greedily, 1 and 16 answers at once, on one and on
two threads, each in a process of its own; rounds go through all of them in turn and the best round of each is kept.
Prefill does not count: where it cannot be told apart, a speed is the tokens between a short and a long answer over the
difference of their times. "decoder" is Nestling's step alone, "engine" the whole runtime with sampling, scheduling and
streams.

The read-bandwidth limit is the weights that one token reads over the bandwidth that as many threads reach when they
read a large array for a sum or a float32 product, whichever is faster, measured in the same rounds.

    python -m benchmarks.decode --nest runs/nest --smollm2 runs/smollm2/model
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.decoding import BATCHES, PROMPT
from benchmarks.results import ROOT, hardware, markdown, put
from benchmarks.step import SMOLLM2
from nestling import hf
from nestling.budget import choices, parse_budget, uniform
from nestling.demo import reasoner
from nestling.nest import FULL, Member, Nest, open_nest
from nestling.slice import slice as slice_member
from nestling.to_gguf import write_gguf

THREADS = (1, 2)
ENGINES = ("generate", "loop", "decoder", "engine", "llama.cpp")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A member, as a nest's and as files of its own."""

    title: str
    nest: Path
    sizes: dict[str, int]
    folder: Path  # its own checkpoint
    gguf: Path | None  # the same for llama.cpp; None: the nest has no tokenizer, and GGUF wants one
    tokens: tuple[int, int]  # of a short and a long answer
    nbytes: int  # of the weights that a token reads
    speeds: dict[tuple[str, int, int], float] = field(default_factory=dict)  # engine, batch, threads -> tokens/s


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nest", type=Path, default=reasoner(), help="a nest of the reasoner")
    parser.add_argument(
        "--members",
        nargs="*",
        default=(FULL, "45", "25"),
        help="its members; a share of the active parameters in percent if it has no such",
    )
    parser.add_argument(
        "--smollm2", type=Path, help="SmolLM2 of examples/smollm2_prepare.py; random weights if not set"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="few tokens, for trying")
    parser.add_argument("--no-write", action="store_true", help="print only, leave docs/results.md as it is")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="nestling-decode-") as scratch:
        subjects = prepare(args, Path(scratch))
        text = measure(subjects, args.rounds)
    print(text)
    if not args.no_write:
        put("decode", text)


def prepare(args: argparse.Namespace, scratch: Path) -> list[Subject]:
    """Copies of the checkpoints, without tokens that end an answer, and their members' own files."""
    given = open_nest(args.nest)
    members = [given.members.get(name) or _uniform(given, name) for name in args.members]
    for folder, name in ((args.nest, "reasoner"), (args.smollm2, "smollm2")):
        if folder is not None:
            shutil.copytree(folder, scratch / name, ignore=shutil.ignore_patterns("nest.json"))
            for file in (scratch / name / "config.json", scratch / name / "generation_config.json"):
                if file.is_file():
                    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | {"eos_token_id": None}), "utf-8")
        else:
            model: Any = hf.new_model(SMOLLM2 | {"eos_token_id": None}, seed=0)
            model.to(torch.bfloat16).save_pretrained(scratch / name)
    weights = "a dequantized 4-bit model" if args.smollm2 else "random weights"
    nest, tokens = open_nest(scratch / "reasoner"), (8, 40) if args.quick else (16, 528)
    subjects = [_subject(f"the reasoner, member {one.name}", nest, one, scratch, tokens) for one in members]
    nest, tokens = open_nest(scratch / "smollm2"), (4, 16) if args.quick else (8, 72)
    subjects.append(_subject(f"SmolLM2-135M ({weights})", nest, nest.member(FULL), scratch, tokens))
    return subjects


def _uniform(nest: Nest, name: str) -> Member:
    """A member of a share of the active parameters that shrinks every axis alike."""
    grains = {axis: 8 for axis in nest.layout.elastic() if axis in ("hidden", "ffn", "effn", "sffn")}
    options = choices(nest.layout, nest.config, grains=grains, floor=0.1, most=64)
    budget = parse_budget(f"active:{float(name) / 100}", nest.layout, nest.config)
    return Member(name=name, sizes=uniform(budget, nest.layout, options))


def _subject(title: str, nest: Nest, member: Member, scratch: Path, tokens: tuple[int, int]) -> Subject:
    folder = slice_member(nest, member, scratch / f"{nest.folder.name}-{member.name}")
    has_tokenizer = (nest.folder / "tokenizer.json").is_file()
    gguf = write_gguf(nest, member, folder.with_suffix(".gguf"), say=lambda line: None) if has_tokenizer else None
    layout, sizes = nest.layout, nest.sizes(member)
    read = layout.count(sizes, active=True) - (
        0 if nest.config["tie_word_embeddings"] else sizes["vocab"] * sizes["hidden"]
    )
    return Subject(
        title=title, nest=nest.folder, sizes=dict(member.sizes), folder=folder, gguf=gguf, tokens=tokens,
        nbytes=int(read) * 2,
    )  # fmt: skip


def measure(subjects: Sequence[Subject], rounds: int) -> str:
    """All tables, as Markdown."""
    bandwidth: dict[int, float] = dict.fromkeys(THREADS, 0.0)
    ratios: dict[str, list[float]] = {}
    for turn in range(rounds):
        for threads in THREADS:
            bandwidth[threads] = max(bandwidth[threads], _spawn("bandwidth", threads))
            for subject in subjects:
                for engine in ENGINES:
                    if engine == "llama.cpp" and subject.gguf is None:
                        continue
                    found = _spawn(engine, threads, subject)
                    for batch, speed in zip(BATCHES, found, strict=True):
                        key = engine, batch, threads
                        subject.speeds[key] = max(subject.speeds.get(key, 0.0), speed)
                    print(f"round {turn + 1}, {threads} threads, {subject.title}, {engine}: {found}", file=sys.stderr)
        for subject in subjects:
            ratios.setdefault(subject.title, []).append(_spawn("views", 1, subject))
    parts = [
        f"Greedy, bf16 weights, prompts of {PROMPT} tokens, best of {rounds} round{'s' * (rounds > 1)}; "
        f"{hardware(max(THREADS))}. "
        + "Reading memory: "
        + ", ".join(f"{speed:.1f} GB/s on {n} thread{'s' * (n > 1)}" for n, speed in bandwidth.items())
        + "."
    ]
    for subject in subjects:
        parts.append(f"{subject.title}, tokens/s of all answers together:\n\n{markdown(_table(subject, bandwidth))}")
    rows = [["member", "decoded from views / from its own folder"]]
    rows += [[title, f"{sorted(found)[len(found) // 2]:.2f}"] for title, found in ratios.items()]
    parts.append(markdown(rows))
    parts.append(_sharing(subjects[:-1]))
    return "\n\n".join(parts)


def _table(subject: Subject, bandwidth: dict[int, float]) -> list[list[str]]:
    heads = ["answers at once", "threads", *ENGINES, "decoder / generate", "decoder / llama.cpp", "share of the limit"]
    rows = [heads]
    for batch in BATCHES:
        for threads in THREADS:
            speed = {engine: subject.speeds.get((engine, batch, threads)) or float("nan") for engine in ENGINES}
            limit = bandwidth[threads] * 1e9 / subject.nbytes * batch
            # Weights that fit the caches are not read from memory, and then the limit says nothing.
            share = f"{speed['decoder'] / limit:.2f}" if batch == 1 and subject.nbytes > 64 * 1024**2 else ""
            rows.append([
                str(batch), str(threads), *(f"{speed[engine]:,.0f}" for engine in ENGINES),
                *(f"{speed['decoder'] / speed[other]:.1f}" for other in ("generate", "llama.cpp")), share,
            ])  # fmt: skip
    return rows


def _sharing(subjects: Sequence[Subject]) -> str:
    """What members on shared weights cost, in memory and at a switch. subjects: members of one nest, the full first."""
    sizes = [subject.sizes for subject in subjects]
    one, all_of_them = (_spawn("memory", 1, subjects[0], members=some) for some in (sizes[:1], sizes))
    switch = _spawn("switch", 1, subjects[0], members=sizes[:2])
    return (
        f"One process with {len(sizes)} members of the reasoner holds {all_of_them / one:.3f} of the memory of one "
        f"with the full member ({all_of_them / 1e6:.0f} MB and {one / 1e6:.0f} MB, proportional set size). Reading 256 "
        f"tokens just after another member decoded takes {switch:.2f} of what it takes after the member itself."
    )


def _spawn(engine: str, threads: int, subject: Subject | None = None, **more: Any) -> Any:
    """Run `child` in a process of its own."""
    told: dict[str, Any] = {"engine": engine, "threads": threads} | more
    if subject is not None:
        told |= {
            "nest": str(subject.nest), "sizes": subject.sizes, "folder": str(subject.folder),
            "gguf": str(subject.gguf), "tokens": subject.tokens,
        }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.decoding", json.dumps(told)]
    # The engines wait for threads as they do by default: told not to spin, the others lose an order of magnitude.
    environment = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    environment |= {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ran.returncode:
        raise RuntimeError(f"{engine} failed:\n{ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
