"""Folders and requests that are odd, not hostile: what other tools write, and what people type."""

import json
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from nestling import hf
from nestling.checkpoint import Checkpoint, read_json, write_json
from nestling.cli import main
from nestling.inspect import inspect
from nestling.nest import open_nest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def folder(parents, tmp_path):
    """A llama of its own, to be changed."""
    return Path(shutil.copytree(parents("llama"), tmp_path / "llama"))


def change_config(folder: Path, **changes: object) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | changes)


def add_tensors(folder: Path, more: dict[str, torch.Tensor]) -> None:
    save_file(load_file(folder / "model.safetensors") | more, folder / "model.safetensors", metadata={"format": "pt"})


def slice_error(capsys: pytest.CaptureFixture, folder: Path, *flags: str) -> str:
    """The error of a slice that is a bad request and leaves nothing beside the folder."""
    before = sorted(folder.parent.iterdir())
    assert main(["slice", str(folder), *flags]) == 2
    assert sorted(folder.parent.iterdir()) == before
    return capsys.readouterr().err


def test_sizes_written_as_56_0_are_read_and_written_as_whole_numbers(folder, tmp_path):
    change_config(
        folder,
        intermediate_size=56.0,
        num_attention_heads=6.0,
        hidden_size=48.0,
        num_hidden_layers=3.0,
        vocab_size=96.0,
    )
    assert main(["slice", str(folder), "--sizes", "q=2", "--to", str(tmp_path / "small")]) == 0
    text = (tmp_path / "small" / "config.json").read_text()
    for key, size in {"intermediate_size": 56, "num_attention_heads": 4, "num_hidden_layers": 3}.items():
        assert f'"{key}": {size},' in text
    hf.load_model(tmp_path / "small")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (56.5, "intermediate_size = 56.5 is not one whole number above zero. Correct"),
        ("56", 'intermediate_size = "56" is not one whole number above zero. Correct'),
        (
            [56, 40, 56],
            r"intermediate_size = [56, 40, 56] is not one whole number above zero. Sizes that differ by layer",
        ),
    ],
)
def test_a_size_that_is_no_number_is_refused_with_the_right_reason(value, message, folder, tmp_path, capsys):
    change_config(folder, intermediate_size=value)
    assert message in slice_error(capsys, folder, "full", "--to", str(tmp_path / "small"))


@pytest.mark.parametrize("name", ["model.rotary_emb.inv_freq", "model.layers.1.self_attn.rotary_emb.inv_freq"])
def test_angles_that_old_checkpoints_stored_are_left_out_with_a_note(name, folder, tmp_path, capsys):
    add_tensors(folder, {name: torch.rand(4)})
    assert main(["slice", str(folder), "--sizes", "ffn=16", "--to", str(tmp_path / "small")]) == 0
    assert "note: 1 tensors named *.rotary_emb.inv_freq are left out" in capsys.readouterr().out
    assert name not in Checkpoint(tmp_path / "small").entries
    assert main(["verify", str(tmp_path / "small"), "--against", str(folder), "ffn=16"]) == 0
    assert any("inv_freq" in line for line in inspect(folder)["notes"])


def test_inspect_of_a_config_that_contradicts_the_weights_says_so(folder, capsys):
    change_config(folder, intermediate_size=60)
    assert main(["inspect", str(folder)]) == 2
    assert "has shape (56, 48), but config.json makes 'ffn, hidden' (60, 48)" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e4m3fn])
def test_codes_without_a_description_are_not_taken_for_weights(dtype, folder, tmp_path, capsys):
    name = "model.layers.0.mlp.up_proj.weight"
    add_tensors(folder, {name: torch.ones(56, 48).to(dtype)})
    error = slice_error(capsys, folder, "full", "--to", str(tmp_path / "small"))
    assert f"'{name}'" in error
    assert "speaks of no quantization" in error


@pytest.mark.parametrize(
    ("file", "text"), [("config.json", '{"hidden_size": 12, '), ("nest.json", '{"format_version": 1, ')]
)
def test_a_key_that_stands_twice_is_refused_as_readers_differ_on_which_counts(file, text, tmp_path, parents, capsys):
    from nestling.sort import sort

    nest = sort(parents("llama"), {}, tmp_path / "nest")
    (nest.folder / file).write_text((nest.folder / file).read_text().replace("{", text, 1))
    assert "stands twice" in slice_error(capsys, nest.folder, "full", "--to", str(tmp_path / "small"))


@pytest.mark.parametrize("change", [{"architecture": "mixtral"}, {"sizes": {"hidden": 7}}])
def test_a_nest_json_that_speaks_of_other_sizes_is_refused(change, parents, tmp_path, capsys):
    from nestling.sort import sort

    nest = sort(parents("llama"), {}, tmp_path / "nest")
    write_json(nest.folder / "nest.json", read_json(nest.folder / "nest.json") | change)
    error = slice_error(capsys, nest.folder, "full", "--to", str(tmp_path / "small"))
    assert "One of them was edited" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0 is not one whole number above zero"),
        ({"num_attention_heads": -6}, "num_attention_heads = -6 is not one whole number above zero"),
        ({"sliding_window": "5"}, 'sliding_window = "5" is not one whole number'),
        ({"model_type": ["llama"]}, "is not one that Nestling knows"),
        ({"layer_types": 7}, "layer_types is 7, expected a list"),
        ({"layer_types": ["full_attention", "mamba", 3]}, "kinds that a llama does not have: 3, mamba"),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings is "false", expected a bool'),
    ],
)
def test_a_config_of_the_wrong_kinds_is_an_error_that_names_the_key(changes, message, folder, tmp_path, capsys):
    change_config(folder, **changes)
    assert message in slice_error(capsys, folder, "full", "--to", str(tmp_path / "small"))
    assert main(["inspect", str(folder)]) == 2
    assert message in capsys.readouterr().err


