"""Mutations: small bugs for a Python module. Lists the sites where one fits, and applies chosen ones, leaving
everything else unchanged.

A site is one concrete change: a span of the source and its replacement. Sites are only in function bodies and
defaults, never in docstrings, annotations, decorators, error messages or code that runs at import.
"""

from __future__ import annotations

import ast
import bisect
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import cast

from msgspec import Struct

from understudy.errors import TaskError
from understudy.util.python_syntax import parse_module


class Site(Struct, frozen=True, order=True):
    """One possible mutation: `source[start:end]` becomes `replacement`. `line` counts from 1."""

    start: int
    end: int
    operator: str
    replacement: str
    line: int


class ParsedModule:
    """A parsed module, which maps positions of its syntax tree to offsets in its text.

    Raises TaskError when the text is not valid Python.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self.tree = parse_module(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise TaskError(
                f"invalid Python source: {error}; expected a module that this Python "
                f"({sys.version_info.major}.{sys.version_info.minor}) can parse: choose another package"
            ) from error
        self._starts = [0, *(match.end() for match in re.finditer(r"\r\n|\r|\n", text)), len(text)]
        self._ascii = text.isascii()

    @property
    def count(self) -> int:
        """The number of lines; a text that ends with a line break has an empty last line, which counts."""
        return len(self._starts) - 1

    def offset(self, line: int, column: int) -> int:
        """Return the offset in the text of a position: line from 1, column in UTF-8 bytes."""
        start = self._starts[line - 1]
        if self._ascii:
            return start + column
        encoded = self.text[start : self._starts[line]].encode()
        return start + len(encoded[:column].decode())

    def line(self, offset: int) -> int:
        """Return the line, from 1, that contains an offset."""
        return bisect.bisect_right(self._starts, offset, hi=len(self._starts) - 1)

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Return the start and end offset of a node."""
        assert node.end_lineno is not None and node.end_col_offset is not None  # ast.parse always sets them
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def source(self, node: ast.expr | ast.stmt) -> str:
        """Return the text of a node."""
        start, end = self.span(node)
        return self.text[start:end]

    def lines(self, first: int, last: int) -> tuple[int, int]:
        """Return the start and end offset of whole lines, including line breaks."""
        return self._starts[first - 1], self._starts[last]

    def find(self, start: int, end: int, pattern: str) -> tuple[int, int]:
        """Return the span of the first match of `pattern` between two offsets; comments are skipped. The
        text between the offsets must have no strings.
        """
        gap = re.sub(r"#[^\r\n]*", lambda comment: " " * len(comment[0]), self.text[start:end])
        match = re.search(pattern, gap)
        return (start + match.start(), start + match.end()) if match else (start, start)


def sites(module: ParsedModule) -> list[Site]:
    """Return all sites of a module, in order."""
    result: set[Site] = set()
    for node in _mutable(module.tree.body):
        for start, end, operator, replacement in _changes(module, node):
            if start < end and module.text[start:end] != replacement:
                result.add(Site(start, end, operator, replacement, module.line(start)))
    return sorted(result)


def mutate(text: str, chosen: Sequence[Site]) -> str:
    """Return the text with all chosen sites changed. Raises TaskError when two of them overlap."""
    ordered = sorted(chosen)
    for left, right in pairwise(ordered):
        if right.start < left.end:
            raise TaskError(f"the mutations at lines {left.line} and {right.line} overlap; choose others")
    for site in reversed(ordered):
        text = text[: site.start] + site.replacement + text[site.end :]
    return text


