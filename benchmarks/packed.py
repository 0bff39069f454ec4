"""A large checkpoint of quantized matrices to measure slicing on: the shapes of Nemotron 3 Nano 30B with fewer layers,
NVFP4 in the layout of compressed-tensors, random codes.

    python -m benchmarks.packed runs/synthetic-nvfp4 --pattern MEMEM*EME

Each byte is drawn from those that are a positive finite number wherever they stand (code, E4M3 scale, or the high byte
of BF16 and FP32), so one random buffer fills every tensor and writing runs at the speed of the disk.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nestling.arch import Layout, find
from nestling.axes import dims
from nestling.checkpoint import new_folder, write_index, write_json
from nestling.shards import SHARD_BYTES, Entry, header_bytes, plan_shards

SIZES = {
    "vocab_size": 131072,
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "intermediate_size": 1856,
}
PATTERN = "MEMEM*EME"  # nine of the 52 layers; about 3.7 GB, most of it in four layers of experts
FLOAT32 = ("A_log", "D", "dt_bias", "e_score_correction_bias")
BUFFER = 1 << 26  # bytes


def write_packed(
    to: Path, *, pattern: str = PATTERN, shard_bytes: int = SHARD_BYTES, overwrite: bool = False, **sizes: int
) -> int:
    """Write the checkpoint. Returns bytes of weights. sizes: other sizes than the 30B's, by config key."""
    config = {"model_type": "nemotron_h", "hybrid_override_pattern": pattern, "dtype": "bfloat16", **SIZES, **sizes}
    arch, complete = find(config)
    layout = arch.layout(complete)
    tensors, plain = _tensors(layout)
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": weights | {"dynamic": False},
        "input_activations": weights | {"dynamic": "local"},
        "format": "nvfp4-pack-quantized",
    }
    config["num_hidden_layers"] = len(pattern)
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": plain,
    }
    shards = plan_shards(((name, Entry(Path(), *told)) for name, told in tensors.items()), shard_bytes)
    buffer = memoryview(np.random.default_rng(0).integers(0x20, 0x7F, BUFFER, dtype=np.uint8).tobytes())
    total = sum(shard.nbytes for shard in shards)
    with new_folder(to, overwrite=overwrite) as folder:
        for shard in shards:
            with (folder / shard.name).open("wb") as stream:
                stream.write(header_bytes(shard.tensors))
                for piece in _pieces(shard.nbytes, buffer):
                    stream.write(piece)
        write_index(folder, {name: shard.name for shard in shards for name, _ in shard.tensors}, total)
        write_json(folder / "config.json", config)
    return total


def _tensors(layout: Layout) -> tuple[dict[str, tuple[str, tuple[int, ...]]], list[str]]:
    """Every stored tensor's dtype and shape by name, and the modules that stay plain: router, attention, and the Mamba
    layer before it, as in the released checkpoints."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    plain = []
    for name, place in layout.tensors.items():
        shape = dims(place.shape, layout.sizes)
        layer = place.units.get("layer", -1)
        feeds = layer + 1 < len(layout.kinds) and layout.kinds[layer + 1] == "full_attention"
        if layer < 0 or feeds or not name.endswith(layout.arch.quantized):
            tensors[name] = ("F32" if name.endswith(FLOAT32) else "BF16", shape)
            plain += [name.removesuffix(".weight")] if len(shape) > 1 else []
            continue
        rows, cols = shape
        module = name.removesuffix("weight")
        tensors[module + "weight_packed"] = ("U8", (rows, cols // 2))
        tensors[module + "weight_scale"] = ("F8_E4M3", (rows, cols // 16))
        tensors[module + "weight_global_scale"] = ("F32", (1,))
        tensors[module + "input_global_scale"] = ("F32", (1,))
    return tensors, plain


def _pieces(size: int, buffer: memoryview) -> Iterator[memoryview]:
    # Each pass starts elsewhere: a file of equal pages could be stored once by the disk. Multiples of 4 keep numbers
    # whole.
    step = 0
    while size:
        piece = buffer[step * 4100 % (len(buffer) // 2) :][:size]
        yield piece
        size, step = size - len(piece), step + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("to", type=Path)
    parser.add_argument("--pattern", default=PATTERN, help="letters of the layers: M, E, *, -")
    parser.add_argument("--overwrite", action="store_true")
    args = parser.parse_args()
    print(f"{write_packed(args.to, pattern=args.pattern, overwrite=args.overwrite):,} bytes in {args.to}")


if __name__ == "__main__":
    main()
