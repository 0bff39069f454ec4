"""What one row (one sequence in one member) carries from token to token: keys and values, conv and recurrent states.

A row's state is its own, without a batch dim, so rows join and leave a batch without anything being moved or padded,
and what a row holds is given back with it. The tensors are as the caches of transformers have them; `hf.row_cache`
shows them to a stock model, which reads and writes them in place.

A state cannot be cut back: a recurrent state at token n says nothing of the one at n - 1. It can be copied, and that
is how a state is kept for later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nestling.arch import Layout
from nestling.axes import dims, parse

LEAST = 64  # tokens that buffers of keys and values are made for at first


class RowState:
    """The state of one row of one member after `length` tokens. Layers are the member's, counted from 0."""

    def __init__(self, layout: Layout, dtype: torch.dtype) -> None:
        """An empty one. layout: the member's own, in any spelling; dtype: of its activations."""
        sizes, self.length, self.capacity = layout.sizes, 0, 0
        self.keys: dict[int, Tensor] = {}  # attention layer -> [kv, capacity, head], of which [:, :length] is filled
        self.values: dict[int, Tensor] = {}  # the same
        self.conv: dict[int, Tensor] = {}  # Mamba layer -> [conv channels, conv], the latest inputs, newest last
        self.ssm: dict[int, Tensor] = {}  # Mamba layer -> [group mamba, mdim, state] in float32
        for layer, kind in enumerate(layout.kinds):
            kept = layout.arch.state.get(kind, {})
            if "kv" in kept:
                empty = torch.empty(sizes["kv"], 0, sizes["head"], dtype=dtype)
                self.keys[layer], self.values[layer] = empty, empty
            if "ssm" in kept:
                inner, state = dims(parse(kept["ssm"]), sizes)
                self.ssm[layer] = torch.zeros(inner // sizes["mdim"], sizes["mdim"], state, dtype=torch.float32)
                self.conv[layer] = torch.zeros(dims(parse(kept["conv"]), sizes), dtype=dtype)

    def reserve(self, length: int) -> None:
        """Make room for so many tokens in all; buffers grow by half, so that a long answer is copied a few times."""
        if length <= self.capacity:
            return
        self.capacity = max(length, LEAST, self.capacity * 3 // 2)
        for buffers in (self.keys, self.values):
            for layer, old in buffers.items():
                buffers[layer] = old.new_empty(old.shape[0], self.capacity, old.shape[2])
                buffers[layer][:, : self.length] = old[:, : self.length]

    def copy(self) -> RowState:
        """A state of its own with the same content, and no room beyond it."""
        new = object.__new__(RowState)
        new.length = new.capacity = self.length
        new.keys = {layer: keys[:, : self.length].clone() for layer, keys in self.keys.items()}
        new.values = {layer: values[:, : self.length].clone() for layer, values in self.values.items()}
        new.conv = {layer: conv.clone() for layer, conv in self.conv.items()}
        new.ssm = {layer: ssm.clone() for layer, ssm in self.ssm.items()}
        return new

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, filled or not."""
        parts = (self.keys, self.values, self.conv, self.ssm)
        return sum(tensor.numel() * tensor.element_size() for part in parts for tensor in part.values())
