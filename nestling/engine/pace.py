"""How many threads a step takes: found by measuring, because it depends on what else the machine does.

Threads share each step's work evenly and wait for each other a few hundred times, so one thread whose core another
process uses slows all of them down, and a small model's step is over before a second thread pays. Results do not
depend on the number, so it may change at any time.
"""

from __future__ import annotations

from collections import defaultdict, deque

PROBE = 100  # steps after which another number is tried again
KEPT = (
    4  # latest steps of each number that count; the slowest of them does not: one pause of the system is not the rule
)


class Pace:
    """The best number of threads for steps of each size, kept up to date."""

    def __init__(self, most: int) -> None:
        """most: threads that there may be. Tried are it, its halves, and one."""
        self.choices = sorted({max(1, most >> shift) for shift in range(most.bit_length())}, reverse=True)
        self._seconds: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=KEPT))
        self._num_steps: dict[int, int] = defaultdict(int)  # rows, as a power of two -> steps so far

    def choose(self, num_rows: int) -> int:
        """Threads for the next step of so many rows."""
        size = num_rows.bit_length()
        for threads in self.choices:
            if len(self._seconds[size, threads]) < KEPT:
                return threads
        best = min(self.choices, key=lambda threads: self._typical(size, threads))
        others = [threads for threads in self.choices if threads != best]
        turn, since = divmod(self._num_steps[size], PROBE)
        return others[turn % len(others)] if others and since < KEPT else best

    def note(self, num_rows: int, threads: int, seconds: float) -> None:
        """What a step took."""
        size = num_rows.bit_length()
        self._seconds[size, threads].append(seconds)
        self._num_steps[size] += 1

    def _typical(self, size: int, threads: int) -> float:
        seconds = self._seconds[size, threads]
        return sum(seconds) - max(seconds)
