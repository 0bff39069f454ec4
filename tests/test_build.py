"""`nestling build` end to end on a tiny hybrid: what the nest holds, what a stop costs, and what is refused at the
door."""

import copy
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from run_ranks import write_text
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from nestling.build import BuildSettings, build, members_table
from nestling.nest import Nest, open_nest
from nestling.plan import TrainSettings
from nestling.score import Scores, random_scores
from nestling.slice import slice as cut_member
from nestling.sort import sort

LENGTH, NUM_BLOCKS = 12, 9
SIZED = {"effn": 16, "hidden": 40}


class Stopped(Exception):
    """Somebody pulled the plug."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A parent with its tokenizer, and text to train on and to hold out."""
    root = tmp_path_factory.mktemp("build")
    tiny.save("nemotron_h", root / "parent", is_chatty=True)
    write_text(root / "text.jsonl")
    # One document over and over: its tokens are the same in whatever order the documents are read.
    (root / "heldout.jsonl").write_text(4 * (json.dumps({"text": "two eggs in a nest of moss; who sings"}) + "\n"))
    return root


@pytest.fixture(scope="module")
def settings(root: Path) -> BuildSettings:
    return BuildSettings(
        score_tokens=256, score_length=16, score_batch=4, heldout=f"birds={root / 'heldout.jsonl'}",
        heldout_tokens=LENGTH * NUM_BLOCKS + 5, heldout_length=LENGTH,
    )  # fmt: skip


@pytest.fixture(scope="module")
def training(root: Path) -> TrainSettings:
    return TrainSettings(
        data=str(root / "text.jsonl"), member=("own=effn=16,hidden=40", "70=active:0.7"), warmup=1, router_share=0.4,
        stage=("tokens=640,length=16,batch=4,lr=1e-3",), checkpoint=3, print_seconds=0.0,
    )  # fmt: skip


@pytest.fixture(scope="module")
def nest(root: Path, settings: BuildSettings, training: TrainSettings) -> Nest:
    """A nest that was built in one go."""
    return build(settings, training, root / "parent", root / "nest", say=lambda line: None)


def told(folder: Path) -> dict[str, Any]:
    """nest.json, without the one number that differs from run to run."""
    found = json.loads((folder / "nest.json").read_text())
    assert found["recipe"].pop("seconds") > 0
    return found


def blocks(root: Path) -> Tensor:
    """The held-out text as the tokenizer gives it, in rows: [block, time]."""
    tokenizer = AutoTokenizer.from_pretrained(root / "parent")
    ids: list[int] = []
    for line in (root / "heldout.jsonl").read_text().splitlines():
        ids += [*tokenizer(json.loads(line)["text"])["input_ids"], tokenizer.eos_token_id]
    assert len(ids) > LENGTH * NUM_BLOCKS + 5
    return torch.tensor(ids[: LENGTH * NUM_BLOCKS]).view(NUM_BLOCKS, LENGTH)


@torch.no_grad()
def measured(folder: Path, root: Path) -> tuple[float, float]:
    """KL to the parent and perplexity of a plain checkpoint, by the stock class's own loss and torch's own KL."""
    x = blocks(root)
    model, parent = (AutoModelForCausalLM.from_pretrained(one).eval() for one in (folder, root / "parent"))
    losses = [float(model(input_ids=row[None], labels=row[None], use_cache=False).loss) for row in x]
    student, teacher = (
        one(input_ids=x, use_cache=False).logits[:, :-1].double().flatten(0, 1).log_softmax(-1)
        for one in (model, parent)
    )
    kl = float(F.kl_div(student, teacher, reduction="batchmean", log_target=True))
    return kl, math.exp(sum(losses) / len(losses))


def test_the_nest_holds_scores_log_and_report_and_the_work_folder_is_gone(nest: Nest, root: Path) -> None:
    assert nest.folder == root / "nest"
    assert not (root / "nest.work").exists()
    assert not list(root.glob(".nest*"))
    inside = root / "nest" / "nest"
    assert Scores.load(inside / "scores").fingerprint == nest.parent == open_nest(root / "parent").fingerprint
    log = [json.loads(line) for line in (inside / "train.jsonl").read_text().splitlines()]
    assert [line["phase"] for line in log] == ["router"] * 4 + ["members"] * 6
    assert "<html" in (inside / "report" / "report.html").read_text()
    assert (inside / "router.safetensors").is_file()
    assert list(nest.members) == ["100", "own", "70"]
    assert nest.members["own"].sizes == SIZED
    assert all(member.is_trained for member in nest.members.values())
    # The whole folder is the full model to a stock loader, tokenizer and all.
    loaded: Any = AutoModelForCausalLM.from_pretrained(root / "nest", output_loading_info=True)
    info = loaded[1]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert AutoTokenizer.from_pretrained(root / "nest")("moss") == AutoTokenizer.from_pretrained(root / "parent")(
        "moss"
    )


