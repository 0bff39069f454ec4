"""The command line: every verb's flags, what it refuses and how, and the line from a parent to a measured member."""

import dataclasses
import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from run_ranks import write_text
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from nestling import tasks
from nestling.asking import AskSettings
from nestling.build import BuildSettings
from nestling.cli import main
from nestling.engine.settings import EngineSettings
from nestling.nest import open_nest
from nestling.score import Scores, ScoreSettings
from nestling.serve.settings import ServeSettings
from nestling.slice import slice as cut_member
from nestling.sort import sort
from nestling.train import TrainSettings, train

ROOT = Path(__file__).parents[1]
VERBS = (
    "inspect", "score", "sort", "train", "slice", "verify", "eval", "report", "build", "demo", "generate", "chat",
    "serve",
)  # fmt: skip
SETTINGS: dict[str, tuple[type, ...]] = {
    "generate": (AskSettings,), "chat": (AskSettings,), "serve": (ServeSettings, EngineSettings),
    "score": (ScoreSettings,), "train": (TrainSettings,), "build": (TrainSettings, BuildSettings),
}  # fmt: skip
STAGE = "tokens=256,length=16,batch=4,lr=1e-3"  # four steps


@dataclasses.dataclass(frozen=True)
class Done:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def _talkative() -> Iterator[None]:
    """The command line silences transformers for its process, which here is that of all tests."""
    verbosity = transformers.logging.get_verbosity()
    yield
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process, as a terminal would."""

    def go(*argv: object) -> Done:
        capsys.readouterr()
        try:
            code = main([str(one) for one in argv])
        except SystemExit as end:  # argparse's way out
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return go


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny hybrid with a character tokenizer, as a parent and as a trained nest of two, and text."""
    root = tmp_path_factory.mktemp("cli")
    tiny.save("nemotron_h", root / "parent", is_chatty=True)
    write_text(root / "text.jsonl")
    settings = TrainSettings(data=str(root / "text.jsonl"), member=("own=effn=16,hidden=40",), stage=(STAGE,), warmup=1)
    train(settings, root / "parent", root / "nest", say=lambda line: None)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def comments(cls: type) -> dict[str, str]:
    """The first comment after each field's name in the source file of a settings class."""
    source = Path(sys.modules[cls.__module__].__file__ or "").read_text()
    body = source[source.index(f"\nclass {cls.__name__}:") :]
    return {
        field.name: re.findall(rf"^    {field.name}: .*?  # ([^\n]+)", body, flags=re.MULTILINE | re.DOTALL)[0]
        for field in dataclasses.fields(cls)
    }


# Help.


