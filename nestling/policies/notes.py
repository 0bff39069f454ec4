"""What a long measurement has found so far, line by line in a file: a run that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Notes:
    """Findings by key. The first line says what is measured; findings of another measurement are refused."""

    def __init__(self, file: Path, about: dict[str, Any]) -> None:
        self.file = file
        self.found: dict[str, Any] = {}
        about = json.loads(json.dumps(about))  # tuples as lists, as they are read back
        if file.exists():
            first, *lines = file.read_text("utf-8").splitlines() or ["null"]
            if json.loads(first) != about:
                raise ValueError(
                    f"'{file}' holds what a run with other settings or another nest found. Remove it to begin again, "
                    "or repeat that run's settings."
                )
            # A line that a killed run left half written counts as not there.
            for line in lines:
                try:
                    key, value = json.loads(line)
                except ValueError:
                    continue
                self.found[key] = value
        else:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(about) + "\n", "utf-8")

    def note(self, key: str, value: Any) -> None:
        """Keep a finding."""
        self.found[key] = value
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps([key, value]) + "\n")
