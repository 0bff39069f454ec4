"""Put the members' table of a nest into README.md and docs/results.md: python -m benchmarks.members runs/demo demo"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.results import ROOT, hardware, markdown, put
from nestling.build import members_rows
from nestling.nest import open_nest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nest", type=Path)
    parser.add_argument("block", help="name of the block in docs/results.md; 'demo' also goes to README.md")
    parser.add_argument("--command", default="make demo", help="the command that made the nest")
    args = parser.parse_args()
    nest = open_nest(args.nest)
    train = nest.recipe["train"]
    machine = hardware(nest.recipe.get("threads"))
    made = (
        f"Made by `{args.command}`: {nest.recipe['tokens']:,} training tokens in "
        f"{nest.recipe['seconds'] / 60:.1f} minutes, seed {train['seed']}, {train['dtype']}; {machine}."
    )
    text = f"{made}\n\n{markdown(members_rows(nest))}"
    put(args.block, text)
    if args.block == "demo":
        put(args.block, text, ROOT / "README.md")
    print(text)


if __name__ == "__main__":
    main()
