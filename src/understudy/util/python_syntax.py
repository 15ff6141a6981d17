"""Parsing Python source from several threads, and writing it.

CPython 3.11 counts the recursion depth of `ast.parse` once for all threads: when two threads parse at once, either
may fail with `SystemError: AST constructor recursion depth mismatch`. So all parsing goes through here, one text
at a time.
"""

from __future__ import annotations

import ast
import copy
import sys
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


def unparse(node: ast.AST) -> str:
    """Return the source of a syntax tree.

    Unlike `ast.unparse` it can also write f-strings that have a backslash within braces, which Python before 3.12
    cannot parse, and integers of more digits than `int` converts. Raises RecursionError for a tree that is nested
    too deeply.
    """
    try:
        return ast.unparse(node)
    except ValueError:
        return ast.unparse(ast.fix_missing_locations(_Writable().visit(copy.deepcopy(node))))


class _Writable(ast.NodeTransformer):
    """Replaces what `ast.unparse` cannot write by expressions of the same value."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        self.generic_visit(node)
        template, arguments = "", list[ast.expr]()
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                arguments.append(part.value)
                conversion = f"!{chr(part.conversion)}" if part.conversion > 0 else ""
                template += "{" + conversion + (":{}}" if part.format_spec else "}")
                arguments += [part.format_spec] if part.format_spec else []
            elif isinstance(part, ast.Constant):
                template += str(part.value).replace("{", "{{").replace("}", "}}")
        return ast.Call(ast.Attribute(ast.Constant(template), "format", ast.Load()), arguments, [])

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        value = node.value
        if type(value) is int and value.bit_length() > 3 * sys.int_info.str_digits_check_threshold:
            return ast.Name(hex(value), ast.Load())
        return node
