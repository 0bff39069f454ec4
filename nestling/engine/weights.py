"""A nest's weights in memory, once; every member is a stock model whose parameters are cut from them.

Files are mapped read-only. A tensor that is held as it is stored stays in the mapped file; what has to be converted,
or lies in one tensor for each expert where the model wants them together, is built once and is the nest's storage
from then on. A member's parameter is a view of the storage where its cut is a prefix (`hidden`, `effn`, `expert`),
and a copy where the kept units do not lie at even distances (cuts within heads, or within one of several blocks).
Members that cut a tensor alike share the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from nestling import hf
from nestling.arch import Config, Layout
from nestling.axes import Shape, axes_of, dims, parse, take
from nestling.checkpoint import TORCH
from nestling.nest import Member, Nest, check_plain, prefix

AS_STORED = "as stored"


@dataclass(frozen=True, kw_only=True, eq=False)
class Loaded:
    """A member that can run."""

    name: str
    member: Member
    config: Config  # its own, complete
    layout: Layout  # its own, as its parameters are named in memory
    layers: tuple[int, ...]  # the parent's layers that it runs
    model: hf.PreTrainedModel
    dtype: torch.dtype  # of its activations
    shared: int  # bytes of parameters that lie in the nest's storage
    copied: int  # bytes of those that do not
    num_shared: int  # parameter tensors
    num_copied: int


class Weights:
    """The storage of one nest."""

    def __init__(self, nest: Nest, *, dtype: str = AS_STORED) -> None:
        """dtype: "as stored", as the stock class loads the folder with dtype "auto"; or fp32, bf16, fp16."""
        check_plain(nest, verb="generate")
        nest.check_cover(nest.names)
        if dtype != AS_STORED and dtype not in hf.DTYPES:
            raise ValueError(f"dtype '{dtype}' is not known: expected '{AS_STORED}' or {', '.join(hf.DTYPES)}.")
        self.nest = nest
        self.layout = nest.layout.arch.layout(nest.config, "memory")
        self.dtype = hf.DTYPES[dtype] if dtype in hf.DTYPES else _stored_dtype(nest)
        skeleton = hf.skeleton(nest.config)
        self.full = {name: self._build(name, files, skeleton) for name, files in self._files()}
        self._cuts: WeakValueDictionary[tuple, Tensor] = WeakValueDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes of the storage: those of the full member."""
        return sum(tensor.nbytes for tensor in self.full.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes that members hold beside the storage."""
        ours = {tensor.untyped_storage().data_ptr() for tensor in self.full.values()}
        beside = {cut.untyped_storage().data_ptr(): cut.untyped_storage().nbytes() for cut in self._cuts.values()}
        return sum(nbytes for place, nbytes in beside.items() if place not in ours)

    def load(self, member: Member) -> Loaded:
        """A member as a stock model. Nothing that is loaded already changes."""
        nest, keep, layers = self.nest, prefix(member), self.nest.layers(member)
        config = nest.layout.arch.resize(nest.config, nest.sizes(member), layers)
        model, weights, told = hf.skeleton(config), {}, [0, 0, 0, 0]
        parameters = dict(model.named_parameters())
        for place in self.layout.places(keep, layers):
            source = self.full[place.source]
            weights[place.name] = cut = self._cut(place.source, place.shape, keep, place.name in parameters)
            is_copied = cut.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
            told[is_copied] += cut.nbytes
            told[2 + is_copied] += 1
        return Loaded(
            name=member.name,
            member=member,
            config=config,
            layout=self.layout.resize(nest.sizes(member), layers),
            layers=tuple(layers),
            model=hf.assign(model, weights),
            dtype=self.dtype,
            shared=told[0],
            copied=told[1],
            num_shared=told[2],
            num_copied=told[3],
        )

    def _cut(self, name: str, shape: Shape, keep: dict[str, int], is_parameter: bool) -> Tensor:
        """The member's part of a tensor; one that was copied for another member is used again."""
        axes = axes_of(shape)
        key = (name, tuple(sorted((axis, n) for axis, n in keep.items() if axis in axes)))
        cut = self._cuts.get(key)
        if cut is None:
            cut = take(self.full[name], shape, self.layout.sizes, keep)
            if cut.dim() > 1 and cut.stride(-1) != 1:  # products read rows whose values lie side by side
                cut = cut.contiguous()
            if is_parameter:  # as the model will hold it: a weak reference to anything else would not last
                cut = nn.Parameter(cut, requires_grad=False)
            self._cuts[key] = cut
        return cut

    def _files(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Every tensor in memory, and the stored tensors that it is: for each expert, those that lie side by side."""
        stored = self.nest.layout
        num_experts = stored.sizes.get("expert", 1)
        for kind, rows in self.layout.rows.items():
            pairs = list(_pairs(rows, stored.rows[kind]))
            layers = [i for i, one in enumerate(self.layout.kinds) if one == kind] if kind else [0]
            for layer in layers:
                for name, patterns in pairs:
                    experts = range(num_experts) if "{expert}" in patterns[0] else [0]
                    files = [[pattern.format(layer=layer, expert=i) for pattern in patterns] for i in experts]
                    yield name.format(layer=layer), files

    def _build(self, name: str, files: list[list[str]], skeleton: hf.PreTrainedModel) -> Tensor:
        dtype = torch.float32 if hf.keeps_float32(skeleton, name) else self.dtype
        read = self.nest.checkpoint.read
        if len(files) == len(files[0]) == 1:
            return read(files[0][0]).to(dtype)
        whole = torch.empty(dims(self.layout.find(name).shape, self.layout.sizes), dtype=dtype)
        for i, parts in enumerate(files):
            start = 0
            for part in map(read, parts):
                whole[i, start : start + len(part)] = part
                start += len(part)
        return whole


def _pairs(rows: dict[str, Shape], stored: dict[str, Shape]) -> Iterator[tuple[str, list[str]]]:
    """Each row in memory with the rows on disk that it is made of. Both list the same parameters in the same order."""
    rest = list(stored.items())
    for name, shape in rows.items():
        pattern, part = rest.pop(0)
        patterns = [pattern]
        if part != shape:
            # One tensor for each expert on disk; those of an expert side by side in memory: gate and up.
            assert shape[0] == parse("expert")[0], name
            while part != shape[1:]:
                pattern, more = rest.pop(0)
                patterns.append(pattern)
                part = (part[0] + more[0], *part[1:])
        yield name, patterns
    assert not rest, rest


def _stored_dtype(nest: Nest) -> torch.dtype:
    """What the config says that the weights are in, else what most of their bytes are in."""
    told = nest.stored.get("dtype") or nest.stored.get("torch_dtype")
    if isinstance(told, str) and told in TORCH.values():
        return getattr(torch, told)
    nbytes: dict[str, int] = {}
    for entry in nest.checkpoint.entries.values():
        nbytes[entry.dtype] = nbytes.get(entry.dtype, 0) + entry.nbytes
    return getattr(torch, TORCH[max(nbytes, key=lambda dtype: nbytes[dtype])])
