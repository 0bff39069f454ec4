"""Two ranks against one, and runs that are killed against runs that are not: real processes, gloo, real SIGKILL.

One process tree serves each question, since starting Python costs more than the training.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from run_ranks import settings, write_text
from safetensors.torch import load_file

from nestling.train import train

HELPER = Path(__file__).with_name("run_ranks.py")
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
# The same blocks a step for one rank and for two: data.Stream deals them out in turn, so each rank takes half a batch.
HALVES = {1: 4, 2: 2}
RUNS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"member": ["70=active:0.7", "deep=layer=3,hidden=40"], "router_hard": 0.4, "accumulate": 2},
    "qwen3": {"member": ["60=total:0.6", "deep=layer=2"], "members_per_batch": 1},
}


def job(name: str, folder: Path, to: str, *, ranks: int, **extra: Any) -> dict[str, Any]:
    per_step = RUNS[name].get("accumulate", 1) * 4 * 16
    values = {
        "data": str(folder / "text.jsonl"),
        "stage": [f"tokens={8 * per_step},length=16,batch={HALVES[ranks]},lr=3e-3"],
        "router_share": 0.5,
        "router_floor": 0.5,
        "warmup": 3,
        "checkpoint": 2,
        "print_seconds": 0.0,
    }
    return {"settings": values | RUNS[name], "nest": str(folder / name), "to": str(folder / to)} | extra


def run_here(one: dict[str, Any]) -> None:
    train(settings(one), one["nest"], one["to"], say=lambda line: None)


def start(folder: Path, jobs: list[dict[str, Any]], *, ranks: int) -> None:
    """Run jobs in processes of their own, to the end."""
    (folder / f"jobs-{ranks}.json").write_text(json.dumps(jobs))
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    path = os.pathsep.join([str(HELPER.parents[1]), str(HELPER.parent)])
    done = subprocess.run(
        [sys.executable, *torchrun, str(HELPER), str(folder / f"jobs-{ranks}.json")],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What a run said of each step; the speed is the machine's."""
    lines = map(json.loads, (folder / "nest" / "train.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def members_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "nest.json").read_text())["members"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("runs")
    for name in RUNS:
        tiny.save(name, made / name, is_chatty=True)
    write_text(made / "text.jsonl")
    for name in RUNS:
        run_here(job(name, made, f"{name}-one", ranks=1))
    return made


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Path:
    """Both models trained by two ranks; then one of them again, from a copy of its unfinished work."""
    copy = {"step": 5, "to": str(folder / "nemotron_h-resumed")}
    jobs = [
        {"inspect": "nemotron_h"},
        {"inspect": "qwen3"},
        job("nemotron_h", folder, "nemotron_h-two", ranks=2, copy=copy),
        job("qwen3", folder, "qwen3-two", ranks=2, copy={"step": 5, "to": str(folder / "qwen3-other-world")}),
        job("nemotron_h", folder, "nemotron_h-resumed", ranks=2),
    ]
    start(folder, jobs, ranks=2)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_train_as_one_rank_with_the_same_blocks_does(two_ranks: Path, name: str) -> None:
    one, two = (log_of(two_ranks / f"{name}-{count}") for count in ("one", "two"))
    assert [line["phase"] for line in one] == ["router"] * 4 + ["members"] * 4
    for a, b in zip(one, two, strict=True):
        assert a["loss"].keys() == b["loss"].keys()
        # float32 sums in another order, which AdamW enlarges where gradients are small; seen: 3e-6 (a small KL: 3e-6
        # absolute) and 4e-4 of the gradient's norm.
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5, abs=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=2e-3)
        assert [b[k] for k in ("step", "phase", "lr", "tokens")] == [a[k] for k in ("step", "phase", "lr", "tokens")]
    told = [
        json.loads((two_ranks / f"{name}-{count}" / "nest.json").read_text())["members"] for count in ("one", "two")
    ]
    assert told[0] == told[1]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_export_the_weights_of_one_rank(two_ranks: Path, name: str) -> None:
    start_, one, two = (
        load_file(two_ranks / part / "model.safetensors") for part in (name, f"{name}-one", f"{name}-two")
    )
    assert start_.keys() == one.keys() == two.keys()
    for key, tensor in one.items():
        # AdamW moves an entry by up to lr a step however small its gradient, so there rounding shows.
        moved, off = (tensor - start_[key]).norm(), (tensor - two[key]).norm()
        assert off <= 1e-3 * moved, key


@pytest.mark.timeout(600)
def test_a_run_of_two_ranks_goes_on_from_its_checkpoint(two_ranks: Path) -> None:
    whole, resumed = two_ranks / "nemotron_h-two", two_ranks / "nemotron_h-resumed"
    assert log_of(resumed) == log_of(whole)
    assert_same_weights(resumed, whole)
    assert not resumed.with_name(resumed.name + ".work").exists()


@pytest.mark.timeout(600)
def test_going_on_with_another_number_of_ranks_is_refused_with_both_numbers(two_ranks: Path) -> None:
    other = job("qwen3", two_ranks, "qwen3-other-world", ranks=2)
    with pytest.raises(ValueError, match=r"ranks was 2, is 1.*delete the folder"):
        run_here(other)


@pytest.mark.timeout(600)
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(folder: Path) -> None:
    """In the router's phase, while a checkpoint is written, and in the members' phase."""
    kills = [{"step": 3}, {"opens": "step-00000006/.metadata"}, {"step": 7}]
    jobs = [job("nemotron_h", folder, "killed", ranks=1, kill=kill) for kill in kills]
    start(folder, jobs, ranks=1)
    assert not (folder / "killed").exists()
    work = folder / "killed.work"
    assert [json.loads(line)["step"] for line in (work / "log.jsonl").read_text().splitlines()] == list(range(7))
    assert sorted(p.name for p in work.glob("step-*")) == ["step-00000004", "step-00000006"]
    (work / "step-00000006" / "complete").unlink()  # as a kill just before the last file leaves it
    with (work / "log.jsonl").open("a") as log:
        log.write('{"step": 7, "phase": "mem')  # and in the middle of a line
    run_here(job("nemotron_h", folder, "killed", ranks=1))
    assert log_of(folder / "killed") == log_of(folder / "nemotron_h-one")
    assert_same_weights(folder / "killed", folder / "nemotron_h-one")
    assert not work.exists()


def assert_same_weights(a: Path, b: Path) -> None:
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_checkpoint_before_every_layer_has_had_a_gradient_can_be_gone_on_from(folder: Path) -> None:
    """Moments exist only for what was trained so far: a member without a layer leaves that layer without."""
    one = job("qwen3", folder, "shallow", ranks=1)
    one["settings"] |= {
        "member": ["deep=layer=2"], "members_per_batch": 0,
        "stage": ["tokens=256,length=16,batch=4,lr=3e-3,weights=0/1"],
    }  # fmt: skip
    for unused in ("router_share", "router_floor"):
        del one["settings"][unused]
    copied = folder / "shallow-again"

    def copy(line: str) -> None:
        if line.startswith("step 3/"):
            shutil.copytree(f"{one['to']}.work", f"{copied}.work")

    train(settings(one), one["nest"], one["to"], say=copy)
    said: list[str] = []
    train(settings(one), one["nest"], copied, say=said.append)
    assert "going on from step 2 of 4" in said
    assert log_of(copied) == log_of(Path(one["to"]))
    assert_same_weights(copied, Path(one["to"]))
