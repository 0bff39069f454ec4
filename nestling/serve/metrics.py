"""What Prometheus reads at /metrics. A name of vLLM's means what it means there, so dashboards made for it work."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nestling.events import CANCELLED, LENGTH, STOP, THINKING_LENGTH, Ended, Finished
from nestling.request import Runtime

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
ENDS = {STOP: "stop", LENGTH: "length", THINKING_LENGTH: "length", CANCELLED: "abort"}
# Field of the engine's stats -> what it is called here.
HELD = {
    "tokens_in_flight": "tokens of prompts and answers admitted and not done",
    "weight_bytes": "bytes of the nest's weights, which all members share",
    "copied_bytes": "bytes that members hold beside the shared weights",
    "row_bytes": "bytes of the states of running answers",
    "prefix_bytes": "bytes of states kept for later turns",
}


class Metrics:
    """Counts of one server, in a registry of its own."""

    def __init__(self, runtime: Runtime, *, name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._runtime, self._name = runtime, name
        self.num_live = 0  # answers that are being made
        self._gauge("vllm:num_requests_running", "answers being made", self._running)
        self._gauge("vllm:num_requests_waiting", "answers admitted and not begun", self._waiting)
        for field, line in HELD.items():
            if hasattr(self._stats(), field):
                self._gauge(f"nestling:{field}", line, lambda field=field: getattr(self._stats(), field))
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "tokens of prompts")
        self.generation_tokens = self._counter("vllm:generation_tokens", "tokens generated, thoughts included")
        self.cached_tokens = self._counter("vllm:prefix_cache_hits", "tokens of prompts whose state was kept")
        self.queried_tokens = self._counter("vllm:prefix_cache_queries", "tokens of prompts looked up")
        self.successes = self._counter("vllm:request_success", "answers by how they ended", "finished_reason")
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "from the request to its first text")
        self.end_to_end = self._histogram("vllm:e2e_request_latency_seconds", "from the request to its end")
        self.phase_tokens = self._counter("nestling:tokens", "tokens generated", "phase", "member")
        self.phase_seconds = self._counter("nestling:phase_seconds", "time spent", "phase", "member")
        self.handover = self._histogram("nestling:handover_seconds", "from a switch to the first token", "mode")
        self.forced_ends = self._counter("nestling:forced_ends", "thoughts that the budget ended")
        self.prefilled = self._counter("nestling:reprefilled_tokens", "tokens read again at a hand-over", "mode")
        self.refused = self._counter("nestling:refused_requests", "requests not answered", "status")

    def page(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)

    def refuse(self, status: int) -> None:
        """A request was not answered."""
        self.refused.labels(self._name, str(status)).inc()

    def begin(self, seconds: float) -> None:
        """The first text of an answer is there."""
        self.first_token.labels(self._name).observe(seconds)

    def end_phase(self, ended: Ended) -> None:
        """A phase is over."""
        self.phase_tokens.labels(self._name, ended.phase, ended.member).inc(ended.num_tokens)
        self.phase_seconds.labels(self._name, ended.phase, ended.member).inc(ended.seconds)
        if ended.handover:
            self.handover.labels(self._name, ended.handover).observe(ended.handover_seconds)
            self.prefilled.labels(self._name, ended.handover).inc(ended.num_prefilled)
        if ended.is_forced:
            self.forced_ends.labels(self._name).inc()

    def finish(self, finished: Finished, seconds: float) -> None:
        """An answer is whole."""
        self.prompt_tokens.labels(self._name).inc(finished.prompt_tokens)
        self.generation_tokens.labels(self._name).inc(finished.completion_tokens)
        self.queried_tokens.labels(self._name).inc(finished.prompt_tokens)
        self.cached_tokens.labels(self._name).inc(finished.cached_tokens)
        self.end(ENDS.get(finished.reason, finished.reason), seconds)

    def end(self, reason: str, seconds: float) -> None:
        """An answer ended, whole or not."""
        self.successes.labels(self._name, reason).inc()
        self.end_to_end.labels(self._name).observe(seconds)

    def _counter(self, name: str, line: str, *labels: str) -> Counter:
        made = Counter(name, line, ("model_name", *labels), registry=self.registry)
        if not labels:
            made.labels(self._name)  # there from the start, at zero
        return made

    def _histogram(self, name: str, line: str, *labels: str) -> Histogram:
        return Histogram(name, line, ("model_name", *labels), registry=self.registry, buckets=SECONDS)

    def _gauge(self, name: str, line: str, read: Any) -> None:
        Gauge(name, line, ("model_name",), registry=self.registry).labels(self._name).set_function(read)

    def _stats(self) -> Any:
        """What the runtime tells of itself, if it does: the engine; engines behind URLs have their own metrics."""
        stats = getattr(self._runtime, "stats", None)
        return stats() if stats is not None else None

    def _running(self) -> float:
        return getattr(self._stats(), "rows_running", self.num_live)

    def _waiting(self) -> float:
        return getattr(self._stats(), "rows_waiting", 0)
