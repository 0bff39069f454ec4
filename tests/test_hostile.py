"""Broken and hostile input: a clear error that names the file, and never a folder that looks whole.

Files are written here byte by byte, so that the package's own writer cannot hide what its reader forgives.
"""

import errno
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from safetensors.torch import load_file, save_file

from nestling.checkpoint import INDEX, SINGLE, Checkpoint, Writer, copy_sidecars, new_folder, read_json, write_json
from nestling.cli import main
from nestling.nest import Member, open_nest, write_nest
from nestling.shards import read_header
from nestling.slice import slice as slice_member
from nestling.sort import sort

ROOT = Path(__file__).parents[1]
SMALL = Member(name="S", sizes={"ffn": 16})


def shard(file: Path, header: object, data: bytes = b"") -> Path:
    """A safetensors file with any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def told(start: int, end: int, shape: list | None = None, dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"a": told(0, 8), "b": told(4, 12)}, 12, "'b' overlaps 'a'"),
        ({"a": told(0, 8), "b": told(12, 16)}, 16, "'b' leaves a gap behind 'a'"),
        ({"a": told(4, 8)}, 8, "'a' leaves a gap behind 'the header'"),
        ({"a": told(0, 8)}, 4, "cut short"),
        ({"a": told(0, 8)}, 12, "4 bytes more"),
        ({"a": told(0, 8, [3])}, 8, "8 bytes of data, but F32 of shape"),
        ({"a": told(0, 8, [2**62, 4])}, 8, "8 bytes of data, but F32 of shape"),
        ({"a": told(8, 0, [0])}, 8, "-8 bytes of data"),
        ({"a": told(0, 8, [-2, -1])}, 8, r"has shape \[-2, -1\]"),
        ({"a": told(0, 8, [2.0])}, 8, r"has shape \[2\.0\]"),
        ({"a": told(0, 8, [True, 2])}, 8, "has shape"),
        ({"a": told(0, 8, [10**30])}, 8, "has shape"),
        ({"a": told(0, 8) | {"data_offsets": [0]}}, 8, "expected two numbers"),
        ({"a": told(0, 8, dtype="F4")}, 8, "dtype 'F4', which Nestling does not know"),
        ({"a": told(0, 8) | {"dtype": ["F32"]}}, 8, "does not know"),
        ({"a": [1]}, 8, "expected an object with dtype"),
        ({"a": {"dtype": "F32"}}, 8, "expected an object with dtype"),
        ([1, 2], 0, "a list, expected an object"),
        (b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": 1}', 4, "'a' stands twice"),
        (b'{"\\ud800": {}}', 0, "broken safetensors header"),
        (b"\xff\xfe{}", 0, "broken safetensors header"),
        (b"[" * 100_000, 0, "broken safetensors header"),
        (b'{"a": 1' + b"0" * 5000 + b"}", 0, "broken safetensors header"),
        (b"", 0, "broken safetensors header"),
    ],
)
def test_a_header_that_lies_is_refused_and_the_file_named(tmp_path, header, data, message):
    file = shard(tmp_path / "model.safetensors", header, bytes(data))
    with pytest.raises(ValueError, match=message) as error:
        read_header(file)
    assert "model.safetensors" in str(error.value)


def test_a_header_length_past_the_file_is_refused_without_reading_it(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(ValueError, match=r"cut short.*9,223,372,036,854,775,808"):
        read_header(file)


def test_the_reader_takes_what_the_safetensors_library_writes(tmp_path):
    weights = {
        "a": torch.zeros(3, 0),
        "b": torch.tensor(1.0),
        "c": torch.ones(5, dtype=torch.bool),
        "d": torch.ones(2, 3),
    }
    save_file(weights, tmp_path / "x.safetensors", {"format": "pt"})
    found = read_header(tmp_path / "x.safetensors")
    assert {n: e.shape for n, e in found.items()} == {n: tuple(t.shape) for n, t in weights.items()}
    data = (tmp_path / "x.safetensors").read_bytes()
    for name, entry in found.items():
        assert data[entry.start : entry.start + entry.nbytes] == weights[name].numpy().tobytes()


# Indices.


def sharded(parent: Path, to: Path, shard_bytes: int = 20_000) -> Path:
    """The same checkpoint in several files."""
    whole = Checkpoint(parent)
    to.mkdir()
    writer = Writer(to, shard_bytes=shard_bytes)
    for name in whole.entries:
        writer.add(name, whole.read(name))
    writer.close()
    write_json(to / "config.json", whole.config)
    return to


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..", "x.bin",
                                  "a\\b.safetensors", ""])  # fmt: skip
def test_an_index_whose_shard_names_leave_the_folder_is_refused(parents, tmp_path, name):
    folder = sharded(parents("llama"), tmp_path / "many")
    index = read_json(folder / INDEX)
    index["weight_map"][next(iter(index["weight_map"]))] = name
    write_json(folder / INDEX, index)
    with pytest.raises(ValueError, match=r"expected the plain name of a \.safetensors file"):
        _ = Checkpoint(folder).entries


@pytest.mark.parametrize("index", [{}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(parents, tmp_path, index):
    folder = sharded(parents("llama"), tmp_path / "many")
    write_json(folder / INDEX, index)
    with pytest.raises(ValueError, match="has no weight_map"):
        _ = Checkpoint(folder).entries


def test_an_index_that_puts_a_tensor_into_another_shard_is_refused(parents, tmp_path):
    folder = sharded(parents("llama"), tmp_path / "many")
    index = read_json(folder / INDEX)
    names = list(index["weight_map"])
    index["weight_map"][names[0]], index["weight_map"][names[-1]] = (
        index["weight_map"][names[-1]], index["weight_map"][names[0]],
    )  # fmt: skip
    write_json(folder / INDEX, index)
    with pytest.raises(ValueError, match="but it is in model-"):
        _ = Checkpoint(folder).entries


def test_a_deleted_shard_stops_the_slice_and_is_named(parents, tmp_path):
    folder = sharded(parents("llama"), tmp_path / "many")
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=gone.name):
        slice_member(open_nest(folder), SMALL, tmp_path / "to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize("how", ["omitted name", "unlisted file"])
def test_tensors_that_the_index_omits_are_read_and_the_person_is_told(parents, tmp_path, how):
    folder = sharded(parents("llama"), tmp_path / "many")
    index = read_json(folder / INDEX)
    last = sorted(folder.glob("*.safetensors"))[-1]
    if how == "omitted name":
        index["weight_map"].popitem()
    else:
        index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != last.name}
        last.rename(folder / "extra.safetensors")
    write_json(folder / INDEX, index)
    said: list[str] = []
    small = slice_member(open_nest(folder), SMALL, tmp_path / "to", say=said.append)
    whole = slice_member(open_nest(parents("llama")), SMALL, tmp_path / "whole")
    assert load_file(small / SINGLE).keys() == load_file(whole / SINGLE).keys()
    assert any(line.startswith("note:") and "they are read all the same" in line for line in said)


def test_a_stray_file_cannot_override_a_mapped_tensor(parents, tmp_path):
    folder = sharded(parents("llama"), tmp_path / "many")
    save_file({"model.norm.weight": torch.zeros(48)}, folder / "zz.safetensors")
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' stands in two shards.*zz\.safetensors"):
        slice_member(open_nest(folder), SMALL, tmp_path / "to")


def test_a_stray_tensor_is_refused_by_its_name(parents, tmp_path):
    folder = shutil.copytree(parents("llama"), tmp_path / "parent")
    save_file({"evil.weight": torch.zeros(2)}, folder / "zz.safetensors")
    with pytest.raises(ValueError, match=r"no shape for parameter 'evil\.weight'"):
        slice_member(open_nest(folder), SMALL, tmp_path / "to")


def test_files_in_mistrals_own_format_beside_the_usual_ones_are_left_alone(parents, tmp_path):
    folder = shutil.copytree(parents("llama"), tmp_path / "parent")
    (folder / "consolidated.safetensors").write_bytes(b"not even a header")
    small = slice_member(open_nest(folder), SMALL, tmp_path / "to")
    assert not (small / "consolidated.safetensors").exists()


def test_a_tensor_of_another_models_shape_is_refused_before_anything_is_written(parents, tmp_path):
    folder = shutil.copytree(parents("llama"), tmp_path / "parent")
    weights = load_file(folder / SINGLE)
    weights["model.norm.weight"] = torch.ones(40)
    save_file(weights, folder / SINGLE, {"format": "pt"})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight' in .*has shape \(40,\).*\(48,\)"):
        slice_member(open_nest(folder), SMALL, tmp_path / "to")
    assert not list(tmp_path.glob(".to*"))


def test_a_pickle_is_never_loaded_nor_carried(parents, tmp_path):
    folder = shutil.copytree(parents("llama"), tmp_path / "parent")
    bomb = b"cos\nsystem\n(S'touch " + str(tmp_path / "owned").encode() + b"'\ntR."
    for name in ("pytorch_model.bin", "optimizer.pt", "extra.pkl", "rng.pth"):
        (folder / name).write_bytes(bomb)
    small = slice_member(open_nest(folder), SMALL, tmp_path / "to")
    assert not (tmp_path / "owned").exists()
    assert {f.suffix for f in small.iterdir()} <= {".json", ".safetensors", ".md"}


# Links.


def test_a_sidecar_link_that_leaves_the_folder_is_refused(tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    to.mkdir()
    (tmp_path / "secret").write_text("key")
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match=r"tokenizer\.json' is a symbolic link that leaves the folder"):
        copy_sidecars(source, to)
    assert not list(to.iterdir())


def test_a_folder_of_templates_that_is_a_link_outwards_is_refused(tmp_path):
    source, to, outside = tmp_path / "source", tmp_path / "to", tmp_path / "outside"
    for folder in (source, to, outside):
        folder.mkdir()
    (outside / "secret.jinja").write_text("key")
    (source / "additional_chat_templates").symlink_to(outside)
    with pytest.raises(ValueError, match="leaves the folder"):
        copy_sidecars(source, to)
    assert not list(to.rglob("*.jinja"))


def test_the_hubs_cache_of_links_is_sliced_like_a_plain_folder(tmp_path):
    parent = tiny.save("llama", tmp_path / "parent", is_chatty=True)
    hub = tmp_path / "models--a--b"
    snapshot, blobs = hub / "snapshots" / "abc", hub / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(parent.iterdir())):
        shutil.copyfile(file, blobs / f"{i:040x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:040x}")
    one = slice_member(open_nest(parent), SMALL, tmp_path / "one")
    two = slice_member(open_nest(snapshot), SMALL, tmp_path / "two")
    names = sorted(f.name for f in one.iterdir())
    assert names == sorted(f.name for f in two.iterdir())
    assert not any(f.is_symlink() for f in two.iterdir())
    same = [n for n in names if n != "README.md"]  # the card names the folder
    assert all((one / n).read_bytes() == (two / n).read_bytes() for n in same)


# Values.


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_weights_are_found_when_asked_and_only_where_they_are_kept(parents, tmp_path, value):
    folder = shutil.copytree(parents("llama"), tmp_path / "parent")
    weights = load_file(folder / SINGLE)
    weights["model.layers.1.mlp.up_proj.weight"][20, 3] = value
    save_file(weights, folder / SINGLE, {"format": "pt"})
    nest = open_nest(folder)
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.up_proj\.weight' holds infinities or NaN"):
        slice_member(nest, Member(name="L", sizes={"ffn": 24}), tmp_path / "to", check_finite=True)
    assert not list(tmp_path.glob("*to*"))
    slice_member(nest, SMALL, tmp_path / "to", check_finite=True)


def test_a_nest_json_that_belongs_to_other_weights_stops_the_slice(parents, tmp_path, capsys):
    sort(parents("llama"), {}, tmp_path / "nest")
    weights = load_file(tmp_path / "nest" / SINGLE)
    weights["model.norm.weight"] += 1
    save_file(weights, tmp_path / "nest" / SINGLE, {"format": "pt"})
    assert main(["slice", str(tmp_path / "nest"), "100", "--to", str(tmp_path / "to")]) == 2
    assert "nest.json was written with other weights" in capsys.readouterr().err
    assert not (tmp_path / "to").exists()


# Disks, interruptions.


def test_a_full_disk_is_an_error_that_says_so_and_leaves_nothing(parents, tmp_path, monkeypatch, capsys):
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    assert main(["slice", str(parents("llama")), "100", "--to", str(tmp_path / "to")]) == 1
    assert f"no room left on the disk of '{tmp_path / 'to'}'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_disk_with_too_little_room_is_refused_before_anything_is_written(parents, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ValueError, match=r"the slice has [\d,]+ bytes, the disk of .* has 10 left"):
        slice_member(open_nest(parents("llama")), SMALL, tmp_path / "to")
    assert not list(tmp_path.iterdir())


def test_short_writes_are_written_to_the_end(parents, tmp_path, monkeypatch):
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda handle, data, offset: whole(handle, data[:1000], offset))
    one = slice_member(open_nest(parents("llama")), SMALL, tmp_path / "one")
    monkeypatch.undo()
    two = slice_member(open_nest(parents("llama")), SMALL, tmp_path / "two")
    assert (one / SINGLE).read_bytes() == (two / SINGLE).read_bytes()


def test_a_replacement_that_cannot_be_renamed_keeps_the_old_folder(tmp_path, monkeypatch):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "old").write_text("old")
    (tmp_path / "to" / "config.json").write_text("{}")
    rename = Path.rename

    def fails(self: Path, target: Path) -> Path:
        if self.name.endswith(".part"):
            raise OSError("the disk went away")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="went away"), new_folder(tmp_path / "to", overwrite=True) as part:
        (part / "new").write_text("new")
    assert [f.name for f in tmp_path.iterdir()] == ["to"]
    assert (tmp_path / "to" / "old").read_text() == "old"


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_destination_that_holds_or_is_part_of_what_is_read_is_refused(tmp_path, overwrite):
    source = tmp_path / "models" / "nest"
    (source / "nest").mkdir(parents=True)
    for to in (source, tmp_path / "models", source / "nest"):
        with (
            pytest.raises(ValueError, match=r"which is read|that is read"),
            new_folder(to, overwrite=overwrite, source=source),
        ):
            raise AssertionError("must not get here")
    with new_folder(source / "small", source=source) as part:
        (part / "x").write_text("x")
    assert (source / "small" / "x").exists()


SLOW_SLICE = """
import os, sys, time
whole = os.pwrite
def slow(handle, data, offset):
    print("writing", flush=True)
    time.sleep(1)
    return whole(handle, data, offset)
