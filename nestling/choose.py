"""Which member: by its name, by sizes that a person gives, or the largest that fits into a memory.

Only trained members are chosen by what fits: how good an untrained size is nobody knows before it is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nestling.axes import dims
from nestling.cost import FORMATS, GIB, memory
from nestling.nest import Member, Nest, check_sizes, parse_sizes, prefix
from nestling.shards import BYTES
from nestling.text import columns

AS_STORED = "as stored"  # a weight format: each tensor in the type that its file has


@dataclass(frozen=True, kw_only=True)
class Room:
    """A memory that a member has to fit into, and what it will be used for."""

    nbytes: int
    weight_format: str = "bf16"  # or AS_STORED: nothing is converted when it is loaded
    context: int = 0  # tokens in the caches of one sequence
    batch: int = 1  # sequences at once


def by_sizes(nest: Nest, text: str) -> Member:
    """The member with these sizes, such as "hidden=1920,effn=960"; one that the nest does not have is untrained."""
    sizes = check_sizes(nest.layout, nest.config, parse_sizes(text), who=f"--sizes {text}")
    kept = {axis: n for axis, n in sizes.items() if n != nest.layout.sizes[axis]}
    for member in nest.members.values():
        if {axis: n for axis, n in member.sizes.items() if n != nest.layout.sizes[axis]} == kept:
            return member
    return Member(name="-".join(f"{axis}{n}" for axis, n in kept.items()), sizes=kept)


def by_fit(nest: Nest, room: Room) -> Member:
    """The largest trained member whose weights and caches fit."""
    check_room(room)
    trained = [member for member in nest.members.values() if member.is_trained]
    if not trained:
        raise ValueError(f"no member of '{nest.folder}' is trained: give --sizes, or a member's name.")
    needs = {member.name: needed(nest, member, room) for member in trained}
    fitting = [member for member in trained if needs[member.name] <= room.nbytes]
    if not fitting:
        least = min(trained, key=lambda member: needs[member.name])
        raise ValueError(
            f"no trained member fits into {room.nbytes:,} bytes ({room.nbytes / GIB:.2f} GiB): the smallest, "
            f"{least.name}, needs {needs[least.name]:,} ({needs[least.name] / GIB:.2f} GiB). A shorter context, a "
            f"smaller batch or a format of fewer bits needs less.\n{arithmetic(nest, trained, room)}"
        )
    return max(fitting, key=lambda member: needs[member.name])


def needed(nest: Nest, member: Member, room: Room) -> int:
    """Bytes of a member's weights and caches."""
    cost, window = nest.cost(member), nest.config.get("sliding_window") or 0
    caches = memory(
        nest.layout, nest.sizes(member), weight_format="bf16", context=room.context, batch=room.batch, window=window,
        layers=nest.layers(member),
    ) - cost.bytes["bf16"]  # fmt: skip
    return _weight_bytes(nest, member, room) + int(caches)


def arithmetic(nest: Nest, members: list[Member], room: Room) -> str:
    """How much each member needs and of what, as a table for people."""
    weighed = AS_STORED if room.weight_format == AS_STORED else f"in {room.weight_format}"
    rows = [["member", f"weights {weighed}", "KV", "SSM and conv", "together", "GiB", "fits"]]
    for member in members:
        cost, total = nest.cost(member), needed(nest, member, room)
        weights = _weight_bytes(nest, member, room)
        states = (cost.ssm_bytes_per_sequence + cost.conv_bytes_per_sequence) * room.batch
        fits = "yes" if total <= room.nbytes else "no"
        rows.append(
            [member.name, *(f"{n:,}" for n in (weights, total - weights - states, states, total)),
             f"{total / GIB:.2f}", fits]
        )  # fmt: skip
    cost = nest.cost(members[0])
    window = f" (up to {cost.window:,} in sliding layers)" if cost.window else ""
    return (
        f"{columns(rows, left=(0, 6))}\n"
        f"room {room.nbytes:,} bytes; caches of {room.batch} x {room.context:,} tokens{window}, KV and conv in bf16, "
        "SSM in float32; activations and the engine's own memory come on top"
    )


def check_room(room: Room) -> None:
    """What a person said of the memory makes sense."""
    if room.weight_format not in (*FORMATS, AS_STORED):
        raise ValueError(f"--format {room.weight_format} is not one of {', '.join(FORMATS)}.")
    if room.nbytes < 1 or room.context < 0 or room.batch < 1:
        raise ValueError(
            f"--fit {room.nbytes} --context {room.context} --batch {room.batch}: expected at least one byte, no "
            "negative context, and at least one sequence."
        )


def _weight_bytes(nest: Nest, member: Member, room: Room) -> int:
    if room.weight_format != AS_STORED:
        return nest.cost(member).bytes[room.weight_format]
    sizes, entries = nest.layout.sizes | prefix(member), nest.checkpoint.entries
    return sum(
        math.prod(dims(place.shape, sizes)) * BYTES[entries[place.source].dtype] for place in nest.places(member)
    )
