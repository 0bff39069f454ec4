"""The small nest that ships with the package: what `generate`, `chat` and `serve` run when no NEST is named."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def nest() -> Path:
    """The folder of the shipped nest: the reasoner with its members, made by the demo's recipe."""
    folder = Path(str(files("nestling") / "assets" / "nest"))
    if not (folder / "nest.json").is_file():
        raise ValueError(
            "the nest that ships with the package is not in this copy of it. Name a NEST, or make one: "
            "nestling demo --to ./nest"
        )
    return folder
