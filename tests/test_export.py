"""The nest that training writes: stock names, the parent's dtypes, what lay beside the weights, and true numbers."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from run_ranks import write_text
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nestling import hf, parallel
from nestling.elastic import ElasticModel
from nestling.export import export
from nestling.nest import Nest, open_nest
from nestling.sort import sort
from nestling.train import TrainSettings, train


@pytest.mark.parametrize("name", [*tiny.PLAIN, "nemotron_h_latent", "qwen3_moe_step", "llama_tied"])
def test_an_untrained_model_is_written_bit_for_bit(name: str, parents: Callable[[str], Path], tmp_path: Path) -> None:
    nest = open_nest(parents(name))
    elastic = ElasticModel(hf.load_model(nest.folder))
    export(elastic.full, parallel.gather(elastic), nest, tmp_path / "to", router=None, log=None)
    before, after = load_file(nest.folder / "model.safetensors"), load_file(tmp_path / "to" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype, key
        assert torch.equal(after[key], tensor), key
    assert json.loads((tmp_path / "to" / "config.json").read_text()) == nest.stored


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Nest]:
    """A bf16 nemotron_h with float32 parts and all that lies beside weights, trained for a few steps."""
    folder = tmp_path_factory.mktemp("export")
    parent = tiny.save("nemotron_h", folder / "parent", is_mixed=True, is_chatty=True)
    write_text(folder / "text.jsonl")
    settings = TrainSettings(
        data=str(folder / "text.jsonl"),
        member=("60=total:0.6", "narrow=hidden=32,layer=3"),
        stage=("tokens=512,length=16,batch=4,lr=1e-2",),
        router_share=0.4,
        warmup=2,
        checkpoint=3,
    )
    return parent, folder / "to", train(settings, parent, folder / "to", say=lambda line: None)


def test_the_stock_loader_reads_the_nest_as_the_full_model(trained: tuple[Path, Path, Nest]) -> None:
    parent, to, _ = trained
    loaded: Any = AutoModelForCausalLM.from_pretrained(to, output_loading_info=True)
    model, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    old = AutoModelForCausalLM.from_pretrained(parent)
    assert model.dtype == old.dtype == torch.bfloat16
    assert not torch.equal(tiny.logits(model), tiny.logits(old))
    assert json.loads((to / "config.json").read_text()) == json.loads((parent / "config.json").read_text())


def test_every_tensor_keeps_its_name_shape_and_dtype_and_was_trained(trained: tuple[Path, Path, Nest]) -> None:
    parent, to, _ = trained
    before, after = load_file(parent / "model.safetensors"), load_file(to / "model.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in before.items()} == {k: (v.dtype, v.shape) for k, v in after.items()}
    assert {v.dtype for v in before.values()} == {torch.bfloat16, torch.float32}
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if name.endswith("e_score_correction_bias")} <= same
    assert len(same) < len(before) / 4


def test_what_lies_beside_the_weights_comes_along(trained: tuple[Path, Path, Nest]) -> None:
    parent, to, _ = trained
    for file in ("LICENSE", "preprocessor_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (to / file).read_bytes() == (parent / file).read_bytes()
    text = [{"role": "user", "content": "one nest"}]
    old, new = (AutoTokenizer.from_pretrained(folder) for folder in (parent, to))
    assert new.apply_chat_template(text, tokenize=False) == old.apply_chat_template(text, tokenize=False)
    assert new("one nest")["input_ids"] == old("one nest")["input_ids"]
    assert GenerationConfig.from_pretrained(to).max_new_tokens == 7
    assert not list(to.glob("*.part"))
    assert not (to / "staged").exists()


def stock_count(config: dict[str, Any], *, active: bool) -> int:
    """Parameters of the stock model of a member's config, and the router's selection bias, which is stored too."""
    model = hf.new_model(config, seed=0)
    count = 0
    for name, tensor in model.state_dict().items():
        share = config["num_experts_per_tok"] / config["n_routed_experts"] if ".experts." in name and active else 1
        count += round(tensor.numel() * share)
    return count


def test_the_members_numbers_are_those_of_stock_models(trained: tuple[Path, Path, Nest]) -> None:
    parent, to, nest = trained
    told = json.loads((to / "nest.json").read_text())
    assert list(told["members"]) == sorted(
        told["members"], key=lambda name: -told["members"][name]["active_parameters"]
    )
    assert set(told["members"]) == {"100", "60", "narrow"}
    complete = tiny.config("nemotron_h").to_dict()
    for name, entry in told["members"].items():
        kept = sorted(nest.layer_order[: entry["sizes"].get("layer", 99)])
        config = nest.layout.arch.resize(tiny.known("nemotron_h")[1], nest.layout.sizes | entry["sizes"], kept)
        assert config["vocab_size"] == complete["vocab_size"]
        assert entry["parameters"] == stock_count(config, active=False), name
        assert entry["active_parameters"] == stock_count(config, active=True), name
        assert entry["bytes"]["bf16"] == 2 * entry["parameters"]
        assert entry["is_trained"]
    assert told["members"]["narrow"]["sizes"] == {"hidden": 32, "layer": 3}
    full = told["members"]["100"]["parameters"]
    assert 0.5 * full < told["members"]["60"]["parameters"] <= 0.6 * full
    assert told["parent"] == open_nest(parent).fingerprint
    assert told["fingerprint"] == open_nest(to).fingerprint != told["parent"]


def test_the_log_the_router_and_the_recipe_are_in_the_nest_and_the_work_folder_is_gone(
    trained: tuple[Path, Path, Nest],
) -> None:
    _, to, nest = trained
    lines = [json.loads(line) for line in (to / "nest" / "train.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8))
    assert nest.recipe["tokens"] == lines[-1]["tokens"] == 512
    assert nest.recipe["train"]["member"] == ["60=total:0.6", "narrow=hidden=32,layer=3"]
    with safe_open(to / "nest" / "router.safetensors", "pt") as router:
        told = router.metadata()
        assert told["members"] == "100,60"
        assert told["hidden"].startswith("48,")
        assert any(name.startswith("nets.hidden") for name in router.keys())  # noqa: SIM118
    assert sorted(p.name for p in to.parent.iterdir()) == ["parent", "text.jsonl", "to"]


def test_a_folder_that_exists_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "to").mkdir()
    settings = TrainSettings(data=str(tmp_path / "absent.jsonl"), member=("45=active:0.45",))
    with pytest.raises(ValueError, match=r"to' exists.*--overwrite"):
        train(settings, tmp_path / "no-nest", tmp_path / "to", say=lambda line: None)
    assert [p.name for p in tmp_path.iterdir()] == ["to"]


def test_a_nest_with_scores_and_report_can_be_trained_again(trained: tuple[Path, Path, Nest], tmp_path: Path) -> None:
    """What `build` leaves in the nest's folder are folders too, and they are of the run that made them."""
    source = tmp_path / "built"
    shutil.copytree(trained[1], source)
    (source / "nest" / "scores").mkdir()
    (source / "nest" / "report").mkdir()
    assert (source / "nest" / "router.safetensors").is_file()
    settings = TrainSettings(
        data=str(trained[0].parent / "text.jsonl"), member=("own=hidden=32",), warmup=1,
        stage=("tokens=128,length=16,batch=4,lr=1e-3",),
    )  # fmt: skip
    nest = train(settings, source, tmp_path / "again", say=lambda line: None)
    assert list(nest.members) == ["100", "own"]
    assert sorted(file.name for file in (tmp_path / "again" / "nest").iterdir()) == ["train.jsonl"]


def test_sorting_a_nest_again_forgets_members_of_the_old_order(
    trained: tuple[Path, Path, Nest], tmp_path: Path
) -> None:
    assert len(open_nest(trained[1]).members) == 3
    assert list(sort(trained[1], {}, tmp_path / "sorted").members) == ["100"]
