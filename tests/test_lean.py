"""The CPU forms of Mamba-2's scan and convolution against the stock model that they stand in for."""

import copy

import pytest
import torch

from nestling import hf
from tests import tiny


def gradients(model, ids):
    model.zero_grad()
    model(input_ids=ids, use_cache=False).logits.square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", [name for name in tiny.NAMES if name.startswith("nemotron_h")])
@pytest.mark.parametrize("time", [1, 7, 40])
def test_lean_mamba_gives_the_stock_logits_and_gradients(name, time):
    model = copy.deepcopy(tiny.model(name, seed=3)).requires_grad_(True).train()
    ids = torch.randint(model.config.vocab_size, (2, time), generator=torch.Generator().manual_seed(time))
    stock = model(input_ids=ids, use_cache=False).logits
    expected = gradients(model, ids)
    with hf.lean_mamba():
        lean = model(input_ids=ids, use_cache=False).logits
        found = gradients(model, ids)
    # Sums over time in another order: float32 rounding, larger where decays are steep.
    torch.testing.assert_close(lean, stock, rtol=1e-3, atol=5e-5)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=5e-3, atol=5e-5, msg=key)


def test_after_lean_mamba_the_stock_forms_are_back_bit_for_bit():
    name = next(name for name in tiny.NAMES if name.startswith("nemotron_h"))
    model = tiny.model(name, seed=3)
    ids = torch.arange(12).view(1, 12)
    before = model(input_ids=ids, use_cache=False).logits
    with pytest.raises(KeyError), hf.lean_mamba():
        raise KeyError("anything")
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def test_generation_with_a_cache_is_left_to_the_stock_scan():
    name = next(name for name in tiny.NAMES if name.startswith("nemotron_h"))
    model = tiny.model(name, seed=3)
    ids = torch.arange(12).view(1, 12)
    before = model(input_ids=ids, use_cache=True)
    with hf.lean_mamba():
        after = model(input_ids=ids, use_cache=True)
    torch.testing.assert_close(after.logits, before.logits, rtol=1e-3, atol=5e-5)
