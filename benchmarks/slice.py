"""How fast a member is cut out of a checkpoint, beside `cp` of as many bytes and beside transformers.

The inputs are written here: nemotron_h with the shapes of the 30B and fewer layers (at least 8 GB, one tensor for each
expert, random bytes repeated), the same in NVFP4, and 6,000 small tensors. Rounds alternate between `nestling slice`
and `cp` of a file of exactly as many bytes as the slice has, on the same disk; both wait until the data is on the disk.
transformers loads the whole checkpoint, cuts in memory and saves, once. Each runs in a process of its own, whose
private memory (RssAnon + RssShmem of /proc/self/status: what is resident, without mapped files) is sampled every few
milliseconds.

    python -m benchmarks.slice --dir runs/bench-slice              # needs about 20 GB there; --small takes seconds
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.packed import SIZES, write_packed
from benchmarks.results import RESULTS, hardware, markdown, put
from nestling.arch import find
from nestling.axes import dims
from nestling.shards import Entry, header_bytes, plan_shards, read_header

KINDS = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
NANO = {
    "model_type": "nemotron_h", **SIZES,
    "tie_word_embeddings": False, "use_conv_bias": True, "dtype": "bfloat16",
}  # fmt: skip
SHRUNK = {
    "vocab_size": 512, "hidden_size": 168, "num_attention_heads": 4, "head_dim": 16, "mamba_num_heads": 16,
    "mamba_head_dim": 8, "ssm_state_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 116, "moe_shared_expert_intermediate_size": 232, "intermediate_size": 116,
}  # fmt: skip
# NVFP4 wants multiples of 16.
PACKED = SHRUNK | {"hidden_size": 160, "moe_intermediate_size": 112, "moe_shared_expert_intermediate_size": 224}
FLOAT32 = ("A_log", "D", "dt_bias", "gate.weight", "e_score_correction_bias")

# One process: what it runs comes as statements; it prints seconds and its most private memory.
CHILD = """
import json, os, shutil, sys, threading, time
from pathlib import Path

def private():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024

peak, done = [0], threading.Event()

def watch():
    while not done.wait(0.003):
        peak[0] = max(peak[0], private())

def to_disk(path):
    for file in ([path] if path.is_file() else [f for f in path.iterdir() if f.is_file()]):
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

source, to = Path(sys.argv[1]), Path(sys.argv[2])
{setup}
watcher = threading.Thread(target=watch)
watcher.start()
begun = time.perf_counter()
{work}
seconds = time.perf_counter() - begun
done.set()
watcher.join()
print(json.dumps({{"seconds": seconds, "peak": peak[0]}}))
"""
SLICE = (
    "from nestling.choose import by_sizes\nfrom nestling.nest import open_nest\nfrom nestling.slice import slice",
    "nest = open_nest(source)\nslice(nest, by_sizes(nest, sys.argv[3]), to)",
)
COPY = ("", "shutil.copyfile(source, to) if source.is_file() else shutil.copytree(source, to)\nto_disk(to)")
# What a person does without a table: load all, build the small class, copy the first units of everything, save. It is
# right for `hidden` and `effn` of this architecture, where every cut is a prefix of a dim.
STOCK = (
    "import torch\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
    "sizes = dict(pair.split('=') for pair in sys.argv[3].split(','))",
    "model = AutoModelForCausalLM.from_pretrained(source, dtype='auto', local_files_only=True)\n"
    "config = AutoConfig.from_pretrained(source)\n"
    "config.hidden_size, config.moe_intermediate_size = int(sizes['hidden']), int(sizes['effn'])\n"
    "with torch.device('meta'):\n"
    "    small = AutoModelForCausalLM.from_config(config)\n"
    "full, wanted = model.state_dict(), small.state_dict()\n"
    "cut = {n: full[n][tuple(slice(k) for k in w.shape)].contiguous() for n, w in wanted.items()}\n"
    "small.load_state_dict(cut, assign=True)\n"
    "small.save_pretrained(to)\nto_disk(to)",
)


@dataclass(frozen=True)
class Input:
    """A checkpoint that the benchmark writes, and the sizes that are cut out of it."""

    name: str
    write: Callable[[Path], object]
    sizes: str
    has_stock: bool = True  # whether transformers loads and saves it too


def inputs(is_small: bool) -> list[Input]:
    """The inputs of the table."""
    # Embedding and head 1.4 GB; an E layer 2.6 GB, an M layer 0.08 GB, an attention layer 0.05 GB.
    layers = "ME*E" if is_small else "MEM*EE"
    nano = config(layers, SHRUNK if is_small else {})
    many = config("ME" * (2 if is_small else 23), SHRUNK | {"n_routed_experts": 8 if is_small else 126})
    member = "hidden=120,effn=60" if is_small else "hidden=1920,effn=960"
    return [
        Input("30B with 6 layers, BF16, per expert", lambda to: write_checkpoint(nano, to), member),
        Input(
            "the same, NVFP4",
            lambda to: write_packed(to, pattern=layers, **(PACKED if is_small else {})),  # pyright: ignore[reportArgumentType]
            "hidden=96,effn=64" if is_small else member,
            has_stock=False,
        ),
        Input("small tensors", lambda to: write_checkpoint(many, to), "hidden=120,effn=60"),
    ]


def main() -> None:
    """Print a line for each input and put the table into docs/results.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/bench-slice"), help="folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5, help="pairs of slice and cp; the median is reported")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each run (needs root)")
    parser.add_argument("--small", action="store_true", help="tiny inputs, to see that it works")
    parser.add_argument("--no-stock", action="store_true", help="leave out transformers load and save")
    parser.add_argument("--no-write", action="store_true", help="print only, leave docs/results.md as it is")
    options = parser.parse_args()
    rows = [["input", "tensors", "bytes read", "bytes written", "seconds", "ratio to cp", "ratio to transformers",
             "peak memory, MiB"]]  # fmt: skip
    options.dir.mkdir(parents=True, exist_ok=True)
    for one in inputs(options.small):
        rows.append(measure(one, options))
        print(" | ".join(rows[-1]), flush=True)
    cache = "dropped before each run" if options.cold else "not dropped: the input is in it as far as memory allows"
    title = (
        f"Median of {options.rounds} alternating rounds; both wait for the disk; page cache {cache}. A ratio is the "
        f"other's seconds over ours: 1 is as fast, 2 is twice as fast. {hardware()}"
    )
    if not options.no_write:
        put("slice", f"{title}\n\n{markdown(rows)}", RESULTS)


