"""Members of quantized nests: codes and scales are the parent's, bit for bit, and what cannot be so is refused.

Parents are written and slices decoded by the public compressed-tensors library (see packing.py); a slice that the
library decodes must be the plain slice of the parent that it decodes.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import packing
import pytest
import tiny
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from nestling.build import BuildSettings, evaluate_folder
from nestling.checkpoint import Checkpoint
from nestling.inspect import describe, inspect
from nestling.nest import Member, open_nest, open_plain_nest
from nestling.score import ScoreSettings, score_folder
from nestling.slice import slice as slice_member
from nestling.sort import sort
from nestling.train import TrainSettings, train

SMALL = {"llama": {"hidden": 32, "q": 2, "ffn": 48, "layer": 3}, "qwen3": {"hidden": 48, "q": 2, "ffn": 32},
         "qwen3_moe": {"hidden": 32, "expert": 3, "effn": 16, "layer": 3},
         "nemotron_h": {"hidden": 32, "mamba": 2, "q": 2, "expert": 3, "effn": 16, "sffn": 32, "layer": 4}}  # fmt: skip
TILED = {"hidden_size": 256, "intermediate_size": 300, "head_dim": 32, "num_attention_heads": 8}


def cut(folder: Path, sizes: dict[str, int], to: Path, say: Callable[[str], None] = lambda line: None) -> Path:
    return slice_member(open_nest(folder), Member(name="S", sizes=sizes), to, say=say)


@pytest.fixture(scope="session")
def packed(tmp_path_factory):
    """The folder of a variant in a preset, and its plain twin; each is written once. To read only."""
    root = tmp_path_factory.mktemp("packed")

    def folder(name: str, preset: str) -> Path:
        to = root / f"{name}-{preset}"
        if not (root / name).exists():
            packing.plain(name, root / name)
        return to if to.exists() else packing.pack(root / name, to, preset)

    return folder


@pytest.fixture
def own(packed, tmp_path):
    """A copy of such a folder that a test may change."""

    def folder(name: str, preset: str) -> Path:
        import shutil

        return shutil.copytree(packed(name, preset), tmp_path / "parent")

    return folder


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    assert not [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]


# The law: decoding commutes with slicing.


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC"])
@pytest.mark.parametrize("name", SMALL)
def test_a_slice_decoded_by_the_library_is_the_slice_of_the_decoded_parent(name, preset, packed, tmp_path):
    parent = packed(name, preset)
    small = cut(parent, SMALL[name], tmp_path / "small")
    plain = cut(packing.write_plain(parent, tmp_path / "plain"), SMALL[name], tmp_path / "expected")
    assert_same(packing.decode(small), packing.load_folder(plain))
    old, new = Checkpoint(parent).config, Checkpoint(small).config
    assert {k: v for k, v in new.items() if k != "quantization_config"} == Checkpoint(plain).config
    assert new["quantization_config"]["config_groups"] == old["quantization_config"]["config_groups"]


def test_codes_and_scales_of_kept_blocks_are_the_parents_bytes_and_scalars_are_copied(packed, tmp_path):
    parent = packed("llama", "NVFP4")
    small = cut(parent, {"ffn": 48, "hidden": 32}, tmp_path / "small")
    old, new = packing.load_folder(parent), packing.load_folder(small)
    root = "model.layers.1.mlp.down_proj"
    assert torch.equal(new[f"{root}.weight_packed"], old[f"{root}.weight_packed"][:32, :24])
    kept = old[f"{root}.weight_scale"].view(torch.uint8)[:32, :3]
    assert torch.equal(new[f"{root}.weight_scale"].view(torch.uint8), kept)
    for scalar in ("weight_global_scale", "input_global_scale"):
        assert torch.equal(new[f"{root}.{scalar}"], old[f"{root}.{scalar}"])
    assert {n: t.dtype for n, t in new.items()} == {n: t.dtype for n, t in old.items()}


def test_tiles_of_128_x_128_are_cut_whole_and_a_short_last_one_stays(tmp_path):
    source = packing.plain("llama", tmp_path / "source", **TILED)
    parent = packing.pack(source, tmp_path / "parent", "FP8_BLOCK")
    assert Checkpoint(parent).entries["model.layers.0.mlp.down_proj.weight_scale"].shape == (2, 3)  # 300 is 2.3 tiles
    small = cut(parent, {"hidden": 128, "layer": 3}, tmp_path / "small")
    assert Checkpoint(small).entries["model.layers.0.mlp.down_proj.weight_scale"].shape == (1, 3)
    plain = cut(packing.write_plain(parent, tmp_path / "plain"), {"hidden": 128, "layer": 3}, tmp_path / "expected")
    assert_same(packing.decode(small), packing.load_folder(plain))
    with pytest.raises(ValueError, match=r"size 200 along 'ffn'.*tile of 128 x 128.*not a multiple") as told:
        cut(parent, {"ffn": 200}, tmp_path / "other")
    assert "Nearest: 128 or 256" in str(told.value)


# Whole models.


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
@pytest.mark.parametrize(
    ("name", "preset", "sizes"),
    [
        ("llama", "NVFP4A16", SMALL["llama"]),
        ("qwen3", "NVFP4A16", SMALL["qwen3"]),
        ("llama", "FP8_DYNAMIC", SMALL["llama"]),
        ("nemotron_h", "FP8_DYNAMIC", SMALL["nemotron_h"]),
    ],
)
def test_a_sliced_folder_loads_in_stock_transformers(name, preset, sizes, packed, tmp_path):
    small = cut(packed(name, preset), sizes, tmp_path / "small")
    told = CompressedTensorsConfig(dequantize=True)
    model, info = AutoModelForCausalLM.from_pretrained(
        small, dtype=torch.bfloat16, quantization_config=told, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    plain = AutoModelForCausalLM.from_pretrained(packing.write_plain(small, tmp_path / "plain"), dtype=torch.bfloat16)
    assert torch.equal(tiny.logits(model.eval()), tiny.logits(plain.eval()))


def test_a_member_that_keeps_everything_has_every_byte_of_the_parent(packed, tmp_path):
    parent = packed("nemotron_h", "NVFP4")
    same = cut(parent, {}, tmp_path / "same")
    assert packing.load_folder(same).keys() == packing.load_folder(parent).keys()
    for name, tensor in packing.load_folder(parent).items():
        assert packing.load_folder(same)[name].view(torch.uint8).equal(tensor.view(torch.uint8)), name


def test_inspect_says_how_a_checkpoint_is_stored_and_counts_its_parameters_exactly(packed):
    told = inspect(packed("nemotron_h", "NVFP4"))
    assert told["quantization"] == {"layout": "compressed-tensors", "matrices": {"nvfp4": 24}}
    assert told["parameters"] == sum(p.numel() for p in tiny.model("nemotron_h", **packing.HYBRID).parameters()) + 6
    on_disk = packing.load_folder(packed("nemotron_h", "NVFP4")).values()
    assert sum(told["bytes_on_disk"].values()) == sum(t.numel() * t.element_size() for t in on_disk)
    assert "24 matrices in nvfp4" in describe(told)
    assert open_nest(packed("nemotron_h", "FP8")).fingerprint != told["fingerprint"]


# Cuts through blocks.


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("llama", {"ffn": 40}, r"size 40 along 'ffn'.*16 values.*Nearest: 32 or 48"),
        ("llama", {"ffn": 8}, r"size 8 along 'ffn'.*Nearest: 16\."),
        ("llama", {"hidden": 33}, r"size 33 along 'hidden'.*Nearest: 32 or 48"),
        ("llama", {"q": 3}, r"size 3 along 'q'.*not a multiple of 2.*Nearest: 2 or 4"),
        ("nemotron_h", {"mamba": 3}, r"size 3 along 'mamba'.*Nearest: 2 or 4"),
        ("nemotron_h", {"mdim": 4}, r"size 4 along 'mdim'.*two units.*Nearest: 8"),
    ],
)
def test_a_cut_through_a_block_of_16_is_refused_with_the_nearest_sizes(name, sizes, message, packed, tmp_path):
    with pytest.raises(ValueError, match=message):
        cut(packed(name, "NVFP4A16"), sizes, tmp_path / "small")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sizes", "nearest"), [({"ffn": 40}, (32, 48)), ({"q": 1}, (2,)), ({"hidden": 63}, (48, 64))])
def test_the_nearest_sizes_that_a_refusal_names_are_legal_and_none_lies_between(sizes, nearest, packed, tmp_path):
    ((axis, size),) = sizes.items()
    parent = packed("llama", "NVFP4A16")
    legal = set()
    for n in range(min(nearest), max(*nearest, size) + 1):
        try:
            legal |= {n} if list(open_nest(parent).places(Member(name="S", sizes={axis: n}))) else set()
        except ValueError:
            continue
    assert legal == set(nearest)


def test_tiles_over_joined_parts_are_refused_with_the_reason(tmp_path):
    source = packing.plain("nemotron_h", tmp_path / "source", hidden_size=128, mamba_num_heads=16, mamba_head_dim=32)
    parent = packing.pack(source, tmp_path / "parent", "FP8_BLOCK")
    with pytest.raises(ValueError, match=r"along 'mamba'.*in_proj.*do not all begin at a block.*Nearest: 8"):
        cut(parent, {"mamba": 4}, tmp_path / "small")


def test_halves_of_a_joined_gate_and_up_are_cut_each_by_itself(tmp_path):
    """Rows of a joined tensor are no blocks: each half keeps its own first rows, codes and scales alike."""
    from nestling.arch import ARCHITECTURES
    from nestling.formats import detect

    name = "model.layers.0.mlp.experts.gate_up_proj"
    arch, complete = tiny.known("qwen3_moe")
    layout = arch.layout(complete | {"hidden_size": 64, "moe_intermediate_size": 32}, "memory")
    assert ARCHITECTURES["qwen3_moe"] is arch
    codes, scales = torch.randint(0, 256, (5, 64, 32), dtype=torch.uint8), torch.rand(5, 64, 4).to(torch.float8_e4m3fn)
    stored = {name: codes, f"{name}_weight_scale": scales, f"{name}_weight_scale_2": torch.rand(5)}
    headers = {n: _Header(t) for n, t in stored.items()}
    found = detect({"quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}}, None, headers)
    assert found
    from nestling.axes import take

    keep = {"effn": 16, "expert": 3, "hidden": 32}
    places = {place.name: place for place in found.places(layout, keep, [0]) if place.name.startswith(name)}
    assert places.keys() == stored.keys()
    small = {n: take(stored[p.source], p.shape, layout.sizes, keep, units=p.units) for n, p in places.items()}
    rows = [*range(16), *range(32, 48)]
    assert torch.equal(small[name], codes[:3, rows, :16])
    assert torch.equal(small[f"{name}_weight_scale"].view(torch.uint8), scales.view(torch.uint8)[:3, rows, :2])
    assert torch.equal(small[f"{name}_weight_scale_2"], stored[f"{name}_weight_scale_2"][:3])


class _Header:
    def __init__(self, tensor: torch.Tensor) -> None:
        names = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.bfloat16: "BF16"}
        self.dtype, self.shape = names[tensor.dtype], tuple(tensor.shape)


# Experts and layers.


def test_kept_experts_keep_codes_scales_and_activation_scales_bit_for_bit(packed, tmp_path):
    parent = packed("nemotron_h", "NVFP4")
    small = cut(parent, {"expert": 3}, tmp_path / "small")
    old, new = packing.load_folder(parent), packing.load_folder(small)
    root = "backbone.layers.1.mixer.experts"
    parts = ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")
    names = {f"{root}.{e}.{w}_proj.{part}" for e in range(3) for w in ("up", "down") for part in parts}
    assert {name for name in new if name.startswith(root)} == names
    assert all(new[name].view(torch.uint8).equal(old[name].view(torch.uint8)) for name in names)
    assert old.keys() - new.keys() == {n for n in old if re.search(r"experts\.[345]\.", n)}


def test_fused_experts_in_an_unknown_layout_are_refused_not_skipped(own, tmp_path):
    parent = own("nemotron_h", "NVFP4A16")

    def fuse(stored: dict) -> None:
        for part in ("up_proj", "down_proj"):
            for kind in ("weight_packed", "weight_scale", "weight_global_scale"):
                names = [f"backbone.layers.1.mixer.experts.{e}.{part}.{kind}" for e in range(6)]
                joined = torch.stack([stored.pop(name).view(torch.uint8) for name in names])
                stored[f"backbone.layers.1.mixer.experts.{part}.{kind}"] = joined

    packing.rewrite(parent, fuse)
    with pytest.raises(ValueError, match=r"belong to no quantized matrix.*experts"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


# Scales.


@pytest.mark.parametrize(
    ("preset", "part", "value", "what"),
    [
        ("NVFP4", "weight_global_scale", 0.0, "zero"),
        ("NVFP4", "input_global_scale", float("inf"), "not finite"),
        ("NVFP4", "weight_scale", float("nan"), "NaN"),
        ("NVFP4", "weight_scale", -1.0, "negative"),
        ("NVFP4", "weight_scale", 0.0, "zero"),
        ("FP8", "weight_scale", float("nan"), "not finite"),
        ("FP8", "input_scale", 0.0, "zero"),
        ("FP8_DYNAMIC", "weight_scale", -0.5, "negative"),
    ],
)
def test_a_bad_scale_is_named_before_anything_is_written(preset, part, value, what, own, tmp_path):
    parent = own("llama", preset)
    name = f"model.layers.2.mlp.up_proj.{part}"
    packing.rewrite(parent, lambda stored: stored[name].view(-1)[-1:].copy_(torch.tensor([value])))
    with pytest.raises(ValueError, match=rf"1 scales are not positive and finite: '{re.escape(name)}' \({what}\)"):
        cut(parent, {"hidden": 32}, tmp_path / "small")
    assert [file.name for file in tmp_path.iterdir()] == ["parent"]


def test_a_bad_scale_of_an_expert_that_is_dropped_does_not_matter(own, tmp_path):
    parent = own("nemotron_h", "NVFP4A16")
    name = "backbone.layers.1.mixer.experts.5.up_proj.weight_global_scale"
    packing.rewrite(parent, lambda stored: stored[name].zero_())
    with pytest.raises(ValueError, match=r"experts\.5"):
        cut(parent, {"hidden": 32}, tmp_path / "all")
    assert cut(parent, {"expert": 3}, tmp_path / "small").exists()


def test_a_zero_scale_over_a_block_of_zeros_means_nothing(own, tmp_path):
    parent = own("llama", "NVFP4A16")

    def zero(stored: dict) -> None:
        stored["model.layers.0.mlp.up_proj.weight_packed"][3, :8] = 0x80  # 0 and -0
        stored["model.layers.0.mlp.up_proj.weight_scale"].view(torch.uint8)[3, 0] = 0

    packing.rewrite(parent, zero)
    assert cut(parent, {"hidden": 32}, tmp_path / "small").exists()


@pytest.mark.parametrize(("preset", "part"), [("NVFP4", "input_global_scale"), ("FP8", "input_scale")])
def test_a_missing_input_scale_of_one_expert_is_found(preset, part, own, tmp_path):
    parent = own("nemotron_h", preset)
    packing.rewrite(parent, lambda stored: stored.pop(f"backbone.layers.1.mixer.experts.2.up_proj.{part}"))
    with pytest.raises(ValueError, match=rf"1 of \d+ matrices .* lack their activation scale.*experts\.2\..*{part}"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


@pytest.mark.parametrize("part", ["weight_scale", "weight_global_scale"])
def test_a_missing_weight_scale_is_found(part, own, tmp_path):
    parent = own("llama", "NVFP4A16")
    packing.rewrite(parent, lambda stored: stored.pop(f"model.layers.0.mlp.up_proj.{part}"))
    with pytest.raises(ValueError, match=rf"'model\.layers\.0\.mlp\.up_proj\.{part}' is missing"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


def test_scales_whose_codes_are_missing_are_found(own, tmp_path):
    parent = own("llama", "NVFP4A16")
    packing.rewrite(parent, lambda stored: stored.pop("model.layers.0.mlp.up_proj.weight_packed"))
    with pytest.raises(ValueError, match=r"2 tensors belong to no quantized matrix.*layers\.0\.mlp\.up_proj"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


def test_gate_and_up_with_different_global_scales_are_flagged(own, tmp_path):
    parent = own("llama", "NVFP4A16")

    def share(stored: dict) -> None:
        for name in [n for n in stored if n.endswith("weight_global_scale")]:
            stored[name].fill_(4.0)

    packing.rewrite(parent, share)
    said: list[str] = []
    cut(parent, {"hidden": 32}, tmp_path / "shared", said.append)
    assert "global scales" not in "\n".join(said)
    gate = "model.layers.1.mlp.gate_proj.weight_global_scale"
    packing.rewrite(parent, lambda stored: stored[gate].fill_(5.0))
    small = cut(parent, {"hidden": 32}, tmp_path / "small", said.append)
    note = r"note: 1 groups of matrices .* by up to 1\.25x: 'model\.layers\.1\.mlp\.gate_proj"
    assert re.search(note, "\n".join(said))
    assert packing.load_folder(small)[gate] == 5.0


def test_a_scale_of_the_wrong_shape_is_refused(own, tmp_path):
    parent = own("llama", "NVFP4A16")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    packing.rewrite(parent, lambda stored: stored.update({name: stored[name][:, :3].contiguous()}))
    with pytest.raises(ValueError, match=r"weight_scale' has shape \(96, 3\); .* expected \(96, 4\)"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


# Lists of what is not quantized.


def plain_modules(folder: Path) -> set[str]:
    """Modules that hold an unquantized matrix, from the file alone."""
    stored = packing.load_folder(folder)
    names = {n for n, t in stored.items() if n.endswith(".weight") and t.dim() > 1 and t.dtype == torch.bfloat16}
    return {n.removesuffix(".weight") for n in names}


def ignored(folder: Path) -> list[str]:
    return json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]


@pytest.mark.parametrize("layers", [4, 5])
def test_every_unquantized_matrix_is_listed_router_included(layers, tmp_path):
    """Layers 0 and 2 stay plain, as NVIDIA leaves attention and the Mamba layers before it."""
    source = packing.plain("nemotron_h", tmp_path / "source")
    parent = packing.pack(
        source, tmp_path / "parent", "NVFP4A16", skip=lambda name: bool(re.search(r"s\.[02]\.", name))
    )
    packing.edit(parent, quantization_config=_section(parent) | {"ignore": ["lm_head"]})  # the router is not in it
    nest = open_nest(parent)
    small = cut(parent, {"layer": layers, "expert": 3}, tmp_path / "small")
    listed = set(ignored(small))
    assert plain_modules(small) <= listed
    assert "backbone.layers.1.mixer.gate" in listed
    assert "backbone.layers.0.mixer.conv1d" in listed
    quantized = {n.removesuffix(".weight_packed") for n in packing.load_folder(small) if n.endswith("weight_packed")}
    assert not quantized & listed
    assert any("mixer.up_proj" in name for name in quantized), "hybrid layers have no 'mlp' in their names"
    assert len(nest.layers(Member(name="S", sizes={"layer": layers}))) == layers


def _section(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def test_names_in_the_list_are_renumbered_when_layers_go(tmp_path):
    source = packing.plain("llama", tmp_path / "source")
    skip = re.compile(r"layers\.3\.|layers\.1\.mlp")
    parent = packing.pack(source, tmp_path / "parent", "NVFP4A16", skip=lambda name: bool(skip.search(name)))
    nest = open_nest(parent)
    from dataclasses import replace

    nest = replace(nest, layer_order=(0, 1, 3, 2))  # layer 2 goes, layer 3 becomes layer 2
    small = slice_member(nest, Member(name="S", sizes={"layer": 3}), tmp_path / "small")
    listed = set(ignored(small))
    assert {f"model.layers.2.self_attn.{x}_proj" for x in "qkvo"} <= listed
    assert not any(name.startswith("model.layers.3.") for name in listed)
    assert plain_modules(small) <= listed
    assert sorted(listed & set(ignored(parent))) == sorted(n for n in ignored(parent) if ".3." not in n)


def test_regular_expressions_stay_unless_they_would_now_mean_other_layers(tmp_path):
    source = packing.plain("llama", tmp_path / "source")
    parent = packing.pack(
        source, tmp_path / "parent", "NVFP4A16",
        skip=lambda name: "k_proj" in name or "layers.3.mlp" in name,
        ignore=("re:.*k_proj$", r"re:.*layers\.3\.mlp.*", "lm_head"),
    )  # fmt: skip
    same = cut(parent, {"hidden": 32}, tmp_path / "same")
    assert {"re:.*k_proj$", r"re:.*layers\.3\.mlp.*", "lm_head"} <= set(ignored(same))
    from dataclasses import replace

    nest = replace(open_nest(parent), layer_order=(0, 1, 3, 2))
    listed = set(ignored(slice_member(nest, Member(name="S", sizes={"layer": 3}), tmp_path / "small")))
    assert {"re:.*k_proj$", "lm_head"} <= listed
    assert r"re:.*layers\.3\.mlp.*" not in listed
    assert {f"model.layers.2.mlp.{x}_proj" for x in ("gate", "up", "down")} <= listed


def test_a_list_in_the_spelling_of_memory_is_added_to_in_that_spelling(tmp_path):
    source = packing.plain("nemotron_h", tmp_path / "source")
    parent = packing.pack(source, tmp_path / "parent", "NVFP4A16", skip=lambda name: "layers.2." in name)
    names = [name.replace("backbone.", "model.") for name in ignored(parent) if "gate" not in name]
    packing.edit(parent, quantization_config=_section(parent) | {"ignore": names})
    listed = ignored(cut(parent, {"hidden": 32}, tmp_path / "small"))
    assert set(names) <= set(listed)
    assert "model.layers.1.mixer.gate" in listed
    assert not [name for name in listed if name.startswith("backbone.")]


# What is refused.


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, r"'gptq'.*Supported: compressed-tensors .*modelopt"),
        ({"quant_method": "awq"}, r"'awq'.*Supported"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"'bitsandbytes'.*Supported"),
        ({"quant_method": "mxfp4"}, r"'mxfp4'.*Supported"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, r"'pack-quantized'.*FP8"),
        ({"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}, r"'mxfp4-pack-quantized'.*NVFP4"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, r"INT4_AWQ.*FP8_PER_CHANNEL_PER_TOKEN"),
        (
            {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}}},
            "int of 8 bits",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "config_groups": {},
             "transform_config": {"config_groups": {"R1": {}}}},
            "rotation",
        ),
    ],
)  # fmt: skip
def test_an_unknown_quantization_is_refused_and_told_what_is_supported(section, message, tmp_path):
    parent = packing.plain("llama", tmp_path / "parent")
    packing.edit(parent, quantization_config=section)
    with pytest.raises(ValueError, match=message):
        open_nest(parent)


def test_steps_that_need_plain_weights_refuse_a_quantized_parent(packed, tmp_path):
    parent, to = packed("llama", "FP8"), tmp_path / "to"
    told = r"is quantized \(compressed-tensors: 28 matrices in fp8\).*nestling {}.*plain weights"
    with pytest.raises(ValueError, match=told.format("sort")):
        sort(parent, {}, to)
    with pytest.raises(ValueError, match=told.format("score")):
        score_folder(ScoreSettings(), parent=parent, data="none", to=to, say=print)
    with pytest.raises(ValueError, match=told.format("train")):
        train(TrainSettings(data="none", member=("S=active:0.5",)), parent, to)
    with pytest.raises(ValueError, match=told.format("eval")):
        evaluate_folder(BuildSettings(), parent, parent=parent)
    with pytest.raises(ValueError, match=told.format("build")):
        open_plain_nest(parent, verb="build")
    assert not list(tmp_path.iterdir())


def test_an_integer_matrix_under_a_known_method_is_refused(own, tmp_path):
    parent = own("llama", "FP8")
    name = "model.layers.0.mlp.up_proj.weight"
    packing.rewrite(parent, lambda stored: stored.update({name: stored[name].view(torch.int8)}))
    with pytest.raises(ValueError, match=r"up_proj\.weight' is stored as I8"):
        cut(parent, {"hidden": 32}, tmp_path / "small")


# The benchmark's input.


def test_the_synthetic_checkpoint_is_one_that_can_be_sliced(tmp_path):
    from benchmarks.packed import write_packed

    small = {"vocab_size": 96, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "mamba_num_heads": 8,
             "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
             "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48}  # fmt: skip
    total = write_packed(tmp_path / "parent", pattern="MEM*E", shard_bytes=30_000, **small)
    assert total == Checkpoint(tmp_path / "parent").nbytes
    assert len(list((tmp_path / "parent").glob("*.safetensors"))) > 2
    told = inspect(tmp_path / "parent")["quantization"]
    assert told == {"layout": "compressed-tensors", "matrices": {"nvfp4": 2 + 2 * (4 * 2 + 2)}}
    sliced = cut(tmp_path / "parent", {"hidden": 32, "expert": 2, "mamba": 2, "layer": 4}, tmp_path / "small")
    decoded = packing.decode(sliced)
    assert all(bool(tensor.isfinite().all()) for tensor in decoded.values())
    assert plain_modules(sliced) <= set(ignored(sliced))
