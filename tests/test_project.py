"""What the repository says about itself is true: its documents, its Makefile, its license and its pins agree.

A document is README.md, CONTRIBUTING.md, CHANGELOG.md or a page of docs/. Commands are read from fenced blocks.
"""

import re
import subprocess
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DOCUMENTS = [p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")] if p.is_file()]
TARGETS = ("setup", "demo", "test", "slow", "bench", "lint")

# A folder of someone's machine: one that starts where a word cannot, so URLs and relative paths do not count.
MACHINE_PATH = re.compile(r"(?<![\w.~)}\]/*-])/(?:home|root|Users|work|mnt)/\w|[A-Z]:\\Users\\")
COMMAND = re.compile(
    r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(?:torchrun .*-m |\S*python\S* -m |\.venv/bin/)?nestling +([a-z][\w-]*)"
)


def fenced(document: Path) -> Iterator[str]:
    """The lines of a document that stand in fenced blocks."""
    inside = False
    for line in document.read_text(encoding="utf-8").splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            inside = not inside
        elif inside:
            yield line.strip()


def anchors(document: Path) -> set[str]:
    """The anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ +(.+?) *$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def pins() -> dict[str, str]:
    """The lock as name -> version, in its own order."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


def tracked() -> list[Path]:
    """Files that are or would be committed; without git, all but hidden folders and outputs."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode == 0:
        return [path for name in listing.stdout.split("\0") if name and (path := ROOT / name).is_file()]
    skipped = {".venv", ".git", "runs", "build", "dist", "__pycache__"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]


def test_the_makefile_has_every_target_that_a_document_names():
    made = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(TARGETS) <= made
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        named = {word for line in fenced(document) for word in re.findall(r"^(?:\$ )?make ([a-z]+)", line)}
        named |= set(re.findall(r"`make ([a-z]+)[^`]*`", text))
        assert named <= made, f"{names(document)} names {sorted(named - made)}, which the Makefile does not make"


def test_the_license_is_the_one_that_the_package_declares():
    assert PROJECT["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]
    text = " ".join((ROOT / "LICENSE").read_text(encoding="utf-8").split())
    assert text.startswith("Apache License Version 2.0, January 2004")
    assert "END OF TERMS AND CONDITIONS" in text


def test_the_lock_pins_every_requirement_inside_its_range_and_torch_first():
    lock = pins()
    extras = PROJECT["optional-dependencies"]
    asked = [Requirement(text) for text in [*PROJECT["dependencies"], *chain(*extras.values())]]
    for requirement in asked:
        if requirement.name == PROJECT["name"]:
            assert requirement.extras <= extras.keys()
            continue
        pinned = lock.get(canonicalize_name(requirement.name))
        assert pinned, f"requirements.lock does not pin {requirement.name}"
        assert requirement.specifier.contains(pinned), f"{requirement} does not admit the tested {pinned}"
    assert next(iter(lock)) == "torch"
    assert not [f"{name}=={version}" for name, version in lock.items() if not re.fullmatch(r"[\w.]+", version)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_every_verb_that_a_document_uses_is_known_to_the_command_line(
    document: Path, capsys: pytest.CaptureFixture[str]
):
    if not (ROOT / "nestling" / "cli.py").is_file():
        pytest.skip("nestling/cli.py is not there yet")
    from nestling.cli import main

    def knows(verb: str) -> bool:
        with pytest.raises(SystemExit) as end:
            raise SystemExit(main([verb, "--help"]))
        capsys.readouterr()
        return end.value.code in (0, None)

    assert not knows("no-such-verb")
    verbs = {found[1] for line in fenced(document) if (found := COMMAND.match(line))}
    assert not sorted(verb for verb in verbs if not knows(verb))


@pytest.mark.parametrize("document", DOCUMENTS, ids=names)
def test_relative_links_resolve(document: Path):
    broken = []
    for link in re.findall(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)", document.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        there = (document.parent / path) if path else document
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            broken.append(link)
    assert not broken, f"{names(document)}: {broken}"


def test_no_tracked_file_names_a_folder_of_one_machine():
    found = []
    for path in tracked():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue  # a binary file
        found += [
            f"{names(path)}:{i}: {line.strip()[:120]}" for i, line in enumerate(lines, 1) if MACHINE_PATH.search(line)
        ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text", ["/" + "home/ann/nest", 'open("/' + 'work/x")', "cd /" + "root/y", "C:" + "\\Users\\ann"]
)
def test_a_folder_of_one_machine_is_recognized(text: str):
    assert MACHINE_PATH.search(text)


@pytest.mark.parametrize(
    "text", ["https://example.org/home/x", "runs/work/x", "./root/x", "#!/usr/bin/env bash", "$HOME/work/x"]
)
def test_a_relative_path_or_address_is_not_taken_for_a_machines_folder(text: str):
    assert not MACHINE_PATH.search(text)


@pytest.mark.parametrize(
    ("line", "verb"),
    [
        ("nestling inspect ./nest   # axes", "inspect"),
        ("$ .venv/bin/nestling train ./nest", "train"),
        ("OMP_NUM_THREADS=1 nestling build parent", "build"),
        ("torchrun --nproc-per-node 2 -m nestling train ./nest", "train"),
        (".venv/bin/python -m nestling slice nest 25", "slice"),
    ],
)
def test_a_command_of_ours_is_recognized(line: str, verb: str):
    found = COMMAND.match(line)
    assert found
    assert found[1] == verb


@pytest.mark.parametrize(
    "line", ["nestling/axes.py   notation", "nestling --version", "pip install nestling", "nestling VERB --help"]
)
def test_another_line_is_not_taken_for_a_command_of_ours(line: str):
    assert not COMMAND.match(line)
