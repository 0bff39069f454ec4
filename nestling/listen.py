"""Listening to a stock model as it runs: what each unit does, added up over the real tokens of the data.

Which module to listen to follows from the table of shapes. An axis is heard where it is contracted, so one listener
on the input of a matrix serves feed-forward neurons and attention heads of every architecture. Residual channels are
heard behind the norms in front of the mixers, Mamba heads and channels in the projection that feeds them, experts and
their neurons inside the fused experts module, whose forward is replaced for the time.

Nothing is kept of a batch but sums: each is taken in float32 (pairwise, as torch sums) and then added up in float64.
A sum that is not finite stops the run. What the sums mean is decided in score.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nestling import hf
from nestling.arch import Layout
from nestling.axes import Block, axes_of, dims, parse

CHANNELS = "channels"  # the sums that `mamba` and `mdim` both follow from, [group, mamba, mdim] a layer
Batch = tuple[Tensor, Tensor]  # ids and mask, each [batch, time]; the mask is true at real tokens
OWN_RULE = {"hidden", "mamba", "mdim", "expert", "effn", "layer"}  # every other axis is heard where it is contracted


class Listener:
    """Adds up what each unit does, one batch after another."""

    def __init__(self, layout: Layout, axes: Sequence[str]) -> None:
        self.layout, self.axes = layout, axes
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, Tensor] = {}
        self.num_tokens, self.num_batches = 0, 0
        self._real: Tensor | None = None  # indices of the real tokens; None: every token is real
        self._is_pad = torch.zeros(0, dtype=torch.bool)  # [token]
        self._heard: list[tuple[str, int, Tensor]] = []  # axis, layer and this batch's sum, in the order of the pass
        self._last = torch.zeros(0)  # [hidden] what the last layer leaves in the stream, added up: looked at, not kept

    def start(self, mask: Tensor) -> None:
        """Get ready for a batch with this mask, [batch, time]."""
        real = mask.flatten()  # [token]
        self._is_pad = ~real
        self._real = None if bool(real.all()) else real.nonzero().squeeze(-1)
        self.num_tokens += int(real.sum())

    def finish(self) -> None:
        """Add the batch to the sums, or stop if it has a number that is not finite."""
        seen = [*self._heard, ("hidden", len(self.layout.kinds), self._last)]
        if not bool(torch.stack([x.isfinite().all() for _, _, x in seen]).all()):
            self._refuse(*next(heard for heard in seen if not bool(heard[2].isfinite().all())))
        for axis, layer, x in self._heard:
            if axis not in self.sums:
                self.sums[axis] = x.new_zeros((len(self.layout.kinds), *x.shape))
            self.sums[axis][layer] += x
        self._heard.clear()
        self.num_batches += 1

    def _refuse(self, axis: str, layer: int, x: Tensor) -> NoReturn:
        within = self.layout.arch.elastic[axis].within[1:] if axis != CHANNELS else ("group", "mamba")
        names = (*within, "mdim" if axis == CHANNELS else axis)
        unit = ", ".join(f"{a} {i}" for a, i in zip(names, (~x.isfinite()).nonzero()[0].tolist(), strict=True))
        where = f"layer {layer}" if layer < len(self.layout.kinds) else "behind the last layer"
        raise ValueError(
            f"{where}, {unit}: the activation is NaN or infinite in batch {self.num_batches} (from 0). "
            "The model overflows there or its weights are broken: try fp32, and look at the layer's weights."
        )

    @contextmanager
    def attached(self, model: nn.Module) -> Iterator[None]:
        """Listen to a model; inside, each pass must stand between `start` and `finish`."""
        with ExitStack() as stack:
            for pattern, product in self.layout.arch.norms.items():
                for layer, norm in hf.modules_at(model, pattern, len(self.layout.kinds)):
                    if layer is None:
                        stack.callback(norm.register_forward_hook(self._on_last).remove)
                    elif product == "hidden" and "hidden" in self.axes:
                        hook = partial(self._on_output, "hidden", layer, parse(product)[0][0], 0)
                        stack.callback(norm.register_forward_hook(hook).remove)
            for name, place in self.layout.tensors.items():
                if place.units and len(place.shape) > 1:
                    self._attach_row(model, name, stack)
            yield

    def _attach_row(self, model: nn.Module, name: str, stack: ExitStack) -> None:
        shape, layer = self.layout.tensors[name].shape, self.layout.tensors[name].units["layer"]
        owner = model.get_submodule(name.rpartition(".")[0])
        (block, *others), rows = shape[-1], shape[0]
        heard = [f.axis for f in block if f.axis in self.axes and f.axis not in OWN_RULE] if not others else []
        for axis in heard:
            hook = partial(self._on_input, axis, layer, block)
            stack.callback(owner.register_forward_pre_hook(hook).remove)
        inner = [i for i, b in enumerate(rows) if {"mamba", "mdim"} <= axes_of(((b,),))]
        if len(inner) == 2 and {"mamba", "mdim"} & set(self.axes):
            # z, x, B, C, dt: the first inner block gates the output, the second is x.
            start = sum(dims((rows[: inner[1]],), self.layout.sizes))
            hook = partial(self._on_output, CHANNELS, layer, rows[inner[1]], start)
            stack.callback(owner.register_forward_hook(hook).remove)
        is_fused = [f.axis for f in rows[0]] == ["expert"] and block[0].axis == "effn"
        if is_fused and {"expert", "effn"} & set(self.axes):
            stack.enter_context(self._experts(owner, layer, name.rpartition(".")[2]))

    def _real_tokens(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        return x if self._real is None else x.index_select(0, self._real)

    def _hear(self, axis: str, layer: int, x: Tensor) -> None:
        if axis == CHANNELS or axis in self.axes:
            self._heard.append((axis, layer, x.double()))

    def _on_output(
        self, axis: str, layer: int, block: Block, start: int, module: nn.Module, args: Any, output: Tensor
    ) -> None:
        sizes = [f.size(self.layout.sizes) for f in block]
        x = self._real_tokens(output.narrow(-1, start, dims(((block,),), self.layout.sizes)[0]))
        summed = x.sum(0, dtype=torch.float32) if axis == CHANNELS else x.float().abs().sum(0)
        self._hear(axis, layer, summed.view(sizes))

    def _on_last(self, norm: nn.Module, args: Any, output: Tensor) -> None:
        before, after = (self._real_tokens(x).float().abs().sum(0) for x in (args[0], output))
        self._last = after if bool(before.isfinite().all()) else before  # behind the norm one NaN is in every unit

    def _on_input(self, axis: str, layer: int, block: Block, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Sum over tokens of the L2 norm of what a unit hands on: a head its channels, a neuron one number."""
        x = self._real_tokens(args[0]).float()
        x = x.view(-1, *(f.size(self.layout.sizes) for f in block))  # [token, *block]
        last = [f.axis for f in block].index(axis)
        x = x.abs() if last == len(block) - 1 else x.flatten(last + 2).norm(dim=-1)
        self._hear(axis, layer, x.sum(0))

    @contextmanager
    def _experts(self, module: nn.Module, layer: int, down: str) -> Iterator[None]:
        """Replace the forward of a fused experts module by one that does the same and listens to each expert."""
        names = [name for name, _ in module.named_parameters(recurse=False) if name != down]
        assert len(names) == 1, names
        before = vars(module).get("forward")
        module.forward = partial(self._run_experts, module, layer, names[0], down)
        try:
            yield
        finally:
            del module.forward
            if before is not None:
                module.forward = before

    def _run_experts(
        self, module: nn.Module, layer: int, up: str, down: str, x: Tensor, chosen: Tensor, weights: Tensor
    ) -> Tensor:
        """x: [token, hidden or latent]; chosen, weights: [token, active]. Returns [token, hidden or latent].

        Rows are sorted by expert and, within an expert, real tokens before padding, which is computed but not
        counted.
        """
        up_proj, down_proj = module.get_parameter(up), module.get_parameter(down)
        num_experts, num_active = down_proj.shape[0], chosen.shape[-1]
        keys = 2 * chosen + self._is_pad.unsqueeze(-1)
        keys, order = keys.flatten().sort(stable=True)
        lengths = torch.bincount(keys, minlength=2 * num_experts)  # [2 expert]: real, padding, real, padding, ...
        rows = lengths.view(-1, 2).sum(-1)
        g = weights.flatten()[order]

        h = _grouped(x[order // num_active], up_proj, rows)
        is_gated = up_proj.shape[1] == 2 * down_proj.shape[2]
        h = module._apply_gate(h) if is_gated else module.act_fn(h)  # type: ignore[operator]  # [row, effn]
        f = _grouped(h, down_proj, rows)
        if "effn" in self.axes:
            self._hear("effn", layer, torch.stack([p.float().abs().sum(0) for p in h.split(lengths.tolist())[::2]]))
        if "expert" in self.axes:
            saliency = g.double() * f.float().norm(dim=-1).double()
            summed = saliency.new_zeros(len(lengths)).index_add_(0, keys, saliency)
            self._hear("expert", layer, summed.view(-1, 2)[:, 0])
            if "expert" not in self.counts:
                self.counts["expert"] = summed.new_zeros(len(self.layout.kinds), num_experts)
            self.counts["expert"][layer] += lengths.view(-1, 2)[:, 0]

        weighted = f * g.unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return weighted[back].view(*chosen.shape, -1).sum(1).to(x.dtype)


def pad_right(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches with each row's real tokens first, no wider than the longest row; empty ones are left out.

    A causal model computes real tokens from real tokens alone then. To the left of them padding does leak, whatever the
    mask says: a bias of the Mamba input projection passes through the convolution into the first tokens.
    """
    for ids, mask in batches:
        if ids.shape != mask.shape or ids.dim() != 2:
            raise ValueError(f"ids {tuple(ids.shape)} and mask {tuple(mask.shape)}: expected [batch, time] for both.")
        real, order = mask.to(device).ne(0).long().sort(dim=-1, descending=True, stable=True)
        width = int(real.sum(-1).max()) if real.numel() else 0
        if width:
            yield ids.to(device).gather(-1, order)[:, :width], real[:, :width].bool()


def run(model: nn.Module, ids: Tensor, *, logits: int) -> Tensor:
    """One forward pass over rows that are padded on the right, if at all. Returns the last `logits` logits; 0: all."""
    return model(input_ids=ids, **hf.accepted(model, {"use_cache": False, "logits_to_keep": logits})).logits


@contextmanager
def bypassed(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Let layers pass on what they get. They stay in place: some models read a layer's kind from its position."""
    blocks = list(blocks)
    for block in blocks:
        block.forward = lambda x, *args, **kwargs: x
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _grouped(x: Tensor, w: Tensor, rows: Tensor) -> Tensor:
    """Multiply each expert's rows by its own matrix. x: [row, in], sorted; w: [expert, out, in]; rows: [expert]."""
    if w.shape[-1] * w.element_size() % 16 == 0:  # the grouped kernel reads 16 bytes at a time
        return F.grouped_mm(x.to(w.dtype), w.transpose(1, 2), offs=rows.cumsum(0).int())
    return torch.cat([F.linear(part, w[i]) for i, part in enumerate(x.to(w.dtype).split(rows.tolist()))])
