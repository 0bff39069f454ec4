"""The command line: a verb, the folder it reads, --to the folder it writes.

Flags come from the settings dataclasses, so there is one place for a name, a default and its line of help; `--recipe
FILE.toml` gives the same fields from a file. Exit code 2 for a bad request, 1 for a failure.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect as python_inspect
import json
import math
import sys
import tomllib
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nestling import slicing

WITHOUT_TORCH = {"inspect", "slice", "verify"}  # or only where they must: importing it costs seconds
Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]


EVALUATED = ("problems", "max_thinking", "heldout", "heldout_tokens", "heldout_length")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="nestling", description="Several language models in one checkpoint.")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    given = list(sys.argv[1:] if argv is None else argv)
    for name, (line, flags, _) in _verbs().items():
        verb = verbs.add_parser(name, help=line, description=line)
        # Only the verb at hand builds its flags: most of them import torch, `inspect` must not.
        if given[:1] == [name]:
            flags(verb)
    chosen = parser.parse_args(given)
    try:
        _check_to(chosen)
        if chosen.verb not in WITHOUT_TORCH:
            from nestling import hf

            hf.be_quiet()
        _verbs()[chosen.verb][2](chosen)
    except ValueError as error:
        print(f"nestling {chosen.verb}: {error}", file=sys.stderr)
        return 2
    except (RuntimeError, OSError, ImportError) as error:
        print(f"nestling {chosen.verb} failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"nestling {chosen.verb}: stopped", file=sys.stderr)
        return 1
    return 0


def _verbs() -> dict[str, Verb]:
    return {
        "inspect": ("axes, sizes, grain, members and costs of a checkpoint or nest", _inspect_flags, _inspect),
        "score": ("score every part of a parent on calibration data", _score_flags, _score),
        "sort": ("sort a parent's parts best first: a nest with one member", _sort_flags, _sort),
        "train": ("learn the members' sizes and distil all of them", _train_flags, _train),
        "slice": ("cut a member out as a plain checkpoint", slicing.slice_flags, slicing.slice_verb),
        "verify": ("check a checkpoint, also against the nest it was cut from", slicing.verify_flags, slicing.verify),
        "eval": ("measure every member of a nest", _eval_flags, _eval),
        "report": ("one HTML page with figures of a nest", _report_flags, _report),
        "build": ("score, sort, train, evaluate and report in one go", _build_flags, _build),
        "demo": ("build a nest from the reasoner that ships with the package", _demo_flags, _demo),
    }


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder")
    parser.add_argument("--json", action="store_true", help="for machines")


def _inspect(given: argparse.Namespace) -> None:
    from nestling.inspect import describe, inspect

    told = inspect(given.folder)
    print(json.dumps(told, indent=2) if given.json else describe(told))


def _score_flags(parser: argparse.ArgumentParser) -> None:
    from nestling.score import ScoreSettings

    parser.add_argument("parent")
    parser.add_argument("--data", required=True, help="JSONL files to calibrate on")
    _add_to(parser)
    _add_settings(parser, ScoreSettings)


def _score(given: argparse.Namespace) -> None:
    from nestling.score import ScoreSettings, score_folder

    settings = _settings(given, ScoreSettings)
    score_folder(
        settings, parent=Path(given.parent), data=given.data, to=Path(given.to), say=print, overwrite=given.overwrite
    )


def _sort_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parent")
    parser.add_argument("--scores", required=True, help="folder that `nestling score` wrote")
    parser.add_argument("--drop", default="", help="prefix of tensors to leave out knowingly, such as mtp")
    _add_to(parser)


def _sort(given: argparse.Namespace) -> None:
    from nestling.nest import open_nest
    from nestling.score import Scores
    from nestling.sort import sort

    scores, parent = Scores.load(Path(given.scores)), open_nest(given.parent)
    scores.check_fits(parent.layout, parent.fingerprint)
    nest = sort(given.parent, scores.orders(), given.to, overwrite=given.overwrite, drop=given.drop)
    print(f"sorted {len(nest.layout.tensors):,} tensors into {given.to}")


def _train_flags(parser: argparse.ArgumentParser) -> None:
    from nestling.train import TrainSettings

    parser.add_argument("nest")
    _add_to(parser)
    _add_settings(parser, TrainSettings)


def _train(given: argparse.Namespace) -> None:
    from nestling.train import TrainSettings, train

    nest = train(_settings(given, TrainSettings), given.nest, given.to, overwrite=given.overwrite)
    print(f"trained members {', '.join(nest.members)} into {given.to}")


def _eval_flags(parser: argparse.ArgumentParser) -> None:
    from nestling.build import BuildSettings
    from nestling.plan import TrainSettings

    parser.add_argument("nest")
    parser.add_argument(
        "--parent", default="", help="checkpoint that KL is measured to; the nest's full member if empty"
    )
    parser.add_argument("--to", default="", help="JSON file to write the results to")
    parser.add_argument("--overwrite", action="store_true", help="replace the file if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON, for machines")
    for name in EVALUATED:
        _add_field(parser, BuildSettings, name)
    for name in ("pack", "loss_on", "device"):
        _add_field(parser, TrainSettings, name)


def _eval(given: argparse.Namespace) -> None:
    from nestling.build import BuildSettings, evaluate_folder

    told = {k: v for k, v in vars(given).items() if v is not None}
    settings = BuildSettings(**{k: v for k, v in told.items() if k in EVALUATED})
    changed = {k: told[k] for k in ("pack", "loss_on", "device") if k in told}
    # Standard output is the JSON alone, so that a program can read it.
    say = (lambda line: print(line, file=sys.stderr)) if given.json else print
    nest, table = evaluate_folder(settings, given.nest, parent=given.parent or given.nest, say=say, **changed)
    results = {name: member.results for name, member in nest.members.items()}
    if given.to:
        Path(given.to).parent.mkdir(parents=True, exist_ok=True)
        Path(given.to).write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2) if given.json else table)


def _report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("nest")
    _add_to(parser)


def _report(given: argparse.Namespace) -> None:
    from nestling.report import report

    report(Path(given.nest), Path(given.to), say=print, overwrite=given.overwrite)


def _build_flags(parser: argparse.ArgumentParser) -> None:
    from nestling.build import BuildSettings
    from nestling.train import TrainSettings

    parser.add_argument("parent")
    _add_to(parser)
    _add_settings(parser, TrainSettings, BuildSettings)


def _build(given: argparse.Namespace) -> None:
    from nestling.build import BuildSettings, build, members_table
    from nestling.train import TrainSettings

    told = _recipe(given, TrainSettings, BuildSettings)
    settings, training = _settings(given, BuildSettings, told), _settings(given, TrainSettings, told)
    print(members_table(build(settings, training, given.parent, given.to, overwrite=given.overwrite)))


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=float, default=None, help="training tokens (default: the demo's own)")
    _add_to(parser)


def _demo(given: argparse.Namespace) -> None:
    from nestling.demo import demo

    demo(given.to, overwrite=given.overwrite, **({} if given.tokens is None else {"tokens": given.tokens}))


def _check_to(given: argparse.Namespace) -> None:
    """Refuse at the door to write over what exists, and always over what is read."""
    if not getattr(given, "to", ""):
        return
    to = Path(given.to)
    files = [part.rpartition("=")[0] or part for part in (getattr(given, "data", "") or "").split(",")]
    files += [part.partition("=")[2] for part in (getattr(given, "heldout", "") or "").split(",")]
    read = [getattr(given, name, "") for name in ("parent", "nest", "scores", "recipe")]
    for source in [*read, *files]:
        if source and Path(source).resolve().is_relative_to(to.resolve()):
            raise ValueError(f"--to '{to}' would replace '{source}', which is read. Choose another folder.")
    if to.exists() and not given.overwrite:
        raise ValueError(f"'{to}' exists. Choose another folder, or pass --overwrite to replace it.")


def _add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def _add_settings(parser: argparse.ArgumentParser, *classes: type) -> None:
    """A flag for every field, and --recipe for a file with the same fields."""
    parser.add_argument("--recipe", default="", help="TOML file with the same settings; flags override it")
    for cls in classes:
        for field in dataclasses.fields(cls):
            _add_field(parser, cls, field.name)


def _add_field(parser: argparse.ArgumentParser, cls: type, name: str) -> None:
    (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
    kind = typing.get_type_hints(cls)[name]
    line = _help_lines(cls).get(name, "")
    has_default = field.default is not dataclasses.MISSING
    line += f" (default: {_show(field.default)})" if has_default and field.default not in ("", ()) else ""
    options: dict[str, Any] = {"default": None, "help": line.replace("%", "%%"), "dest": name}
    flag = "--" + name.replace("_", "-")
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is tuple:
        parser.add_argument(flag, action="append", metavar=name.upper(), **options)
    else:
        parser.add_argument(flag, type=_int if kind is int else kind, metavar=name.upper(), **options)


def _settings(given: argparse.Namespace, cls: type, told: dict[str, Any] | None = None) -> Any:
    """The settings of one dataclass: its defaults, under the recipe's values, under the flags."""
    told = _recipe(given, cls) if told is None else told
    names = {field.name for field in dataclasses.fields(cls)}
    values = {k: v for k, v in told.items() if k in names}
    values |= {k: v for k, v in vars(given).items() if k in names and v is not None}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"not given: {', '.join('--' + name.replace('_', '-') for name in missing)}.")
    return cls(**values)