os.pwrite = slow
from nestling.cli import main
sys.exit(main(["slice", sys.argv[1], "100", "--to", sys.argv[2]]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_in_the_middle_leaves_no_folder_that_looks_whole(parents, tmp_path, number):
    command = [sys.executable, "-c", SLOW_SLICE, str(parents("llama")), str(tmp_path / "to")]
    # In a background job Python ignores SIGINT unless it is set back.
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "writing\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert not (tmp_path / "to").exists()
    left = list(tmp_path.iterdir())
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert err == "nestling slice: stopped\n"
        assert not left
    else:
        assert [f.name.startswith(".to.") and f.name.endswith(".part") for f in left] == [True]
        with pytest.raises(ValueError, match=r"has no config\.json"):
            open_nest(left[0])


# Configs that would be believed for gigabytes.


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000"),
        ("llama", {"num_hidden_layers": "3"}, "num_hidden_layers = .3. is not one whole number"),
        ("mixtral", {"num_local_experts": 10**9}, "asks for 3,000,000,000 experts"),
        ("llama", {"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_a_config_that_asks_for_the_absurd_is_refused_at_once(parents, tmp_path, name, change, message):
    folder = shutil.copytree(parents(name), tmp_path / "parent")
    config = read_json(folder / "config.json") | change
    write_json(folder / "config.json", {k: v for k, v in config.items() if v is not None})
    with pytest.raises(ValueError, match=message):
        open_nest(folder)


# Fuzzing.


def valid_header() -> bytes:
    return json.dumps(
        {"__metadata__": {"format": "pt"}, "a": told(0, 8), "b": told(8, 24, [2, 2]), "c": told(24, 24, [0, 5])}
    ).encode()


def mutated(original: bytes, seed: int) -> bytes:
    """A text with a few bytes changed, removed, doubled or replaced by what often breaks parsers."""
    draw, text = random.Random(seed), bytearray(original)
    for _ in range(draw.randint(1, 4)):
        at = draw.randrange(len(text) or 1)
        piece = draw.choice(
            [b"[", b"]", b"{", b"}", b'"', b"-1", b"1e999", b"NaN", b"null", b"\\ud800", b"\x00", b"99" * 40]
        )
        match draw.randrange(5):
            case 0:
                text[at : at + 1] = bytes([draw.randrange(256)])
            case 1:
                del text[at : at + draw.randint(1, 20)]
            case 2:
                text[at:at] = piece
            case 3:
                text[at:at] = text[at : at + draw.randint(1, 30)]
            case 4:
                digits = [i for i, c in enumerate(text) if chr(c).isdigit()]
                if digits:
                    text[(i := draw.choice(digits)) : i + 1] = str(draw.choice([0, 7, 2**31, 2**63, 2**64])).encode()
    return bytes(text)


def check_message(error: ValueError, file: str = "") -> None:
    """Our own error: short, and it names the file. A subclass such as UnicodeDecodeError would be Python's own."""
    assert type(error) is ValueError
    assert file in str(error)
    assert len(str(error)) < 2000


def check_header_fuzz(folder: Path, seeds: range) -> None:
    """Only our own error, and no runaway memory."""
    accepted = 0
    tracemalloc.start()
    for seed in seeds:
        text = mutated(valid_header(), seed)
        file = folder / "x.safetensors"
        length = len(text) if seed % 3 else random.Random(seed).choice([0, 1, 2**40, 2**64 - 1, len(text) + 1])
        file.write_bytes(struct.pack("<Q", length) + text + bytes(24))
        try:
            found = read_header(file)
        except ValueError as error:
            check_message(error, "x.safetensors")
        else:
            accepted += 1
            assert sum(entry.nbytes for entry in found.values()) == file.stat().st_size - 8 - length
    assert accepted < len(seeds)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


def check_nest_fuzz(folder: Path, seeds: range) -> None:
    original = (folder / "nest.json").read_bytes()
    tracemalloc.start()
    for seed in seeds:
        (folder / "nest.json").write_bytes(mutated(original, seed))
        try:
            nest = open_nest(folder)
            for member in nest.members.values():
                nest.cost(member)
        except ValueError as error:
            check_message(error)
    (folder / "nest.json").write_bytes(original)
    assert tracemalloc.get_traced_memory()[1] < 50_000_000
    tracemalloc.stop()


@pytest.fixture
def nest_folder(parents, tmp_path):
    nest = sort(parents("llama"), {}, tmp_path / "nest")
    nest.members["S"] = Member(name="S", sizes={"ffn": 16, "layer": 2}, is_trained=True)
    write_nest(nest, tmp_path / "nest")
    return tmp_path / "nest"


def test_mutated_headers_raise_only_our_own_error(tmp_path):
    check_header_fuzz(tmp_path, range(400))


def test_mutated_nest_json_raises_only_our_own_error(nest_folder):
    check_nest_fuzz(nest_folder, range(100))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_mutated_headers_raise_only_our_own_error(tmp_path):
    check_header_fuzz(tmp_path, range(400, 10_400))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_mutated_nest_jsons_raise_only_our_own_error(nest_folder):
    check_nest_fuzz(nest_folder, range(100, 10_100))


any_json = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    key=some.sampled_from(["format_version", "members", "layer_order", "parent", "fingerprint", "recipe", "S"]),
    value=any_json,
)
def test_any_json_in_any_place_of_nest_json_raises_only_our_own_error(nest_folder, key, value):
    original = read_json(nest_folder / "nest.json")
    changed = json.loads(json.dumps(original))
    (changed["members"] if key == "S" else changed)[key] = value
    (nest_folder / "nest.json").write_text(json.dumps(changed))
    try:
        open_nest(nest_folder)
    except ValueError as error:
        check_message(error)
    finally:
        write_json(nest_folder / "nest.json", original)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=any_json | some.dictionaries(some.text(max_size=4), any_json, max_size=4), data=some.binary(max_size=16))
def test_any_json_as_a_header_raises_only_our_own_error(tmp_path, header, data):
    file = shard(tmp_path / "x.safetensors", header, data)
    try:
        read_header(file)
    except ValueError as error:
        check_message(error, "x.safetensors")


def test_six_thousand_small_tensors_take_linear_time(tmp_path):
    """Ten times as many tensors take about ten times as long; with anything quadratic it would be a hundred."""
    seconds = {}
    for experts in (32, 320):
        made = tiny.config("qwen3_moe", num_experts=experts, num_hidden_layers=6, mlp_only_layers=[],
                           moe_intermediate_size=4, hidden_size=8, vocab_size=16)  # fmt: skip
        folder = tmp_path / f"parent{experts}"
        folder.mkdir()
        arch, complete = tiny.find({"model_type": "qwen3_moe", **made.to_dict()})
        layout = arch.layout(complete)
        shapes = {n: tiny_shape(layout, n) for n in layout.tensors}
        save_file({n: torch.zeros(shape) for n, shape in shapes.items()}, folder / SINGLE, {"format": "pt"})
        write_json(folder / "config.json", {"model_type": "qwen3_moe", **made.to_dict()})
        begun = time.process_time()
        slice_member(open_nest(folder), Member(name="S", sizes={"effn": 2}), tmp_path / f"small{experts}")
        seconds[len(shapes)] = time.process_time() - begun
    (few, fast), (many, slow) = sorted(seconds.items())
    assert many > 5800
    assert slow / max(fast, 0.01) < 4 * many / few


def tiny_shape(layout, name: str) -> tuple[int, ...]:
    from nestling.axes import dims

    return dims(layout.tensors[name].shape, layout.sizes)
