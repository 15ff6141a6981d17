"""Finds expected values that the tested code could still learn although `twins` removed them from assertions.

The same value may also be elsewhere: among the inputs in a table, in another test, or in a data file. Also finds
comparisons whose result the code can force, with an object that equals everything.
"""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from understudy.checks.twins.assertions import is_evaluable
from understudy.checks.twins.names import bindings_of, name_of, outside_functions, parameter_sources
from understudy.checks.twins.twin_encoding import encode
from understudy.util.python_syntax import parse_module

READERS = frozenset(
    {
        "getenv",
        "glob",
        "iterdir",
        "load",
        "open",
        "read",
        "read_bytes",
        "read_text",
        "readline",
        "readlines",
        "rglob",
    }
)
"""Calls that read files or the environment of the sandbox, which the tested code can read as well."""

_BOOLEAN = frozenset(
    {"all", "any", "bool", "int", "len", "list", "map", "repr", "set", "sorted", "str", "sum", "tuple"}
)
_CANCELLING = (ast.Sub, ast.Mod, ast.BitXor)
_MEASURES = frozenset(
    {"abs", "fabs", "float", "int", "len", "max", "min", "pow", "round", "set", "sqrt", "str", "sum"}
)
_MIN_COPIED_CHARS = 4  # the shortest text, in characters, that counts as copied if another text contains it
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
_MAX_COMMON_NUMBER = 10  # numbers up to this one are so common that they occur everywhere
_MAX_DATA_BYTES = 4 << 20


# --- expectations that names still hold


class Exposure:
    """What the names in a test file's version hold after unused values have been removed from its tree."""

    def __init__(self, tree: ast.Module, copies: Mapping[int, str]) -> None:
        """`copies` is what `cut_unused` returned for the tree."""
        self._copies = copies
        self._tables = parameter_sources(tree)
        self._module_bindings = bindings_of(outside_functions(tree), self._tables)
        self._local_bindings: dict[int, Mapping[str, list[ast.expr | None]]] = {}

    def holds_value(self, names: Iterable[str], scope: ast.AST | None) -> bool:
        """Return whether a name, read in the function `scope`, is bound to a value with a constant or one that
        reads files.
        """
        local_bindings: Mapping[str, list[ast.expr | None]] = {}
        if scope is not None:
            if id(scope) not in self._local_bindings:
                self._local_bindings[id(scope)] = bindings_of(ast.walk(scope), self._tables)
            local_bindings = self._local_bindings[id(scope)]
        pending, visited = list(names), set[str]()
        while pending:
            name = pending.pop()
            if name in visited:
                continue
            visited.add(name)
            for value in local_bindings.get(name) or self._module_bindings.get(name) or ():
                if value is None:
                    continue
                if reads_files(value) or any(_is_value(node) for node in ast.walk(value)):
                    return True
                for node in ast.walk(value):
                    if isinstance(node, ast.Name):
                        pending.append(node.id)
                    elif id(node) in self._copies:
                        pending.append(self._copies[id(node)])
        return False


def reads_files(value: ast.expr) -> bool:
    """Return whether a value is made by a call that reads files or the environment."""
    return any(isinstance(node, ast.Call) and name_of(node) in READERS for node in ast.walk(value))


