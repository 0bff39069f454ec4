"""All that Nestling asks of transformers: configs, stock models and their skeletons, tokenizers.

Nothing here reaches the network and no remote code is run: model classes are the ones that transformers ships.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from nestling.arch import ARCHITECTURES, Architecture, Config, find

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def be_quiet() -> None:
    """No progress bars and no advice from transformers on the terminal; errors still show."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def config_object(config: Config) -> transformers.PretrainedConfig:
    """The stock config object for a config.json, without the keys that name remote code."""
    plain = {k: _plain(v) for k, v in config.items() if k not in {"auto_map", "transformers_version", "model_type"}}
    return AutoConfig.for_model(config["model_type"], **plain)


def takes_config(config: Config) -> bool:
    """Whether the stock config class takes these values; some want a width that is a multiple of the heads."""
    try:
        config_object(config)
    except StrictDataclassError:
        return False
    return True


def _plain(value: Any) -> Any:
    """A value as saved in config.json: transformers writes infinities as {"__float__": "Infinity"}."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return float(value["__float__"])
    return [_plain(one) for one in value] if isinstance(value, list) else value


def load_model(folder: str | Path, *, dtype: str = "fp32", device: str = "cpu") -> PreTrainedModel:
    """The stock model of a folder, in evaluation mode. A weight that is missing or left over is an error, not a
    message."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype '{dtype}' is not known: expected one of {', '.join(DTYPES)}.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device '{device}': this torch sees no GPU. Use --device cpu, or install torch for CUDA.")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES[dtype], local_files_only=True, trust_remote_code=False, output_loading_info=True
    )
    model, info = loaded
    for what in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if info.get(what):
            raise ValueError(f"'{folder}' does not fit its own model class: {what} {sorted(info[what])[:5]}.")
    return model.to(device).eval()


def save_model(model: nn.Module, folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write weights (stock names in memory) as the stock class writes them: its names on disk, one tensor an expert."""
    assert isinstance(model, PreTrainedModel)
    model.save_pretrained(folder, state_dict=dict(weights))


def new_model(config: Config, *, seed: int) -> PreTrainedModel:
    """A stock model with random weights, as its class draws them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config_object(config)).eval()


def skeleton(config: Config, *, device: str = "cpu") -> PreTrainedModel:
    """The stock model without weights: parameters on the meta device, everything that is computed from the config
    real."""
    with torch.device("meta"):
        # Layers of a skeleton are called through proxies, where transformers cannot record router logits.
        known = {"output_router_logits": False} if "output_router_logits" in config else {}
        stock = config_object(config | known)
        dtype = stock.dtype
        # With a dtype, transformers changes torch's default one until the model is there, for all threads.
        model = AutoModelForCausalLM.from_config(stock, dtype=None)
        model.config.dtype = dtype
    for module in model.modules():
        kept = module._non_persistent_buffers_set
        if any(module._buffers[name] is not None and module._buffers[name].is_meta for name in kept):  # type: ignore[union-attr]
            fresh = type(module)(model.config).to(device)  # type: ignore[call-arg]
            for name in kept:
                module._buffers[name] = fresh._buffers[name]
    return model.requires_grad_(False)


def check_vocabulary(model: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every token of the tokenizer has a row in the model's embedding."""
    rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {rows}: it is another model's, "
            "or tokens were added without resizing the embedding."
        )


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def codec(tokenizer: PreTrainedTokenizerBase) -> Any:
    """What encodes and decodes behind a tokenizer, with neither padding nor truncation: safe to use from any thread,
    which the tokenizer itself is not."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"the tokenizer is a {type(tokenizer).__name__} without a tokenizer.json: save it as fast one."
        )
    codec = copy.deepcopy(backend)
    codec.no_padding()
    codec.no_truncation()
    return codec


def special_tokens(tokenizer: PreTrainedTokenizerBase, *, but: Collection[str] = ()) -> frozenset[int]:
    """Tokens that mark and are not text, without those whose text is in `but`."""
    marks = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | set(tokenizer.all_special_ids)
    return frozenset(i for i in marks if tokenizer.convert_ids_to_tokens(i) not in but)


def architecture_of(model: nn.Module) -> tuple[Architecture, Config]:
    """The table and the complete config of a stock model object."""
    assert isinstance(model, PreTrainedModel)
    return find({"model_type": model.config.model_type, **model.config.to_dict()})


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, tied ones once; live, not copies."""
    seen: set[int] = set()
    state = {}
    persistent = set(model.state_dict().keys())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name in persistent and id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor
    return state


