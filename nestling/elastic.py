"""Run any member of a nest on the live weights, and let a router's choice of sizes receive a gradient.

A member runs as a stock model of its own size: a skeleton of the small config, called with slices of the full
weights. So what is trained is what is exported, and a small member costs a small model. The slicing happens inside
each layer, after a sharded layer has been gathered, so that the same code runs on one core and on a cluster.

For the router every axis has stairs, a vector with one factor for each unit. In a hard run the stairs of the kept
units are exactly one and carry only a gradient. In a soft run nothing is sliced: the full model runs, each axis
masked by its stairs where it is heard, with every norm corrected to what it would be over the kept units alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nestling import hf
from nestling.arch import Layout, Place, kept_layers
from nestling.axes import Block, Shape, add_, axes_of, parse, take
from nestling.nest import check_sizes

Stairs = Mapping[str, Tensor]  # elastic axis -> [size] (the kept size in a hard run, the full size in a soft one)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Which model runs: its sizes, its layers, and the stairs of a router."""

    sizes: dict[str, int] = field(default_factory=dict)  # elastic axis -> units kept
    layers: tuple[int, ...] | None = None
    stairs: Stairs = field(default_factory=dict)
    is_soft: bool = False


class ElasticModel(nn.Module):
    """A stock model whose members can be run on its live weights.

    `model` is taken over: its layers are wrapped in place. Call with the inputs of the stock model.
    """

    def __init__(self, model: nn.Module, *, layer_order: Sequence[int] | None = None) -> None:
        super().__init__()
        arch, config = hf.architecture_of(model)
        layout = arch.layout(config, "memory")
        layout.check_cover(hf.state_of(model))
        self.layout, self.config = layout, config
        self.layer_order = tuple(layer_order if layer_order is not None else range(len(layout.kinds)))
        self._outside = {name: place for name, place in layout.tensors.items() if not place.units}
        blocks = model.get_submodule(arch.layers)
        assert isinstance(blocks, nn.ModuleList)
        for i, block in enumerate(blocks):
            blocks[i] = ElasticLayer(block, prefix=f"{arch.layers}.{i}.", layout=layout)
        self.full = model
        # Skeletons own no weights; as registered modules they would be sharded, saved and counted.
        self.__dict__["_skeletons"] = {}
        self._skeletons: dict[Any, _Skeleton]
        self.train(model.training)

    @property
    def layers(self) -> list[ElasticLayer]:
        """The wrapped layers, in order."""
        return list(self.full.get_submodule(self.layout.arch.layers))  # type: ignore[arg-type]

    def run_of(self, sizes: Mapping[str, int], *, stairs: Stairs | None = None) -> Run:
        """The run of a member with these sizes."""
        sizes = check_sizes(self.layout, self.config, sizes, who="the member")
        layers = tuple(kept_layers(self.layer_order, sizes["layer"])) if "layer" in sizes else None
        return Run(sizes={a: n for a, n in sizes.items() if a != "layer"}, layers=layers, stairs=stairs or {})

    def forward(self, run: Run | Mapping[str, int], **inputs: Any) -> Any:
        """Run one member; returns the stock model's own output."""
        if not isinstance(run, Run):
            run = self.run_of(run)
        skeleton = self._skeleton(run)
        skeleton.run[0] = run
        weights = _cut(self._outside_weights(), self._outside, run, self.layout)
        return functional_call(skeleton.model, weights, kwargs=inputs)

    def state(self) -> dict[str, Tensor]:
        """The full model's live weights under their stock names in memory."""
        return {name.replace(".block.", ".", 1): tensor for name, tensor in hf.state_of(self.full).items()}

    def _outside_weights(self) -> dict[str, Tensor]:
        return {name: self.full.get_parameter(name) for name in self._outside}

    def _skeleton(self, run: Run) -> _Skeleton:
        key = (tuple(sorted(run.sizes.items())), run.layers, run.is_soft)
        if key not in self._skeletons:
            self._skeletons[key] = _Skeleton(self, run)
        found = self._skeletons[key]
        if found.model.training != self.training:
            found.train(self.training)
        return found


