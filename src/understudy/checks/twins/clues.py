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

MAX_TEXT_BITS, MAX_FRACTION_BITS = 16.0, 8.0
_MAX_INTEGER_BITS = 24.0
_READ_NUMBER_BITS = 1.5  # bits that a guesser needs to choose this number among the numbers that can be read
_MAX_CHOICE_BITS = 6.0  # bits to choose among the constants of the changed files: their place says much
_KIB = 1024
_MIN_ORDERED = 4
_UNITS = (1, 1_000, 1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000, 604_800_000_000)  # in microseconds
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_COMMON_BITS = 3.0
_RUN_BITS = 3.0  # bits of a run of one character
_DIGIT_BITS = math.log2(10)
_NUMBER_WITH_UNIT = re.compile(r"[^\w.]?([0-9]{1,12}(?:\.[0-9]{1,6})?)[^\w.]?")
_COMMA = re.compile(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))")
_COMMON_NUMBERS = frozenset((24, 60, 90, 180, 360, 365, 1440, 3600, 86400, 604800))
_COMMON_TEXTS = frozenset(
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
        plain = [_normalised(text) for text in texts]
        without_commas = [_COMMA.sub("", text) for text in plain]
        self._texts = ReadableValues((), [text.encode(errors="replace") for text in (*plain, *without_commas)])
        self._changed_files = ReadableValues(sources)
        self._text_choice_bits = min(_MAX_CHOICE_BITS, math.log2(2 + self._changed_files.count_texts()))
        self._number_choice_bits = min(_MAX_CHOICE_BITS, math.log2(2 + self._changed_files.count_numbers()))

    def text_bits(self, text: str) -> float:
        """Return the bits of a text, of which parts may be read or named somewhere."""
        guessed_length = self.readable.guessed_length(text)
        if not guessed_length:
            return 0.0
        by_runs = _RUN_BITS * sum(1 for _ in itertools.groupby(text))
        elsewhere = min(
            1.0 + self._texts.guessed_length(_normalised(text)),
            self._text_choice_bits + self._changed_files.guessed_length(text),
        )
        bits = min(1.0 + guessed_length, elsewhere, by_runs, MAX_TEXT_BITS)
        if text.lower() in _COMMON_TEXTS or text in string.ascii_letters + string.digits:
            bits = min(bits, _COMMON_BITS)
        if number := _NUMBER_WITH_UNIT.fullmatch(text):
            bits = min(bits, self.number_bits(float(number[1]) if "." in number[1] else int(number[1])))
        return bits

    def guessed_length(self, text: str) -> int:
        """Return how many characters of a text must be guessed; a seam between parts that occur somewhere counts
        as one.
        """
        return min(
            self.readable.guessed_length(text),
            self._changed_files.guessed_length(text),
            self._texts.guessed_length(_normalised(text)),
        )

    def order_bits(self, texts: Sequence[str]) -> float:
        """Return the bits of the order of different texts that can be read: none if they stand there in this order
        or its reverse, or are sorted.
        """
        distinct = list(dict.fromkeys(texts))
        if (
            len(distinct) < _MIN_ORDERED
            or len(distinct) < len(texts)
            or any(map(self.readable.guessed_length, texts))
        ):
            return 0.0
        positions = [self.readable.find(text) for text in distinct]
        if any(
            list(sequence) in (sorted(sequence), sorted(sequence, reverse=True))
            for sequence in (positions, distinct)
        ):
            return 0.0
        return min(math.lgamma(len(distinct) + 1) / math.log(2), MAX_TEXT_BITS)

    def literal_bits(self, encoded: Any) -> float:
        """Return the bits of a container that occurs somewhere as it is; infinite for another one."""
        if self.readable.has_literal(encoded):
            return 0.0
        return self._text_choice_bits if self._changed_files.has_literal(encoded) else math.inf

    def number_bits(self, number: float) -> float:
        """Return the bits of a whole or floating-point number."""
        bits = plain_bits(number)
        if isinstance(number, int) and abs(number) >= _KIB and number % _KIB == 0:  # a size in KiB, MiB or GiB
            bits = min(bits, 1.0 + self.number_bits(number // _KIB))
        if self.readable.has_number(number) or self._texts.has_number(number):
            return min(bits, _READ_NUMBER_BITS)
        return min(bits, self._number_choice_bits) if self._changed_files.has_number(number) else bits

    def moment_bits(self, kind: str, number: int) -> float:
        """Return the bits of a date or time as `twin_encoding` writes it: those of its year, month, day, …"""
        try:
            if kind == "timedelta":
                return min(
                    min(self.number_bits(number // unit) for unit in _UNITS if number % unit == 0), MAX_TEXT_BITS
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
            return MAX_FRACTION_BITS
        return min(sum(self.number_bits(part) for part in parts if part), MAX_TEXT_BITS)


def _normalised(text: str) -> str:
    """Return a text in lower case, with escaped line ends and tabs as such."""
    return text.replace("\\n", "\n").replace("\\t", "\t").lower()


def plain_bits(number: Any) -> float:
    """Return the bits of a number that nothing names. Few digits, and powers of two, are guessed more often."""
    if isinstance(number, int):
        return min(_integer_bits(number), _MAX_INTEGER_BITS)
    if not math.isfinite(number):
        return 1.0
    if number.is_integer():
        return min(_integer_bits(int(number)), MAX_FRACTION_BITS)
    digits = f"{number!r}".partition("e")[0].replace(".", "").replace("-", "").strip("0")
    return min(_DIGIT_BITS * len(digits), MAX_FRACTION_BITS)


def _integer_bits(number: int) -> float:
    size = abs(number)
    if size <= 1:
        return 1.0
    if size in _COMMON_NUMBERS:
        return _COMMON_BITS
    if size.bit_length() > 4 * _MAX_INTEGER_BITS:
        return _MAX_INTEGER_BITS
    digits = str(size)
    by_digits = _DIGIT_BITS * len(digits.rstrip("0")) + math.log2(1 + len(digits) - len(digits.rstrip("0")))
    bits = min(1.0 + math.log2(size + 1), by_digits) if size < 10 else by_digits
    near_power = size & (size - 1) == 0 or size & (size + 1) == 0
    return min(bits, 3.0 + math.log2(size.bit_length())) if near_power else bits
