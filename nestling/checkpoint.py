"""A Hugging Face checkpoint folder in and out: config.json, safetensors shards, and what lies beside them.

Reading the headers alone needs neither torch nor a model class. Writing goes to a folder beside the destination that
is renamed when it is complete and on the disk, so a folder that exists is whole. Pickles are never opened, and no
name in a stranger's folder leads out of it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestling.shards import SHARD_BYTES, Entry, read_header, shard_name, unique

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = shard_name(0, 1)
TORCH = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}  # what trained weights come in
TEMPLATES = "additional_chat_templates"  # the one folder among the sidecars
FOREIGN = "consolidated"  # beginning of the names of shards in Mistral's own format, which lie beside the usual ones
WEIGHTS = {
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".gguf", ".h5", ".msgpack", ".onnx", ".npz",
}  # fmt: skip
# Written anew by whoever cuts the weights.
REWRITTEN = {"config.json", "nest.json", "README.md", "hf_quant_config.json"}

# A folder that we write has one of them.
OURS = ("config.json", INDEX, "scores.json", "report.html", "heldout.jsonl", "policies.json")


class Checkpoint:
    """A folder with config.json and safetensors weights, opened for reading."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not (self.folder / "config.json").is_file():
            raise ValueError(f"'{folder}' has no config.json: expected the folder of a Hugging Face checkpoint.")
        self.config: dict[str, Any] = read_json(self.folder / "config.json")

    @cached_property
    def entries(self) -> dict[str, Entry]:
        """Every tensor in the folder, from the headers alone; an error if the folder is not whole."""
        entries: dict[str, Entry] = {}
        for file in (*self._listed_files, *self._unlisted_files):
            for tensor, entry in read_header(file).items():
                if tensor in entries:
                    raise ValueError(
                        f"tensor '{tensor}' stands in two shards of '{self.folder}': {entries[tensor].file.name} and "
                        f"{file.name}. Which of them counts depends on the loader: move the stale one away."
                    )
                entries[tensor] = entry
        lost = sorted(self.weight_map.keys() - entries.keys())
        if lost:
            raise ValueError(
                f"{INDEX} of '{self.folder}' lists {len(lost)} tensors that no shard holds: {', '.join(lost[:5])}."
            )
        for tensor, name in self.weight_map.items():
            if entries[tensor].file.name != name:
                raise ValueError(
                    f"{INDEX} of '{self.folder}' says that '{tensor}' is in {name}, but it is in "
                    f"{entries[tensor].file.name}. Copy or download the folder again."
                )
        return entries

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """Tensor -> shard, as the index says; empty if there is no index."""
        file = self.folder / INDEX
        if not file.is_file():
            return {}
        told = read_json(file).get("weight_map")
        if not isinstance(told, dict) or not all(isinstance(name, str) for name in told.values()):
            raise ValueError(f"{file} has no weight_map from tensors to shards: it is broken. Copy it again.")
        for name in sorted(set(told.values())):
            if name != Path(name).name or "\\" in name or "\0" in name or not name.endswith(".safetensors"):
                raise ValueError(
                    f"{file} names shard '{name[:80]}': expected the plain name of a .safetensors file in the folder."
                )
        return told

    @cached_property
    def notes(self) -> list[str]:
        """What a person should know of the folder: tensors and shards that its index does not list."""
        notes = []
        for file in self._unlisted_files:
            held = sum(entry.file == file for entry in self.entries.values())
            notes.append(f"{file.name} holds {held} tensors and is not listed in {INDEX}: they are read all the same.")
        omitted = sum(
            tensor not in self.weight_map and entry.file in self._listed_files for tensor, entry in self.entries.items()
        )
        if self.weight_map and omitted:
            notes.append(f"{INDEX} omits {omitted} tensors that its shards hold: they are read all the same.")
        return notes

    @cached_property
    def _listed_files(self) -> list[Path]:
        names = sorted(set(self.weight_map.values()))
        if not (self.folder / INDEX).is_file():
            if not (self.folder / SINGLE).is_file():
                raise ValueError(f"'{self.folder}' has neither {SINGLE} nor {INDEX}. Nestling reads safetensors only.")
            names = [SINGLE]
        absent = [name for name in names if not (self.folder / name).is_file()]
        if absent:
            raise ValueError(f"{INDEX} names shards that are not in '{self.folder}': {', '.join(absent)}.")
        return [self.folder / name for name in names]

    @cached_property
    def _unlisted_files(self) -> list[Path]:
        """Shards that the index does not list: a head for multi-token prediction, or leftovers."""
        files = sorted(self.folder.glob("*.safetensors"))
        return [f for f in files if f.is_file() and f not in self._listed_files and not f.name.startswith(FOREIGN)]

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
        by_file: dict[Path, list[str]] = {}
        for name, entry in self.entries.items():
            by_file.setdefault(entry.file, []).append(name)
        for file in sorted(by_file):
            with file.open("rb") as stream:
                for name in sorted(by_file[file]):
                    entry = self.entries[name]
                    stream.seek(entry.start)
                    digest.update(f"{name}{list(entry.shape)}".encode() + stream.read(min(256, entry.nbytes)))
        return digest.hexdigest()[:16]


class Writer:
    """Collects tensors and writes them as shards of at most `shard_bytes`, then the index."""

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
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
        weight_map: dict[str, str] = {}
        for i, (file, names, _) in enumerate(self._shards):
            final = shard_name(i, len(self._shards))
            file.rename(self.folder / final)
            weight_map |= dict.fromkeys(names, final)
        write_index(self.folder, weight_map, sum(size for _, _, size in self._shards))

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._pending:
            return
        file = self.folder / f"shard-{len(self._shards)}.part"
        save_file(self._pending, file, metadata={"format": "pt"})
        self._shards.append((file, list(self._pending), self._pending_bytes))
        self._pending, self._pending_bytes = {}, 0


