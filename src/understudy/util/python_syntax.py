"""Parsing Python source from several threads.

CPython 3.11 counts the recursion depth of `ast.parse` once for all threads: when two threads parse at once, either
may fail with `SystemError: AST constructor recursion depth mismatch`. So all parsing goes through here, one text
at a time.
"""

from __future__ import annotations

import ast
import threading
from typing import Any

_parsing = threading.RLock()


def parse_module(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a module. Raises SyntaxError, ValueError or RecursionError, as `ast.parse`."""
    with _parsing:
        return ast.parse(source)


def parse_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError or SyntaxError, as `ast.literal_eval`."""
    with _parsing:
        return ast.literal_eval(text)
