"""Drawing the next token from logits, and what is told about it.

Each request draws with its own generator and from its own row of logits alone, so a seed gives the same answer
whatever else runs. Filters come in the order of transformers: temperature, top-k, top-p, min-p.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from nestling.sampling import Sampling


@dataclass(frozen=True)
class Drawn:
    """A token, and if asked its logprob under the model's own distribution and those of the likeliest."""

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Drawer:
    """Draws for one request."""

    def __init__(self, sampling: Sampling, *, logprobs: int | None = None) -> None:
        self.sampling, self.logprobs = sampling, logprobs
        self._random = random.Random(sampling.seed)

    def draw(self, logits: Tensor) -> Drawn:
        """The next token. logits: [vocab] in float32. FloatingPointError if they are not numbers."""
        highest = logits.max()
        if not torch.isfinite(highest):
            raise FloatingPointError(f"the model's logits are not finite (the highest is {highest.item()})")
        token = int(logits.argmax()) if self.sampling.temperature == 0.0 else self._sample(logits - highest)
        if self.logprobs is None:
            return Drawn(token)
        logs = logits.log_softmax(-1)
        values, ids = logs.topk(min(self.logprobs, len(logs)))
        return Drawn(token, logs[token].item(), tuple(zip(ids.tolist(), values.tolist(), strict=True)))

    def _sample(self, logits: Tensor) -> int:
        """logits: [vocab], the highest 0, so that a low temperature does not overflow."""
        how = self.sampling
        p = (logits.double() / how.temperature).softmax(-1)  # float64: a cumulative sum over the vocabulary follows
        ids = None
        if how.top_k or how.top_p < 1.0 or how.min_p:
            p, ids = p.topk(min(how.top_k, len(p))) if how.top_k else p.sort(descending=True, stable=True)
            p = p / p.sum()
            if how.top_p < 1.0:
                p = p[p.cumsum(-1) - p < how.top_p]
            p = p[p >= how.min_p * p[0]]
        upto = p.cumsum(-1)
        place = int(torch.searchsorted(upto, self._random.random() * upto[-1].item(), right=True))
        place = min(place, len(p) - 1)
        return place if ids is None else int(ids[place])
