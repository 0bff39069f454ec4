"""The laws of the design, for every architecture and variant, on tiny random models in float32.

Each law is a function `check_...(arch, complete, model, ...)` that raises where a table is wrong; test_mutations.py
shows that wrong tables are caught by them. Orders are drawn anew for every layer and every enclosing unit.

Tolerance: where the operations are the same we ask for equal bits. Where sums run in another order, or a mask stands
for a cut, float32 rounding of a few layers is about 1e-5 of the logits' spread; a wrong table moves them by about 1.
We ask for 2e-4.
"""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from nestling import hf
from nestling.axes import axes_of, dims, take
from nestling.checkpoint import Checkpoint
from nestling.cost import state_size
from nestling.elastic import ElasticModel, Run
from nestling.nest import Member, open_nest
from nestling.slice import slice as slice_member
from nestling.sort import sort

ROUNDING = 2e-4  # of the logits' standard deviation


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal to rounding, relative to how far the logits spread."""
    assert found.shape == expected.shape
    difference = ((found - expected).abs().max() / expected.std()).item()
    assert difference < ROUNDING, f"logits differ by {difference:.2g} of their spread"


# Law 1: cover.


def check_cover(arch, complete, names_and_shapes: dict[str, tuple[int, ...]], spelling: str) -> None:
    layout = arch.layout(complete, spelling)
    layout.check_cover(names_and_shapes.keys())
    for name, shape in names_and_shapes.items():
        assert dims(layout.find(name).shape, layout.sizes) == shape, name


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_parameter_in_memory_matches_one_row(name):
    arch, complete = tiny.known(name)
    model = tiny.shared(name)
    shapes = {n: tuple(t.shape) for n, t in hf.state_of(model).items()}
    check_cover(arch, complete, shapes, "memory")
    stock = set(model.state_dict()) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set())
    assert shapes.keys() == stock


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_tensor_on_disk_matches_one_row(name, parents):
    checkpoint = Checkpoint(parents(name))
    nest = open_nest(parents(name))
    check_cover(nest.layout.arch, nest.config, {n: e.shape for n, e in checkpoint.entries.items()}, "disk")


def test_nemotron_h_really_goes_to_disk_with_other_names_than_in_memory(parents):
    disk = Checkpoint(parents("nemotron_h")).entries.keys()
    memory = tiny.shared("nemotron_h").state_dict().keys()
    assert {n for n in disk if n.startswith("backbone.layers.1.mixer.experts.")} == {
        f"backbone.layers.1.mixer.experts.{e}.{w}_proj.weight" for e in range(6) for w in ("up", "down")
    }
    assert {n for n in memory if ".experts." in n and "shared" not in n} == {
        "model.layers.1.mixer.experts.up_proj", "model.layers.1.mixer.experts.down_proj",
    }  # fmt: skip


# The tiny models themselves: a law that moves an unused parameter proves nothing.


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_parameter_of_a_tiny_model_matters_for_its_logits(name):
    model = tiny.model(name).requires_grad_(True)
    out = model(input_ids=tiny.tokens(12, 40), use_cache=False).logits
    (out * torch.randn(out.shape, generator=generator())).sum().backward()
    for part, parameter in model.named_parameters():
        rows = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
        if "embed" in part and not model.config.tie_word_embeddings:
            rows = rows[tiny.tokens(12, 40).unique()]
        assert (rows != 0).any(-1).all(), f"some rows of {part} do not reach the logits"
    routers = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    before = tiny.logits(model)
    for buffer in routers:
        with torch.no_grad():
            buffer.copy_(buffer.flip(0))
    assert not routers or not torch.equal(before, tiny.logits(model))


# Law 2: sorting changes no logit.


def check_sort(arch, complete, model: nn.Module, axes: tuple[str, ...], seed: int = 0) -> None:
    layout = arch.layout(complete, "memory")
    orders = tiny.random_orders(layout, generator(seed), axes)
    state = tiny.take_all(hf.state_of(model), arch, complete, orders)
    assert_close(tiny.logits(tiny.load(arch, complete, state)), tiny.logits(model))


def width_axes(arch, complete) -> list[str]:
    return [axis for axis in arch.layout(complete, "memory").elastic() if axis != "layer"]


def elastic_cases() -> Iterator:
    for name in tiny.NAMES:
        for axis in width_axes(*tiny.known(name)):
            yield pytest.param(name, axis, id=f"{name}-{axis}")


@pytest.mark.parametrize(("name", "axis"), list(elastic_cases()))
def test_sorting_any_axis_leaves_logits_unchanged(name, axis):
    check_sort(*tiny.known(name), tiny.shared(name), (axis,))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_sorting_all_axes_together_leaves_logits_unchanged(name):
    arch, complete = tiny.known(name)
    check_sort(arch, complete, tiny.shared(name), tuple(width_axes(arch, complete)))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_orders_really_move_weights(name):
    arch, complete = tiny.known(name)
    state = hf.state_of(tiny.shared(name))
    for axis in width_axes(arch, complete):
        backwards = torch.arange(tiny.layout(name).sizes[axis]).flip(0).expand(tiny.layout(name).order_shape(axis))
        moved = tiny.take_all(state, arch, complete, {axis: backwards})
        assert any(not torch.equal(state[n], moved[n]) for n in state), axis


# Law 2 for depth.


def without_layers_by_hand(model: nn.Module, layers: list[int]) -> nn.Module:
    """A copy of the stock model whose ModuleList holds only these layers. No table is asked."""
    small = copy.deepcopy(model)
    inner = small.model
    inner.layers = nn.ModuleList(inner.layers[i] for i in layers)
    for key in ("layer_types", "layers_block_type"):
        if getattr(model.config, key, None) is not None:
            setattr(inner.config, key, [getattr(model.config, key)[i] for i in layers])
    if model.config.model_type != "nemotron_h":  # there the number is the list's length
        inner.config.num_hidden_layers = len(layers)
    return small


def check_depth(arch, complete, model: nn.Module, layers: list[int]) -> None:
    state = tiny.take_all(hf.state_of(model), arch, complete, {}, layers=layers)
    small = tiny.load(arch, arch.resize(complete, arch.sizes(complete), layers), state)
    assert torch.equal(tiny.logits(small), tiny.logits(without_layers_by_hand(model, layers)))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_depth_member_equals_the_stock_model_without_those_modules(name):
    arch, complete = tiny.known(name)
    num_layers = len(arch.kinds(complete))
    for left_out in range(num_layers):
        check_depth(arch, complete, tiny.shared(name), [i for i in range(num_layers) if i != left_out])


@pytest.mark.parametrize("name", tiny.NAMES)
def test_elastic_depth_member_equals_the_stock_model_without_those_modules(name):
    model = tiny.model(name)
    num_layers = len(tiny.layout(name).kinds)
    order = torch.randperm(num_layers, generator=generator(3)).tolist()
    elastic = ElasticModel(tiny.model(name), layer_order=order)
    for size in range(1, num_layers + 1):
        by_hand = without_layers_by_hand(model, sorted(order[:size]))
        with torch.no_grad():
            found = elastic({"layer": size}, input_ids=tiny.tokens(), use_cache=False).logits
        assert torch.equal(found, tiny.logits(by_hand))


# Law 3: a disk slice is the member, through real files.


def check_files(parent: Path, folder: Path, *, seed: int = 0, num_members: int = 3) -> None:
    """Sort a parent on disk by random orders, cut members of random sizes, load them with the stock loader."""
    nest = open_nest(parent)
    draws = generator(seed)
    nest = sort(parent, tiny.random_orders(nest.layout, draws), folder / "nest")
    assert_close(tiny.logits(stock_load(folder / "nest")), tiny.logits(stock_load(parent)))
    elastic = ElasticModel(stock_load(folder / "nest"), layer_order=nest.layer_order)
    for i in range(num_members):
        member = Member(name=str(i), sizes=tiny.random_sizes(nest.layout, draws))
        small = stock_load(slice_member(nest, member, folder / member.name))
        with torch.no_grad():
            live = elastic(member.sizes, input_ids=tiny.tokens(), use_cache=False).logits
        assert torch.equal(tiny.logits(small), live), member.sizes


def stock_load(folder: Path) -> nn.Module:
    """What the stock loader makes of a folder; it may have nothing to say about its keys."""
    model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(told[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), told
    return model.eval()


@pytest.mark.parametrize("name", tiny.NAMES)
def test_slice_on_disk_loads_in_the_stock_class_and_equals_the_live_member_bit_for_bit(name, parents, tmp_path):
    check_files(parents(name), tmp_path)


# An oracle for slicing: the same cut, written down parameter by parameter from the stock forward code.


def by_hand(model: nn.Module, keep: dict[str, Tensor]) -> dict[str, Tensor]:
    """The memory state of a smaller model, by explicit index expressions and without the tables.

    keep: orders as `take` reads them, such as `hidden` [n] or `q` [layer, kv, n]; axes that are not named stay.
    """
    config, state = model.config, dict(model.named_parameters()) | dict(model.named_buffers())
    hidden = keep.get("hidden", torch.arange(config.hidden_size))
    out = {}
    for name, w in state.items():
        part = name.split(".")
        if name.endswith(("embed_tokens.weight", "embeddings.weight", "lm_head.weight")):
            out[name] = w[:, hidden]
        elif name in ("model.norm.weight", "model.norm_f.weight") or name.endswith("layernorm.weight"):
            out[name] = w[hidden]
        elif len(part) > 3 and part[1] == "layers":
            i, place = int(part[2]), ".".join(part[3:])
            if place == "norm.weight":
                out[name] = w[hidden]
            elif place.startswith("mixer.") and model.model.layers[i].block_type == "linear_attention":
                out[name] = _mamba_by_hand(config, place, w, keep, i, hidden)
            elif place.endswith(("q_norm.weight", "k_norm.weight")):
                out[name] = w
            elif "_proj" in place and place.split(".")[-2][0] in "qkvo" and "latent" not in place:
                out[name] = _attention_by_hand(config, place, w, keep, i, hidden)
            else:
                out[name] = _feed_forward_by_hand(place, w, keep, i, hidden)
    if config.tie_word_embeddings:
        out.pop("lm_head.weight", None)
    return {name: w for name, w in out.items() if "inv_freq" not in name}


def _attention_by_hand(config, place: str, w: Tensor, keep: dict, i: int, hidden: Tensor) -> Tensor:
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    num_kv = config.num_key_value_heads
    shared = config.num_attention_heads // num_kv
    groups = keep.get("kv", torch.arange(num_kv)).tolist()
    q_rows, kv_rows = [], []
    for g in groups:
        kv_rows += range(g * size, (g + 1) * size)
        for j in keep["q"][i, g].tolist() if "q" in keep else range(shared):
            head = g * shared + j  # query heads of one key-value head stand side by side
            q_rows += range(head * size, (head + 1) * size)
    rows = q_rows if "q_proj" in place or "o_proj" in place else kv_rows
    if "o_proj" in place:
        return w[hidden] if place.endswith("bias") else w[hidden][:, rows]
    return w[rows] if place.endswith("bias") else w[rows][:, hidden]


def _mamba_by_hand(config, place: str, w: Tensor, keep: dict, i: int, hidden: Tensor) -> Tensor:
    num_heads, size, groups, state = (
        config.mamba_num_heads, config.mamba_head_dim, config.n_groups, config.ssm_state_size,
    )  # fmt: skip
    per_group, inner = num_heads // groups, num_heads * size
    heads, shared = [], []
    for g in keep.get("group", torch.arange(groups)).tolist():
        heads += [g * per_group + j for j in (keep["mamba"][i, g].tolist() if "mamba" in keep else range(per_group))]
        shared += range(g * state, (g + 1) * state)
    channels = keep["mdim"][i].tolist() if "mdim" in keep else range(size)
    x = torch.tensor([h * size + c for h in heads for c in channels])
    heads, shared = torch.tensor(heads), torch.tensor(shared)
    x_b_c = torch.cat([x, inner + shared, inner + groups * state + shared])
    z_x_b_c_dt = torch.cat([x, inner + x_b_c, 2 * inner + 2 * groups * state + heads])
    return {
        "mixer.in_proj.weight": lambda: w[z_x_b_c_dt][:, hidden],
        "mixer.in_proj.bias": lambda: w[z_x_b_c_dt],
        "mixer.conv1d.weight": lambda: w[x_b_c],
        "mixer.conv1d.bias": lambda: w[x_b_c],
        "mixer.A_log": lambda: w[heads],
        "mixer.D": lambda: w[heads],
        "mixer.dt_bias": lambda: w[heads],
        "mixer.norm.weight": lambda: w[x],
        "mixer.out_proj.weight": lambda: w[hidden][:, x],
        "mixer.out_proj.bias": lambda: w[hidden],
    }[place]()


def _feed_forward_by_hand(place: str, w: Tensor, keep: dict, i: int, hidden: Tensor) -> Tensor:
    kind = place.split(".", 1)[1]
    everything = torch.arange(max(w.shape))
    stream = everything[: keep["latent_size"]] if "latent_size" in keep else hidden
    if kind.startswith("gate.") or kind.startswith("experts."):
        experts = keep["expert"][i] if "expert" in keep else torch.arange(w.shape[0])
        if kind == "gate.weight":
            return w[experts][:, hidden]
        if kind == "gate.e_score_correction_bias":
            return w[experts]
        cut = []
        for e in experts.tolist():
            width = w.shape[2] if "down" in kind else w.shape[1] // (2 if "gate_up" in kind else 1)
            units = keep["effn"][i, e] if "effn" in keep else torch.arange(width)
            if "gate_up" in kind:
                cut.append(torch.cat([w[e, :width][units], w[e, width:][units]])[:, hidden])
            else:
                cut.append(w[e][stream][:, units] if "down" in kind else w[e][units][:, stream])
        return torch.stack(cut)
    if kind.startswith("fc1"):
        return w if w.dim() == 1 else w[:, hidden]
    if kind.startswith("fc2"):
        return w[hidden]
    axis = "sffn" if kind.startswith("shared") else "ffn"
    width = w.shape[-1] if "down" in kind else w.shape[0]
    units = keep[axis][i] if axis in keep else torch.arange(width)
    if "down" in kind:
        return w[hidden] if w.dim() == 1 else w[hidden][:, units]
    return w[units] if w.dim() == 1 else w[units][:, hidden]


def check_by_hand(arch, complete, model: nn.Module, axes: tuple[str, ...], seed: int = 0) -> None:
    """Random units along these axes, cut by the table and by hand, are the same numbers and a model that runs."""
    layout = arch.layout(complete, "memory")
    draws = generator(seed)
    fixed = tuple(a for a in axes if a not in arch.elastic)  # kv and group: not elastic, but a shard cuts them
    orders = tiny.random_orders(layout, draws, tuple(a for a in axes if a in arch.elastic))
    orders |= {a: torch.randperm(layout.sizes[a], generator=draws) for a in fixed}
    sizes = tiny.random_sizes(layout, draws, tuple(a for a in axes if a in arch.elastic)) | dict.fromkeys(fixed, 1)
    keep = {axis: orders[axis][..., : sizes[axis]] for axis in orders}
    told = keep | ({"latent_size": complete["moe_latent_size"]} if complete.get("moe_latent_size") else {})
    expected = by_hand(model, told)
    found = tiny.take_all(hf.state_of(model), arch, complete, keep)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    sizes = {axis: order.shape[-1] for axis, order in keep.items()}
    small = tiny.load(arch, arch.resize(complete, layout.sizes | sizes), found)
    assert tiny.logits(small).isfinite().all()


def cut_cases() -> Iterator:
    for name in tiny.NAMES:
        arch, complete = tiny.known(name)
        axes = [*width_axes(arch, complete), "kv", *(["group"] if "group" in arch.sizes(complete) else [])]
        if tiny.VARIANTS[name]["model_type"] == "llama":
            axes.remove("q")  # cut together with hidden below: the stock config ties the two
        for axis in axes:
            yield pytest.param(name, (axis,), id=f"{name}-{axis}")
        yield pytest.param(name, tuple(width_axes(arch, complete)), id=f"{name}-all")


@pytest.mark.parametrize(("name", "axes"), list(cut_cases()))
def test_take_equals_a_cut_written_down_by_hand(name, axes):
    check_by_hand(*tiny.known(name), tiny.shared(name), axes)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_hand_written_cut_with_all_units_in_another_order_is_the_same_function(name):
    arch, complete = tiny.known(name)
    orders = tiny.random_orders(tiny.layout(name), generator(5), tuple(width_axes(arch, complete)))
    told = orders | ({"latent_size": complete["moe_latent_size"]} if complete.get("moe_latent_size") else {})
    sorted_ = tiny.load(arch, complete, by_hand(tiny.shared(name), told))
    assert_close(tiny.logits(sorted_), tiny.logits(tiny.shared(name)))


# Law 4: count.


def check_count(arch, complete, sizes: dict[str, int], layers: list[int] | None = None) -> None:
    """The table's count equals the number of stored numbers of the stock model at the small config."""
    layout = arch.layout(complete)
    small = arch.resize(complete, layout.sizes | sizes, layers)
    with torch.device("meta"):
        plain = {k: v for k, v in small.items() if k not in {"model_type", "transformers_version"}}
        stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(small["model_type"], **plain))
    buffers = {n: b for n, b in stock.named_buffers() if n.endswith("e_score_correction_bias")}
    expected = sum(p.numel() for p in stock.parameters()) + sum(b.numel() for b in buffers.values())
    assert layout.count(sizes={**layout.sizes, **sizes}, layers=layers) == expected
    assert layout.resize(sizes, layers).count() == expected


