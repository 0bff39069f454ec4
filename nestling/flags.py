"""Flags of the command line made from settings: one frozen dataclass a verb is the one place for a name, a default and
its line of help, which is the comment behind the field. `--recipe FILE.toml` gives the same fields from a file.

Nothing heavy is imported here, so a verb that needs no torch can read its flags without it.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import inspect as python_inspect
import math
import tomllib
import types
import typing
from pathlib import Path
from typing import Any


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, help="folder to write")
    parser.add_argument("--overwrite", action="store_true", help="replace the folder if it exists")


def add_settings(parser: argparse.ArgumentParser, *classes: type) -> None:
    """A flag for every field, and --recipe for a file with the same fields."""
    parser.add_argument("--recipe", default="", help="TOML file with the same settings; flags override it")
    for cls in classes:
        for field in dataclasses.fields(cls):
            add_field(parser, cls, field.name)


def add_field(parser: argparse.ArgumentParser, cls: type, name: str, *, prefix: str = "") -> None:
    """A flag for one field. prefix: goes before its name, where another class has a field of that name."""
    (field,) = (f for f in dataclasses.fields(cls) if f.name == name)
    kind = _kinds(cls)[name]
    line = help_lines(cls).get(name, "")
    has_default = field.default is not dataclasses.MISSING
    line += f" (default: {_show(field.default)})" if has_default and field.default not in ("", (), None) else ""
    options: dict[str, Any] = {"default": None, "help": line.replace("%", "%%"), "dest": prefix + name}
    flag = "--" + (prefix + name).replace("_", "-")
    if kind is bool:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    elif typing.get_origin(kind) is tuple:
        parser.add_argument(flag, action="append", metavar=name.upper(), **options)
    else:
        parser.add_argument(flag, type=_int if kind is int else kind, metavar=name.upper(), **options)


def settings_of(given: argparse.Namespace, cls: type, told: dict[str, Any] | None = None) -> Any:
    """The settings of one dataclass: its defaults, under the recipe's values, under the flags."""
    told = (read_recipe(given, cls) if getattr(given, "recipe", "") else {}) if told is None else told
    names = {field.name for field in dataclasses.fields(cls)}
    values = {k: v for k, v in told.items() if k in names}
    values |= {k: v for k, v in vars(given).items() if k in names and v is not None}
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    missing = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in values]
    if missing:
        raise ValueError(f"not given: {', '.join('--' + name.replace('_', '-') for name in missing)}.")
    return cls(**values)


def read_recipe(given: argparse.Namespace, *classes: type) -> dict[str, Any]:
    if not given.recipe:
        return {}
    if not Path(given.recipe).is_file():
        raise ValueError(f"recipe '{given.recipe}' is not a file; expected TOML with the names of the settings.")
    try:
        told = tomllib.loads(Path(given.recipe).read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe '{given.recipe}' is not TOML: {error}.") from error
    fields = {name: kind for cls in classes for name, kind in _kinds(cls).items()}
    for name, value in told.items():
        if name not in fields:
            raise ValueError(
                f"{given.recipe} sets '{name}', which is not a setting. Known: {', '.join(sorted(fields))}."
            )
        told[name] = _told(value, fields[name], f"{given.recipe}: {name} = {value!r}")
    return told


def _kinds(cls: type) -> dict[str, Any]:
    """What each field takes; one that may be None takes what it is when it is set."""
    hints = typing.get_type_hints(cls)
    kinds = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for name, kind in kinds.items():
        if isinstance(kind, types.UnionType):
            (kinds[name],) = (one for one in typing.get_args(kind) if one is not types.NoneType)
    return kinds


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
def help_lines(cls: type) -> dict[str, str]:
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
