"""Text from tokens as they come, and its end before a stop string.

A character may be spread over several tokens, and a token's text may depend on the one before: text is what a decoding
with the token has beyond one without it, and waits while it ends in half a character. All that is given, joined, is
the decoding of all tokens, up to a character that was never completed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

HALF = "\N{REPLACEMENT CHARACTER}"  # what an incomplete character decodes to
MOST_HELD = 8  # tokens; no character is longer, so what still ends in halves is not text


class Detokenizer:
    """The text of one sequence of tokens."""

    def __init__(self, tokenizer: Any, *, silent: Collection[int] = (), before: Sequence[int] = ()) -> None:
        """tokenizer: of the library tokenizers. silent: tokens without text, such as an end of sequence. before: what
        the text continues, itself not given again."""
        self._decode, self._silent = tokenizer.decode, silent
        self._ids = [i for i in before[-MOST_HELD:] if i not in silent]
        self._read = len(self._ids)  # tokens whose text has been given

    def add(self, token: int) -> str:
        """What one more token adds; may be empty."""
        if token in self._silent:
            return ""
        self._ids.append(token)
        return self._more(is_last=len(self._ids) - self._read >= MOST_HELD)

    def end(self) -> str:
        """What is still held back, without the half of a character that it may end in."""
        return self._more(is_last=True).rstrip(HALF)

    def _more(self, *, is_last: bool) -> str:
        if self._read == len(self._ids):
            return ""
        known = self._text(self._ids[: self._read])
        text = self._text(self._ids)
        if text.endswith(HALF) and not is_last:
            return ""
        # Only the tokens after the ones given last stand for context: decoding stays cheap however long the text is.
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        return text[len(known) :]

    def _text(self, ids: Sequence[int]) -> str:
        return self._decode(ids, skip_special_tokens=False) if ids else ""


class Stops:
    """Ends a text before the first stop string in it; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._scans = [_Scan(stop) for stop in stops if stop]
        self._held = ""
        self.found = ""  # the stop string, once it is there

    def add(self, text: str) -> str:
        """More text in, and out what cannot be part of a stop string any more."""
        if not self._scans:
            return text
        start = len(self._held)
        self._held += text
        for i in range(start, len(self._held)):
            for scan in self._scans:
                if scan.add(self._held[i]):
                    self.found = scan.stop
                    given, self._held = self._held[: i + 1 - len(scan.stop)], ""
                    return given
        return self._give(max(scan.matched for scan in self._scans))

    def end(self) -> str:
        """What is still held back."""
        return self._give(0)

    def _give(self, num_held: int) -> str:
        cut = len(self._held) - num_held
        given, self._held = self._held[:cut], self._held[cut:]
        return given


class _Scan:
    """Knuth, Morris and Pratt: how much of a stop string the text ends in, at the same cost for each character."""

    def __init__(self, stop: str) -> None:
        self.stop, self.matched = stop, 0
        self._back = [0]  # for each beginning of the stop string, the longest shorter one that it ends in
        for letter in stop[1:]:
            self._back.append(self._next(self._back[-1], letter))

    def add(self, letter: str) -> bool:
        """Whether the text now ends in the whole stop string."""
        self.matched = self._next(self.matched, letter)
        return self.matched == len(self.stop)

    def _next(self, matched: int, letter: str) -> int:
        while matched and (matched == len(self.stop) or self.stop[matched] != letter):
            matched = self._back[matched - 1]
        return matched + 1 if self.stop[matched] == letter else 0
