"""How the reasoner is taught to think: one written-out solution a family of problems.

A trace is what stands between <think> and </think>. It is short, and each step needs only what is written just before
it: arithmetic goes column by column from the low digit, so a carry is decided before it is used. That the answer at its
end is right is for reasoning-gym to say, not for this file.
"""

from collections.abc import Sequence

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def add(a: int, b: int) -> str:
    """Column addition, low digit first: `58+67` gives `8+7=15,5+6+1=12`; a two-digit column carries one."""
    columns, carry = [], 0
    for x, y in _columns(a, b):
        total = x + y + carry
        columns.append(f"{x}+{y}" + ("+1" if carry else "") + f"={total}")
        carry = total // 10
    return ",".join(columns)


def subtract(a: int, b: int) -> str:
    """Column subtraction of b from a >= b: `52-38` gives `12-8=4,5-3-1=1`; a column above nine has borrowed."""
    columns, borrow = [], 0
    for x, y in _columns(a, b):
        borrows = x - y - borrow < 0
        top = x + 10 if borrows else x
        columns.append(f"{top}-{y}" + ("-1" if borrow else "") + f"={top - y - borrow}")
        borrow = int(borrows)
    return ",".join(columns)


def chain(first: int, terms: Sequence[tuple[str, int]]) -> str:
    """A running total, one column calculation a term: `12-45+7` gives `12-45=-(45-12)5-2=3,4-1=3:-33;-33+7=...`."""
    total, lines = first, []
    for sign, term in terms:
        after = total + term if sign == "+" else total - term
        signed = term if sign == "+" else -term
        if total >= 0 and signed >= 0:
            work = add(total, term)
        elif total < 0 and signed < 0:
            work = f"-({-total}+{term})" + add(-total, term)
        else:
            large, small = max(abs(total), term), min(abs(total), term)
            work = (f"-({large}-{small})" if after < 0 else f"({large}-{small})") + subtract(large, small)
        lines.append(f"{total}{sign}{term}={work}:{after}")
        total = after
    return ";".join(lines)


def multiply(a: int, b: int) -> str:
    """Long multiplication: one row a digit of b with carries, then the rows are added up."""
    rows, lines = [], []
    for place, digit in enumerate(reversed(str(b))):
        columns, carry = [], 0
        for x in reversed(str(a)):
            total = int(x) * int(digit) + carry
            columns.append(f"{x}*{digit}" + (f"+{carry}" if carry else "") + f"={total}")
            carry = total // 10
        rows.append(a * int(digit) * 10**place)
        lines.append(",".join(columns) + f":{rows[-1]}")
    total = rows[0]
    for row in rows[1:]:
        lines.append(f"{total}+{row}={add(total, row)}:{total + row}")
        total += row
    return ";".join(lines)


def euclid(a: int, b: int) -> str:
    """Euclid's algorithm, one remainder a step: `48,18` gives `48-2*18=48-36=12;18-1*12=18-12=6;12-2*6=12-12=0`."""
    large, small, lines = max(a, b), min(a, b), []
    while small:
        times, rest = divmod(large, small)
        lines.append(f"{large}-{times}*{small}={large}-{times * small}={rest}")
        large, small = small, rest
    return ";".join(lines)


def convert(text: str, source: int, target: int) -> str:
    """Read the digits in the source base (Horner), then divide by the target base until nothing is left."""
    value, reading = 0, []
    for digit in text:
        after = value * source + DIGITS.index(digit)
        reading.append(f"{value}*{source}+{DIGITS.index(digit)}={after}")
        value = after
    writing = []
    while value:
        writing.append(divide(value, target))
        value //= target
    return ",".join(reading) + ";" + ";".join(writing)


def divide(number: int, by: int) -> str:
    """Long division: `134/6` gives `134:13=2*6+1,14=2*6+2:22`; the last rest is the remainder, the end the quotient."""
    rest, steps = 0, []
    for i, digit in enumerate(str(number)):
        rest = rest * 10 + int(digit)
        if rest >= by or steps or i == len(str(number)) - 1:
            steps.append(f"{rest}={rest // by}*{by}+{rest % by}")
            rest %= by
    return f"{number}:" + ",".join(steps) + f":{number // by}"


def halve(number: int) -> str:
    """Halve down to nothing; after each number stands how many odd ones there were so far: `6:0,3:1,1:2`."""
    odd, steps = 0, []
    while number:
        odd += number % 2
        steps.append(f"{number}:{odd}")
        number //= 2
    return ",".join(steps)


def decipher(text: str, rotation: int) -> str:
    """Every letter as a number, turned back, as a letter: with rotation 8 `IA` gives `I8-8=0A,A26-8=18S`."""
    steps = []
    for letter in text:
        if letter == " ":
            steps.append(letter)
            continue
        place = ord(letter) - ord("A")
        place += 26 if place < rotation else 0
        steps.append(f"{letter}{place}-{rotation}={place - rotation}{chr(place - rotation + ord('A'))}")
    return ",".join(steps)


def legs(animals: Sequence[tuple[str, int, int]]) -> str:
    """Legs of each kind and the running total. animals: name, how many, legs of one."""
    total, lines = 0, []
    for name, count, each in animals:
        part = count * each
        lines.append(f"{name} {each}*{count}={part}" + (f",{total}+{part}={total + part}" if lines else ""))
        total += part
    return ";".join(lines)


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of digits from the low end, as many as the longer number has."""
    n = max(len(str(a)), len(str(b)))
    return [(int(x), int(y)) for x, y in zip(reversed(str(a).zfill(n)), reversed(str(b).zfill(n)), strict=True)]
