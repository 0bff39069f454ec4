"""Write trained weights as a nest: the names, layout and dtypes of the nest that they came from."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nestling import hf
from nestling.checkpoint import TORCH, Checkpoint, Writer, copy_sidecars, new_folder, write_json
from nestling.nest import Nest, write_nest
from nestling.router import Router
from nestling.sort import ORDERS


def export(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    nest: Nest,
    to: Path,
    *,
    router: Router | None,
    log: Path | None,
    overwrite: bool = False,
) -> None:
    """Write `weights` (stock names in memory) to a new folder, with what lies beside the weights of `nest.folder`.

    The stock class knows how its names and fused experts go back to files; each tensor then gets the dtype that it
    has in `nest.folder`.
    """
    source = Checkpoint(nest.folder)
    with new_folder(to, overwrite=overwrite, source=nest.folder) as folder:
        staged = folder / "staged"
        hf.save_model(model, staged, weights)
        saved = Checkpoint(staged)
        nest.layout.check_cover(list(saved.entries))
        writer = Writer(folder)
        for name in nest.layout.tensors:
            dtype = getattr(torch, TORCH[source.entries[name].dtype])
            writer.add(name, saved.read(name).to(dtype))
        writer.close()
        shutil.rmtree(staged)
        write_json(folder / "config.json", nest.stored)
        copy_sidecars(nest.folder, folder)
        (folder / "nest").mkdir()
        if (nest.folder / ORDERS).is_file():  # scores, router and report are of the run that made them
            shutil.copyfile(nest.folder / ORDERS, folder / ORDERS)
        if router is not None:
            choices = {axis: ",".join(map(str, sizes)) for axis, sizes in router.choices.items()}
            state = {name: tensor.detach().cpu().contiguous() for name, tensor in router.state_dict().items()}
            save_file(state, folder / "nest" / "router.safetensors", {"members": ",".join(router.names), **choices})
        if log is not None:
            shutil.copyfile(log, folder / "nest" / "train.jsonl")
        write_nest(nest, folder)
