"""Training against stock models and autograd on them, and what a run refuses."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from run_ranks import write_text
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer

from nestling import budget, hf
from nestling.data import Stream
from nestling.distill import forward_kl
from nestling.elastic import ElasticModel
from nestling.nest import open_nest
from nestling.train import TrainSettings, train

STAGE = "tokens=256,length=16,batch=4,lr=1e-3"  # four steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("train")
    write_text(made / "text.jsonl")
    for name in ("llama", "qwen3", "nemotron_h"):
        tiny.save(name, made / name, is_chatty=True)
    return made


@pytest.fixture
def run(folder: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Train a nest of this name into `tmp_path/to`; returns what the log says of each step."""

    def go(name: str = "llama", *, to: str = "to", **settings: Any) -> list[dict[str, Any]]:
        given: dict[str, Any] = {"data": str(folder / "text.jsonl"), "warmup": 1, "stage": (STAGE,)}
        given |= {"member": ("a=ffn=40",)} | settings
        train(TrainSettings(**given), folder / name, tmp_path / to, say=lambda line: None)
        return [json.loads(line) for line in (tmp_path / to / "nest" / "train.jsonl").read_text().splitlines()]

    return go


def first_batch(folder: Path, batch: int = 4) -> Tensor:
    tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
    return Stream(str(folder / "text.jsonl"), tokenizer, length=16).next_batch(batch)


def torch_kl(student: Tensor, teacher: Tensor) -> float:
    """torch's own loss over all tokens. student, teacher: [batch, time, vocab]"""
    student, teacher = (x.double().flatten(0, 1).log_softmax(-1) for x in (student, teacher))
    return float(F.kl_div(student, teacher, reduction="batchmean", log_target=True))


# What the llama's parameters keep at hidden 36, ffn 40 and two of the three query heads of each key-value head.
HIDDEN, FFN = list(range(36)), list(range(40))
HEADS = [head * 8 + i for head in (0, 1, 3, 4) for i in range(8)]
KEYS = list(range(16))
WHERE = {
    "embed_tokens": (None, HIDDEN),
    "lm_head": (None, HIDDEN),
    "q_proj": (HEADS, HIDDEN),
    "k_proj": (KEYS, HIDDEN),
    "v_proj": (KEYS, HIDDEN),
    "o_proj": (HIDDEN, HEADS),
    "gate_proj": (FFN, HIDDEN),
    "up_proj": (FFN, HIDDEN),
    "down_proj": (HIDDEN, FFN),
    "norm": (HIDDEN,),
}


def where(name: str) -> tuple[list[int] | slice, ...]:
    (key,) = [key for key in WHERE if key in name]
    return tuple(slice(None) if one is None else one for one in WHERE[key])


def cut(tensor: Tensor, place: tuple[list[int] | slice, ...]) -> Tensor:
    return tensor[place[0]] if len(place) == 1 else tensor[place[0]][:, place[1]]


def test_a_members_gradient_is_that_of_a_stock_small_model_and_zero_outside_it() -> None:
    model = tiny.model("llama").requires_grad_(True)
    names = dict(model.named_parameters())
    small = tiny.build(tiny.config("llama", hidden_size=36, intermediate_size=40, num_attention_heads=4, head_dim=8))
    small.load_state_dict({name: cut(tensor.detach(), where(name)) for name, tensor in names.items()})
    small.requires_grad_(True)
    x, target = tiny.tokens(), torch.randn(2, 11, tiny.VOCAB, generator=torch.Generator().manual_seed(0))
    forward_kl(small(input_ids=x).logits, target).backward()
    elastic = ElasticModel(model)
    forward_kl(elastic({"hidden": 36, "ffn": 40, "q": 2}, input_ids=x).logits, target).backward()
    for name, parameter in names.items():
        gradient, place = parameter.grad, where(name)
        expected = small.get_parameter(name).grad
        assert gradient is not None
        assert expected is not None
        inside = torch.zeros_like(gradient, dtype=torch.bool)
        rows = torch.zeros(len(gradient), dtype=torch.bool)
        rows[place[0]] = True
        if len(place) == 2:
            columns = torch.zeros(gradient.shape[1], dtype=torch.bool)
            columns[place[1]] = True
            inside = rows[:, None] & columns
        else:
            inside = rows
        assert not gradient[~inside].any(), name
        # The same operations on views of other strides: a few units in the last place.
        torch.testing.assert_close(cut(gradient, place), expected, rtol=1e-4, atol=1e-7, msg=name)
        assert cut(gradient, place).any(), name


