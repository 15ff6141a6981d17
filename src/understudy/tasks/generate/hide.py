"""Remove tests from a test file and leave every other character as it is."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator

from understudy.errors import TaskError
from understudy.tasks.generate.mutations import ParsedModule

_Test = ast.FunctionDef | ast.AsyncFunctionDef
_Definition = tuple[tuple[str, ...], _Test, list[ast.stmt]]


def function_of(node_id: str) -> str:
    """The node id of the whole test function: a parametrised test without its parameters."""
    path, separator, test = node_id.partition("::")
    return path + separator + test.partition("[")[0]


def hide_tests(text: str, node_ids: Iterable[str]) -> str:
    """The text without the test functions and methods that the pytest node ids name.

    An inherited test goes where it is defined, and functions that call one of those go too. Comments right above
    a test and its decorators go with it; a class or branch left empty gets a `pass`. Raises TaskError when a test
    is not found in this text, or code outside of functions uses it.
    """
    module = ParsedModule(text)
    places = list(_tests(module.tree.body, ()))
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    }
    doomed: dict[int, _Definition] = {}
    for node_id in sorted({function_of(node_id) for node_id in node_ids}):
        definitions = _defined(places, bases, tuple(node_id.split("::")[1:]))
        if not definitions:
            raise TaskError(
                f"{node_id}: no such test function in its file; expected one that is defined there, "
                "not generated or imported"
            )
        doomed |= {id(definition[1]): definition for definition in definitions}
    _add_callers(module.tree, places, doomed)
    edits: list[tuple[int, int, str]] = []
    for _, test, body in doomed.values():
        start, end = _extent(module, test)
        emptied = all(id(statement) in doomed for statement in body)
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
    """Where a test is defined: in its class, else in the first of the classes above it that has it."""
    todo = [names]
    visited: set[tuple[str, ...]] = set()
    while todo:
        candidate = todo.pop(0)
        if matches := [definition for definition in definitions if definition[0] == candidate]:
            return matches
        visited.add(candidate)
        if len(candidate) == 2:
            above = [(base, candidate[1]) for base in bases.get(candidate[0], ())]
            todo += [other for other in above if other not in visited]
    return []


def _add_callers(tree: ast.Module, definitions: list[_Definition], doomed: dict[int, _Definition]) -> None:
    """Doom every function that uses a doomed one, and those that use it in turn."""
    while True:
        names = {test.name for _, test, _ in doomed.values()}
        callers = {
            id(definition[1]): definition
            for definition in definitions
            if id(definition[1]) not in doomed and _used(definition[1]) & names
        }
        if not callers:
            break
        doomed |= callers
    inside = {id(node) for _, test, _ in definitions for node in ast.walk(test)}
    if used := _used(tree, without=inside) & names:
        raise TaskError(f"{min(used)}: code outside of functions uses this test, so it cannot be removed")


def _used(root: ast.AST, without: Collection[int] = ()) -> set[str]:
    """The names and attributes that the code below `root` uses."""
    nodes = [node for node in ast.walk(root) if id(node) not in without]
    return {node.id for node in nodes if isinstance(node, ast.Name)} | {
        node.attr for node in nodes if isinstance(node, ast.Attribute)
    }


def _first_line(test: _Test) -> int:
    return min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])


def _extent(module: ParsedModule, test: _Test) -> tuple[int, int]:
    """The lines of a test, with the comments right above it and the blank lines behind it."""
    assert test.end_lineno is not None
    first, last = _first_line(test), test.end_lineno
    while first > 1 and _line(module, first - 1).strip().startswith("#"):
        first -= 1
    while last < module.count and not _line(module, last + 1).strip():
        last += 1
    start, end = module.lines(first, last)
    own_start = module.offset(test.lineno, test.col_offset)
    own_end = module.span(test)[1]
    before = module.text[module.lines(test.lineno, test.lineno)[0] : own_start].strip()
    behind = module.text[own_end : module.lines(test.end_lineno, test.end_lineno)[1]].strip()
    if before not in ("", "async") or (behind and not behind.startswith("#")):
        raise TaskError(f"line {test.lineno}: the test shares a line with other code and cannot be removed")
    return start, end


def _line(module: ParsedModule, number: int) -> str:
    start, end = module.lines(number, number)
    return module.text[start:end]
