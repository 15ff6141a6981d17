"""Changes the literals of a test file, so that its tests call the tested code with other inputs.

Whatever depends on an input then has another value, which only code that computes it can know (see
`twins.other_inputs`).
Equal numbers and words are changed alike in all hidden files, since a test often looks up what it wrote before. A
number stays in its range, such as months, minutes or years of this century, and the order of numbers of one range
stays; in longer ones, digits above 7 come only where there are some. A word keeps its ending, by which code may
treat it. Words that the tested code or the test itself uses as a name, or has in a text, keep their meaning only
if they stay, so they do. Nothing here runs code.
"""

from __future__ import annotations

import ast
import copy
import random
import re
import string
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from understudy.checks.twins.exposure import READERS
from understudy.checks.twins.literals import is_literal
from understudy.checks.twins.names import name_of
from understudy.util.python_syntax import invalid_python, parse_module

_TOKEN = re.compile(r"[0-9]+|[A-Za-z]{3,}")
_WORD = re.compile(r"[A-Za-z]{3,}")
_RANGE_STARTS = (2, 9, 10, 13, 24, 29, 32, 60, 100, 256, 1000, 1900, 2100)
"""Where the ranges of numbers begin: digits, months, hours, days, minutes, two digits, bytes, three digits, years.

The digit 9 stays, since it is often not allowed where smaller ones are: in the ranks of chess, in octal numbers.
"""
_LARGE_NUMBER, _MAX_DIGITS = 100, 18
_SHORT_WORD, _FEW_LETTERS = 4, 4
_SAMPLES = 32
_LENGTHS, _LONGER_BY = (-1, 1, 2), (5, 6, 7, 8)
_LONGER_BELOW = 1000  # numbers that may get one digit more: years keep theirs, and loops end
_ADDED_ELEMENTS = 3
_MIN_RESIZED = 3  # lists of fewer elements are pairs and the like
_MAX_TRIED = 10_000  # numbers of a range
_NAMING_FUNCTIONS = READERS | {
    "getattr", "setattr", "hasattr", "delattr", "delitem", "setitem", "setenv", "patch", "import_module",
    "importorskip", "skip", "skipif", "xfail", "fixture", "usefixtures", "Path", "sleep", "wait",
}  # fmt: skip
"""Functions whose arguments name something that exists, or say how long to wait."""
_TOLERANCES = frozenset(
    {"rel", "abs", "rel_tol", "abs_tol", "rtol", "atol", "places", "delta", "encoding", "mode"}
)


class InputChanges(Struct, frozen=True):
    """Other tokens (numbers and lower-case words) by those that they replace. With a `seed` lists get shorter by
    one element, which it chooses, or `longer` by some.
    """

    tokens: dict[str, str]
    seed: int = 0
    longer: bool = False


def tokens_of(text: str) -> frozenset[str]:
    """Return the numbers and (lower-case) words in the literals of a test file that can be changed. Raises
    ValueError when the file cannot be parsed.
    """
    tokens: set[str] = set()

    def collect(token: str) -> str:
        tokens.add(token.lower())
        return token

    try:
        tree = parse_module(text)
        names = _names(tree, texts=False)
        _Changer(collect).visit(tree)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise invalid_python(error) from error
    return frozenset(tokens - names)


def words_of_code(sources: Iterable[str]) -> frozenset[str]:
    """Return the lower-case words of the names and texts, other than docstrings, in Python sources. Those that are
    not valid Python count as a whole.
    """
    words: set[str] = set()
    for source in sources:
        try:
            words |= _names(parse_module(source), texts=True)
        except (SyntaxError, ValueError, RecursionError):
            words |= {word.lower() for word in _WORD.findall(source)}
    return frozenset(words)


