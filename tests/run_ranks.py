"""Training jobs in processes of their own: `python run_ranks.py JOBS.json`, or under torchrun as one of several ranks.

A job with `kill` runs in a child of its own and ends by SIGKILL: `{"step": n}` as soon as the n-th step is in the log,
`{"opens": text}` when a file with this text in its path is opened. A job with `copy` leaves a copy of its unfinished
work behind at that step. `{"inspect": name}` looks at what sharding makes of a tiny model.
"""

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from nestling import parallel
from nestling.distill import forward_kl
from nestling.elastic import ElasticModel
from nestling.train import TrainSettings, train


def main() -> None:
    torch.set_num_threads(1)
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with parallel.process_group("cpu"):  # once: gloo may hang when the same processes meet again and again
        for job in jobs:
            if "inspect" in job:
                inspect(job["inspect"])
            elif "kill" in job:
                assert in_a_child(job) == signal.SIGKILL
            else:
                run(job)


def settings(job: dict[str, Any]) -> TrainSettings:
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job["settings"].items()}
    return TrainSettings(**values)


def run(job: dict[str, Any]) -> None:
    def say(line: str) -> None:
        if "kill" in job and line.startswith(f"step {job['kill'].get('step')}/"):
            os.kill(os.getpid(), signal.SIGKILL)
        if "copy" in job and line.startswith(f"step {job['copy']['step']}/"):
            shutil.copytree(f"{job['to']}.work", f"{job['copy']['to']}.work")

    train(settings(job), job["nest"], job["to"], say=say)


def in_a_child(job: dict[str, Any]) -> int:
    """Run a job in a forked process; returns the signal that ended it."""
    child = os.fork()
    if child == 0:
        if "opens" in job["kill"]:
            sys.addaudithook(lambda event, args: kill_at_open(event, args, job["kill"]["opens"]))
        run(job)
        os._exit(0)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def kill_at_open(event: str, args: tuple[Any, ...], text: str) -> None:
    if event == "open" and text in str(args[0]):
        os.kill(os.getpid(), signal.SIGKILL)


def write_text(file: Path) -> None:
    """Documents to train on: a few words of the tiny tokenizer's letters, over and over."""
    words = ["nest", "egg", "twig", "feather", "moss", "sing", "fly", "brood"]
    lines = [" ".join(words[(i * j + j) % 8] for j in range(1, 4 + i % 9)) for i in range(60)]
    file.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))


def inspect(name: str) -> None:
    """Every parameter is sharded, no buffer is, and members' gradients are those of the whole model."""
    with parallel.process_group("cpu") as (rank, world):
        whole, sharded = (ElasticModel(tiny.model(name).requires_grad_(True)).train() for _ in range(2))
        parallel.shard_(sharded)
        check_shards(sharded, whole, world)
        sizes = tiny.random_sizes(whole.layout, torch.Generator().manual_seed(1), axes=("hidden", "ffn"))
        depth = len(whole.layout.kinds) - 1
        members = [{}, sizes, {"layer": depth}, sizes | {"layer": depth}]
        for one in (whole, sharded):
            for i, member in enumerate(members):  # several passes before one step, some without every layer
                ids = tiny.tokens(2 * world, seed=i)
                target = torch.randn(*ids.shape, tiny.VOCAB, generator=torch.Generator().manual_seed(i))
                if one is sharded:
                    ids, target = ids[rank::world], target[rank::world]
                forward_kl(one(member, input_ids=ids, use_cache=False).logits, target).backward()
        for (name_, a), (_, b) in zip(whole.named_parameters(), sharded.named_parameters(), strict=True):
            assert a.grad is not None, name_
            assert isinstance(b.grad, DTensor), name_
            # float32 sums over tokens in another order
            torch.testing.assert_close(b.grad.full_tensor(), a.grad, rtol=1e-4, atol=2e-6, msg=name_)
        for name_, tensor in parallel.gather(sharded).items():
            assert torch.equal(tensor, whole.state()[name_]), name_


def check_shards(sharded: ElasticModel, whole: ElasticModel, world: int) -> None:
    for (name, b), (_, a) in zip(sharded.named_parameters(), whole.named_parameters(), strict=True):
        assert isinstance(b, DTensor), f"{name} is not sharded"
        held = torch.tensor(b.to_local().numel())
        assert held <= -(-a.shape[0] // world) * a[0].numel(), f"{name}: one rank holds {held} of {a.numel()}"
        dist.all_reduce(held)
        assert held == a.numel(), name
    for (name, b), (_, a) in zip(sharded.named_buffers(), whole.named_buffers(), strict=True):
        assert not isinstance(b, DTensor), name
        assert torch.equal(b, a), name


if __name__ == "__main__":
    main()
