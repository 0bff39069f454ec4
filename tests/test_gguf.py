"""Members as GGUF: what llama.cpp computes from the file, against transformers on the same member.

Everything that llama.cpp runs is compared through its own loader and graph (the wheel xllamacpp), never with our idea
of the format. What needs no engine is read back with the public gguf package.
"""

import json

import pytest
import tiny
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from nestling import hf
from nestling.checkpoint import Checkpoint, write_json
from nestling.cli import main
from nestling.gguf_vocab import _QWEN2, _TEKKEN, read_vocabulary
from nestling.nest import Member, open_nest
from nestling.slice import slice as slice_member
from nestling.to_gguf import write_gguf

gguf = pytest.importorskip("gguf", reason="the package gguf is not here: pip install 'nestling[gguf]'")


def kinds(pattern: str) -> list[str]:
    return [tiny._KINDS[letter] for letter in pattern]


NO_FLOOR = {"time_step_min": 1e-9}  # llama.cpp has no floor under Mamba's time steps
# What llama.cpp can run of each architecture: variant of tests/tiny.py, and what is changed in it.
RUNS = {
    "llama": ("llama", {}),
    "llama_bias": ("llama_bias", {}),
    "llama_tied": ("llama_tied", {}),
    "llama_linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}}),
    "llama_llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {"mlp_only_layers": [], "norm_topk_prob": True}),
    "nemotron_h_moe": ("nemotron_h", {"layers_block_type": kinds("MEM*E"), **NO_FLOOR}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": kinds("M-M*-"), "mlp_bias": True, **NO_FLOOR}),
    "nemotron_h_odd": (
        "nemotron_h",
        {
            "layers_block_type": kinds("M*E"), "n_groups": 3, "conv_kernel": 4, "use_conv_bias": False,
            "norm_topk_prob": False, "routed_scaling_factor": 1.0, **NO_FLOOR,
        },
    ),
    "nemotron_h_latent": ("nemotron_h_latent", {"mlp_bias": False, **NO_FLOOR}),
}  # fmt: skip


def make(name, folder):
    """A folder of a model in RUNS, with tokenizer and chat template."""
    base, changes = RUNS[name]
    tiny.model(base, **changes).save_pretrained(folder)
    tiny.add_sidecars(folder)
    return folder


def small_member(nest):
    """A member that cuts every axis but depth, which would leave a hybrid without one of its kinds of layer."""
    sizes = tiny.random_sizes(nest.layout, torch.Generator().manual_seed(1))
    sizes.pop("layer")
    if nest.layout.arch.model_type == "qwen2":
        sizes |= {"hidden": 32, "q": 2}
    return Member(name="S", sizes=sizes)


def read(file):
    """The tensors of a file by name, as float32 in the order of torch."""
    reader = gguf.GGUFReader(file)
    return {
        one.name: torch.from_numpy(gguf.quants.dequantize(one.data, one.tensor_type).copy()) for one in reader.tensors
    }


def types(file):
    return {one.name: one.tensor_type.name for one in gguf.GGUFReader(file).tensors}


def keys(file):
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def distance(file, folder, ids):
    """The largest difference of a log-probability between llama.cpp and transformers, over a few prefixes of ids."""
    import engines

    model, worst = hf.load_model(folder), 0.0
    with engines.served(file) as server:
        for n in (1, 4, len(ids)):
            expected = torch.log_softmax(tiny.logits(model, torch.tensor([ids[:n]]))[0, -1].float(), -1)
            found = engines.next_token(server, ids[:n], len(expected))
            worst = max(worst, (found - expected).abs().max().item())
    return worst


IDS = tiny.tokens(1, 41)[0].tolist()


@pytest.mark.parametrize("name", RUNS)
def test_llama_cpp_agrees_with_transformers_on_the_full_model_and_on_a_member(name, tmp_path):
    nest = open_nest(make(name, tmp_path / "nest"))
    for member in (nest.member("full"), small_member(nest)):
        file = write_gguf(nest, member, tmp_path / "out.gguf", gguf_type="f32", overwrite=True)
        folder = slice_member(nest, member, tmp_path / "out", overwrite=True)
        # Float32 on both sides: what is left is the order of sums, about 1e-5 at logits of this size.
        assert distance(file, folder, IDS) < 1e-4


@pytest.mark.parametrize(("gguf_type", "bound"), [("f16", 0.02), ("bf16", 0.15), ("q8_0", 0.15)])
def test_a_smaller_type_moves_log_probabilities_by_no_more_than_its_rounding(gguf_type, bound, tmp_path):
    # Rounding to 11, 8 and about 8 bits, through three layers of a model whose log-probabilities span ten.
    nest = open_nest(make("llama", tmp_path / "nest"))
    member = Member(name="S", sizes={"hidden": 48, "ffn": 32})
    file = write_gguf(nest, member, tmp_path / "out.gguf", gguf_type=gguf_type)
    assert distance(file, slice_member(nest, member, tmp_path / "out"), IDS) < bound


def test_a_window_shortens_the_context_to_where_both_agree(tmp_path):
    nest = open_nest(tiny.save("mistral", tmp_path / "nest", is_chatty=True))
    said = []
    file = write_gguf(nest, nest.member("full"), tmp_path / "out.gguf", gguf_type="f32", say=said.append)
    assert keys(file)["llama.context_length"] == 5
    assert any("sliding window" in line for line in said)
    assert distance(file, nest.folder, IDS[:4]) < 1e-4


def test_q8_0_blocks_are_what_the_gguf_package_quantizes_and_odd_rows_stay_bf16(tmp_path):
    nest = open_nest(make("nemotron_h_moe", tmp_path / "nest"))
    member = Member(name="S", sizes={"hidden": 32})
    said = []
    file = write_gguf(nest, member, tmp_path / "out.gguf", gguf_type="q8_0", say=said.append)
    found, kept = types(file), Checkpoint(nest.folder)
    assert found["blk.1.ffn_up_exps.weight"] == "Q8_0"  # rows of hidden, 32
    assert found["blk.1.ffn_down_exps.weight"] == "BF16"  # rows of effn, 24
    assert found["blk.1.ffn_gate_inp.weight"] == found["blk.0.ssm_a"] == found["blk.0.ssm_conv1d.weight"] == "F32"
    assert any("stay bf16" in line and "24" in line for line in said)
    (data,) = (one.data for one in gguf.GGUFReader(file).tensors if one.name == "blk.1.ffn_up_exps.weight")
    for expert in range(6):
        row = kept.read(f"backbone.layers.1.mixer.experts.{expert}.up_proj.weight")[:, :32]
        expected = gguf.quants.quantize(row.contiguous().numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert data[expert].tobytes() == expected.tobytes()


def test_bf16_values_pass_bit_for_bit_and_the_mamba_decay_is_minus_the_exponential(tmp_path):
    nest = open_nest(make("nemotron_h_moe", tmp_path / "nest"))
    file = write_gguf(nest, nest.member("full"), tmp_path / "out.gguf")
    found, kept = read(file), Checkpoint(nest.folder)
    expected = kept.read("backbone.layers.0.mixer.in_proj.weight").bfloat16().float()
    assert torch.equal(found["blk.0.ssm_in.weight"], expected)
    assert torch.allclose(found["blk.0.ssm_a"].flatten().neg().log(), kept.read("backbone.layers.0.mixer.A_log"))


def test_a_tied_head_is_not_written_twice(tmp_path):
    nest = open_nest(make("llama_tied", tmp_path / "nest"))
    file = write_gguf(nest, nest.member("full"), tmp_path / "out.gguf")
    assert "output.weight" not in types(file)
    assert "token_embd.weight" in types(file)


def test_large_tensors_are_written_in_blocks_with_the_same_bytes(tmp_path, monkeypatch):
    nest = open_nest(make("llama_bias", tmp_path / "nest"))
    for gguf_type in ("f32", "q8_0"):
        whole = write_gguf(nest, nest.member("full"), tmp_path / f"whole-{gguf_type}.gguf", gguf_type=gguf_type)
        with monkeypatch.context() as patch:
            patch.setattr("nestling.to_gguf.ROW_BLOCK", 100)
            parts = write_gguf(nest, nest.member("full"), tmp_path / f"parts-{gguf_type}.gguf", gguf_type=gguf_type)
        assert whole.read_bytes() == parts.read_bytes()


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("nemotron_h", {}, "routed or none"),
        ("nemotron_h", {"layers_block_type": kinds("ME")}, "at least one attention layer"),
        ("qwen3_bias", {}, "no attention bias"),
        ("qwen3_moe", {}, "experts in every layer.*norm_topk_prob"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 500.0}}, "rope_type 'yarn'"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_or_abort_on_is_refused_with_the_reason(name, changes, reason, tmp_path):
    tiny.model(name, **changes).save_pretrained(tmp_path / "nest")
    tiny.add_sidecars(tmp_path / "nest")
    nest = open_nest(tmp_path / "nest")
    with pytest.raises(ValueError, match=reason):
        write_gguf(nest, nest.member("full"), tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["nest"]


def test_a_qwen2_member_whose_width_is_not_that_of_its_heads_is_refused(tmp_path):
    nest = open_nest(make("qwen2", tmp_path / "nest"))
    with pytest.raises(ValueError, match="here 32 and 48"):
        write_gguf(nest, Member(name="S", sizes={"hidden": 32}), tmp_path / "out.gguf")


def test_values_beyond_f16_are_refused_not_written_as_infinity(tmp_path):
    model = tiny.model("llama")
    model.model.layers[0].mlp.up_proj.weight.data[3, 4] = 1e5
    model.save_pretrained(tmp_path / "nest")
    tiny.add_sidecars(tmp_path / "nest")
    nest = open_nest(tmp_path / "nest")
    with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight.*65504.*bf16"):
        write_gguf(nest, nest.member("full"), tmp_path / "out.gguf", gguf_type="f16")
    assert not (tmp_path / "out.gguf").exists()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_quantized_nest_is_refused_by_name(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make("llama", tmp_path / "nest")
    state = load_file(folder / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors")
    nest = open_nest(folder)
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*F8_E4M3"):
        write_gguf(nest, nest.member("full"), tmp_path / "out.gguf")


def test_the_command_writes_a_file_or_a_folder_and_refuses_to_overwrite(tmp_path, capsys):
    make("llama", tmp_path / "nest")
    command = ["slice", str(tmp_path / "nest"), "full", "--format", "gguf"]
    assert main([*command, "--to", str(tmp_path / "small"), "--gguf-type", "q8_0"]) == 0
    assert [path.name for path in (tmp_path / "small").iterdir()] == ["small-q8_0.gguf"]
    assert main([*command, "--to", str(tmp_path / "one.gguf")]) == 0
    assert "parameters" in capsys.readouterr().out
    assert main([*command, "--to", str(tmp_path / "one.gguf")]) == 2
    assert main([*command, "--to", str(tmp_path / "two.gguf"), "--gguf-type", "q4_k"]) == 2
    assert "q4_k" in capsys.readouterr().err
    assert not (tmp_path / "two.gguf").exists()


# Tokenizers.

TEXT = (
    "The quick brown fox jumps over the lazy dog. It's 1234567 o'clock, isn't it?  Two  spaces;\ttabs\nand\n\nlines. "
    "Caf\u00e9 na\u00efve \u00dcber \u4f60\u597d \U0001f600 def f(x):\n    return x**2 + 10  # we'll see \r\n "
    "CamelCase HTMLParser2 "
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
GPT2_LIKE = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "qwen2": (_QWEN2,),
    "llama-bpe": (_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),),
    "tekken": (_TEKKEN,),
}


def byte_level(pre, *, ignores=None, normalizer=None, **model):
    """A byte-level BPE trained on TEXT whose split llama.cpp calls `pre`."""
    inner = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken") if ignores is None else ignores, **model))
    split = GPT2_LIKE[pre]
    if isinstance(split, tuple):
        steps = [pre_tokenizers.Split(Regex(split[0]), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
        split = pre_tokenizers.Sequence(steps)
    inner.pre_tokenizer = split
    inner.normalizer = normalizer
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator([TEXT], trainer)
    return inner


def sentencepiece():
    """A BPE as SentencePiece makes it: byte fallback, one space put before text, and every merge its tokens allow."""
    space = "\u2581"
    words = ["th", "the", "he", "qu", "ck", f"{space}t", f"{space}th", f"{space}the", "it", "in", "an", "and", "es"]
    letters = sorted({*TEXT.replace(" ", "\u2581"), *"".join(words)} - {"\n", "\t", "\r"})
    vocab = {w: i for i, w in enumerate([*SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *words, *letters])}
    merges = [(w[:n], w[n:]) for w in words for n in range(1, len(w)) if w[:n] in vocab and w[n:] in vocab]
    inner = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.add_special_tokens(SPECIAL)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return inner


def with_tokenizer(inner, folder, *, has_bos=False, **changes):
    """A tiny Llama with this tokenizer and a chat template: tied embeddings, grouped heads."""
    if has_bos:
        inner.post_processor = processors.TemplateProcessing("<s> $A", None, [("<s>", inner.token_to_id("<s>"))])
    size = inner.get_vocab_size() + 3  # rows beyond the tokenizer's own, as padded embeddings have
    tiny.model("llama_tied", vocab_size=size, **changes).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="<|im_end|>", unk_token="<unk>", pad_token="</s>",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    return folder


def texts():
    """What tokenizers trip over, then pieces of TEXT drawn at random."""
    draw = torch.Generator().manual_seed(0)
    fixed = [
        "a",
        " ",
        "  ",
        "\n",
        "a b",
        " a",
        "a ",
        "12",
        "1 2345",
        "it's",
        "IT'S",
        "x\n\n y",
        "\u4f60\u597d!",
        "e\u0301",
    ]
    fixed += ["<|im_start|>user\nhi<|im_end|>\n", "a<|im_end|> b", TEXT]
    for _ in range(60):
        start, length = torch.randint(0, len(TEXT), (2,), generator=draw).tolist()
        cut = list(TEXT[start : start + length % 30])
        order = torch.randperm(len(cut), generator=draw).tolist()
        fixed += ["".join(cut), "".join(cut[i] for i in order)]
    return [text for text in fixed if text]


@pytest.mark.parametrize("kind", [*GPT2_LIKE, "sentencepiece", "characters"])
@pytest.mark.parametrize("has_bos", [False, True])
def test_llama_cpp_gives_the_same_tokens_as_the_tokenizer_of_the_folder(kind, has_bos, tmp_path):
    import engines

    if kind == "characters":
        folder = make("llama_tied", tmp_path / "nest")
        tried = ["abc XYZ 12", "a<think>b c</think>d", "  ", "<s>x"]
    else:
        folder = with_tokenizer(sentencepiece() if kind == "sentencepiece" else byte_level(kind), tmp_path / "nest",
                                has_bos=has_bos)  # fmt: skip
        tried = [t for t in texts() if kind != "tekken" or t.isascii()]  # its split of other scripts is known to differ
    nest, tokenizer = open_nest(folder), hf.load_tokenizer(folder)
    file = write_gguf(nest, nest.member("full"), tmp_path / "out.gguf")
    with engines.served(file) as server:
        for text in tried:
            for with_special in (False, True):
                expected = tokenizer(text, add_special_tokens=with_special)["input_ids"]
                assert engines.tokenized(server, text, with_special=with_special) == expected, text
        messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "user")]
        assert engines.templated(server, messages) == tokenizer.apply_chat_template(messages, tokenize=False)


def test_characters_of_several_bytes_are_one_token_each(tmp_path):
    import engines

    letters = ["<pad>", "<s>", "</s>", "<unk>", *"ab ", "\u00e9", "\u4f60", "\u597d", "\U0001f600"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(letters)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    tiny.model("llama").save_pretrained(tmp_path / "nest")
    PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(tmp_path / "nest")
    nest = open_nest(tmp_path / "nest")
    said = []
    file = write_gguf(nest, nest.member("full"), tmp_path / "out.gguf", say=said.append)
    assert any("leaves out characters" in line for line in said)
    with engines.served(file) as server:
        assert engines.tokenized(server, "\u4f60\u597d \u00e9a\U0001f600") == [8, 9, 6, 7, 4, 10]


def save_tokenizer(inner, folder):
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def lossy_words():
    """A SentencePiece-like BPE that lacks a merge which its tokens allow."""
    told = json.loads(sentencepiece().to_str())
    told["model"]["merges"] = [pair for pair in told["model"]["merges"] if pair != ["t", "he"]]
    return Tokenizer.from_str(json.dumps(told))


def unsplit():
    inner = byte_level("gpt-2")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return inner


def spaced():
    inner = byte_level("gpt-2")
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return inner


def unreachable():
    """A byte-level BPE that takes a whole word past its merges, where llama.cpp's `gpt-2` does not."""
    told = json.loads(byte_level("gpt-2", ignores=True).to_str())
    told["model"]["vocab"]["zzzz"] = len(told["model"]["vocab"])
    return Tokenizer.from_str(json.dumps(told))


def framed():
    inner = byte_level("gpt-2")
    inner.post_processor = processors.TemplateProcessing("<unk> $A", None, [("<unk>", inner.token_to_id("<unk>"))])
    return inner


def greedy():
    inner = byte_level("gpt-2")
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return inner


@pytest.mark.parametrize(
    ("inner", "reason"),
    [
        (lambda: byte_level("gpt-2", normalizer=normalizers.Lowercase()), "normalizer is .*Lowercase"),
        (lambda: Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], 0)), "Unigram"),
        (lambda: Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>")), "single characters"),
        (unsplit, "splits text by"),
        (spaced, "splits text by"),
        (unreachable, "ignore_merges"),
        (lossy_words, "would also merge 't' and 'he'"),
        (framed, "around a text"),
        (greedy, "<mask>.*spaces"),
    ],
)
def test_a_tokenizer_that_llama_cpp_cannot_follow_is_refused_with_the_reason(inner, reason, tmp_path):
    with pytest.raises(ValueError, match=f"cannot be written as GGUF: .*{reason}"):
        read_vocabulary(save_tokenizer(inner(), tmp_path), 1000)


def test_ignoring_merges_makes_no_difference_where_the_merges_reach_every_token(tmp_path):
    assert read_vocabulary(save_tokenizer(byte_level("gpt-2", ignores=True), tmp_path), 1000).pre == "gpt-2"


def test_a_normalizer_that_only_composes_unicode_is_written_and_said(tmp_path):
    found = read_vocabulary(save_tokenizer(byte_level("qwen2", normalizer=normalizers.NFC()), tmp_path), 1000)
    assert any("NFC" in note for note in found.notes)


def test_a_folder_without_a_tokenizer_and_one_with_more_tokens_than_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        read_vocabulary(tmp_path, 1000)
    with pytest.raises(ValueError, match="only 100 rows"):
        read_vocabulary(save_tokenizer(byte_level("gpt-2"), tmp_path), 100)


def test_every_stop_token_of_the_generation_config_and_every_chat_template_is_carried(tmp_path):
    save_tokenizer(byte_level("gpt-2"), tmp_path)
    write_json(tmp_path / "generation_config.json", {"eos_token_id": [2, 4]})
    tokenizer = hf.load_tokenizer(tmp_path)
    tokenizer.chat_template = {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
    tokenizer.save_pretrained(tmp_path)
    found = read_vocabulary(tmp_path, 1000)
    assert found.special["eos"] == 2
    assert found.special["eot"] == 4
    assert {one["name"]: one["template"] for one in found.template} == {"default": "{{ 1 }}", "tool_use": "{{ 2 }}"}
