"""Check a checkpoint: that it is whole and what its config says, and that it is what a nest holds.

`check_folder` reads headers and small tensors only, and `slice` runs it before it gives a folder its name.
`check_against` reads every value of both folders, block by block, and holds the slice to `take`; on a model that is
small enough it also compares logits with the member on the nest's live weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from nestling.axes import axes_of, take
from nestling.checkpoint import INDEX, TORCH, Checkpoint, read_json
from nestling.cut import BLOCK, Maps, first_not_finite
from nestling.nest import FULL, Member, Nest, open_nest, prefix
from nestling.shards import BYTES, Entry
from nestling.stored import Stored, is_same, plan, remote_code, stored_config

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

SMALL = 1024**2  # values; scales, norms and biases have fewer
LOGITS_LIMIT = 50_000_000  # parameters of a nest whose logits are compared: it is run in float32
ROUNDING = 2e-4  # of the logits' standard deviation, where kernels differ


def check_folder(folder: str | Path) -> list[str]:
    """What is found in a folder, as lines; an error that lists what is wrong.

    Names and shapes against the config, the index against the shards, no infinity or NaN in small tensors, and scales
    above zero.
    """
    nest = open_nest(folder)
    checkpoint = nest.checkpoint
    drop = "mtp" if any(name.startswith("mtp.") for name in checkpoint.entries) else ""
    work = plan(nest, Member(name=FULL, sizes={}), drop=drop)
    wrong = [*_index_faults(checkpoint), *_value_faults(nest)]
    warned = nest.check_scales(Member(name=FULL, sizes={}))
    absent = [name for name in remote_code(checkpoint.config) if not (checkpoint.folder / name).is_file()]
    wrong += [f"config.json names remote code in {name}, which is not there" for name in absent]
    if wrong:
        shown = "; ".join(wrong[:10]) + (f"; and {len(wrong) - 10} more" if len(wrong) > 10 else "")
        raise ValueError(f"'{folder}' is not whole: {shown}.")
    dtypes: dict[str, int] = {}
    for entry in checkpoint.entries.values():
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + 1
    lines = [
        f"{len(work):,} tensors of {nest.layout.arch.model_type}, {checkpoint.nbytes:,} bytes: every shape is the "
        "config's",
        f"index: {'complete and exact' if checkpoint.weight_map else 'none, one file'}",
        "dtypes: " + ", ".join(f"{dtype} in {n:,} tensors" for dtype, n in sorted(dtypes.items())),
        f"scales, norms and biases: finite (tensors of up to {SMALL:,} values with one dim, or named scale)",
    ]
    if nest.quantized is not None:
        told = nest.quantized.summary(nest.layout)
        counts = ", ".join(f"{n:,} matrices in {kind}" for kind, n in told["matrices"].items())
        lines.append(f"quantized, {told['layout']}: {counts}; every scale is there, above zero and finite")
    lines += [f"note: {line}" for line in warned]
    if drop:
        lines.append("the head for multi-token prediction was not checked: Nestling has no table for it")
    told = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    most = max(dtypes, key=lambda dtype: sum(e.nbytes for e in checkpoint.entries.values() if e.dtype == dtype))
    if told and most in TORCH and told != TORCH[most]:
        lines.append(f"note: config.json says dtype {told}, most bytes are {most}: stock loaders convert on loading")
    return lines


def check_against(folder: str | Path, nest: Nest, member: Member) -> list[str]:
    """Every value of a slice is the nest's own, bit by bit; an error that names the first that is not."""
    small = Checkpoint(folder)
    drop = "mtp" if any(name.startswith("mtp.") for name in nest.checkpoint.entries) else ""
    work = plan(nest, member, drop=drop)
    expected = {one.place.name: one for one in work}
    if expected.keys() != small.entries.keys():
        names = sorted(expected.keys() ^ small.entries.keys())
        raise ValueError(
            f"'{folder}' does not hold the tensors of member {member.name}: {len(names)} differ, "
            f"{', '.join(names[:5])}."
        )
    config, told = stored_config(nest, member, drop=drop), read_json(Path(folder) / "config.json")
    differing = sorted(key for key in config.keys() | told.keys() if not is_same(config, told, key))
    if differing:
        raise ValueError(f"config.json of '{folder}' is not that of member {member.name}: {', '.join(differing)}.")
    for file, described in nest.quantization(member)[1].items():
        if not (Path(folder) / file).is_file() or read_json(Path(folder) / file) != described:
            raise ValueError(f"{file} of '{folder}' is not that of member {member.name}.")
    maps = Maps()
    for name, one in expected.items():
        _check_tensor(one, small.entries[name], nest, prefix(member), maps)
    lines = [f"{len(work):,} tensors, {small.nbytes:,} bytes: every value is the nest's, bit by bit"]
    return [*lines, _compare_logits(folder, nest, member)]


def _index_faults(checkpoint: Checkpoint) -> Iterator[str]:
    yield from (note.rstrip(".") for note in checkpoint.notes)
    if not checkpoint.weight_map:
        return
    total = (read_json(checkpoint.folder / INDEX).get("metadata") or {}).get("total_size")
    if total is not None and total != checkpoint.nbytes:
        yield f"{INDEX} says total_size {total}, the shards hold {checkpoint.nbytes}"


