"""The C of this folder, compiled for this machine when it is first needed, and its structures as Python sees them.

The system's compiler makes a library in a folder of the user's own, named after the sources, the flags and the
processor; the next process only loads it. Where there is no compiler, or it fails, `library` raises `NoLibrary`: the
engine then runs the stock modules.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-O3", "-std=gnu11", "-fPIC", "-shared", "-pthread", "-fno-math-errno", "-fno-trapping-math")
TUNINGS = (("-march=native",), ("-mcpu=native",), ())  # the first that the compiler takes
SECONDS = 120  # that a compiler may take


class NoLibrary(RuntimeError):
    """There is no compiled library on this machine, and why."""


class Vector(ctypes.Structure):
    """See native.h, as for all structures here."""

    _fields_ = (("data", c_void_p), ("is_bf16", c_int32), ("stride", c_int32))


class Matrix(ctypes.Structure):
    _fields_ = (
        ("data", c_void_p), ("stride", c_int64), ("leap", c_int64),
        ("rows", c_int32), ("cols", c_int32), ("is_bf16", c_int32), ("pad", c_int32),
        ("bias", Vector),
    )  # fmt: skip


_INTS = ("heads", "kv_heads", "head", "window", "has_rope")
_MAMBA = ("mambas", "mdim", "groups", "state", "conv")
_ROUTER = ("experts", "active", "is_sigmoid", "is_normed", "node_groups", "node_active", "rounds_weights")
_VECTORS = (
    "q_norm", "k_norm", "conv_weight", "conv_bias", "a_log", "d", "dt_bias", "gate_norm", "correction",
)  # fmt: skip
_MATRICES = (
    "q", "k", "v", "out", "gate", "up", "down",
    "router", "expert_gate", "expert_up", "expert_down", "latent_in", "latent_out",
)  # fmt: skip
ATTENTION, MAMBA, DENSE, EXPERTS = 1, 2, 3, 4  # kinds of block


class Block(ctypes.Structure):
    _fields_ = (
        ("kind", c_int32), ("slot", c_int32), ("norm", Vector), ("eps", c_float),
        *((name, c_int32) for name in _INTS), ("scale", c_float),
        *((name, c_int32) for name in _MAMBA), ("gate_eps", c_float), ("least_dt", c_float),
        ("is_gated", c_int32), *((name, c_int32) for name in _ROUTER), ("routed_scale", c_float),
        *((name, Vector) for name in _VECTORS), *((name, Matrix) for name in _MATRICES),
    )  # fmt: skip


class Model(ctypes.Structure):
    _fields_ = (
        ("num_blocks", c_int32), ("num_slots", c_int32), ("hidden", c_int32), ("vocab", c_int32),
        ("is_bf16", c_int32), ("rounds_norm", c_int32), ("eps", c_float), ("table", c_int32),
        ("norm", Vector), ("embedding", Matrix), ("head", Matrix),
        ("blocks", POINTER(Block)), ("cosines", c_void_p), ("sines", c_void_p),
    )  # fmt: skip


class Slot(ctypes.Structure):
    _fields_ = (
        ("first", c_void_p), ("second", c_void_p), ("capacity", c_int64),
        ("first_is_bf16", c_int32), ("second_is_bf16", c_int32),
    )  # fmt: skip


class Row(ctypes.Structure):
    _fields_ = (
        ("token", c_int64), ("position", c_int64), ("slots", POINTER(Slot)),
        ("is_prompt", c_int32), ("wants_logits", c_int32),
    )  # fmt: skip


@cache
def library() -> ctypes.CDLL:
    """The compiled library; made if this machine has not made it before."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise NoLibrary(f"no C compiler is here: {', '.join(COMPILERS)}")
    lib = load(compiler, folder())
    lib.choose_kernel(1)
    return lib


def load(compiler: str, where: Path) -> ctypes.CDLL:
    """The library in a folder, compiled if it is not there."""
    sources = sorted(HERE.glob("*.[ch]"))
    told = [compiler, *FLAGS, _processor(), *(path.read_text("utf-8") for path in sources)]
    name = hashlib.sha256("\0".join(told).encode()).hexdigest()[:24]
    file = where / f"decode-{name}.so"
    if not file.exists():
        _compile(compiler, [str(path) for path in sources if path.suffix == ".c"], file)
    try:
        lib = ctypes.CDLL(str(file))
    except OSError as error:
        raise NoLibrary(f"{file} does not load: {error}") from error
    lib.choose_kernel.argtypes, lib.choose_kernel.restype = [c_int], c_int
    lib.ready_threads.argtypes, lib.ready_threads.restype = [c_int], c_int
    lib.workspace_bytes.argtypes = [POINTER(Model), c_int, c_int, c_int64]
    lib.workspace_bytes.restype = c_int64
    lib.take_step.argtypes = [POINTER(Model), POINTER(Row), c_int, c_int, c_int64, c_void_p, c_void_p]
    lib.take_step.restype = None
    return lib


def folder() -> Path:
    """Where compiled libraries are kept: the user's own folder, or one for this process if that cannot be written."""
    try:
        where = Path.home() / ".cache" / "nestling"
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_ours = os.access(where, os.W_OK) and (not hasattr(os, "getuid") or where.stat().st_uid == os.getuid())
    except (OSError, RuntimeError):
        is_ours = False
    return where if is_ours else Path(tempfile.mkdtemp(prefix="nestling-"))


def _compile(compiler: str, sources: list[str], file: Path) -> None:
    told = ""
    for tuning in TUNINGS:
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            made = Path(scratch) / file.name
            command = [compiler, *FLAGS, *tuning, *sources, "-lm", "-o", str(made)]
            try:
                ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NoLibrary(f"{compiler} does not run: {error}") from error
            if ran.returncode == 0:
                os.replace(made, file)  # at once, so that another process never loads half a file
                return
            told = next(iter(ran.stderr.strip().splitlines()), f"exit status {ran.returncode}")
    raise NoLibrary(f"{compiler} fails: {told}")


def _processor() -> str:
    """What the compiler's tuning depends on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text("utf-8", "replace").splitlines() if cpuinfo.exists() else []
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join([platform.machine(), platform.processor(), *sorted({x for x in lines if x.startswith(kept)})])