def test_remote_code_named_by_a_bare_text_is_no_crash(folder, tmp_path):
    change_config(folder, auto_map="modeling_own.Own")
    assert main(["slice", str(folder), "full", "--to", str(tmp_path / "small")]) == 0


def test_a_room_of_four_hundred_digits_is_a_bad_request(folder, capsys):
    assert "cannot read '9999" in slice_error(capsys, folder, "--fit", "9" * 400, "--dry-run")


def test_verify_says_when_the_stock_class_refuses_the_nests_own_config(folder, tmp_path, capsys):
    change_config(folder, intermediate_size=56.0)
    assert main(["slice", str(folder), "--sizes", "q=2", "--to", str(tmp_path / "small")]) == 0
    assert main(["verify", str(tmp_path / "small"), "--against", str(folder), "q=2"]) == 0
    assert "the stock class refuses the nest's own config.json" in capsys.readouterr().out


def test_an_axis_that_is_asked_for_twice_is_refused(folder, tmp_path, capsys):
    error = slice_error(capsys, folder, "--sizes", "ffn=16,ffn=8", "--to", str(tmp_path / "small"))
    assert "name axis 'ffn' twice" in error


def test_a_width_that_the_stock_config_refuses_beside_its_heads_is_not_written(folder, tmp_path, capsys):
    error = slice_error(capsys, folder, "--sizes", "hidden=32", "--to", str(tmp_path / "small"))
    assert "hidden_size = 32 is not a multiple of num_attention_heads = 6" in error
    assert "Nearest: 30 or 36" in error
    assert main(["slice", str(folder), "--sizes", "hidden=30", "--to", str(tmp_path / "small")]) == 0
    hf.load_model(tmp_path / "small")


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_the_table_refuses_a_width_exactly_if_the_stock_config_does(name):
    arch, complete = tiny.known(name)
    for width in (30, 32, 40, 48):
        small = complete | {"hidden_size": width}
        is_taken = hf.takes_config({key: small[key] for key in ("model_type", *arch.config) if key in small})
        with nullcontext() if is_taken else pytest.raises(ValueError, match=r"the stock .* config refuses"):
            arch.check_loads(small)


def test_numbers_that_equal_nothing_do_not_make_a_slice_differ_from_its_nest(folder, tmp_path):
    change_config(folder, unknown_number=float("nan"))
    assert main(["slice", str(folder), "--sizes", "ffn=16", "--to", str(tmp_path / "small")]) == 0
    assert main(["verify", str(tmp_path / "small"), "--against", str(folder), "ffn=16"]) == 0


def test_a_destination_below_a_file_or_at_a_dead_link_is_a_bad_request(folder, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nowhere")
    assert "is a file" in slice_error(capsys, folder, "full", "--to", str(tmp_path / "file" / "deep" / "small"))
    assert "is a link to 'nowhere'" in slice_error(capsys, folder, "full", "--to", str(tmp_path / "link"))


def test_a_width_that_the_stock_kernel_of_experts_cannot_read_is_said(tmp_path, capsys):
    parent = tiny.save("nemotron_h", tmp_path / "parent", is_mixed=True)
    assert main(["slice", str(parent), "--sizes", "hidden=32,effn=12", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "note: size 12 along 'effn' is not a multiple of 8: stock transformers may not run the experts" in out
    assert "size 32" not in out


def test_the_folder_one_stands_in_can_be_written_anew(folder, tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path / "small")
    assert main(["slice", str(folder), "full", "--to", ".", "--overwrite"]) == 0
    assert (tmp_path / "small" / "config.json").is_file()
    assert open_nest(tmp_path / "small").fingerprint == open_nest(folder).fingerprint


@pytest.mark.parametrize("flags", [("--dry-run",), ("--to", "small")])
def test_a_reader_that_stops_reading_is_no_failure_with_a_trace(flags, folder, tmp_path):
    run = subprocess.Popen(
        [sys.executable, "-u", "-m", "nestling", "slice", str(folder), "full", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stderr is not None
    run.stdout.close()
    told = run.stderr.read()
    run.stderr.close()
    assert run.wait() == 1
    assert told == ("nestling slice: stopped, because what reads its lines has ended\n" if "--to" in flags else "")
    assert not [file for file in tmp_path.iterdir() if file.name.startswith((".", "small"))]


def test_unicode_and_line_breaks_in_names_are_carried(folder, tmp_path):
    name = "\u6a21\u578b\nx.txt"
    (folder / name).write_text("x")
    text = (folder / "config.json").read_bytes().replace(b"\n", b"\r\n")
    (folder / "config.json").write_bytes(text)
    small = tmp_path / "\u6a21\u578b \u00fc"
    assert main(["slice", str(folder), "full", "--to", str(small)]) == 0
    assert (small / name).read_text() == "x"
    assert json.loads((small / "config.json").read_text())["hidden_size"] == 48
