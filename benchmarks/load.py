"""A server under load: many streaming clients at once, of every member and budget, some of which hang up midway or send
what cannot be answered. Each answer must be the one that the same request gets alone, letter for letter.

First every kind of request is answered alone. Then each client sends kinds at random until the time is over: it reads
the whole stream, or hangs up after a random number of bytes, or sends a broken request. The server is a process of its
own, whose memory is sampled; at the end nothing may be held any more.

    python -m benchmarks.load                                      # two minutes; --seconds 5 --clients 8 to try it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, hardware, markdown, put

MIB = 1024**2
QUESTIONS = (
    "7+8+7", "35*58", "gcd 15,85", "165 base 11 to 5", "bits 6625", "caesar 14:S", "legs 8 bird,8 chicken",
    "96+92-8", "12*7", "gcd 36,48", "bits 77", "91-17+4-60",
)  # fmt: skip
BUDGETS = (None, 0, 8, 32, 64)
SHARE_CANCELLED, SHARE_BROKEN = 0.25, 0.05
# What cannot be answered, and what is said to it.
BROKEN: tuple[tuple[bytes, int], ...] = (
    (b'{"model": "nest", "messages": [', 400),
    (b'{"model": "no-such-model", "messages": [{"role": "user", "content": "1+1"}]}', 404),
    (b'{"messages": [{"role": "user", "content": "1+1"}], "temperature": NaN}', 400),
    (b'{"messages": [{"role": "user", "content": "1+1"}], "elastic": {"think": "9000"}}', 400),
    (b'{"messages": [{"role": "user", "content": "\xff"}]}', 400),
    (b'{"messages": []}', 400),
)
Place = tuple[str, int]


@dataclass(frozen=True)
class Kind:
    """A request that is sent over and over, and what it gets alone."""

    body: bytes
    expected: tuple[str, str] = ("", "")  # thoughts, answer


@dataclass
class Tally:
    """What the clients saw."""

    finished: int = 0
    cancelled: int = 0
    broken: int = 0  # requests that could not be answered, and were refused as they should be
    refused: Counter[int] = field(default_factory=Counter)  # statuses of requests that could be answered
    wrong: list[str] = field(default_factory=list)  # what should never be
    first: list[float] = field(default_factory=list)  # seconds to the first text
    tokens: int = 0
    memory: list[int] = field(default_factory=list)  # bytes, sampled


def kinds(members: Sequence[str], number: int, draw: random.Random) -> list[Kind]:
    """Requests of every member, some budget and some question."""
    bodies: dict[bytes, Kind] = {}
    while len(bodies) < number:
        budget, i = draw.choice(BUDGETS), len(bodies)
        asked: dict[str, Any] = {
            "model": "nest",
            "messages": [{"role": "user", "content": draw.choice(QUESTIONS)}],
            "max_tokens": draw.choice((24, 96, 160)),
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "elastic": {"think": members[i % len(members)], "answer": draw.choice(members)},
        }
        if budget is not None:
            asked["thinking_token_budget"] = budget
        body = json.dumps(asked).encode()
        bodies.setdefault(body, Kind(body))
    return list(bodies.values())


async def load(
    place: Place,
    *,
    members: Sequence[str],
    clients: int,
    seconds: float,
    seed: int = 0,
    num_kinds: int = 48,
    pid: int = 0,
) -> Tally:
    """Answer every kind alone, then all at once for so many seconds. pid: the server's, whose memory is sampled."""
    draw, tally = random.Random(seed), Tally()
    alone = []
    for kind in kinds(members, num_kinds, draw):
        status, told = await ask(place, kind.body)
        assert status == 200, told
        alone.append(Kind(kind.body, parts(told)))
    until = time.monotonic() + seconds
    watch = asyncio.create_task(_watch(pid, tally)) if pid else None
    await asyncio.gather(*(_client(place, alone, random.Random(draw.random()), until, tally) for _ in range(clients)))
    if watch is not None:
        watch.cancel()
    return tally


async def _client(place: Place, alone: Sequence[Kind], draw: random.Random, until: float, tally: Tally) -> None:
    while time.monotonic() < until:
        what = draw.random()
        if what < SHARE_BROKEN:
            body, expected = draw.choice(BROKEN)
            status, told = await ask(place, body)
            tally.broken += 1
            if status not in (expected, 429) or "error" not in json.loads(told):
                tally.wrong.append(f"{body!r}: {status} instead of {expected}: {told[:200]!r}")
            continue
        kind = draw.choice(alone)
        is_cancelled = what < SHARE_BROKEN + SHARE_CANCELLED
        most = draw.randrange(20_000) if is_cancelled else None
        begun = time.monotonic()
        status, told = await ask(place, kind.body, most=most, first=(tally.first, begun))
        if status == 429:
            tally.refused[status] += 1
            await asyncio.sleep(draw.random())
        elif status and status != 200:
            tally.refused[status] += 1
            tally.wrong.append(f"status {status}: {told[:200]!r}")
        elif is_cancelled:
            tally.cancelled += 1
            found = parts(told)
            if not all(whole.startswith(part) for part, whole in zip(found, kind.expected, strict=True)):
                tally.wrong.append(f"{kind.body!r} broken off: {found} does not begin {kind.expected}")
        else:
            tally.finished += 1
            tally.tokens += usage(told)
            if parts(told) != kind.expected or not told.endswith(b"data: [DONE]\n\n"):
                tally.wrong.append(f"{kind.body!r}: {parts(told)} is not {kind.expected}")


