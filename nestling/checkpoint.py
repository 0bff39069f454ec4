"""A Hugging Face checkpoint folder in and out, one tensor at a time: config.json, safetensors shards, and what lies
beside them.

Reading the header alone needs neither torch nor a model class. Writing goes to a folder beside the destination that
is renamed when it is complete, so a folder that exists is whole. Pickles are never opened.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BYTES = {
    "F64": 8,
    "F32": 4,
    "I64": 8,
    "I32": 4,
    "BF16": 2,
    "F16": 2,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U8": 1,
    "I8": 1,
    "BOOL": 1,
}
TORCH = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # what trained weights come in
TEMPLATES = "additional_chat_templates"  # the one folder among the sidecars
HEADER_LIMIT = 100_000_000  # bytes, as the safetensors library itself


@dataclass(frozen=True)
class Entry:
    """What a shard's header says of one tensor."""

    file: Path
    dtype: str  # as safetensors spells it: "BF16"
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * BYTES[self.dtype]


class Checkpoint:
    """A folder with config.json and safetensors weights, opened for reading."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"'{folder}' has no config.json: expected the folder of a Hugging Face checkpoint.")
        self.config: dict[str, Any] = read_json(self.folder / "config.json")

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every tensor in the folder, from the headers alone."""
        if (self.folder / INDEX).is_file():
            listed: dict[str, str] = read_json(self.folder / INDEX)["weight_map"]
            files = sorted(set(listed.values()))
        elif (self.folder / SINGLE).is_file():
            listed, files = {}, [SINGLE]
        else:
            raise ValueError(f"'{self.folder}' has neither {SINGLE} nor {INDEX}. Nestling reads safetensors only.")
        absent = [name for name in files if not (self.folder / name).is_file()]
        if absent:
            raise ValueError(f"{INDEX} names shards that are not in '{self.folder}': {', '.join(absent)}.")
        entries: dict[str, Entry] = {}
        for name in files:
            for tensor, entry in _read_header(self.folder / name).items():
                if tensor in entries:
                    raise ValueError(f"tensor '{tensor}' stands in two shards: {entries[tensor].file.name} and {name}.")
                entries[tensor] = entry
        lost = sorted(listed.keys() - entries.keys())
        if lost:
            raise ValueError(f"{INDEX} lists {len(lost)} tensors that no shard holds: {', '.join(lost[:5])}.")
        return entries

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all weights on disk."""
        return sum(entry.nbytes for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """One tensor, as stored."""
        from safetensors import safe_open

        if self.entries[name].file not in self._files:
            self._files[self.entries[name].file] = safe_open(self.entries[name].file, framework="pt")
        return self._files[self.entries[name].file].get_tensor(name)

    @cached_property
    def _files(self) -> dict[Path, Any]:
        return {}

    def fingerprint(self) -> str:
        """A short digest of config and headers and of the first bytes of every tensor: tells one checkpoint from
        another."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for file in sorted({entry.file for entry in self.entries.values()}):
            with file.open("rb") as stream:
                (length,) = struct.unpack("<Q", stream.read(8))
                header = json.loads(stream.read(length))
                for name in sorted(header.keys() - {"__metadata__"}):
                    start, end = header[name]["data_offsets"]
                    stream.seek(8 + length + start)
                    digest.update(f"{name}{header[name]['shape']}".encode() + stream.read(min(256, end - start)))
        return digest.hexdigest()[:16]


class Writer:
    """Collects tensors and writes them as shards of at most `shard_bytes`, then the index."""

    def __init__(self, folder: Path, *, shard_bytes: int = 5_000_000_000) -> None:
        self.folder = folder
        self._limit = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str], int]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Keep one tensor for the current shard, which is written when full."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.contiguous().clone() if tensor._is_view() else tensor.contiguous()
        self._pending_bytes += size

    def close(self) -> None:
        """Write what is left, name the shards n-of-m and write the index."""
        self._flush()
        if len(self._shards) == 1:
            self._shards[0][0].rename(self.folder / SINGLE)
            return
        weight_map = {}
        for i, (file, names, _) in enumerate(self._shards, start=1):
            final = f"model-{i:05d}-of-{len(self._shards):05d}.safetensors"
            file.rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        total = sum(size for _, _, size in self._shards)
        write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending:
            return
        file = self.folder / f"shard-{len(self._shards)}.part"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._shards.append((file, list(self._pending), self._pending_bytes))
        self._pending, self._pending_bytes = {}, 0


@contextmanager
def new_folder(to: str | Path, *, overwrite: bool = False, source: Path | None = None) -> Iterator[Path]:
    """A folder to write into, beside `to`; renamed to `to` at the end, removed if anything goes wrong.

    source: the folder that is read meanwhile; it cannot be the one that is replaced.
    """
    to = Path(to)
    if source is not None and to.resolve() == source.resolve():
        raise ValueError(f"'{to}' is the folder that is read: nothing is written in place. Choose another folder.")
    if to.exists() and not overwrite:
        raise ValueError(f"'{to}' exists. Choose another folder, or pass --overwrite to replace it.")
    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(f".{to.name}.{os.getpid()}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    if to.exists():
        shutil.rmtree(to)
    part.rename(to)


def copy_sidecars(source: Path, to: Path) -> list[str]:
    """Copy what lies beside the weights: tokenizer, chat template, generation config, license. Returns the names.

    Weights, their index and config.json are written anew by whoever cuts the weights.
    """
    copied = []
    for file in sorted(source.iterdir()):
        is_weights = file.suffix in {".safetensors", ".bin", ".pt", ".pth", ".gguf"} or file.name.endswith(
            ".index.json"
        )
        if not file.is_file() or is_weights or file.name in {"config.json", "nest.json", "README.md"}:
            continue
        shutil.copyfile(file, to / file.name)
        copied.append(file.name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, to / TEMPLATES)
        copied.append(TEMPLATES)
    return copied


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; an error that names the file."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, expected an object.")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, for people to read."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _read_header(file: Path) -> dict[str, Entry]:
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT + 1
        if length > min(HEADER_LIMIT, file.stat().st_size - 8):
            raise ValueError(f"{file} is not a safetensors file, or is cut short: its header says {length} bytes.")
        try:
            header = json.loads(stream.read(length))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} has a broken safetensors header: {error}") from error
    end = max((tensor["data_offsets"][1] for name, tensor in header.items() if name != "__metadata__"), default=0)
    if 8 + length + end > file.stat().st_size:
        raise ValueError(
            f"{file} is cut short: it has {file.stat().st_size:,} bytes, its header speaks of {8 + length + end:,}. "
            "Download or copy it again."
        )
    return {
        name: Entry(file, tensor["dtype"], tuple(tensor["shape"]))
        for name, tensor in header.items()
        if name != "__metadata__"
    }
