"""More than one process: FSDP2 around every layer, checkpoints of a run, and the full weights for export.

Nothing here knows about members. A layer is gathered before its forward pass and sliced inside it (elastic.py), so
one process and many run the same code. Start with torchrun; without it there is one process and nothing to set up.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.distributed_c10d import get_node_local_rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from nestling.elastic import ElasticModel

DONE = "complete"  # a checkpoint without this file was cut off while being written


@contextmanager
def process_group(device: str) -> Iterator[tuple[int, int]]:
    """Join the other processes if torchrun started us and nobody did so before. Gives rank and world."""
    if dist.is_initialized():
        yield dist.get_rank(), dist.get_world_size()
        return
    if not dist.is_torchelastic_launched():
        yield 0, 1
        return
    if device.startswith("cuda"):
        torch.cuda.set_device(get_node_local_rank())
        dist.init_process_group("cpu:gloo,cuda:nccl")  # gloo for the few numbers that live on the CPU
    else:
        dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def write_whole(file: Path, text: str) -> None:
    """Write a file that a kill leaves either as it was or complete."""
    part = file.with_name(file.name + ".part")
    part.write_text(text, "utf-8")
    part.replace(file)


def barrier() -> None:
    """Wait for the other ranks, if there are any."""
    if dist.is_initialized():
        dist.barrier()


def shard_(elastic: ElasticModel) -> None:
    """Shard every layer and what lies outside the layers over all ranks."""
    for layer in elastic.layers:
        fully_shard(layer)
    fully_shard(elastic)


def mean_gradients_(module: nn.Module) -> None:
    """Average the gradients of a module that every rank holds whole."""
    if dist.is_initialized():
        for parameter in module.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def mean_of(values: Mapping[str, float]) -> dict[str, float]:
    """The mean over ranks of each number; every rank must give the same keys."""
    if not dist.is_initialized():
        return dict(values)
    total = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(total)
    return dict(zip(values, (total / dist.get_world_size()).tolist(), strict=True))


def clip_(parameters: Iterable[Tensor], limit: float) -> float:
    """Scale gradients down to a norm of at most `limit`. Returns the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, limit)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def gather(elastic: ElasticModel) -> dict[str, Tensor]:
    """The full weights on the CPU under their stock names; with several ranks all take part."""
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu()
        for name, tensor in elastic.state().items()
    }


def save_checkpoint(folder: Path, step: int, elastic: ElasticModel, optimizer: Any, rest: dict[str, Any]) -> None:
    """Write weights and optimizer, and `rest` of a run's state (tensors and plain values); keep the newest two.

    Safe to kill at any point: a checkpoint counts once its last file is there.
    """
    weights, moments = get_state_dict(elastic, optimizer)
    target, is_first = folder / f"step-{step:08d}", not dist.is_initialized() or dist.get_rank() == 0
    if is_first and target.exists():
        shutil.rmtree(target)  # cut off while being written
    barrier()
    with _alone():
        state_dict_saver.save({"weights": weights, "optimizer": moments}, checkpoint_id=target)
    if is_first:
        torch.save(rest | {"moments": list(moments["state"])}, target / "rest.pt")
        (target / DONE).touch()
        for old in _complete(folder)[:-2]:
            shutil.rmtree(old)
    barrier()


def load_checkpoint(folder: Path, elastic: ElasticModel, optimizer: Any) -> dict[str, Any] | None:
    """Fill weights and optimizer from the newest complete checkpoint. Returns the rest of its state; None if there is
    none."""
    found = _complete(folder)
    if not found:
        return None
    rest = torch.load(found[-1] / "rest.pt", weights_only=True)
    weights, moments = get_state_dict(elastic, optimizer)
    # A parameter that no step has reached yet (a layer that the members drawn so far leave out) has no moments.
    moments["state"] = {name: moments["state"][name] for name in rest.pop("moments")}
    with _alone():
        state_dict_loader.load({"weights": weights, "optimizer": moments}, checkpoint_id=found[-1])
    set_state_dict(
        elastic, optimizer, model_state_dict=weights, optim_state_dict=moments, options=StateDictOptions(strict=False)
    )
    return rest


@contextmanager
def _alone() -> Iterator[None]:
    """One process on its own is meant: torch says so at every checkpoint."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _complete(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob(f"step-*/{DONE}"))
