"""Two Mamba-2 operations in forms that suit a CPU and short sequences: the same results to rounding, in a third of
the time.

Where transformers finds the fast kernels it uses them. Without them its reference forms are made to be read: the scan
walks chunks with six-dimensional products, the convolution goes through a grouped convolution that CPUs run slowly.
`hf.lean_mamba` puts these in their place while a model trains; anything that they do not cover (caches, long
sequences) stays with the stock forms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

LONGEST = 512  # tokens; the scan below is quadratic in them


def covers(x: Tensor, options: dict[str, Any]) -> bool:
    """Whether `scan` can stand in for the stock scan. x: [batch, time, group mamba, mdim]."""
    return (
        x.device.type == "cpu"
        and x.shape[1] <= LONGEST
        and not options.get("return_final_states")
        and options.get("initial_states") is None
        and options.get("z") is None
        and bool(options.get("dt_softplus"))
    )


def scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor, dt_bias: Tensor, dt_limit: tuple[float, float]
) -> Tensor:
    """The Mamba-2 recurrence in its attention form (arXiv 2405.21060, eq. 16).

    x: [batch, time, group mamba, mdim]; dt: [batch, time, group mamba]; A, D, dt_bias: [group mamba];
    B, C: [batch, time, group, state]. Returns the shape of x, in float32.
    """
    batch, time, num_heads, _ = x.shape
    groups = B.shape[2]
    x, B, C = x.float(), B.float(), C.float()
    dt = F.softplus(dt + dt_bias.to(dt.dtype)).clamp(*dt_limit).float()
    gone = (A.float() * dt).transpose(1, 2).cumsum(-1)  # [batch, group mamba, time]
    later = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
    decay = (
        (gone[..., :, None] - gone[..., None, :]).masked_fill(later, -torch.inf).exp()
    )  # [batch, group mamba, time, time]
    reads = C.transpose(1, 2) @ B.permute(0, 2, 3, 1)  # [batch, group, time, time]
    weights = (decay.view(batch, groups, -1, time, time) * reads[:, :, None]).view(batch, num_heads, time, time)
    y = weights @ (x * dt[..., None]).transpose(1, 2)  # [batch, group mamba, time, mdim]
    return y.transpose(1, 2) + x * D[:, None]


def convolve(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """Causal depthwise convolution as a sum of shifted products. x: [batch, channel, time]; w: [channel, conv]."""
    padded = F.pad(x.to(w.dtype).transpose(1, 2), (0, 0, w.shape[1] - 1, 0))  # [batch, conv - 1 + time, channel]
    y = sum((padded[:, i : i + x.shape[2]] * w[:, i] for i in range(w.shape[1])), torch.zeros((), dtype=w.dtype))
    return (y if bias is None else y + bias).transpose(1, 2)
