"""Scales that would make a model answer nonsense, found before anything is written.

A scale that is zero, negative or not finite turns a matrix into zeros or NaN, sometimes for a few prompts only. And an
engine that joins two matrices into one (gate and up, or q, k and v) keeps one global scale for both. Scales are looked
at as they lie in the file, as bits: a slicer reads thousands of them, and has no use for torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from nestling.formats.matrix import Headers, Matrix
from nestling.shards import BYTES, NOT_FINITE

if TYPE_CHECKING:
    import numpy as np

    Read = Callable[[str], np.ndarray]  # a stored tensor by name: uint8 [bytes]

SCALES = ("_scale", "_scale_2")  # ends of the names of all scales
JOINED = (("gate_proj", "up_proj"), ("w1", "w3"), ("q_proj", "k_proj", "v_proj"))
SHOWN = 5  # names in one message
PART = 1 << 20  # bytes that are looked at together
CODES = 8  # bytes of NVFP4 codes for one block scale


def check_values(read: Read, headers: Headers, matrices: Mapping[str, Matrix], others: Sequence[str]) -> None:
    """Every scale is positive and finite. others: scales that belong to no matrix, such as those of a cache."""
    wrong = []
    for matrix in matrices.values():
        for name, _ in matrix.parts[1:]:
            what = what_is_wrong(read(name), headers[name].dtype)
            if what == "zero" and _is_zero_anyway(read, matrix, name):
                continue
            wrong += [f"'{name}' ({what})"] if what else []
    wrong += [f"'{name}' ({what})" for name in others if (what := what_is_wrong(read(name), headers[name].dtype))]
    if wrong:
        raise ValueError(
            f"{len(wrong)} scales are not positive and finite: {', '.join(wrong[:SHOWN])}"
            f"{', ...' if len(wrong) > SHOWN else ''}. A model with them answers zeros or NaN, perhaps for some "
            "prompts only. Copy the checkpoint again, or quantize it again."
        )


def unequal_global_scales(read: Read, headers: Headers, matrices: Mapping[str, Matrix]) -> list[str]:
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
            scales = [_largest(read(one.parts[2][0]), headers[one.parts[2][0]].dtype) for one in joined]
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


def what_is_wrong(scale: np.ndarray, dtype: str) -> str:
    """What is wrong with a scale; empty if nothing is. Unknown types are none that a scale may have.

    scale: uint8 [bytes]
    """
    if dtype not in NOT_FINITE:
        return f"stored as {dtype}"
    bits, top = scale.view(f"u{BYTES[dtype]}"), NOT_FINITE[dtype]
    sign = 1 << (8 * BYTES[dtype] - 1)
    for begin in range(0, len(bits), PART):
        part = bits[begin : begin + PART]
        if bool((part < top).all()) and bool((part > 0).all()):
            continue  # what is above zero and finite has bits between: no sign, and not all of the exponent
        rest = part & (sign - 1)
        tests = {"NaN" if top == sign - 1 else "not finite": (part & top) == top, "negative": part > sign}
        return next((what for what, test in tests.items() if bool(test.any())), "zero" if not rest.all() else "")
    return ""


def _is_zero_anyway(read: Read, matrix: Matrix, name: str) -> bool:
    """Whether the block scales of `name` are zero only for blocks whose codes are all zero: they mean the same."""
    import numpy as np

    if matrix.format != "nvfp4" or name != matrix.parts[1][0]:
        return False
    scales, codes = read(name), read(matrix.codes)
    if len(codes) != CODES * len(scales):
        return False
    blocks = codes.reshape(-1, CODES)
    for begin in range(0, len(scales), PART):
        part = slice(begin, begin + PART)
        if bool(((scales[part] & 0x7F) >= 0x7F).any()) or bool((scales[part] > 0x80).any()):
            return False
        zero = np.flatnonzero((scales[part] & 0x7F) == 0)
        for i in range(0, len(zero), PART // CODES):
            chosen = blocks[begin + zero[i : i + PART // CODES]]
            if bool((chosen & 0x77).any()):  # two codes a byte; sign bits do not count
                return False
    return True


def _largest(scale: np.ndarray, dtype: str) -> float:
    """The largest value of a scale that is positive and finite: among those, more bits are more.

    scale: uint8 [bytes]
    """
    import numpy as np

    bits = scale.view(f"u{BYTES[dtype]}").max()
    if dtype == "BF16":
        return float((np.uint32(bits) << np.uint32(16)).view(np.float32))
    return float(bits.view(f"f{BYTES[dtype]}"))
