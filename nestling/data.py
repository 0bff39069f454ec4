"""Documents from JSONL files, as token ids: an endless packed stream to train on, and padded batches to score with.

A line of a file holds one document in one of three formats: `text`, `prompt` with `completion`, or `messages`, which
pass through the tokenizer's chat template. Every document ends with the tokenizer's eos. A `Stream` mixes several
files by weight, lays their documents end to end and cuts the result into blocks; its position is a document and an
offset within it, so it resumes at the exact token, whatever the block length or the number of ranks. Files are
read through an index of line offsets (8 bytes a document), never as a whole. No network.
"""

import difflib
import hashlib
import json
import logging
import math
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from nestling.documents import EXPECTED, Tokenizer, encode, prompt_length

log = logging.getLogger(__name__)


class Stream:
    """An endless sequence of tokens from one or more JSONL files, in blocks of `length` tokens.

    `sources` is "a.jsonl=0.7,b.jsonl=0.3", or a sequence of such parts; a part without a weight has weight 1, and
    weights are shares of tokens after normalizing. The next document always comes from the source that is furthest
    behind its share, so the mixture needs no random draw; within a source, documents are shuffled anew each epoch.
    Rank r of `world` takes blocks r, r + world, ... of the one sequence that all ranks walk; every rank tokenizes
    every document. `loss_on` says which predictions count: "all", or "completion", those of a `completion` or of the
    last assistant message (with `text`, every token of the document but the first).
    """

    def __init__(
        self,
        sources: str | Sequence[str],
        tokenizer: Tokenizer,
        *,
        length: int,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
        loss_on: str = "all",
    ) -> None:
        if loss_on not in ("all", "completion"):
            raise ValueError(f"loss_on '{loss_on}' is not known: expected 'all' or 'completion'.")
        if not 0 <= rank < world:
            raise ValueError(f"rank {rank} of {world}: expected 0 to {world - 1}.")
        self.tokenizer, self.seed, self.rank, self.world, self.loss_on = tokenizer, seed, rank, world, loss_on
        _check_eos(tokenizer)
        shares = parse_sources(sources)
        self._sources = [_Source(path, share, f"{seed} {i}") for i, (path, share) in enumerate(shares)]
        self._current: int | None = None  # the source of the document at hand
        self._document: list[int] = []
        self._prompt = 0  # tokens of it that are given, not predicted
        self._offset = 0  # tokens of it that are used up
        self.num_tokens = 0  # handed out so far, over all ranks
        self.set_length(length)

    def next_batch(self, batch: int) -> Tensor:
        """This rank's next `batch` blocks. Returns int64 [batch, time]; the other ranks' blocks are passed over."""
        return self.next_counted(batch)[0]

    def next_counted(self, batch: int) -> tuple[Tensor, Tensor]:
        """The same, and bool [batch, time]: whether what is predicted at a token, the next one, counts."""
        ids, _, counted = self.next_rows(batch)
        return ids, counted

    def next_rows(self, batch: int) -> tuple[Tensor, Tensor, Tensor]:
        """Ids, whether a token is real (not padding), and whether its prediction counts; each [batch, time]."""
        if batch < 1:
            raise ValueError(f"batch {batch}: expected at least 1 block.")
        blocks = [self._take(self.length) for _ in range(batch * self.world)][self.rank :: self.world]
        ids, counts = (torch.tensor(each) for each in zip(*blocks, strict=True))
        return ids, torch.ones_like(counts), counts

    def next_document(self) -> list[int]:
        """The next whole document; for who reads documents, not blocks."""
        self._current = self._furthest_behind()
        document = self._sources[self._current].advance(self.tokenizer)
        self.num_tokens += len(document)
        return document

    def set_length(self, length: int) -> None:
        """Cut blocks of another length from the next token on."""
        if length < 1:
            raise ValueError(f"length {length}: expected at least 1 token.")
        self.length = length

    @property
    def epochs(self) -> dict[str, int]:
        """Finished passes over each file."""
        return {str(source.path): source.epoch for source in self._sources}

    def state_dict(self) -> dict[str, Any]:
        """The position as plain JSON values, the same on every rank."""
        return {
            "seed": self.seed,
            "length": self.length,
            "vocabulary": len(self.tokenizer),
            "num_tokens": self.num_tokens,
            "current": self._current,
            "offset": self._offset,
            "sources": [source.state_dict() for source in self._sources],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Rank and world may differ from the saved ones; files, weights and seed may not.

        A file is known by its size and number of documents, so a folder may move. The block length is the saved one.
        """
        given = {"seed": self.seed, "vocabulary": len(self.tokenizer), "sources": len(self._sources)}
        saved = {"seed": state["seed"], "vocabulary": state["vocabulary"], "sources": len(state["sources"])}
        for name, value in saved.items():
            if given[name] != value:
                raise ValueError(
                    f"the saved stream has {name} {value}, this one {given[name]}: start anew or give the same."
                )
        for source, part in zip(self._sources, state["sources"], strict=True):
            source.check_same(part)
        for source, part in zip(self._sources, state["sources"], strict=True):
            source.load_state_dict_(part)
        self.set_length(state["length"])
        self.num_tokens, self._current, self._offset = state["num_tokens"], state["current"], state["offset"]
        if self._current is not None:
            self._begin(self._sources[self._current].current(self.tokenizer))

    def _begin(self, document: list[int]) -> None:
        self._document, self._prompt = document, 0
        if self.loss_on == "completion":
            assert self._current is not None
            self._prompt = self._sources[self._current].prompt_length(document, self.tokenizer)

    def _take(self, n: int) -> tuple[list[int], list[bool]]:
        tokens: list[int] = []
        counts: list[bool] = []
        while len(tokens) < n:
            piece, counted = self._piece(n - len(tokens))
            tokens += piece
            counts += counted
        self.num_tokens += n
        return tokens, counts

    def _piece(self, n: int) -> tuple[list[int], list[bool]]:
        """At most `n` tokens of the document at hand, or of the next one if that is used up."""
        if self._offset == len(self._document):
            self._current = self._furthest_behind()
            self._begin(self._sources[self._current].advance(self.tokenizer))
            self._offset = 0
        tokens = self._document[self._offset : self._offset + n]
        last = len(self._document) - 1  # it predicts the next document
        places = range(self._offset, self._offset + len(tokens))
        self._offset += len(tokens)
        return tokens, [self.loss_on == "all" or self._prompt <= i + 1 <= last for i in places]

    def _furthest_behind(self) -> int:
        total = sum(source.taken for source in self._sources)
        deficits = [source.share * total - source.taken for source in self._sources]
        return deficits.index(max(deficits))


def parse_sources(sources: str | Sequence[str]) -> list[tuple[Path, float]]:
    """Files and their shares of the tokens, which add up to one. A string is split at commas, a sequence is not."""
    parts = [part.strip() for part in sources.split(",")] if isinstance(sources, str) else list(sources)
    if not parts or not all(parts):
        raise ValueError(
            f"sources {sources!r}: expected path=weight, several joined by commas, for example a.jsonl=0.7,b.jsonl=0.3."
        )
    files, weights = [], []
    for part in parts:
        path, equals, weight = part.rpartition("=")
        files.append(Path(path if equals else part))
        try:
            weights.append(float(weight) if equals else 1.0)
        except ValueError:
            raise ValueError(
                f"source {part!r}: {weight!r} is not a weight; expected path=weight, for example a.jsonl=0.7."
            ) from None
        if not 0 < weights[-1] < math.inf:
            raise ValueError(
                f"source {part!r}: weight {weight} is not above zero and finite; leave the file out instead."
            )
    return [(path, weight / sum(weights)) for path, weight in zip(files, weights, strict=True)]


def read_documents(path: str | Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    """Token ids of each document of a JSONL file in its order, each ending with eos. Empty documents are left out."""
    _check_eos(tokenizer)
    source = _Source(Path(path), 1.0, "")
    for i in range(source.num_documents):
        ids = source.read(i, tokenizer)
        if ids:
            yield ids
        else:
            source.num_empty += 1
    source.report_empty()


def padded_batches(
    documents: Iterable[list[int]],
    *,
    batch: int,
    length: int,
    pad_id: int,
    side: Literal["right", "left"] = "right",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Documents as rows, as wide as the longest of the batch. Yields ids int64 and mask bool, each [batch, time].

    The mask is true at real tokens, also where a real token equals `pad_id`. A document longer than `length` becomes
    several rows, so that no token is lost. The last batch may have fewer rows.
    """
    if side not in ("right", "left"):
        raise ValueError(f"side {side!r}: expected 'right' or 'left'.")
    if batch < 1 or length < 1:
        raise ValueError(f"batch {batch}, length {length}: expected at least 1 of each.")
    rows: list[list[int]] = []
    for document in documents:
        for start in range(0, len(document), length):
            rows.append(document[start : start + length])
            if len(rows) == batch:
                yield pad(rows, pad_id, side)
                rows = []
    if rows:
        yield pad(rows, pad_id, side)


class _Source:
    """One file, its share, and how far it has been read: `position` documents of this epoch are begun."""

    def __init__(self, path: Path, share: float, seed: str) -> None:
        self.path, self.share, self.seed = path, share, seed
        self.offsets = _index(path)
        self.num_documents = len(self.offsets)
        self.num_bytes = path.stat().st_size
        self.epoch = self.position = self.taken = self.num_empty = 0
        self._shuffled: tuple[int, Tensor] | None = None

    def advance(self, tokenizer: Tokenizer) -> list[int]:
        """The next document that is not empty, from the next epoch when this one is used up."""
        while True:
            if self.position == self.num_documents:
                if self.epoch == 0:
                    self.report_empty()
                self.epoch, self.position = self.epoch + 1, 0
            self.position += 1
            ids = self.current(tokenizer)
            if ids:
                self.taken += len(ids)
                return ids
            self.num_empty += self.epoch == 0

    def current(self, tokenizer: Tokenizer) -> list[int]:
        if self._shuffled is None or self._shuffled[0] != self.epoch:
            self._shuffled = self.epoch, shuffle(self.num_documents, f"{self.seed} {self.epoch}")
        return self.read(int(self._shuffled[1][self.position - 1]), tokenizer)

    def prompt_length(self, ids: list[int], tokenizer: Tokenizer) -> int:
        """Tokens of the prompt of the document at hand, whose tokens are `ids`."""
        assert self._shuffled is not None
        return prompt_length(self._load(int(self._shuffled[1][self.position - 1])), ids, tokenizer)

    def read(self, i: int, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the i-th document of the file."""
        document = self._load(i)
        try:
            return encode(document, tokenizer)
        except ValueError as error:
            raise ValueError(f"{self.path}:{self._line_number(i)}: {error}") from error

    def _load(self, i: int) -> Any:
        with open(self.path, "rb") as file:
            file.seek(self.offsets[i])
            line = file.readline().strip()
        try:
            return json.loads(line)
        except ValueError as error:  # bad JSON or bad UTF-8
            where = f"{self.path}:{self._line_number(i)}"
            raise ValueError(f"{where}: not JSON ({error}); expected an object with {EXPECTED}.") from error

    def report_empty(self) -> None:
        if self.num_empty == self.num_documents:
            raise ValueError(f"{self.path}: all {self.num_documents} documents are empty.")
        if self.num_empty:
            log.warning("%s: left out %d empty of %d documents", self.path, self.num_empty, self.num_documents)

    def state_dict(self) -> dict[str, Any]:
        names = ("share", "num_documents", "num_bytes", "epoch", "position", "taken", "num_empty")
        return {"path": str(self.path)} | {name: getattr(self, name) for name in names}

    def check_same(self, state: dict[str, Any]) -> None:
        for name in ("num_documents", "num_bytes", "share"):
            if state[name] != getattr(self, name):
                raise ValueError(
                    f"{self.path} has {name} {getattr(self, name)}, the saved {state['path']} had {state[name]}: "
                    "resuming needs the same files and weights in the same order."
                )

    def load_state_dict_(self, state: dict[str, Any]) -> None:
        for name in ("epoch", "position", "taken", "num_empty"):
            setattr(self, name, state[name])

    def _line_number(self, i: int) -> int:
        with open(self.path, "rb") as file:
            return 1 + sum(1 for _ in _lines_until(file, self.offsets[i]))


def _index(path: Path) -> "array[int]":
    """Where each line that is not blank begins, in bytes."""
    if not path.is_file():
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.jsonl")], n=1, cutoff=0.3)
        hint = f" Nearest: {path.parent / near[0]}." if near else ""
        raise ValueError(f"data file {path} does not exist; expected a JSONL file.{hint}")
    offsets, start = array("q"), 0
    with open(path, "rb") as file:
        for line in file:
            if not line.isspace():
                offsets.append(start)
            start += len(line)
    if not offsets:
        raise ValueError(f"{path} has no documents; expected one JSON object a line with {EXPECTED}.")
    return offsets


def _lines_until(file: Iterable[bytes], offset: int) -> Iterator[bytes]:
    start = 0
    for line in file:
        if start >= offset:
            return
        yield line
        start += len(line)


def shuffle(n: int, key: str) -> Tensor:
    """A permutation of 0 to n - 1 that depends on `key` alone. Returns [n]."""
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest())  # 7 bytes: manual_seed takes 63 bits
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))


def pad(rows: list[list[int]], pad_id: int, side: str) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad_id, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.bool)
    for i, row in enumerate(rows):
        where = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, where] = torch.tensor(row)
        mask[i, where] = True
    return ids, mask


def _check_eos(tokenizer: Tokenizer) -> None:
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, and every document ends with one: set tokenizer.eos_token.")
