"""What comes out of a slice besides its numbers: types, files, flags, and nothing that is stale."""

import json
import shutil

import pytest
import test_laws as laws
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from nestling import hf
from nestling.checkpoint import INDEX, Checkpoint, Writer, read_json, write_json
from nestling.nest import Member, open_nest
from nestling.slice import slice as slice_member
from nestling.sort import sort


def cut(parent, tmp_path, sizes, name="small"):
    """Sort by random orders, slice, and return both folders."""
    nest = open_nest(parent)
    nest = sort(parent, tiny.random_orders(nest.layout, torch.Generator().manual_seed(0)), tmp_path / f"nest-{name}")
    return nest, slice_member(nest, Member(name=name, sizes=sizes), tmp_path / name)


# Group E of the cases: types.


@pytest.mark.parametrize("name", ["nemotron_h", "nemotron_h_bias", "mixtral", "qwen3"])
def test_every_tensor_keeps_its_own_dtype_through_sorting_and_slicing(name, tmp_path):
    parent = tiny.save(name, tmp_path / "parent", is_mixed=True)
    before = Checkpoint(parent).entries
    assert {"BF16", "F32"} == {e.dtype for e in before.values()} or name == "qwen3"
    nest, small = cut(parent, tmp_path, {"hidden": 32, "q": 2})
    for folder in (nest.folder, small):
        after = Checkpoint(folder).entries
        assert {n: e.dtype for n, e in after.items()} == {n: e.dtype for n, e in before.items()}