def test_help_lists_every_verb(run: Run) -> None:
    done = run("--help")
    assert done.code == 0
    listed = [line.split()[0] for line in done.out.splitlines() if re.match(r" {4}[a-z]+ {2,}\S", line)]
    assert listed == list(VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_a_flag_and_a_line_for_every_setting(
    run: Run, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no line of help is broken in two
    done = run(verb, "--help")
    assert done.code == 0
    assert not done.err
    lines = [" ".join(entry.split()) for entry in re.split(r"\n(?=  -)", done.out)]
    for cls in SETTINGS.get(verb, ()):
        for name, comment in comments(cls).items():
            flag = "--" + name.replace("_", "-")
            (line,) = (x for x in lines if x.split()[0] in (flag, flag + ","))
            assert comment in line
            default = next(f.default for f in dataclasses.fields(cls) if f.name == name)
            if default not in (dataclasses.MISSING, None, "", ()):
                shown = default[0] if isinstance(default, tuple) else default
                assert line.endswith(f"(default: {shown})")
    assert ("--recipe" in done.out) == (verb in SETTINGS)
    assert ("--to " in done.out) == (verb not in ("inspect", "verify", "generate", "chat", "serve"))


def test_settings_that_are_yes_or_no_can_be_said_both_ways(run: Run) -> None:
    assert "--layers, --no-layers" in run("score", "--help").out
    assert "--random-baseline, --no-random-baseline" in run("build", "--help").out


# Bad requests.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "VERB"),
        (["hatch"], "invalid choice: 'hatch'"),
        (["inspect"], "required: folder"),
        (["slice", "nest", "45"], "required: --to"),
        (["score", "parent", "--to", "x"], "required: --data"),
        (["sort", "parent", "--to", "x"], "required: --scores"),
        (["train", "nest", "--to", "x", "--unheard-of", "1"], "unrecognized arguments: --unheard-of"),
        (["train", "nest", "--to", "x", "--seed", "1.5"], "--seed: 1.5 is not a whole number"),
        (["train", "nest", "--to", "x", "--seed", "inf"], "--seed: inf is not a whole number"),
        (["train", "nest", "--to", "x", "--seed", "egg"], "--seed: egg is not a whole number"),
        (["train", "nest", "--to", "x", "--clip", "egg"], "--clip: invalid float value: 'egg'"),
        (["train", "nest", "--to", "x"], "not given: --data, --member"),
        (["train", "nest", "--to", "x", "--recipe", "no.toml"], "recipe 'no.toml' is not a file"),
        (["train", "nest", "--to", "x", "--data", "d", "--member", "m", "--dtype", "fp8"], "'fp8' is not known"),
        (["inspect", "nowhere"], "'nowhere' has no config.json"),
        (["slice", "nowhere", "45", "--to", "x"], "'nowhere' has no config.json"),
        (["eval", "nowhere"], "'nowhere' has no config.json"),
    ],
)
def test_a_bad_request_exits_with_two_and_says_why(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run(*argv)
    assert done.code == 2
    assert not done.out
    assert message in done.err
    assert not list(tmp_path.iterdir())


def test_a_member_that_the_nest_lacks_is_named_with_those_it_has(run: Run, root: Path, tmp_path: Path) -> None:
    done = run("slice", root / "nest", "45", "--to", tmp_path / "small")
    assert done.code == 2
    assert done.err == "nestling slice: the nest has no member '45'. Members: 100, own.\n"
    assert not (tmp_path / "small").exists()


WRITING = {
    "score": ["parent", "--data", "text.jsonl"],
    "sort": ["parent", "--scores", "scores"],
    "train": ["nest", "--data", "text.jsonl", "--member", "a=effn=16"],
    "slice": ["nest", "own"],
    "report": ["nest"],
    "build": ["parent", "--data", "text.jsonl", "--member", "a=effn=16", "--heldout", "x=text.jsonl"],
    "demo": [],
}


@pytest.mark.parametrize("verb", WRITING)
def test_an_existing_folder_is_kept_unless_told_otherwise(
    run: Run, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.chdir(root)
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "precious").write_text("mine")
    done = run(verb, *WRITING[verb], "--to", tmp_path / "to")
    assert done.code == 2
    assert "exists. Choose another place, or pass --overwrite to replace it." in done.err
    assert contents(tmp_path) == {"to/precious": b"mine"}


@pytest.mark.parametrize("verb", [verb for verb in WRITING if WRITING[verb]])
@pytest.mark.parametrize("where", ["itself", "above"])
def test_what_is_read_is_never_replaced_even_when_told_to(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch, verb: str, where: str
) -> None:
    monkeypatch.chdir(root)
    before = contents(root)
    done = run(verb, *WRITING[verb], "--to", WRITING[verb][0] if where == "itself" else ".", "--overwrite")
    assert done.code == 2
    assert "which is read. Choose another folder." in done.err
    assert contents(root) == before


def test_the_demo_refuses_at_once_when_the_member_that_it_cuts_last_has_no_place(run: Run, tmp_path: Path) -> None:
    (tmp_path / "to-smallest").mkdir()
    done = run("demo", "--to", tmp_path / "to")
    assert done.code == 2
    assert not done.out
    assert f"'{tmp_path / 'to-smallest'}' exists" in done.err
    assert [one.name for one in tmp_path.iterdir()] == ["to-smallest"]


@pytest.mark.parametrize("verb", ["slice", "report"])
def test_overwrite_replaces_the_folder(run: Run, root: Path, tmp_path: Path, verb: str) -> None:
    (tmp_path / "to").mkdir()
    (tmp_path / "to" / "stale").write_text("old")
    (tmp_path / "to" / {"slice": "config.json", "report": "report.html"}[verb]).write_text("{}")
    argv = [root / "nest", *WRITING[verb][1:]]
    assert run(verb, *argv, "--to", tmp_path / "to", "--overwrite").code == 0
    assert not (tmp_path / "to" / "stale").exists()
    assert (tmp_path / "to" / {"slice": "config.json", "report": "report.html"}[verb]).is_file()


# Recipes.


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("sede = 1", "sets 'sede', which is not a setting. Known: accumulate, "),
        ("problems = 5", "sets 'problems', which is not a setting"),  # of build, not of train
        ("seed = 'one'", "seed = 'one' is a str, expected int"),
        ("seed = 1.5", "seed = 1.5 is a float, expected int"),
        ("seed = true", "seed = True is a bool, expected int"),
        ("clip = '1'", "clip = '1' is a str, expected float"),
        ("router = 3", "router = 3 is a int, expected str"),
        ("member = 'a=effn=16'", "member = 'a=effn=16' is not a list of strings"),
        ("member = [1, 2]", "member = [1, 2] is not a list of strings"),
        ("[train]\nseed = 1", "sets 'train', which is not a setting"),
        ("seed 1", "recipe.toml' is not TOML: "),
        ("dtype = 'fp8'", "dtype 'fp8' is not known"),
    ],
)
def test_a_recipe_with_a_mistake_is_refused_and_the_mistake_named(
    run: Run, root: Path, tmp_path: Path, recipe: str, message: str
) -> None:
    (tmp_path / "recipe.toml").write_text(recipe + "\n")
    argv = ["--data", root / "text.jsonl", *(() if "member" in recipe else ("--member", "a=effn=16"))]
    done = run("train", root / "nest", "--to", tmp_path / "to", "--recipe", tmp_path / "recipe.toml", *argv)
    assert done.code == 2
    assert message in done.err
    assert [file.name for file in tmp_path.iterdir()] == ["recipe.toml"]