def measure(one: Input, options: Any) -> list[str]:
    """One line of the table."""
    source, to, plain, copy = (options.dir / name for name in ("input", "slice", "plain", "copy"))
    for folder in (source, to, plain, copy):
        remove(folder)
    one.write(source)
    num_tensors = sum(len(read_header(file)) for file in source.glob("*.safetensors"))
    runs: dict[str, list[dict[str, float]]] = {"slice": [], "cp": []}
    written = 0
    for _ in range(options.rounds):
        runs["slice"].append(child(SLICE, source, to, one.sizes, is_cold=options.cold))
        written = sum(file.stat().st_size for file in to.glob("*.safetensors"))
        remove(to)  # frees its pages: otherwise they push the input out of the cache before the next round
        if not plain.exists():
            cut_bytes(source, plain, written)
        runs["cp"].append(child(COPY, plain, copy, is_cold=options.cold))
        remove(copy)
    stock = None
    if one.has_stock and not options.no_stock:
        stock = child(STOCK, source, copy, one.sizes, is_cold=options.cold)["seconds"]
    seconds = statistics.median(run["seconds"] for run in runs["slice"])
    ratio = statistics.median(
        cp["seconds"] / ours["seconds"] for ours, cp in zip(runs["slice"], runs["cp"], strict=True)
    )
    read = sum(file.stat().st_size for file in source.glob("*.safetensors"))
    for folder in (source, plain, copy):
        remove(folder)
    return [
        one.name, f"{num_tensors:,}", f"{read:,}", f"{written:,}", f"{seconds:.2f}",
        f"{ratio:.2f}", f"{stock / seconds:.1f}" if stock else "-",
        f"{max(run['peak'] for run in runs['slice']) / 2**20:.0f}",
    ]  # fmt: skip


def child(what: tuple[str, str], source: Path, to: Path, *more: str, is_cold: bool) -> dict[str, float]:
    """Run one thing in a process of its own."""
    os.sync()  # what an earlier run left to be written is not this one's
    if is_cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    code = CHILD.format(setup=what[0], work=what[1])
    done = subprocess.run([sys.executable, "-c", code, str(source), str(to), *more], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"the measured process failed with {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])


def config(layers: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the 30B's kind with these layers."""
    return NANO | changes | {"layers_block_type": [KINDS[k] for k in layers], "num_hidden_layers": len(layers)}


def write_checkpoint(told: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint with small random values, in shards of 5 GB. The same megabytes repeat: drawing costs more
    than writing."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(told, indent=1))
    arch, complete = find(told)
    layout = arch.layout(complete)
    entries = [
        (place.name, Entry(Path(), "F32" if place.name.endswith(FLOAT32) else "BF16", dims(place.shape, layout.sizes)))
        for place in layout.places()
    ]
    draws = np.random.default_rng(0)
    pool = {"F32": draws.normal(0, 0.02, 2**18).astype(np.float32).tobytes()}
    # The upper half of a float32 is a bfloat16.
    pool["BF16"] = (draws.normal(0, 0.02, 2**22).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    weight_map = {}
    for shard in plan_shards(entries):
        with (folder / shard.name).open("wb") as stream:
            stream.write(header_bytes(shard.tensors))
            for name, entry in shard.tensors:
                data, rest = pool[entry.dtype], entry.nbytes
                while rest:
                    rest -= stream.write(data[: min(rest, len(data))])
                weight_map[name] = shard.name
    if len(set(weight_map.values())) > 1:
        index = {"metadata": {"total_size": sum(e.nbytes for _, e in entries)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_bytes(source: Path, to: Path, nbytes: int) -> None:
    """A file of exactly so many bytes, out of the input's."""
    with to.open("wb") as stream:
        while nbytes:
            for file in sorted(source.glob("*.safetensors")):
                with file.open("rb") as shard:
                    while nbytes and (data := shard.read(min(nbytes, 2**24))):
                        nbytes -= stream.write(data)


def remove(path: Path) -> None:
    """Delete a file or folder of the benchmark, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
