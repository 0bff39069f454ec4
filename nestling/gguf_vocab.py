"""A Hugging Face tokenizer in the words of GGUF: tokens, their kinds, merges or scores, special tokens, chat template.

llama.cpp does not read tokenizer.json: it has a few algorithms of its own, and GGUF only names one of them. So a
tokenizer is written only if one of them is known to give the same tokens:

byte-level BPE       the split before the merges must be one that llama.cpp has (`PRE`)
SentencePiece BPE    with byte fallback and every merge that its tokens allow (Llama 2, Mistral)
characters           one token a character: byte-level BPE whose only merges are those inside a character

Everything else is refused, with the reason; small known differences are said aloud (`notes`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from nestling import hf
from nestling.checkpoint import read_json

if TYPE_CHECKING:
    from gguf import GGUFWriter

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

# How text is split before byte-level merges -> what llama.cpp calls it, and whether it takes whole words as they stand
# (`ignore_merges`). "digits" and "gpt2" are the two splits that tokenizer.json has names for.
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE: dict[tuple[str, ...], tuple[str, bool]] = {
    ("gpt2",): ("gpt-2", False),
    ("digits", "gpt2"): ("smollm", False),
    (_QWEN2,): ("qwen2", False),
    (_QWEN2.replace(r"\p{N}|", r"\p{N}{1,3}|"),): ("llama-bpe", True),
    (_TEKKEN,): ("tekken", True),
}
CHARACTERS = ({"String": ""}, {"Regex": r"[\s\S]"}, {"Regex": "(?s:.)"})
PREPENDED = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ],
}


@dataclass(kw_only=True)
class Vocabulary:
    """What GGUF holds of a tokenizer."""

    model: str  # llama.cpp's algorithm: "gpt2" is byte-level BPE, "llama" SentencePiece
    pre: str  # how text is split before the merges
    tokens: list[str]
    kinds: list[int]  # NORMAL, CONTROL, ...
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    special: dict[str, int] = field(default_factory=dict)  # "bos" -> id
    flags: dict[str, bool] = field(default_factory=dict)  # "add_bos_token" -> whether
    template: str | list[dict[str, str]] = ""
    notes: list[str] = field(default_factory=list)  # known differences, for people

    def add_to(self, writer: GGUFWriter) -> None:
        """Write all keys."""
        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        writer.add_token_types(self.kinds)
        if self.merges:
            writer.add_token_merges(self.merges)
        if self.scores:
            writer.add_token_scores(self.scores)
        for name, token in self.special.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
        for name, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        if self.template:
            writer.add_chat_template(self.template)


def import_gguf() -> ModuleType:
    """The public `gguf` package."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError("writing GGUF needs the package gguf: pip install 'nestling[gguf]'") from error
    return gguf