def test_a_member_without_a_layer_gives_that_layer_no_gradient() -> None:
    elastic = ElasticModel(tiny.model("nemotron_h").requires_grad_(True), layer_order=(4, 0, 3, 2, 1))
    elastic({"layer": 3}, input_ids=tiny.tokens(), use_cache=False).logits.square().sum().backward()
    reached = [any(p.grad is not None for p in layer.parameters()) for layer in elastic.layers]
    assert reached == [True, False, False, True, True]


def test_the_first_losses_are_those_of_stock_models_cut_by_hand(run: Callable, folder: Path) -> None:
    (first, *_) = run(member=("a=ffn=40,hidden=36,q=2", "deep=layer=2"))
    parent = tiny.model("llama")
    small = tiny.build(tiny.config("llama", hidden_size=36, intermediate_size=40, num_attention_heads=4, head_dim=8))
    small.load_state_dict({name: cut(tensor, where(name)) for name, tensor in parent.named_parameters()})
    shallow = tiny.build(tiny.config("llama", num_hidden_layers=2))
    shallow.load_state_dict({k: v for k, v in parent.state_dict().items() if ".layers.2." not in k})
    x = first_batch(folder)
    teacher = tiny.logits(parent, x)
    assert first["loss"]["100"] == 0
    for name, model in (("a", small), ("deep", shallow)):
        assert first["loss"][name] == pytest.approx(torch_kl(tiny.logits(model, x), teacher), rel=1e-5)
        assert first["loss"][name] > 0.01


def test_training_the_full_member_alone_changes_nothing(run: Callable, folder: Path, tmp_path: Path) -> None:
    log = run(member=("a=ffn=40",), stage=(STAGE + ",weights=1/0", STAGE + ",weights=0/1"))
    assert [list(line["loss"]) for line in log] == [["100"]] * 4 + [["a"]] * 4
    assert [line["grad_norm"] for line in log[:4]] == [0] * 4
    assert [line["loss"]["100"] for line in log[:4]] == [0] * 4
    before, after = (load_file(one / "model.safetensors") for one in (folder / "llama", tmp_path / "to"))
    outside = {name: (before[name], after[name]) for name in before if "mlp" in name}
    for name, (old, new) in outside.items():
        columns = slice(40, None)
        left, right = (x[:, columns] if "down" in name else x[columns] for x in (old, new))
        assert torch.equal(left, right), name  # outside of the one member that was trained
        assert not torch.equal(old, new), name