def _value_faults(nest: Nest) -> Iterator[str]:
    """Infinities and NaN in small tensors, and scales that are not above zero where the nest does not know them."""
    maps = Maps()
    for name, entry in nest.checkpoint.entries.items():
        is_scale = name.endswith(("_scale", "_scale_2", "_scale_inv")) and nest.quantized is None
        if not entry.nbytes or not (is_scale or (len(entry.shape) == 1 and entry.nbytes <= SMALL * BYTES[entry.dtype])):
            continue
        values = maps.whole(entry)
        if first_not_finite(values, entry.dtype) is not None:
            yield f"tensor '{name}' in {entry.file.name} holds infinities or NaN"
        elif is_scale and entry.dtype in TORCH and not _is_positive(values, entry.dtype):
            yield f"scale '{name}' in {entry.file.name} has values that are not above zero"


def _is_positive(values: np.ndarray, dtype: str) -> bool:
    """Finite values given as bytes are all above zero: the sign bit is clear, and another bit is set."""
    bits = values.view(f"i{BYTES[dtype]}")
    return bool((bits > 0).all())


def _check_tensor(one: Stored, found: Entry, nest: Nest, keep: Mapping[str, int], maps: Maps) -> None:
    import torch

    where = f"tensor '{one.place.name}' in {found.file}"
    if (found.dtype, found.shape) != (one.source.dtype, one.cut.shape):
        raise ValueError(
            f"{where} is {found.dtype} of shape {found.shape}, expected {one.source.dtype} of {one.cut.shape}."
        )
    for rows, sizes, kept in _row_blocks(one, nest.layout.sizes, keep) if found.nbytes else ():
        source, part = _rows(one.source, rows, maps), _rows(found, rows, maps)
        if not torch.equal(take(source, one.place.shape, sizes, kept, units=one.place.units), part):
            raise ValueError(f"{where} differs from what {one.source.file} holds as '{one.place.source}'.")


def _row_blocks(
    one: Stored, sizes: Mapping[str, int], keep: Mapping[str, int]
) -> Iterator[tuple[tuple[int, int], dict[str, int], dict[str, int]]]:
    """Blocks of rows for `take`, where rows are the units of one axis; else the whole tensor. Each with the sizes and
    the rule that hold inside it."""
    shape = one.place.shape
    factor = shape[0][0][0] if shape and len(shape[0]) == len(shape[0][0]) == 1 else None
    if factor is None or not factor.axis or factor.every > 1 or factor.axis in axes_of(shape[1:]):
        yield (0, -1), dict(sizes), dict(keep)
        return
    axis, num_rows = factor.axis, one.cut.shape[0]
    step = max(1, 4 * BLOCK * one.source.shape[0] // one.source.nbytes)
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        yield (begin, end), {**sizes, axis: end - begin}, {a: n for a, n in keep.items() if a != axis}


def _rows(entry: Entry, rows: tuple[int, int], maps: Maps) -> Tensor:
    """Some rows of a tensor as whole numbers of the same width, which are equal where the bits are; (0, -1): all."""
    import numpy as np
    import torch

    begin, end = rows if rows[1] >= 0 else (0, entry.shape[0] if entry.shape else 1)
    size, width = BYTES[entry.dtype], math.prod(entry.shape[1:])
    flat = np.frombuffer(maps.map(entry.file), f"i{size}", (end - begin) * width, entry.start + begin * width * size)
    return torch.from_numpy(flat.copy()).view((end - begin, *entry.shape[1:]) if entry.shape else ())


def _compare_logits(folder: str | Path, nest: Nest, member: Member) -> str:
    """Logits of a slice against the member on the nest's live weights, in float32, on random tokens."""
    if nest.quantized is not None:
        return "logits not compared: the nest is quantized, and its weights are not decoded here"
    if nest.layout.count() > LOGITS_LIMIT:
        return f"logits not compared: the nest has {nest.layout.count():,} parameters, it is run up to {LOGITS_LIMIT:,}"
    import torch

    from nestling import hf
    from nestling.elastic import ElasticModel

    hf.be_quiet()
    if not hf.takes_config(nest.stored):
        return "logits not compared: the stock class refuses the nest's own config.json"
    tokens = torch.randint(nest.layout.sizes["vocab"], (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        elastic = ElasticModel(hf.load_model(nest.folder), layer_order=nest.layer_order)
        live = elastic(elastic.run_of(member.sizes), input_ids=tokens, use_cache=False).logits
        alone = hf.load_model(folder)(input_ids=tokens, use_cache=False).logits
    if torch.equal(live, alone):
        return "logits on 64 random tokens: bit-equal to the member on the nest's weights"
    off = ((live - alone).abs().max() / live.std()).item()
    if not off < ROUNDING:
        raise ValueError(f"logits of '{folder}' differ from the member's by {off:.2g} of their spread.")
    return f"logits on 64 random tokens: within {off:.1g} of their spread of the member on the nest's weights"