def _is_value(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is not None and node.value is not Ellipsis


# --- comparisons that are evaluated in the process


class Comparisons:
    """Which names of a test file hold results of comparisons, and which of its functions return such results."""

    def __init__(self, tree: ast.Module) -> None:
        self._names: set[str] = set()
        while True:
            new_names = {
                name for name, value in _results(tree) if name not in self._names and self.contains_result(value)
            }
            if not new_names:
                return
            self._names |= new_names

    def contains_result(self, value: ast.expr) -> bool:
        """Return whether a value contains results of comparisons, rather than the compared values."""
        match value:
            case ast.Compare(ops=ops):
                return not all(isinstance(op, ast.Is | ast.IsNot) for op in ops)
            case ast.BoolOp(values=values) | ast.List(elts=values) | ast.Tuple(elts=values) | ast.Set(elts=values):
                return any(map(self.contains_result, values))
            case ast.Dict(values=values):
                return any(map(self.contains_result, values))
            case ast.UnaryOp(operand=operand) | ast.Starred(value=operand) | ast.NamedExpr(value=operand):
                return self.contains_result(operand)
            case ast.BinOp(left=left, right=right):
                return self.contains_result(left) or self.contains_result(right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.contains_result(test) or self.contains_result(body) or self.contains_result(orelse)
            case ast.GeneratorExp(elt=element) | ast.ListComp(elt=element) | ast.SetComp(elt=element):
                return self.contains_result(element)
            case ast.DictComp(value=element):
                return self.contains_result(element)
            case ast.Call(args=arguments) as call:
                name = name_of(call)
                if name in self._names and not isinstance(call.func, ast.Attribute):
                    return True
                filters = name in ("len", "any", "all", "sum", "bool") and any(
                    isinstance(node, ast.comprehension) and any(map(self.contains_result, node.ifs))
                    for argument in arguments
                    for node in ast.walk(argument)
                )
                return name in _BOOLEAN and (filters or any(map(self.contains_result, arguments)))
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return name in self._names
            case ast.Subscript(value=inner):
                return self.contains_result(inner)
            case ast.Lambda(body=body):
                return self.contains_result(body)
            case _:
                return False


def _results(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with the values that are bound to them, added to them, or returned by functions with
    that name.
    """
    for name, values in bindings_of(ast.walk(tree), {}).items():
        yield from ((name, value) for value in values if value is not None)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Return | ast.Yield) and node.value is not None:
                    yield function.name, node.value


class Subjects:
    """Which functions are called to make the values that a test file's assertions check."""

    def __init__(self, tree: ast.Module) -> None:
        self._bindings_by_scope: dict[int, Mapping[str, list[ast.expr | None]]] = {}
        self._tree = tree
        self._cancelling_functions = {
            function.name
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            and not function.name.startswith("test")
            and any(
                isinstance(node, ast.BinOp) and isinstance(node.op, _CANCELLING) for node in ast.walk(function)
            )
        }

    def cancels(self, value: ast.expr, scope: ast.AST | None) -> bool:
        """Return whether arithmetic that an operand can make nothing yields a value, such as `a - b`."""
        pending, visited = [value], set[str]()
        while pending:
            match pending.pop():
                case ast.BinOp(op=op, left=first, right=second):
                    if isinstance(op, _CANCELLING):
                        return True
                    pending += [first, second]
                case ast.UnaryOp(operand=inner) | ast.Call(func=ast.Attribute(value=ast.BinOp() as inner)):
                    pending.append(inner)
                case ast.Call(args=arguments) as call:
                    if name_of(call) in self._cancelling_functions:
                        return True
                    pending += arguments if name_of(call) in _MEASURES else []
                case ast.Name(id=name) if name not in visited:
                    visited.add(name)
                    pending += [
                        bound_value
                        for bound_value in self._bindings(scope).get(name, ())
                        if bound_value is not None
                    ]
                case _:
                    pass
        return False

    def _bindings(self, scope: ast.AST | None) -> Mapping[str, list[ast.expr | None]]:
        scope = scope or self._tree
        if id(scope) not in self._bindings_by_scope:
            self._bindings_by_scope[id(scope)] = bindings_of(ast.walk(scope), {})
        return self._bindings_by_scope[id(scope)]

    def find(self, value: ast.expr, scope: ast.AST | None) -> str:
        """Return the sorted names of the functions called for a value in the function `scope`; "" if there are
        none.
        """
        bindings = self._bindings(scope)
        calls, pending, visited = set[str](), [value], set[str]()
        while pending:
            for node in ast.walk(pending.pop()):
                if isinstance(node, ast.Call) and (name := name_of(node)) not in _BOOLEAN:
                    calls.add(name)
                elif isinstance(node, ast.Name) and node.id not in visited:
                    visited.add(node.id)
                    pending += [
                        bound_value for bound_value in bindings.get(node.id, ()) if bound_value is not None
                    ]
        return " ".join(sorted(calls))


# --- values that also occur elsewhere


class ReadableValues:
    """The values that tested code can read in a version's files and in the hidden data files beside them."""

    def __init__(self, sources: Iterable[str], data: Iterable[bytes] = ()) -> None:
        texts: list[str] = []
        self._numbers: Counter[complex] = Counter()
        self._literals: set[str] = set()
        for source in sources:
            for node in ast.walk(parse_module(source)):
                self._add(node, texts)
        for raw in data:
            text = raw[:_MAX_DATA_BYTES].decode("utf-8", "replace")
            texts.append(text)
            self._numbers.update(complex(float(number)) for number in _NUMBER.findall(text))
        self._text = "\0".join(("", *texts, ""))
        self._texts = len(set(texts))

    def count_texts(self) -> int:
        """Return how many different texts and names occur there."""
        return self._texts

    def count_numbers(self) -> int:
        """Return how many different numbers occur there."""
        return len(self._numbers)

    def _add(self, node: ast.AST, texts: list[str]) -> None:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[ast.Constant() as number, *_]) if name.startswith("_"):
                if name.endswith("_"):
                    number.value = None  # the assertion's number, which `twins` inserted, is no expected value
            case ast.Constant(value=bool()):
                pass
            case ast.List() | ast.Tuple() | ast.Set() | ast.Dict() if is_evaluable(node):
                self._literals.add(json.dumps(encode(ast.literal_eval(node))))
            case ast.Constant(value=str(text)):
                texts.append(text)
                self._numbers.update(complex(float(number)) for number in _NUMBER.findall(text[:10_000]))
            case ast.Constant(value=bytes(raw)):
                texts.append(raw.decode("latin-1"))
            case ast.Constant(value=int() | float() | complex() as number):
                try:
                    self._numbers[complex(number)] += 1
                except OverflowError:
                    texts.append(str(number))
            case ast.Name(id=text) | ast.Attribute(attr=text) | ast.arg(arg=text) | ast.keyword(arg=str(text)):
                texts.append(text)
            case ast.FunctionDef(name=text) | ast.ClassDef(name=text) | ast.AsyncFunctionDef(name=text):
                texts.append(text)
            case ast.alias(name=text):
                texts.append(text)
            case _:
                pass

    def has_number(self, number: Any) -> bool:
        """Return whether a number occurs there, with either sign."""
        try:
            value = complex(number)
        except (OverflowError, TypeError, ValueError):
            return str(number) in self._text
        return value in self._numbers or -value in self._numbers

    def find(self, text: str) -> int:
        """Return where a text occurs first, as a whole constant if it does; -1 if nowhere."""
        as_constant = self._text.find(f"\0{text}\0")
        return as_constant if as_constant >= 0 else self._text.find(text)

    def has_literal(self, encoded: Any) -> bool:
        """Return whether a container, as `twin_encoding.encode` writes it, occurs there as it is."""
        return json.dumps(encoded) in self._literals

    def occurs_twice(self, constant: Any) -> bool:
        """Return whether a constant of a version occurs there a second time, so that a changed one can be
        recognised.
        """
        if isinstance(constant, str):
            return len(constant) >= _MIN_COPIED_CHARS and self._text.count(constant) > 1
        if isinstance(constant, int | float) and not isinstance(constant, bool):
            return abs(constant) > _MAX_COMMON_NUMBER and self._numbers[complex(constant)] > 1
        return False

    def guessed_length(self, text: str) -> int:
        """Return how many characters of a text must be guessed; a seam between parts that occur somewhere counts
        as one.
        """
        if not text or text in self._text:
            return 0
        position = count = 0
        while position < len(text) and count < 64:
            end = position + _MIN_COPIED_CHARS
            if end <= len(text) and text[position:end] in self._text:
                step = _MIN_COPIED_CHARS
                while end + step <= len(text) and text[position : end + step] in self._text:
                    end, step = end + step, step * 2
                while step:
                    if end + step <= len(text) and text[position : end + step] in self._text:
                        end += step
                    else:
                        step //= 2
                position = end
            else:
                position += 1
            count += 1
        return count