class ElasticLayer(nn.Module):
    """One layer with all its weights: the unit that is sharded and gathered. Runs as a layer of any member."""

    def __init__(self, block: nn.Module, *, prefix: str, layout: Layout) -> None:
        super().__init__()
        self.block = block
        self.layout = layout
        self._places = {name: layout.tensors[prefix + name] for name in hf.state_of(block)}

    def forward(self, run: Run, skeleton: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the skeleton of a member's layer with slices of this layer's weights."""
        weights = dict(self.block.named_parameters())
        weights |= {name: buffer for name, buffer in self.block.named_buffers() if name in self._places}
        return functional_call(skeleton, _cut(weights, self._places, run, self.layout), args, kwargs)


class _Skeleton:
    """The stock model of one set of sizes, without weights; its layers call the elastic ones."""

    def __init__(self, elastic: ElasticModel, run: Run) -> None:
        layout = elastic.layout
        device = str(next(elastic.parameters()).device)
        config = layout.arch.resize(elastic.config, layout.sizes | run.sizes, run.layers)
        self.model = hf.skeleton(config, device=device)
        self.run: list[Run] = [run]
        blocks = self.model.get_submodule(layout.arch.layers)
        assert isinstance(blocks, nn.ModuleList)
        self._blocks = list(blocks)
        if run.is_soft:
            self._mask_norms_and_routers(layout)
        for i, old in enumerate(range(len(blocks)) if run.layers is None else run.layers):
            blocks[i] = _Proxy(elastic.layers[old], self._blocks[i], self.run)

    def train(self, mode: bool) -> None:
        """Training or evaluation mode, also for the layers behind the proxies."""
        self.model.train(mode)
        for block in self._blocks:
            block.train(mode)

    def _mask_norms_and_routers(self, layout: Layout) -> None:
        for pattern, product in layout.arch.norms.items():
            for _, norm in hf.modules_at(self.model, pattern, len(self._blocks)):
                _NormCorrection(norm, parse(product)[0][0], layout, self.run)
        for name, module in self.model.named_modules():
            # Sigmoid routers have a selection bias, which `_cut` masks; softmax routers have nothing to add to.
            if name.endswith(".gate") and not hasattr(module, "e_score_correction_bias"):
                module.register_forward_hook(self._mask_router)

    def _mask_router(self, gate: nn.Module, args: Any, output: Any) -> Any:
        stairs = self.run[0].stairs.get("expert")
        return output if stairs is None else hf.mask_router(gate, output, stairs.detach() <= 0)


class _Proxy(nn.Module):
    """Stands in a skeleton's list of layers; looks like the skeleton's layer and calls the elastic one."""

    def __init__(self, layer: ElasticLayer, block: nn.Module, run: list[Run]) -> None:
        super().__init__()
        self.__dict__.update(layer=layer, block=block, run=run)  # not registered: neither belongs to the skeleton

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["block"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer(self.run[0], self.block, *args, **kwargs)


class _NormCorrection:
    """Makes a norm over masked units equal to the norm over the kept units alone.

    With k of N units kept, the mean over N is k/N of the mean over k, so eps shrinks by k/N and the output by
    sqrt(k/N).
    """

    def __init__(self, norm: nn.Module, product: Block, layout: Layout, run: list[Run]) -> None:
        self.axes = [factor.axis for factor in product]
        self.full = {axis: layout.sizes[axis] for axis in self.axes}
        self.eps, self.run, self.share = norm.variance_epsilon, run, torch.ones(())
        norm.register_forward_pre_hook(self._before)
        norm.register_forward_hook(self._after)

    def _before(self, norm: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        stairs = {axis: s for axis, s in self.run[0].stairs.items() if axis in self.axes}
        if not stairs:
            return args
        self.share = torch.stack([s.mean() for s in stairs.values()]).prod()
        norm.variance_epsilon = self.eps * self.share  # type: ignore[assignment]
        return (args[0] * _spread(stairs, self.axes, self.full).to(args[0].dtype), *args[1:])

    def _after(self, norm: nn.Module, args: Any, output: Tensor) -> Tensor:
        if not any(axis in self.axes for axis in self.run[0].stairs):
            return output
        norm.variance_epsilon = self.eps  # type: ignore[assignment]
        return output * self.share.sqrt().to(output.dtype)


def _cut(weights: Mapping[str, Tensor], places: Mapping[str, Place], run: Run, layout: Layout) -> dict[str, Tensor]:
    """The weights of a run: sliced to its sizes, then multiplied by the stairs of the axes that they contract."""
    keep = run.sizes if not run.is_soft else {}
    normed = _normed_axes(layout) if run.is_soft else frozenset()
    cut = {}
    for name, place in places.items():
        tensor = weights[name] if not keep else _slice(weights[name], place.shape, layout.sizes, keep)
        if run.stairs:
            tensor = _listen(tensor, place, run, layout, normed)
        cut[name] = tensor
    return cut


def _slice(weight: Tensor, shape: Shape, sizes: Mapping[str, int], keep: Mapping[str, int]) -> Tensor:
    """The first units of a live weight."""
    is_trained = weight.is_leaf and weight.requires_grad and torch.is_grad_enabled()
    if not is_trained or not keep.keys() & axes_of(shape):
        return take(weight, shape, sizes, keep)
    return _Slice.apply(weight, shape, sizes, keep)  # type: ignore[return-value]


class _Slice(torch.autograd.Function):
    """`take` of a parameter. Its gradient is added to the parameter's own where it belongs.

    Autograd would make a gradient of the full size out of every slice, zeros and all, and add these up: for a small
    member that costs more than its products.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, shape: Shape, sizes: Mapping[str, int], keep: Mapping[str, int]) -> Tensor:
        ctx.of = weight, shape, sizes, keep
        return take(weight, shape, sizes, keep)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        weight, shape, sizes, keep = ctx.of
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        add_(weight.grad, grads[0], shape, sizes, keep)
        return None, None, None, None


