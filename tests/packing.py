"""Quantized test checkpoints, written and read back by the public compressed-tensors library.

The library's own functions compute every scale, pack every code and decode them again; here they are only called for
each matrix of a real folder, and re-spelled for the layout of Model Optimizer (whose packing is the same, and whose
global scales are the reciprocals; the library's own converter goes the other way in `decode`).
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import tiny
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.format import infer_module_format
from compressed_tensors.entrypoints.convert.converters.modelopt_nvfp4 import ModelOptNvfp4Converter
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor

NOT_QUANTIZED = ("embed", "lm_head", "norm", "conv1d", "gate.weight", "A_log", "dt_bias", ".D")
# Sizes that 16 divides where values share scales; head_dim and mamba_head_dim make blocks of 16 end inside a head.
DENSE = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 8, "num_attention_heads": 8, "num_hidden_layers": 4}
HYBRID = {"hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 48, "head_dim": 8,
          "moe_shared_expert_intermediate_size": 64, "num_attention_heads": 8, "mamba_num_heads": 8,
          "mamba_head_dim": 8}  # fmt: skip
CHANGES = {"llama": DENSE, "qwen3": DENSE, "nemotron_h": HYBRID,
           "qwen3_moe": DENSE | {"moe_intermediate_size": 48, "mlp_only_layers": [1]}}  # fmt: skip
ALGORITHM = {"NVFP4": "NVFP4", "NVFP4A16": "W4A16_NVFP4", "FP8": "FP8", "FP8_DYNAMIC": "FP8_PER_CHANNEL_PER_TOKEN",
             "FP8_BLOCK": "FP8_PB_WO"}  # fmt: skip


def plain(name: str, to: Path, **changes: object) -> Path:
    """A real bf16 folder of a tiny model whose sizes suit blocks of 16."""
    made = tiny.model(name, **(CHANGES[name] | changes))
    made.to(torch.bfloat16).save_pretrained(to)
    return to


def is_matrix(name: str, weight: Tensor) -> bool:
    """What recipes in the wild quantize: the linear layers, but not the router and the head."""
    return name.endswith(".weight") and weight.dim() == 2 and not any(word in name for word in NOT_QUANTIZED)


def pack(
    source: Path,
    to: Path,
    preset: str,
    *,
    skip: Callable[[str], bool] = lambda name: False,
    ignore: tuple[str, ...] = (),
) -> Path:
    """A folder whose matrices are quantized by a preset of the library, in its own layout.

    skip: names of matrices that stay plain. ignore: the config's list; the modules that stay plain if empty.
    """
    scheme = preset_name_to_scheme(preset, ["Linear"])
    weights, stored, left = load_file(source / "model.safetensors"), {}, []
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if not is_matrix(name, weight) or skip(name):
            stored[name] = weight
            left += [name.removesuffix(".weight")] if weight.dim() == 2 and "embed" not in name else []
            continue
        state = encode(weight, scheme, generator)
        stored |= {name.removesuffix("weight") + part: tensor.contiguous() for part, tensor in state.items()}
    format_ = infer_module_format(torch.nn.Linear, scheme)
    scheme.format = format_
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=list(ignore) or left, format=format_.value,
        quantization_status=QuantizationStatus.COMPRESSED,
    )  # fmt: skip
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(stored, to / "model.safetensors", metadata={"format": "pt"})
    edit(to, quantization_config=json.loads(config.model_dump_json()))
    return to


def encode(weight: Tensor, scheme: QuantizationScheme, generator: torch.Generator) -> dict[str, Tensor]:
    """One matrix as the library stores it: local names."""
    args, state = scheme.weights, {"weight": weight}
    low, high = (lambda w: w.amin(-1)), (lambda w: w.amax(-1))
    if args.num_bits == 4:
        state["weight_global_scale"] = generate_gparam(weight.min(), weight.max()).view(1)
        grouped = weight.unflatten(-1, (-1, args.group_size))
    elif args.strategy == "tensor":
        grouped = weight.flatten().unsqueeze(0)
    elif args.strategy == "channel":
        grouped = weight.unsqueeze(1)
    else:
        h, w = args.block_structure
        rows, cols = (-(-n // size) * size - n for n, size in zip(weight.shape, (h, w), strict=True))
        padded = torch.nn.functional.pad(weight, (0, cols, 0, rows))
        grouped = padded.unflatten(1, (-1, w)).unflatten(0, (-1, h)).transpose(1, 2).flatten(2)
    state["weight_scale"], _ = calculate_qparams(
        low(grouped), high(grouped), args, global_scale=state.get("weight_global_scale")
    )
    inputs = scheme.input_activations
    if inputs is not None and inputs.dynamic is not True:
        drawn = torch.rand(1, generator=generator) + 0.5
        state["input_global_scale" if args.num_bits == 4 else "input_scale"] = drawn
    kind = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    return {name: tensor.detach().clone() for name, tensor in kind.compress(state, scheme).items()}


def decode(folder: Path) -> dict[str, Tensor]:
    """Every plain tensor of a quantized folder, decoded by the library."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    stored = load_folder(folder)
    if config["quant_method"] == "modelopt":
        preset = next(preset for preset, name in ALGORITHM.items() if name == config["quant_algo"])
        scheme = preset_name_to_scheme(preset, ["Linear"])
        if "NVFP4" in preset:
            stored = ModelOptNvfp4Converter(targets=["re:.*"]).process(stored)
        stored = {
            n: t.flatten(-3, -2).flatten(-2) if n.endswith("scale") and t.dim() == 4 else t for n, t in stored.items()
        }
        if preset == "FP8_DYNAMIC":
            stored = {n: t.unsqueeze(1) if n.endswith("weight_scale") else t for n, t in stored.items()}
    else:
        (group,) = config["config_groups"].values()
        scheme = QuantizationScheme.model_validate(group)
    kind = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    decoded, used = {}, set()
    for name in stored:
        module, _, last = name.rpartition(".")
        if f"{module}.weight_scale" not in stored or last not in ("weight", "weight_packed"):
            continue
        names = [
            n for n in stored if n.rpartition(".")[0] == module and n.rpartition(".")[2] not in ("k_scale", "v_scale")
        ]
        state = {n.rpartition(".")[2]: stored[n] for n in names}
        decoded[f"{module}.weight"] = kind.decompress(state, scheme)["weight"].detach().contiguous()
        used |= set(names)
    return decoded | {n: t for n, t in stored.items() if n not in used and not n.endswith(("k_scale", "v_scale"))}


