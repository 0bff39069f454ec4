"""Put the members' table of a nest where it belongs: python -m benchmarks.members runs/demo demo

Every block goes into docs/results.md; `demo` also into README.md, `shipped` into the shipped nest's model card alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.results import RESULTS, ROOT, hardware, markdown, put
from nestling.build import members_rows
from nestling.nest import open_nest

PAGES = {"demo": (RESULTS, ROOT / "README.md"), "shipped": (ROOT / "nestling" / "assets" / "nest" / "README.md",)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nest", type=Path)
    parser.add_argument("block", help="name of the block, such as demo")
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
    for page in PAGES.get(args.block, (RESULTS,)):
        put(args.block, text, page)
    print(text)


if __name__ == "__main__":
    main()
