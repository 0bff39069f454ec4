"""From logits to text: draws, characters spread over tokens, and stop strings."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nestling.engine.detokenizer import Detokenizer, Stops
from nestling.engine.draw import Drawer
from nestling.sampling import Sampling


def byte_tokenizer():
    """One token for each byte, as byte-level BPE without a merge."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


BYTES = byte_tokenizer()


@given(st.text(max_size=40))
def test_no_character_is_given_in_halves_and_the_parts_are_the_text(text):
    ids = BYTES.encode(text).ids
    detokenizer = Detokenizer(BYTES)
    parts = [detokenizer.add(i) for i in ids]
    assert "".join(parts) + detokenizer.end() == text.rstrip("\N{REPLACEMENT CHARACTER}") or "\ufffd" in text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


def test_half_a_character_at_the_end_is_dropped():
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.add(i) for i in BYTES.encode("a\N{GRINNING FACE}").ids[:-1]] == ["a", "", "", ""]
    assert detokenizer.end() == ""


def test_bytes_that_are_no_text_are_not_held_for_ever():
    detokenizer = Detokenizer(BYTES)
    wrong = BYTES.encode("\N{GRINNING FACE}").ids[1]  # goes on with a character that never began
    assert "".join(detokenizer.add(wrong) for _ in range(50))


def test_what_the_text_continues_is_not_given_again():
    detokenizer = Detokenizer(BYTES, before=BYTES.encode("before ").ids)
    assert "".join(detokenizer.add(i) for i in BYTES.encode("after").ids) == "after"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_ends_before_the_first_stop_string_however_it_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    scan, given_text = Stops(stops), ""
    for part in parts:
        if not scan.found:
            given_text += scan.add(part)
    given_text += scan.end() if not scan.found else ""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        assert (given_text, scan.found) == (text, "")
    else:
        end = min(ends)[0]  # the one that is complete first
        assert scan.found in stops
        assert text[:end].endswith(scan.found)
        assert given_text == text[: end - len(scan.found)]


def test_a_stop_string_of_100_kilobytes_costs_nothing_much():
    stop = "ab" * 50_000
    scan = Stops([stop])
    assert scan.add("ab" * 60_000) == ""
    assert scan.found == stop


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(temperature=1.0, top_p=0.6),
        Sampling(temperature=2.0, min_p=0.2),
        Sampling(temperature=1.3, top_k=9, top_p=0.8, min_p=0.05),
    ],
)
def test_draws_have_the_distribution_of_the_stock_filters(sampling):
    logits = 2 * torch.randn(30, generator=torch.Generator().manual_seed(0))
    stock = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        stock.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        stock.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        stock.append(MinPLogitsWarper(sampling.min_p))
    expected = stock(torch.zeros(1, 1, dtype=torch.long), logits[None].clone())[0].softmax(-1)
    drawer = Drawer(Sampling(**{**sampling.__dict__, "seed": 1}))
    counts = torch.zeros(30)
    for _ in range(6000):
        counts[drawer.draw(logits).id] += 1
    assert not counts[expected == 0].any()
    assert (counts / 6000 - expected).abs().max() < 0.03  # five standard deviations


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_low_temperatures_give_the_likeliest(temperature):
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    assert Drawer(Sampling(temperature=temperature)).draw(logits).id == int(logits.argmax())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_refused(value):
    with pytest.raises(FloatingPointError, match="not finite"):
        Drawer(Sampling()).draw(torch.tensor([0.0, value, 1.0]))


def test_excluded_tokens_are_never_drawn():
    logits = torch.tensor([0.0, float("-inf"), 1.0])
    drawer = Drawer(Sampling(temperature=50.0, seed=0))
    assert {drawer.draw(logits).id for _ in range(300)} == {0, 2}