def read_vocabulary(folder: Path, num_rows: int) -> Vocabulary:
    """The tokenizer of a Hugging Face folder. num_rows: rows of the embedding; rows without a token get a name."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"'{folder}' has no tokenizer.json, which GGUF's vocabulary is made from. Load the tokenizer with "
            "transformers and save it there."
        )
    told = read_json(file)
    kind = told["model"]["type"]
    if kind not in ("BPE", "WordLevel"):
        raise _refusal(f"its model is {kind}; BPE and single characters can be written")
    added = {one["id"]: one for one in told.get("added_tokens", [])}
    words: dict[int, str] = {i: word for word, i in told["model"]["vocab"].items()}
    if max([*words, *added]) >= num_rows:
        raise ValueError(f"the tokenizer has ids up to {max([*words, *added])}, the embedding only {num_rows} rows.")
    odd = [one["content"] for one in added.values() if one["lstrip"] or one["rstrip"] or one["single_word"]]
    if odd:
        raise _refusal(f"added tokens {odd[:5]} take the spaces around them along, which GGUF cannot say")
    vocabulary = _algorithm(told, words, added)
    vocabulary.tokens, vocabulary.kinds = [], []
    for i in range(num_rows):
        if i in added:
            vocabulary.tokens.append(added[i]["content"])
            vocabulary.kinds.append(CONTROL if added[i]["special"] else USER_DEFINED)
        elif i in words:
            is_byte = vocabulary.model == "llama" and re.fullmatch("<0x[0-9A-F]{2}>", words[i])
            vocabulary.tokens.append(_spell(told, words[i]))
            is_unused = kind == "WordLevel" and len(words[i]) != 1  # text comes as single characters
            vocabulary.kinds.append(BYTE if is_byte else UNUSED if is_unused else NORMAL)
        else:
            vocabulary.tokens.append(f"[PAD{i}]")
            vocabulary.kinds.append(UNUSED)
    _add_special(vocabulary, folder)
    return vocabulary


def _algorithm(told: dict[str, Any], words: dict[int, str], added: dict[int, Any]) -> Vocabulary:
    if told["model"]["type"] == "WordLevel":
        return _characters(told, words, added)
    if told["model"].get("byte_fallback"):
        return _sentencepiece(told, words, added)
    return _byte_level(told, words, added)


def _byte_level(told: dict[str, Any], words: dict[int, str], added: dict[int, Any]) -> Vocabulary:
    notes = []
    if told["normalizer"] == {"type": "NFC"}:
        notes.append(
            "the tokenizer composes Unicode first (NFC), llama.cpp does not: text that is not composed differs"
        )
    elif told["normalizer"] is not None:
        raise _refusal(f"its normalizer is {_short(told['normalizer'])}, which llama.cpp lacks")
    splits = tuple(_splits(told["pre_tokenizer"]))
    if splits not in PRE:
        raise _refusal(f"it splits text by {_short(told['pre_tokenizer'])}, which llama.cpp has no name for")
    pre, takes_words = PRE[splits]
    if pre == "tekken":
        notes.append("llama.cpp splits words at capitals only within ASCII: other scripts may get other tokens")
    if bool(told["model"].get("ignore_merges")) != takes_words and not _reaches_all(told, words, added):
        raise _refusal(
            f"llama.cpp's '{pre}' {'takes' if takes_words else 'does not take'} whole words past the merges "
            "(ignore_merges), this tokenizer says the opposite, and some of its tokens show it"
        )
    return Vocabulary(model="gpt2", pre=pre, tokens=[], kinds=[], merges=_merges(told), notes=notes)


def _splits(pre: dict[str, Any] | None) -> list[str]:
    """The splits in order, as the keys of PRE name them; what is not known there comes as its JSON."""
    steps = [] if pre is None else pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]
    found = []
    for step in steps:
        if step["type"] == "ByteLevel" and not step.get("add_prefix_space"):
            found += ["gpt2"] if step.get("use_regex", True) else []
        elif step["type"] == "Digits" and step["individual_digits"]:
            found.append("digits")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            found.append(step["pattern"].get("Regex", json.dumps(step["pattern"])))
        else:
            found.append(json.dumps(step))
    is_bytes = bool(steps) and steps[-1]["type"] == "ByteLevel"
    return found if is_bytes else [*found, "no bytes"]


def _reaches_all(told: dict[str, Any], words: dict[int, str], added: dict[int, Any]) -> bool:
    """Whether the merges lead to every token: then it makes no difference if whole words pass them by."""
    from tokenizers.models import BPE

    pairs = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in told["model"]["merges"]]
    model = BPE({word: i for i, word in words.items()}, pairs)
    return all(len(model.tokenize(word)) == 1 for i, word in words.items() if i not in added)


def _sentencepiece(told: dict[str, Any], words: dict[int, str], added: dict[int, Any]) -> Vocabulary:
    if told["pre_tokenizer"] is not None or told["normalizer"] != PREPENDED:
        raise _refusal(
            f"it prepares text by {_short(told['normalizer'])} and {_short(told['pre_tokenizer'])}; with byte "
            "fallback, llama.cpp puts one space before text and nothing else"
        )
    lacking = [byte for byte in range(256) if f"<0x{byte:02X}>" not in told["model"]["vocab"]]
    if lacking:
        raise _refusal(f"it has no token for {len(lacking)} of the 256 bytes")
    ranks: dict[str, int] = {}
    pairs = set()
    for rank, merge in enumerate(_merges(told)):
        left, _, right = merge.partition(" ")
        ranks.setdefault(left + right, rank)
        pairs.add((left, right))
    for i, word in words.items():
        cuts = [(word[:n], word[n:]) for n in range(1, len(word))] if i not in added and word in ranks else []
        for left, right in cuts:
            if left in told["model"]["vocab"] and right in told["model"]["vocab"] and (left, right) not in pairs:
                raise _refusal(f"llama.cpp would also merge '{left}' and '{right}' to '{word}', this one does not")
    # The best pair is the one whose result scores highest: the result's own first merge. Unmerged tokens never compete.
    scores = [-float(ranks.get(words.get(i, ""), 0)) for i in range(max([*words, *added]) + 1)]
    return Vocabulary(
        model="llama", pre="default", tokens=[], kinds=[], scores=scores, flags={"add_space_prefix": True}
    )


def _characters(told: dict[str, Any], words: dict[int, str], added: dict[int, Any]) -> Vocabulary:
    pre = told["pre_tokenizer"] or {}
    own = [word for i, word in words.items() if i not in added and len(word) == 1]
    if pre.get("pattern") not in CHARACTERS or pre.get("behavior") != "Isolated" or told["normalizer"]:
        raise _refusal("its model is WordLevel, and not of single characters: llama.cpp has nothing like it")
    merges = {}
    for word in own:
        pieces = _to_bytes(word)
        for n in range(1, len(pieces)):
            merges[f"{pieces[:n]} {pieces[n]}"] = None
    # llama.cpp wants at least one merge; this one never happens, as it joins two tokens that text never holds.
    return Vocabulary(
        model="gpt2", pre="smollm", tokens=[], kinds=[], merges=list(merges) or ["<none> <none>"],
        notes=[f"llama.cpp leaves out characters beyond the {len(own)} of the vocabulary, unknown to transformers"],
    )  # fmt: skip


def _spell(told: dict[str, Any], word: str) -> str:
    """A token as GGUF spells it: characters become their bytes, everything else already is as it should."""
    return _to_bytes(word) if told["model"]["type"] == "WordLevel" else word


def _to_bytes(word: str) -> str:
    """Each byte of a text as the printable character that byte-level BPE writes for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return "".join(letters[byte] for byte in word.encode())


