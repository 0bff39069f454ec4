"""One step of many rows of one member: each row gives some tokens and gets the logits after the last.

A decoder never lets one row's result depend on which others are in the batch: the scheduler changes the batch with
every token, and an answer must not change with it. Two decoders are known: the stock modules one row at a time, which
is what every other is measured against, and a lean one that reads the weights once for all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from nestling import hf
from nestling.engine.state import RowState
from nestling.engine.weights import Loaded


class Decoder(Protocol):
    """Steps rows of one member."""

    def step(self, rows: Sequence[RowState], tokens: Sequence[int]) -> Tensor:
        """Each row reads one token; its state is advanced. Returns logits [row, vocab] in float32."""
        ...

    def advance(self, rows: Sequence[RowState], tokens: Sequence[Sequence[int]]) -> Tensor:
        """The same with one token or more for each row, of which the last gives the logits."""
        ...


class StockDecoder:
    """The stock modules, one row at a time."""

    def __init__(self, member: Loaded) -> None:
        self.member = member

    def step(self, rows: Sequence[RowState], tokens: Sequence[int]) -> Tensor:
        """See Decoder."""
        return self.advance(rows, [(token,) for token in tokens])

    def advance(self, rows: Sequence[RowState], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See Decoder."""
        return torch.stack([read(self.member, row, some) for row, some in zip(rows, tokens, strict=True)])


@torch.inference_mode()
def read(member: Loaded, state: RowState, tokens: Sequence[int]) -> Tensor:
    """The member reads tokens that follow those in `state`, which is advanced. Returns the logits after the last:
    [vocab] in float32."""
    end = state.length + len(tokens)
    state.reserve(end)
    out = member.model(
        input_ids=torch.tensor([tokens]),
        position_ids=torch.arange(state.length, end)[None],
        cache=hf.row_cache(member.model, state),
        use_cache=True,
        logits_to_keep=1,
    )
    state.length = end
    return out.logits[0, -1].float()