def test_every_member_has_results_after_training_before_it_and_of_a_random_cut(nest: Nest) -> None:
    whole = {"kl", "perplexity", "kl_before", "perplexity_before"}
    members = told(nest.folder)["members"]
    assert members["100"]["results"].keys() == whole
    for name in ("own", "70"):
        assert members[name]["results"].keys() == whole | {"kl_random", "perplexity_random"}
    for name, member in members.items():
        for key, value in member["results"].items():
            values = value.values() if key.startswith("perplexity") else [value]
            assert all(math.isfinite(one) for one in values), (name, key)
            assert not key.startswith("perplexity") or value.keys() == {"birds"}


@pytest.mark.parametrize("when", ["", "_before", "_random"])
@pytest.mark.parametrize("name", ["own", "70"])
def test_the_results_are_those_that_the_stock_classes_give(
    nest: Nest, root: Path, tmp_path: Path, name: str, when: str
) -> None:
    member, source = nest.members[name], nest
    if when:
        parent = open_nest(root / "parent")
        scores = Scores.load(nest.folder / "nest" / "scores")
        orders = (scores if when == "_before" else random_scores(parent.layout, seed=0)).orders()
        source = sort(root / "parent", orders, tmp_path / "sorted")
    kl, perplexity = measured(cut_member(source, member, tmp_path / "small"), root)
    # float32 logits, a matter of batches and of the order of sums.
    assert member.results[f"kl{when}"] == pytest.approx(kl, rel=1e-4)
    assert member.results[f"perplexity{when}"]["birds"] == pytest.approx(perplexity, rel=1e-5)


def test_before_training_the_full_member_is_the_parent(nest: Nest, root: Path) -> None:
    results = nest.members["100"].results
    _, perplexity = measured(root / "parent", root)
    assert results["kl_before"] == pytest.approx(0, abs=1e-6)  # sums over units in another order
    assert results["perplexity_before"]["birds"] == pytest.approx(perplexity, rel=1e-5)
    assert results["kl"] > 1e-6


def test_the_table_has_a_row_for_each_member_with_the_numbers_of_nest_json(nest: Nest) -> None:
    heads, _, *rows = members_table(nest).splitlines()
    members = told(nest.folder)["members"]
    assert heads.split("  ")[0] == "member"
    assert heads.endswith("birds ppl, cut  birds ppl, trained  KL, cut  KL, trained")
    assert "random" not in heads  # no problems were solved: no columns for them
    assert [row.split()[0] for row in rows] == list(members)
    most = members["100"]["active_parameters"]
    for row, (name, one) in zip(rows, members.items(), strict=True):
        cells, results = row.replace("(", " ").replace("%)", " ").split(), one["results"]
        assert int(cells[1].replace(",", "")) == one["parameters"]
        assert int(cells[2].replace(",", "")) == one["active_parameters"]
        assert float(cells[3]) == pytest.approx(100 * one["active_parameters"] / most, abs=0.05), name
        assert int(cells[4].replace(",", "")) == one["bytes"]["bf16"]
        expected = [
            results["perplexity_before"]["birds"], results["perplexity"]["birds"], results["kl_before"], results["kl"]
        ]  # fmt: skip
        assert [float(cell) for cell in cells[5:]] == pytest.approx(expected, abs=0.005)
        assert "-0.0000" not in row


def test_the_table_has_accuracies_and_dashes_where_problems_were_solved(nest: Nest) -> None:
    results = {"100": {"accuracy": 0.951, "accuracy_before": 1.0, "kl": -1e-9}, "own": {"accuracy": 0.5}, "70": {}}
    members = {name: replace(member, results=results[name]) for name, member in nest.members.items()}
    heads, _, *rows = members_table(replace(nest, members=members)).splitlines()
    assert heads.endswith("random cut  cut by score  trained  KL, cut  KL, trained")
    shown = [" ".join(row.split()[6:]) for row in rows]
    assert shown == ["- 100.0 % 95.1 % - 0.0000", "- - 50.0 % - -", "- - - - -"]