def _listen(tensor: Tensor, place: Place, run: Run, layout: Layout, normed: frozenset[str]) -> Tensor:
    """Multiply a weight by the stairs of what it reads."""
    sizes = layout.sizes | run.sizes
    axes = axes_of(place.shape)
    if place.shape == parse("hidden") and "hidden" in run.stairs and "norm" in place.name and not run.is_soft:
        return tensor * run.stairs["hidden"].to(tensor.dtype)  # a norm's weight: all its readers at once
    if len(place.shape) == 1 and run.is_soft and place.shape == parse("expert") and "expert" in run.stairs:
        return tensor.masked_fill(run.stairs["expert"].detach() <= 0, float("-inf"))  # excluded before top-k
    if len(place.shape) < 2 or not axes & run.stairs.keys():
        return tensor
    (block, *others) = place.shape[-1]
    last = [factor.axis for factor in block] if not others else []
    heard = {a: s for a, s in run.stairs.items() if a in last and a != "hidden" and a not in normed}
    if heard:
        tensor = tensor * _spread(heard, last, sizes).to(tensor.dtype)
    if "expert" in run.stairs and place.shape[0] == parse("expert")[0] and last == ["effn"]:
        tensor = tensor * run.stairs["expert"].to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
    return tensor


def _spread(stairs: Stairs, axes: Sequence[str], sizes: Mapping[str, int]) -> Tensor:
    """One factor for each entry of a product of axes. Returns [product of the axes' sizes]."""
    device = next(iter(stairs.values())).device
    factor = torch.ones((), device=device)
    for place, axis in enumerate(axes):
        one = stairs.get(axis)
        one = torch.ones(sizes[axis], device=device) if one is None else one
        factor = factor.unsqueeze(-1) * one if place else one
    return factor.flatten()


def _normed_axes(layout: Layout) -> frozenset[str]:
    """Axes that some norm normalizes over: masked there, once, and not again where they are contracted."""
    return frozenset(axis for product in layout.arch.norms.values() for axis in axes_of(parse(product)))