def write_index(folder: Path, weight_map: Mapping[str, str], nbytes: int) -> None:
    """Write the index of shards that hold `nbytes` of data; a single file has none."""
    if set(weight_map.values()) != {SINGLE}:
        write_json(folder / INDEX, {"metadata": {"total_size": nbytes}, "weight_map": dict(weight_map)})


@contextmanager
def new_folder(to: str | Path, *, overwrite: bool = False, source: Path | None = None) -> Iterator[Path]:
    """A folder to write into, beside `to`; on the disk and renamed to `to` at the end, removed if anything goes wrong.

    source: the folder that is read meanwhile; nothing of it is replaced. A process that is killed leaves the folder
    beside, whose name begins with a dot and ends in .part.
    """
    to = Path(to)
    check_destination(to, overwrite=overwrite, source=source)
    to.parent.mkdir(parents=True, exist_ok=True)
    to = to.absolute() if to.name else to.resolve()  # "." has no name to make others from
    part, old = (to.with_name(f".{to.name}.{os.getpid()}.{end}") for end in ("part", "old"))
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        yield part
        _to_disk(part)
        if to.exists():
            to.rename(old)
        try:
            part.rename(to)
        except BaseException:
            if old.exists():
                old.rename(to)
            raise
    except BaseException as error:
        shutil.rmtree(part, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(
                error.errno,
                f"no room left on the disk of '{to}': what was written has been removed. Free some space (also "
                f"folders named .NAME.part that a killed run left there), or choose another disk",
            ) from error
        raise
    sync(to.parent)
    if old.is_dir() and not old.is_symlink():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.unlink(missing_ok=True)


def check_destination(to: Path, *, overwrite: bool = False, source: Path | None = None) -> None:
    """Refuse to write over what exists unless told, and over what is read even then."""
    if source is not None:
        here, there = to.resolve(), source.resolve()
        if here == there:
            raise ValueError(f"'{to}' is the folder that is read: nothing is written in place. Choose another folder.")
        if there.is_relative_to(here):
            raise ValueError(f"'{to}' contains '{source}', which is read. Choose another folder.")
        if here.is_relative_to(there) and to.exists():
            raise ValueError(f"'{to}' is part of '{source}', which is read. Choose another folder.")
    check_free(to, overwrite=overwrite)
    if to.is_dir() and any(to.iterdir()) and not any((to / name).is_file() for name in OURS):
        raise ValueError(
            f"'{to}' does not look like a folder that Nestling wrote (it has none of {', '.join(OURS)}), so it is not "
            "replaced. Choose another folder, or delete it yourself."
        )
    if to.exists() and not to.is_dir():
        raise ValueError(f"'{to}' is a file, and a folder is to be written. Choose another place.")


def check_free(to: Path, *, overwrite: bool = False) -> None:
    """Refuse a place where nothing can be made, and to write over what exists unless told."""
    above = next((folder for folder in to.absolute().parents if folder.exists()), to)
    if above != to and not above.is_dir():
        raise ValueError(f"'{above}' is a file, so '{to}' cannot be made in it. Choose another place.")
    if to.is_symlink() and not to.exists():
        raise ValueError(
            f"'{to}' is a link to '{to.readlink()}', which is not there. Choose another place, or delete it."
        )
    if to.exists() and not overwrite:
        raise ValueError(f"'{to}' exists. Choose another place, or pass --overwrite to replace it.")


def copy_sidecars(source: Path, to: Path) -> list[str]:
    """Copy what lies beside the weights: tokenizer, chat template, generation config, license. Returns the names.

    Weights, their index and the descriptions in REWRITTEN are left to whoever cuts the weights. A symbolic link that
    leads out of the folder is refused: what it shows may be private. The hub's cache is made of such links, to files
    that it keeps by their digest; these are copied.
    """
    copied = []
    for file in sidecars(source):
        if file.is_symlink() or file.parent.is_symlink():
            _check_link(file, source)
        copy = to / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
        copied.append(file.relative_to(source).parts[0])
    return list(dict.fromkeys(copied))


def sidecars(folder: Path) -> list[Path]:
    """The files beside a folder's weights that belong to a model."""
    files = [
        file
        for file in sorted(folder.iterdir())
        if file.is_file()
        and file.suffix not in WEIGHTS
        and not file.name.endswith(".index.json")
        and file.name not in REWRITTEN
        and not file.name.startswith(".")
    ]
    templates = sorted((folder / TEMPLATES).iterdir()) if (folder / TEMPLATES).is_dir() else []
    return files + [file for file in templates if file.is_file()]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; an error that names the file."""
    try:
        value = json.loads(file.read_text("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{file} holds a {type(value).__name__}, expected an object.")
    return value


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON object, indented, for people to read."""
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")


def _check_link(file: Path, folder: Path) -> None:
    target, root = file.resolve(), folder.resolve()
    # models--owner--name/snapshots/revision/file -> models--owner--name/blobs/digest
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if target.is_relative_to(root) or (blobs is not None and target.parent == blobs):
        return
    raise ValueError(
        f"'{file}' is a symbolic link that leaves the folder, to '{target}': it is not copied. Replace the link by the "
        "file if it belongs to the model, or delete it."
    )


def _to_disk(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for at, _, files in os.walk(folder):
        for name in files:
            sync(Path(at) / name)
        sync(Path(at))


def sync(path: Path) -> None:
    """Wait until a file, or the list of a folder's files, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
