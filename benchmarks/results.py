"""Put measured tables into docs/results.md: one block a command, between two markers. No number is typed by hand."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results.md"


def hardware(threads: int | None = None) -> str:
    """The machine in a line. threads: those of the run that is told of; by default of this process."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    threads = threads or torch.get_num_threads()
    version = torch.__version__.partition("+")[0]
    return f"{model}, {os.cpu_count()} cores, {threads} thread{'s' if threads > 1 else ''}, torch {version}"


def put(block: str, text: str, page_file: Path = RESULTS) -> None:
    """Replace a block of a page, or add it at the end."""
    begin, end = f"<!-- {block}: begin -->", f"<!-- {block}: end -->"
    page = page_file.read_text("utf-8")
    before, found, rest = page.partition(begin)
    after = rest.partition(end)[2] if found else ""
    if not found:
        before = page.rstrip("\n") + "\n\n"
        after = "\n"
    page_file.write_text(f"{before}{begin}\n{text.strip()}\n{end}{after}", "utf-8")


def markdown(rows: list[list[str]]) -> str:
    """Rows as a Markdown table, the first row as its heads."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])
