"""A member's state handed to another member: approximate, and therefore only on request.

Keys and values are taken as they are: no member has other heads for them. Conv and recurrent states are taken unit by
unit, each Mamba head's to the same head; what the thinker has not is zero. The answering member then replays the last
tokens itself, on top of a state that has not seen them: a recurrent state cannot be cut back, so the thinker's is
marked every few tokens, and the replay begins at the last mark that lies far enough back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nestling.axes import Shape, add_, dims, parse, take
from nestling.engine.state import RowState
from nestling.engine.weights import Loaded


def why_not(thinker: Loaded, answerer: Loaded) -> str:
    """Why the answerer cannot take over the thinker's state; empty if it can."""
    lost = [layer for layer in _stateful(answerer) if layer not in thinker.layers]
    if lost:
        return (
            f"member '{answerer.name}' keeps state in layers of the parent that '{thinker.name}' does not have: "
            f"{', '.join(map(str, lost))}"
        )
    for axis in ("kv", "head", "state", "conv"):
        one, other = (member.layout.sizes.get(axis) for member in (thinker, answerer))
        if one != other:
            return f"'{axis}' is {one} in member '{thinker.name}' and {other} in '{answerer.name}'"
    return ""


@dataclass
class Trail:
    """Marks of a row's recurrent states on its way, as many as a replay of `replay` tokens can ask for."""

    replay: int
    marks: list[tuple[int, dict[int, Tensor], dict[int, Tensor]]] = field(default_factory=list)  # length, conv, ssm

    def note(self, state: RowState) -> None:
        """The row has come this far; call it after each step."""
        if not state.ssm:
            return  # nothing that could not be cut back
        if not self.marks or state.length - self.marks[-1][0] >= self.replay:
            conv, ssm = ({i: one.clone() for i, one in part.items()} for part in (state.conv, state.ssm))
            self.marks.append((state.length, conv, ssm))
        while len(self.marks) > 1 and self.marks[1][0] <= state.length - self.replay:
            self.marks.pop(0)


def handed_over(state: RowState, trail: Trail, thinker: Loaded, answerer: Loaded, *, length: int) -> RowState | None:
    """The answerer's state, from the thinker's `state`, at least `replay` tokens before the context's end at `length`.
    None if there is nothing far enough back: then the whole context is read."""
    new = RowState(answerer.layout, answerer.dtype)
    conv, ssm, start = state.conv, state.ssm, min(length - trail.replay, state.length)
    if new.ssm:
        marks = [mark for mark in trail.marks if mark[0] <= start]
        if not marks:
            return None
        start, conv, ssm = marks[-1]
    if start <= 0:
        return None
    new.reserve(length)
    old_of = {layer: thinker.layers.index(answerer.layers[layer]) for layer in {*new.keys, *new.conv}}
    for layer in new.keys:
        for mine, theirs in ((new.keys, state.keys), (new.values, state.values)):
            mine[layer][:, :start] = theirs[old_of[layer]][:, :start]
    sizes = thinker.layout.sizes, answerer.layout.sizes
    for layer in new.conv:
        shapes = answerer.layout.arch.state[answerer.layout.kinds[layer]]
        _map(conv[old_of[layer]], new.conv[layer], parse(shapes["conv"]), *sizes)
        _map(ssm[old_of[layer]], new.ssm[layer], parse(shapes["ssm"]), *sizes)
    new.length = start
    return new


def _stateful(member: Loaded) -> list[int]:
    """The parent's layers that a member keeps state in."""
    states = member.layout.arch.state
    return [old for old, kind in zip(member.layers, member.layout.kinds, strict=True) if states.get(kind)]


def _map(source: Tensor, target: Tensor, shape: Shape, sizes: dict[str, int], larger: dict[str, int]) -> None:
    """Copy the units that both have; the rest of `target` is zero. Either member may be the larger, axis by axis."""
    both = {axis: min(n, larger[axis]) for axis, n in sizes.items() if axis in larger}
    part = take(source.reshape(dims(shape, sizes)), shape, sizes, both)
    whole = torch.zeros(dims(shape, larger), dtype=target.dtype)
    add_(whole, part, shape, larger, both)
    target.copy_(whole.view(target.shape))
