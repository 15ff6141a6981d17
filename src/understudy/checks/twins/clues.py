"""What code that computes nothing can go by when it guesses an expected value, and how many bits are then left."""

from __future__ import annotations

import datetime
import itertools
import math
import re
import string
from collections.abc import Sequence
from typing import Any

from understudy.checks.twins.exposure import ReadableValues

MOST_TEXT, MOST_FRACTION = 16.0, 8.0
_MOST_WHOLE = 24.0
_READ_NUMBER = 1.5  # bits that a guesser needs to choose this number among the numbers that can be read
_MOST_CHOICE = 6.0  # bits to choose among the constants of the changed files: their place says much
_KIB = 1024
_FEWEST_ORDERED = 4
_UNITS = (1, 1_000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000, 604_800_000_000)  # in microseconds
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_USUAL_BITS = 3.0
_RUN = 3.0  # bits of a run of one character
_DIGIT = math.log2(10)
_NUMBER_WITH_UNIT = re.compile(r"[^\w.]?([0-9]{1,12}(?:\.[0-9]{1,6})?)[^\w.]?")
_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_USUAL_NUMBERS = frozenset((24, 60, 90, 180, 360, 365, 1440, 3600, 86400, 604800))
_USUAL = frozenset(
    (
        *("yes", "no", "true", "false", "ok", "error", "failed", "passed", "done", "none", "null", "nan", "n/a"),
        *("unknown", "now", "just now", "never", "today", "default", "empty", "other", "---", "***", "..."),
    )
)
"""Texts that answer many questions, in lower case."""


class Clues:
    """The values that tested code can read in a version's files, that the task's texts name, and that the files
    have which the gold patch changes.
    """

    def __init__(self, readable: ReadableValues, texts: Sequence[str] = (), sources: Sequence[str] = ()) -> None:
        """`texts` are the instruction and docstrings, `sources` the files without the gold patch."""
        self.readable = readable
        plain = [_plain(text) for text in texts]
        without_commas = [_COMMA.sub("", text) for text in plain]
        self._named = ReadableValues((), [text.encode(errors="replace") for text in (*plain, *without_commas)])
        self._near = ReadableValues(sources)
        self._choice = min(_MOST_CHOICE, math.log2(2 + self._near.count_texts()))
        self._number_choice = min(_MOST_CHOICE, math.log2(2 + self._near.count_numbers()))

    def text_bits(self, text: str) -> float:
        """Return the bits of a text, of which parts may be read or named somewhere."""
        unread = self.readable.unread(text)
        if not unread:
            return 0.0
        by_runs = _RUN * sum(1 for _ in itertools.groupby(text))
        elsewhere = min(1.0 + self._named.unread(_plain(text)), self._choice + self._near.unread(text))
        bits = min(1.0 + unread, elsewhere, by_runs, MOST_TEXT)
        if text.lower() in _USUAL or text in string.ascii_letters + string.digits:
            bits = min(bits, _USUAL_BITS)
        if number := _NUMBER_WITH_UNIT.fullmatch(text):
            bits = min(bits, self.number_bits(float(number[1]) if "." in number[1] else int(number[1])))
        return bits

    def unread(self, text: str) -> int:
        """Return how many characters of a text must be guessed; a seam between parts that occur somewhere counts
        as one.
        """
        return min(self.readable.unread(text), self._near.unread(text), self._named.unread(_plain(text)))

    def order_bits(self, texts: Sequence[str]) -> float:
        """Return the bits of the order of different texts that can be read: none if they stand there in this order
        or its reverse, or are sorted.
        """
        different = list(dict.fromkeys(texts))
        if (
            len(different) < _FEWEST_ORDERED
            or len(different) < len(texts)
            or any(map(self.readable.unread, texts))
        ):
            return 0.0
        places = [self.readable.find(each) for each in different]
        if any(list(each) in (sorted(each), sorted(each, reverse=True)) for each in (places, different)):
            return 0.0
        return min(math.lgamma(len(different) + 1) / math.log(2), MOST_TEXT)

    def literal_bits(self, encoded: Any) -> float:
        """Return the bits of a container that occurs somewhere as it is; infinite for another one."""
        if self.readable.has_literal(encoded):
            return 0.0
        return self._choice if self._near.has_literal(encoded) else math.inf

    def number_bits(self, number: float) -> float:
        """Return the bits of a whole or floating-point number."""
        bits = plain_bits(number)
        if isinstance(number, int) and abs(number) >= _KIB and number % _KIB == 0:  # a size in KiB, MiB or GiB
            bits = min(bits, 1.0 + self.number_bits(number // _KIB))
        if self.readable.has_number(number) or self._named.has_number(number):
            return min(bits, _READ_NUMBER)
        return min(bits, self._number_choice) if self._near.has_number(number) else bits

    def moment_bits(self, kind: str, number: int) -> float:
        """Return the bits of a date or time as `twin_encoding` writes it: those of its year, month, day, …"""
        try:
            if kind == "timedelta":
                return min(
                    min(self.number_bits(number // each) for each in _UNITS if number % each == 0), MOST_TEXT
                )
            if kind == "date":
                day = datetime.date.fromordinal(number)
                parts = [day.year, day.month, day.day]
            else:
                moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
                    microseconds=number
                )
                parts = [*moment.timetuple()[:6], moment.microsecond]
        except (ValueError, OverflowError):
            return MOST_FRACTION
        return min(sum(self.number_bits(part) for part in parts if part), MOST_TEXT)


def _plain(text: str) -> str:
    """Return a text in lower case, with escaped line ends and tabs as such."""
    return text.replace("\\n", "\n").replace("\\t", "\t").lower()


def plain_bits(number: Any) -> float:
    """Return the bits of a number that nothing names. Few digits, and powers of two, are guessed more often."""
    if isinstance(number, int):
        return min(_whole_bits(number), _MOST_WHOLE)
    if not math.isfinite(number):
        return 1.0
    if number.is_integer():
        return min(_whole_bits(int(number)), MOST_FRACTION)
    digits = f"{number!r}".partition("e")[0].replace(".", "").replace("-", "").strip("0")
    return min(_DIGIT * len(digits), MOST_FRACTION)


def _whole_bits(number: int) -> float:
    size = abs(number)
    if size <= 1:
        return 1.0
    if size in _USUAL_NUMBERS:
        return _USUAL_BITS
    if size.bit_length() > 4 * _MOST_WHOLE:
        return _MOST_WHOLE
    digits = str(size)
    by_digits = _DIGIT * len(digits.rstrip("0")) + math.log2(1 + len(digits) - len(digits.rstrip("0")))
    bits = min(1.0 + math.log2(size + 1), by_digits) if size < 10 else by_digits
    near_power = size & (size - 1) == 0 or size & (size + 1) == 0
    return min(bits, 3.0 + math.log2(size.bit_length())) if near_power else bits
