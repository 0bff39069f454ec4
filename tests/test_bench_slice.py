"""The slicing benchmark at a tiny scale: it runs whole, and what it times is the same model."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import slice as bench
from nestling.choose import by_sizes
from nestling.nest import open_nest
from nestling.slice import slice as slice_member


def test_the_benchmark_runs_whole_at_a_tiny_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--small", "--rounds", "1", "--no-stock", "--no-write", "--dir", str(tmp_path / "bench")]
    monkeypatch.setattr(sys, "argv", ["slice", *flags])
    bench.main()
    lines = capsys.readouterr().out.strip().splitlines()
    assert len(lines) == len(bench.inputs(True))
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")]
        read, written = (int(cell.replace(",", "")) for cell in cells[2:4])
        assert 0 < written < read
        assert float(cells[5]) > 0
    assert not list((tmp_path / "bench").iterdir())


def test_what_transformers_does_in_the_benchmark_gives_the_same_tensors(tmp_path: Path) -> None:
    one = bench.inputs(True)[0]
    one.write(tmp_path / "input")
    nest = open_nest(tmp_path / "input")
    ours = load_file(slice_member(nest, by_sizes(nest, one.sizes), tmp_path / "ours") / "model.safetensors")
    bench.child(bench.STOCK, tmp_path / "input", tmp_path / "stock", one.sizes, is_cold=False)
    theirs = load_file(tmp_path / "stock" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    # It rounds to bf16 what the checkpoint keeps in float32.
    assert all(torch.equal(ours[name].to(theirs[name].dtype), theirs[name]) for name in ours)
