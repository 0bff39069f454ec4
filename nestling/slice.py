"""Cut a member out of a nest as a plain checkpoint, from file to file, at about the speed of a copy.

A member is exactly the units that its sizes name: nothing is tuned, converted or averaged. The result has the
parent's names and layout, so stock loaders read it, and every tensor keeps its own dtype.

Headers say beforehand where each byte will stand, so nothing is collected: threads copy blocks of bounded size from
mapped files straight to their places. No model is built, and memory does not grow with the parent. The folder is
checked before it gets its name.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nestling.checkpoint import copy_sidecars, new_folder, sync, write_index, write_json
from nestling.cut import BLOCK, Maps, Span, first_not_finite, spans
from nestling.nest import Member, Nest
from nestling.shards import SHARD_BYTES, Shard, header_bytes, plan_shards
from nestling.stored import Stored, config_changes, notes, plan, stored_config
from nestling.text import duration
from nestling.verify import check_folder

if TYPE_CHECKING:
    import numpy as np

THREADS = min(4, os.cpu_count() or 1)
FLUSH = 256 * 1024**2  # bytes after which the disk is waited for, while the threads go on
SAMPLE_SECONDS = 0.5  # that a dry run reads for, to say how long the real one takes

Say = Callable[[str], None]


@dataclass
class Block:
    """Bytes that stand together in a shard, and where they come from."""

    file: Path
    offset: int
    spans: list[tuple[str, Span]] = field(default_factory=list)  # tensor, some of its rows
    nbytes: int = 0


def slice(
    nest: Nest,
    member: Member,
    to: str | Path,
    *,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
    check_finite: bool = False,
    drop: str = "",
    say: Say = lambda line: None,
) -> Path:
    """Write `member` as a checkpoint of its own, with tokenizer, chat template and generation config. Returns the
    folder.

    check_finite: refuse infinities and NaN among the values that are kept. drop: a prefix of tensor names to leave out
    knowingly.
    """
    work = plan(nest, member, drop=drop)
    for line in [*notes(nest, member), *nest.check_scales(member)]:
        say(f"note: {line}")
    shards = plan_shards(((one.place.name, one.entry) for one in work), shard_bytes)
    cuts = {one.place.name: one for one in work}
    with new_folder(to, overwrite=overwrite, source=nest.folder) as folder:
        _check_room(folder, sum(shard.nbytes for shard in shards), to)
        _write(shards, cuts, folder, check_finite=check_finite, say=say)
        index = {name: shard.name for shard in shards for name, _ in shard.tensors}
        write_index(folder, index, sum(shard.nbytes for shard in shards))
        copied = copy_sidecars(nest.folder, folder)
        for name, described in nest.quantization(member)[1].items():
            write_json(folder / name, described)
        (folder / "README.md").write_text(_card(nest, member, Path(to), work, drop), "utf-8")
        # Last: without it a folder that a killed run leaves behind is no checkpoint to any loader.
        write_json(folder / "config.json", stored_config(nest, member, drop=drop))
        check_folder(folder)
    say(f"carried along: {', '.join(copied) or 'nothing'}")
    return Path(to)


def describe(nest: Nest, member: Member, *, shard_bytes: int = SHARD_BYTES, drop: str = "") -> Iterator[str]:
    """What `slice` would do, line by line: every tensor's cut, the config's changes, bytes, and about how long."""
    work = plan(nest, member, drop=drop)
    shards = plan_shards(((one.place.name, one.entry) for one in work), shard_bytes)
    for one in work:
        source = f" from {one.place.source}" if one.place.source != one.place.name else ""
        before, after = ("[" + ", ".join(map(str, shape)) + "]" for shape in (one.source.shape, one.cut.shape))
        yield f"{one.place.name}{source}: {one.source.dtype} {before} -> {after}"
    yield ""
    changes = config_changes(nest, stored_config(nest, member, drop=drop))
    yield from (f"config.json: {line}" for line in changes or ["nothing changes"])
    yield from (f"note: {line}" for line in [*notes(nest, member), *nest.check_scales(member)])
    total = sum(shard.nbytes for shard in shards)
    yield f"{total:,} bytes of {nest.checkpoint.nbytes:,} in {len(work):,} tensors and {len(shards)} files"
    read, seconds = _sample(shards, {one.place.name: one for one in work})
    yield (
        f"about {duration(total / read * seconds)} to write: {read / 1024**2:,.0f} MiB were read and cut here in "
        f"{seconds:.1f} s by one thread. A slower disk to write to takes longer. Nothing was written."
    )


def _write(shards: Sequence[Shard], cuts: dict[str, Stored], folder: Path, *, check_finite: bool, say: Say) -> None:
    """Write every shard: header first, then its blocks by several threads."""
    maps, local = Maps(), threading.local()
    begun, total, done = time.monotonic(), sum(shard.nbytes for shard in shards), 0
    for entry in (one.source for one in cuts.values()):
        maps.map(entry.file)
    pool = ThreadPoolExecutor(THREADS)
    try:
        jobs: list[tuple[Shard, list[tuple[Block, Future]]]] = []
        for shard in shards:
            head = header_bytes(shard.tensors)
            (folder / shard.name).write_bytes(head)
            blocks = _blocks(shard, cuts, folder / shard.name, len(head))
            jobs.append((shard, [(b, pool.submit(_write_block, b, maps, local, check_finite)) for b in blocks]))
        for i, (shard, submitted) in enumerate(jobs, start=1):
            waiting = 0
            for block, future in submitted:
                future.result()
                done, waiting = done + block.nbytes, waiting + block.nbytes
                if waiting >= FLUSH:
                    sync(folder / shard.name)
                    waiting = 0
            sync(folder / shard.name)
            spent = time.monotonic() - begun
            left = f", {duration(spent * (total - done) / done)} left" if done and i < len(jobs) else ""
            say(f"file {i} of {len(jobs)}: {done:,} of {total:,} bytes in {duration(spent)}{left}")
    finally:
        pool.shutdown(cancel_futures=True)


def _blocks(shard: Shard, cuts: dict[str, Stored], file: Path, offset: int) -> Iterator[Block]:
    """A shard's data in blocks, small tensors together."""
    block = Block(file, offset)
    for name, entry in shard.tensors:
        for span in spans(entry, cuts[name].cut):
            if block.spans and block.nbytes + span.nbytes > BLOCK:
                yield block
                block = Block(file, block.offset + block.nbytes)
            block.spans.append((name, span))
            block.nbytes += span.nbytes
    if block.spans:
        yield block


