"""Learn which sizes a budget should have: one small network per axis, from the budget to probabilities over sizes.

Star Elastic (arXiv 2605.07182), section on the router. For every axis: one-hot budget -> Linear -> LeakyReLU(0.1) ->
Linear(choices); probabilities are a Gumbel softmax whose temperature falls and whose logits are scaled up over the
run. We draw the noise anew for every axis; one seed for all axes, as in NVIDIA's code, gives axes of equal length the
same noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from nestling.arch import Layout
from nestling.budget import Budget

TAU = (1.0, 0.05)  # temperature, geometrically from the first to the last step
SCALE = (1.0, 10.0)  # factor on the logits, linearly
DEAD_ZONE = 0.05  # how far below the budget costs nothing


class Router(nn.Module):
    """Probabilities over sizes for each axis and budget.

    choices: axis -> sizes, the full size first. names: the members that it chooses for, in the order of the one-hot.
    """

    def __init__(self, choices: Mapping[str, Sequence[int]], names: Sequence[str], *, width: int, seed: int) -> None:
        super().__init__()
        self.choices = {axis: tuple(sizes) for axis, sizes in choices.items()}
        self.names = tuple(names)
        self.nets = nn.ModuleDict(
            {
                axis: nn.Sequential(nn.Linear(len(names), width), nn.LeakyReLU(0.1), nn.Linear(width, len(sizes)))
                for axis, sizes in self.choices.items()
            }
        )
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.zero_() if name.endswith("bias") else parameter.normal_(0.0, 0.1, generator=generator)

    def logits(self, name: str) -> dict[str, Tensor]:
        """The unscaled logits over sizes of every axis for one member."""
        device = next(self.parameters()).device
        budget = torch.zeros(len(self.names), device=device)
        budget[self.names.index(name)] = 1.0
        return {axis: net(budget) for axis, net in self.nets.items()}

    def forward(self, name: str, progress: float, generator: torch.Generator) -> dict[str, Tensor]:
        """Sampled soft choices of every axis. progress: 0 at the first step of the soft phase, 1 at its last.

        Returns axis -> [choices], each summing to one.
        """
        tau = TAU[0] * (TAU[1] / TAU[0]) ** progress
        scale = SCALE[0] + (SCALE[1] - SCALE[0]) * progress
        sampled = {}
        for axis, z in self.logits(name).items():
            uniform = torch.rand(z.shape, generator=generator).to(z.device).clamp_(1e-9, 1 - 1e-7)
            sampled[axis] = torch.softmax((scale * z - torch.log(-torch.log(uniform))) / tau, dim=-1)
        return sampled

    def preference(self, name: str) -> dict[str, Tensor]:
        """Log-probabilities over sizes without noise, at the end of training's scale."""
        return {axis: torch.log_softmax(SCALE[1] * z.detach(), dim=-1) for axis, z in self.logits(name).items()}

    def settled(self, name: str) -> dict[str, float]:
        """The expected sizes without noise: where the router stands."""
        return {
            axis: float(n) for axis, n in self.expected({a: p.exp() for a, p in self.preference(name).items()}).items()
        }

    def stairs(self, p: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """For every unit the probability that it stays: stairs[i] = sum over choices k with i < n_k of p_k.

        Returns axis -> [full size].
        """
        return {axis: weigh(p[axis], sizes, sizes[0]) for axis, sizes in self.choices.items()}

    def expected(self, p: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The expected size along every axis."""
        return {
            a: (p[a] * torch.tensor(n, dtype=p[a].dtype, device=p[a].device)).sum() for a, n in self.choices.items()
        }


def weigh(p: Tensor, sizes: Sequence[int], full: int) -> Tensor:
    """The stairs of one axis. p: [choices]. Returns [full]."""
    unit = torch.arange(full, device=p.device)
    stays = unit[None, :] < torch.tensor(sizes, device=p.device)[:, None]  # [choices, full]
    return (p[:, None] * stays.to(p.dtype)).sum(0)


def hard_stairs(
    p: Mapping[str, Tensor], choices: Mapping[str, Sequence[int]]
) -> tuple[dict[str, int], dict[str, Tensor]]:
    """The most probable size of every axis and straight-through stairs: exactly one, with the gradient of the soft
    ones.

    Returns the sizes, and axis -> [chosen size].
    """
    sizes = {axis: choices[axis][int(p[axis].argmax())] for axis in p}
    stairs = {}
    for axis, size in sizes.items():
        soft = weigh(p[axis], choices[axis], choices[axis][0])[:size]
        stairs[axis] = torch.ones_like(soft) + (soft - soft.detach())
    return sizes, stairs


def budget_loss(budget: Budget, layout: Layout, expected: Mapping[str, Tensor]) -> Tensor:
    """|C / C_target - 1| of the expected sizes, zero inside the dead zone.

    The zone ends at the budget, which a frozen member must not exceed; C_target here is the zone's middle.
    """
    middle = budget.target * (1 - DEAD_ZONE / 2)
    distance = (budget.spent(layout, {**layout.sizes, **expected}) / middle - 1).abs()
    return torch.where(distance > DEAD_ZONE / 2, distance, torch.zeros_like(distance))


def pull_to_full(p: Mapping[str, Tensor]) -> Tensor:
    """How far the full member's choices are from the full sizes: mean over axes of one minus their probability."""
    return torch.stack([1 - one[0] for one in p.values()]).mean()
