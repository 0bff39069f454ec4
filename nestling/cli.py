"""The command line: a verb, the folder it reads, --to the folder it writes.

Flags come from the settings dataclasses (nestling/flags.py). Exit code 2 for a bad request, 1 for a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nestling import running, slicing
from nestling.checkpoint import check_free
from nestling.flags import add_field, add_settings, add_to, read_recipe, settings_of
from nestling.policies.settings import PolicySettings

WITHOUT_TORCH = {"inspect", "slice", "verify", "generate", "chat", "serve"}  # or only where they must: it costs
Verb = tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]


TRAINED = ("pack", "loss_on", "device")
POLICIES = ("budgets", "max_answer", "rows", "timed", "handover_problems", "replays")
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
        sys.stdout.flush()
    except ValueError as error:
        print(f"nestling {chosen.verb}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read the lines, such as `head`, has seen enough. What is left in the buffer must go somewhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if getattr(chosen, "to", ""):
            print(f"nestling {chosen.verb}: stopped, because what reads its lines has ended", file=sys.stderr)
        return 1
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
        "generate": (
            "ask one question: a member thinks, a member answers",
            running.generate_flags,
            running.generate_verb,
        ),
        "chat": ("talk in the terminal, and change who thinks and answers", running.chat_flags, running.chat_verb),
        "serve": (
            "answer OpenAI's requests, over a nest or over other engines",
            running.serve_flags,
            running.serve_verb,
        ),
    }


def _inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--resident", action="store_true", help="load every member, and say what is shared and copied")


def _inspect(given: argparse.Namespace) -> None:
    from nestling.inspect import describe, inspect

    told = inspect(given.folder)
    if given.resident:
        from nestling import hf
        from nestling.engine import resident

        hf.be_quiet()
        held = resident.resident(given.folder)
        print(json.dumps(told | {"resident": held}, indent=2) if given.json else resident.describe(held))
        return
    print(json.dumps(told, indent=2) if given.json else describe(told))


def _score_flags(parser: argparse.ArgumentParser) -> None:
    from nestling.score import ScoreSettings

    parser.add_argument("parent")
    parser.add_argument("--data", required=True, help="JSONL files to calibrate on")
    add_to(parser)
    add_settings(parser, ScoreSettings)


def _score(given: argparse.Namespace) -> None:
    from nestling.score import ScoreSettings, score_folder

    settings = settings_of(given, ScoreSettings)
    score_folder(
        settings, parent=Path(given.parent), data=given.data, to=Path(given.to), say=print, overwrite=given.overwrite
    )


def _sort_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("parent")
    parser.add_argument("--scores", required=True, help="folder that `nestling score` wrote")
    parser.add_argument("--drop", default="", help="prefix of tensors to leave out knowingly, such as mtp")
    add_to(parser)


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
    add_to(parser)
    add_settings(parser, TrainSettings)


def _train(given: argparse.Namespace) -> None:
    from nestling.train import TrainSettings, train

    nest = train(settings_of(given, TrainSettings), given.nest, given.to, overwrite=given.overwrite)
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
        add_field(parser, BuildSettings, name)
    for name in TRAINED:
        add_field(parser, TrainSettings, name)
    parser.add_argument(
        "--policies", action="store_true", help="measure who should think and who answer instead; --to is a folder then"
    )
    for name in POLICIES:
        add_field(parser, PolicySettings, name)


def _eval_policies(given: argparse.Namespace) -> None:
    from nestling.policies.page import evaluate_policies

    if not given.to:
        raise ValueError("--policies needs --to: the folder for the table, the figure and the numbers.")
    settings = settings_of(given, PolicySettings)
    say = (lambda line: print(line, file=sys.stderr)) if given.json else print
    page = evaluate_policies(settings, given.nest, given.to, say=say, overwrite=given.overwrite)
    print((Path(given.to) / "policies.json").read_text("utf-8") if given.json else page)


def _eval(given: argparse.Namespace) -> None:
    shared = {"problems", "max_thinking"}
    idle = {*EVALUATED, *TRAINED, "parent"} - shared if given.policies else set(POLICIES)
    for name in sorted(idle):
        if getattr(given, name) not in (None, ""):
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} has no effect {'with' if given.policies else 'without'} --policies.")
    if given.policies:
        return _eval_policies(given)
    from nestling.build import BuildSettings, evaluate_folder

    told = {k: v for k, v in vars(given).items() if v is not None}
    settings = BuildSettings(**{k: v for k, v in told.items() if k in EVALUATED})
    changed = {k: told[k] for k in TRAINED if k in told}
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
    add_to(parser)


def _report(given: argparse.Namespace) -> None:
    from nestling.report import report

    report(Path(given.nest), Path(given.to), say=print, overwrite=given.overwrite)


def _build_flags(parser: argparse.ArgumentParser) -> None:
    from nestling.build import BuildSettings
    from nestling.train import TrainSettings

    parser.add_argument("parent")
    add_to(parser)
    add_settings(parser, TrainSettings, BuildSettings)


def _build(given: argparse.Namespace) -> None:
    from nestling.build import BuildSettings, build, members_table
    from nestling.train import TrainSettings

    told = read_recipe(given, TrainSettings, BuildSettings)
    settings, training = settings_of(given, BuildSettings, told), settings_of(given, TrainSettings, told)
    print(members_table(build(settings, training, given.parent, given.to, overwrite=given.overwrite)))


def _demo_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=float, default=None, help="training tokens (default: the demo's own)")
    add_to(parser)


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
    check_free(to, overwrite=given.overwrite)
