"""Literals in the source of tests: which values are written out, and other values of the same form."""

from __future__ import annotations

import ast
import copy
import math
import random
import re
import string
from collections.abc import Mapping, Sequence
from types import EllipsisType

_WORD = re.compile(r"[A-Za-z0-9]{2,}")
_CONSTRUCTORS = frozenset({"list", "tuple", "dict", "set", "frozenset", "date", "datetime", "timedelta"})


def is_literal(value: ast.expr) -> bool:
    """Return whether a value is written out in full: a constant, or a display or constructor of such values."""
    match value:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return is_literal(operand)
        case ast.BinOp(left=left, right=right):
            return is_literal(left) and is_literal(right)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return all(is_literal(element) for element in elements)
        case ast.Dict(keys=keys, values=values):
            return all(key is not None and is_literal(key) for key in keys) and all(map(is_literal, values))
        case ast.JoinedStr(values=values):
            return all(isinstance(part, ast.Constant) for part in values)
        case ast.Call(args=arguments, keywords=keywords) if _constructs(value):
            return all(map(is_literal, arguments)) and all(is_literal(keyword.value) for keyword in keywords)
        case _:
            return False


def _constructs(call: ast.Call) -> bool:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name in _CONSTRUCTORS
        case _:
            return False


def has_literal(value: ast.expr, *, compared: bool = False) -> bool:
    """Return whether a value has a constant that can be changed, other than an index. With `compared`, it must be
    compared.
    """
    if compared:
        return any(
            any(map(has_literal, (node.left, *node.comparators)))
            for node in ast.walk(value)
            if isinstance(node, ast.Compare)
        )
    return bool(_constants(value))


def _constants(value: ast.expr) -> list[ast.Constant]:
    fixed = [
        node.slice if isinstance(node, ast.Subscript) else node
        for node in ast.walk(value)
        if isinstance(node, ast.JoinedStr | ast.Subscript)
    ]
    inside = {id(part) for node in fixed for part in ast.walk(node)}
    return [
        node
        for node in ast.walk(value)
        if isinstance(node, ast.Constant) and id(node) not in inside and node.value is not Ellipsis
    ]


def texts_of(tree: ast.AST) -> dict[str, tuple[str, ...]]:
    """Return the words in the texts of a file, sorted and grouped by shape: the kind of each character and the
    length.
    """
    texts_by_shape: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            text = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            for word in _WORD.findall(text):
                texts_by_shape.setdefault(_shape(word), set()).add(word)
    return {shape: tuple(sorted(texts)) for shape, texts in texts_by_shape.items()}


def change_literal(
    value: ast.expr, rng: random.Random, texts: Mapping[str, Sequence[str]]
) -> tuple[ast.expr, str]:
    """Return a copy of a value with one constant replaced by another of its kind, and the source of the new
    constant.

    `words` are the file's words by shape (`texts_of`). `has_literal(value)` must be true.
    """
    changed = copy.deepcopy(value)
    node = rng.choice(_constants(changed))
    literal = repr(node.value)
    node.value = another_constant(node.value, rng, texts)
    node.kind = None
    return changed, literal


def another_constant(
    value: str | bytes | bool | int | float | complex | EllipsisType | None,
    rng: random.Random,
    texts: Mapping[str, Sequence[str]],
) -> str | bytes | bool | int | float | complex | None:
    """Return another constant of the same type and similar look and size, so that the two cannot be told apart."""
    if value is None or isinstance(value, EllipsisType):
        return rng.choice((0, "", True))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        near = range(7) if 0 <= value <= 3 else range(value - 3, value + 4)
        return rng.choice([number for number in near if number != value])
    if isinstance(value, float):  # changed by more than the usual tolerances
        if not math.isfinite(value):
            return 0.0
        places = min(len(repr(value).partition(".")[2]), 6)
        return round(value * rng.choice((0.5, 2.0)), places) or rng.choice((-1.0, 0.5, 1.0, 2.0))
    if isinstance(value, complex):
        return value * 2 or 1j
    if isinstance(value, bytes):
        return _another_text(value.decode("latin-1"), rng, texts).encode("latin-1")
    return _another_text(value, rng, texts)


def _another_text(text: str, rng: random.Random, texts: Mapping[str, Sequence[str]]) -> str:
    """Return a text with one word replaced by another of its shape in the file, or with a letter changed if there
    is none.
    """
    replacements = [
        (match, replacement)
        for match in _WORD.finditer(text)
        if text[max(match.start() - 1, 0) : match.start()] not in ("\\", "%")
        for replacement in texts.get(_shape(match[0]), ())
        if replacement != match[0]
    ]
    if replacements:
        match, replacement = rng.choice(replacements)
        return text[: match.start()] + replacement + text[match.end() :]
    letters = [
        n for n, c in enumerate(text) if c.isascii() and c.isalnum() and text[max(n - 1, 0) : n] not in ("\\", "%")
    ]
    if not letters:
        return text + rng.choice(string.ascii_lowercase)
    position = rng.choice(letters)
    alphabet = _alphabet(text[position])
    return text[:position] + rng.choice(alphabet.replace(text[position], "")) + text[position + 1 :]


def _shape(word: str) -> str:
    """Return a word's shape: the kind of its first character and its length, up to a limit above which all are
    alike.
    """
    return f"{_alphabet(word[0])[0]}{word.islower()}{min(len(word), 12) // 2}"


def _alphabet(character: str) -> str:
    return next(
        kind for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase) if character in kind
    )