def test_another_teacher_gives_other_losses_and_other_weights(run: Callable, folder: Path, tmp_path: Path) -> None:
    tiny.model("llama", seed=1).save_pretrained(tmp_path / "other")
    tiny.add_sidecars(tmp_path / "other")
    settings = TrainSettings(data=str(folder / "text.jsonl"), member=("a=ffn=40",), stage=(STAGE,), warmup=1)
    train(settings, tmp_path / "other", tmp_path / "other-to", say=lambda line: None)
    log = run()
    other = [json.loads(line) for line in (tmp_path / "other-to" / "nest" / "train.jsonl").read_text().splitlines()]
    assert all(line["loss"]["a"] > 0 for line in log + other)
    assert all(a["loss"]["a"] != b["loss"]["a"] for a, b in zip(log, other, strict=True))
    before, after = (load_file(one / "model.safetensors") for one in (folder / "llama", tmp_path / "to"))
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_padding_rows_of_the_vocabulary_are_neither_counted_nor_trained(tmp_path: Path, folder: Path) -> None:
    model = tiny.model("llama", vocab_size=112)  # the tokenizer has 96
    with torch.no_grad():
        model.lm_head.weight[96:] *= 50
    model.save_pretrained(tmp_path / "padded")
    tiny.add_sidecars(tmp_path / "padded")
    settings = TrainSettings(data=str(folder / "text.jsonl"), member=("deep=layer=2",), stage=(STAGE,), warmup=1)
    train(settings, tmp_path / "padded", tmp_path / "to", say=lambda line: None)
    first = json.loads((tmp_path / "to" / "nest" / "train.jsonl").read_text().splitlines()[0])
    shallow = tiny.build(tiny.config("llama", num_hidden_layers=2, vocab_size=112))
    shallow.load_state_dict({k: v for k, v in model.state_dict().items() if ".layers.2." not in k})
    x = first_batch(folder)
    student, teacher = (tiny.logits(one, x)[..., :96] for one in (shallow, model))
    assert first["loss"]["deep"] == pytest.approx(torch_kl(student, teacher), rel=1e-5)
    after = load_file(tmp_path / "to" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(after[96:], model.lm_head.weight[96:])
    assert not torch.equal(after[:96], model.lm_head.weight[:96])


def test_stages_change_length_and_weights_and_every_member_is_logged(run: Callable) -> None:
    stages = ("tokens=256,length=8,batch=4,lr=1e-3", "tokens=512,length=32,batch=4,lr=5e-4,weights=0.5/0.3/0.2")
    log = run(member=("a=ffn=40", "b=ffn=24"), stage=stages)
    assert [b["tokens"] - a["tokens"] for a, b in zip([{"tokens": 0}, *log], log, strict=False)] == [32] * 8 + [128] * 4
    assert all(list(line["loss"]) == ["100", "a", "b"] for line in log)
    assert all(math.isfinite(x) for line in log for x in line["loss"].values())
    assert log[7]["lr"] == pytest.approx(1e-4)
    assert log[8]["lr"] == pytest.approx(5e-4)


def test_a_members_weight_scales_its_gradient(run: Callable) -> None:
    # At the first step the full member's gradient is zero, so the norm is that of the other one times its weight.
    norms = []
    for i, weights in enumerate(("1/3", "1/1")):
        norms.append(run(to=f"to{i}", stage=(f"{STAGE},weights={weights}",))[0]["grad_norm"])
    assert norms[0] / norms[1] == pytest.approx(0.75 / 0.5, rel=1e-5)


def test_members_are_drawn_by_their_weights_when_one_runs_a_batch(run: Callable) -> None:
    stage = "tokens=3840,length=8,batch=8,lr=1e-4,weights=6/3/1"
    log = run(member=("a=layer=1,ffn=8", "b=layer=1,ffn=16"), stage=(stage,), members_per_batch=1)
    drawn = Counter(name for line in log for name in line["loss"])
    assert all(len(line["loss"]) == 1 for line in log)
    assert drawn.total() == len(log) == 60
    # Binomial: three standard deviations.
    for name, share in (("100", 0.6), ("a", 0.3), ("b", 0.1)):
        assert abs(drawn[name] - 60 * share) <= 3 * math.sqrt(60 * share * (1 - share)), drawn


def test_two_half_batches_before_a_step_equal_one_whole_batch(run: Callable) -> None:
    members, rest = ("a=ffn=24", "b=layer=2"), "tokens=512,length=16,lr=1e-3"
    whole = run("qwen3", to="whole", member=members, stage=(f"{rest},batch=4",))
    halves = run("qwen3", to="halves", member=members, stage=(f"{rest},batch=2",), accumulate=2)
    assert len(whole) == len(halves) == 8
    for a, b in zip(whole, halves, strict=True):
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5, abs=1e-7)  # float32 sums in another order
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("router", ["learned", "uniform"])
def test_members_frozen_by_a_router_keep_to_their_budgets(run: Callable, tmp_path: Path, router: str) -> None:
    log = run("nemotron_h", member=("70=active:0.7", "50=total:0.5", "own=hidden=40"), router=router,
              **({"router_share": 0.5, "router_hard": 0.5} if router == "learned" else {}))  # fmt: skip
    nest = open_nest(tmp_path / "to")
    full, cost = nest.cost(nest.member("full")), {name: nest.cost(one) for name, one in nest.members.items()}
    assert cost["70"].active_parameters <= 0.7 * full.active_parameters
    assert cost["50"].parameters <= 0.5 * full.parameters
    assert cost["70"].active_parameters > 0.6 * full.active_parameters
    assert cost["50"].parameters > 0.4 * full.parameters
    assert nest.members["own"].sizes == {"hidden": 40}
    soft = [line for line in log if line["phase"] == "router"]
    assert len(soft) == (2 if router == "learned" else 0)
    for line in soft:
        assert line["router"].keys() == {"70", "50"}
        assert line["budget_term"].keys() == line["probabilities"].keys() == {"100", "70", "50"}
        for axis, p in (pair for chosen in line["probabilities"].values() for pair in chosen.items()):
            assert sum(p) == pytest.approx(1, abs=1e-3), axis  # rounded to four digits


