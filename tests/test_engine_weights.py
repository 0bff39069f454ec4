"""The engine's shared weights and row states: what a member holds, and that the stock class agrees on every number."""

import json
import shutil
import time
from dataclasses import replace
from importlib.resources import files

import pytest
import tiny
import torch

from nestling import hf
from nestling.cli import main
from nestling.engine.decode import StockDecoder, read
from nestling.engine.resident import describe, resident
from nestling.engine.state import RowState
from nestling.engine.weights import Weights
from nestling.nest import FULL, Member, open_nest, write_nest
from nestling.slice import slice as slice_member

PREFIXES = ("hidden", "ffn", "effn", "expert")  # axes whose cuts are views in every architecture that has them


@pytest.fixture(scope="module", params=tiny.NAMES)
def weights(request, parents):
    """A variant's storage in float32; to read only."""
    return Weights(open_nest(parents(request.param)))


def full(weights):
    return weights.load(weights.nest.member(FULL))


def smaller(weights, axes=None):
    layout = weights.nest.layout
    axes = tuple(axis for axis in layout.elastic() if axes is None or axis in axes)
    return Member(name="S", sizes=tiny.random_sizes(layout, torch.Generator().manual_seed(0), axes))


def test_the_storage_is_what_the_stock_class_loads(weights):
    stock = hf.state_of(hf.load_model(weights.nest.folder))
    assert weights.full.keys() == stock.keys()
    assert all(torch.equal(weights.full[name], stock[name]) for name in stock)


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_stored_types_are_those_of_the_stock_class(name, tmp_path):
    folder = tiny.save(name, tmp_path / "parent", is_mixed=True)
    weights = Weights(open_nest(folder))
    for part, tensor in hf.state_of(hf.load_model(folder, dtype="bf16")).items():
        assert weights.full[part].dtype == tensor.dtype, part
        assert torch.equal(weights.full[part], tensor), part
    wide = Weights(open_nest(folder), dtype="fp32")
    assert {tensor.dtype for tensor in wide.full.values()} == {torch.float32}


def test_the_full_member_holds_nothing_of_its_own(weights):
    member = full(weights)
    assert (member.copied, member.num_copied) == (0, 0)
    assert member.shared == weights.nbytes
    ours = {tensor.untyped_storage().data_ptr() for tensor in weights.full.values()}
    assert {p.untyped_storage().data_ptr() for p in member.model.parameters()} <= ours


def test_prefix_cuts_are_views_except_where_blocks_lie_side_by_side(weights):
    member = weights.load(smaller(weights, PREFIXES))
    blocks = [place.name for place in member.layout.places() if "gate_up" in place.name]
    assert member.num_copied == len(blocks)


def test_members_that_cut_a_tensor_alike_share_the_copy(weights):
    one, other = (weights.load(smaller(weights)) for _ in range(2))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert a.data_ptr() == b.data_ptr()


def test_a_member_of_views_is_the_sliced_member(weights, tmp_path):
    member = smaller(weights)
    sliced = hf.load_model(slice_member(weights.nest, member, tmp_path / "small"))
    loaded = weights.load(member)
    mine = hf.state_of(loaded.model)
    assert all(torch.equal(mine[name], tensor) for name, tensor in hf.state_of(sliced).items())
    torch.testing.assert_close(tiny.logits(loaded.model), tiny.logits(sliced), rtol=0, atol=1e-5)  # strides differ


@pytest.mark.parametrize("split", [1, 4, 7])
def test_a_row_read_in_parts_gives_the_logits_of_the_whole(weights, split):
    member, ids = full(weights), tiny.tokens(1, 13)
    row = RowState(member.layout, member.dtype)
    read(member, row, ids[0, :split].tolist())
    parts = read(member, row, ids[0, split:].tolist())
    assert row.length == 13
    torch.testing.assert_close(parts, tiny.logits(member.model, ids)[0, -1], rtol=0, atol=2e-5)  # other matrix shapes


def test_a_row_holds_what_the_stock_cache_holds(weights):
    member, ids = full(weights), tiny.tokens(1, 13)
    row = RowState(member.layout, member.dtype)
    read(member, row, ids[0, :10].tolist())
    with torch.inference_mode():
        cache = member.model(ids[:, :10], use_cache=True).cache
        for i in range(10, 13):
            StockDecoder(member).step([row], [int(ids[0, i])])
            member.model(ids[:, i : i + 1], cache=cache, use_cache=True)
    for layer, kept in enumerate(cache.layers):
        if layer in row.keys:
            held = kept.keys.shape[-2]  # a window's cache drops the oldest
            assert torch.equal(row.keys[layer][:, 13 - held : 13], kept.keys[0])
            assert torch.equal(row.values[layer][:, 13 - held : 13], kept.values[0])
        if layer in row.ssm:
            assert torch.equal(row.conv[layer], kept.conv_states[0][0])
            assert torch.equal(row.ssm[layer], kept.recurrent_states[0][0])


def test_a_copied_row_goes_its_own_way(weights):
    member, ids = full(weights), tiny.tokens(1, 13)[0].tolist()
    row = RowState(member.layout, member.dtype)
    read(member, row, ids[:9])
    copy = row.copy()
    first = StockDecoder(member).step([row], ids[9:10])
    StockDecoder(member).step([row], ids[10:11])
    assert (row.length, copy.length) == (11, 9)
    assert torch.equal(StockDecoder(member).step([copy], ids[9:10]), first)


def test_all_members_of_a_nest_cut_at_prefixes_take_hardly_more_than_the_full_one(parents, tmp_path):
    nest = open_nest(parents("nemotron_h"))
    sizes = {"A": {"hidden": 40, "effn": 20}, "B": {"hidden": 32, "expert": 4}, "C": {"hidden": 20, "sffn": 12}}
    members = {name: Member(name=name, sizes=one) for name, one in sizes.items()}
    folder = shutil.copytree(nest.folder, tmp_path / "nest")
    write_nest(replace(nest, members=nest.members | members), folder)
    told = resident(folder)
    assert told["of_full"] <= 1.05
    assert told["members"]["100"]["copied_bytes"] == 0
    assert list(told["members"]) == ["100", "A", "B", "C"]
    assert "of the full member" in describe(told)


def test_a_member_of_the_reasoner_is_added_in_a_moment():
    weights = Weights(open_nest(files("nestling") / "assets" / "reasoner"))
    full(weights)
    begun = time.perf_counter()
    weights.load(Member(name="S", sizes={"hidden": 96, "effn": 64, "mamba": 3}))
    assert time.perf_counter() - begun < 0.5  # 0.02 s alone on a core; the machine may be busy


def test_inspect_says_what_is_resident(parents, capsys):
    assert main(["inspect", str(parents("llama")), "--resident"]) == 0
    assert "1.000 of the full member" in capsys.readouterr().out
    assert main(["inspect", str(parents("llama")), "--resident", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["resident"]["storage_bytes"] == told["bytes"]["bf16"] * 2
