"""Sort a parent's units best first and write it as a nest: the same function, the same names, another order.

Works from file to file, one tensor at a time. Layers are never moved: a model runs them in their own order, so the
nest only notes which of them matter most.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nestling.arch import Layout
from nestling.axes import take
from nestling.checkpoint import Writer, copy_sidecars, new_folder, write_json
from nestling.nest import FULL, Member, Nest, open_nest, open_plain_nest, write_nest

Orders = Mapping[str, Tensor]  # elastic axis -> int64 [*enclosing axes, axis], best first

ORDERS = Path("nest") / "orders.safetensors"


def sort(parent: str | Path, orders: Orders, to: str | Path, *, overwrite: bool = False, drop: str = "") -> Nest:
    """Write the parent, sorted, as a nest with one member.

    orders: axes that are not named stay as they are. drop: a prefix of tensor names to leave out knowingly, such as
    "mtp".
    """
    nest = open_plain_nest(parent, verb="sort")
    checkpoint = nest.checkpoint
    layout = nest.layout
    dropped = {name for name in checkpoint.entries if drop and name.startswith(f"{drop}.")}
    if drop and not dropped:
        raise ValueError(f"--drop {drop} has no effect: no tensor of '{parent}' starts with '{drop}.'.")
    layout.check_cover(nest.names - dropped)
    check_orders(layout, orders)
    is_new = any(not torch.equal(order, torch.arange(order.shape[-1]).expand_as(order)) for order in orders.values())
    if is_new and (checkpoint.folder / ORDERS).is_file():
        raise ValueError(
            f"'{parent}' is sorted already: sort its parent, so that the orders tell where units came from."
        )
    keep = {axis: order for axis, order in orders.items() if axis != "layer"}
    known = load_orders(checkpoint.folder) if (checkpoint.folder / ORDERS).is_file() else {}
    stored = nest.stored | (
        {"num_nextn_predict_layers": 0} if "num_nextn_predict_layers" in nest.stored and dropped else {}
    )
    with new_folder(to, overwrite=overwrite, source=checkpoint.folder) as folder:
        writer = Writer(folder)
        for place in layout.places(keep):
            tensor = checkpoint.read(place.source)
            sorted_ = take(tensor, place.shape, layout.sizes, keep, within=layout.arch.within(), units=place.units)
            writer.add(place.name, sorted_)
        writer.close()
        write_json(folder / "config.json", stored)
        copy_sidecars(checkpoint.folder, folder)
        save_orders({**orders, **known}, folder)
        depth = tuple(orders["layer"].tolist()) if "layer" in orders else nest.layer_order
        parent_print = nest.parent or checkpoint.fingerprint()
        recipe: dict[str, Any] = {"dropped": sorted(dropped)} if dropped else {}
        full = Member(name=FULL, sizes={}, budget="all", is_trained=True)  # members of an earlier order are no more
        sorted_nest = replace(nest, members={FULL: full}, layer_order=depth, parent=parent_print, recipe=recipe)
        write_nest(sorted_nest, folder)
    return open_nest(to)


def check_orders(layout: Layout, orders: Orders) -> None:
    """Every order is a permutation of its axis within each enclosing unit."""
    elastic = layout.elastic()
    for axis, order in orders.items():
        if axis not in elastic:
            raise ValueError(f"an order is given for '{axis}', which is not elastic here. Axes: {', '.join(elastic)}.")
        shape = layout.order_shape(axis)
        if tuple(order.shape) != shape:
            raise ValueError(f"the order of '{axis}' has shape {tuple(order.shape)}, expected {shape}.")
        if not torch.equal(order.sort(-1).values, torch.arange(shape[-1]).expand(shape)):
            raise ValueError(f"the order of '{axis}' is not a permutation of its {shape[-1]} units everywhere.")


def save_orders(orders: Orders, folder: Path) -> None:
    """Write the orders beside a nest's weights."""
    (folder / ORDERS).parent.mkdir(exist_ok=True)
    save_file({axis: order.contiguous() for axis, order in orders.items()}, folder / ORDERS)


def load_orders(folder: Path) -> dict[str, Tensor]:
    """The orders of a nest; empty if it was never sorted."""
    return load_file(folder / ORDERS) if (folder / ORDERS).is_file() else {}
