"""A nest's folder: members by name, what is refused when it is opened, and what its costs say."""

import shutil
from dataclasses import replace

import pytest
import tiny
import torch

from nestling.checkpoint import Checkpoint, read_json, write_json
from nestling.nest import Member, open_nest, parse_sizes, write_nest
from nestling.sort import check_orders, load_orders, sort


@pytest.fixture(scope="module")
def nest(parents, tmp_path_factory):
    """A sorted nemotron_h with two members beside the full one; to read only."""
    to = tmp_path_factory.mktemp("nest") / "nest"
    parent = open_nest(parents("nemotron_h"))
    made = sort(parent.folder, tiny.random_orders(parent.layout, torch.Generator().manual_seed(0)), to)
    members = made.members | {
        "S": Member(name="S", sizes={"hidden": 32, "effn": 12, "layer": 4}, budget="active:0.5"),
        "M": Member(name="M", sizes={"mamba": 2}, is_trained=True, results={"accuracy": 0.5}),
    }
    write_nest(replace(made, members=members), to)
    return open_nest(to)


@pytest.fixture
def copy(nest, tmp_path):
    """The same, to break."""
    return shutil.copytree(nest.folder, tmp_path / "copy")


def test_a_plain_checkpoint_is_a_nest_with_one_member(parents):
    nest = open_nest(parents("llama"))
    assert list(nest.members) == ["100"]
    assert nest.member("full") is nest.member("parent") is nest.member("100")
    assert nest.layers(nest.member("100")) == [0, 1, 2]
    assert nest.cost(nest.member("full")).parameters == sum(p.numel() for p in tiny.shared("llama").parameters())


def test_a_nest_comes_back_as_it_was_written(nest, parents):
    assert list(nest.members) == ["100", "S", "M"]
    assert nest.members["M"].results == {"accuracy": 0.5}
    assert nest.members["M"].is_trained
    assert nest.members["S"].budget == "active:0.5"
    assert nest.parent == Checkpoint(parents("nemotron_h")).fingerprint()
    assert nest.fingerprint == Checkpoint(nest.folder).fingerprint() != nest.parent
    orders = load_orders(nest.folder)
    assert orders.keys() == nest.layout.elastic().keys()
    assert tuple(orders["layer"].tolist()) == nest.layer_order
    assert all(tuple(order.shape) == nest.layout.order_shape(axis) for axis, order in orders.items())


def test_a_member_keeps_the_best_layers_in_the_order_in_which_they_run(nest):
    kept = nest.layers(nest.member("S"))
    assert kept == sorted(kept)
    assert set(kept) == set(nest.layer_order[:4])
    types = tiny.VARIANTS["nemotron_h"]["layers_block_type"]
    assert nest.member_config(nest.member("S"))["layers_block_type"] == [types[i] for i in kept]


def test_nest_json_states_the_exact_costs_of_every_member(nest):
    told = read_json(nest.folder / "nest.json")["members"]
    for name, member in nest.members.items():
        layout = nest.layout.resize(member.sizes, nest.layers(member))
        assert told[name]["parameters"] == sum(
            torch.empty([int(n) for n in shape], device="meta").numel() for shape in _shapes(layout)
        )
        assert told[name]["bytes"]["bf16"] == 2 * told[name]["parameters"]
    assert told["S"]["active_parameters"] < told["S"]["parameters"] < told["100"]["parameters"]


def _shapes(layout):
    from nestling.axes import dims

    return [dims(place.shape, layout.sizes) for place in layout.places({"expert": layout.sizes["expert"]})]


def test_an_unknown_member_is_refused_with_the_names_there_are(nest):
    with pytest.raises(ValueError, match=r"no member '12B'\. Members: 100, S, M"):
        nest.member("12B")


def test_other_weights_under_the_same_nest_json_are_refused(copy):
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    weights["lm_head.weight"][0, 0] += 1
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"nest.json was written with other weights .*fingerprint"):
        open_nest(copy)
    (copy / "nest.json").unlink()
    assert list(open_nest(copy).members) == ["100"]


def _one_member(sizes: dict) -> dict:
    return {"members": {"S": {"sizes": sizes, "budget": "", "is_trained": False, "results": {}}}}


@pytest.mark.parametrize(("change", "told"), [
    ({"format_version": 2}, "of format 2; this Nestling reads 1"),
    ({"members": {"S": {"sizes": {"hidden": 32}}}}, "member 'S'"),
    (_one_member({"hidden": 64}), "the nest has 48"),
    (_one_member({"expert": 1}), "num_experts_per_tok"),
    (_one_member({"hidden": 32.5}), "whole number"),
    ({"members": {"S": []}}, "member 'S'"),
])  # fmt: skip
def test_a_nest_json_that_asks_for_the_impossible_is_refused(copy, change, told):
    write_json(copy / "nest.json", read_json(copy / "nest.json") | change)
    with pytest.raises(ValueError, match=told):
        open_nest(copy)


