"""Reading a context into a member's state, in segments whose ends depend on nothing but the context.

A state that was read in other segments differs in the last bits: matrices of other shapes are multiplied by other
kernels. So segments end at multiples of `chunk` counted from the context's start, whoever reads and why: a fresh run,
a hand-over, a shadow that reads along, a prompt whose beginning was kept from an earlier turn. All of them hold the
same state at each of those ends, bit for bit. With the stock modules a context of one segment is read as stock
`generate` reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from nestling.engine.decode import Decoder
from nestling.engine.state import RowState

LEAST_LAST = 2  # tokens of the last segment: a Mamba layer reads a single token by other formulas than several


def last_boundary(length: int, chunk: int) -> int:
    """The last segment of a context of so many tokens begins here."""
    return max(length - LEAST_LAST, 0) // chunk * chunk


def segment_end(start: int, length: int, chunk: int) -> int:
    """Where the segment that begins at `start` ends in a context of so many tokens."""
    last = last_boundary(length, chunk)
    return min((start // chunk + 1) * chunk, last) if start < last else length


def read_segment(decoder: Decoder, state: RowState, ids: Sequence[int], chunk: int) -> Tensor:
    """A member reads the next segment of a context that `state` has read some of. Returns the logits after it:
    [vocab] in float32."""
    return decoder.advance([state], [ids[state.length : segment_end(state.length, len(ids), chunk)]])[0]
