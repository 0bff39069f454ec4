"""A stream whose documents stand alone, one in a row, instead of end to end in full rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from nestling.data import Stream, pad, padded_batches, shuffle
from nestling.documents import Tokenizer


class PaddedStream(Stream):
    """The same documents, each in a row of its own that is padded on the right: nothing is read behind another text.

    For a parent that has only ever seen one document at a time, and would not know what to say inside packed ones. A
    document longer than `length` becomes several rows. Rows are read in groups of some batches and sorted by length
    within a group, so that a batch holds rows of like length and little padding. A group of single rows is not sorted.
    """

    GROUP = 8  # batches that are sorted together

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rows: list[tuple[list[int], list[bool]]] = []
        self._used = self._chunk = 0  # rows of the group that are handed out; rows in one batch of all ranks
        self._before: dict[str, Any] = {}  # the position before the group was read
        super().__init__(*args, **kwargs)

    def next_rows(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, whether a token is real (not padding), and whether its prediction counts; each [batch, time]."""
        if batch < 1:
            raise ValueError(f"batch {batch}: expected at least 1 row.")
        if self._used == len(self._rows):
            self._read_group((self.GROUP if batch > 1 else 1) * batch * self.world, batch * self.world)
        rows = self._rows[self._used : self._used + batch * self.world]
        self._used += len(rows)
        self.num_tokens += sum(len(ids) for ids, _ in rows)
        mine = rows[self.rank :: self.world]
        pad_id = self.tokenizer.eos_token_id if self.tokenizer.pad_token_id is None else self.tokenizer.pad_token_id
        ids, is_real = pad([ids for ids, _ in mine], pad_id, "right")
        counted, _ = pad([[int(one) for one in counts] for _, counts in mine], 0, "right")
        return ids, is_real, counted.bool()

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON values, the same on every rank."""
        group = {"rows": len(self._rows), "used": self._used, "chunk": self._chunk}
        return (self._before or super().state_dict()) | {"num_tokens": self.num_tokens, "group": group}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. The number of ranks may differ if it divides the saved batch of all ranks."""
        super().load_state_dict(state)
        group = state["group"]
        if group["chunk"] % self.world:
            raise ValueError(f"the saved batches have {group['chunk']} rows, which {self.world} ranks cannot share.")
        if group["rows"]:
            self._read_group(group["rows"], group["chunk"])
        self._used, self.num_tokens = group["used"], state["num_tokens"]

    def _read_group(self, num_rows: int, chunk: int) -> None:
        self._before = super().state_dict()
        rows: list[tuple[list[int], list[bool]]] = []
        for _ in range(num_rows):
            tokens, counts = self._piece(self.length)
            if self._offset == len(self._document):
                counts[-1] = False  # nothing follows in this row
            rows.append((tokens, counts))
        rows.sort(key=lambda row: len(row[0]))
        chunks = [rows[i : i + chunk] for i in range(0, num_rows, chunk)]
        taken = sum(source.taken for source in self._sources)
        order = shuffle(len(chunks), f"{self.seed} {taken}").tolist()
        self._rows, self._used, self._chunk = [row for i in order for row in chunks[i]], 0, chunk


def one_pass(
    stream: Stream, tokens: int, *, batch: int, pack: bool, say: Callable[[str], None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches (ids, mask; each [batch, time]) until `tokens` are read or the data ends: nothing is read twice."""
    if not pack:
        tokenizer = stream.tokenizer
        pad_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        yield from padded_batches(_documents(stream, tokens, say), batch=batch, length=stream.length, pad_id=pad_id)
        return
    read, has_ended = 0, False
    while read < tokens and not has_ended:
        rows: list[Tensor] = []
        while len(rows) < batch and read < tokens and not has_ended:
            row = stream.next_batch(1)
            if min(stream.epochs.values()) > 0:
                say(f"the data ends after {read} of the {tokens} tokens asked for")
                has_ended = True
            else:
                rows.append(row)
                read += stream.length
        if rows:
            ids = torch.cat(rows)
            yield ids, torch.ones_like(ids, dtype=torch.bool)
    if not read:
        raise ValueError(
            f"the data has less than one sequence of {stream.length} tokens: ask for a smaller length, or --no-pack."
        )


def _documents(stream: Stream, tokens: int, say: Callable[[str], None]) -> Iterator[list[int]]:
    while (before := stream.num_tokens) < tokens:
        document = stream.next_document()
        if min(stream.epochs.values()) > 0:
            say(f"the data ends after {before} of the {tokens} tokens asked for")
            return
        yield document


def stream_of(sources: str | Sequence[str], tokenizer: Tokenizer, *, pack: bool, **settings: Any) -> Stream:
    """Documents end to end in full rows (`pack`), or one document in a row, padded."""
    return (Stream if pack else PaddedStream)(sources, tokenizer, **settings)
