"""`nestling inspect`: what is in a folder, from config and headers alone, in an instant and without torch."""

import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from test_arch import NANO

from nestling.arch import find
from nestling.checkpoint import Checkpoint
from nestling.cli import main
from nestling.inspect import inspect
from nestling.nest import Member, open_nest, write_nest
from nestling.slice import slice as cut_member
from nestling.sort import sort

ROOT = Path(__file__).parents[1]
NUM_EXPERTS = 128

# One process that looks at a folder: what it says, how long it took, how many bytes it read, and what it imported.
WATCHED = """
import json, sys, time
from pathlib import Path
import nestling.cli

def read():
    return int(Path("/proc/self/io").read_text().split()[1])

began, before = time.perf_counter(), read()
code = nestling.cli.main(["inspect", sys.argv[1], *sys.argv[2:]])
spent = {"seconds": time.perf_counter() - began, "read": read() - before, "code": code}
print(json.dumps(spent | {"modules": sorted({name.partition(".")[0] for name in sys.modules})}), file=sys.stderr)
"""


def watch(folder: Path, *flags: str) -> tuple[str, dict[str, Any]]:
    """What `nestling inspect` prints in a process of its own, and what that cost."""
    command = [sys.executable, "-W", "error", "-c", WATCHED, str(folder), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout, json.loads(done.stderr)


def headers(folder: Path) -> dict[str, dict[str, Any]]:
    """Every tensor's entry in the safetensors headers of a folder, read here byte by byte."""
    found: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            found |= json.loads(stream.read(length))
    return {name: one for name, one in found.items() if name != "__metadata__"}


def write_hollow(file: Path, shapes: Mapping[str, Iterable[int]]) -> None:
    """A safetensors file in bf16 whose data is one hole: it has its full length and takes no room."""
    header, start = {}, 0
    for name, shape in shapes.items():
        end = start + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(file, 8 + len(text) + start)


def nano_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of the 30B as its files hold them, written out from its description."""
    hidden, inner, states = 2688, 64 * 64, 8 * 128
    shapes: dict[str, tuple[int, ...]] = {
        "backbone.embeddings.weight": (131072, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (131072, hidden),
    }
    mixers: dict[str, dict[str, tuple[int, ...]]] = {
        "M": {
            "in_proj.weight": (2 * inner + 2 * states + 64, hidden), "conv1d.weight": (inner + 2 * states, 1, 4),
            "conv1d.bias": (inner + 2 * states,), "A_log": (64,), "D": (64,), "dt_bias": (64,),
            "norm.weight": (inner,), "out_proj.weight": (hidden, inner),
        },
        "*": {
            "q_proj.weight": (32 * 128, hidden), "k_proj.weight": (2 * 128, hidden), "v_proj.weight": (2 * 128, hidden),
            "o_proj.weight": (hidden, 32 * 128),
        },
        "E": {
            "gate.weight": (NUM_EXPERTS, hidden), "gate.e_score_correction_bias": (NUM_EXPERTS,),
            "shared_experts.up_proj.weight": (3712, hidden), "shared_experts.down_proj.weight": (hidden, 3712),
            **{f"experts.{i}.up_proj.weight": (1856, hidden) for i in range(NUM_EXPERTS)},
            **{f"experts.{i}.down_proj.weight": (hidden, 1856) for i in range(NUM_EXPERTS)},
        },
    }  # fmt: skip
    for layer, letter in enumerate(NANO["hybrid_override_pattern"]):
        shapes[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        shapes |= {f"backbone.layers.{layer}.mixer.{name}": shape for name, shape in mixers[letter].items()}
    return shapes


@pytest.fixture(scope="module")
def nano(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The 30B's folder with three shards that are all header and hole."""
    folder = tmp_path_factory.mktemp("nano")
    (folder / "config.json").write_text(json.dumps(NANO))
    shapes, weight_map = list(nano_shapes().items()), {}
    for i in range(3):
        part, name = dict(shapes[i::3]), f"model-{i + 1:05d}-of-00003.safetensors"
        write_hollow(folder / name, part)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sorted tiny hybrid with two more members."""
    root = tmp_path_factory.mktemp("nest")
    tiny.save("nemotron_h", root / "parent")
    made = sort(root / "parent", {}, root / "nest")
    members = [
        Member(name="wide", sizes={"hidden": 40, "effn": 16}, budget="active:0.7", is_trained=True),
        Member(name="thin", sizes={"hidden": 24, "layer": 4}),
    ]
    for member in members:
        made.members[member.name] = member
    write_nest(made, root / "nest")
    return root / "nest"


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_the_json_says_what_the_headers_add_up_to(
    name: str, parents: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(parents(name)), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"architecture", "parameters", "active_parameters", "bytes", "axes", "members"} <= told.keys()
    found = headers(parents(name))
    num_parameters = sum(prod(one["shape"]) for one in found.values())
    # Of the experts, each of which has tensors of its own on disk, a token runs the first so many, say.
    config = tiny.config(name)
    idle = [
        prod(one["shape"])
        for tensor, one in found.items()
        if "experts." in tensor and "shared" not in tensor
        and int(tensor.partition("experts.")[2].partition(".")[0]) >= config.num_experts_per_tok
    ]  # fmt: skip
    assert bool(idle) == (name in tiny.ROUTED)
    assert told["architecture"] == name
    assert told["parameters"] == num_parameters
    assert told["active_parameters"] == num_parameters - sum(idle)
    assert told["bytes"]["bf16"] == 2 * num_parameters
    assert told["bytes"]["fp32"] == 4 * num_parameters
    offsets = [one["data_offsets"] for one in found.values()]
    assert told["bytes_on_disk"] == {"F32": sum(end - start for start, end in offsets)}
    assert told["num_tensors"] == len(found)
    assert len(told["layers"]) == told["axes"]["layer"]["size"] == config.num_hidden_layers
    assert told["axes"]["hidden"]["size"] == config.hidden_size
    assert told["members"].keys() == {"100"}
    assert told["members"]["100"]["parameters"] == num_parameters


def test_a_members_numbers_are_those_of_the_folder_that_is_cut_from_it(nest: Path, tmp_path: Path) -> None:
    told = inspect(nest)["members"]
    assert list(told) == ["100", "wide", "thin"]
    assert [one["is_trained"] for one in told.values()] == [True, True, False]
    assert told["wide"]["sizes"] == {"hidden": 40, "effn": 16}
    assert told["wide"]["budget"] == "active:0.7"
    opened = open_nest(nest)
    for name, one in told.items():
        found = headers(cut_member(opened, opened.member(name), tmp_path / name))
        assert one["parameters"] == sum(prod(entry["shape"]) for entry in found.values()), name
        alone = inspect(tmp_path / name)
        same = ("parameters", "active_parameters", "bytes", "kv_bytes_per_token", "ssm_bytes_per_sequence")
        assert {key: one[key] for key in same} == {key: alone[key] for key in same}, name


def test_the_30b_is_inspected_in_under_two_seconds_without_torch_and_without_its_weights(nano: Path) -> None:
    out, spent = watch(nano, "--json")
    told = json.loads(out)
    assert spent["code"] == 0
    assert told["parameters"] == 31_577_940_288
    assert told["active_parameters"] == 3_580_076_352
    assert told["bytes"]["bf16"] == told["bytes_on_disk"]["BF16"] == 2 * 31_577_940_288
    assert not {"torch", "transformers", "numpy", "safetensors"} & set(spent["modules"])
    assert spent["seconds"] < 2
    assert spent["read"] < 63_155_880_576 / 1000


def test_the_text_shows_axes_sizes_grain_and_members(nest: Path) -> None:
    out, spent = watch(nest)
    assert "torch" not in spent["modules"]
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    told = inspect(nest)
    elastic = [axis for axis, one in told["axes"].items() if one["is_elastic"]]
    assert set(elastic) == {"hidden", "mamba", "mdim", "q", "expert", "effn", "sffn", "ffn", "layer"}
    for axis in elastic:
        one = told["axes"][axis]
        assert rows[axis][1:3] == [f"{one['size']:,}", str(one["grain"]["bf16"])]
        assert rows[axis][-1] == str(one["grain"]["nvfp4"])
        assert rows[axis][3:-1] == (one["within"] or ["-"])
    assert rows["effn"][3:-1] == ["layer", "expert"]
    for name in ("100", "wide", "thin"):
        one = told["members"][name]
        assert rows[name][1:3] == [f"{one['parameters']:,}", f"{one['active_parameters']:,}"]
    assert rows["100"][-1] == "everything"
    assert " ".join(rows["wide"][4:]) == "hidden 40, effn 16"
    assert " ".join(rows["thin"][4:]) == "hidden 24, layer 4 (untrained)"
    assert "fixed: " in out
    assert "head 9" in out
    assert "nemotron_h, 5 layers" in out
    assert f"parameters {told['parameters']:,}, active for one token {told['active_parameters']:,}" in out
    assert "multi-token" not in out


def test_the_grain_of_nvfp4_keeps_whole_tiles_along_what_a_matrix_contracts(nano: Path) -> None:
    """nvfp4 keeps one scale for each 16 values along the dim that a matrix contracts."""
    axes = inspect(nano)["axes"]
    assert axes["hidden"]["grain"] == {"bf16": 1, "nvfp4": 16}
    assert axes["effn"]["grain"] == {"bf16": 1, "nvfp4": 16}
    assert axes["sffn"]["grain"] == {"bf16": 1, "nvfp4": 16}
    # out_proj contracts 8 groups of heads of 64 channels: any number of heads makes whole tiles; 2 channels a head do.
    assert axes["mamba"]["grain"]["nvfp4"] == 1
    assert (8 * 8 * axes["mdim"]["grain"]["nvfp4"]) % 16 == 0
    assert axes["expert"]["grain"] == {"bf16": 1, "nvfp4": 1}


def test_multi_token_prediction_is_mentioned_and_not_counted(
    parents: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = inspect(parents("nemotron_h"))
    folder = shutil.copytree(parents("nemotron_h"), tmp_path / "mtp")
    weights = load_file(folder / "model.safetensors")
    extra = {"mtp.layers.0.norm.weight": torch.ones(48), "mtp.layers.0.eh_proj.weight": torch.ones(48, 96)}
    save_file(weights | extra, folder / "model.safetensors", {"format": "pt"})
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "2 multi-token-prediction tensors: not counted above; `nestling sort` needs --drop mtp" in out
    told = inspect(folder)
    assert told["dropped_if_sorted"] == sorted(extra)
    assert told["parameters"] == plain["parameters"]
    assert told["num_tensors"] == plain["num_tensors"] + 2
    # And sorting does need it, in those words.
    with pytest.raises(ValueError, match="--drop mtp"):
        sort(folder, {}, tmp_path / "nest")


def test_an_unknown_architecture_is_a_bad_request_that_says_how_to_add_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 8}))
    write_hollow(tmp_path / "model.safetensors", {"wte.weight": (5, 8)})
    assert main(["inspect", str(tmp_path)]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert printed.err.startswith("nestling inspect: model_type 'gpt2' is not one that Nestling knows")
    assert "docs/add-an-architecture.md" in printed.err
    assert "nemotron_h" in printed.err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_folder_that_lacks_a_tensor_is_refused_by_its_name(
    nano: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NANO))
    shapes = {name: shape for name, shape in nano_shapes().items() if "layers.51.mixer.experts.127.up" not in name}
    write_hollow(tmp_path / "model.safetensors", shapes)
    assert main(["inspect", str(tmp_path), *flags]) == 2
    assert "lacks 1 of" in (err := capsys.readouterr().err)
    assert "backbone.layers.51.mixer.experts.127.up_proj.weight" in err


def test_the_hollow_30b_has_exactly_the_tensors_of_its_table(nano: Path) -> None:
    """The shapes above were written by hand: they and the table agree name by name."""
    arch, complete = find(NANO)
    layout = arch.layout(complete)
    entries = Checkpoint(nano).entries
    assert entries.keys() == layout.tensors.keys()
    assert sum(file.stat().st_size for file in nano.glob("*.safetensors")) > 2 * 31_577_940_288
    assert sum(512 * file.stat().st_blocks for file in nano.glob("*.safetensors")) < 10_000_000
