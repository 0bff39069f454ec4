"""Folders in and out: what is broken is named, what is written is whole, and nothing is left behind."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nestling.checkpoint import INDEX, SINGLE, Checkpoint, Writer, copy_sidecars, new_folder, read_json, write_json


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return {f"t{i}": torch.randn(4, 5, generator=draws) for i in range(6)} | {
        "half": torch.ones(3, dtype=torch.bfloat16)
    }


def write(folder: Path, content: dict[str, torch.Tensor], shard_bytes: int = 10**9) -> Path:
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", {"model_type": "llama"})
    writer = Writer(folder, shard_bytes=shard_bytes)
    for name, tensor in content.items():
        writer.add(name, tensor)
    writer.close()
    return folder


def test_one_shard_has_no_index_and_comes_back_equal(tmp_path):
    folder = write(tmp_path / "one", tensors())
    assert sorted(f.name for f in folder.iterdir()) == ["config.json", SINGLE]
    found = Checkpoint(folder)
    assert found.entries.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert torch.equal(found.read(name), tensor)
        assert found.read(name).dtype == tensor.dtype
        assert found.entries[name].shape == tuple(tensor.shape)
    assert found.entries["half"].dtype == "BF16"
    assert found.nbytes == 6 * 4 * 5 * 4 + 6


def test_several_shards_get_the_names_and_the_index_that_stock_loaders_expect(tmp_path):
    # Two tensors of 80 bytes each; the short one goes beside the last.
    folder = write(tmp_path / "many", tensors(), shard_bytes=170)
    files = sorted(f.name for f in folder.glob("*.safetensors"))
    assert files == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = read_json(folder / INDEX)
    assert index["metadata"]["total_size"] == Checkpoint(folder).nbytes
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(folder / file)[name], tensors()[name])
    assert index["weight_map"].keys() == tensors().keys()
    assert not list(folder.glob("*.part"))


def test_a_tensor_larger_than_a_shard_gets_one_of_its_own(tmp_path):
    folder = write(tmp_path / "big", {"a": torch.zeros(2), "b": torch.zeros(100), "c": torch.zeros(2)}, shard_bytes=50)
    assert Checkpoint(folder).entries.keys() == {"a", "b", "c"}
    assert len(list(folder.glob("*.safetensors"))) == 3


def test_a_view_is_written_as_what_it_shows(tmp_path):
    whole = torch.arange(40.0).view(8, 5)
    folder = write(
        tmp_path / "views", {"rows": whole[:3], "columns": whole[:, :2], "turned": whole.T, "again": whole[:3]}
    )
    found = Checkpoint(folder)
    assert torch.equal(found.read("columns"), whole[:, :2])
    assert torch.equal(found.read("turned"), whole.T)
    assert torch.equal(found.read("again"), whole[:3])
    assert (folder / SINGLE).stat().st_size < 2000  # not the whole storage for each view


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no config\.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ValueError, match="reads safetensors only"):
        _ = Checkpoint(tmp_path).entries


@pytest.mark.parametrize(
    ("text", "told"), [("{", "not valid JSON"), ("[1]", "holds a list"), ("\xff", "not valid JSON")]
)
def test_a_broken_config_is_named(tmp_path, text, told):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=rf"config\.json.*{told}"):
        Checkpoint(tmp_path)


def test_shards_that_are_not_there_are_named(tmp_path):
    folder = write(tmp_path / "many", tensors(), shard_bytes=170)
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00003\.safetensors, model-00003-of-00003\.safetensors\.$"):
        _ = Checkpoint(folder).entries


def test_tensors_that_the_index_lists_and_no_shard_holds_are_named(tmp_path):
    folder = write(tmp_path / "many", tensors(), shard_bytes=170)
    index = read_json(folder / INDEX)
    index["weight_map"] |= {"ghost": "model-00001-of-00003.safetensors"}
    write_json(folder / INDEX, index)
    with pytest.raises(ValueError, match="lists 1 tensors that no shard holds: ghost"):
        _ = Checkpoint(folder).entries


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    folder = write(tmp_path / "many", tensors(), shard_bytes=170)
    save_file({"t0": torch.zeros(1)}, folder / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match="'t0' stands in two shards"):
        _ = Checkpoint(folder).entries


@pytest.mark.parametrize("length", [0, 4, 8, 30])
def test_a_file_cut_inside_its_header_is_named(tmp_path, length):
    folder = write(tmp_path / "cut", tensors())
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        _ = Checkpoint(folder).entries


def test_a_file_cut_inside_its_data_is_named(tmp_path):
    folder = write(tmp_path / "cut", tensors())
    (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors.*cut short"):
        _ = Checkpoint(folder).entries


def test_a_header_that_is_no_json_is_named(tmp_path):
    folder = write(tmp_path / "cut", tensors())
    (folder / SINGLE).write_bytes(struct.pack("<Q", 5) + b"{oops" + bytes(100))
    with pytest.raises(ValueError, match="broken safetensors header"):
        _ = Checkpoint(folder).entries


def test_a_fingerprint_tells_weights_configs_and_shapes_apart_but_not_folders(tmp_path):
    prints = {
        "same": Checkpoint(write(tmp_path / "a", tensors())).fingerprint(),
        "copy": Checkpoint(write(tmp_path / "b", tensors())).fingerprint(),
        "weights": Checkpoint(write(tmp_path / "c", tensors(seed=1))).fingerprint(),
        "shape": Checkpoint(write(tmp_path / "d", tensors() | {"t0": tensors()["t0"].view(5, 4)})).fingerprint(),
    }
    write_json(write(tmp_path / "e", tensors()) / "config.json", {"model_type": "mistral"})
    prints["config"] = Checkpoint(tmp_path / "e").fingerprint()
    assert prints["same"] == prints.pop("copy")
    assert len(set(prints.values())) == len(prints)


def test_a_new_folder_appears_when_it_is_complete(tmp_path):
    with new_folder(tmp_path / "deep" / "to") as part:
        (part / "file").write_text("x")
        assert not (tmp_path / "deep" / "to").exists()
    assert (tmp_path / "deep" / "to" / "file").read_text() == "x"
    assert [f.name for f in (tmp_path / "deep").iterdir()] == ["to"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_if_writing_fails(tmp_path, error):
    def fail() -> None:
        with new_folder(tmp_path / "to") as part:
            (part / "file").write_text("x")
            raise error

    with pytest.raises(error):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_we_did_not_write_is_never_replaced(tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="does not look like a folder"), new_folder(tmp_path / "to", overwrite=True):
        raise AssertionError("must not get here")
    assert (tmp_path / "to" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="is a file"), new_folder(tmp_path / "file", overwrite=True):
        raise AssertionError("must not get here")


def test_an_existing_folder_is_not_touched_unless_told(tmp_path):
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "old").write_text("old")
    (tmp_path / "to" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"exists.*--overwrite"), new_folder(tmp_path / "to"):
        raise AssertionError("must not get here")
    with pytest.raises(RuntimeError), new_folder(tmp_path / "to", overwrite=True):
        raise RuntimeError
    assert (tmp_path / "to" / "old").read_text() == "old"  # a failed replacement keeps what was there
    with new_folder(tmp_path / "to", overwrite=True) as part:
        (part / "new").write_text("new")
    assert [f.name for f in (tmp_path / "to").iterdir()] == ["new"]  # no leftovers of an older run


def test_sidecars_are_carried_and_weights_and_indices_are_not(tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    source.mkdir()
    to.mkdir()
    carried = ["LICENSE", "added_tokens.json", "chat_template.jinja", "generation_config.json", "modeling_own.py",
               "preprocessor_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
               "vocab.txt"]  # fmt: skip
    left = [SINGLE, INDEX, "model-00001-of-00002.safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json",
            "weights.gguf", "config.json", "nest.json", "README.md"]  # fmt: skip
    for name in carried + left:
        (source / name).write_text(name)
    assert copy_sidecars(source, to) == sorted(carried)
    assert sorted(f.name for f in to.iterdir()) == sorted(carried)
    assert all((to / n).read_text() == n for n in carried)


def test_further_chat_templates_in_a_folder_of_their_own_are_carried(tmp_path):
    source, to = tmp_path / "source", tmp_path / "to"
    (source / "additional_chat_templates").mkdir(parents=True)  # where transformers saves all but the first
    to.mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    copy_sidecars(source, to)
    assert (to / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"


def test_json_is_written_for_people(tmp_path):
    write_json(tmp_path / "a.json", {"b": [1], "c": "\u00e9"})
    assert (tmp_path / "a.json").read_text("utf-8").count("\n") > 3
    assert json.loads((tmp_path / "a.json").read_text("utf-8")) == {"b": [1], "c": "\u00e9"}
