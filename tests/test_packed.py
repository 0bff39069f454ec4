"""Quantized folders through the whole slicer: blocks of rows, verify, the model card, memory, and what is refused."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import packing
import pytest
import torch
from test_cut import copied
from test_verify import MEASURED, ROOT

from benchmarks.packed import write_packed
from nestling.axes import take
from nestling.checkpoint import SINGLE, Checkpoint, read_json
from nestling.cli import main
from nestling.formats.scales import what_is_wrong
from nestling.nest import FULL, Member, Nest, open_nest, prefix
from nestling.shards import Entry
from nestling.slice import describe
from nestling.slice import slice as slice_member
from nestling.verify import check_against, check_folder

HYBRID = Member(name="S", sizes={"hidden": 32, "mamba": 2, "q": 2, "expert": 3, "effn": 16, "layer": 4})


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """A tiny hybrid in NVFP4. To read only."""
    root = tmp_path_factory.mktemp("packed")
    return packing.pack(packing.plain("nemotron_h", root / "plain"), root / "parent", "NVFP4")


@pytest.fixture
def slice_of(parent, tmp_path) -> tuple[Nest, Path]:
    nest = open_nest(parent)
    return nest, slice_member(nest, HYBRID, tmp_path / "small")


def spelled(parent: Path, tmp_path: Path) -> Path:
    return packing.respell(parent, tmp_path / "modelopt", "NVFP4", with_cache=True)


def flip(file: Path, entry: Entry) -> None:
    """Change one bit of a tensor's first value."""
    data = bytearray(file.read_bytes())
    data[entry.start] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("limit", [1, 48, 1000])
def test_codes_and_scales_are_cut_in_blocks_of_rows_as_take_cuts_them_whole(parent, limit):
    nest = open_nest(parent)
    stored, kinds = packing.load_folder(parent), set()
    for place in nest.places(HYBRID):
        entry = nest.checkpoint.entries[place.source]
        if limit == 1 and entry.nbytes > 4000:
            continue  # a block a value is slow
        kinds.add(place.source.rpartition(".")[2])
        expected = take(stored[place.source], place.shape, nest.layout.sizes, prefix(HYBRID), units=place.units)
        found = copied(entry, place.shape, nest.layout.sizes, prefix(HYBRID), limit)
        assert found.tobytes() == expected.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), place.name
    assert {"weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"} <= kinds


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_a_quantized_slice_is_verified_alone_and_against_its_nest(layout, parent, tmp_path, capsys):
    folder = parent if layout == "compressed-tensors" else spelled(parent, tmp_path)
    sizes = ",".join(f"{axis}={n}" for axis, n in HYBRID.sizes.items())
    assert main(["slice", str(folder), "--sizes", sizes, "--to", str(tmp_path / "small")]) == 0
    assert main(["verify", str(tmp_path / "small"), "--against", str(folder), sizes]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"quantized, {layout}: \d+ matrices in nvfp4; every scale is there, above zero and finite", out)
    assert "every value is the nest's, bit by bit" in out
    assert "logits not compared: the nest is quantized" in out


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"])
def test_one_flipped_bit_in_a_quantized_slice_is_found_and_named(part, slice_of):
    nest, small = slice_of
    name = f"backbone.layers.1.mixer.experts.2.up_proj.{part}"
    flip(small / SINGLE, Checkpoint(small).entries[name])
    with pytest.raises(ValueError, match=rf"{name}' in .* differs"):
        check_against(small, nest, HYBRID)


def test_a_description_that_is_not_the_members_is_found(parent, tmp_path):
    nest = open_nest(spelled(parent, tmp_path))
    small = slice_member(nest, HYBRID, tmp_path / "small")
    assert check_against(small, nest, HYBRID)
    told = read_json(small / "hf_quant_config.json")
    (small / "hf_quant_config.json").write_text(json.dumps(told | {"producer": {}}))
    with pytest.raises(ValueError, match=r"hf_quant_config\.json of .* is not that of member S"):
        check_against(small, nest, HYBRID)


