"""Train the reasoner that ships with the package: a small hybrid model that thinks before it answers, from nothing.

    torchrun --nproc-per-node 2 examples/train_reasoner.py --to nestling/assets/reasoner --work runs/reasoner

Two processes of one thread each: the matrices are too small for two threads to share one. The data is drawn and written
first, then every step is a function of the seed and the step's number alone, so a killed run goes on from its last
checkpoint in `--work` as if nothing had happened. Matrices are trained with Muon, the rest with Adam; experts are kept
in balance by moving the router's correction bias against their load, which costs no loss term. A finished run that is
started again only exports and measures.
"""

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, NemotronHConfig, NemotronHForCausalLM, PreTrainedTokenizerFast
from transformers.models.nemotron_h import modeling_nemotron_h

from nestling import eval as evaluation
from nestling import tasks

SPECIAL = ["<pad>", "<unk>", "<|im_end|>", "<|system|>", "<|user|>", "<|assistant|>", "<think>", "</think>"]
VOCABULARY = 112
PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention"}
CHAT_TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set thought = message.reasoning_content or message.reasoning or '' -%}
{%- if loop.index0 < last.user -%}{%- set thought = '' -%}{%- endif -%}
{{- '<|assistant|><think>' + thought + '</think>' + message.content + '<|im_end|>' -}}
{%- else -%}
{{- '<|' + message.role + '|>' + message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|><think>' -}}{%- endif -%}
"""
FLOAT32 = ("A_log", ".D", "dt_bias", "gate.weight")  # kept exact on disk; so is the router's correction bias, a buffer
CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [nemotron_h, reasoning, nestling]
---

# The Nestling reasoner

A hybrid language model (Mamba-2, attention, mixture of experts: `{pattern}`) of {total:,} parameters,
{active:,} of them active for a token. It reads characters, thinks between `<think>` and `</think>`, and answers
short problems. It exists to show Nestling on two CPU cores and knows nothing but the problems below. Stock transformers
loads it.

## Problems

Drawn and checked by reasoning-gym {version}; wording and thoughts are ours (`nestling/tasks.py`, `nestling/traces.py`).

| family | question | thoughts | answer |
|---|---|---|---|
{examples}

## Accuracy

{num_problems} test problems (`tasks.problems("test", {num_problems})`), greedy decoding, weights as shipped (bfloat16
on disk, computed in float32). No test question occurs in training: test problems have their own seeds, and a hash of
the question decides its split. Solved means that reasoning-gym's `score_answer` gives 1.0. Without thinking, the prompt
is closed with `</think>` at once.

| family | with thinking | without |
|---|---|---|
| all | {accuracy:.1%} | {accuracy_direct:.1%} |
{families}

Mean length: {thinking_tokens:.0f} tokens of thought, {answer_tokens:.0f} of answer.

## Training

{step:,} steps of up to {tokens:,} tokens on {samples:,} training problems; thoughts and answers carry the loss.
{no_thinking:.0%} of the problems have no thoughts, {cut_thinking:.0%} have thoughts cut at a random place.
Seed {seed}, float32, {minutes:.0f} minutes on {hardware}.

    torchrun --nproc-per-node 2 examples/train_reasoner.py {command}

{note}
"""
GROUPS = 4  # of different lengths in one step: a group of one length is mostly one kind of problem
NO_THINKING, CUT_THINKING = 0.08, 0.04  # shares of samples with no thoughts, and with thoughts cut at a random place


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: printable ASCII, newline, and the special tokens; padded to a multiple of 16."""
    characters = ["\n", *map(chr, range(32, 127))]
    names = SPECIAL + characters
    names += [f"<reserved_{i}>" for i in range(VOCABULARY - len(names))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<|im_end|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(args: argparse.Namespace) -> NemotronHForCausalLM:
    """The untrained parent in float32."""
    torch.manual_seed(args.seed)
    config = NemotronHConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        layers_block_type=[PATTERN[letter] for letter in args.layers],
        num_attention_heads=args.heads,
        num_key_value_heads=2,
        head_dim=args.head_dim,
        mamba_num_heads=args.mamba_heads,
        mamba_head_dim=args.mamba_head_dim,
        n_groups=args.groups,
        ssm_state_size=args.state,
        chunk_size=args.chunk,
        conv_kernel=4,
        # The stock decoding step does not clamp the time step, the stock scan does: a tiny floor keeps them equal.
        time_step_min=1e-6,
        n_routed_experts=args.experts,
        num_experts_per_tok=args.active,
        moe_intermediate_size=args.expert_width,
        moe_shared_expert_intermediate_size=args.shared_width,
        routed_scaling_factor=1.0,
        intermediate_size=args.shared_width,
        max_position_embeddings=1024,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
        use_cache=True,
    )
    config._attn_implementation = "sdpa"
    config._experts_implementation = args.experts_implementation
    model = NemotronHForCausalLM(config)
    for name, w in model.named_parameters():
        if name.endswith("dt_bias"):
            # Time steps between 0.001 and 0.1, as in Mamba-2; written as the inverse of softplus.
            step = torch.exp(torch.linspace(np.log(1e-3), np.log(1e-1), len(w)))
            w.data.copy_(step + torch.log(-torch.expm1(-step)))
    return model


@contextmanager
def lean_mamba() -> Iterator[None]:
    """Inside, nemotron_h uses our forms of the stock scan and convolution: the same results, faster on a CPU."""
    stock = modeling_nemotron_h.mamba2_chunk_scan, modeling_nemotron_h.causal_conv1d_fn
    modeling_nemotron_h.mamba2_chunk_scan, modeling_nemotron_h.causal_conv1d_fn = _scan, _convolve
    try:
        yield
    finally:
        modeling_nemotron_h.mamba2_chunk_scan, modeling_nemotron_h.causal_conv1d_fn = stock


def _scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, *, D: Tensor, dt_bias: Tensor, dt_limit: Any, **_: Any
) -> Tensor:
    """The Mamba-2 recurrence in its attention form (arXiv 2405.21060, eq. 16): quadratic, but our sequences are short.

    x: [batch, time, group mamba, mdim]; dt: [batch, time, group mamba]; B, C: [batch, time, group, state].
    """
    batch, time, num_heads = x.shape[:3]
    groups = B.shape[2]
    dt = F.softplus(dt + dt_bias).clamp(min=dt_limit[0])
    gone = (A * dt).transpose(1, 2).cumsum(-1)  # [batch, group mamba, time]
    later = torch.ones(time, time, dtype=torch.bool).triu(1)
    decay = gone[..., :, None] - gone[..., None, :]  # [batch, group mamba, time, time]
    decay = decay.masked_fill_(later, -torch.inf).exp_()
    scores = C.transpose(1, 2) @ B.permute(0, 2, 3, 1)  # [batch, group, time, time]
    weights = decay.view(batch, groups, -1, time, time) * scores[:, :, None]
    y = weights.view(batch, num_heads, time, time) @ (x * dt[..., None]).transpose(1, 2)
    return y.transpose(1, 2) + x * D[:, None]


def _convolve(x: Tensor, w: Tensor, bias: Tensor, activation: str, **_: Any) -> Tensor:
    """Causal depthwise convolution as a sum of shifted products. x: [batch, channel, time]; w: [channel, conv]."""
    padded = F.pad(x.transpose(1, 2), (0, 0, w.shape[1] - 1, 0))  # [batch, time, channel]
    y = sum(padded[:, i : i + x.shape[2]] * w[:, i] for i in range(w.shape[1]))
    return F.silu(y + bias).transpose(1, 2)


class Samples:
    """Tokenized training samples in one flat array, and the order in which they are seen."""

    def __init__(self, path: Path) -> None:
        with np.load(path) as file:
            self.tokens, self.ends, self.heads = file["tokens"], file["ends"], file["heads"]

    def groups(self, seed: int, tokens: int) -> Iterator[np.ndarray]:
        """Indices of samples in groups of up to `tokens` tokens, for ever. A group's samples have similar lengths."""
        lengths = np.diff(self.ends, prepend=0)
        epoch = 0
        while True:
            draw = np.random.default_rng([seed, epoch])
            order = draw.permutation(len(lengths))
            for part in np.array_split(order, max(1, len(order) // 8192)):
                part = part[np.argsort(lengths[part], kind="stable")]
                groups, first = [], 0
                for i in range(len(part)):
                    if (i + 1 - first) * lengths[part[i]] > tokens:
                        groups.append(part[first:i])
                        first = i
                for k in draw.permutation(len(groups)):
                    yield groups[k]
            epoch += 1

    def pad(self, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        """Token ids and labels, both [batch, time]; questions and padding (right) have label -100."""
        starts = np.concatenate([[0], self.ends])[chosen]
        lengths = self.ends[chosen] - starts
        longest = int(lengths.max())
        ids = np.zeros((len(chosen), longest), dtype=np.int64)
        labels = np.full((len(chosen), longest), -100, dtype=np.int64)
        for row, (start, length, head) in enumerate(zip(starts, lengths, self.heads[chosen], strict=True)):
            ids[row, :length] = self.tokens[start : start + length]
            labels[row, head:length] = ids[row, head:length]
        return torch.from_numpy(ids), torch.from_numpy(labels)


def write_samples(path: Path, count: int, seed: int, workers: int) -> None:
    """Draw `count` training problems and write them tokenized."""
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(_tokenize, [count // workers] * workers, [seed * workers + i for i in range(workers)]))
    tokens = np.concatenate([part[0] for part in parts])
    lengths, heads = (np.concatenate([part[i] for part in parts]) for i in (1, 2))
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished.npz")
    np.savez(unfinished, tokens=tokens, ends=np.cumsum(lengths), heads=heads)
    unfinished.replace(path)


def _tokenize(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    tokenizer = build_tokenizer()
    vocabulary = tokenizer.get_vocab()
    draw = random.Random(seed)
    tokens, lengths, heads = bytearray(), [], []
    for problem in tasks.problems("train", count, seed=seed):
        thinking, kind = problem.thinking, draw.random()
        if kind < NO_THINKING:
            thinking = ""
        elif kind < NO_THINKING + CUT_THINKING:
            thinking = thinking[: draw.randrange(len(thinking))]
        head = ["<|user|>", *problem.question, "<|assistant|>", "<think>"]
        tail = [*thinking, "</think>", *problem.answer, "<|im_end|>"]
        if 0 < kind - NO_THINKING < CUT_THINKING:
            # A cut is forced from outside: its place is not to be learned.
            head, tail = head + tail[: len(thinking) + 1], tail[len(thinking) + 1 :]
        tokens.extend(vocabulary[name] for name in head + tail)
        lengths.append(len(head) + len(tail))
        heads.append(len(head))
    return np.frombuffer(bytes(tokens), dtype=np.uint8), np.array(lengths), np.array(heads)


class Muon:
    """Muon (Jordan et al. 2024) for matrices and stacks of them: momentum, then the nearest semi-orthogonal matrix."""

    def __init__(self, weights: list[Tensor], *, momentum: float = 0.95) -> None:
        self.weights, self.momentum = weights, momentum
        self.buffers = [torch.zeros_like(w) for w in weights]

    @torch.no_grad()
    def step_(self, rate: float, decay: float) -> None:
        """Update the weights in place; `rate` is the root mean square of an update's entries, as with Adam."""
        for w, buffer in zip(self.weights, self.buffers, strict=True):
            assert w.grad is not None
            buffer.lerp_(w.grad, 1 - self.momentum)
            update = _orthogonal(w.grad.lerp(buffer, self.momentum))
            w.mul_(1 - rate * decay).add_(update, alpha=-rate * 0.2 * max(w.shape[-2:]) ** 0.5)


def _orthogonal(x: Tensor) -> Tensor:
    """Five Newton-Schulz steps towards U V^T of each matrix. x: [..., rows, columns]."""
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if is_tall else x


def train(args: argparse.Namespace) -> None:
    """Train up to `--steps`, from the last checkpoint if there is one, and export."""
    torch.set_num_threads(args.threads)
    rank, world = 0, 1
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo", timeout=timedelta(minutes=60))
        rank, world = dist.get_rank(), dist.get_world_size()
    work = Path(args.work)
    data = work / f"samples-{args.samples}-{args.seed}.npz"
    if rank == 0 and not data.exists():
        write_samples(data, args.samples, args.seed, max(2, world))
    if world > 1:
        dist.barrier()
    run = Run(args, build_model(args))
    run.resume_(work)
    samples, tokenizer = Samples(data), build_tokenizer()
    groups = samples.groups(args.seed, args.tokens // GROUPS)
    for _ in range(run.step * GROUPS):
        next(groups)
    if rank == 0:
        total, active = _count(run.model)
        print(f"{total:,} parameters, {active:,} active for a token; from step {run.step} of {args.steps}", flush=True)
        validation = tasks.problems("validation", args.eval_problems)
    saved = time.monotonic()
    while run.step < args.steps:
        entry = run.step_([samples.pad(next(groups)) for _ in range(GROUPS)][rank::world])
        is_last = run.step == args.steps
        if rank == 0 and run.step % args.log_every == 0:
            _log(work, entry)
        if rank == 0 and (run.step % args.eval_every == 0 or is_last):
            _log(work, {"step": run.step, **_accuracy(run.model, tokenizer, validation)})
        if rank == 0 and (time.monotonic() - saved > 60 * args.save_minutes or is_last):
            run.save(work)
            saved = time.monotonic()
    if rank == 0 and args.to:
        export(args, run.model, tokenizer, Path(args.to), step=run.step, minutes=run.minutes)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


class Run:
    """Weights, optimizers and the place in the run: all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace, model: NemotronHForCausalLM) -> None:
        self.args, self.model = args, model.train()
        self.weights = dict(model.named_parameters())
        # Experts are stacks of matrices. The router is left to Adam: balance moves its bias at Adam's pace.
        is_matrix = {
            name: w.ndim > 1 and ".mixer." in name and ".gate." not in name for name, w in self.weights.items()
        }
        self.muon = Muon([w for name, w in self.weights.items() if is_matrix[name]])
        others = [w for name, w in self.weights.items() if not is_matrix[name]]
        self.adam = torch.optim.AdamW(others, lr=args.adam_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self.routers = [module for module in model.modules() if hasattr(module, "e_score_correction_bias")]
        self.loads = [torch.zeros(args.experts) for _ in self.routers]  # tokens that each expert got in this step
        for load, router in zip(self.loads, self.routers, strict=True):
            router.register_forward_hook(partial(_count_load_, load))
        self.step, self.began = 0, time.monotonic()

    @property
    def minutes(self) -> float:
        """Time spent so far, earlier processes included."""
        return (time.monotonic() - self.began) / 60

    def step_(self, batches: list[tuple[Tensor, Tensor]]) -> dict[str, Any]:
        """One step on this process's token ids and labels; returns what the log shows."""
        began = time.monotonic()
        sums = torch.zeros(3)  # loss, labels, tokens
        for ids, labels in batches:
            with lean_mamba():
                hidden = self.model.model(ids, use_cache=False).last_hidden_state[:, :-1]
            counted = labels[:, 1:] != -100
            loss = F.cross_entropy(self.model.lm_head(hidden[counted]), labels[:, 1:][counted], reduction="sum")
            loss.backward()
            sums += torch.tensor([loss.item(), counted.sum(), ids.numel()])
        grads = [w.grad for w in self.weights.values() if w.grad is not None]
        _add_up_([*grads, sums, *self.loads])
        norm = torch.stack([grad.square().sum() for grad in grads]).sum().sqrt() / sums[1]
        if not norm.isfinite():
            raise FloatingPointError(f"loss is {sums[0] / sums[1]} at step {self.step}: lower --rate.")
        for grad in grads:
            grad.mul_(min(1.0, self.args.clip / norm) / sums[1])
        rate = self._update_()
        peak_load = max(float(load.max() / load.mean()) for load in self.loads)
        self._balance_()
        self.step += 1
        entry = {"loss": sums[0] / sums[1], "norm": norm, "rate": rate, "peak_load": peak_load, "minutes": self.minutes}
        entry["tokens_per_second"] = sums[2] / (time.monotonic() - began)
        return {"step": self.step, **{name: float(f"{float(value):.4g}") for name, value in entry.items()}}

    def _update_(self) -> float:
        """Let both optimizers take a step, clear the gradients, return Muon's learning rate."""
        rate = self.args.rate * min(self._falling(), (self.step + 1) / self.args.warmup)
        self.muon.step_(rate, self.args.weight_decay)
        for group in self.adam.param_groups:
            group["lr"] = rate * self.args.adam_rate / self.args.rate
        self.adam.step()
        for w in self.weights.values():
            if w.grad is not None:
                w.grad.zero_()
        return rate

    def _balance_(self) -> None:
        """Make busy experts less likely to be chosen, idle ones more: the bias moves a small step against the load."""
        for load, router in zip(self.loads, self.routers, strict=True):
            bias: Any = router.e_score_correction_bias
            bias.add_((load.mean() - load).sign(), alpha=self.args.balance * self._falling())
            load.zero_()

    def _falling(self) -> float:
        """Share of the full learning rate: flat, then linearly to zero."""
        return min(1.0, (self.args.steps - self.step) / (self.args.steps * self.args.decay_share))

    def save(self, work: Path) -> None:
        """Write the checkpoint; a kill while writing leaves the last one whole."""
        state = {"model": self.model.state_dict(), "muon": self.muon.buffers, "adam": self.adam.state_dict()}
        unfinished = work / "checkpoint.unfinished"
        torch.save({**state, "step": self.step, "seconds": 60 * self.minutes}, unfinished)
        unfinished.replace(work / "checkpoint.pt")

    def resume_(self, work: Path) -> None:
        """Go on from the checkpoint, if there is one."""
        path = work / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.adam.load_state_dict(state["adam"])
        for buffer, value in zip(self.muon.buffers, state["muon"], strict=True):
            buffer.copy_(value)
        self.step, self.began = state["step"], time.monotonic() - state["seconds"]


def _add_up_(tensors: list[Tensor]) -> None:
    """Replace each tensor by its sum over the processes, in one message."""
    if not dist.is_initialized():
        return
    flat = torch.cat([x.flatten() for x in tensors])
    dist.all_reduce(flat)
    for x, total in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
        x.copy_(total.view_as(x))


def _count_load_(load: Tensor, router: Any, inputs: Any, outputs: tuple[Tensor, ...]) -> None:
    """Forward hook of a router: add the tokens that each expert got."""
    load += torch.bincount(outputs[2].flatten(), minlength=len(load))


def _accuracy(model: Any, tokenizer: Any, problems: list[tasks.Problem]) -> dict[str, Any]:
    """Shares of problems solved with and without thinking, in all and by family."""
    result = {}
    model.eval()
    for name, budget in (("thinking", None), ("direct", 0)):
        report = evaluation.solve(model, tokenizer, problems, thinking_budget=budget)
        result[name] = round(report.accuracy, 4)
        result[f"{name}_families"] = {family: round(value, 3) for family, value in report.families.items()}
    model.train()
    return result


def _log(work: Path, entry: dict[str, Any]) -> None:
    line = json.dumps(entry)
    print(line, flush=True)
    with open(work / "log.jsonl", "a", encoding="utf-8") as file:
        file.write(line + "\n")


def export(args: argparse.Namespace, model: Any, tokenizer: Any, to: Path, *, step: int, minutes: float) -> None:
    """Write the model in bfloat16 (what real checkpoints keep in float32 stays so), measured as it is on disk."""
    shipped = NemotronHForCausalLM(model.config)
    shipped.load_state_dict(model.state_dict())
    for name, w in shipped.named_parameters():
        if not name.endswith(FLOAT32):
            w.data = w.data.to(torch.bfloat16)
    shipped.config.dtype = torch.bfloat16
    shipped.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=320
    )
    shipped.save_pretrained(to)
    (to / "model.safetensors").chmod(0o644)  # written for its owner alone
    tokenizer.save_pretrained(to)
    read = NemotronHForCausalLM.from_pretrained(to, dtype=torch.float32).eval()
    problems = tasks.problems("test", args.test_problems)
    reports = [evaluation.solve(read, tokenizer, problems, thinking_budget=budget) for budget in (None, 0)]
    card = _card(args, read, problems, *reports, step=step, minutes=minutes)
    (to / "README.md").write_text(card, encoding="utf-8")
    print(card, flush=True)


def _card(
    args: argparse.Namespace,
    model: Any,
    problems: list[tasks.Problem],
    thinking: evaluation.Report,
    direct: evaluation.Report,
    *,
    step: int,
    minutes: float,
) -> str:
    """The model card: what the model does, how well, and how it was made."""
    total, active = _count(model)
    first = {problem.family: problem for problem in reversed(problems)}
    return CARD.format(
        pattern=model.config.hybrid_override_pattern,
        total=total,
        active=active,
        version=version("reasoning-gym"),
        examples="\n".join(
            f"| {name} | `{p.question}` | `{p.thinking}` | `{p.answer}` |" for name, p in sorted(first.items())
        ),
        num_problems=len(problems),
        accuracy=thinking.accuracy,
        accuracy_direct=direct.accuracy,
        families="\n".join(
            f"| {name} | {share:.1%} | {direct.families[name]:.1%} |" for name, share in thinking.families.items()
        ),
        thinking_tokens=thinking.thinking_tokens,
        answer_tokens=thinking.answer_tokens,
        step=step,
        tokens=args.tokens,
        samples=args.samples,
        no_thinking=NO_THINKING,
        cut_thinking=CUT_THINKING,
        seed=args.seed,
        minutes=minutes,
        hardware=f"two cores of an {_processor()}",
        command=f"--to {args.to} --steps {args.steps}",
        note=args.note,
    )


def _count(model: Any) -> tuple[int, int]:
    """Parameters, and those that work on one token: of the routed experts only the chosen share."""
    total = sum(w.numel() for w in model.parameters())
    routed = sum(w.numel() for name, w in model.named_parameters() if ".experts." in name)
    config = model.config
    return total, total - routed + routed * config.num_experts_per_tok // config.n_routed_experts


def _processor() -> str:
    """The processor's name, where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line's settings; `given` stands for it in tests."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--to", default="", help="folder for the finished model; empty: only checkpoints")
    parser.add_argument("--work", default="runs/reasoner", help="folder for data, checkpoints and the log")
    parser.add_argument("--note", default="", help="a sentence that ends the model card")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--samples", type=int, default=140_000, help="training problems")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a step in all processes, padding included")
    parser.add_argument("--rate", type=float, default=3e-3, help="of matrices (Muon)")
    parser.add_argument("--adam-rate", type=float, default=1.5e-3, help="of all other parameters")
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--decay-share", type=float, default=0.5, help="share of the steps in which the rate falls")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--balance", type=float, default=5e-3, help="step of the router's correction bias")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--eval-problems", type=int, default=140)
    parser.add_argument("--test-problems", type=int, default=700, help="held-out problems of the model card")
    parser.add_argument("--eval-every", type=int, default=600, help="steps")
    parser.add_argument("--log-every", type=int, default=50, help="steps")
    parser.add_argument("--save-minutes", type=float, default=3.0)
    parser.add_argument("--layers", default="ME*EMEM*E")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=16)
    parser.add_argument("--mamba-heads", type=int, default=8)
    parser.add_argument("--mamba-head-dim", type=int, default=16)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--state", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=32)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--active", type=int, default=2)
    parser.add_argument("--expert-width", type=int, default=96)
    parser.add_argument("--shared-width", type=int, default=128)
    parser.add_argument("--experts-implementation", default="grouped_mm")
    return parser.parse_args(given)


if __name__ == "__main__":
    train(arguments())
