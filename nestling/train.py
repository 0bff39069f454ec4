"""Train a nest: learn with a router what each budget keeps, then distil all members together.

The run has two parts. In the soft phase the full model runs under the masks of one budget at a time, and router and
weights learn together; at its end the router's choice is frozen into members. After that every member runs as a
slice, several of them under one pass of the teacher. The teacher is the frozen sorted parent, so the full member
starts at a loss of zero.

A run writes into `TO.work` (log.jsonl, checkpoints, its settings) and can be killed at any step: started again with
the same settings it goes on from the last checkpoint with the same losses. The nest appears at `TO` when it is
complete.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nestling import budget as budgets
from nestling import hf, parallel
from nestling.checkpoint import check_destination, read_json
from nestling.distill import check_finite, forward_kl
from nestling.elastic import ElasticModel, Run
from nestling.export import export
from nestling.nest import FULL, Member, Nest, open_nest, open_plain_nest
from nestling.padded import stream_of
from nestling.plan import Stage, TrainSettings, learning_rate, make_plan
from nestling.router import Router, budget_loss, hard_stairs, pull_to_full

Say = Callable[[str], None]

IDLE = 50  # batches without a token that counts, after which a run is called off


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """One micro-batch and what the teacher says of it."""

    ids: Tensor  # [batch, time]
    counted: Tensor  # bool [batch, time]: whether the prediction made there counts
    target: Tensor  # [batch, time, vocab]  logits


@dataclass
class _State:
    """What changes during a run."""

    members: dict[str, Member]
    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


def train(
    settings: TrainSettings, nest_folder: str | Path, to: str | Path, *, say: Say = print, overwrite: bool = False
) -> Nest:
    """Train the nest in `nest_folder` and write it to `to`. Started again after a kill, goes on where it was."""
    check_destination(Path(to), overwrite=overwrite)
    with parallel.process_group(settings.device) as (rank, world):
        nest = open_plain_nest(nest_folder, verb="train")
        run = _Training(settings, nest, Path(to), rank=rank, world=world, say=say)
        run.loop()
        return run.finish(overwrite=overwrite)


class _Training:
    """One run: the model, its teacher, the router and where they stand."""

    def __init__(self, settings: TrainSettings, nest: Nest, to: Path, *, rank: int, world: int, say: Say) -> None:
        self.settings, self.nest, self.to, self.rank, self.world = settings, nest, to, rank, world
        self.say: Say = say if rank == 0 else (lambda line: None)
        self.plan = make_plan(settings, nest, world=world)
        if any("layer" in one.sizes for one in self.plan.members.values()) and nest.layer_order == tuple(
            range(len(nest.layout.kinds))
        ):
            self.say("no layer was scored, so members of fewer layers keep the first ones (nestling score --layers)")
        model = hf.load_model(nest.folder, device=settings.device)
        self.teacher = hf.load_model(nest.folder, device=settings.device).requires_grad_(False)
        # In evaluation mode there is no dropout: before training the full member is the same function as its teacher.
        self.elastic = ElasticModel(model, layer_order=nest.layer_order).eval()
        if world > 1:
            parallel.shard_(self.elastic)
        self.weights = [p for p in self.elastic.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.weights, lr=1.0, betas=(0.9, settings.beta2), weight_decay=settings.weight_decay
        )
        self.router = Router(
            self.plan.options, [FULL, *self.plan.budgets], width=settings.router_width, seed=settings.seed
        )
        self.router.to(settings.device)
        choosers = [{"params": list(self.router.parameters())}]  # none if every member has sizes of its own
        self.router_optimizer = torch.optim.AdamW(choosers, lr=settings.router_lr, weight_decay=0.0)
        self.generator = torch.Generator().manual_seed(settings.seed)
        tokenizer = hf.load_tokenizer(nest.folder)
        hf.check_vocabulary(self.teacher, tokenizer)
        self.stream = stream_of(
            settings.data,
            tokenizer,
            pack=settings.pack,
            length=self.plan.stages[0].length,
            seed=settings.seed,
            rank=rank,
            world=world,
            loss_on=settings.loss_on,
        )
        self.vocab = min(len(tokenizer), nest.layout.sizes["vocab"]) if len(tokenizer) else None
        self.state = _State(members=dict(self.plan.members) if not self.plan.soft_steps else {})
        if not self.plan.soft_steps:
            for name, one in self.plan.budgets.items():
                self._freeze(name, budgets.uniform(one, nest.layout, self.plan.options))
        self.num_idle = 0  # batches on end in which nothing counted
        self.work = to.with_name(to.name + ".work")
        self._resume()

    def loop(self) -> None:
        """Every step that is left."""
        started, printed, since = time.monotonic(), time.monotonic(), self.state.tokens
        for step, stage, first in self._steps():
            if self.stream.length != stage.length:
                self.stream.set_length(stage.length)
            before = time.monotonic()
            record = self._step(step, stage, first)
            self.state.step = step + 1
            self.state.seconds += time.monotonic() - before
            now = time.monotonic()
            rate = (self.state.tokens - since) / max(now - started, 1e-9)
            if self.rank == 0:
                with (self.work / "log.jsonl").open("a") as log:
                    log.write(json.dumps(record | {"tokens_per_second": round(rate, 1)}) + "\n")
            if now - printed >= self.settings.print_seconds or step + 1 == self.plan.num_steps:
                self.say(self._line(record, rate, (now - started) / (step + 1 - self.first_step)))
                printed = now
            if step + 1 == self.plan.soft_steps:
                self._freeze_all()
            if (step + 1) % self.settings.checkpoint == 0 and step + 1 < self.plan.num_steps:
                self._save()

    def finish(self, *, overwrite: bool) -> Nest:
        """Write the nest; the work folder goes."""
        weights = parallel.gather(self.elastic)
        if self.rank == 0:
            trained = {name: replace(m, is_trained=True) for name, m in self.state.members.items()}
            full = replace(self.nest.members[FULL], is_trained=True)
            ordered = dict(sorted(trained.items(), key=lambda item: -self.nest.cost(item[1]).active_parameters))
            recipe = {
                "train": asdict(self.settings),
                "tokens": self.state.tokens,
                "seconds": round(self.state.seconds, 1),
                "threads": torch.get_num_threads(),
            }
            nest = replace(
                self.nest, members={FULL: full, **ordered}, recipe=self.nest.recipe | recipe,
                parent=self.nest.parent or self.nest.fingerprint,
            )  # fmt: skip
            export(
                self.elastic.full, weights, nest, self.to, overwrite=overwrite,
                router=self.router if self.plan.soft_steps else None, log=self.work / "log.jsonl",
            )  # fmt: skip
            shutil.rmtree(self.work)
        parallel.barrier()
        return open_nest(self.to)

    def _steps(self) -> Iterator[tuple[int, Stage, int]]:
        """Step, its stage and the stage's first step, from where the run stands."""
        self.first_step, first = self.state.step, 0
        for stage in self.plan.stages:
            for step in range(max(first, self.first_step), first + stage.steps):
                yield step, stage, first
            first += stage.steps

    def _step(self, step: int, stage: Stage, first: int) -> dict[str, Any]:
        """One optimizer step. Returns its record."""
        is_soft = step < self.plan.soft_steps
        since = 0 if is_soft else self.plan.soft_steps
        lr = learning_rate(step, stage, first, warmup=self.settings.warmup, since=since)
        lr *= self.settings.router_weights if is_soft else 1.0
        for weight in self.weights:
            weight.requires_grad_(lr > 0)  # weights that wait for the router cost no gradient and no optimizer step
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        losses: dict[str, list[float]] = {}
        record: dict[str, Any] = {"step": step, "phase": "router" if is_soft else "members", "lr": lr}
        for _ in range(self.settings.accumulate):
            before = self.stream.num_tokens
            batch = self._next_batch(stage)
            self.state.tokens += self.stream.num_tokens - before
            if step == 0 and not losses:
                self._check_start(batch)
            found = self._soft_batch(batch, stage, step, record) if is_soft else self._member_batch(batch, stage, step)
            for name, loss in found.items():
                losses.setdefault(name, []).append(loss)
        if lr > 0:
            record["grad_norm"] = norm = parallel.clip_(self.weights, self.settings.clip)
            if not math.isfinite(norm):
                raise RuntimeError(f"the gradient's norm is {norm} at step {step} ({', '.join(losses)}): lower the lr.")
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if is_soft:
            parallel.mean_gradients_(self.router)
            parallel.clip_(list(self.router.parameters()), self.settings.clip)
            self.router_optimizer.step()
            self.router_optimizer.zero_grad(set_to_none=True)
        means = parallel.mean_of({name: math.fsum(some) / len(some) for name, some in losses.items()})
        return record | {"loss": means, "tokens": self.state.tokens}

    def _next_batch(self, stage: Stage) -> _Batch:
        ids, counted = (x.to(self.settings.device) for x in self.stream.next_counted(stage.batch))
        with torch.no_grad(), self._autocast():
            return _Batch(ids=ids, counted=counted, target=self.teacher(input_ids=ids, use_cache=False).logits)

    def _kl(self, run: Run | Mapping[str, int], batch: _Batch) -> Tensor:
        """A member's distance to the teacher, over the tokens that count."""
        with self._autocast():
            logits = self.elastic(run, input_ids=batch.ids, use_cache=False).logits
        if not batch.counted.any():  # the inside of a long prompt; every rank still walks the same graph
            self.num_idle += 1
            if self.num_idle >= IDLE:
                raise ValueError(
                    f"no token counted in {IDLE} batches on end with loss_on '{self.settings.loss_on}': the documents "
                    "hold no completions (the last message must be the assistant's), or the blocks are too short."
                )
            return logits.sum() * 0.0
        self.num_idle = 0
        return forward_kl(logits, batch.target, mask=batch.counted, vocab=self.vocab)

    def _soft_batch(self, batch: _Batch, stage: Stage, step: int, record: dict[str, Any]) -> dict[str, float]:
        """The router's part: one budget, masked softly (rarely: sliced, straight through).

        What a budget costs needs no forward pass, so every budget's term is in every step, also when another is drawn.
        """
        settings, asked = self.settings, self.plan.budgets
        # The full member has nothing to tell the router; it is drawn only where the weights move too.
        names = self.router.names if settings.router_weights else tuple(asked)
        (name,) = self._draw(stage, 1, names)
        progress = step / max(1, self.plan.soft_steps - 1)
        chosen = {one: self.router(one, progress, self.generator) for one in self.router.names}
        terms = {one: self._budget_term(one, p) for one, p in chosen.items()}
        if float(torch.rand((), generator=self.generator)) < settings.router_hard and name != FULL:
            sizes, stairs = hard_stairs(chosen[name], self.plan.options)
            run = Run(sizes=sizes, stairs=stairs)
        else:
            run = Run(stairs=self.router.stairs(chosen[name]), is_soft=True) if name != FULL else Run()
        kl = self._kl(run, batch)
        ((kl + torch.stack(list(terms.values())).sum()) / settings.accumulate).backward()
        record["budget_term"] = {one: term.item() for one, term in terms.items()}
        record["router"] = {one: {a: round(n, 2) for a, n in self.router.settled(one).items()} for one in asked}
        record["probabilities"] = {
            one: {axis: [round(x, 4) for x in q.tolist()] for axis, q in p.items()} for one, p in chosen.items()
        }
        return {name: check_finite(kl.detach(), member=name, step=step)}

    def _budget_term(self, name: str, p: Mapping[str, Tensor]) -> Tensor:
        """How far the expected sizes lie from the budget; for the full member, from the full sizes."""
        if name == FULL:
            return pull_to_full(p)
        distance = budget_loss(self.plan.budgets[name], self.nest.layout, self.router.expected(p))
        return self.settings.router_lambda * distance

    def _member_batch(self, batch: _Batch, stage: Stage, step: int) -> dict[str, float]:
        """Several members, as slices, under one pass of the teacher."""
        count = self.settings.members_per_batch
        names = [FULL, *self.state.members]
        chosen = self._draw(stage, count, names) if count else [n for n in names if stage.weights[n] > 0]
        losses = {}
        for name in chosen:
            kl = self._kl(self.state.members[name].sizes if name != FULL else {}, batch)
            # Drawn members were weighted by the draw (exactly so if it is one); else the weights stand in the loss.
            share = 1 / len(chosen) if count else stage.weights[name]
            (kl * (share / self.settings.accumulate)).backward()
            losses[name] = check_finite(kl.detach(), member=name, step=step)
        return losses

    def _draw(self, stage: Stage, count: int, names: Sequence[str]) -> list[str]:
        """Members drawn by their weights; the same on every rank."""
        p = torch.tensor([stage.weights[name] for name in names], dtype=torch.float64)
        count = min(count, int((p > 0).sum()))
        return [str(names[int(i)]) for i in torch.multinomial(p, count, generator=self.generator).tolist()]

    def _check_start(self, batch: _Batch) -> None:
        """Before training the full member is the teacher."""
        with torch.no_grad():
            start = check_finite(self._kl({}, batch), member=FULL, step=0)
        if not start < 1e-3:
            raise RuntimeError(
                f"the full member starts at KL {start:.4f}, expected 0: the nest is not its own teacher."
            )

    def _freeze(self, name: str, sizes: dict[str, int]) -> None:
        kept = {a: n for a, n in sizes.items() if n != self.nest.layout.sizes[a]}
        self.state.members[name] = Member(name=name, sizes=kept, budget=self.plan.budgets[name].text)

    def _freeze_all(self) -> None:
        """The end of the soft phase: every budget gets its sizes.

        Of the router's most probable sizes, those that lose least as a slice: what it has not decided is measured.
        """
        self.state.members = dict(self.plan.members)
        layout, settings = self.nest.layout, self.settings
        batch = self._next_batch(self.plan.stages[-1])
        for name, one in self.plan.budgets.items():
            liked = self.router.preference(name)
            options = budgets.choose(
                one, layout, self.plan.options, liked, tolerance=settings.tolerance, count=settings.router_tries
            )
            with torch.no_grad():
                losses = [float(self._kl(sizes, batch)) for sizes in options]
            means = parallel.mean_of({str(i): loss for i, loss in enumerate(losses)})
            sizes = options[int(min(means, key=lambda i: means[i]))]
            self._freeze(name, sizes)
            spent = one.spent(layout, layout.sizes | sizes)
            self.say(f"member {name} keeps {_sizes(self.state.members[name])}: {spent / one.target:.3f} of {one.text}")

    def _autocast(self) -> Any:
        if self.settings.dtype == "fp32":
            return nullcontext()
        return torch.autocast(self.settings.device.split(":")[0], dtype=torch.bfloat16)

    def _line(self, record: dict[str, Any], rate: float, per_step: float) -> str:
        losses = "  ".join(f"{name} {loss:.4f}" for name, loss in record["loss"].items())
        left = per_step * (self.plan.num_steps - record["step"] - 1)
        sizes = ""
        if "router" in record:
            sizes = "  router " + " | ".join(
                f"{name}: " + " ".join(f"{a} {n:.0f}" for a, n in e.items()) for name, e in record["router"].items()
            )
        return (
            f"step {record['step'] + 1}/{self.plan.num_steps}  {rate:,.0f} tokens/s  KL {losses}  "
            f"lr {record['lr']:.1e}  {int(left // 60)}:{int(left % 60):02d} left{sizes}"
        )

    def _save(self) -> None:
        members = {name: asdict(member) for name, member in self.state.members.items()}
        small = asdict(self.state) | {"members": members, "stream": self.stream.state_dict()}
        rest = {
            "json": json.dumps(small),
            "generator": self.generator.get_state(),
            "router": self.router.state_dict(),
            "router_optimizer": self.router_optimizer.state_dict(),
        }
        parallel.save_checkpoint(self.work, self.state.step, self.elastic, self.optimizer, rest)

    def _resume(self) -> None:
        """Go on from the newest checkpoint of a run with the same settings, if there is one."""
        self._check_settings()
        rest = parallel.load_checkpoint(self.work, self.elastic, self.optimizer)
        kept: list[str] = []
        if rest is not None:
            small = json.loads(rest["json"])
            self.stream.load_state_dict(small.pop("stream"))
            self.state = _State(**small)
            self.state.members = {name: Member(**member) for name, member in small["members"].items()}
            self.generator.set_state(rest["generator"])
            self.router.load_state_dict(rest["router"])
            self.router_optimizer.load_state_dict(rest["router_optimizer"])
            self.say(f"going on from step {self.state.step} of {self.plan.num_steps}")
            lines = (self.work / "log.jsonl").read_text().splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < self.state.step]
        if self.rank == 0:
            parallel.write_whole(self.work / "log.jsonl", "".join(kept))

    def _check_settings(self) -> None:
        told = json.loads(json.dumps(asdict(self.settings))) | {"nest": self.nest.fingerprint, "ranks": self.world}
        if (self.work / "settings.json").is_file():
            before = read_json(self.work / "settings.json")
            cosmetic = {"print_seconds", "device"}
            changed = [f"{key} was {before.get(key)}, is {told[key]}" for key in told if before.get(key) != told[key]
                       and key not in cosmetic]  # fmt: skip
            if changed:
                raise ValueError(
                    f"'{self.work}' holds an unfinished run with other settings ({'; '.join(changed)}). Use the same "
                    "settings to go on, or delete the folder to start anew."
                )
        parallel.barrier()  # before the first rank writes what the others look for
        if self.rank == 0:
            self.work.mkdir(parents=True, exist_ok=True)
            parallel.write_whole(self.work / "settings.json", json.dumps(told, indent=2))


def _sizes(member: Member) -> str:
    return ", ".join(f"{axis} {n}" for axis, n in member.sizes.items()) or "everything"
