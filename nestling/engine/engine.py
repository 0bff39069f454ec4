"""The engine: a nest opened once, any of its members for any answer, many answers at once.

One thread does all the computing; requests and cancellations come from any other. What is asked is checked where it
is asked, before anything begins; what is admitted is bounded, so that more load means a refusal and not a lack of
memory.
"""

from __future__ import annotations

import atexit
import re
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from nestling import hf
from nestling.checkpoint import read_json
from nestling.engine.answer import Answer
from nestling.engine.handover import why_not
from nestling.engine.lean import decoder_for
from nestling.engine.plain import Plain
from nestling.engine.prefix import Prefixes
from nestling.engine.scheduler import Running, Scheduler
from nestling.engine.settings import EngineSettings, EngineStats
from nestling.engine.stream import AnswerStream, Outlet
from nestling.engine.weights import Weights
from nestling.events import CANCELLED
from nestling.nest import FULL, Member, check_sizes, open_nest
from nestling.policy import REPLAY
from nestling.request import Full, Request, TooLong, check_stop
from nestling.template import template_of
from nestling.think import Machine

MOST_TAG = 24  # tokens at a prompt's end that may be tags and white space
LONE = re.compile("[\ud800-\udfff]")  # half of a character: JSON can spell it, and bytes that are no text become it


