"""The router against loops written out: stairs, expected sizes, noise, schedules, and what the budget term does."""

import math

import pytest
import tiny
import torch
from torch import Tensor

from nestling import budget as budgets
from nestling.elastic import ElasticModel, Run
from nestling.router import Router, budget_loss, hard_stairs, pull_to_full

CHOICES = {"hidden": (48, 40, 32, 16), "expert": (6, 4, 2), "effn": (24, 16, 12, 8), "ffn": (28, 20, 8)}
NAMES = ("100", "70", "45")


def router(choices: dict[str, tuple[int, ...]] = CHOICES, seed: int = 0) -> Router:
    return Router(choices, NAMES, width=32, seed=seed)


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_stairs_are_the_probability_that_a_unit_stays_and_add_up_to_the_expected_size() -> None:
    net = router()
    p = net("70", 0.3, noise())
    stairs, expected = net.stairs(p), net.expected(p)
    for axis, sizes in CHOICES.items():
        assert len(stairs[axis]) == sizes[0]
        for i in range(sizes[0]):
            stays = math.fsum(float(q) for q, n in zip(p[axis].detach(), sizes, strict=True) if i < n)
            assert float(stairs[axis][i].detach()) == pytest.approx(stays, abs=1e-6)
        mean = math.fsum(float(q) * n for q, n in zip(p[axis].detach(), sizes, strict=True))
        assert float(expected[axis].detach()) == pytest.approx(mean, rel=1e-6)
        assert float(stairs[axis].detach().sum()) == pytest.approx(mean, rel=1e-5)  # float32 sum of up to 48 terms


def test_probabilities_sum_to_one_and_every_member_has_its_own() -> None:
    net = router()
    seen = [net(name, 0.0, noise()) for name in NAMES]
    for p in seen:
        assert all(float(one.detach().sum()) == pytest.approx(1, abs=1e-6) for one in p.values())
    assert not torch.equal(seen[0]["hidden"], seen[1]["hidden"])
    assert not torch.equal(seen[1]["hidden"], seen[2]["hidden"])


def test_noise_differs_between_axes_of_equal_length() -> None:
    net = router({"ffn": (28, 20, 8), "sffn": (28, 20, 8)})
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    p = net("70", 0.0, noise())
    assert not torch.allclose(p["ffn"], p["sffn"])


def test_noise_is_gumbel_and_follows_the_generator() -> None:
    net = router({"ffn": (3, 2, 1)})
    with torch.no_grad():
        net.nets["ffn"][-1].bias.copy_(torch.tensor([1.0, 0.0, -1.0]))  # type: ignore[index, union-attr]
        net.nets["ffn"][-1].weight.zero_()  # type: ignore[index, union-attr]
    generator = noise(3)
    wins = [0, 0, 0]
    for _ in range(1000):
        wins[int(net("70", 0.0, generator)["ffn"].argmax())] += 1
    # The Gumbel-max law: the winner is drawn from the softmax of the logits. 1000 draws: within 0.05 at three sigma.
    weights = [math.exp(z) for z in (1.0, 0.0, -1.0)]
    for won, weight in zip(wins, weights, strict=True):
        assert won / 1000 == pytest.approx(weight / sum(weights), abs=0.05)
    assert torch.equal(net("70", 0.5, noise(7))["ffn"], net("70", 0.5, noise(7))["ffn"])
    assert not torch.equal(net("70", 0.5, noise(7))["ffn"], net("70", 0.5, noise(8))["ffn"])


@pytest.mark.parametrize(("progress", "tau", "scale"), [(0.0, 1.0, 1.0), (1.0, 0.05, 10.0), (0.5, 0.05**0.5, 5.5)])
def test_temperature_falls_geometrically_and_the_scale_rises_linearly(
    progress: float, tau: float, scale: float
) -> None:
    # Two passes with the same noise: the difference of the log-odds is the difference of the logits times scale / tau.
    net = router({"ffn": (2, 1)})
    odds = []
    for bias in (0.0, 0.05):
        with torch.no_grad():
            net.nets["ffn"][-1].bias[0] = bias  # type: ignore[index, union-attr]
        p = net("70", progress, noise(1))["ffn"].detach().double()
        odds.append(float(p[0].log() - p[1].log()))
    assert odds[1] - odds[0] == pytest.approx(0.05 * scale / tau, rel=1e-2)  # float32 log of a small probability


def test_hard_stairs_are_exactly_one_and_carry_the_gradient_of_the_soft_ones() -> None:
    net = router()
    p = net("45", 0.8, noise())
    sizes, stairs = hard_stairs(p, CHOICES)
    for axis, n in sizes.items():
        assert n == CHOICES[axis][int(p[axis].argmax())]
        assert torch.equal(stairs[axis].detach(), torch.ones(n))
    weight = torch.randn(sizes["hidden"], generator=noise(2))
    hard = torch.autograd.grad((stairs["hidden"] * weight).sum(), p["hidden"], retain_graph=True)[0]
    soft = torch.autograd.grad((net.stairs(p)["hidden"][: len(weight)] * weight).sum(), p["hidden"])[0]
    torch.testing.assert_close(hard, soft)
    assert hard.any()