def test_float32_values_that_bf16_would_merge_stay_byte_equal(tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent", is_mixed=True)
    weights = load_file(parent / "model.safetensors")
    name = "backbone.layers.1.mixer.gate.e_score_correction_bias"
    # Two experts whose order is lost in bf16, which keeps three digits.
    weights[name] = torch.tensor([0.5, 0.50001, 0.25, 0.25001, 1.0, 1.00001])
    assert weights[name].bfloat16().unique().numel() == 3
    save_file(weights, parent / "model.safetensors", metadata={"format": "pt"})
    order = torch.tensor([5, 4, 1, 0, 3, 2]).expand(5, 6)
    nest = sort(parent, {"expert": order}, tmp_path / "nest")
    small = slice_member(nest, Member(name="S", sizes={"expert": 3}), tmp_path / "small")
    expected = weights[name][[5, 4, 1]]
    found = Checkpoint(small).read(name)
    assert found.dtype == torch.float32
    assert found.numpy().tobytes() == expected.numpy().tobytes()
    gate = "backbone.layers.1.mixer.gate.weight"
    assert Checkpoint(small).read(gate).numpy().tobytes() == weights[gate][[5, 4, 1]].numpy().tobytes()
    loaded = hf.load_model(small, dtype="bf16")
    assert loaded.model.layers[1].mixer.gate.e_score_correction_bias.dtype == torch.float32


def test_one_list_of_experts_cuts_everything_that_is_per_expert(tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent")
    old = Checkpoint(parent)
    order = torch.tensor([0, 2, 4, 5, 1, 3]).expand(5, 6)  # leaves out 1 and 3
    nest = sort(parent, {"expert": order}, tmp_path / "nest")
    new = Checkpoint(slice_member(nest, Member(name="S", sizes={"expert": 4}), tmp_path / "small"))
    root = "backbone.layers.1.mixer"
    for i, e in enumerate([0, 2, 4, 5]):
        for w in ("up", "down"):
            assert torch.equal(
                new.read(f"{root}.experts.{i}.{w}_proj.weight"), old.read(f"{root}.experts.{e}.{w}_proj.weight")
            )
    assert f"{root}.experts.4.up_proj.weight" not in new.entries
    for part in ("gate.weight", "gate.e_score_correction_bias"):
        assert torch.equal(new.read(f"{root}.{part}"), old.read(f"{root}.{part}")[[0, 2, 4, 5]])
    assert new.config["n_routed_experts"] == 4
    assert new.config["num_experts_per_tok"] == 2


# Files.


def test_a_slice_is_a_plain_checkpoint_with_all_that_lay_beside_the_parent(tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent", is_chatty=True)
    nest, small = cut(parent, tmp_path, {"hidden": 32})
    beside = {f.name for f in parent.iterdir()} - {"model.safetensors", "config.json"}
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json", "modeling_own.py", "LICENSE"} <= beside
    for folder in (nest.folder, small):
        for name in beside:
            assert (folder / name).read_bytes() == (parent / name).read_bytes()
    assert {f.name for f in small.iterdir()} == beside | {"model.safetensors", "config.json", "README.md"}
    messages = [{"role": "user", "content": "1 + 1"}]
    old, new = (AutoTokenizer.from_pretrained(f) for f in (parent, small))
    assert (
        new.apply_chat_template(messages, tokenize=False)
        == old.apply_chat_template(messages, tokenize=False)
        == "1 + 1<think>"
    )
    assert new("1 + 1 = 2").input_ids == old("1 + 1 = 2").input_ids
    assert GenerationConfig.from_pretrained(small).max_new_tokens == 7


def test_a_sliced_model_generates_with_the_stock_library(tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent", is_chatty=True)
    _, small = cut(parent, tmp_path, {"hidden": 32, "mamba": 2, "expert": 3, "layer": 4})
    model = laws.stock_load(small)
    out = model.generate(tiny.tokens(1, 5), do_sample=False, eos_token_id=None)
    assert out.shape == (1, 12)


def test_a_slice_over_an_existing_folder_is_refused_or_leaves_no_leftovers(tmp_path):
    parent = tiny.save("llama", tmp_path / "parent")
    nest = open_nest(parent)
    to = tmp_path / "small"
    to.mkdir()
    (to / INDEX).write_text("{}")
    (to / "model-00001-of-00002.safetensors").write_text("stale")
    with pytest.raises(ValueError, match="exists"):
        slice_member(nest, Member(name="S", sizes={"ffn": 16}), to)
    assert (to / INDEX).read_text() == "{}"
    slice_member(nest, Member(name="S", sizes={"ffn": 16}), to, overwrite=True)
    assert not (to / INDEX).exists()
    assert [f.name for f in to.glob("*.safetensors")] == ["model.safetensors"]


def test_slicing_a_nest_onto_itself_is_refused(tmp_path):
    parent = tiny.save("llama", tmp_path / "parent")
    with pytest.raises(ValueError, match=r"itself|in place|own folder"):
        slice_member(open_nest(parent), Member(name="S", sizes={"ffn": 16}), parent, overwrite=True)
    assert Checkpoint(parent).config["intermediate_size"] == 56


def test_a_parent_in_several_shards_is_sliced_like_one_in_a_single_file(tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent")
    single = Checkpoint(parent)
    shards = tmp_path / "shards"
    shards.mkdir()
    writer = Writer(shards, shard_bytes=20_000)
    for name in single.entries:
        writer.add(name, single.read(name))
    writer.close()
    write_json(shards / "config.json", single.config)
    assert len(list(shards.glob("*.safetensors"))) > 3
    assert torch.equal(tiny.logits(laws.stock_load(shards)), tiny.logits(laws.stock_load(parent)))
    sizes = {"hidden": 32, "effn": 12, "layer": 3}
    a = slice_member(open_nest(parent), Member(name="S", sizes=sizes), tmp_path / "a")
    b = slice_member(open_nest(shards), Member(name="S", sizes=sizes), tmp_path / "b")
    assert load_file(a / "model.safetensors").keys() == load_file(b / "model.safetensors").keys()
    assert all(torch.equal(w, Checkpoint(b).read(n)) for n, w in load_file(a / "model.safetensors").items())


def test_a_missing_tensor_stops_the_slice_and_leaves_nothing(tmp_path):
    parent = tiny.save("llama", tmp_path / "parent")
    weights = load_file(parent / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, parent / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):
        slice_member(open_nest(parent), Member(name="S", sizes={"ffn": 16}), tmp_path / "to")
    assert [f.name for f in tmp_path.iterdir()] == ["parent"]


# Tied embeddings.


@pytest.mark.parametrize("name", ["llama_tied", "qwen3"])
def test_a_tied_head_is_absent_on_disk_and_the_flag_says_so(name, tmp_path):
    parent = tiny.save(name, tmp_path / "parent")
    nest, small = cut(parent, tmp_path, {"hidden": 30, "ffn": 20})
    for folder in (parent, nest.folder, small):
        assert "lm_head.weight" not in Checkpoint(folder).entries
        assert Checkpoint(folder).config["tie_word_embeddings"] is True
    model = laws.stock_load(small)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


def test_an_untied_head_and_embedding_are_both_cut_by_the_same_units(tmp_path):
    parent = tiny.save("qwen2", tmp_path / "parent")
    old = Checkpoint(parent)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(3))
    nest = sort(parent, {"hidden": order}, tmp_path / "nest")
    new = Checkpoint(slice_member(nest, Member(name="S", sizes={"hidden": 20}), tmp_path / "small"))
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert new.entries[name].shape == (96, 20)
        assert torch.equal(new.read(name), old.read(name)[:, order[:20]])
    assert not torch.equal(new.read("lm_head.weight"), new.read("model.embed_tokens.weight"))
    assert new.config["tie_word_embeddings"] is False


def test_a_flag_that_says_tied_over_two_different_matrices_is_refused(tmp_path):
    parent = tiny.save("qwen2", tmp_path / "parent")
    write_json(parent / "config.json", read_json(parent / "config.json") | {"tie_word_embeddings": True})
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        sort(parent, {}, tmp_path / "nest")


# Configs.


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_member_that_keeps_everything_has_the_parents_config_and_logits(name, parents, tmp_path):
    nest = open_nest(parents(name))
    small = slice_member(nest, Member(name="same", sizes={}), tmp_path / "same")
    old, new = Checkpoint(parents(name)).config, Checkpoint(small).config
    # Derived sizes are written out, layers that were dense by position are named, experts are counted by one key.
    told_otherwise = {"head_dim", "decoder_sparse_step", "mlp_only_layers", "num_local_experts"}
    assert {k: v for k, v in new.items() if k in old and k not in told_otherwise} == {
        k: v for k, v in old.items() if k not in told_otherwise
    }
    assert torch.equal(tiny.logits(laws.stock_load(small)), tiny.logits(laws.stock_load(parents(name))))


@pytest.mark.parametrize("key", ["layers_block_type", "layer_types", "hybrid_override_pattern"])
@pytest.mark.parametrize("sizes", [{"hidden": 32}, {"layer": 3}])
def test_the_layer_kinds_survive_in_whatever_spelling_the_parent_has(key, sizes, tmp_path):
    parent = tiny.save("nemotron_h", tmp_path / "parent")
    config = read_json(parent / "config.json")
    kinds = config.pop("layers_block_type")
    letters = {"linear_attention": "M", "moe": "E", "full_attention": "*", "mlp": "-"}
    config[key] = "".join(letters[k] for k in kinds) if key.startswith("hybrid") else kinds
    write_json(parent / "config.json", config)
    nest = open_nest(parent)
    member = Member(name="S", sizes=sizes)
    model = laws.stock_load(slice_member(nest, member, tmp_path / "small"))
    assert model.config.layers_block_type == [kinds[i] for i in nest.layers(member)]


def test_numbers_that_json_cannot_hold_survive_as_the_stock_library_wrote_them(parents, tmp_path):
    small = slice_member(open_nest(parents("nemotron_h")), Member(name="S", sizes={"hidden": 32}), tmp_path / "small")
    text = (small / "config.json").read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert laws.stock_load(small).config.time_step_limit[1] == float("inf")
    assert hf.config_object(Checkpoint(small).config).hidden_size == 32


def test_a_config_that_names_remote_code_is_carried_but_never_run(parents, tmp_path):
    parent = shutil.copytree(parents("llama"), tmp_path / "parent")
    write_json(parent / "config.json", read_json(parent / "config.json") | {
        "auto_map": {"AutoModelForCausalLM": "modeling_own.Own"}})  # fmt: skip
    (parent / "modeling_own.py").write_text("raise SystemExit('remote code was run')\n")
    small = slice_member(open_nest(parent), Member(name="S", sizes={"ffn": 16}), tmp_path / "small")
    assert (small / "modeling_own.py").exists()
    assert hf.load_model(small).config.intermediate_size == 16
