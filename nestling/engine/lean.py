"""The lean decoder: a whole step of all rows in one call of our own C, on the weights where they lie.

A stock model spends a step on hundreds of small calls, and torch's product of a bf16 matrix with one vector reads the
weights at a third of what the memory gives. Here the model object is read once: where each parameter lies, its row
stride, its sizes. A step then reads every weight once for all rows. Results agree with the stock modules to rounding;
each row's are the same bit for bit whatever else is in the batch.

What it does not know (another activation, positions that depend on the length, float16) it refuses with `Unknown`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from operator import is_
from time import perf_counter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from nestling.engine import native
from nestling.engine.decode import Decoder, StockDecoder
from nestling.engine.native import Block, Matrix, Model, Row, Slot, Vector
from nestling.engine.pace import Pace
from nestling.engine.state import RowState
from nestling.engine.weights import Loaded

AUTO, STOCK, LEAN = CHOICES = ("auto", "stock", "lean")
WIDTHS = {torch.float32: 0, torch.bfloat16: 1}
FIXED_POSITIONS = {"default", "linear", "llama3", "yarn"}  # those whose angles do not depend on the length
LEAST_TABLE = 512  # positions that angles are worked out for at first
MOST = {"expert": 1024, "state": 1024, "conv": 63, "threads": 64}  # what the C has room for

log = logging.getLogger(__name__)


class Unknown(ValueError):
    """The lean decoder does not know this model, and why."""


def decoder_for(member: Loaded, *, decoder: str = AUTO, threads: int = 0) -> Decoder:
    """A member's decoder. auto: the lean one where it can be, else the stock modules and a line in the log; threads: at
    most so many, 0: as many as torch has."""
    if decoder not in CHOICES:
        raise ValueError(f"decoder '{decoder}' is not known: expected one of {', '.join(CHOICES)}.")
    if decoder == STOCK:
        return StockDecoder(member)
    try:
        return LeanDecoder(member, threads=threads)
    except (native.NoLibrary, Unknown) as error:
        if decoder == LEAN:
            raise
        log.warning("member '%s' decodes with the stock modules: %s", member.name, error)
        return StockDecoder(member)


class LeanDecoder:
    """Steps rows of one member, all in one pass over its weights."""

    def __init__(self, member: Loaded, *, threads: int = 0) -> None:
        """threads: at most so many; 0: as many as torch has."""
        self._library = native.library()
        self._pace = Pace(self._library.ready_threads(min(threads or torch.get_num_threads(), MOST["threads"])))
        self._member = member  # holds the parameters, whose addresses the C keeps
        self._held: list[Tensor] = []  # and what else it keeps addresses of
        self._slots: WeakKeyDictionary[RowState, tuple[list[Tensor], Any]] = WeakKeyDictionary()
        self._workspace = torch.empty(0, dtype=torch.uint8)
        self._model = self._read()

    def step(self, rows: Sequence[RowState], tokens: Sequence[int]) -> Tensor:
        """See Decoder."""
        return self.advance(rows, [(token,) for token in tokens])

    def advance(self, rows: Sequence[RowState], tokens: Sequence[Sequence[int]]) -> Tensor:
        """See Decoder. It makes no difference beside what a row reads its tokens, nor in how many parts of two or more:
        a Mamba layer rounds at other places in a prompt than in decoding, as the stock one does."""
        longest = max(row.length + len(read) for row, read in zip(rows, tokens, strict=True))
        if self._has_rope and longest > self._model.table:
            self._lay_table(longest)
        num = sum(map(len, tokens))
        asked, i = (Row * num)(), 0
        for row, read in zip(rows, tokens, strict=True):
            row.reserve(row.length + len(read))
            slots, is_prompt = self._slots_of(row), len(read) > 1 or row.length == 0
            for position, token in enumerate(read, start=row.length):
                assert 0 <= token < self._model.vocab
                one, i = asked[i], i + 1
                one.token, one.position, one.slots, one.is_prompt = token, position, slots, is_prompt
            one.wants_logits = True
        logits = torch.empty(len(rows), self._model.vocab, dtype=torch.float32)
        threads = self._pace.choose(num)
        needed = self._library.workspace_bytes(self._model, num, threads, longest)
        if needed > self._workspace.numel():
            self._workspace = torch.empty(needed * 5 // 4, dtype=torch.uint8)
        started = perf_counter()
        self._library.take_step(
            self._model, asked, num, threads, longest, logits.data_ptr(), self._workspace.data_ptr()
        )
        self._pace.note(num, threads, perf_counter() - started)
        for row, read in zip(rows, tokens, strict=True):
            row.length += len(read)
        return logits

    def _slots_of(self, row: RowState) -> Any:
        """Where the buffers of a row lie; worked out again when one is another."""
        buffers = [*row.keys.values(), *row.values.values(), *row.conv.values(), *row.ssm.values()]
        held = self._slots.get(row)
        if held is None or not all(map(is_, held[0], buffers)):
            slots = [
                (first, second, row.capacity if layer in row.keys else first.shape[-1])
                for layer in sorted({*row.keys, *row.conv})
                for first, second in [
                    (row.keys[layer], row.values[layer]) if layer in row.keys else (row.conv[layer], row.ssm[layer])
                ]
            ]
            made = (Slot * len(slots))(
                *(Slot(a.data_ptr(), b.data_ptr(), n, WIDTHS[a.dtype], WIDTHS[b.dtype]) for a, b, n in slots)
            )
            held = self._slots[row] = buffers, made
        return held[1]

    def _read(self) -> Model:
        model: Any = self._member.model
        config, inner = model.config, model.get_decoder()
        if self._member.dtype not in WIDTHS:
            raise Unknown(f"its numbers are {self._member.dtype}")
        layers: nn.ModuleList = model.get_submodule(self._member.layout.arch.layers)
        blocks: list[Block] = []
        num_slots = 0
        for i, layer in enumerate(layers):
            for block in _blocks(layer, config, i):
                if block.kind in (native.ATTENTION, native.MAMBA):
                    block.slot, num_slots = num_slots, num_slots + 1
                blocks.append(block)
        self._has_rope = hasattr(inner, "rotary_emb")
        last = inner.norm if hasattr(inner, "norm") else inner.norm_f
        embedding = model.get_input_embeddings()
        made = Model(
            num_blocks=len(blocks),
            num_slots=num_slots,
            hidden=embedding.weight.shape[1],
            vocab=embedding.weight.shape[0],
            is_bf16=WIDTHS[self._member.dtype],
            rounds_norm=not hasattr(layers[0], "mixer"),  # before the weight is multiplied, but in nemotron_h
            eps=last.variance_epsilon,
            norm=_vector(last.weight),
            embedding=_matrix(embedding.weight),
            head=_linear(model.get_output_embeddings()),
            blocks=(Block * len(blocks))(*blocks),
        )
        if self._has_rope:
            kind = inner.rotary_emb.rope_type
            if kind not in FIXED_POSITIONS:
                raise Unknown(f"its positions are of type '{kind}'")
            self._model = made
            self._lay_table(LEAST_TABLE)
        return made

    @torch.inference_mode()
    def _lay_table(self, longest: int) -> None:
        """Cosines and sines of all positions up to a length, from the stock module."""
        size = max(LEAST_TABLE, 1 << (longest - 1).bit_length())
        rotary: Any = self._member.model.get_decoder().rotary_emb
        angles = rotary(torch.empty(0, dtype=self._member.dtype), torch.arange(size)[None])
        cosines, sines = (one[0].float().contiguous() for one in angles)
        head = next(b.head for b in self._model.blocks[: self._model.num_blocks] if b.kind == native.ATTENTION)
        if cosines.shape != (size, head):
            raise Unknown("its positions turn a part of a head only")
        self._held = [cosines, sines]
        self._model.cosines, self._model.sines, self._model.table = cosines.data_ptr(), sines.data_ptr(), size


def _blocks(layer: Any, config: Any, i: int) -> Iterable[Block]:
    """The blocks of a stock layer: each has a norm before it and is added to the stream."""
    if hasattr(layer, "mixer"):  # nemotron_h
        eps, norm = layer.norm.variance_epsilon, _vector(layer.norm.weight)
        mixer = layer.mixer
        if hasattr(mixer, "q_proj"):
            block = _attention(mixer, window=0, has_rope=False)
        elif hasattr(mixer, "in_proj"):
            block = _mamba(mixer)
        else:
            block = _feed(mixer)
        block.norm, block.eps = norm, eps
        return [block]
    kinds = getattr(config, "layer_types", None)
    is_sliding = kinds[i] == "sliding_attention" if kinds else True
    window = (getattr(config, "sliding_window", None) or 0) if is_sliding else 0
    first, second = _attention(layer.self_attn, window=window, has_rope=True), _feed(layer.mlp)
    for block, norm in ((first, layer.input_layernorm), (second, layer.post_attention_layernorm)):
        block.norm, block.eps = _vector(norm.weight), norm.variance_epsilon
    return [first, second]


def _attention(module: Any, *, window: int, has_rope: bool) -> Block:
    head = module.head_dim
    block = Block(
        kind=native.ATTENTION, head=head, window=window, has_rope=has_rope, scale=module.scaling,
        heads=module.q_proj.weight.shape[0] // head, kv_heads=module.k_proj.weight.shape[0] // head,
        q=_linear(module.q_proj), k=_linear(module.k_proj), v=_linear(module.v_proj), out=_linear(module.o_proj),
    )  # fmt: skip
    if hasattr(module, "q_norm"):
        block.q_norm, block.k_norm = _vector(module.q_norm.weight), _vector(module.k_norm.weight)
    return block


def _mamba(module: Any) -> Block:
    state, conv = module.ssm_state_size, module.conv_kernel_size
    if module.activation != "silu" or state > MOST["state"] or conv > MOST["conv"]:
        raise Unknown(f"its Mamba layers have activation {module.activation}, state {state}, convolution {conv}")
    return Block(
        kind=native.MAMBA, mambas=module.num_heads, mdim=module.head_dim, groups=module.n_groups, state=state,
        conv=conv, gate_eps=module.norm.variance_epsilon, gate_norm=_vector(module.norm.weight),
        least_dt=module.time_step_limit[0],
        q=_linear(module.in_proj), out=_linear(module.out_proj),
        conv_weight=_vector(module.conv1d.weight), conv_bias=_vector(module.conv1d.bias),
        a_log=_vector(module.A_log), d=_vector(module.D), dt_bias=_vector(module.dt_bias),
    )  # fmt: skip


def _feed(module: Any) -> Block:
    if not hasattr(module, "experts"):
        return Block(kind=native.DENSE, **_dense(module))
    experts, gate = module.experts, module.gate
    is_gated, num = _is_gated(experts, hasattr(experts, "gate_up_proj")), gate.weight.shape[0]
    is_sigmoid = hasattr(gate, "e_score_correction_bias")
    if num > MOST["expert"]:
        raise Unknown(f"it has {num} experts in a layer")
    block = Block(
        kind=native.EXPERTS, is_gated=is_gated, experts=num, active=gate.top_k, is_sigmoid=is_sigmoid,
        is_normed=getattr(gate, "norm_topk_prob", True), routed_scale=getattr(gate, "routed_scaling_factor", 1.0),
        node_groups=getattr(gate, "num_group", 1), node_active=getattr(gate, "topk_group", 1),
        router=_matrix(gate.weight), expert_down=_matrix(experts.down_proj),
    )  # fmt: skip
    if is_gated:
        both, half = experts.gate_up_proj, experts.gate_up_proj.shape[1] // 2
        block.expert_gate, block.expert_up = _matrix(both[:, :half]), _matrix(both[:, half:])
    else:
        block.expert_up = _matrix(experts.up_proj)
    if is_sigmoid:
        block.correction = _vector(gate.e_score_correction_bias)
    # The softmax router of a model with q and k norms gives its weights in the model's own width, Mixtral's in float32.
    block.rounds_weights = not is_sigmoid and hasattr(gate, "norm_topk_prob") and gate.weight.dtype == torch.bfloat16
    if hasattr(module, "shared_experts"):
        for name, value in _dense(module.shared_experts).items():
            setattr(block, name, value)
    if isinstance(getattr(module, "fc1_latent_proj", None), nn.Linear):
        block.latent_in, block.latent_out = _linear(module.fc1_latent_proj), _linear(module.fc2_latent_proj)
    return block


def _dense(module: Any) -> dict[str, Any]:
    is_gated = _is_gated(module, hasattr(module, "gate_proj"))
    parts = {"is_gated": is_gated, "up": _linear(module.up_proj), "down": _linear(module.down_proj)}
    return parts | ({"gate": _linear(module.gate_proj)} if is_gated else {})


def _is_gated(module: Any, has_gate: bool) -> bool:
    """Whether a feed-forward is silu(gate) * up; else it is relu(up) squared. Anything else is refused."""
    given = torch.tensor([-1.5, 0.5, 2.0], dtype=torch.float32)
    expected = torch.nn.functional.silu(given) if has_gate else given.relu().square()
    if not torch.equal(module.act_fn(given), expected):
        raise Unknown(f"its activation is {type(module.act_fn).__name__}")
    return has_gate


def _vector(x: Tensor | None) -> Vector:
    if x is None:
        return Vector()
    if x.dtype not in WIDTHS or (x.dim() > 1 and not x.is_contiguous()):
        raise Unknown(f"a vector of {x.dtype} has strides {x.stride()}")
    return Vector(x.data_ptr(), WIDTHS[x.dtype], x.stride(0) if x.dim() == 1 else 1)


def _linear(module: Any) -> Matrix:
    made = _matrix(module.weight)
    made.bias = _vector(module.bias)
    return made


def _matrix(w: Tensor) -> Matrix:
    """w: [rows, cols] or [expert, rows, cols]."""
    if w.dtype not in WIDTHS or w.stride(-1) != 1 or w.data_ptr() % w.element_size():
        raise Unknown(f"a weight of {w.dtype} has strides {w.stride()}")
    leap = w.stride(0) if w.dim() == 3 else 0
    return Matrix(w.data_ptr(), w.stride(-2), leap, w.shape[-2], w.shape[-1], WIDTHS[w.dtype], 0, Vector())
