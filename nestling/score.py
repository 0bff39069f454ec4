"""How much each unit of a model matters, measured on data: the scores that sorting goes by.

`score` takes one forward pass over the data with a listener attached (listen.py). `Scores` keeps sums and counts, not
averages, so that two runs merge into what one run over both data sets would give; values and orders follow from them.
Padding never counts, on either side. Layers are judged by leaving them out, which takes many passes and is a function
of its own. Three baselines stand beside: random numbers, norms of weights, and how often an expert is chosen.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nestling import hf
from nestling.arch import ARCHITECTURES, Layout
from nestling.axes import Block, axes_of, dims
from nestling.checkpoint import Checkpoint, new_folder, read_json, write_json
from nestling.data import Stream
from nestling.listen import CHANNELS, Batch, Listener, bypassed, evaluating, pad_right, run
from nestling.nest import open_plain_nest
from nestling.padded import one_pass

VERSION = 1
ACTIVATIONS = "activations"  # the source of what was measured; other sources hold an axis's values as they are


@dataclass(frozen=True, kw_only=True)
class ScoreSettings:
    """Settings of `nestling score`."""

    tokens: int = 4_000_000  # calibration tokens in all
    length: int = 8192  # tokens in one sequence
    batch: int = 1  # sequences in one forward pass
    axes: tuple[str, ...] = ()  # axes to score; empty: every elastic axis of the architecture but layers
    layers: bool = False  # also order the layers by leaving them out: one pass for each pair of layers
    layer_tokens: int = 65_536  # tokens for that, of those above
    pack: bool = True  # documents end to end in full rows; without: one a row, padded
    top_channels: int = 0  # Mamba channels that a head is judged by; 0: the better half
    dtype: str = "fp32"  # fp32, bf16 or fp16: what the model runs in
    device: str = "cpu"  # where the model runs
    seed: int = 0  # of the order in which documents are read

    def __post_init__(self) -> None:
        if self.dtype not in hf.DTYPES:
            raise ValueError(f"dtype '{self.dtype}' is not known: expected one of {', '.join(hf.DTYPES)}.")
        if min(self.tokens, self.length, self.batch, self.layer_tokens) < 1:
            raise ValueError("tokens, length, batch and layer_tokens must be at least 1.")


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerScores:
    """Layers by what is lost without them: sum (M - M_-j)^2 / sum M^2 on the logits.

    The least important layer is left out, then the least important of the rest beside it, and so on to the last.
    """

    order: Tensor  # [layer] int64, the layer that was left out last comes first
    errors: Tensor  # [layer] the error without this layer and without all that stand behind it in `order`
    alone: Tensor  # [layer] the error without this layer only


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores:
    """Sums and counts of one or more runs over data, in float64, and the values and orders that follow from them."""

    architecture: str
    sizes: dict[str, int]  # every axis's size in the model that was scored
    axes: tuple[str, ...]
    sums: dict[str, Tensor]  # axis -> [layer, *enclosing, axis]; `hidden` by layer too; `channels` for mamba and mdim
    counts: dict[str, Tensor] = field(default_factory=dict)  # `expert` -> [layer, expert] tokens routed to each
    num_tokens: int = 0
    source: str = ACTIVATIONS
    fingerprint: str = ""  # of the weights that were scored
    top_channels: int = 0  # Mamba channels that a head is judged by; 0: the better half
    layers: LayerScores | None = None
    runs: tuple[dict[str, Any], ...] = ()  # the settings of each run

    def values(self) -> dict[str, Tensor]:
        """For each axis its scores, float64 [*enclosing axes, axis]; zero in layers that lack the axis."""
        return {axis: self._values(axis) for axis in self.axes}

    def orders(self) -> dict[str, Tensor]:
        """For each axis its units best first, int64 of the shape of its values; equal scores stay as they stand."""
        orders = {axis: x.argsort(dim=-1, descending=True, stable=True) for axis, x in self.values().items()}
        return orders | ({"layer": self.layers.order} if self.layers else {})

    def never_routed(self) -> list[tuple[int, int]]:
        """Layer and number of every expert that no token was routed to."""
        with_experts = self.counts["expert"].sum(-1, keepdim=True) > 0
        return [(i, j) for i, j in ((self.counts["expert"] == 0) & with_experts).nonzero().tolist()]

    def check_fits(self, layout: Layout, fingerprint: str = "") -> None:
        """Refuse to be used for another model's shapes, or for other weights of the same shapes."""
        if fingerprint and self.fingerprint and fingerprint != self.fingerprint:
            raise ValueError(f"these scores are of weights {self.fingerprint}, not of {fingerprint}. Score this model.")
        if (self.architecture, self.sizes) != (layout.arch.model_type, layout.sizes):
            raise ValueError(
                f"these scores are of a {self.architecture} with sizes {self.sizes}, the model is a "
                f"{layout.arch.model_type} with {layout.sizes}. Score this model."
            )

    def save(self, folder: Path) -> None:
        """Write scores.safetensors and scores.json into a folder."""
        from safetensors.torch import save_file

        tensors = {f"sums.{k}": x for k, x in self.sums.items()} | {f"counts.{k}": x for k, x in self.counts.items()}
        if self.layers:
            tensors |= {f"layers.{k}": x for k, x in vars(self.layers).items()}
        save_file({k: x.contiguous() for k, x in tensors.items()}, folder / "scores.safetensors")
        plain = {k: v for k, v in vars(self).items() if k not in {"sums", "counts", "layers"}}
        write_json(folder / "scores.json", {"format_version": VERSION} | plain)

    @classmethod
    def load(cls, folder: str | Path) -> Scores:
        """Read what `save` wrote."""
        from safetensors.torch import load_file

        folder = Path(folder)
        if not (folder / "scores.json").is_file():
            raise ValueError(f"'{folder}' has no scores.json: expected a folder that `nestling score` wrote.")
        told = read_json(folder / "scores.json")
        expected = {f.name for f in fields(cls)} - {"sums", "counts", "layers"}
        if told.pop("format_version", None) != VERSION or told.keys() != expected:
            raise ValueError(f"{folder / 'scores.json'} is not of format {VERSION}: score the model again.")
        parts: dict[str, dict[str, Tensor]] = {"sums": {}, "counts": {}, "layers": {}}
        for name, tensor in load_file(folder / "scores.safetensors").items():
            part, _, key = name.partition(".")
            parts[part][key] = tensor
        layers = LayerScores(**parts["layers"]) if parts["layers"] else None
        told |= {"axes": tuple(told["axes"]), "runs": tuple(told["runs"])}
        scores = cls(sums=parts["sums"], counts=parts["counts"], layers=layers, **told)
        for axis, x in scores.values().items():
            if tuple(x.shape) != scores._shape(axis):
                raise ValueError(f"'{folder}': '{axis}' is {tuple(x.shape)}, its sizes say {scores._shape(axis)}.")
        return scores

    def _shape(self, axis: str) -> tuple[int, ...]:
        within = ARCHITECTURES[self.architecture].elastic[axis].within
        return tuple(self.sizes[a] for a in (*within, axis))

    def _values(self, axis: str) -> Tensor:
        if self.source != ACTIVATIONS:
            return self.sums[axis]
        if axis == "layer":
            assert self.layers is not None
            return self.layers.errors
        if axis == "hidden":
            return self.sums[axis].sum(0)
        if axis == "expert":
            return self.sums[axis] / self.counts[axis].clamp(min=1)
        if axis not in ("mamba", "mdim"):
            return self.sums[axis]
        channels = self.sums[CHANNELS]  # [layer, group, mamba, mdim]
        by_channel = channels.flatten(1, 2).norm(dim=1)  # [layer, mdim]
        if axis == "mdim":
            return by_channel
        best = by_channel.argsort(dim=-1, descending=True, stable=True)
        best = best[:, None, None, : self.top_channels or -(-self.sizes["mdim"] // 2)]
        return channels.gather(-1, best.expand(*channels.shape[:3], -1)).norm(dim=-1)


@torch.no_grad()
def score(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    axes: Sequence[str] = (),
    layers: bool = False,
    top_channels: int = 0,
) -> Scores:
    """Scores of the units along `axes` (empty: every elastic axis but layers) from one forward pass over the data.

    Star Elastic (arXiv 2605.07182): sum of |norm output| for `hidden`; for neurons and heads the sum of the L2 norm
    of what a unit hands to the matrix that contracts it; for a Mamba channel || sum_{b,t} s_{:,d} ||_2 over heads,
    for a Mamba head the norm over the top channels, s being the x block of the input projection (the sums are signed,
    as printed: what cancels over the data counts as unused). Experts by REAP (arXiv 2510.13999, eq. 9): mean over the
    tokens routed to an expert of gate times output norm, with the gate that the block multiplies by; zero if no token
    was routed to it.

    `model` is a stock one and is left as it was. With `layers`, `score_layers` runs on all the batches as well.
    """
    layout = _layout(model)
    known = [a for a in layout.elastic() if a not in layout.arch.refuse(hf.architecture_of(model)[1])]
    wanted = tuple(axes) or tuple(a for a in known if a != "layer")
    for axis in wanted:
        if axis not in known:
            raise ValueError(f"'{axis}' cannot shrink in this model, so it has no score. Known: {', '.join(known)}.")
    if not 0 <= top_channels <= layout.sizes.get("mdim", 0):
        raise ValueError(f"top_channels is {top_channels}, a Mamba head has {layout.sizes.get('mdim', 0)} channels.")
    with_order = layers or "layer" in wanted
    batches = list(batches) if with_order else batches
    listener = Listener(layout, [axis for axis in wanted if axis != "layer"])
    with listener.attached(model), evaluating(model):
        for ids, mask in pad_right(batches, next(model.parameters()).device):
            listener.start(mask)
            run(model, ids, logits=1)
            listener.finish()
    if not listener.num_tokens:
        raise ValueError("the data has no tokens to score with.")
    scores = Scores(
        architecture=layout.arch.model_type,
        sizes=layout.sizes,
        axes=wanted,
        sums={k: x.cpu() for k, x in listener.sums.items()},
        counts={k: x.cpu() for k, x in listener.counts.items()},
        num_tokens=listener.num_tokens,
        fingerprint=_fingerprint(model),
        top_channels=top_channels,
    )
    return with_layers(scores, score_layers(model, batches)) if with_order else scores


@torch.no_grad()
def score_layers(model: nn.Module, batches: Iterable[Batch]) -> LayerScores:
    """The order of the layers, from L (L + 1) / 2 forward passes over the data, L layers: keep it small.

    Errors are against the logits of the whole model, in float64 over real tokens. Of equals the later layer goes.
    """
    batches = list(pad_right(batches, next(model.parameters()).device))
    blocks = list(model.get_submodule(_layout(model).arch.layers).children())
    left, dropped = list(range(len(blocks))), []
    errors, alone = torch.zeros(len(blocks), dtype=torch.float64), torch.zeros(len(blocks), dtype=torch.float64)
    with evaluating(model):
        while left:
            tried = _errors_without(model, blocks, batches, [(*dropped, j) for j in left])
            if not dropped:
                alone = torch.tensor(tried, dtype=torch.float64)
            error, minus = min(zip(tried, (-j for j in left), strict=True))
            errors[-minus] = error
            dropped.append(-minus)
            left.remove(-minus)
    return LayerScores(order=torch.tensor(dropped[::-1]), errors=errors, alone=alone)


def with_layers(scores: Scores, layers: LayerScores) -> Scores:
    """Scores that also order the layers."""
    return replace(scores, axes=(*(a for a in scores.axes if a != "layer"), "layer"), layers=layers)


def merge(a: Scores, b: Scores) -> Scores:
    """What one run over both data sets gives, to float64 rounding. Refuses runs that do not belong together."""
    for name in ("architecture", "sizes", "fingerprint", "axes", "top_channels", "source"):
        one, other = getattr(a, name), getattr(b, name)
        if one != other:
            raise ValueError(f"scores of different {name} cannot be merged: {one} and {other}.")
    if a.source != ACTIVATIONS:
        raise ValueError(f"scores by {a.source} cannot be merged: only sums over activations add up.")
    if a.layers or b.layers:
        raise ValueError("an order of layers cannot be merged: merge without, then `score_layers` on all the data.")
    return replace(
        a,
        sums={k: x + b.sums[k] for k, x in a.sums.items()},
        counts={k: x + b.counts[k] for k, x in a.counts.items()},
        num_tokens=a.num_tokens + b.num_tokens,
        runs=a.runs + b.runs,
    )


def random_scores(layout: Layout, seed: int) -> Scores:
    """Scores that know nothing: uniform draws along every elastic axis."""
    draw = torch.Generator().manual_seed(seed)
    sums = {}
    for axis, rule in layout.elastic().items():
        sums[axis] = torch.rand(layout.order_shape(axis), generator=draw, dtype=torch.float64)
        for layer, kind in enumerate(layout.kinds):
            if "layer" in rule.within and axis not in _axes_of_kind(layout, kind):
                sums[axis][layer] = 0
    return _baseline(layout, sums, "chance")


@torch.no_grad()
def weight_norm_scores(model: nn.Module) -> Scores:
    """Scores without data: the L2 norm, in float64, of all parameters that belong to a unit."""
    layout, state = _layout(model), hf.state_of(model)
    squares = {axis: torch.zeros(layout.order_shape(axis), dtype=torch.float64) for axis in layout.elastic()}
    for name, place in layout.tensors.items():
        squared = state[name].double().cpu() ** 2
        splits = [[dims(((block,),), layout.sizes)[0] for block in dim] for dim in place.shape]
        for picked in itertools.product(*(range(len(dim)) for dim in place.shape)):
            part = squared
            for dim, i in enumerate(picked):
                part = part.narrow(dim, sum(splits[dim][:i]), splits[dim][i])
            block = tuple(f for dim, i in zip(place.shape, picked, strict=True) for f in dim[i])
            _add_squares_(squares, part.reshape([f.size(layout.sizes) for f in block]), block, place.units, layout)
    return _baseline(layout, {axis: x.sqrt() for axis, x in squares.items()}, "norms of weights")


def frequency_scores(scores: Scores) -> Scores:
    """How often each expert was chosen, as the score of `expert`; the other axes are left out."""
    if "expert" not in scores.counts:
        raise ValueError(f"these scores have no routing counts. They hold: {', '.join(scores.axes)}.")
    return replace(scores, axes=("expert",), sums={"expert": scores.counts["expert"]}, source="frequency", layers=None)


def score_folder(
    settings: ScoreSettings,
    *,
    parent: Path,
    data: str,
    to: Path,
    say: Callable[[str], None],
    overwrite: bool = False,
) -> Scores:
    """Score the model in a folder on JSONL files (see `nestling.data.Stream`), which is read at most once."""
    open_plain_nest(parent, verb="score")
    model = hf.load_model(parent, dtype=settings.dtype, device=settings.device)
    tokenizer = hf.load_tokenizer(parent)
    hf.check_vocabulary(model, tokenizer)

    def read(tokens: int) -> Iterator[Batch]:
        stream = Stream(data, tokenizer, length=settings.length, seed=settings.seed)
        return one_pass(stream, tokens, batch=settings.batch, pack=settings.pack, say=say)

    begin = time.monotonic()
    with new_folder(to, overwrite=overwrite, source=Path(parent)) as folder:
        scores = score(
            model,
            read(settings.tokens),
            axes=[axis for axis in settings.axes if axis != "layer"],
            top_channels=settings.top_channels,
        )
        seconds = time.monotonic() - begin
        say(f"scored {', '.join(scores.axes)} on {scores.num_tokens} tokens in {seconds:.0f} s")
        if "expert" in scores.counts and scores.never_routed():
            never = [f"{j} of layer {i}" for i, j in scores.never_routed()]
            say(f"no token was routed to {len(never)} experts, which score 0: {', '.join(never)}")
        if settings.layers or "layer" in settings.axes:
            few = min(settings.layer_tokens, settings.tokens)
            scores = with_layers(scores, score_layers(model, read(few)))
            assert scores.layers is not None
            say(f"layers, most important first, on {few} tokens: {' '.join(map(str, scores.layers.order.tolist()))}")
        scores = replace(
            scores, fingerprint=Checkpoint(parent).fingerprint(), runs=(asdict(settings) | {"data": data},)
        )
        scores.save(folder)
    return scores


def _errors_without(
    model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch], dropped: Sequence[Sequence[int]]
) -> list[float]:
    """The normalized error on the logits for each set of layers that is left out."""
    lost, whole = torch.zeros(len(dropped), dtype=torch.float64), 0.0
    for i, (ids, mask) in enumerate(batches):
        full = run(model, ids, logits=0)[mask].float()
        whole += float((full**2).sum(dtype=torch.float64))
        for n, layers in enumerate(dropped):
            with bypassed([blocks[j] for j in layers]):
                rest = run(model, ids, logits=0)[mask].float()
            lost[n] += float(((full - rest) ** 2).sum(dtype=torch.float64))
            if not bool(lost[n].isfinite()):
                raise ValueError(f"without layers {sorted(layers)} the logits are NaN or infinite in batch {i}.")
    if not whole:
        raise ValueError("the data has no tokens to score with, or all logits are zero.")
    return (lost / whole).tolist()


def _layout(model: nn.Module) -> Layout:
    arch, config = hf.architecture_of(model)  # type: ignore[arg-type]
    layout = arch.layout(config, "memory")
    layout.check_cover(hf.state_of(model))
    return layout


def _fingerprint(model: nn.Module) -> str:
    """A short digest of names, shapes and the first numbers of every tensor."""
    digest = hashlib.sha256()
    for name, tensor in sorted(hf.state_of(model).items()):
        first = tensor.detach().flatten()[:16].float().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{first.tolist()}".encode())
    return digest.hexdigest()[:16]


def _axes_of_kind(layout: Layout, kind: str) -> frozenset[str]:
    return frozenset(axis for shape in layout.rows[kind].values() for axis in axes_of(shape))


def _baseline(layout: Layout, sums: dict[str, Tensor], source: str) -> Scores:
    return Scores(architecture=layout.arch.model_type, sizes=layout.sizes, axes=tuple(sums), sums=sums, source=source)


def _add_squares_(squares: dict[str, Tensor], x: Tensor, block: Block, units: dict[str, int], layout: Layout) -> None:
    """Add squared parameters, one dim of x for each factor of `block`, to every axis that they belong to."""
    present = [factor.axis for factor in block]
    for axis, sums in squares.items():
        target = (*layout.arch.elastic[axis].within, axis)
        if not set(target) <= {*present, *units}:
            continue
        kept = [present.index(a) for a in target if a in present]
        moved = x.movedim(kept, list(range(len(kept))))
        where = tuple(units[a] if a in units else slice(None) for a in target)
        sums[where] += moved.reshape(*moved.shape[: len(kept)], -1).sum(-1)