class Engine:
    """Answers requests with the members of one nest; see request.Runtime. Use it as a context, or close it; else
    the process closes it at its end."""

    def __init__(self, folder: str | Path, *, settings: EngineSettings | None = None) -> None:
        self.settings = settings or EngineSettings()
        self.settings.check()
        self.nest = open_nest(folder)
        self.weights = Weights(self.nest, dtype=self.settings.dtype)
        self.tokenizer = hf.load_tokenizer(folder)
        self._codec = hf.codec(self.tokenizer)
        self._stop_tokens = _stop_tokens(Path(folder), self.nest.config)
        self.template = template_of(self.tokenizer)
        tags = self.template.tags
        shown = (tags.open, tags.close, tags.tool_open, tags.tool_close)
        self._silent = hf.special_tokens(self.tokenizer, but=shown)
        self.prefixes = Prefixes(self.settings.prefix_bytes)
        self._running: dict[str, Running] = {}
        for member in sorted(self.nest.members.values(), key=lambda one: one.name != FULL):
            self._load(member)
        self._scheduler = Scheduler(self._running, chunk=self.settings.chunk, prefixes=self.prefixes)
        self._waiting: deque[Answer] = deque()
        self._in_flight: list[Answer] = []  # what runs or waits
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="nestling-engine", daemon=True)
        self._thread.start()
        atexit.register(self.close)  # a thread inside torch does not survive the interpreter's end

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def members(self) -> tuple[str, ...]:
        """The members' names, the full one first."""
        return tuple(self._running)

    @property
    def context(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return int(self.nest.config.get("max_position_embeddings") or 2**31)

    def add_member(self, name: str, sizes: Mapping[str, int]) -> None:
        """A member of other sizes, from now on; what runs goes on."""
        if name in self._running:
            raise ValueError(f"there is a member '{name}' already. Members: {', '.join(self.members)}.")
        who = f"member '{name}'"
        self._load(Member(name=name, sizes=check_sizes(self.nest.layout, self.nest.config, sizes, who=who)))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; special tokens are read as such and none is added."""
        if wrong := LONE.search(text):
            raise ValueError(f"the text is not valid Unicode: {wrong[0]!r} is half of a character.")
        return self._codec.encode(text, add_special_tokens=False).ids

    def submit(self, request: Request) -> AnswerStream:
        """Begin an answer; see request.Runtime."""
        ids = self._check(request)
        tag, is_open = self._open_tag(ids)
        answer = Answer(
            request=request,
            outlet=Outlet(),
            ids=ids,
            machine=Plain(request.max_tokens) if request.is_plain else self._machine(request, is_open=is_open),
            tokenizer=self._codec,
            silent=self._silent,
            stop_tokens=self._stop_tokens | set(request.stop_tokens),
            think=request.policy.think or self.members[0],
            answer=request.policy.answer or self.members[0],
            tag=tag,
        )
        outlet = answer.outlet
        with self._changed:
            if self._is_closed:
                raise Full("the engine is closed.")
            tokens, in_flight = answer.most_tokens, self._tokens_in_flight
            if len(self._waiting) >= self.settings.max_waiting + self._num_free:
                raise Full(f"{len(self._waiting)} answers are waiting already, no more are admitted. Try again later.")
            if in_flight + tokens > self.settings.max_tokens_in_flight:
                raise Full(
                    f"{in_flight:,} tokens are in flight, and this answer may come to {tokens:,}: more than "
                    f"the {self.settings.max_tokens_in_flight:,} that are admitted. Try again later."
                )
            self._in_flight.append(answer)
            self._waiting.append(answer)
            self._changed.notify()
        return AnswerStream(outlet, self._cancel)

    def stats(self) -> EngineStats:
        """What the engine does at the moment."""
        with self._changed:
            answers = [answer for answer in self._scheduler.answers if not answer.is_over]
            states = [state for answer in answers for state in (answer.state, answer.shadow) if state is not None]
            return EngineStats(
                rows_running=len(answers),
                rows_waiting=len(self._waiting),
                tokens_in_flight=self._tokens_in_flight,
                weight_bytes=self.weights.nbytes,
                copied_bytes=self.weights.copied_bytes,
                row_bytes=sum(state.nbytes for state in states),
                prefix_bytes=self.prefixes.nbytes,
                num_prefix_hits=self.prefixes.num_hits,
                num_prefix_misses=self.prefixes.num_misses,
                num_reused=self.prefixes.num_reused,
            )

    def close(self) -> None:
        """Cancel everything and give everything back."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()
        atexit.unregister(self.close)

    def _machine(self, request: Request, *, is_open: bool) -> Machine:
        return Machine(
            request.policy,
            tags=self.template.tags,
            max_tokens=request.max_tokens,
            is_open=is_open,
            measure=lambda text: len(self.encode(text)) if text else 0,
        )

    def _open_tag(self, ids: list[int]) -> tuple[int, bool]:
        """Where the tag begins that opens thoughts at the prompt's end, its length if there is none; and whether they
        are still open: a template may close them at once."""
        opening, closing = self.template.tags.open, self.template.tags.close
        for i in range(len(ids) - 1, max(len(ids) - MOST_TAG, -1), -1) if opening else ():
            before, tag, after = self._codec.decode(ids[i:], skip_special_tokens=False).rpartition(opening)
            if tag and not before.strip():
                has_closed = closing in after
                return (i, not has_closed) if not after.replace(closing, "", 1).strip() else (len(ids), False)
        return len(ids), False

    @property
    def _num_free(self) -> int:
        """Places for what waits. What is over has none, also before the turn in which it ended is."""
        return max(0, self.settings.max_rows - sum(not answer.is_over for answer in self._scheduler.answers))

    @property
    def _tokens_in_flight(self) -> int:
        """Tokens that all that runs or waits may come to."""
        return sum(answer.most_tokens for answer in self._in_flight if not answer.is_over)

    def _load(self, member: Member) -> None:
        loaded = self.weights.load(member)
        how = {"decoder": self.settings.decoder, "threads": self.settings.threads}
        self._running[member.name] = Running(loaded=loaded, decoder=decoder_for(loaded, **how))

    def _check(self, request: Request) -> list[int]:
        """The prompt's tokens, of a request that can be done."""
        request.policy.check(self.members)
        request.sampling.check()
        self._check_handover(request)
        check_stop(request.stop)
        if type(request.max_tokens) is not int or request.max_tokens < 1:
            raise ValueError(f"max_tokens is {request.max_tokens!r}: expected a whole number, 1 or more.")
        if request.logprobs is not None and (type(request.logprobs) is not int or request.logprobs < 0):
            raise ValueError(f"logprobs is {request.logprobs!r}: expected a whole number, 0 or more.")
        vocab = self.nest.layout.sizes["vocab"]
        if isinstance(request.prompt, str):
            ids = self.encode(request.prompt)
        else:
            ids = list(request.prompt)
            wrong = next((i for i in ids if type(i) is not int or not 0 <= i < vocab), None)
            if wrong is not None:
                raise ValueError(f"the prompt has token {wrong!r}: expected whole numbers from 0 to {vocab - 1}.")
        if not ids:
            raise ValueError("the prompt is empty: expected at least one token.")
        most = self.settings.max_prompt or self.context
        if len(ids) > most:
            raise TooLong(f"the prompt has {len(ids):,} tokens, {most:,} are admitted.")
        if len(ids) + request.max_tokens > self.context:
            raise TooLong(
                f"the prompt has {len(ids):,} tokens and max_tokens is {request.max_tokens:,}: together more than the "
                f"{self.context:,} of this model's context."
            )
        return ids

    def _check_handover(self, request: Request) -> None:
        policy = request.policy
        think, answer = (name or self.members[0] for name in (policy.think, policy.answer))
        if request.is_plain or policy.handover != REPLAY or think == answer:
            return
        reason = why_not(self._running[think].loaded, self._running[answer].loaded)
        if reason:
            raise ValueError(f"handover 'replay' from '{think}' to '{answer}' cannot be done: {reason}. Use prefill.")

    def _cancel(self, outlet: Outlet) -> None:
        outlet.is_cancelled = True
        with self._changed:
            self._changed.notify()

    def _work(self) -> None:
        if self.settings.threads:
            torch.set_num_threads(self.settings.threads)
        with torch.inference_mode():
            while self._admit():
                self._scheduler.turn()
                self._forget()

    def _admit(self) -> bool:
        """Let what waits run where there is room; wait if there is nothing to do. False: the engine is closed."""
        with self._changed:
            while not (self._is_closed or self._waiting or self._scheduler.answers):
                self._changed.wait()
            is_closed = self._is_closed
            if is_closed:
                cancelled, joining = [*self._scheduler.answers, *self._waiting], []
                self._scheduler.answers = []
                self._waiting.clear()
                self._in_flight.clear()
            else:
                cancelled = [answer for answer in self._waiting if answer.outlet.is_cancelled]
                for answer in cancelled:
                    self._waiting.remove(answer)
                joining = [self._waiting.popleft() for _ in range(min(len(self._waiting), self._num_free))]
        for answer in cancelled:  # not under the lock, which a reader may want
            answer.finish(CANCELLED)
        for answer in joining:
            self._scheduler.add(answer)
        return not is_closed

    def _forget(self) -> None:
        """Give back what finished answers had been granted."""
        with self._changed:
            self._in_flight = [answer for answer in self._in_flight if not answer.is_over]


def _stop_tokens(folder: Path, config: hf.Config) -> frozenset[int]:
    """The tokens that end a text, where stock `generate` looks for them."""
    file = folder / "generation_config.json"
    told = read_json(file).get("eos_token_id") if file.is_file() else config.get("eos_token_id")
    return frozenset(told if isinstance(told, list) else [] if told is None else [told])