def test_a_build_that_is_stopped_goes_on_without_training_again_and_gives_the_same_nest(
    nest: Nest, root: Path, tmp_path: Path, settings: BuildSettings, training: TrainSettings
) -> None:
    """Stopped once while members train and once before they are evaluated, then refused with other settings."""
    to, work = tmp_path / "nest", tmp_path / "nest.work"

    def go(stop: str = "", **changes: Any) -> list[str]:
        said: list[str] = []

        def say(line: str) -> None:
            said.append(line)
            if stop and stop in line:
                raise Stopped

        try:
            build(settings, replace(training, **changes), root / "parent", to, say=say)
        except Stopped:
            assert not to.exists()
            return [*said, "stopped"]
        return said

    assert go("step 8/10")[-1] == "stopped"
    said = go("evaluate: members after")
    assert said[-1] == "stopped"
    assert "going on from step 6 of 10" in said
    assert not any("score: " in line or "sort: " in line for line in said)
    trained = (work / "trained" / "model.safetensors").read_bytes()

    with pytest.raises(ValueError, match=r"unfinished build with other settings \(clip, seed\).*or delete the folder"):
        go(clip=0.5, seed=1)
    with pytest.raises(ValueError, match=r"other settings \(heldout_tokens\)"):
        build(replace(settings, heldout_tokens=50), training, root / "parent", to, say=lambda line: None)
    assert (work / "trained" / "model.safetensors").read_bytes() == trained

    said = go()
    assert not any(word in line for line in said for word in ("score: ", "sort: best", "train: ", "step "))
    assert any("evaluate: members after" in line for line in said)
    assert not work.exists()
    assert (to / "model.safetensors").read_bytes() == trained == (nest.folder / "model.safetensors").read_bytes()
    assert told(to) == told(nest.folder)
    names = [sorted(str(p.relative_to(one)) for p in one.rglob("*")) for one in (to, nest.folder)]
    assert names[0] == names[1]


@pytest.mark.parametrize(
    ("build_changes", "train_changes", "message"),
    [
        ({"heldout": ""}, {}, "nothing to evaluate with: give --heldout NAME=FILE.jsonl"),
        ({"heldout": "birds.jsonl"}, {}, "cannot read held-out source 'birds.jsonl': expected NAME=FILE.jsonl"),
        ({"heldout": "birds=no-such.jsonl"}, {}, "data file no-such.jsonl does not exist"),
        ({"heldout": "birds={heldout},birds={heldout}"}, {}, "held-out source 'birds' is given twice"),
        ({"heldout_tokens": 1}, {}, "too few for one block"),
        ({}, {"data": "no-such.jsonl"}, "data file no-such.jsonl does not exist"),
        ({}, {"member": ("70",)}, "cannot read member '70'"),
        ({}, {"member": ("9=active:0.01",)}, "cannot be met"),
        ({}, {"stage": ("tokens=3,length=16,batch=4,lr=1e-3",)}, "makes no step"),
        ({}, {"router_share": 0.99}, "none is left for the members"),
        ({}, {"member": ("own=effn=16",)}, "would have no effect: every member has explicit sizes"),
    ],
)
def test_what_would_fail_late_is_refused_before_any_work_and_leaves_no_folder(
    root: Path, tmp_path: Path, settings: BuildSettings, training: TrainSettings,
    build_changes: dict[str, Any], train_changes: dict[str, Any], message: str,
) -> None:  # fmt: skip
    changes = copy.copy(build_changes)
    if "heldout" in changes:
        changes["heldout"] = changes["heldout"].format(heldout=root / "heldout.jsonl")
    said: list[str] = []
    with pytest.raises(ValueError, match=message):
        build(
            replace(settings, **changes), replace(training, **train_changes), root / "parent", tmp_path / "nest",
            say=said.append,
        )  # fmt: skip
    assert not said
    assert not list(tmp_path.iterdir())


def test_a_parent_with_tensors_that_cannot_be_cut_is_refused_before_it_is_scored(
    root: Path, tmp_path: Path, settings: BuildSettings, training: TrainSettings
) -> None:
    parent = shutil.copytree(root / "parent", tmp_path / "parent")
    weights = load_file(parent / "model.safetensors") | {"mtp.layers.0.norm.weight": torch.ones(48)}
    save_file(weights, parent / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="multi-token-prediction"):
        build(settings, training, parent, tmp_path / "nest", say=lambda line: None)
    assert [one.name for one in tmp_path.iterdir()] == ["parent"]


@pytest.mark.parametrize("place", [lambda parent: parent, lambda parent: parent.parent], ids=["parent", "above"])
def test_the_parent_is_never_replaced(
    root: Path, tmp_path: Path, settings: BuildSettings, training: TrainSettings, place: Callable[[Path], Path]
) -> None:
    parent = shutil.copytree(root / "parent", tmp_path / "in" / "parent")
    before = {file.name: file.read_bytes() for file in parent.iterdir()}
    with pytest.raises(ValueError, match="would replace the parent"):
        build(settings, training, parent, place(parent), overwrite=True, say=lambda line: None)
    assert {file.name: file.read_bytes() for file in parent.iterdir()} == before


def test_an_existing_folder_is_kept_unless_told(
    root: Path, tmp_path: Path, settings: BuildSettings, training: TrainSettings
) -> None:
    (tmp_path / "nest").mkdir()
    (tmp_path / "nest" / "precious").write_text("mine")
    with pytest.raises(ValueError, match=r"exists\. Choose another place, or pass --overwrite"):
        build(settings, training, root / "parent", tmp_path / "nest", say=lambda line: None)
    assert (tmp_path / "nest" / "precious").read_text() == "mine"
    assert not (tmp_path / "nest.work").exists()