@pytest.mark.parametrize("name", tiny.NAMES)
def test_count_equals_the_stock_models_own(name):
    arch, complete = tiny.known(name)
    check_count(arch, complete, {})
    draws = generator(2)
    for _ in range(4):
        sizes = tiny.random_sizes(tiny.layout(name), draws)
        layers = sorted(torch.randperm(len(arch.kinds(complete)), generator=draws)[: sizes.pop("layer")].tolist())
        check_count(arch, complete, sizes, layers)


@pytest.mark.parametrize("name", tiny.ROUTED)
def test_active_count_leaves_out_exactly_the_experts_that_a_token_does_not_use(name):
    model, layout = tiny.shared(name), tiny.layout(name, "disk")
    idle = 0
    for part, parameter in model.named_parameters():
        if ".experts." in part and "shared" not in part:
            idle += (parameter.shape[0] - model.config.num_experts_per_tok) * parameter[0].numel()
    assert idle > 0
    assert layout.count(active=True) == layout.count() - idle


# Caches: what one sequence carries, against the stock model's own cache objects.


def stock_caches(model: nn.Module, time: int) -> dict[str, int]:
    """How many numbers a stock model holds for one sequence after `time` tokens, by kind of state."""
    with torch.no_grad():
        out = model(input_ids=tiny.tokens(1, time), use_cache=True)
    held = {"kv": 0, "conv": 0, "ssm": 0}
    for layer in (out.cache if "cache" in out else out.past_key_values).layers:
        for kind, tensors in (
            ("kv", [getattr(layer, "keys", None), getattr(layer, "values", None)]),
            ("conv", getattr(layer, "conv_states", {}).values()),
            ("ssm", getattr(layer, "recurrent_states", {}).values()),
        ):  # fmt: skip
            held[kind] += sum(t.numel() for t in tensors if t is not None)
    return held