def _merges(told: dict[str, Any]) -> list[str]:
    return [" ".join(pair) if isinstance(pair, list) else pair for pair in told["model"]["merges"]]


def _add_special(vocabulary: Vocabulary, folder: Path) -> None:
    """Special tokens, what is put around a text, and the chat template, as the loaded tokenizer has them."""
    tokenizer: Any = hf.load_tokenizer(folder)
    for name, token in (
        ("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id),
        ("unknown", tokenizer.unk_token_id), ("padding", tokenizer.pad_token_id),
    ):  # fmt: skip
        if token is not None:
            vocabulary.special[name] = token
    file = folder / "generation_config.json"
    stops = read_json(file).get("eos_token_id") if file.is_file() else None
    others = [one for one in ([stops] if isinstance(stops, int) else stops or []) if one != tokenizer.eos_token_id]
    if others:
        vocabulary.special["eot"] = others[0]
    bare, full = (tokenizer("a", add_special_tokens=flag)["input_ids"] for flag in (False, True))
    starts = full[:1] == [tokenizer.bos_token_id] and len(full) > len(bare)
    ends = full[-1:] == [tokenizer.eos_token_id] and len(full) > len(bare) + starts
    if full != [tokenizer.bos_token_id] * starts + bare + [tokenizer.eos_token_id] * ends:
        raise _refusal(f"it puts tokens around a text that are neither bos nor eos: {full} for {bare}")
    vocabulary.flags |= {"add_bos_token": starts, "add_eos_token": ends}
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    vocabulary.template = template or ""
    if vocabulary.scores:
        vocabulary.scores += [0.0] * (len(vocabulary.tokens) - len(vocabulary.scores))


def _refusal(reason: str) -> ValueError:
    return ValueError(
        f"this tokenizer cannot be written as GGUF: {reason}. Slice to a plain checkpoint (leave --format out) and use "
        "an engine that reads tokenizer.json."
    )


def _short(value: Any) -> str:
    return json.dumps(value)[:120]