@pytest.mark.parametrize("is_hard", [False, True])
@pytest.mark.parametrize("name", ["nemotron_h", "qwen3", "mixtral"])
def test_the_gradient_reaches_the_logits_of_every_axis(name: str, is_hard: bool) -> None:
    elastic = ElasticModel(tiny.model(name))
    layout = elastic.layout
    grains = {a: 8 if a in {"hidden", "effn", "ffn", "sffn"} else 1 for a in layout.elastic() if a != "layer"}
    options = budgets.choices(layout, elastic.config, grains=grains, floor=0.3, most=4)
    assert options.keys() == grains.keys()
    net = router(options)
    with torch.no_grad():
        # The second size is likely: the stairs of the smallest one are one whatever the router says.
        for net_of_axis in net.nets.values():
            net_of_axis[-1].bias[1] = 3.0  # type: ignore[index]
    p = net("45", 0.2, noise(5))
    if is_hard:
        sizes, stairs = hard_stairs(p, options)
        run = Run(sizes=sizes, stairs=stairs)
    else:
        run = Run(stairs=net.stairs(p), is_soft=True)
    weight = torch.randn(2, 11, tiny.VOCAB, generator=noise(6))
    (elastic(run, input_ids=tiny.tokens(), use_cache=False).logits * weight).sum().backward()
    for axis in options:
        gradient = net.nets[axis][-1].bias.grad  # type: ignore[index, union-attr]
        assert gradient is not None, axis
        assert gradient.isfinite().all(), axis
        assert gradient.any(), axis


def expected_sizes(layout_sizes: dict[str, int], **given: float) -> dict[str, Tensor]:
    return {axis: torch.tensor(float(n), requires_grad=True) for axis, n in (layout_sizes | given).items()}


def test_the_budget_term_is_zero_in_the_dead_zone_and_pulls_towards_it_outside() -> None:
    layout, (_, config) = tiny.layout("nemotron_h"), tiny.known("nemotron_h")
    budget = budgets.parse_budget("total:0.6", layout, config)
    cases = set()
    for width in torch.arange(16, 48.1, 0.25).tolist():
        sizes = expected_sizes(layout.sizes, hidden=width)
        spent = layout.count(layout.sizes | {"hidden": width}) / (0.6 * layout.count())
        off = spent / 0.975 - 1  # from the middle of the zone
        loss = budget_loss(budget, layout, sizes)
        (gradient,) = torch.autograd.grad(loss, sizes["hidden"])
        inside = abs(off) <= 0.025
        assert float(loss.detach()) == (0 if inside else pytest.approx(abs(off), rel=1e-4))
        if not inside:
            assert (gradient > 0) == (off > 0)
        else:
            assert gradient == 0
        cases.add((inside, off > 0))
    assert cases == {(True, True), (True, False), (False, True), (False, False)}


@pytest.mark.parametrize(("name", "kind"), [("nemotron_h", "active"), ("llama", "bytes")])
def test_a_router_trained_on_the_budget_term_alone_meets_several_budgets(name: str, kind: str) -> None:
    layout, (_, config) = tiny.layout(name), tiny.known(name)
    extra = ",format=bf16,context=64,batch=2" if kind == "bytes" else ""
    asked = {one: budgets.parse_budget(f"{kind}:0.{one}{extra}", layout, config) for one in ("70", "45")}
    grains = {"hidden": 4, "effn": 4, "ffn": 4, "q": 1}
    options = budgets.choices(
        layout, config, grains={a: g for a, g in grains.items() if a in layout.sizes}, floor=0.25, most=8
    )
    net = router(options)
    optimizer, generator, steps = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0), noise(), 210
    for step in range(steps):
        one = NAMES[step % 3]
        p = net(one, step / (steps - 1), generator)
        loss = pull_to_full(p) if one == "100" else budget_loss(asked[one], layout, net.expected(p))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert net.settled("100") == pytest.approx({axis: n[0] for axis, n in options.items()}, rel=0.02)
    for one, budget in asked.items():
        with torch.no_grad():
            drawn = [net.expected(net(one, 1.0, generator)) for _ in range(31)]
            spent = [float(budget.spent(layout, layout.sizes | sizes)) / budget.target for sizes in drawn]
        assert 0.89 <= sorted(spent)[len(spent) // 2] <= 1.06, one  # sizes are whole: the zone may lie between two


def test_the_pull_to_full_is_the_missing_probability_of_the_full_sizes() -> None:
    p = {"hidden": torch.tensor([0.5, 0.25, 0.25]), "ffn": torch.tensor([0.9, 0.1])}
    assert float(pull_to_full(p)) == pytest.approx((0.5 + 0.1) / 2)
    assert float(pull_to_full({"hidden": torch.tensor([1.0, 0.0])})) == 0


def test_the_seed_alone_decides_how_a_router_starts() -> None:
    first, same, other = router(seed=4), router(seed=4), router(seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.logits("70")["hidden"], other.logits("70")["hidden"])
    drawn = torch.cat([p.detach().flatten() for name, p in router().named_parameters() if name.endswith("weight")])
    assert float(drawn.std()) == pytest.approx(0.1, rel=0.1)  # 700 draws