def check_caches(arch, complete, model: nn.Module) -> None:
    layout, time = arch.layout(complete), 3  # shorter than every sliding window here
    held = stock_caches(model, time)
    assert state_size(layout, layout.sizes, "kv") * time == held["kv"]
    assert state_size(layout, layout.sizes, "conv") == held["conv"]
    assert state_size(layout, layout.sizes, "ssm") == held["ssm"]


@pytest.mark.parametrize("name", tiny.NAMES)
def test_states_are_as_large_as_the_stock_models_caches(name):
    check_caches(*tiny.known(name), tiny.shared(name))


# Laws 5 and 6: nesting and sharding, tensor by tensor.


@pytest.mark.parametrize("name", tiny.NAMES)
def test_slicing_twice_equals_slicing_once(name):
    arch, complete = tiny.known(name)
    layout, state, draws = tiny.layout(name), hf.state_of(tiny.shared(name)), generator(1)
    axes = tuple(width_axes(arch, complete))
    for _ in range(3):
        large = tiny.random_sizes(layout, draws, axes)
        small = {a: int(torch.randint(1, n + 1, (1,), generator=draws)) for a, n in large.items()}
        once = tiny.take_all(state, arch, complete, small)
        first = tiny.take_all(state, arch, complete, large)
        twice = tiny.take_all(first, arch, arch.resize(complete, layout.sizes | large), small)
        assert once.keys() == twice.keys()
        assert all(torch.equal(once[n], twice[n]) for n in once)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_full_slice_is_the_same_storage(name):
    arch, complete = tiny.known(name)
    layout, state = tiny.layout(name), hf.state_of(tiny.shared(name))
    whole = tiny.take_all(state, arch, complete, dict(layout.sizes))
    assert whole.keys() == state.keys()
    assert all(whole[n].data_ptr() == state[n].data_ptr() and whole[n].shape == state[n].shape for n in state)