@pytest.mark.parametrize("key", ["fingerprint", "members", "layer_order", "parent", "recipe"])
def test_a_nest_json_without_a_key_is_refused_by_its_name(copy, key):
    told = read_json(copy / "nest.json")
    del told[key]
    write_json(copy / "nest.json", told)
    with pytest.raises(ValueError, match=key):
        open_nest(copy)


def test_a_whole_float_in_nest_json_is_that_whole_number(copy):
    told = read_json(copy / "nest.json")
    told["members"]["S"]["sizes"] = {"hidden": 32.0}
    write_json(copy / "nest.json", told)
    nest = open_nest(copy)
    assert nest.members["S"].sizes == {"hidden": 32}
    assert type(nest.members["S"].sizes["hidden"]) is int
    assert nest.member_config(nest.members["S"])["hidden_size"] == 32


@pytest.mark.parametrize(("text", "sizes"), [
    ("hidden=1920,effn=960", {"hidden": 1920, "effn": 960}), (" hidden = 7168.0", {"hidden": 7168}),
])  # fmt: skip
def test_sizes_are_read_from_text(text, sizes):
    assert parse_sizes(text) == sizes
    assert all(type(n) is int for n in parse_sizes(text).values())


@pytest.mark.parametrize(
    "text", ["hidden", "hidden=", "hidden=wide", "hidden=7168.5", "hidden=1,,effn=2", "hidden=inf", "hidden=nan"]
)
def test_text_that_is_no_sizes_is_refused(text):
    with pytest.raises(ValueError, match="size"):
        parse_sizes(text)


def test_an_order_that_is_no_permutation_is_refused(nest):
    layout = nest.layout
    good = tiny.random_orders(layout, torch.Generator().manual_seed(0))
    check_orders(layout, good)
    with pytest.raises(ValueError, match="given for 'kv', which is not elastic"):
        check_orders(layout, {"kv": torch.arange(2)})
    with pytest.raises(ValueError, match=r"'ffn' has shape \(28,\), expected \(5, 28\)"):
        check_orders(layout, {"ffn": torch.arange(28)})
    broken = good["q"].clone()
    broken[1, 1] = torch.tensor([0, 0, 2])
    with pytest.raises(ValueError, match="'q' is not a permutation of its 3 units"):
        check_orders(layout, {"q": broken})


def test_sorting_refuses_a_destination_that_exists_and_leaves_nothing_of_a_failure(parents, tmp_path):
    (tmp_path / "to").mkdir()
    with pytest.raises(ValueError, match="exists"):
        sort(parents("llama"), {}, tmp_path / "to")
    with pytest.raises(ValueError, match="not elastic"):
        sort(parents("llama"), {"head": torch.arange(8)}, tmp_path / "other")
    assert [f.name for f in tmp_path.iterdir()] == ["to"]


def test_sorting_a_folder_onto_itself_is_refused(nest, copy):
    with pytest.raises(ValueError, match="copy"):
        sort(copy, {}, copy, overwrite=True)
    assert (copy / "model.safetensors").is_file()


def test_sorting_twice_by_the_best_first_is_sorting_once(parents, tmp_path):
    parent = open_nest(parents("mixtral"))
    orders = {
        a: o for a, o in tiny.random_orders(parent.layout, torch.Generator().manual_seed(1)).items() if a != "layer"
    }
    once = sort(parent.folder, orders, tmp_path / "once")
    same = {a: torch.arange(o.shape[-1]).expand(o.shape) for a, o in orders.items()}
    twice = sort(once.folder, same, tmp_path / "twice")
    assert twice.parent == once.parent  # the parent is where the line began
    a, b = Checkpoint(once.folder), Checkpoint(twice.folder)
    assert all(torch.equal(a.read(n), b.read(n)) for n in a.entries)


def test_mtp_tensors_are_left_out_only_knowingly(parents, tmp_path):
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(parents("nemotron_h"), tmp_path / "mtp")
    weights = load_file(folder / "model.safetensors") | {"mtp.layers.0.norm.weight": torch.ones(48)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", read_json(folder / "config.json") | {"num_nextn_predict_layers": 1})
    with pytest.raises(ValueError, match="--drop mtp"):
        sort(folder, {}, tmp_path / "nest")
    made = sort(folder, {}, tmp_path / "nest", drop="mtp")
    assert not any(n.startswith("mtp") for n in Checkpoint(made.folder).entries)
    assert made.recipe == {"dropped": ["mtp.layers.0.norm.weight"]}
    assert read_json(made.folder / "config.json")["num_nextn_predict_layers"] == 0
    with pytest.raises(ValueError, match="--drop mtp has no effect"):
        sort(parents("nemotron_h"), {}, tmp_path / "other", drop="mtp")