def draw_tokens(
    tokens: Iterable[str], fixed: frozenset[str], rng: random.Random, *, longer: bool = False
) -> dict[str, str]:
    """Return other tokens by the tokens that they replace; words in `fixed` stay, and the numbers 0 and 1.

    With `longer`, words get several letters more, and numbers below a thousand one digit.
    """
    changes: dict[str, str] = {}
    numbers: dict[tuple[int, int], dict[int, list[str]]] = {}
    for token in sorted(tokens):
        if not token.isdigit():
            if token not in fixed:
                changes[token] = _other_word(token, rng, _LONGER_BY if longer else _LENGTHS)
        elif len(token) <= _MAX_DIGITS and (bounds := _range_of(int(token))):
            if longer and bounds[1] <= _LONGER_BELOW:
                bounds = bounds[0] * 10, bounds[1] * 10
            numbers.setdefault(bounds, {}).setdefault(int(token), []).append(token)
    for (begin, end), old in numbers.items():
        largest_digit = (
            max(max(token) for of_number in old.values() for token in of_number) if begin >= _LARGE_NUMBER else "9"
        )
        free = [number for number in _numbers(begin, end, largest_digit, rng) if number not in old]
        pool = free if len(free) >= len(old) else range(begin, end)
        draws = [sorted(rng.sample(pool, min(len(old), len(pool)))) for _ in range(_SAMPLES)]
        # A number that happens to be drawn in its own place asks nothing new.
        replacements = max(draws, key=lambda drawn: sum(map(int.__ne__, sorted(old), drawn)))
        for number, replacement in zip(sorted(old), replacements, strict=False):
            changes |= {token: str(replacement).zfill(len(token)) for token in old[number]}
    return {token: replacement for token, replacement in changes.items() if token != replacement}


def _other_word(word: str, rng: random.Random, lengths: Sequence[int]) -> str:
    """Return a word that is longer by one of `lengths`, with the same ending, and of the same letters if these are
    few.
    """
    ending = 2 if len(word) > _SHORT_WORD else 0
    has_few_letters = len(set(word)) <= _FEW_LETTERS < len(word)
    letters = sorted(set(word)) if has_few_letters else string.ascii_lowercase
    length = max(len(word) + rng.choice(lengths), ending + 2)
    return "".join(rng.choice(letters) for _ in range(length - ending)) + word[len(word) - ending :]


def _numbers(begin: int, end: int, largest_digit: str, rng: random.Random) -> list[int]:
    """Return different numbers of a range: all of a small one, of a large one some. If `largest_digit` is at most
    7, they have no digit above it.
    """
    small = end - begin <= _MAX_TRIED
    numbers = range(begin, end) if small else (rng.randrange(begin, end) for _ in range(_MAX_TRIED))
    if largest_digit > "7":
        return list(dict.fromkeys(numbers))
    if small:
        return [number for number in numbers if max(str(number)) <= largest_digit]
    digits = string.digits[: int(largest_digit) + 1]
    allowed = (
        "".join(digit if digit <= largest_digit else rng.choice(digits) for digit in str(n)) for n in numbers
    )
    return list(dict.fromkeys(number for number in map(int, allowed) if begin <= number < end))


def change_inputs(tree: ast.Module, changes: InputChanges) -> None:
    """Replace tokens in the literals of a test file's tree, and shorten its lists, in place."""

    def change(token: str) -> str:
        replacement = changes.tokens.get(token.lower(), token)
        if token.isdigit():
            return replacement
        if token.isupper():
            return replacement.upper()
        return replacement[0].upper() + replacement[1:] if token[0].isupper() else replacement

    _Changer(change).visit(tree)
    if changes.seed:
        resizer = _Lengthener if changes.longer else _Shortener
        resizer(random.Random(changes.seed)).visit(tree)


def _range_of(number: int) -> tuple[int, int] | None:
    """Return the range of numbers, without its end, in which another one is drawn."""
    if number < _RANGE_STARTS[0]:
        return None
    if number < _RANGE_STARTS[-1]:
        position = bisect_right(_RANGE_STARTS, number)
        return _RANGE_STARTS[position - 1], _RANGE_STARTS[position]
    magnitude = 10 ** (len(str(number)) - 1)
    # Narrow ranges, so that a loop with another number of rounds does not run much longer.
    start, end = next(
        (low * magnitude, high * magnitude) for low, high in ((5, 10), (2, 5), (1, 2)) if number >= low * magnitude
    )
    return max(start, _RANGE_STARTS[-1]), end


