"""The lean decoder against the stock modules, and against itself in other company."""

import shutil

import pytest
import tiny
import torch

from nestling import hf
from nestling.engine import lean, native
from nestling.engine.decode import StockDecoder, read
from nestling.engine.lean import LeanDecoder, decoder_for
from nestling.engine.pace import KEPT, PROBE, Pace
from nestling.engine.state import RowState
from nestling.engine.weights import Weights
from nestling.nest import FULL, Member, open_nest

DTYPES = ("fp32", "bf16")


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    if not any(map(shutil.which, native.COMPILERS)):
        pytest.skip("no C compiler is here")


@pytest.fixture(scope="module", params=[(name, dtype) for name in tiny.NAMES for dtype in DTYPES], ids="-".join)
def weights(request, parents):
    """A variant's storage; to read only."""
    name, dtype = request.param
    return Weights(open_nest(parents(name)), dtype=dtype)


@pytest.fixture(scope="module")
def full(weights):
    return weights.load(weights.nest.member(FULL))


def smaller(weights):
    """A cut along every axis but `layer`: the stock class cannot run Mamba layers without attention."""
    layout = weights.nest.layout
    axes = tuple(axis for axis in layout.elastic() if axis != "layer")
    sizes = tiny.random_sizes(layout, torch.Generator().manual_seed(0), axes)
    if layout.num_active:  # torch.grouped_mm, which the stock experts run on, wants rows of whole 16 bytes
        sizes |= {axis: max(8, sizes[axis] // 8 * 8) for axis in ("hidden", "effn")}
    return weights.load(Member(name="S", sizes=sizes))


def prompts(*lengths):
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, tiny.VOCAB, (n,), generator=generator).tolist() for n in lengths]


def states(member, *lengths):
    """Rows that have read prompts of these lengths."""
    rows = []
    for prompt in prompts(*lengths):
        rows.append(RowState(member.layout, member.dtype))
        read(member, rows[-1], prompt)
    return rows


def assert_close(ours, stock, dtype):
    """float32: sums in another order, through a few layers. bf16: a sum near the middle of two values rounds to either,
    and what follows carries the step along."""
    scale = stock.abs().max()
    error = (ours - stock).abs()
    assert error.max() <= scale * (3e-5 if dtype == torch.float32 else 0.08)
    assert error.mean() <= scale * (3e-6 if dtype == torch.float32 else 0.01)


@pytest.mark.parametrize("which", ["full", "smaller"])
def test_logits_and_states_are_the_stock_modules(weights, full, which):
    member = full if which == "full" else smaller(weights)
    ours, stock = states(member, 1, 6, 13), states(member, 1, 6, 13)
    decoder, oracle = LeanDecoder(member), StockDecoder(member)
    for tokens in zip(*prompts(9, 9, 9), strict=True):
        assert_close(decoder.step(ours, tokens), oracle.step(stock, tokens), member.dtype)
    for a, b in zip(ours, stock, strict=True):
        assert a.length == b.length
        for kind in ("conv", "ssm"):
            for layer, tensor in getattr(b, kind).items():
                assert_close(getattr(a, kind)[layer].float(), tensor.float(), member.dtype)
        for layer, tensor in b.keys.items():
            assert_close(a.keys[layer][:, : a.length].float(), tensor[:, : b.length].float(), member.dtype)


@pytest.mark.parametrize("which", ["full", "smaller"])
def test_a_prompt_read_at_once_is_the_stock_modules(weights, full, which):
    member = full if which == "full" else smaller(weights)
    if member.dtype == torch.bfloat16:
        pytest.skip("over a whole prompt, roundings choose other experts; the next test compares with single steps")
    decoder = LeanDecoder(member)
    for prompt in prompts(1, 2, 7, 33):
        ours, stock = RowState(member.layout, member.dtype), RowState(member.layout, member.dtype)
        assert_close(decoder.advance([ours], [prompt])[0], read(member, stock, prompt), member.dtype)
        assert ours.length == stock.length == len(prompt)
        after = prompts(5)[0]
        for token in after:
            assert_close(decoder.step([ours], [token])[0], read(member, stock, [token]), member.dtype)


def test_a_prompt_is_the_same_bit_for_bit_in_any_parts_and_company(full):
    (prompt,) = prompts(41)
    others = prompts(3, 17)
    whole = RowState(full.layout, full.dtype)
    logits = LeanDecoder(full, threads=1).advance([whole], [prompt])[0]
    # A Mamba layer rounds a prompt's tokens at other places than decoded ones, as the stock one does.
    singly = [(range(1, 41), 1)] if full.dtype == torch.float32 else []
    for cuts, threads in [*singly, ((2,), 1), ((16, 18, 37), 1), ((5, 30), 2), ((), 2), ((39,), 2)]:
        decoder, parted = LeanDecoder(full, threads=threads), RowState(full.layout, full.dtype)
        for i, (start, end) in enumerate(zip((0, *cuts), (*cuts, len(prompt)), strict=True)):
            company = [RowState(full.layout, full.dtype) for _ in others[: i % 3]]
            tokens = [*others[: i % 3], prompt[start:end]]
            found = decoder.advance([*company, parted], tokens)[-1]
        assert torch.equal(found, logits), (cuts, threads)
        (step,) = prompts(1)[0]
        again = RowState(full.layout, full.dtype)
        decoder.advance([again], [prompt])
        assert torch.equal(decoder.step([parted], [step]), decoder.step([again], [step]))