@pytest.mark.parametrize("name", tiny.NAMES)
@pytest.mark.parametrize("spelling", ["memory", "disk"])
def test_sharding_commutes_with_slicing(name, spelling):
    layout, draws, world = tiny.layout(name, spelling), generator(4), 2
    axes = [a for a, n in layout.sizes.items() if n >= 2 * world and n % world == 0 and a not in ("layer", "vocab")]
    assert axes
    for axis in axes:
        n = layout.sizes[axis] // world * world - world  # a smaller multiple of the number of ranks
        for place in layout.tensors.values():
            if axis not in axes_of(place.shape):
                continue
            w = torch.randn(dims(place.shape, layout.sizes), generator=draws)
            sharded, cut = layout.sizes | {axis: layout.sizes[axis] // world}, layout.sizes | {axis: n}
            for rank in range(world):
                whole_rank = torch.arange(rank, layout.sizes[axis], world)
                a = take(
                    take(w, place.shape, layout.sizes, {axis: whole_rank}), place.shape, sharded, {axis: n // world}
                )
                b = take(
                    take(w, place.shape, layout.sizes, {axis: n}),
                    place.shape,
                    cut,
                    {axis: torch.arange(rank, n, world)},
                )
                assert torch.equal(a, b), (place.name, axis)


# Law 8: gates of one are silent, and they hear.


@pytest.mark.parametrize("name", tiny.NAMES)
def test_gates_of_one_are_silent_and_receive_a_gradient(name):
    elastic = ElasticModel(tiny.model(name))
    sizes = tiny.random_sizes(tiny.layout(name), generator(6), tuple(width_axes(*tiny.known(name))))
    sizes = {a: max(n, 2) for a, n in sizes.items() if a != "q"} | ({"q": 2} if "q" in sizes else {})
    if "hidden" in sizes:
        sizes["hidden"] = 36  # a multiple of every number of heads here
    stairs = {axis: torch.ones(n, requires_grad=True) for axis, n in sizes.items()}
    x = tiny.tokens(8, 20)  # enough that no unit is silent for all of them
    with torch.no_grad():
        plain = elastic(elastic.run_of(sizes), input_ids=x, use_cache=False).logits
    gated = elastic(elastic.run_of(sizes, stairs=stairs), input_ids=x, use_cache=False).logits
    assert torch.equal(plain, gated)
    (gated * torch.randn(gated.shape, generator=generator())).sum().backward()
    for axis, stair in stairs.items():
        assert (stair.grad != 0).all(), axis


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_gradient_of_a_member_reaches_its_units_and_no_others(name):
    elastic = ElasticModel(tiny.model(name).requires_grad_(True))
    sizes = tiny.random_sizes(tiny.layout(name), generator(8), tuple(width_axes(*tiny.known(name))))
    arch, complete = tiny.known(name)
    out = elastic(sizes, input_ids=tiny.tokens(), use_cache=False).logits
    (out * torch.randn(out.shape, generator=generator())).sum().backward()
    state = {n: p for n, p in elastic.state().items() if isinstance(p, nn.Parameter)}
    grads = {n: p.grad.abs() if n in state else torch.zeros(p.shape) for n, p in elastic.state().items()}
    inside = tiny.take_all(grads, arch, complete, sizes)
    for name_, parameter in state.items():
        # float64: the two sums run in different orders
        all_of_it, kept = parameter.grad.abs().double().sum(), inside[name_].double().sum()
        torch.testing.assert_close(all_of_it, kept)
        assert kept > 0, name_


# Law 9: the masked parent equals the slice.


def stairs_of(layout, sizes: dict[str, int]) -> dict[str, Tensor]:
    """Ones for the kept units, zeros for the others: [full size]."""
    return {axis: (torch.arange(layout.sizes[axis]) < n).float() for axis, n in sizes.items()}


def check_masked(model: nn.Module, sizes: dict[str, int]) -> None:
    elastic = ElasticModel(model)
    with torch.no_grad():
        cut = elastic(elastic.run_of(sizes), input_ids=tiny.tokens(), use_cache=False).logits
        run = Run(stairs=stairs_of(elastic.layout, sizes), is_soft=True)
        masked = elastic(run, input_ids=tiny.tokens(), use_cache=False).logits
    assert_close(masked, cut)


def masked_cases() -> Iterator:
    for name in tiny.NAMES:
        axes = width_axes(*tiny.known(name))
        if tiny.VARIANTS[name]["model_type"] == "llama":
            axes.remove("q")
        for axis in axes:
            yield pytest.param(name, (axis,), id=f"{name}-{axis}")
        yield pytest.param(name, tuple(width_axes(*tiny.known(name))), id=f"{name}-all")


@pytest.mark.parametrize(("name", "axes"), list(masked_cases()))
def test_the_masked_parent_equals_the_slice(name, axes):
    check_masked(tiny.model(name), tiny.random_sizes(tiny.layout(name), generator(7), axes))


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_masked_parent_equals_the_slice_with_large_eps_and_near_zero_activations(name):
    eps = "layer_norm_epsilon" if name.startswith("nemotron_h") else "rms_norm_eps"
    for value, scale in ((1e-1, 1.0), (1e-1, 1e-2), (1e-5, 1e-3)):
        model = tiny.model(name, **{eps: value})
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(scale)
        check_masked(model, tiny.random_sizes(tiny.layout(name), generator(9), tuple(width_axes(*tiny.known(name)))))


# Law 8 for routers, and cases 1 and 3.


@pytest.fixture
def chosen() -> Iterator[list[Tensor]]:
    """The experts that every block of experts is asked to run: [token, active] each."""
    seen: list[Tensor] = []

    def record(module: nn.Module, args: tuple) -> None:
        if type(module).__name__.endswith("Experts"):
            seen.append(args[1])

    handle = torch.nn.modules.module.register_module_forward_pre_hook(record)
    yield seen
    handle.remove()


@pytest.mark.parametrize("name", tiny.ROUTED)
def test_excluded_experts_are_never_chosen_even_if_the_kept_ones_score_negative(name, chosen):
    model, kept = tiny.model(name), 3
    with torch.no_grad():
        for part, tensor in (*model.named_parameters(), *model.named_buffers()):
            if part.endswith("e_score_correction_bias"):
                tensor[:kept], tensor[kept:] = -5.0, 0.0
            elif part.endswith("gate.weight"):
                tensor[kept:] *= 10  # excluded experts shout
    elastic = ElasticModel(model)
    run = Run(stairs=stairs_of(elastic.layout, {"expert": kept}), is_soft=True)
    with torch.no_grad():
        elastic(Run(), input_ids=tiny.tokens(), use_cache=False)
        assert max(int(c.max()) for c in chosen) >= kept, "the full model must want the excluded experts"
        chosen.clear()
        masked = elastic(run, input_ids=tiny.tokens(), use_cache=False).logits
        assert chosen
        assert max(int(c.max()) for c in chosen) < kept
        cut = elastic({"expert": kept}, input_ids=tiny.tokens(), use_cache=False).logits
    assert_close(masked, cut)


def test_the_correction_bias_selects_but_does_not_leak_into_the_mixing_weight(chosen):
    model = tiny.model("nemotron_h")
    gate = next(m for m in model.modules() if type(m).__name__.endswith("Router"))
    with torch.no_grad():
        gate.e_score_correction_bias.copy_(torch.tensor([0.0, 0, 0, 0, 9, 9]))
    x = torch.randn(7, 48, generator=generator())
    scores = (x.double() @ gate.weight.double().T).sigmoid()[:, 4:]
    expected = 2.5 * scores / scores.sum(-1, keepdim=True)
    elastic = ElasticModel(model)
    _, weights, picked = next(m for m in elastic.modules() if type(m).__name__.endswith("Router"))(x)
    assert set(picked.flatten().tolist()) == {4, 5}
    torch.testing.assert_close(weights.double(), expected.gather(1, picked - 4), rtol=1e-5, atol=1e-6)
