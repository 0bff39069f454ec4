"""States kept from one turn of a conversation to the next.

The next turn's prompt leaves the thoughts out, so it differs from what was computed behind the tag that opens them, and
a recurrent state cannot be cut back to there. Therefore each member that reads a prompt leaves a copy of its state at
the last boundary of segments before that tag: one more segment, up to the tag itself, would read all weights once more,
which is what it costs the next turn to read the few tokens between. A hit gives back keys, values and recurrent states
together, as one row's state; a prompt continues from it as if it had read everything itself, bit for bit, because
segments end where they always do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from nestling.engine.state import RowState


class Prefixes:
    """States by member and the tokens that they have read, the least recently used given up first."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes, self.nbytes = most_bytes, 0
        self.num_hits = self.num_misses = self.num_reused = 0
        self._kept: OrderedDict[tuple[str, tuple[int, ...]], RowState] = OrderedDict()

    def find(self, member: str, ids: Sequence[int], *, limit: int) -> RowState | None:
        """A copy of the longest state of a member that has read a beginning of `ids` of at most `limit` tokens."""
        lengths = {len(read) for name, read in self._kept if name == member and len(read) <= limit}
        for length in sorted(lengths, reverse=True):
            key = member, tuple(ids[:length])
            if key in self._kept:
                self._kept.move_to_end(key)
                self.num_hits += 1
                self.num_reused += length
                return self._kept[key].copy()
        self.num_misses += 1
        return None

    def keep(self, member: str, ids: Sequence[int], state: RowState) -> None:
        """Keep a copy of a state that has read the first tokens of `ids`."""
        key = member, tuple(ids[: state.length])
        if key in self._kept:
            self._kept.move_to_end(key)
            return
        if not state.length or self.most_bytes == 0:
            return
        kept = state.copy()
        if kept.nbytes > self.most_bytes:
            return
        self._kept[key] = kept
        self.nbytes += kept.nbytes
        while self.nbytes > self.most_bytes:
            _, given_up = self._kept.popitem(last=False)
            self.nbytes -= given_up.nbytes