def test_a_row_is_the_same_bit_for_bit_in_any_company(full):
    lengths = (3, 7, 1, 12, 5, 2, 9, 4, 8, 6, 1, 3, 11, 2, 5, 7, 4, 10, 3)  # more than the kernel takes at once
    tokens = list(zip(*prompts(*[4] * len(lengths)), strict=True))
    decoder = LeanDecoder(full)
    alone = []
    for i, row in enumerate(states(full, *lengths)):
        alone.append(torch.cat([decoder.step([row], [step[i]]) for step in tokens]))
    for size in (2, 4, 7, 16, 19):
        rows = states(full, *lengths)[:size]
        together = torch.stack([decoder.step(rows, step[:size]) for step in tokens], dim=1)
        assert torch.equal(together, torch.stack(alone[:size]))
    rows = states(full, *lengths)[:5]
    reverse = torch.stack([decoder.step(rows[::-1], step[:5][::-1]) for step in tokens], dim=1)
    assert torch.equal(reverse.flip(0), torch.stack(alone[:5]))


def test_threads_change_no_bit(full):
    one, two = states(full, 3, 7, 1), states(full, 3, 7, 1)
    first, second = LeanDecoder(full, threads=1), LeanDecoder(full, threads=3)
    second._pace.choices = [3]
    for tokens in zip(*prompts(4, 4, 4), strict=True):
        assert torch.equal(first.step(one, tokens), second.step(two, tokens))


def test_the_kernel_without_tile_registers_gives_the_same(weights, full):
    library = native.library()
    decoder, oracle, lengths = LeanDecoder(full), StockDecoder(full), (1, 6, 13, 2, 8, 3)
    ours, alone, stock = states(full, *lengths), states(full, *lengths), states(full, *lengths)
    library.choose_kernel(0)
    try:
        for tokens in zip(*prompts(*[3] * len(lengths)), strict=True):
            logits = decoder.step(ours, tokens)
            each = torch.cat([decoder.step([row], [token]) for row, token in zip(alone, tokens, strict=True)])
            assert torch.equal(logits, each)
            assert_close(logits, oracle.step(stock, tokens), full.dtype)
    finally:
        library.choose_kernel(1)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_greedy_tokens_are_those_of_stock_generate(name, parents):
    weights = Weights(open_nest(parents(name)))
    member = weights.load(weights.nest.member(FULL))
    model, decoder, number = hf.load_model(parents(name)), decoder_for(member, decoder="lean"), 24
    for prompt in prompts(1, 5, 12):
        settings = {"max_new_tokens": number, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
        expected = model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()
        row = RowState(member.layout, member.dtype)
        tokens = [int(read(member, row, prompt).argmax())]
        while len(tokens) < number:
            tokens.append(int(decoder.step([row], tokens[-1:])[0].argmax()))
        assert tokens == expected


def test_without_a_compiler_the_stock_modules_run_and_the_log_says_so(full, monkeypatch, caplog):
    monkeypatch.setattr(native, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setattr(native, "library", native.library.__wrapped__)
    assert isinstance(decoder_for(full), StockDecoder)
    (line,) = caplog.messages
    assert "no C compiler" in line
    with pytest.raises(native.NoLibrary, match="no-such-compiler"):
        decoder_for(full, decoder="lean")


def test_a_compiler_that_fails_is_told(tmp_path):
    with pytest.raises(native.NoLibrary, match="false"):
        native.load("/bin/false", tmp_path)


def test_a_library_is_compiled_once(tmp_path, monkeypatch):
    compiler = next(filter(None, map(shutil.which, native.COMPILERS)))
    native.load(compiler, tmp_path)
    monkeypatch.setattr(native, "_compile", lambda *args: pytest.fail("compiled again"))
    native.load(compiler, tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_model_that_the_lean_decoder_does_not_know_runs_on_the_stock_modules(parents, caplog):
    weights = Weights(open_nest(parents("llama")), dtype="fp16")
    member = weights.load(weights.nest.member(FULL))
    assert isinstance(decoder_for(member), StockDecoder)
    assert "float16" in caplog.text
    with pytest.raises(lean.Unknown, match="float16"):
        decoder_for(member, decoder="lean")


def test_positions_beyond_the_first_table(parents):
    weights = Weights(open_nest(parents("llama")))
    member = weights.load(weights.nest.member(FULL))
    length = lean.LEAST_TABLE - 1
    ours, stock = states(member, length), states(member, length)
    decoder, oracle = LeanDecoder(member), StockDecoder(member)
    for token in (5, 6, 7):
        assert_close(decoder.step(ours, [token]), oracle.step(stock, [token]), member.dtype)


def test_a_token_that_is_not_in_the_vocabulary_is_caught_before_memory_is_read(full):
    (row,) = states(full, 3)
    for token in (-1, tiny.VOCAB):
        with pytest.raises(AssertionError):
            LeanDecoder(full).step([row], [token])


def test_the_number_of_threads_follows_what_steps_take():
    cost = {4: 1.0, 2: 2.0, 1: 3.0}
    pace = Pace(4)

    def run(number):
        chosen = []
        for _ in range(number):
            chosen.append(pace.choose(1))
            pace.note(1, chosen[-1], cost[chosen[-1]])
        return chosen

    assert set(run(3 * KEPT)) == {4, 2, 1}
    assert run(2 * PROBE).count(4) > 1.8 * PROBE
    cost[4] = 9.0  # another process has come
    run(8 * PROBE)
    assert run(2 * PROBE).count(2) > 1.8 * PROBE
    cost[4] = 1.0  # and gone
    run(8 * PROBE)
    assert run(2 * PROBE).count(4) > 1.8 * PROBE


def test_one_slow_step_is_not_the_rule():
    pace = Pace(2)
    for i in range(40):
        threads = pace.choose(1)
        pace.note(1, threads, 100.0 if i == 20 else {2: 1.0, 1: 1.5}[threads])
    assert pace.choose(1) == 2
