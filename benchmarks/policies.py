"""Put what `nestling eval --policies` found into docs/results.md, with its figure beside it.

nestling eval nestling/assets/nest --policies --to runs/policies
python -m benchmarks.policies runs/policies
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from benchmarks.results import ROOT, hardware, put
from nestling.policies.page import page, read_policies

FIGURE = ROOT / "docs" / "policies.png"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what `nestling eval --policies` wrote")
    parser.add_argument(
        "--command",
        default="nestling eval nestling/assets/nest --policies --to runs/policies",
        help="the command that measured it",
    )
    parser.add_argument("--threads", type=int, default=1, help="of the run")
    args = parser.parse_args()
    shutil.copyfile(args.folder / "policies.png", FIGURE)
    text = (
        f"Measured by `{args.command}`; {hardware(args.threads)}.\n\n{page(*read_policies(args.folder))}\n\n"
        f"![Accuracy against latency of every policy]({FIGURE.name})"
    )
    put("policies", text)
    print(text)


if __name__ == "__main__":
    main()
