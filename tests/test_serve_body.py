"""Bodies of requests, read with suspicion: what is not plain JSON of bounded size is refused, in little time."""

import contextlib
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestling.serve.body import MAX_DEPTH, parse
from nestling.serve.refusals import Refused

TEXTS = st.text(st.characters(codec="utf-8"))
NUMBERS = st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
HOSTILE = {
    "nothing": b"",
    "half": b'{"a": ',
    "latin": b'{"a": "\xe9"}',
    "nan": b'{"a": NaN}',
    "infinity": b'{"a": -Infinity}',
    "overflow": b'{"a": 1e999}',
    "digits": b'{"a": ' + b"9" * 100_000 + b"}",
    "deep lists": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 100_000,
    "surrogate": b'{"a": "\\ud800"}',
    "surrogate in a name": b'{"\\uDfff": 1}',
    "quotes without end": b'"' + b'\\"' * 1_000_000,
    "backslashes": b'"' + b"\\" * 1_000_001,
    "brackets in an endless text": b'"' + b"[" * 1_000_000,
}


@given(VALUES)
def test_json_is_read_as_the_standard_library_reads_it(value):
    assert parse(json.dumps(value).encode()) == value
    assert parse(json.dumps(value, ensure_ascii=False).encode()) == value


@given(st.binary(max_size=40))
def test_any_bytes_are_json_or_refused(raw):
    with contextlib.suppress(Refused):
        parse(raw)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_body_is_refused_in_little_time(name):
    begun = time.perf_counter()
    with pytest.raises(Refused) as caught:
        parse(HOSTILE[name])
    assert caught.value.status == 400
    assert time.perf_counter() - begun < 2  # seconds; what grows as the square of the length would take hours


def test_nesting_is_counted_outside_of_texts():
    deepest = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    assert parse(deepest)
    assert parse(b"[" + b'"[[[[\\"[",' * MAX_DEPTH + b"1]")
    assert parse(b"[" + b"[1],[2]," * 1000 + b"3]")
    with pytest.raises(Refused, match="nested deeper"):
        parse(b"[" + deepest + b"]")


def test_a_whole_surrogate_pair_is_text():
    assert parse(b'"\\ud83d\\ude00"') == "\N{GRINNING FACE}"
