"""Safetensors files by their headers: what a file holds is read and judged before a byte of its data is used.

A shard is 8 bytes with the header's length, the header as JSON, then the data of its tensors without a gap. Whatever
a stranger's file says is checked here: lengths against the file, offsets against shapes and against each other. What
is written is planned first: which tensor goes into which shard, and where its data will stand. Needs neither torch
nor numpy.
"""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "BF16": 2, "F16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "U8": 1, "I8": 1, "BOOL": 1,
}  # fmt: skip
# The bits of an exponent: all of them set is an infinity or NaN. E4M3 has no infinity, and one NaN: all but the sign.
NOT_FINITE = {
    "F64": 0x7FF0_0000_0000_0000, "F32": 0x7F80_0000, "BF16": 0x7F80, "F16": 0x7C00, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C,
    "F8_E8M0": 0xFF,
}  # fmt: skip
HEADER_LIMIT = 100_000_000  # bytes, as the safetensors library itself
SHARD_BYTES = 5_000_000_000  # as stock loaders' own tools
META = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """What a shard's header says of one tensor."""

    file: Path
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]
    start: int = 0  # where its data begins in the file, in bytes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclass(frozen=True)
class Shard:
    """A file that will be written: its tensors, in the order in which their data stands."""

    name: str
    tensors: tuple[tuple[str, Entry], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its data."""
        return sum(entry.nbytes for _, entry in self.tensors)


def read_header(file: Path) -> dict[str, Entry]:
    """Every tensor of a safetensors file; an error that names the file if it is not exactly what its header says."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if len(first) < 8 or length > min(HEADER_LIMIT, size - 8):
            raise ValueError(
                f"{file} is not a safetensors file, or is cut short: it has {size:,} bytes, its header says that it "
                f"is {length:,} bytes long itself."
            )
        text = stream.read(length)
    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} has a broken safetensors header: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise ValueError(f"{file} has a broken safetensors header: a {type(header).__name__}, expected an object.")
    begin = 8 + length
    entries = {name: _entry(file, name, told, begin) for name, told in header.items() if name != META}
    _check_data(file, entries, begin, size)
    return entries


def header_bytes(tensors: Sequence[tuple[str, Entry]]) -> bytes:
    """The beginning of a file that holds these tensors in this order: length and header, padded to whole 8 bytes."""
    header: dict[str, Any] = {META: {"format": "pt"}}
    start = 0
    for name, entry in tensors:
        end = start + entry.nbytes
        header[name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def plan_shards(tensors: Iterable[tuple[str, Entry]], limit: int = SHARD_BYTES) -> list[Shard]:
    """Tensors in files of at most `limit` bytes of data, named as stock loaders expect; a larger tensor gets its own.

    tensors: names and what they will be; their `file` and `start` say where they come from and are kept.
    """
    if limit < 1:
        raise ValueError(f"a shard of {limit} bytes holds nothing: expected at least 1.")
    groups: list[list[tuple[str, Entry]]] = [[]]
    filled = 0
    for name, entry in tensors:
        if groups[-1] and filled + entry.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append((name, entry))
        filled += entry.nbytes
    # Wide types first: whatever comes before a tensor is then a whole number of its own values, as readers like it.
    ordered = [tuple(sorted(group, key=lambda one: -BYTES[one[1].dtype])) for group in groups]
    return [Shard(shard_name(i, len(groups)), group) for i, group in enumerate(ordered)]


def shard_name(i: int, num_shards: int) -> str:
    """The name of shard number i, counted from 0."""
    return "model.safetensors" if num_shards == 1 else f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"


def _entry(file: Path, name: str, told: Any, begin: int) -> Entry:
    where = f"{file} has a broken safetensors header: tensor '{name[:80]}'"
    if not isinstance(told, dict) or not {"dtype", "shape", "data_offsets"} <= told.keys():
        raise ValueError(f"{where} is {str(told)[:80]}, expected an object with dtype, shape and data_offsets.")
    if not isinstance(told["dtype"], str) or told["dtype"] not in BYTES:
        raise ValueError(
            f"{where} has dtype {str(told['dtype'])[:20]!r}, which Nestling does not know: {', '.join(BYTES)}."
        )
    for key in ("shape", "data_offsets"):
        values = told[key]
        if not isinstance(values, list) or not all(type(n) is int and 0 <= n < 2**63 for n in values):
            raise ValueError(f"{where} has {key} {str(values)[:80]}, expected a list of whole numbers.")
    if len(told["data_offsets"]) != 2:
        raise ValueError(f"{where} has data_offsets {str(told['data_offsets'])[:80]}, expected two numbers.")
    if len(told["shape"]) > 64:
        raise ValueError(f"{where} has {len(told['shape'])} dims.")
    start, end = told["data_offsets"]
    entry = Entry(file, told["dtype"], tuple(told["shape"]), begin + start)
    if end - start != entry.nbytes:
        raise ValueError(
            f"{where} has {end - start:,} bytes of data, but {told['dtype']} of shape {str(told['shape'])[:80]} is "
            f"{entry.nbytes:,}."
        )
    return entry


def _check_data(file: Path, entries: dict[str, Entry], begin: int, size: int) -> None:
    """The data of the tensors fills the file from the header to its end, once."""
    at, before = begin, "the header"
    for name, entry in sorted(entries.items(), key=lambda one: (one[1].start, one[1].nbytes)):
        if entry.start != at:
            what = "overlaps" if entry.start < at else "leaves a gap behind"
            raise ValueError(
                f"{file} has a broken safetensors header: tensor '{name}' {what} '{before}': it begins at byte "
                f"{entry.start:,}, the last one ends at {at:,}."
            )
        at, before = at + entry.nbytes, name
    if at > size:
        raise ValueError(
            f"{file} is cut short: it has {size:,} bytes, its header speaks of {at:,}. Download or copy it again."
        )
    if at < size:
        raise ValueError(
            f"{file} has {size - at:,} bytes more than the {at:,} that its header speaks of: it is broken, or was "
            "written over a longer one. Download or copy it again."
        )


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a key that stands twice, or that no file can hold, is an error."""
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"'{twice[:80]}' stands twice.")
    for name in found:
        name.encode("utf-8")  # a lone surrogate is an error here, not when it is printed
    return found