def mask_router(gate: nn.Module, output: tuple[Tensor, ...], excluded: Tensor) -> tuple[Tensor, ...]:
    """What a softmax router gives when some experts are excluded *before* top-k.

    output: the stock router's (logits [token, expert], weights [token, active], chosen [token, active]); excluded:
    [expert]. Setting a weight to zero after top-k would leave the excluded expert in a kept expert's seat.
    """
    logits = output[0].masked_fill(excluded, float("-inf"))
    p, chosen = torch.softmax(logits.float(), dim=-1).topk(gate.top_k, dim=-1)  # type: ignore[arg-type]
    if getattr(gate, "norm_topk_prob", True):
        p = p / p.sum(dim=-1, keepdim=True)
    return logits, p.to(output[1].dtype), chosen


def accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those inputs that the model's forward takes."""
    names = inspect.signature(model.forward).parameters
    return {k: v for k, v in inputs.items() if k in names}


def modules_at(model: nn.Module, pattern: str, num_layers: int) -> Iterator[tuple[int | None, nn.Module]]:
    """The modules that a name pattern of the table names, with their layer; layers that have no such module are
    passed over."""
    modules = dict(model.named_modules())
    if "{layer}" not in pattern:
        yield None, modules[pattern]
        return
    for layer in range(num_layers):
        if pattern.format(layer=layer) in modules:
            yield layer, modules[pattern.format(layer=layer)]


def assign(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> PreTrainedModel:
    """Give a skeleton its weights, the very tensors; a tied head becomes the embedding. Missing or extra ones are an
    error."""
    missing, unexpected = model.load_state_dict(dict(weights), strict=False, assign=True)
    model.tie_weights()
    lost = [name for name in missing if model.get_parameter(name).is_meta]
    if lost or unexpected:
        raise ValueError(f"the weights do not fit the model class: missing {lost[:5]}, unexpected {unexpected[:5]}.")
    return model.requires_grad_(False).eval()


def keeps_float32(model: PreTrainedModel, name: str) -> bool:
    """Whether the stock class holds this parameter in float32 whatever the rest is loaded in."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"((^|\.){pattern}($|\.))", name) for pattern in patterns)


def row_cache(model: PreTrainedModel, state: Any) -> DynamicCache:
    """A stock cache of one row whose tensors are those of `state`, an engine's RowState: the model reads and writes
    them in place. Whoever calls the model advances `state.length`."""
    cache = DynamicCache(config=model.config)
    for i, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicSlidingWindowLayer):
            cache.layers[i] = _RowAttention(state, i, window=layer.sliding_window)
        elif isinstance(layer, LinearAttentionLayer):
            cache.layers[i] = _RowRecurrent(state, i)
        elif isinstance(layer, DynamicLayer):
            cache.layers[i] = _RowAttention(state, i, window=0)
    if not state.keys:  # the stock model asks some attention layer for the length, also where it has none
        cache.layers.append(_RowAttention(state, len(cache.layers), window=0))
    return cache


class _RowAttention(DynamicLayer):
    """Keys and values of one layer in a row's own buffers. Under a window all are kept and the last ones shown."""

    def __init__(self, state: Any, layer: int, *, window: int) -> None:
        super().__init__()
        self.state, self.layer, self.sliding_window = state, layer, window
        self.is_sliding = bool(window)
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, end = self.state.length, self.state.length + key_states.shape[-2]
        self.state.reserve(end)
        keys, values = self.state.keys[self.layer], self.state.values[self.layer]
        keys[:, start:end], values[:, start:end] = key_states[0], value_states[0]
        first = self._first()
        return keys[None, :, first:end], values[None, :, first:end]

    def get_seq_length(self) -> int:
        return self.state.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.length - self._first() + query_length, self._first()

    def _first(self) -> int:
        return max(self.state.length - self.sliding_window + 1, 0) if self.sliding_window else 0


class _RowRecurrent(LinearAttentionLayer):
    """Conv and recurrent state of one layer in a row's own buffers."""

    def __init__(self, state: Any, layer: int) -> None:
        super().__init__()
        self.state, self.layer = state, layer
        if state.length:
            self.lazy_initialization(state.conv[layer], state.ssm[layer])
            self.has_previous_state[0] = True

    def lazy_initialization(
        self,
        conv_states: Tensor | None = None,
        recurrent_states: Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            kept = self.state.conv[self.layer]
            self.dtype, self.device = kept.dtype, kept.device
            self.conv_kernel_size[0] = kept.shape[-1]
            self.conv_states[0] = kept[None]
            self.is_conv_states_initialized[0] = True
        if recurrent_states is not None:
            self.recurrent_states[0] = self.state.ssm[self.layer][None]
            self.is_recurrent_states_initialized[0] = True


assert set(ARCHITECTURES) <= set(transformers.CONFIG_MAPPING.keys())