def test_flags_override_the_recipe_which_overrides_the_defaults(run: Run, root: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(
        f"data = {str(root / 'text.jsonl')!r}\nmember = ['a=effn=16', 'b=effn=8']\nstage = ['{STAGE}']\n"
        "warmup = 2e0\nclip = 2\nseed = 3\naccumulate = 2\n"
    )
    argv = ["--seed", "4e0", "--stage", STAGE, "--stage", "tokens=128,length=16,batch=4,lr=1e-4", "--clip", "0.5"]
    done = run("train", root / "parent", "--to", tmp_path / "to", "--recipe", tmp_path / "recipe.toml", *argv)
    assert done.code == 0, done.err
    assert done.out.endswith(f"trained members 100, a, b into {tmp_path / 'to'}\n")
    told: dict[str, Any] = json.loads((tmp_path / "to" / "nest.json").read_text())["recipe"]["train"]
    given = {
        "data": str(root / "text.jsonl"), "member": ["a=effn=16", "b=effn=8"], "warmup": 2, "accumulate": 2,
        "seed": 4, "stage": argv[3:6:2], "clip": 0.5,
    }  # fmt: skip
    assert {key: told[key] for key in given} == given
    assert isinstance(told["warmup"], int)
    plain = dataclasses.asdict(TrainSettings(data="", member=()))
    assert {k: v for k, v in told.items() if k not in given} == {k: v for k, v in plain.items() if k not in given}


def test_a_long_seed_keeps_its_last_digits(run: Run, root: Path, tmp_path: Path) -> None:
    seed = 2**53 + 1  # the first whole number that a float cannot hold
    argv = ["--data", root / "text.jsonl", "--tokens", "6.4e1", "--length", "16", "--seed", seed]
    assert run("score", root / "parent", "--to", tmp_path / "scores", *argv).code == 0
    (told,) = Scores.load(tmp_path / "scores").runs
    assert (told["tokens"], told["length"], told["seed"]) == (64, 16, seed)


# Failures.


def test_a_run_that_fails_exits_with_one(run: Run, root: Path, tmp_path: Path) -> None:
    broken = tiny.save("nemotron_h", tmp_path / "broken", is_chatty=True)
    state = load_file(broken / "model.safetensors")
    state["lm_head.weight"][3, 5] = torch.inf
    save_file(state, broken / "model.safetensors", {"format": "pt"})
    argv = ["--data", root / "text.jsonl", "--member", "a=effn=16", "--stage", STAGE]
    done = run("train", broken, "--to", tmp_path / "to", *argv)
    assert done.code == 1
    assert done.err.startswith("nestling train failed: ")
    assert "at step 0" in done.err
    assert not (tmp_path / "to").exists()


def test_an_optional_package_that_is_missing_is_named_with_its_extra(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr(tasks, "_dataset", tasks._dataset.__wrapped__)  # not those that other tests have drawn
    done = run("eval", root / "nest", "--problems", "7")
    assert done.code == 1
    assert (
        done.err == "nestling eval failed: the reasoner's problems need reasoning-gym: pip install nestling[reasoner]\n"
    )


def test_a_full_disk_exits_with_one(root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", err)
    assert main(["inspect", str(root / "nest")]) == 1
    assert err.getvalue() == "nestling inspect failed: [Errno 28] No space left on device\n"


def test_control_c_exits_with_one_and_no_traceback(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(io.StringIO):
        def write(self, text: str) -> int:
            signal.raise_signal(signal.SIGINT)
            return len(text)

    err = io.StringIO()
    monkeypatch.setattr(sys, "stdout", Impatient())
    monkeypatch.setattr(sys, "stderr", err)
    # A shell's background job starts with Control-C ignored; Python then sets no handler of its own.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main(["inspect", str(root / "nest")]) == 1
    finally:
        signal.signal(signal.SIGINT, before)
    assert err.getvalue() == "nestling inspect: stopped\n"


@pytest.mark.parametrize(("folder", "code"), [("nest", 0), ("nowhere", 2)])
def test_the_package_runs_as_a_module_with_the_same_exit_codes(root: Path, folder: str, code: int) -> None:
    command = [sys.executable, "-m", "nestling", "inspect", str(root / folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert bool(done.stdout) == (code == 0)
    assert bool(done.stderr) == (code == 2)


# Verbs that do something.


class Records(logging.Handler):
    """All that a library has to say."""

    def __init__(self) -> None:
        super().__init__(level=0)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def load_and_listen(folder: Path) -> tuple[Any, dict[str, Any], str]:
    """The stock model of a folder, its loading info, and everything that transformers logs meanwhile."""
    logger, records = logging.getLogger("transformers"), Records()
    transformers.logging.set_verbosity_warning()
    logger.addHandler(records)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    finally:
        logger.removeHandler(records)
    return loaded[0].eval(), loaded[1], "\n".join(records.said)


COMPLAINTS = re.compile(r"missing|unexpected|mismatch|newly initialized|not (used|initialized)", re.IGNORECASE)


def test_a_sliced_member_loads_in_stock_transformers_without_a_message(run: Run, root: Path, tmp_path: Path) -> None:
    done = run("slice", root / "nest", "own", "--to", tmp_path / "small")
    assert done.code == 0
    model, info, said = load_and_listen(tmp_path / "small")
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"))
    assert not COMPLAINTS.search(said), said
    stored = [tensor.numel() for tensor in load_file(tmp_path / "small" / "model.safetensors").values()]
    assert f"member own: {sum(stored):,} parameters" in done.out
    assert model.config.hidden_size == 40
    assert model.config.moe_intermediate_size == 16

    chat = [{"role": "user", "content": "an egg"}]
    ours, theirs = (AutoTokenizer.from_pretrained(one) for one in (tmp_path / "small", root / "parent"))
    assert ours.apply_chat_template(chat, tokenize=False) == "an egg<think>"
    text = ours.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"]
    assert torch.equal(text, theirs.apply_chat_template(chat, return_dict=True, return_tensors="pt")["input_ids"])
    assert GenerationConfig.from_pretrained(tmp_path / "small").max_new_tokens == 7
    written = model.generate(text, attention_mask=torch.ones_like(text), do_sample=False)
    assert text.shape[1] < written.shape[1] <= text.shape[1] + 7
    for name in ("LICENSE", "preprocessor_config.json"):
        assert (tmp_path / "small" / name).read_bytes() == (root / "parent" / name).read_bytes()


def test_a_missing_or_left_over_tensor_would_have_been_heard(root: Path, tmp_path: Path) -> None:
    folder = cut_member(open_nest(root / "nest"), open_nest(root / "nest").member("own"), tmp_path / "small")
    state = load_file(folder / "model.safetensors")
    state["strange.weight"] = state.pop("backbone.norm_f.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    _, info, said = load_and_listen(folder)
    assert COMPLAINTS.search(said)
    assert "norm_f" in said
    assert "strange" in said
    assert info["missing_keys"]
    assert info["unexpected_keys"]


def test_the_straight_line_from_a_parent_to_a_measured_member(run: Run, root: Path, tmp_path: Path) -> None:
    parent, text, at = root / "parent", root / "text.jsonl", tmp_path
    for verb, *argv in (
        ("score", parent, "--data", text, "--to", at / "scores", "--tokens", "256", "--length", "16", "--batch", "4"),
        ("sort", parent, "--scores", at / "scores", "--to", at / "sorted"),
        ("train", at / "sorted", "--data", text, "--member", "70=active:0.7", "--member", "own=effn=16", "--stage",
         STAGE, "--warmup", "1", "--router-share", "0.5", "--to", at / "nest"),
        ("slice", at / "nest", "70", "--to", at / "small"),
    ):  # fmt: skip
        done = run(verb, *argv)
        assert done.code == 0, done.err
        assert done.out
        assert not done.err

    # Each verb does what the function of its name does.
    orders = Scores.load(at / "scores").orders()
    by_hand = sort(parent, orders, at / "by-hand")
    assert contents(at / "by-hand") == contents(at / "sorted")
    assert by_hand.parent == open_nest(parent).fingerprint
    settings = TrainSettings(
        data=str(text), member=("70=active:0.7", "own=effn=16"), stage=(STAGE,), warmup=1, router_share=0.5
    )
    again = train(settings, at / "sorted", at / "again", say=lambda line: None)
    weights = "model.safetensors"
    assert (at / "again" / weights).read_bytes() == (at / "nest" / weights).read_bytes()
    cut_member(again, again.member("70"), at / "small-again")
    assert (at / "small-again" / weights).read_bytes() == (at / "small" / weights).read_bytes()

    # To itself the full member's distance is zero; to the parent it is what training moved.
    heldout = ("--heldout", f"text={text}", "--heldout-tokens", "256", "--heldout-length", "16")
    own, to_parent = (
        run("eval", at / "nest", *heldout, "--json", "--to", at / f"{name}.json", *more)
        for name, more in (("own", ()), ("parent", ("--parent", parent)))
    )
    assert own.code == to_parent.code == 0
    found, other = json.loads(own.out), json.loads(to_parent.out)  # nothing else on standard output
    assert list(found) == list(other) == list(open_nest(at / "nest").members)
    assert found["100"]["kl"] == 0
    assert other["100"]["kl"] > 0
    assert found["70"]["kl"] > 0
    assert all(found[name]["perplexity"] == other[name]["perplexity"] for name in found)
    assert json.loads((at / "own.json").read_text()) == found

    table = run("eval", at / "nest", *heldout)
    assert f"{found['70']['perplexity']['text']:.2f}" in table.out
    before = (at / "own.json").read_bytes()
    assert run("eval", at / "nest", *heldout, "--to", at / "own.json").code == 2
    assert (at / "own.json").read_bytes() == before


def test_build_takes_one_recipe_for_training_and_evaluation_and_prints_the_table(
    run: Run, root: Path, tmp_path: Path
) -> None:
    text = root / "text.jsonl"
    (tmp_path / "recipe.toml").write_text(
        f"data = {str(text)!r}\nmember = ['own=effn=16']\nstage = ['{STAGE}']\nwarmup = 1\n"
        f"score_tokens = 2.56e2\nscore_length = 16\nheldout = 'text={text}'\nheldout_tokens = 64\nheldout_length = 16\n"
    )
    done = run(
        "build", root / "parent", "--to", tmp_path / "nest", "--recipe", tmp_path / "recipe.toml",
        "--no-random-baseline",
    )  # fmt: skip
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines[-2:]] == ["100", "own"]
    assert not any("random" in line for line in lines)
    (told,) = Scores.load(tmp_path / "nest" / "nest" / "scores").runs
    assert told["tokens"] == 256
    results = json.loads((tmp_path / "nest" / "nest.json").read_text())["members"]["own"]["results"]
    assert results.keys() == {"kl", "perplexity", "kl_before", "perplexity_before"}
    assert f"{results['perplexity']['text']:.2f}" in lines[-1].split()