def test_bf16_runs_under_autocast_and_keeps_the_dtypes_of_the_parent(run: Callable, tmp_path: Path) -> None:
    log = run(dtype="bf16", member=("a=ffn=40",))
    exact = run(to="exact", member=("a=ffn=40",))
    assert log[0]["loss"]["a"] != exact[0]["loss"]["a"]
    assert log[0]["loss"]["a"] == pytest.approx(exact[0]["loss"]["a"], rel=0.1)  # eight bits through three layers
    assert {x.dtype for x in load_file(tmp_path / "to" / "model.safetensors").values()} == {torch.float32}


def test_members_come_close_to_the_teacher_and_the_full_one_stays(run: Callable, folder: Path, tmp_path: Path) -> None:
    members = {"a": {"ffn": 40}, "b": {"hidden": 40, "ffn": 40}}
    run("qwen3", member=("a=ffn=40", "b=hidden=40,ffn=40"), stage=("tokens=10240,length=32,batch=8,lr=4e-3",))
    x = first_batch(folder, batch=12)
    teacher = tiny.logits(tiny.shared("qwen3"), x)
    before, after = (ElasticModel(hf.load_model(one)) for one in (folder / "qwen3", tmp_path / "to"))
    with torch.no_grad():
        for name, sizes in members.items():
            old, new = (torch_kl(one(sizes, input_ids=x).logits, teacher) for one in (before, after))
            assert new < 0.5 * old, name
        assert torch_kl(after({}, input_ids=x).logits, teacher) < 0.15


