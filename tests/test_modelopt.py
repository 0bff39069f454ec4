"""Members of quantized nests in the layout of NVIDIA's Model Optimizer: its names, its lists, its cache scales.

The numbers come from the compressed-tensors library, re-spelled; decoding goes back through the library's converter.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import packing
import pytest
import torch

from nestling.checkpoint import Checkpoint
from nestling.inspect import inspect
from nestling.nest import Member, open_nest
from nestling.slice import slice as slice_member

SMALL = {"llama": {"hidden": 32, "q": 2, "ffn": 48, "layer": 3},
         "nemotron_h": {"hidden": 32, "mamba": 2, "q": 2, "expert": 3, "effn": 16, "sffn": 32, "layer": 4}}  # fmt: skip


def cut(folder: Path, sizes: dict[str, int], to: Path) -> Path:
    return slice_member(open_nest(folder), Member(name="S", sizes=sizes), to)


def make(name: str, preset: str, root: Path, *, skip: str = "^$", **options: bool) -> Path:
    source = packing.plain(name, root / "source")
    library = packing.pack(source, root / "library", preset, skip=lambda one: bool(re.search(skip, one)))
    return packing.respell(library, root / "parent", preset, **options)


def sidecar(folder: Path) -> dict:
    return json.loads((folder / "hf_quant_config.json").read_text())["quantization"]


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("name", SMALL)
def test_a_slice_decoded_by_the_library_is_the_slice_of_the_decoded_parent(name, preset, tmp_path):
    parent = make(name, preset, tmp_path)
    small = cut(parent, SMALL[name], tmp_path / "small")
    plain = packing.load_folder(
        cut(packing.write_plain(parent, tmp_path / "plain"), SMALL[name], tmp_path / "expected")
    )
    decoded = packing.decode(small)
    assert decoded.keys() == plain.keys()
    assert all(torch.equal(decoded[name], plain[name]) for name in plain)
    assert not any("packed" in name for name in packing.load_folder(small))


@pytest.mark.parametrize("four_dims", [False, True])
def test_tiles_are_cut_whole_also_when_their_scales_have_four_dims(four_dims, tmp_path):
    source = packing.plain("llama", tmp_path / "source", hidden_size=256, intermediate_size=384, head_dim=32)
    library = packing.pack(source, tmp_path / "library", "FP8_BLOCK")
    parent = packing.respell(library, tmp_path / "parent", "FP8_BLOCK", four_dims=four_dims)
    small = cut(parent, {"hidden": 128, "ffn": 256}, tmp_path / "small")
    scale = Checkpoint(small).entries["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale.shape == ((2, 1, 1, 1) if four_dims else (2, 1))
    plain = packing.write_plain(parent, tmp_path / "plain")
    expected = packing.load_folder(cut(plain, {"hidden": 128, "ffn": 256}, tmp_path / "expected"))
    decoded = packing.decode(small)
    assert all(torch.equal(decoded[name], expected[name]) for name in expected)


@pytest.mark.parametrize("where", ["both", "sidecar", "config"])
def test_the_layout_is_found_by_either_description_and_both_are_rebuilt(where, tmp_path):
    parent = make("nemotron_h", "NVFP4", tmp_path, skip=r"layers\.[02]\.")
    if where == "sidecar":
        packing.edit(parent, quantization_config=None)
    if where == "config":
        (parent / "hf_quant_config.json").unlink()
    small = cut(parent, {"layer": 4, "expert": 3}, tmp_path / "small")
    assert (small / "hf_quant_config.json").exists() == (where != "config")
    assert ("quantization_config" in Checkpoint(small).config) == (where != "sidecar")
    stored = packing.load_folder(small)
    plain = {n.removesuffix(".weight") for n, t in stored.items() if n.endswith(".weight") and t.dim() > 1
             and t.dtype == torch.bfloat16}  # fmt: skip
    quantized = {n.removesuffix(".weight_scale_2") for n in stored if n.endswith("weight_scale_2")}
    lists = [sidecar(small)["exclude_modules"]] if where != "config" else []
    lists += [Checkpoint(small).config["quantization_config"]["ignore"]] if where != "sidecar" else []
    for listed in lists:
        assert plain <= set(listed)
        assert not quantized & set(listed)
    assert inspect(small)["quantization"]["layout"] == "modelopt"


def test_cache_scales_follow_their_layers(tmp_path):
    parent = make("llama", "NVFP4", tmp_path, with_cache=True)

    def number(stored: dict) -> None:
        for layer in range(4):
            stored[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(1.0 + layer)

    packing.rewrite(parent, number)
    nest = replace(open_nest(parent), layer_order=(3, 0, 1, 2))  # layer 2 goes
    new = packing.load_folder(slice_member(nest, Member(name="S", sizes={"layer": 3, "q": 2}), tmp_path / "small"))
    assert [float(new[f"model.layers.{i}.self_attn.k_proj.k_scale"]) for i in range(3)] == [1.0, 2.0, 4.0]
    assert sum(name.endswith("v_scale") for name in new) == 3
    assert sidecar(tmp_path / "small")["kv_cache_quant_algo"] == "FP8"


def test_a_cache_scale_of_zero_is_found(tmp_path):
    parent = make("llama", "FP8", tmp_path, with_cache=True)
    name = "model.layers.1.self_attn.v_proj.v_scale"
    packing.rewrite(parent, lambda stored: stored[name].zero_())
    with pytest.raises(ValueError, match=r"layers\.1\.self_attn\.v_proj\.v_scale' \(zero\)"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


def test_wildcards_with_a_layers_number_move_with_the_layer(tmp_path):
    parent = make("llama", "NVFP4", tmp_path, skip=r"layers\.3\.self_attn|layers\.1\.mlp")
    told = json.loads((parent / "hf_quant_config.json").read_text())
    told["quantization"]["exclude_modules"] = [
        "lm_head",
        "model.layers.3.self_attn*",
        "model.layers.1.mlp*",
        "mtp.layers.0*",
    ]
    (parent / "hf_quant_config.json").write_text(json.dumps(told))
    packing.edit(parent, quantization_config=None)
    nest = replace(open_nest(parent), layer_order=(0, 3, 1, 2))  # layer 2 goes, layer 3 becomes layer 2
    small = slice_member(nest, Member(name="S", sizes={"layer": 3}), tmp_path / "small")
    listed = sidecar(small)["exclude_modules"]
    assert listed[:4] == ["lm_head", "model.layers.2.self_attn*", "model.layers.1.mlp*", "mtp.layers.0*"]
    assert not [name for name in listed[4:] if "layers" in name]
    nest = replace(nest, layer_order=(0, 1, 2, 3))  # layer 3 goes
    small = slice_member(nest, Member(name="T", sizes={"layer": 3}), tmp_path / "other")
    assert "model.layers.2.self_attn*" not in sidecar(small)["exclude_modules"]


def test_a_table_of_layers_with_their_own_algorithms_is_renumbered(tmp_path):
    """NVFP4 experts beside FP8 everything else, as mixed checkpoints are."""
    a = make("nemotron_h", "NVFP4A16", tmp_path / "a", skip=r"mixer\.(?!experts)")
    b = packing.load_folder(make("nemotron_h", "FP8", tmp_path / "b", skip=r"mixer\.experts"))
    packing.rewrite(a, lambda stored: stored.update({n: t for n, t in b.items() if "mixer.experts" not in n}))
    scaled = [n.removesuffix(".weight_scale") for n in packing.load_folder(a) if n.endswith("weight_scale")]
    told = {
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {n: {"quant_algo": "NVFP4" if "mixer.experts" in n else "FP8"} for n in scaled},
        "exclude_modules": ["lm_head"],
    }
    (a / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": told}))
    packing.edit(a, quantization_config=None)
    assert inspect(a)["quantization"]["matrices"] == {"fp8": 12, "nvfp4": 12}
    nest = replace(open_nest(a), layer_order=(1, 2, 3, 4, 0))  # layer 0 goes
    small = slice_member(nest, Member(name="S", sizes={"layer": 4, "expert": 2}), tmp_path / "small")
    new = packing.load_folder(small)
    table = sidecar(small)["quantized_layers"]
    assert table.keys() == {n.removesuffix(".weight_scale") for n in new if n.endswith("weight_scale")}
    assert table["backbone.layers.0.mixer.experts.1.up_proj"] == {"quant_algo": "NVFP4"}
    assert all(("weight_scale_2" in "".join(n for n in new if n.startswith(m + "."))) == (t["quant_algo"] == "NVFP4")
               for m, t in table.items())  # fmt: skip


def test_a_missing_input_scale_of_one_expert_is_found(tmp_path):
    parent = make("nemotron_h", "NVFP4", tmp_path)
    packing.rewrite(parent, lambda stored: stored.pop("backbone.layers.1.mixer.experts.4.down_proj.input_scale"))
    with pytest.raises(ValueError, match=r"lack their activation scale.*experts\.4\.down_proj\.input_scale"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


def test_two_descriptions_that_disagree_are_refused(tmp_path):
    parent = make("llama", "FP8", tmp_path)
    packing.edit(parent, quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    with pytest.raises(ValueError, match=r"different algorithms.*FP8"):
        open_nest(parent)


@pytest.mark.parametrize("algorithm", ["NVFP4_AWQ", "W4A8_AWQ", "MXFP8"])
def test_an_algorithm_with_more_parts_than_are_known_is_refused(algorithm, tmp_path):
    parent = packing.plain("llama", tmp_path / "parent")
    packing.edit(parent, quantization_config={"quant_method": "modelopt", "quant_algo": algorithm})
    with pytest.raises(ValueError, match=rf"{algorithm} is not one that Nestling can cut: FP8, "):
        open_nest(parent)
