"""Decoding Python source, parsing it from several threads, and writing it.

CPython 3.11 counts the recursion depth of `ast.parse` once for all threads: when two threads parse at once, either
may fail with `SystemError: AST constructor recursion depth mismatch`. So all parsing goes through here, one text
at a time.
"""

from __future__ import annotations

import ast
import codecs
import copy
import io
import re
import sys
import threading
import tokenize
from typing import Any

_parse_lock = threading.RLock()
_USUAL_CODECS = frozenset(
    {"utf-8", "utf-8-sig", "ascii", "iso8859-1", "iso8859-15", "cp1252", "cp1251", "gbk", "gb2312", "gb18030"}
    | {"euc_jp", "shift_jis", "euc_kr", "big5", "koi8-r", "iso8859-2", "mac-roman"}
)


def parse_module(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a module. Raises SyntaxError, ValueError or RecursionError, as `ast.parse`."""
    with _parse_lock:
        return ast.parse(source)


def invalid_python(error: BaseException) -> ValueError:
    """Return the error for source that cannot be parsed, from what `parse_module` raised."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ValueError(f"invalid Python: {error}; expected source that Python {version} parses")


def parse_literal(text: str) -> Any:
    """Return the value of a Python literal. Raises ValueError or SyntaxError, as `ast.literal_eval`."""
    with _parse_lock:
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
        return ast.unparse(ast.fix_missing_locations(_UnwritableNodes().visit(copy.deepcopy(node))))


class _UnwritableNodes(ast.NodeTransformer):
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


def decode_source(content: bytes) -> tuple[str, str]:
    """Return the text of a source file as Python decodes it (PEP 263), and the codec's name if it is an unusual
    one.

    Bytes that the codec cannot decode are read as Latin-1, so that nothing is left unread.
    """
    try:
        name, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        name = codecs.lookup(name).name
        text = content.decode(name)
    except (SyntaxError, LookupError, ValueError):
        return content.decode("latin-1"), "unreadable" if re.match(
            rb"(?:.*\n)?.*coding[:=]", content[:400]
        ) else ""
    return text.removeprefix("\ufeff"), "" if name in _USUAL_CODECS else name
