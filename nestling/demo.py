"""`nestling demo`: a nest from the reasoner that ships with the package, end to end, on a laptop CPU."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from nestling import hf, tasks
from nestling.build import BuildSettings, build, members_table
from nestling.checkpoint import check_destination, new_folder
from nestling.eval import solve
from nestling.nest import Nest
from nestling.plan import TrainSettings, parse_stages
from nestling.slice import slice as cut_member

Say = Callable[[str], None]

MEMBERS = ("70=active:0.70", "45=active:0.45", "25=active:0.25")
PROBLEMS = 500
TRAIN_PROBLEMS = 20_000
ROUTER_TOKENS = 115_200  # 150 small steps


def reasoner() -> Path:
    """The folder of the small reasoning parent that ships with the package."""
    return Path(str(files("nestling") / "assets" / "reasoner"))


def demo_settings(data: str, *, tokens: float) -> TrainSettings:
    """The recipe of the demo's nest: the router learns on small batches, then the members train.

    The reasoner was taught one problem at a time, thoughts and answer only, and so it is asked.
    """
    stages = (
        f"tokens={ROUTER_TOKENS},length=192,batch=4,lr=1e-3",
        f"tokens={0.6 * tokens:.0f},length=192,batch=12,lr=1e-3,weights=4/3/3/1",
        f"tokens={0.4 * tokens:.0f},length=192,batch=12,lr=2e-4,weights=4/3/3/1",  # down to where the full one holds
    )
    router, *rest = parse_stages(stages, ["100", "70", "45", "25"], blocks=1)
    return TrainSettings(
        data=data,
        member=MEMBERS,
        stage=stages,
        pack=False,
        loss_on="completion",
        router_share=router.steps / (router.steps + sum(stage.steps for stage in rest)),
        router_weights=0.0,
        router_lambda=0.5,
        router_tries=64,
        warmup=30,
        checkpoint=100,
    )


def demo_evaluation(data: Path) -> BuildSettings:
    """How the demo's nest is scored and measured. data: the folder with heldout.jsonl."""
    return BuildSettings(
        score_tokens=100_000, score_length=192, score_batch=32, problems=PROBLEMS,
        heldout=f"problems={data / 'heldout.jsonl'}", heldout_length=192, max_thinking=192,
    )  # fmt: skip


def demo(to: str | Path, *, tokens: float = 1e6, say: Say = print, overwrite: bool = False) -> Nest:
    """Build the nest, print its table, cut its smallest member and let it solve a problem."""
    to = Path(to)
    data, smallest = to.with_name(to.name + ".data"), to.with_name(to.name + "-smallest")
    for folder in (to, smallest):
        check_destination(folder, overwrite=overwrite)
    say("The parent is a 2-million-parameter reasoner that ships with the package: Mamba-2, attention and MoE layers.")
    if not data.exists():
        say(f"writing {TRAIN_PROBLEMS:,} practice problems with their reasoning")
        with new_folder(data) as folder:
            tasks.write_jsonl(folder / "train.jsonl", "train", TRAIN_PROBLEMS)
            tasks.write_jsonl(folder / "heldout.jsonl", "test", PROBLEMS)
    nest = build(
        demo_evaluation(data),
        demo_settings(str(data / "train.jsonl"), tokens=tokens),
        reasoner(),
        to,
        say=say,
        overwrite=overwrite,
    )
    say("")
    say(members_table(nest))
    say(f"\naccuracy: held-out problems solved, of {PROBLEMS}; random cut and cut by score are before any training")
    separate = sum(nest.cost(member).bytes["bf16"] for member in nest.members.values())
    whole = nest.cost(nest.member("full")).bytes["bf16"]
    say(
        f"one nest: {whole:,} bytes of weights; "
        f"{len(nest.members)} separate checkpoints: {separate:,} ({separate / whole:.2f}x)"
    )
    show_smallest(nest, smallest, say=say)
    return nest


def show_smallest(nest: Nest, to: Path, *, say: Say) -> None:
    """Cut the smallest member, load it with its stock class and show a problem that it solves."""
    member = min(nest.members.values(), key=lambda one: nest.cost(one).active_parameters)
    cut_member(nest, member, to, overwrite=True)
    model, tokenizer = hf.load_model(to), hf.load_tokenizer(to)
    say(f"\nmember {member.name}, cut to {to} and loaded by stock transformers as {type(model).__name__}:")
    problems = tasks.problems("test", 32, seed=1)
    found = solve(model, tokenizer, problems)
    solved = [i for i, one in enumerate(problems) if tasks.score(one, found.answers[i]) == 1.0]
    shown = max(solved, key=lambda i: len(found.thoughts[i])) if solved else 0
    say(f"  question  {problems[shown].question}")
    say("  thinking  " + found.thoughts[shown].strip().replace("\n", "\n            "))
    say(f"  answer    {found.answers[shown].strip()}" + ("" if solved else f"  (wrong: {problems[shown].answer})"))
