"""The package read as text: who imports whom, and what no module may do.

Imports point strictly down the floors below, so a file can be read knowing only what stands under it. A folder (`arch`,
`formats`, `engine`) is one unit: its files may import each other. The other rules keep the package safe to point at a
stranger's checkpoint and easy to read. Nothing is imported here; every rule is shown to catch what it forbids.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "nestling"
MODULES = sorted(PACKAGE.rglob("*.py"))
CODE = [
    path for folder in ("nestling", "tests", "examples", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))
]
MAX_LINES = 400

FLOORS = (
    (
        "axes",
        "documents",
        "events",
        "flags",
        "policy",
        "presets",
        "sampling",
        "shards",
        "text",
        "thinking_budget",
        "traces",
    ),
    ("arch", "checkpoint", "cut", "formats", "request", "tasks", "think"),
    ("hf", "cost", "data", "gguf_arch", "replies", "template"),
    ("nest", "budget", "distill", "listen", "padded", "gguf_vocab", "openai"),
    ("choose", "elastic", "sort", "stored", "plan", "router", "inspect", "quantize", "asking"),
    ("score", "parallel", "export", "verify", "to_gguf", "upstream"),
    ("slice", "train", "engine", "relay_answer"),
    ("eval", "report", "relay"),
    ("build", "serve", "policies"),
    ("demo", "slicing", "shipped"),
    ("generate", "chat"),
    ("running",),
    ("cli",),
)
FLOOR = {unit: floor for floor, units in enumerate(FLOORS) for unit in units}
FREE = {"__init__", "__main__"}  # may import from any floor; that they stay light is measured below
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"}
ENVIRONMENT = {"os.environ", "os.environb", "os.getenv", "os.getenvb"}
HEAVY = {"torch", "transformers", "datasets", "matplotlib", "numpy"}


def unit(path: Path) -> str:
    """The name in the table that a file goes by: its own, or that of its folder inside the package."""
    inside = path.relative_to(PACKAGE)
    return inside.stem if len(inside.parts) == 1 else inside.parts[0]


def imported(tree: ast.AST, path: Path) -> list[tuple[int, str]]:
    """Every import as (line, dotted name), inside functions too; relative ones spelled out."""
    package = ("nestling", *path.relative_to(PACKAGE).parts[:-1])
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            module = ".".join([*above, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found += [(node.lineno, str(given.value)) for given in node.args[:1] if isinstance(given, ast.Constant)]
    return found


def wrong_imports(source: str, path: Path) -> list[str]:
    """Imports that do not point down, that bring pickle in, or that ask transformers outside hf.py."""
    here, wrong = unit(path), []
    for line, name in imported(ast.parse(source), path):
        parts = name.split(".")
        if parts[0] == "nestling" and len(parts) > 1 and here not in FREE and parts[1] != here:
            there = parts[1]
            if there not in FLOOR:
                wrong.append(f"line {line} imports 'nestling.{there}', which is on no floor")
            elif here in FLOOR and FLOOR[there] >= FLOOR[here]:
                wrong.append(
                    f"line {line}: '{here}' on floor {FLOOR[here]} imports '{there}' on floor {FLOOR[there]}; "
                    "move what both need to a lower floor"
                )
        if parts[0] == "transformers" and here != "hf":
            wrong.append(f"line {line} imports '{name}'; only nestling/hf.py asks transformers")
        if parts[0] in PICKLES:
            wrong.append(f"line {line} imports '{parts[0]}', which runs code that a file brings along")
        if name == "torch.load":
            wrong.append(
                f"line {line} imports torch.load by itself; call it by its full name, so that this test sees it"
            )
        if name.startswith(("os.environ", "os.getenv")):
            wrong.append(
                f"line {line} imports '{name}'; a setting is a field of a dataclass, not an environment variable"
            )
    return list(dict.fromkeys(wrong))  # one line may import several names


def wrong_calls(source: str) -> list[str]:
    """Loads that run a stranger's code, and settings taken from the environment."""
    tree, wrong = ast.parse(source), []
    allowed = set()  # os.environ may be written: the libraries that we call listen to it
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            allowed.add(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            call = node.value.func
            if isinstance(call, ast.Attribute) and call.attr == "setdefault":
                allowed.add(call.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            options = {word.arg: word.value for word in node.keywords}
            called = ast.unparse(node.func)
            if called == "torch.load" and not _is_constant(options.get("weights_only"), True):
                wrong.append(f"line {node.lineno} calls torch.load without weights_only=True")
            if "trust_remote_code" in options and not _is_constant(options["trust_remote_code"], False):
                wrong.append(f"line {node.lineno} trusts remote code")
            if "allow_pickle" in options and not _is_constant(options["allow_pickle"], False):
                wrong.append(f"line {node.lineno} allows pickle")
        elif isinstance(node, ast.Dict):
            trusting = [key for key in node.keys if _is_constant(key, "trust_remote_code")]
            wrong += [f"line {key.lineno} trusts remote code" for key in trusting if key is not None]
        elif isinstance(node, ast.Attribute) and node not in allowed and ast.unparse(node) in ENVIRONMENT:
            wrong.append(f"line {node.lineno} reads the environment; a setting is a field of a dataclass")
    return wrong


def _is_constant(node: ast.expr | None, value: object) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value


def names(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_every_module_is_on_a_floor(path: Path):
    is_listed = unit(path) in FLOOR or unit(path) in FREE
    assert is_listed, (
        f"{names(path)} is on no floor: add '{unit(path)}' to FLOORS in tests/test_floors.py, above all that it imports"
    )
    assert len(path.relative_to(PACKAGE).parts) <= 2, f"{names(path)} is more than one folder deep"


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_imports_point_strictly_down_the_floors(path: Path):
    wrong = wrong_imports(path.read_text(encoding="utf-8"), path)
    assert not wrong, f"{names(path)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_no_module_runs_a_strangers_code_or_reads_the_environment(path: Path):
    wrong = wrong_calls(path.read_text(encoding="utf-8"))
    assert not wrong, f"{names(path)}:\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", MODULES, ids=names)
def test_no_module_is_longer_than_a_sitting(path: Path):
    lines = len(path.read_bytes().splitlines())
    assert lines <= MAX_LINES, f"{names(path)} has {lines} lines, more than {MAX_LINES}: split it along its ideas"


@pytest.mark.parametrize("path", CODE, ids=names)
def test_code_is_ascii(path: Path):
    lines = enumerate(path.read_bytes().splitlines(), start=1)
    assert not [f"{names(path)}:{i}: {line!r}" for i, line in lines if not line.isascii()]


def test_importing_the_package_loads_no_heavy_library():
    code = "import sys, nestling; print(*{name.split('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "nestling" in loaded.split()
    assert not HEAVY & set(loaded.split())


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cost.py", "import nestling.train"),
        ("cost.py", "from nestling import train"),
        ("cost.py", "from nestling.train import step"),
        ("cost.py", "from . import train"),
        ("cost.py", "from .train import step"),
        ("cost.py", "def late():\n    from nestling import train"),
        ("cost.py", "import importlib\nimportlib.import_module('nestling.train')"),
        ("cost.py", "from nestling.nest import Nest"),
        ("cost.py", "from nestling.unheard_of import x"),
        ("arch/llama.py", "from ..cost import count"),
        ("formats/fp8.py", "from nestling.arch import Place"),
        ("nest.py", "import transformers"),
        ("engine/batch.py", "from transformers import AutoModelForCausalLM"),
        ("nest.py", "def late():\n    import transformers.utils"),
        ("nest.py", "import pickle"),
        ("nest.py", "from torch import load"),
        ("nest.py", "from os import environ"),
    ],
)
def test_an_import_that_is_not_allowed_is_caught(file: str, source: str):
    assert wrong_imports(source, PACKAGE / file)


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=trusted)",
        "numpy.load(path, allow_pickle=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=trusted)",
        "load(path, **{'trust_remote_code': True})",
        "os.environ['RANK']",
        "os.environ.get('RANK', 0)",
        "x = os.environ.setdefault('RANK', '0')",
        "os.getenv('RANK')",
        "dict(os.environ)",
    ],
)
def test_a_call_that_is_not_allowed_is_caught(source: str):
    assert wrong_calls(source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("cost.py", "from nestling.axes import count\nfrom nestling import arch"),
        ("arch/__init__.py", "from nestling.arch.llama import LLAMA\nfrom .moe import MIXTRAL\nfrom . import llama"),
        ("arch/moe.py", "from ..axes import take"),
        ("__main__.py", "from nestling.cli import main"),
        ("hf.py", "from transformers import AutoConfig"),
        ("train.py", "torch.load(path, weights_only=True)\nload(path, trust_remote_code=False)"),
        ("train.py", "os.environ['OMP_NUM_THREADS'] = '1'\nos.environ.setdefault('GOMP_SPINCOUNT', '0')"),
    ],
)
def test_what_is_allowed_passes(file: str, source: str):
    assert not wrong_imports(source, PACKAGE / file)
    assert not wrong_calls(source)
