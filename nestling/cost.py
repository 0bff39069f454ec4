"""What a model costs: parameters, active parameters, bytes of weights, bytes of caches. Exact for ints, smooth for
expectations.

Everything is counted from the architecture's table. Bytes of weights are those of all parameters: experts that a
token does not use still have to be held.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nestling.arch import Layout
from nestling.axes import Sizes, count, parse

# Bits for one weight of a matrix that the format quantizes, its scales included; everything else stays at 16.
FORMATS = {"fp32": 32.0, "bf16": 16.0, "fp8": 8.0, "nvfp4": 4.5}
STATE_BYTES = {"kv": 2, "conv": 2, "ssm": 4}  # for one number; the SSM state is kept in float32
GIB = 1024**3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one model costs. Counts are exact."""

    parameters: int
    active_parameters: int
    bytes: dict[str, int]  # format -> bytes of weights
    kv_bytes_per_token: int  # key-value cache, bf16, all full-attention layers
    window_bytes_per_token: int  # the same for layers that see only a sliding window
    window: int  # tokens in that window; 0 if no layer has one
    ssm_bytes_per_sequence: int  # recurrent state, float32
    conv_bytes_per_sequence: int  # convolution state, bf16


def cost(layout: Layout, *, window: int = 0) -> Cost:
    """The exact cost of a layout. window: the config's sliding window, in tokens."""
    return Cost(
        parameters=layout.count(),
        active_parameters=layout.count(active=True),
        bytes={name: int(weight_bytes(layout, layout.sizes, name)) for name in FORMATS},
        kv_bytes_per_token=int(state_size(layout, layout.sizes, "kv", skip=("sliding_attention",))) * STATE_BYTES["kv"],
        window_bytes_per_token=int(state_size(layout, layout.sizes, "kv", only=("sliding_attention",)))
        * STATE_BYTES["kv"],
        window=window if "sliding_attention" in layout.kinds else 0,
        ssm_bytes_per_sequence=int(state_size(layout, layout.sizes, "ssm")) * STATE_BYTES["ssm"],
        conv_bytes_per_sequence=int(state_size(layout, layout.sizes, "conv")) * STATE_BYTES["conv"],
    )


def weight_bytes(layout: Layout, sizes: Sizes, weight_format: str, layers: Sequence[int] | None = None) -> Any:
    """Bytes of the weights in a format; differentiable in `sizes`."""
    if weight_format not in FORMATS:
        raise ValueError(f"weight format '{weight_format}' is not one of {', '.join(FORMATS)}.")
    bits = FORMATS[weight_format]
    if bits >= 16:
        return layout.count(sizes, layers=layers) * (bits / 8)
    kept = layout if layers is None else layout.resize({}, layers)
    total: Any = 0
    for pattern, shape, places in quantizable(kept):
        multiplier = sizes["expert"] if "{expert}" in pattern else 1
        total = total + count(shape, sizes) * multiplier * places
    return layout.count(sizes, layers=layers) * 2 - total * (2 - bits / 8)


def state_size(layout: Layout, sizes: Sizes, state: str, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Any:
    """How many numbers one sequence carries in a named state (`kv`: for each token), over all layers."""
    total: Any = 0
    for kind in layout.kinds:
        shapes = layout.arch.state.get(kind, {})
        if state in shapes and kind not in skip and (not only or kind in only):
            total = total + count(parse(shapes[state]), sizes)
    return total


def memory(
    layout: Layout, sizes: Sizes, *, weight_format: str, context: int, batch: int, window: int = 0,
    layers: Sequence[int] | None = None,
) -> Any:  # fmt: skip
    """Bytes to hold the weights in a format and the caches of `batch` sequences of `context` tokens; differentiable."""
    kept = layout if layers is None else layout.resize({}, layers)
    slides = ("sliding_attention",)
    per_sequence = (
        state_size(kept, sizes, "kv", skip=slides) * STATE_BYTES["kv"] * context
        + state_size(kept, sizes, "kv", only=slides) * STATE_BYTES["kv"] * (min(context, window) if window else context)
        + state_size(kept, sizes, "ssm") * STATE_BYTES["ssm"]
        + state_size(kept, sizes, "conv") * STATE_BYTES["conv"]
    )
    return weight_bytes(layout, sizes, weight_format, layers) + per_sequence * batch


def parse_bytes(text: str) -> int:
    """Bytes from a text such as 16GiB, 500MB or 123456."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not match or len(text) > 30:
        raise ValueError(
            f"cannot read '{text[:40]}' as bytes: expected a number with KB, MB, GB or TB, or KiB and so on."
        )
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix.upper() or " "))


def quantizable(layout: Layout) -> list[tuple[str, Any, int]]:
    """Rows that a few-bit format quantizes, with the number of layers: not the mixers that feed an attention layer."""
    found = []
    kinds = layout.kinds
    for kind, rows in layout.counted.items():
        places = [i for i, k in enumerate(kinds) if k == kind]
        feeds = [i for i in places if kind == "linear_attention" and kinds[i + 1 : i + 2] == ("full_attention",)]
        for pattern, shape in rows.items():
            if kind and pattern.endswith(layout.arch.quantized) and not pattern.endswith("gate.weight"):
                found.append((pattern, shape, len(places) - len(feeds)))
    return found