def _write_block(block: Block, maps: Maps, local: Any, check_finite: bool) -> None:
    """Cut a block and write it to its place."""
    data = _cut_block(block, maps, local)
    if check_finite:
        _check_finite(block, data)
    handle = os.open(block.file, os.O_WRONLY)
    try:
        rest, offset = data.data, block.offset
        while rest:
            written = os.pwrite(handle, rest, offset)
            rest, offset = rest[written:], offset + written
    finally:
        os.close(handle)
    for _, span in block.spans:
        maps.advise(span, mmap.MADV_DONTNEED)


def _cut_block(block: Block, maps: Maps, local: Any) -> np.ndarray:
    """The bytes of a block: uint8 [bytes]. They live in the thread's own buffer, or in the mapped file."""
    import numpy as np

    for _, span in block.spans:
        maps.advise(span, mmap.MADV_WILLNEED)
    first = block.spans[0][1]
    if len(block.spans) == 1 and first.is_whole:
        return maps.values(first).reshape(-1)
    if not hasattr(local, "buffer") or len(local.buffer) < block.nbytes:
        local.buffer = np.empty(max(BLOCK, block.nbytes), np.uint8)
    at = 0
    for _, span in block.spans:
        maps.copy(span, local.buffer[at : at + span.nbytes])
        at += span.nbytes
    return local.buffer[:at]


def _check_finite(block: Block, data: np.ndarray) -> None:
    at = 0
    for name, span in block.spans:
        if first_not_finite(data[at : at + span.nbytes], span.source.dtype) is not None:
            raise ValueError(
                f"tensor '{name}' holds infinities or NaN among the values that are kept (cut from "
                f"{span.source.file}). Nothing was written. Download the file again, or leave --check-finite out."
            )
        at += span.nbytes


def _sample(shards: Sequence[Shard], cuts: dict[str, Stored]) -> tuple[int, float]:
    """Cut blocks into memory for a moment. Returns bytes and seconds."""
    maps, local = Maps(), threading.local()
    begun, read = time.perf_counter(), 0
    blocks = chain.from_iterable(_blocks(shard, cuts, Path(), 0) for shard in shards)
    for block in blocks:
        _cut_block(block, maps, local)[:: mmap.PAGESIZE].sum()  # touches every page, also of what is not copied
        read += block.nbytes
        if time.perf_counter() - begun > SAMPLE_SECONDS:
            break
    return max(read, 1), time.perf_counter() - begun


def _check_room(folder: Path, nbytes: int, to: str | Path) -> None:
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise ValueError(
            f"the slice has {nbytes:,} bytes, the disk of '{to}' has {free:,} left. Choose another disk, or a smaller "
            "member."
        )


def _card(nest: Nest, member: Member, to: Path, work: Sequence[Stored], drop: str) -> str:
    cost, sizes = nest.cost(member), member.sizes
    kept = ", ".join(f"{axis} {n} of {nest.layout.sizes[axis]}" for axis, n in sizes.items()) or "everything"
    trained = "trained together with the nest" if member.is_trained else "an untrained size: nothing was tuned for it"
    what = member.name if nest.members.get(member.name) == member else f"--sizes {_listed(sizes)}"
    flags = f" --drop {drop}" if drop else ""
    lines = [
        f"# Member {member.name} of a nest\n",
        f"Cut with `nestling slice` from nest {nest.fingerprint} (parent {nest.parent or 'unknown'}):\n",
        f"    nestling slice {nest.folder.resolve().name} {what} --to {to.name}{flags}\n",
        f"- keeps: {kept} ({trained})",
        *([f"- note: {member.note}"] if member.note else []),
        f"- parameters: {cost.parameters:,}, active for one token: {cost.active_parameters:,}",
        f"- weights as stored: {sum(one.entry.nbytes for one in work):,} bytes",
        "- every kept value is the nest's own, in its own dtype; nothing was converted",
        *(["- the head for multi-token prediction was left out"] if drop == "mtp" else []),
    ]
    return "\n".join(lines) + "\n"


def _listed(sizes: dict[str, int]) -> str:
    return ",".join(f"{axis}={n}" for axis, n in sizes.items())
