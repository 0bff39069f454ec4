"""What a run is asked to do: stages, learning rates, members, the sizes on offer; what wrong requests are told."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
from transformers import AutoConfig

from nestling import plan
from nestling.budget import parse_budget
from nestling.nest import Nest, open_nest

NAMES = ["100", "70", "45"]
Parents = Callable[[str], Path]


@pytest.fixture
def nest(parents: Parents) -> Nest:
    return open_nest(parents("nemotron_h"))


def stages(*texts: str, blocks: int = 1) -> list[plan.Stage]:
    return plan.parse_stages(texts, NAMES, blocks=blocks)


def test_a_stage_takes_as_many_steps_as_its_tokens_fill() -> None:
    (one,) = stages("tokens=1e4,length=32,batch=3,lr=1e-3", blocks=4)
    assert one.steps * 32 * 3 * 4 <= 10_000 < (one.steps + 1) * 32 * 3 * 4
    assert (one.length, one.batch, one.lr) == (32, 3, 1e-3)
    assert one.weights == pytest.approx(dict.fromkeys(NAMES, 1 / 3))


def test_weights_go_to_the_members_in_order_and_add_up_to_one() -> None:
    first, second = stages(
        "tokens=1e4,length=32,batch=3,lr=1e-3,weights=2/1/1", "tokens=1e4,length=64,batch=1,lr=1e-4,weights=0.5/0.3/0.2"
    )
    assert first.weights == {"100": 0.5, "70": 0.25, "45": 0.25}
    assert second.weights == pytest.approx({"100": 0.5, "70": 0.3, "45": 0.2})


GOOD = "tokens=1e4,length=32,batch=3,lr=1e-3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tokens=1e4,length=32,batch=3", "expected tokens=,length=,batch=,lr= and perhaps weights"),
        (GOOD + ",warmup=3", "expected tokens=,length=,batch=,lr= and perhaps weights"),
        ("tokens=many,length=32,batch=3,lr=1e-3", "not a number"),
        ("tokens=inf,length=32,batch=3,lr=1e-3", "not a number"),
        ("tokens=95,length=32,batch=3,lr=1e-3", "makes no step: one step takes 96 tokens"),
        ("tokens=1e4,length=0,batch=3,lr=1e-3", "makes no step"),
        ("tokens=1e4,length=32,batch=-3,lr=1e-3", "makes no step"),
        ("tokens=1e4,length=32,batch=3,lr=0", "lr is 0.0, expected a number above 0"),
        ("tokens=1e4,length=32,batch=3,lr=nan", "lr is nan, expected a number above 0"),
        (GOOD + ",weights=1/1", "has 2 weights; expected one for each of 100, 70, 45"),
        (GOOD + ",weights=1/1/1/1", "has 4 weights; expected one for each of 100, 70, 45"),
        (GOOD + ",weights=1/-1/1", "at least 0"),
        (GOOD + ",weights=0/0/0", "not all 0"),
        (GOOD + ",weights=1/nan/1", "at least 0"),
        (GOOD + ",weights=1/1/0", "45 has weight 0 in every stage and would not be trained"),
    ],
)
def test_a_stage_that_cannot_be_run_says_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        stages(text)


def test_a_member_without_weight_in_one_stage_may_have_it_in_another() -> None:
    assert stages(GOOD + ",weights=1/1/0", GOOD + ",weights=1/0/1")[0].weights["45"] == 0


def test_the_learning_rate_warms_up_and_falls_to_a_tenth_within_each_stage() -> None:
    first, second = stages("tokens=9600,length=32,batch=3,lr=1e-3", "tokens=4800,length=32,batch=3,lr=7e-4")
    warmup = 20
    rates = [plan.learning_rate(i, first, 0, warmup=warmup) for i in range(first.steps)]
    later = [plan.learning_rate(first.steps + i, second, first.steps, warmup=warmup) for i in range(second.steps)]
    assert (first.steps, second.steps) == (100, 50)
    assert rates[0] == pytest.approx(1e-3 / warmup)
    assert max(rates) == rates[warmup - 1] == pytest.approx(1e-3, rel=0.1)
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a > b for a, b in itertools.pairwise(rates[warmup:]))
    assert rates[-1] == pytest.approx(1e-4)
    assert (later[0], later[-1]) == (pytest.approx(7e-4), pytest.approx(7e-5))
    # A cosine is symmetric about its middle.
    assert later[10] + later[-11] == pytest.approx(later[0] + later[-1])


def test_a_router_stage_without_weight_on_a_budget_is_refused_at_once() -> None:
    stages = plan.parse_stages((GOOD + ",weights=1/0/1", GOOD + ",weights=1/1/1"), ["100", "asked", "own"], blocks=1)
    with pytest.raises(ValueError, match="no budget has a weight in a stage that the router learns in"):
        plan.count_soft_steps(stages, 0.6, ["asked"])


def test_the_warm_up_is_not_over_before_the_first_slice_is_trained() -> None:
    (stage,) = plan.parse_stages((GOOD,), ["100"], blocks=1)
    soft = 40
    late = [plan.learning_rate(i, stage, 0, warmup=20, since=soft) for i in range(soft, soft + 30)]
    unwarmed = [plan.learning_rate(i, stage, 0, warmup=1) for i in range(soft, soft + 30)]
    assert late[0] == pytest.approx(unwarmed[0] / 20)
    assert late[20:] == unwarmed[20:]


def test_the_routers_phase_is_its_share_and_leaves_steps_for_the_members() -> None:
    both = stages(GOOD, GOOD)
    total = sum(one.steps for one in both)
    assert plan.count_soft_steps(both, 0.25, ["70"]) == round(total / 4)
    assert plan.count_soft_steps(both, 1e-9, ["70"]) == 1
    with pytest.raises(ValueError, match=rf"takes {total} of the run's {total} steps, and none is left"):
        plan.count_soft_steps(both, 0.9999, ["70"])
    with pytest.raises(ValueError, match="takes 1 of the run's 1 steps"):
        plan.count_soft_steps(stages("tokens=96,length=32,batch=3,lr=1e-3"), 0.25, ["70"])


def test_a_budget_without_weight_while_the_router_learns_is_refused() -> None:
    both = stages(GOOD + ",weights=1/1/0", GOOD + ",weights=1/1/1")
    with pytest.raises(ValueError, match=r"'45' has weight 0 while the router learns \(the first 52 steps\)"):
        plan.count_soft_steps(both, 0.25, ["70", "45"])
    assert plan.count_soft_steps(both, 0.75, ["70", "45"]) > both[0].steps


def test_members_are_budgets_or_sizes(nest: Nest) -> None:
    sized, asked = plan.plan_members(("45=active:0.45", "narrow=hidden=32,ffn=8", "s=bytes:0.5,context=9"), nest)
    assert sized["narrow"].sizes == {"hidden": 32, "ffn": 8}
    assert sized["narrow"].budget == "hidden=32,ffn=8"
    assert list(asked) == ["45", "s"]
    assert asked["45"].target == pytest.approx(0.45 * nest.layout.count(active=True))
    assert asked["s"].context == 9


@pytest.mark.parametrize(
    ("members", "message"),
    [
        (("active:0.45",), "expected NAME=BUDGET or NAME=SIZES, such as 45=active:0.45"),
        (("=active:0.45",), "expected NAME=BUDGET or NAME=SIZES"),
        (("45=active:0.45", "45=total:0.45"), "'45' is given twice"),
        (("a=hidden=32", "a=active:0.45"), "'a' is given twice"),
        (("100=active:0.45",), "'100' is the full model"),
        (("full=active:0.45",), "'full' is the full model"),
        (("parent=hidden=32",), "'parent' is the full model"),
        (("a=hidden=64",), "asks for 64 units of 'hidden', the nest has 48"),
        (("a=expert=1",), "every token needs 2"),
        (("a=vocab=50",), "'vocab', which cannot shrink"),
        (("a=hidden=half",), "not a number"),
        (("a=active:1.5e9",), "more than the full model's"),
    ],
)
def test_a_member_that_cannot_be_had_says_why(nest: Nest, members: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan.plan_members(members, nest)


def options(nest: Nest, axes: str = "", floor: float = 0.25, most: int = 6, text: str = "total:0.8") -> dict:
    budget = parse_budget(text, nest.layout, nest.config)
    return plan.router_options(nest, [budget], axes=axes, floor=floor, most=most)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_combination_on_offer_is_a_config_that_the_stock_class_takes(parents: Parents, name: str) -> None:
    nest = open_nest(parents(name))
    found = options(nest, most=4)
    layout, complete = nest.layout, tiny.config(name).to_dict()
    assert set(found) <= set(layout.elastic()) - {"layer"}
    assert {"hidden"} <= found.keys()
    for width, q in itertools.product(found["hidden"], found.get("q", (layout.sizes["q"],))):
        small = complete | {"hidden_size": width, "num_attention_heads": layout.sizes["kv"] * q}
        assert AutoConfig.for_model(**small).hidden_size == width
    if "expert" in found:
        # The kernel of fused experts wants rows of 16 bytes, in bf16 too.
        assert all(n % 8 == 0 for axis in ("hidden", "effn") for n in found.get(axis, ())[1:])
        assert min(found["expert"]) >= (layout.num_active or 0)


def test_llama_widths_stay_multiples_of_every_number_of_heads(parents: Parents) -> None:
    nest = open_nest(parents("llama"))
    with pytest.raises(ValueError, match=r"hidden=4 offers hidden .* beside q .* stock config refuses.*hidden=12"):
        options(nest, axes="hidden=4,q=1")
    with pytest.raises(ValueError, match=r"member 'a': the stock config refuses hidden=40.*: 12"):
        plan.plan_members(("a=hidden=40",), nest)
    assert plan.plan_members(("a=hidden=40,q=2",), nest)[0]["a"].sizes == {"hidden": 40, "q": 2}


def test_named_axes_alone_shrink_and_by_the_step_given(nest: Nest) -> None:
    found = options(nest, axes="hidden=16,ffn=4", text="total:0.9")
    assert found == {"hidden": (48, 32, 16), "ffn": (28, 24, 20, 16, 12, 8)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"axes": "vocab=8"}, "cannot shrink vocab"),
        ({"axes": "layer=1"}, "cannot shrink layer"),
        ({"axes": "hidden=0"}, "cannot shrink hidden"),
        ({"axes": "hidden"}, "cannot read sizes"),
        ({"axes": "hidden=8,ffn=28"}, "no size of ffn between router_floor and the full one"),
        ({"floor": 0.0}, "router_floor is 0.0"),
        ({"floor": 1.5}, "router_floor is 1.5"),
        ({"most": 1}, "router_choices 1"),
        ({"floor": 0.9}, "cannot be met: the smallest sizes on offer cost"),
    ],
)
def test_options_that_make_no_sense_are_refused(nest: Nest, given: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(nest, **given)
