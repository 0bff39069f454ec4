"""Cut a member out of a nest as a plain checkpoint, from file to file, one tensor at a time.

A member is exactly the units that its sizes name: nothing is tuned, converted or averaged. The result has the
parent's names and layout, so stock loaders read it, and every tensor keeps its own dtype.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from nestling.axes import take
from nestling.checkpoint import Checkpoint, Writer, copy_sidecars, new_folder, write_json
from nestling.nest import Member, Nest, open_nest


def slice(nest: Nest, member: Member, to: str | Path, *, overwrite: bool = False) -> Path:
    """Write `member` as a checkpoint of its own, with tokenizer, chat template and generation config. Returns the
    folder."""
    with new_folder(to, overwrite=overwrite, source=nest.folder) as folder:
        writer = Writer(folder)
        for name, tensor in cut(nest, member):
            writer.add(name, tensor)
        writer.close()
        write_json(folder / "config.json", nest.member_config(member))
        copy_sidecars(nest.folder, folder)
        for name, described in nest.quantization(member)[1].items():
            write_json(folder / name, described)
        (folder / "README.md").write_text(_card(nest, member), "utf-8")
    open_nest(to).check_cover(Checkpoint(to).entries.keys())
    return Path(to)


def cut(nest: Nest, member: Member) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a member, by the names that they have in a model of its own."""
    checkpoint = Checkpoint(nest.folder)
    nest.check_cover(checkpoint.entries.keys())
    keep = {axis: size for axis, size in member.sizes.items() if axis != "layer"}
    places = nest.places(member)
    for warning in nest.check_scales(member, checkpoint.read):
        warnings.warn(warning, stacklevel=2)
    for place in places:
        yield place.name, take(checkpoint.read(place.source), place.shape, nest.layout.sizes, keep, units=place.units)


def _card(nest: Nest, member: Member) -> str:
    cost = nest.cost(member)
    sizes = (
        ", ".join(f"{axis} {size} of {nest.layout.sizes[axis]}" for axis, size in member.sizes.items()) or "everything"
    )
    trained = "trained together with the nest" if member.is_trained else "an untrained size: nothing was tuned for it"
    return (
        f"# Member {member.name} of a nest\n\n"
        f"Cut with `nestling slice` from nest {nest.fingerprint} (parent {nest.parent or 'unknown'}).\n\n"
        f"- keeps: {sizes} ({trained})\n"
        f"- parameters: {cost.parameters:,}, active for one token: {cost.active_parameters:,}\n"
        f"- weights in bf16: {cost.bytes['bf16']:,} bytes\n"
    )