def _recipe(given: argparse.Namespace, *classes: type) -> dict[str, Any]:
    if not given.recipe:
        return {}
    if not Path(given.recipe).is_file():
        raise ValueError(f"recipe '{given.recipe}' is not a file; expected TOML with the names of the settings.")
    try:
        told = tomllib.loads(Path(given.recipe).read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe '{given.recipe}' is not TOML: {error}.") from error
    fields = {
        field.name: typing.get_type_hints(cls)[field.name] for cls in classes for field in dataclasses.fields(cls)
    }
    for name, value in told.items():
        if name not in fields:
            raise ValueError(
                f"{given.recipe} sets '{name}', which is not a setting. Known: {', '.join(sorted(fields))}."
            )
        told[name] = _told(value, fields[name], f"{given.recipe}: {name} = {value!r}")
    return told


def _told(value: Any, kind: Any, where: str) -> Any:
    """A recipe's value as its field takes it: whole numbers also as 4e6, as on the command line."""
    if kind is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if typing.get_origin(kind) is tuple:
        if isinstance(value, list) and all(isinstance(one, str) for one in value):
            return tuple(value)
        raise ValueError(f"{where} is not a list of strings.")
    if not isinstance(value, (float, int) if kind is float else kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where} is a {type(value).__name__}, expected {kind.__name__}.")
    return value


@functools.cache
def _help_lines(cls: type) -> dict[str, str]:
    """The comment behind every field of a dataclass: its line of help."""
    source = python_inspect.getsource(cls)
    lines = source.splitlines()
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    return {
        node.target.id: lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
        for node in body.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _int(text: str) -> int:
    """Whole numbers, also as 4e6."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number")
    return int(text) if text.isdigit() else int(number)  # a float would round a long seed


def _show(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
