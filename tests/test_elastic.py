"""Running members on live weights: what is shared, what is refused, what training leaves behind."""

import pytest
import tiny
import torch

from nestling import hf
from nestling.elastic import ElasticModel, Run


def run(elastic: ElasticModel, what) -> torch.Tensor:
    with torch.no_grad():
        return elastic(what, input_ids=tiny.tokens(), use_cache=False).logits


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_full_member_is_the_stock_model_bit_for_bit(name):
    assert torch.equal(run(ElasticModel(tiny.model(name)), {}), tiny.logits(tiny.shared(name)))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_state_has_the_stock_names_and_the_same_tensors(name):
    model = tiny.model(name)
    expected = {n: t.data_ptr() for n, t in hf.state_of(model).items()}
    assert {n: t.data_ptr() for n, t in ElasticModel(model).state().items()} == expected


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_members_own_no_weights_of_their_own(name):
    elastic = ElasticModel(tiny.model(name))
    before = {n: p.data_ptr() for n, p in elastic.named_parameters()}
    run(elastic, {"hidden": 24})
    run(elastic, {"hidden": 36})
    assert {n: p.data_ptr() for n, p in elastic.named_parameters()} == before
    assert not any(p.is_meta for p in elastic.parameters())
    assert sum(p.numel() for p in elastic.parameters()) == sum(p.numel() for p in tiny.shared(name).parameters())


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_running_members_in_turns_gives_each_its_own_answer(name):
    elastic = ElasticModel(tiny.model(name))
    members = [{"hidden": 24}, {}, {"layer": 2}, {"hidden": 36, "layer": 2}]
    alone = [run(ElasticModel(tiny.model(name)), m) for m in members]
    for _ in range(2):
        for member, expected in zip(members, alone, strict=True):
            assert torch.equal(run(elastic, member), expected)
    stairs = {"hidden": (torch.arange(48) < 24).float()}
    run(elastic, Run(stairs=stairs, is_soft=True))  # a soft run in between leaves nothing behind
    assert torch.equal(run(elastic, {}), alone[1])


@pytest.mark.parametrize("name", tiny.PLAIN)
def test_a_step_on_a_member_shows_at_once_in_every_member_that_shares_its_weights(name):
    elastic = ElasticModel(tiny.model(name).requires_grad_(True))
    before = run(elastic, {}), run(elastic, {"hidden": 24})
    optimizer = torch.optim.SGD(elastic.parameters(), lr=1e-2)
    loss = elastic({"hidden": 24}, input_ids=tiny.tokens(), labels=tiny.tokens(), use_cache=False).loss
    loss.backward()
    optimizer.step()
    assert not torch.equal(run(elastic, {"hidden": 24}), before[1])
    assert not torch.equal(run(elastic, {}), before[0])
    after = elastic({"hidden": 24}, input_ids=tiny.tokens(), labels=tiny.tokens(), use_cache=False).loss
    assert after < loss


def test_training_mode_reaches_the_members():
    model = tiny.model("llama", attention_dropout=0.5)
    expected = tiny.logits(model)
    elastic = ElasticModel(model)
    assert torch.equal(run(elastic, {}), expected)  # given in evaluation mode, it stays so
    calm = run(elastic, {"hidden": 24})
    elastic.train()
    torch.manual_seed(0)
    noisy = run(elastic, {"hidden": 24})
    assert not torch.equal(calm, noisy)
    elastic.eval()
    assert torch.equal(run(elastic, {"hidden": 24}), calm)


def test_weights_that_are_loaded_later_are_the_ones_that_run():
    elastic = ElasticModel(tiny.model("qwen2"))
    run(elastic, {"hidden": 24})
    other = hf.state_of(tiny.model("qwen2", seed=1))
    with torch.no_grad():
        for name, tensor in elastic.state().items():
            tensor.copy_(other[name])
    assert torch.equal(run(elastic, {"hidden": 24}), run(ElasticModel(tiny.model("qwen2", seed=1)), {"hidden": 24}))


@pytest.mark.parametrize(("sizes", "told"), [
    ({"hidden": 49}, "the nest has 48"), ({"kv": 1}, "cannot shrink here"), ({"ffn": 0}, "asks for 0"),
    ({"hidden": 24.5}, "whole number"),
])  # fmt: skip
def test_sizes_that_no_member_can_have_are_refused_before_anything_runs(sizes, told):
    with pytest.raises(ValueError, match=told):
        run(ElasticModel(tiny.model("mistral")), sizes)


def test_a_whole_float_size_runs_as_that_size():
    elastic = ElasticModel(tiny.model("mistral"))
    assert torch.equal(run(elastic, {"hidden": 24.0}), run(elastic, {"hidden": 24}))


def test_a_soft_run_with_stairs_between_zero_and_one_lies_between_and_hears_every_choice():
    elastic = ElasticModel(tiny.model("nemotron_h"))
    p = torch.tensor([0.75, 0.25], requires_grad=True)  # of the full ffn and of half of it
    stairs = torch.cat([p.sum().expand(14), p[0].expand(14)])
    out = elastic(Run(stairs={"ffn": stairs}, is_soft=True), input_ids=tiny.tokens(), use_cache=False).logits
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert (p.grad != 0).all()
    # The down projection is linear in its input, so this layer's output is the mixture of the two members'.
    model = tiny.model("nemotron_h")
    with torch.no_grad():
        model.model.layers[3].mixer.down_proj.weight[:, 14:] *= 0.75
    torch.testing.assert_close(out.detach(), tiny.logits(model), rtol=1e-4, atol=1e-4)


def test_a_padded_batch_gives_each_sequence_the_logits_that_it_has_alone():
    elastic = ElasticModel(tiny.model("nemotron_h"))
    x = tiny.tokens(1, 9)
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), x], dim=1)
    mask = (torch.arange(13) >= 4).long()[None]
    with torch.no_grad():
        alone = elastic({"hidden": 32}, input_ids=x, use_cache=False).logits
        batched = elastic({"hidden": 32}, input_ids=padded, attention_mask=mask, use_cache=False).logits[:, 4:]
    torch.testing.assert_close(batched, alone, rtol=1e-4, atol=1e-4)  # sums over another chunk of time
