"""Folders that several test files read: each is written once a session."""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny models are slower on two spinning threads than on one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def parents(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The real folder of a variant, written by its stock class in float32; to read only."""
    root = tmp_path_factory.mktemp("parents")

    def folder(name: str) -> Path:
        return root / name if (root / name).exists() else tiny.save(name, root / name)

    return folder
