"""Scales that would make a model answer nonsense, found before anything is written.

A scale that is zero, negative or not finite turns a matrix into zeros or NaN, sometimes for a few prompts only. And an
engine that joins two matrices into one (gate and up, or q, k and v) keeps one global scale for both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nestling.formats.matrix import Matrix

if TYPE_CHECKING:
    from torch import Tensor

SCALES = ("_scale", "_scale_2")  # ends of the names of all scales
JOINED = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))
SHOWN = 5  # names in one message


def check_values(read: Callable[[str], Tensor], matrices: Mapping[str, Matrix], others: Sequence[str]) -> None:
    """Every scale is positive and finite. others: scales that belong to no matrix, such as those of a cache."""
    wrong = []
    for matrix in matrices.values():
        for name, _ in matrix.parts[1:]:
            what = _what_is_wrong(read(name))
            if what == "zero" and _is_zero_anyway(read, matrix, name):
                continue
            wrong += [f"'{name}' ({what})"] if what else []
    wrong += [f"'{name}' ({what})" for name in others if (what := _what_is_wrong(read(name)))]
    if wrong:
        raise ValueError(
            f"{len(wrong)} scales are not positive and finite: {', '.join(wrong[:SHOWN])}"
            f"{', ...' if len(wrong) > SHOWN else ''}. A model with them answers zeros or NaN, perhaps for some "
            "prompts only. Copy the checkpoint again, or quantize it again."
        )


def unequal_global_scales(read: Callable[[str], Tensor], matrices: Mapping[str, Matrix]) -> list[str]:
    """Warnings for matrices that engines join and whose NVFP4 global scales differ.

    matrices: by parameter name.
    """
    found, worst = [], 1.0
    for group in JOINED:
        first = f".{group[0]}.weight"
        for name in matrices:
            if not name.endswith(first):
                continue
            names = [name.removesuffix(first) + f".{part}.weight" for part in group]
            joined = [matrices[one] for one in names if one in matrices and matrices[one].format == "nvfp4"]
            scales = [float(read(one.parts[2][0]).float().max()) for one in joined]
            if len(set(scales)) > 1:
                found.append(f"'{name}'")
                worst = max(worst, max(scales) / min(scales))
    if not found:
        return []
    return [
        f"{len(found)} groups of matrices that engines join into one have different global scales, by up to "
        f"{worst:.3g}x: {', '.join(found[:SHOWN])}{', ...' if len(found) > SHOWN else ''}. An engine that keeps one "
        "scale for them scales the other wrongly. The scales are copied as they are; quantize again with shared ones."
    ]


def _what_is_wrong(scale: Tensor) -> str:
    """What is wrong with a scale; empty if nothing is."""
    import torch

    if scale.dtype == torch.float8_e4m3fn:
        # As bytes: block scales are large, and a float32 copy would be four times so. Bit 7 is the sign.
        codes = scale.view(torch.uint8)
        tests = {"NaN": (codes & 0x7F) == 0x7F, "negative": codes > 0x80, "zero": (codes & 0x7F) == 0}
    else:
        tests = {"not finite": ~scale.isfinite(), "negative": scale < 0, "zero": scale == 0}
    return next((what for what, test in tests.items() if bool(test.any())), "")


def _is_zero_anyway(read: Callable[[str], Tensor], matrix: Matrix, name: str) -> bool:
    """Whether the block scales of `name` are zero only for blocks whose codes are all zero: they mean the same."""
    import torch

    if matrix.format != "nvfp4" or name != matrix.parts[1][0]:
        return False
    scales, codes = read(name), read(matrix.codes)
    is_used = (codes & 0x77).unflatten(-1, (scales.shape[-1], -1)).any(-1)  # two codes a byte; sign bits do not count
    return not bool((is_used & (scales.view(torch.uint8) & 0x7F == 0)).any())