@pytest.mark.parametrize(
    ("part", "value", "what"),
    [("weight_global_scale", 0.0, "zero"), ("weight_scale", float("nan"), "NaN"), ("input_global_scale", -1.0, "neg")],
)
def test_a_bad_scale_in_a_folder_is_found_without_its_nest(part, value, what, parent, tmp_path):
    folder = shutil.copytree(parent, tmp_path / "folder")
    name = f"backbone.layers.1.mixer.experts.2.up_proj.{part}"
    packing.rewrite(folder, lambda stored: stored[name].view(-1)[:1].copy_(torch.tensor([value])))
    with pytest.raises(ValueError, match=rf"1 scales are not positive and finite: '{re.escape(name)}' \({what}"):
        check_folder(folder)
    with pytest.raises(ValueError, match=re.escape(name)):
        list(describe(open_nest(folder), Member(name=FULL, sizes={})))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_value_of_a_scale_is_judged_as_torch_judges_it(dtype):
    kind = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float16: "F16",
            torch.float32: "F32", torch.float64: "F64"}[dtype]  # fmt: skip
    size = torch.empty(0, dtype=dtype).element_size()
    draws = np.random.default_rng(0)
    every = np.arange(256**size, dtype=f"u{size}") if size < 3 else draws.integers(0, 2 ** (8 * size), 3000, f"u{size}")
    odd = torch.tensor([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan"), 1e-45], dtype=torch.float64).to(
        dtype
    )
    every = np.concatenate([every[:: max(1, len(every) // 3000)], odd.view(torch.uint8).numpy().view(f"u{size}")])
    for bits in every:
        data = np.array([bits])
        value = torch.from_numpy(data.view(np.uint8)).view(dtype).double().item()
        assert (what_is_wrong(data.view(np.uint8), kind) == "") == (0 < value < float("inf")), value


def test_fit_counts_quantized_weights_as_they_are_stored(parent, tmp_path, capsys):
    small = slice_member(open_nest(parent), Member(name="S", sizes={}), tmp_path / "all")
    stored = sum(entry.nbytes for entry in Checkpoint(small).entries.values())
    assert main(["slice", str(parent), "--fit", "1GiB", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "weights as stored" in out
    assert re.search(rf"^100 +{stored:,} ", out, re.MULTILINE)
    assert main(["slice", str(parent), "--fit", "1GiB", "--format", "bf16", "--dry-run"]) == 0
    count = open_nest(parent).cost(Member(name="S", sizes={})).parameters
    assert re.search(rf"^100 +{2 * count:,} ", capsys.readouterr().out, re.MULTILINE)


def test_the_model_card_says_the_bytes_that_are_stored(slice_of):
    _, small = slice_of
    card = (small / "README.md").read_text()
    assert f"weights as stored: {Checkpoint(small).nbytes:,} bytes" in card
    assert "bf16" not in card


def test_gguf_of_quantized_weights_is_refused_and_nothing_written(parent, tmp_path, capsys):
    assert main(["slice", str(parent), "full", "--format", "gguf", "--to", str(tmp_path / "out.gguf")]) == 2
    assert "needs plain weights" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_tied_head_that_is_stored_twice_beside_quantized_weights_is_written_once(tmp_path):
    plain = packing.plain("llama", tmp_path / "plain", tie_word_embeddings=True)
    folder = packing.pack(plain, tmp_path / "parent", "NVFP4A16")
    packing.rewrite(
        folder, lambda stored: stored.update({"lm_head.weight": stored["model.embed_tokens.weight"].clone()})
    )
    nest, member = open_nest(folder), Member(name="S", sizes={"hidden": 32, "ffn": 48})
    assert nest.has_head_twice
    small = slice_member(nest, member, tmp_path / "small")
    assert "lm_head.weight" not in Checkpoint(small).entries
    assert check_against(small, nest, member)


def test_memory_does_not_grow_with_the_largest_packed_tensor(tmp_path):
    """Two matrices of 176 MB of codes and 22 MB of scales each; one whole would not fit into the bound."""
    sizes = {"vocab_size": 64, "num_attention_heads": 2, "head_dim": 16, "mamba_num_heads": 16, "mamba_head_dim": 8,
             "ssm_state_size": 16, "intermediate_size": 131072}  # fmt: skip
    write_packed(tmp_path / "parent", pattern="M-", **sizes)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "parent"), str(tmp_path / "small")]
    grown = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert Checkpoint(tmp_path / "small").nbytes > 2 * 131072 * 1920 // 2
    assert grown < 150_000_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("fp4", "is fp4, expected an object"),
        ({"config_groups": []}, "config_groups is a list"),
        ({"config_groups": {"group_0": 4}}, "config_groups 'group_0' is 4"),
        ({"config_groups": {"group_0": {"weights": "int4"}}}, "weights is a str"),
        ({"ignore": "lm_head"}, "ignore is a str"),
        ({"ignore": [7]}, "7 stands among names of modules"),
        ({"ignore": ["re:(gate"]}, "is no regular expression"),
        ({"config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "strategy": "block",
                                                    "block_structure": [0, "all"]}}}}, "expected two whole numbers"),
    ],
)  # fmt: skip
def test_a_broken_description_of_the_quantization_is_an_error_of_ours(change, message, parent, tmp_path):
    folder = shutil.copytree(parent, tmp_path / "folder")
    section = read_json(folder / "config.json")["quantization_config"]
    packing.edit(folder, quantization_config=change if isinstance(change, str) else section | change)
    with pytest.raises(ValueError, match=message):
        open_nest(folder)
