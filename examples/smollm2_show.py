"""Let every member of the SmolLM2 nest answer a few prompts, and put what they say into docs/results.md."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # for benchmarks.results, which is not part of the package

from benchmarks.results import put
from nestling import hf
from nestling.nest import open_nest
from nestling.slice import slice as cut_member

PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Why should a nation pay its debts?",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nest", type=Path)
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of each answer")
    args = parser.parse_args()
    nest = open_nest(args.nest)
    lines = []
    for name, member in nest.members.items():
        with tempfile.TemporaryDirectory() as scratch:
            folder = cut_member(nest, member, Path(scratch) / "member")
            generate: Any = hf.load_model(folder).generate
            tokenizer = hf.load_tokenizer(folder)
        for prompt in PROMPTS:
            chat = [{"role": "user", "content": prompt}]
            inputs: Any = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            out = generate(**inputs, max_new_tokens=args.tokens, do_sample=False)
            text = str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
            lines.append(f"- member {name}, *{prompt}* {' '.join(text.split())}")
            print(lines[-1], flush=True)
    put("smollm2-prompts", f"Greedy answers, at most {args.tokens} tokens:\n\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