# --- which nodes may change ----------------------------------------------------------------------------

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _mutable(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the nodes that run when a function is called, and the defaults of functions."""
    for node in body:
        if isinstance(node, _Function):
            yield from _executed(node)
        elif not isinstance(node, ast.expr):
            yield from _mutable(ast.iter_child_nodes(node))


def _executed(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield node
            children: list[ast.AST] = [*_defaults(node.args), *node.body]
        case ast.AnnAssign():
            yield node
            children = [node.value] if node.value else []
        case ast.Raise() | ast.JoinedStr() | ast.Assert() | ast.pattern():
            # A statement may be removed as a whole; texts for people or formats are not changed, because they are
            # not behaviour.
            yield node
            children = []
        case ast.Expr(value=ast.Constant(value=str())):
            children = []
        case ast.ClassDef():
            children = [*node.body]
        case ast.Lambda():
            children = [*_defaults(node.args), node.body]
        case _:
            yield node
            children = list(ast.iter_child_nodes(node))
    for child in children:
        yield from _executed(child)


def _defaults(arguments: ast.arguments) -> list[ast.AST]:
    return [*arguments.defaults, *(default for default in arguments.kw_defaults if default)]


# --- the operators -------------------------------------------------------------------------------------

Change = tuple[int, int, str, str]

# For each comparison operator: its text in the source, and its possible replacements.
_COMPARE: dict[type[ast.cmpop], tuple[str, dict[str, str]]] = {
    ast.Lt: ("<", {"boundary": "<=", "comparison": ">"}),
    ast.LtE: ("<=", {"boundary": "<", "comparison": ">="}),
    ast.Gt: (">", {"boundary": ">=", "comparison": "<"}),
    ast.GtE: (">=", {"boundary": ">", "comparison": "<="}),
    ast.Eq: ("==", {"comparison": "!="}),
    ast.NotEq: ("!=", {"comparison": "=="}),
    ast.Is: ("is", {"identity": "is not"}),
    ast.IsNot: (r"is\s+not", {"identity": "is"}),
    ast.In: ("in", {"membership": "not in"}),
    ast.NotIn: (r"not\s+in", {"membership": "in"}),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: (r"\+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: (r"\*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: (r"\|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
_PAIRS = (
    *(("min", "max"), ("any", "all"), ("startswith", "endswith"), ("lstrip", "rstrip"), ("find", "rfind")),
    *(("split", "rsplit"), ("partition", "rpartition"), ("lower", "upper"), ("keys", "values")),
    *(("append", "extend"), ("union", "intersection"), ("floor", "ceil")),
)
_SIBLINGS = dict(_PAIRS) | {other: name for name, other in _PAIRS}


def _changes(module: ParsedModule, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare():
            yield from _comparisons(module, node)
        case ast.BinOp():
            yield from _arithmetic(module, node)
        case ast.AugAssign(op=ast.Add() | ast.Sub()):
            old, new = ("+=", "-=") if isinstance(node.op, ast.Add) else ("-=", "+=")
            start, end = module.find(module.span(node.target)[1], module.span(node.value)[0], re.escape(old))
            yield start, end, "augmented assignment", new
        case ast.BoolOp():
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in pairwise(node.values):
                start, end = module.find(module.span(left)[1], module.span(right)[0], old)
                yield start, end, "boolean", new
        case ast.UnaryOp(op=ast.USub()):
            yield *module.span(node), "sign", f"({module.source(node.operand)})"
        case ast.Constant():
            yield from _constants(module, node)
        case ast.Slice():
            for bound in (node.lower, node.upper):
                if bound is not None:
                    yield *module.span(bound), "slice bound", ""
                    if not isinstance(bound, ast.Constant):
                        yield *module.span(bound), "slice bound", f"({module.source(bound)}) + 1"
        case ast.Call():
            yield from _calls(module, node)
        case ast.Return(value=ast.expr() as value):
            if not isinstance(value, ast.Constant):
                yield *module.span(value), "return value", "None"
        case ast.Break():
            yield *module.span(node), "loop jump", "continue"
        case ast.Continue():
            yield *module.span(node), "loop jump", "break"
        case _:
            pass
    if isinstance(node, ast.If | ast.IfExp):
        yield from _negation(module, node.test)
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield from _negation(module, test)
    if isinstance(node, ast.If):
        yield from _without_else(module, node)
    yield from _removals(module, node)


def _comparisons(module: ParsedModule, node: ast.Compare) -> Iterator[Change]:
    for (left, right), kind in zip(pairwise([node.left, *node.comparators]), node.ops, strict=True):
        old, alternatives = _COMPARE[type(kind)]
        start, end = module.find(module.span(left)[1], module.span(right)[0], old)
        for operator, new in alternatives.items():
            yield start, end, operator, new


def _arithmetic(module: ParsedModule, node: ast.BinOp) -> Iterator[Change]:
    textual = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple)
    if any(isinstance(side, textual) and not _is_number(side) for side in (node.left, node.right)):
        return  # joining or formatting strings: another operator would only be a TypeError
    if kind := _ARITHMETIC.get(type(node.op)):
        start, end = module.find(module.span(node.left)[1], module.span(node.right)[0], kind[0])
        yield start, end, "arithmetic", kind[1]


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def _constants(module: ParsedModule, node: ast.Constant) -> Iterator[Change]:
    start, end = module.span(node)
    text = module.text[start:end]
    value: object = node.value
    if isinstance(value, bool):
        yield start, end, "truth value", str(not value)
    elif isinstance(value, int) and text.isdecimal():
        yield start, end, "off by one", str(value + 1)
        if value > 0:
            yield start, end, "off by one", str(value - 1)
    elif isinstance(value, str) and re.fullmatch(r"""(['"])[^'"\\{}%\r\n]+\1""", text):
        yield start, end, "string", text[:-2] + text[-1]
        if text.swapcase() != text:
            yield start, end, "string", text.swapcase()


def _calls(module: ParsedModule, node: ast.Call) -> Iterator[Change]:
    plain = [argument for argument in node.args[:2] if not isinstance(argument, ast.Starred)]
    if len(plain) == 2 and not any(isinstance(argument, ast.GeneratorExp) for argument in plain):
        (start, middle), (between, end) = module.span(plain[0]), module.span(plain[1])
        first, second = module.text[start:middle], module.text[between:end]
        yield start, end, "swapped arguments", second + module.text[middle:between] + first
    match node.func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in _SIBLINGS:
            end = module.span(node.func)[1]
            yield end - len(name), end, "sibling", _SIBLINGS[name]
        case _:
            pass


def _negation(module: ParsedModule, test: ast.expr) -> Iterator[Change]:
    start, end = module.span(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield start, end, "negation", f"({module.source(test.operand)})"
    elif not isinstance(test, ast.Compare):  # comparisons have changes of their own
        yield start, end, "negation", f"not ({module.text[start:end]})"


def _without_else(module: ParsedModule, node: ast.If) -> Iterator[Change]:
    if not node.orelse:
        return
    start, word_end = module.find(module.span(node.body[-1])[1], module.span(node.orelse[0])[0], r"\belse\b")
    last_line = node.orelse[-1].end_lineno
    if start < word_end and last_line is not None:
        first, end = module.lines(module.line(start), last_line)
        if not module.text[first:start].strip() and _ends_line(module, node.orelse[-1]):
            yield first, end, "missing else", ""


def _removals(module: ParsedModule, parent: ast.AST) -> Iterator[Change]:
    """Yield removals of statements: calls, assignments, and guards that leave the function."""
    for name in ("body", "orelse", "finalbody"):
        body: object = getattr(parent, name, None)
        statements = cast("list[ast.stmt]", body) if isinstance(body, list) else []
        for statement in statements:
            if not _removable(statement) or statement.end_lineno is None:
                continue
            first, end = module.lines(statement.lineno, statement.end_lineno)
            start = module.span(statement)[0]
            if len(statements) == 1:
                yield *module.span(statement), "missing statement", "pass"
            elif not module.text[first:start].strip() and _ends_line(module, statement):
                yield first, end, "missing statement", ""


def _removable(statement: ast.stmt) -> bool:
    match statement:
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            return True
        case ast.If(body=[ast.Return() | ast.Raise() | ast.Continue() | ast.Break()], orelse=[]):
            return True
        case _:
            return isinstance(statement, ast.AugAssign | ast.Delete)


def _ends_line(module: ParsedModule, statement: ast.stmt) -> bool:
    """Return whether only a comment follows a statement on its last line."""
    assert statement.end_lineno is not None
    _, line_end = module.lines(statement.end_lineno, statement.end_lineno)
    behind = module.text[module.span(statement)[1] : line_end].strip()
    return not behind or behind.startswith("#")


# --- removing tests ------------------------------------------------------------------------------------

_Test = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = tuple[tuple[str, ...], _Test, list[ast.stmt]]


def function_of(node_id: str) -> str:
    """Return the node id of the test function: a parametrised test's id without the parameters."""
    path, separator, test = node_id.partition("::")
    return path + separator + test.partition("[")[0]


def hide_tests(text: str, node_ids: Iterable[str]) -> str:
    """Return the text without the test functions and methods with these pytest node ids.

    An inherited test is removed where it is defined, and functions that call a removed one are removed too.
    Comments directly above a test and its decorators go with it; an empty class or branch gets a `pass`. Raises
    TaskError when a test is not found in this text, or code outside of functions uses it.
    """
    module = ParsedModule(text)
    definitions_of_tests = list(_tests(module.tree.body, ()))
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    removed: dict[int, _Definition] = {}
    for node_id in sorted({function_of(node_id) for node_id in node_ids}):
        definitions = _defined(definitions_of_tests, bases, tuple(node_id.split("::")[1:]))
        if not definitions:
            expected = "expected one that is defined there, not generated or imported"
            raise TaskError(f"{node_id}: no such test function in its file; {expected}")
        removed |= {id(definition[1]): definition for definition in definitions}
    _add_callers(module.tree, definitions_of_tests, removed)
    edits: list[tuple[int, int, str]] = []
    for _, test, body in removed.values():
        start, end = _extent(module, test)
        emptied = all(id(statement) in removed for statement in body)
        filler = " " * test.col_offset + "pass\n" if emptied and test.col_offset and test is body[0] else ""
        edits.append((start, end, filler))
    for start, end, filler in sorted(edits, reverse=True):
        text = text[:start] + filler + text[end:]
    ParsedModule(text)
    return text


def _tests(body: list[ast.stmt], scope: tuple[str, ...]) -> Iterator[_Definition]:
    for statement in body:
        if isinstance(statement, _Test):
            yield (*scope, statement.name), statement, body
        elif isinstance(statement, ast.ClassDef):
            yield from _tests(statement.body, (*scope, statement.name))
        else:
            for name in ("body", "orelse", "finalbody"):
                if inner := getattr(statement, name, None):
                    yield from _tests(inner, scope)
            for handler in getattr(statement, "handlers", ()):
                yield from _tests(handler.body, scope)


def _defined(
    definitions: list[_Definition], bases: dict[str, list[str]], names: tuple[str, ...]
) -> list[_Definition]:
    """Return where a test is defined: in its class, or in the first base class that has it."""
    todo = [names]
    visited: set[tuple[str, ...]] = set()
    while todo:
        candidate = todo.pop(0)
        if matches := [definition for definition in definitions if definition[0] == candidate]:
            return matches
        visited.add(candidate)
        if len(candidate) == 2:
            above = [(base, candidate[1]) for base in bases.get(candidate[0], ())]
            todo += [inherited for inherited in above if inherited not in visited]
    return []


def _add_callers(tree: ast.Module, definitions: list[_Definition], removed: dict[int, _Definition]) -> None:
    """Add to `removed` every function that uses one of them, repeatedly."""
    while True:
        names = {test.name for _, test, _ in removed.values()}
        callers = {
            id(definition[1]): definition
            for definition in definitions
            if id(definition[1]) not in removed and _used(definition[1]) & names
        }
        if not callers:
            break
        removed |= callers
    inside = {id(node) for _, test, _ in definitions for node in ast.walk(test)}
    if used := _used(tree, without=inside) & names:
        raise TaskError(
            f"{min(used)}: code outside of functions uses this test, so it cannot be removed; choose another test"
        )


def _used(root: ast.AST, without: Collection[int] = ()) -> set[str]:
    """Return the names and attributes that the code below `root` uses."""
    nodes = [node for node in ast.walk(root) if id(node) not in without]
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return attributes | {node.id for node in nodes if isinstance(node, ast.Name)}


def _extent(module: ParsedModule, test: _Test) -> tuple[int, int]:
    """Return the lines of a test, with the comments directly above it and the blank lines after it."""
    assert test.end_lineno is not None
    first_line, last_line = (
        min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)]),
        test.end_lineno,
    )
    while first_line > 1 and _line(module, first_line - 1).strip().startswith("#"):
        first_line -= 1
    while last_line < module.count and not _line(module, last_line + 1).strip():
        last_line += 1
    before = module.text[module.lines(test.lineno, test.lineno)[0] : module.span(test)[0]].strip()
    if before not in ("", "async") or not _ends_line(module, test):
        raise TaskError(
            f"line {test.lineno}: the test shares a line with other code and cannot be removed; choose "
            "another test"
        )
    return module.lines(first_line, last_line)


def _line(module: ParsedModule, number: int) -> str:
    start, end = module.lines(number, number)
    return module.text[start:end]