async def ask(
    place: Place, body: bytes, *, most: int | None = None, first: tuple[list[float], float] | None = None
) -> tuple[int, bytes]:
    """Send a chat request, read its answer or at most so many bytes of it, then hang up. Status 0: nothing was read."""
    reader, writer = await asyncio.open_connection(*place)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {place[0]}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        raw = bytearray()
        while (most is None or len(raw) < most) and (part := await reader.read(16_384)):
            if first is not None and b'content":"' in part.replace(b'"role":"assistant","content":""', b""):
                first[0].append(time.monotonic() - first[1])
                first = None
            raw += part
        return _status(bytes(raw if most is None else raw[:most]))
    finally:
        writer.transport.abort()  # what is left unread is not waited for


def _status(raw: bytes) -> tuple[int, bytes]:
    head, found, rest = raw.partition(b"\r\n\r\n")
    if not found:
        return 0, b""
    return int(head.split()[1]), _joined(rest) if b"chunked" in head.lower() else rest


def _joined(raw: bytes) -> bytes:
    """The content of a body that came in chunks, as far as it came."""
    content = bytearray()
    while raw:
        length, _, raw = raw.partition(b"\r\n")
        if not length.strip():
            break
        size = int(length, 16)
        content += raw[:size]
        raw = raw[size + 2 :]
    return bytes(content)


def parts(stream: bytes) -> tuple[str, str]:
    """Thoughts and answer of a stream, as far as it came."""
    thoughts, answer = [], []
    for line in stream.split(b"\n\n"):
        if not line.startswith(b"data: {") or not line.endswith(b"}"):
            continue
        try:
            told = json.loads(line[6:])
        except ValueError:  # the last line of a stream that was broken off
            continue
        for choice in told.get("choices", ()):
            thoughts.append(choice["delta"].get("reasoning") or "")
            answer.append(choice["delta"].get("content") or "")
        if "error" in told:
            answer.append(f"[error: {told['error']['message']}]")
    return "".join(thoughts), "".join(answer)


def usage(stream: bytes) -> int:
    """Tokens that a whole stream says were generated."""
    found = [json.loads(line[6:]) for line in stream.split(b"\n\n") if b'"usage":{' in line]
    return found[-1]["usage"]["completion_tokens"] if found else 0


async def _watch(pid: int, tally: Tally) -> None:
    while True:
        tally.memory.append(resident(pid))
        await asyncio.sleep(0.5)


def resident(pid: int) -> int:
    """Private bytes of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024


def grown(memory: Sequence[int]) -> float:
    """MiB by which the last quarter of the samples lies above the second: the first warms up."""
    quarter = len(memory) // 4
    return (statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])) / MIB


def table(tally: Tally, *, clients: int, seconds: float) -> str:
    """What was measured, for docs/results.md."""
    first = sorted(tally.first)
    rows = [
        ["clients", "answers finished", "broken off by the client", "refused as they should be", "429", "wrong",
         "tokens/s", "first text, median", "99 %", "memory after the first quarter", "at the end", "grown"],
        [str(clients), f"{tally.finished:,}", f"{tally.cancelled:,}", f"{tally.broken:,}", f"{tally.refused[429]:,}",
         f"{len(tally.wrong):,}", f"{tally.tokens / seconds:,.0f}", f"{statistics.median(first):.2f} s",
         f"{first[int(len(first) * 0.99)]:.2f} s", f"{tally.memory[len(tally.memory) // 4] / MIB:.0f} MiB",
         f"{tally.memory[-1] / MIB:.0f} MiB", f"{grown(tally.memory):+.1f} MiB"],
    ]  # fmt: skip
    return markdown(rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nest", default="", help="the shipped one if empty")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=1, help="of the server")
    parser.add_argument("--page", type=Path, default=RESULTS, help="page whose block is replaced")
    given = parser.parse_args(argv)
    command = [sys.executable, "-m", "nestling", "serve", *([given.nest] if given.nest else []), "--port", "0"]
    command += ["--name", "nest", "--threads", str(given.threads)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next((line for line in server.stdout if "http://" in line), "")
        host, _, port = line.strip().rpartition("http://")[2].partition(":")
        place = (host, int(port))
        members = asyncio.run(_members(place))
        tally = asyncio.run(load(place, members=members, clients=given.clients, seconds=given.seconds, pid=server.pid))
        left = asyncio.run(_held(place))
    finally:
        server.terminate()
        server.wait(60)
    measured = table(tally, clients=given.clients, seconds=given.seconds)
    made = f"`python -m benchmarks.load --seconds {given.seconds:g} --clients {given.clients}`"
    print(measured)
    print(*tally.wrong[:10], *left, sep="\n")
    put("load", f"{made}: {hardware(given.threads)}.\n\n{measured}", given.page)
    return 1 if tally.wrong or left else 0


async def _get(place: Place, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    raw = await reader.read()
    writer.close()
    return raw.partition(b"\r\n\r\n")[2]


async def _members(place: Place) -> list[str]:
    return json.loads(await _get(place, "/v1/models"))["data"][0]["nestling"]["members"]


async def _held(place: Place) -> list[str]:
    """Gauges of what runs that have not come back to zero a little while after the load."""
    gauges = (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "nestling:tokens_in_flight",
        "nestling:row_bytes",
    )
    left: list[str] = []
    for _ in range(50):
        lines = (await _get(place, "/metrics")).decode().splitlines()
        left = [line for line in lines if line.startswith(gauges) and not line.endswith(" 0.0")]
        if not left:
            break
        await asyncio.sleep(0.1)
    return left


if __name__ == "__main__":
    raise SystemExit(main())