def respell(source: Path, to: Path, preset: str, *, with_cache: bool = False, four_dims: bool = False) -> Path:
    """A folder of the library's as Model Optimizer spells it."""
    stored, renamed = load_folder(source), {}
    for name, tensor in stored.items():
        if name.endswith("global_scale"):
            name = name.replace("weight_global_scale", "weight_scale_2").replace("input_global_scale", "input_scale")
            renamed[name] = (1 / tensor).reshape(())
        elif name.endswith("weight_packed"):
            renamed[name.replace("weight_packed", "weight")] = tensor
        elif name.endswith("scale") and tensor.numel() == 1:
            renamed[name] = tensor.float().reshape(())
        elif name.endswith("weight_scale") and preset == "FP8_DYNAMIC":
            renamed[name] = tensor.float().reshape(-1)
        elif name.endswith("weight_scale") and four_dims:
            renamed[name] = tensor.float()[:, None, :, None].contiguous()
        else:
            renamed[name] = tensor
    config = json.loads((source / "config.json").read_text())
    ignore = config["quantization_config"]["ignore"]
    if with_cache:
        for name in [n for n in renamed if n.endswith((".k_proj.weight", ".v_proj.weight"))]:
            letter = name.split(".")[-2][0]
            renamed[name.replace("weight", f"{letter}_scale")] = torch.tensor(0.25 + len(name) / 100)
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(renamed, to / "model.safetensors", metadata={"format": "pt"})
    producer = {"name": "modelopt", "version": "0.29.0"}
    cache = "FP8" if with_cache else None
    edit(to, quantization_config={"quant_method": "modelopt", "quant_algo": ALGORITHM[preset], "ignore": ignore,
                                  "producer": producer})  # fmt: skip
    (to / "hf_quant_config.json").write_text(json.dumps({"producer": producer, "quantization": {
        "quant_algo": ALGORITHM[preset], "kv_cache_quant_algo": cache, "group_size": 16, "exclude_modules": ignore,
    }}))  # fmt: skip
    return to


def load_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write_plain(folder: Path, to: Path) -> Path:
    """The folder with its matrices decoded, and no word of quantization."""
    shutil.copytree(folder, to, ignore=shutil.ignore_patterns("*.safetensors", "hf_quant_config.json"))
    save_file(decode(folder), to / "model.safetensors", metadata={"format": "pt"})
    edit(to, quantization_config=None)
    return to


def edit(folder: Path, **changes: object) -> None:
    """Change config.json; None removes a key."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a folder of one file."""
    stored = load_file(folder / "model.safetensors")
    change(stored)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