def test_a_learning_rate_that_blows_up_stops_with_member_and_step(run: Callable, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(member '(100|a)' is|gradient's norm is) (nan|inf) at step \d"):
        run(stage=("tokens=2560,length=16,batch=4,lr=1e30",))
    assert not (tmp_path / "to").exists()


def test_weights_that_are_not_finite_stop_before_the_first_step(folder: Path, tmp_path: Path) -> None:
    tiny.save("llama", tmp_path / "broken", is_chatty=True)
    state = load_file(tmp_path / "broken" / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(state, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    settings = TrainSettings(data=str(folder / "text.jsonl"), member=("a=ffn=40",), stage=(STAGE,))
    with pytest.raises(RuntimeError, match="loss of member '100' is nan at step 0"):
        train(settings, tmp_path / "broken", tmp_path / "to", say=lambda line: None)


BUDGET = ("45=active:0.6",)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"router": "random"}, "'random' is not known: expected 'learned' or 'uniform'"),
        ({"dtype": "fp8"}, "'fp8' is not known: expected fp32 or bf16"),
        ({"router_share": 1.0}, "router_share 1.0 is not between 0 and 1"),
        ({"accumulate": 0}, "accumulate and checkpoint must be at least 1"),
        ({"checkpoint": 0}, "accumulate and checkpoint must be at least 1"),
        ({"router_lambda": 2.0}, r"\['router_lambda'\] would have no effect: every member has explicit sizes"),
        ({"router": "uniform"}, "router would have no effect: every member has explicit sizes"),
        ({"tolerance": 0.1}, r"\['tolerance'\] would have no effect"),
        (
            {"router": "uniform", "router_lr": 0.1, "member": BUDGET},
            "router_lr would have no effect with",
        ),
        ({"router": "uniform", "tolerance": 0.1, "member": BUDGET}, "tolerance would have no effect"),
        ({"members_per_batch": 2}, "members_per_batch is 2, the nest has 2 members: 0 trains all"),
        ({"stage": ("tokens=63,length=16,batch=4,lr=1e-3",)}, "makes no step: one step takes 64 tokens"),
        ({"accumulate": 5}, "makes no step: one step takes 320 tokens"),
        ({"stage": (STAGE + ",weights=1/1/1",)}, "has 3 weights; expected one for each of 100, a"),
        ({"member": ("a=ffn=40", "a=ffn=24")}, "'a' is given twice"),
        ({"member": ("100=ffn=40",)}, "'100' is the full model"),
        ({"member": ("s=active:0.01",)}, "cannot be met: the smallest sizes on offer cost"),
        ({"member": BUDGET, "router_share": 0.9}, "none is left for the members"),
    ],
)
def test_what_cannot_be_run_or_has_no_effect_is_refused_before_any_work(
    run: Callable, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(**settings)
    assert not list(tmp_path.iterdir())


def test_going_on_with_other_settings_is_refused_and_names_them(run: Callable, tmp_path: Path) -> None:
    (tmp_path / "to.work").mkdir()
    (tmp_path / "to.work" / "settings.json").write_text(json.dumps({"clip": 0.5}))
    with pytest.raises(ValueError, match=r"unfinished run with other .*clip was 0.5, is 1.0.*delete the folder"):
        run()


def test_what_the_router_left_open_is_measured_before_a_member_is_frozen(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sizes near the budget are tried: the frozen one has the lowest KL of them as a slice of the stock class."""
    tried: list[dict[str, int]] = []
    choose = budget.choose

    def watched(*args: Any, **options: Any) -> list[dict[str, int]]:
        tried.extend(choose(*args, **options))
        return tried

    monkeypatch.setattr(budget, "choose", watched)
    settings = TrainSettings(
        data=str(folder / "text.jsonl"), member=("70=total:0.7",), stage=(STAGE,), warmup=1, router_share=0.5,
        router_weights=0.0, router_tries=200,
    )  # fmt: skip
    nest = train(settings, folder / "llama", tmp_path / "to", say=lambda line: None)
    assert len(tried) >= 3
    x = first_batch(folder, batch=200)[8:12]  # after the router's two batches of four
    teacher = hf.load_model(folder / "llama")
    elastic = ElasticModel(hf.load_model(folder / "llama"))
    with torch.no_grad():
        target = teacher(input_ids=x).logits.log_softmax(-1)
        found = [
            float(
                F.kl_div(elastic(sizes, input_ids=x).logits.log_softmax(-1), target, log_target=True, reduction="sum")
            )
            for sizes in tried
        ]
    best = tried[found.index(min(found))]
    assert nest.sizes(nest.members["70"]) == nest.layout.sizes | best


def test_a_batch_in_which_nothing_counts_is_no_end_of_the_run(run: Callable, folder: Path) -> None:
    """A block that lies inside a long prompt has no completion to learn from."""
    (folder / "prompts.jsonl").write_text(json.dumps({"prompt": "abcd " * 60, "completion": "efg"}) + "\n")
    log = run(data=str(folder / "prompts.jsonl"), member=("a=ffn=40",), loss_on="completion",
              stage=("tokens=320,length=16,batch=1,lr=1e-3",))  # fmt: skip
    losses = [line["loss"]["a"] for line in log]
    assert 0 in losses
    assert max(losses) > 0


def test_depth_that_nobody_scored_is_said_to_keep_the_first_layers(folder: Path, tmp_path: Path) -> None:
    said: list[str] = []
    settings = TrainSettings(data=str(folder / "text.jsonl"), member=("short=layer=2",), stage=(STAGE,), warmup=1)
    train(settings, folder / "qwen3", tmp_path / "to", say=said.append)
    assert any("no layer was scored" in line for line in said)
