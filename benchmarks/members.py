"""Put the members' table of a nest into README.md and docs/results.md: python -m benchmarks.members runs/demo demo"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.results import ROOT, hardware, markdown, put
from nestling.nest import FULL, Nest, open_nest
from nestling.text import percent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nest", type=Path)
    parser.add_argument("block", help="name of the block in docs/results.md; 'demo' also goes to README.md")
    parser.add_argument("--command", default="make demo", help="the command that made the nest")
    args = parser.parse_args()
    nest = open_nest(args.nest)
    train = nest.recipe["train"]
    made = (
        f"Made by `{args.command}`: {nest.recipe['tokens']:,} training tokens in "
        f"{nest.recipe['seconds'] / 60:.1f} minutes, seed {train['seed']}, {train['dtype']}; {hardware()}."
    )
    text = f"{made}\n\n{table(nest)}"
    put(args.block, text)
    if args.block == "demo":
        put(args.block, text, ROOT / "README.md")
    print(text)


def table(nest: Nest) -> str:
    """Members, costs and results as Markdown."""
    sources = sorted({s for m in nest.members.values() for s in m.results.get("perplexity", {})})
    has_problems = any("accuracy" in m.results for m in nest.members.values())
    whole = nest.cost(nest.member(FULL))
    heads = ["member", "parameters", "active", "bf16 bytes", "keeps"]
    heads += ["random cut", "cut by score", "trained"] if has_problems else []
    heads += [f"{source} ppl, {when}" for source in sources for when in ("cut", "trained") if not has_problems]
    heads += ["KL, cut", "KL, trained"]
    rows = [heads]
    for member in nest.members.values():
        cost, found = nest.cost(member), member.results
        share = percent(cost.active_parameters / whole.active_parameters)
        keeps = ", ".join(f"{axis} {n}" for axis, n in member.sizes.items()) or "everything"
        row = [member.name, f"{cost.parameters:,}", f"{cost.active_parameters:,} ({share})"]
        row += [f"{cost.bytes['bf16']:,}", keeps]
        if has_problems:
            row += [percent(found.get(key)) for key in ("accuracy_random", "accuracy_before", "accuracy")]
        else:
            row += [f"{found[key][source]:.2f}" for source in sources for key in ("perplexity_before", "perplexity")]
        rows.append([*row, f"{found['kl_before']:.4f}", f"{found['kl']:.4f}"])
    return markdown(rows)


if __name__ == "__main__":
    main()