def _names(tree: ast.AST, *, texts: bool) -> frozenset[str]:
    """Return the lower-case words in the names of a tree, and with `texts` also those in its texts."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                names.append(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.append(name)
            case ast.alias(name=name, asname=alias):
                names += [name, alias or ""]
            case ast.Constant(value=str(text)) if texts and id(node) not in docstrings:
                names.append(text)
            case _:
                pass
    return frozenset(word.lower() for name in names for word in _WORD.findall(name))


class _Resizer(ast.NodeTransformer):
    """Finds the lists of literals that are no rows of a table, and no tables of parameters."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def resize(self, elements: list[ast.expr]) -> None:
        """Change how many elements a list has, in place."""
        raise NotImplementedError

    def visit_List(self, node: ast.List) -> ast.List:
        for element in node.elts:
            if not isinstance(element, ast.List | ast.Tuple):
                self.visit(element)
        if all(map(is_literal, node.elts)):
            self.resize(node.elts)
        return node

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        return node if name_of(node) in ("parametrize", *_NAMING_FUNCTIONS) else self.generic_visit(node)


class _Shortener(_Resizer):
    """Removes one element of each list."""

    def resize(self, elements: list[ast.expr]) -> None:
        if len(elements) >= _MIN_RESIZED:
            del elements[self._rng.randrange(len(elements))]


class _Lengthener(_Resizer):
    """Adds elements to each list that resemble its own, and to tuples that a loop goes through."""

    def visit_For(self, node: ast.For) -> ast.AST:
        if isinstance(node.iter, ast.Tuple) and all(map(is_literal, node.iter.elts)):
            self.resize(node.iter.elts)
        return self.generic_visit(node)

    def resize(self, elements: list[ast.expr]) -> None:
        are_rows = bool(elements) and all(isinstance(element, ast.List | ast.Tuple) for element in elements)
        if not are_rows and len(elements) < _MIN_RESIZED:
            return
        for model in self._rng.choices(elements, k=_ADDED_ELEMENTS):
            added = copy.deepcopy(model)
            increase, letter = self._rng.randrange(1, 4), self._rng.choice(string.ascii_lowercase)
            for node in ast.walk(added):
                match node:
                    case ast.Constant(value=bool()):
                        pass
                    case ast.Constant(value=int(number)):
                        node.value = number + increase
                    case ast.Constant(value=str(text)) if text.isalpha() and len(text) > 1:
                        node.value = text + letter
                    case _:
                        pass
            elements.insert(self._rng.randrange(len(elements) + 1), added)


class _Changer(ast.NodeTransformer):
    """Changes the tokens of all literals but those that name something, or that say how exact a value is."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        match node.value:
            case bool():
                pass
            case int(number) if abs(number) < 10**_MAX_DIGITS:
                node.value = int(self._text(str(number)))
            case float(number) if "e" not in repr(number) and "n" not in repr(number):
                node.value = float(self._text(repr(number)))
            case str(text) if not text.startswith("__"):
                node.value = self._text(text)
            case bytes(raw):
                node.value = self._text(raw.decode("latin-1")).encode("latin-1")
            case _:
                pass
        return node

    def _text(self, text: str) -> str:
        return _TOKEN.sub(lambda match: self._change(match[0]), text)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        return node if isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        node.value = self.visit(node.value)
        if isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
            node.slice = self.visit(node.slice)
        return node

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        return node if node.arg in _TOLERANCES else self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = name_of(node)
        if name in _NAMING_FUNCTIONS:
            return node
        if name == "parametrize":  # its first argument names parameters
            node.args[1:] = [self.visit(argument) for argument in node.args[1:]]
            return node
        return self.generic_visit(node)
