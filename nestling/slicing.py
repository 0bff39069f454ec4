"""The verbs `slice` and `verify` of the command line: which member, where to, and what is printed."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nestling.nest import Member, Nest

GGUF_FORMATS = {"f32": "fp32", "f16": "bf16", "bf16": "bf16"}  # what one is counted as by --fit
GIVEN = "a member's name, --sizes or --fit"


def slice_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nestling slice`."""
    parser.add_argument("nest")
    parser.add_argument("member", nargs="?", default="", help="name of a member")
    parser.add_argument("--sizes", default="", help="sizes instead of a name, such as hidden=1920,effn=960")
    parser.add_argument("--fit", default="", help="the largest trained member that fits, such as 16GiB")
    parser.add_argument(
        "--format",
        default="",
        help="gguf: one file for llama.cpp; with --fit: what weights are held in (default: as stored)",
    )
    parser.add_argument("--gguf-type", default="", help="of its matrices: f32, f16, bf16 or q8_0 (default: bf16)")
    parser.add_argument("--context", type=int, default=None, help="with --fit: tokens in one sequence (default: 0)")
    parser.add_argument("--batch", type=int, default=None, help="with --fit: sequences at once (default: 1)")
    parser.add_argument("--per-layer", default="", help="refused: no stock config has sizes that differ by layer")
    parser.add_argument("--to", default="", help="folder to write, or a .gguf file")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--shard-size", default="", help="most bytes in one file (default: 5GB)")
    parser.add_argument("--check-finite", action="store_true", help="refuse infinities and NaN in what is kept")
    parser.add_argument("--drop", default="", help="prefix of tensors to leave out knowingly, such as mtp")


def slice_verb(given: argparse.Namespace) -> None:
    """Cut a member out of a nest."""
    from nestling.cost import parse_bytes
    from nestling.nest import open_nest
    from nestling.shards import SHARD_BYTES
    from nestling.slice import describe
    from nestling.slice import slice as cut_member

    if not given.to and not given.dry_run:
        raise ValueError("the following arguments are required: --to")
    _check_request(given)
    nest = open_nest(given.nest)
    member = _member(given, nest)
    shard_bytes = parse_bytes(given.shard_size) if given.shard_size else SHARD_BYTES
    where = f", in {given.to}" if not given.dry_run else ""
    if given.format == "gguf":
        where = f", in {_write_gguf(given, nest, member)}"
    elif given.dry_run:
        for line in describe(nest, member, shard_bytes=shard_bytes, drop=given.drop):
            print(line)
    else:
        cut_member(
            nest, member, given.to, overwrite=given.overwrite, shard_bytes=shard_bytes,
            check_finite=given.check_finite, drop=given.drop, say=print,
        )  # fmt: skip
    cost = nest.cost(member)
    trained = "" if member.is_trained else " (untrained)"
    print(f"member {member.name}{trained}: {cost.parameters:,} parameters, {cost.active_parameters:,} active{where}")


def _write_gguf(given: argparse.Namespace, nest: Nest, member: Member) -> Path:
    from nestling.stored import notes
    from nestling.to_gguf import write_gguf

    for line in notes(nest, member):
        print(f"note: {line}")
    return write_gguf(
        nest, member, given.to, gguf_type=given.gguf_type or "bf16", overwrite=given.overwrite, drop=given.drop,
        say=lambda line: print(f"note: {line}"),
    )  # fmt: skip


def verify_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `nestling verify`."""
    parser.add_argument("folder")
    parser.add_argument(
        "--against", nargs=2, default=None, metavar=("NEST", "MEMBER"),
        help="also compare every value with a nest's member (its name, or sizes such as hidden=1920,effn=960)",
    )  # fmt: skip


def verify(given: argparse.Namespace) -> None:
    """Check a folder, alone or against a nest."""
    from nestling.choose import by_sizes
    from nestling.nest import open_nest
    from nestling.verify import check_against, check_folder

    for line in check_folder(given.folder):
        print(line)
    if given.against:
        nest = open_nest(given.against[0])
        name = given.against[1]
        member = by_sizes(nest, name) if "=" in name else nest.member(name)
        for line in check_against(given.folder, nest, member):
            print(line)
    print(f"{given.folder}: sound")


def _check_request(given: argparse.Namespace) -> None:
    """One way to say which member, and no flag without effect."""
    if given.per_layer:
        raise ValueError(
            "--per-layer: sizes that differ by layer are refused. config.json has one number for each axis, and no "
            "stock class of these architectures reads a list: the folder could not be loaded. Give one size for all "
            "layers with --sizes, or fewer layers with --sizes layer=N."
        )
    ways = [way for way in (given.member, given.sizes, given.fit) if way]
    if len(ways) != 1:
        raise ValueError(f"which member? Expected {GIVEN}, and one of them; given: {', '.join(ways) or 'none'}.")
    is_gguf = given.format == "gguf"
    idle = [flag for flag in ("format", "context", "batch") if getattr(given, flag) not in ("", None)]
    idle = [flag for flag in idle if not (flag == "format" and is_gguf)]
    if idle and not given.fit:
        raise ValueError(f"--{idle[0]} has no effect without --fit.")
    if given.gguf_type and not is_gguf:
        raise ValueError("--gguf-type has no effect without --format gguf.")
    lost = [flag for flag in ("dry_run", "shard_size", "check_finite") if is_gguf and getattr(given, flag)]
    if lost:
        raise ValueError(f"--{lost[0].replace('_', '-')} has no effect with --format gguf.")
    if is_gguf and given.fit and given.gguf_type not in ("", *GGUF_FORMATS):
        raise ValueError(
            f"--fit cannot count weights in {given.gguf_type}: expected {', '.join(GGUF_FORMATS)}, or a member's name."
        )


def _member(given: argparse.Namespace, nest: Nest) -> Member:
    from nestling.choose import AS_STORED, Room, arithmetic, by_fit, by_sizes
    from nestling.cost import parse_bytes

    if given.member:
        return nest.member(given.member)
    if given.sizes:
        return by_sizes(nest, given.sizes)
    is_gguf = given.format == "gguf"
    room = Room(
        nbytes=parse_bytes(given.fit), context=given.context or 0,
        weight_format=GGUF_FORMATS[given.gguf_type or "bf16"] if is_gguf else given.format or AS_STORED,
        batch=1 if given.batch is None else given.batch,
    )  # fmt: skip
    member = by_fit(nest, room)
    print(arithmetic(nest, [one for one in nest.members.values() if one.is_trained], room))
    return member
