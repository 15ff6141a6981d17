"""Hides what the tests of a version reveal about themselves and each other (see `twins`).

Names are replaced, because one like `test_empty_is_false` reveals the expectation. The code under test can read
which test runs: in `PYTEST_CURRENT_TEST`, in frames, in the test's own node.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import TypeVar

from understudy.checks.twins.test_ids import functions_of_tests
from understudy.util.python_syntax import parse_module

T = TypeVar("T")


def rename_tests(tree: ast.Module) -> dict[str, str]:
    """Give a file's tests and their classes neutral names; return the old names by the new ones.

    The new names keep the alphabetical order, by which some runners run them. A name that the file also uses for
    something else, or as an attribute, is kept.
    """
    tests = list(functions_of_tests(tree))
    functions = sorted({function.name for _, function in tests})
    classes = sorted({name for owner, _ in tests for name in owner})
    new_names = {name: f"test_{number:04}" for number, name in enumerate(functions)}
    for number, name in enumerate(classes):
        new_names[name] = f"{'Test' if name.startswith('Test') else 'Case'}{number:04}"
    used_names = _other_names(tree)
    new_names = {old: new for old, new in new_names.items() if old not in used_names and new not in used_names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            node.id = new_names.get(node.id, node.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            node.name = new_names.get(node.name, node.name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            node.names = [new_names.get(name, name) for name in node.names]
    return {new: old for old, new in new_names.items()}


def empty_tests(tree: ast.Module, names: frozenset[str]) -> None:
    """Make the tests with these names do nothing."""
    for _, function in functions_of_tests(tree):
        if function.name in names:
            function.body = [ast.Pass()]


def strip_docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
    """Remove a docstring, because it may reveal what is expected; doctests, which are tests themselves, stay."""
    text = ast.get_docstring(node, clean=False)
    if text is not None and ">>>" not in text:
        node.body = node.body[1:]
        if not node.body and not isinstance(node, ast.Module):
            node.body = [ast.Pass()]


def _other_names(tree: ast.Module) -> set[str]:
    """Return the names of a file that are imported, attributes, parameters or arguments, or that occur in
    a text.
    """
    used_names: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.alias(name=name, asname=alias):
                used_names |= {name.partition(".")[0], name, alias or name}
            case ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                used_names.add(name)
            case ast.Constant(value=str(text)):
                used_names.add(text)
            case _:
                pass
    return used_names


def original_node(node: str, names: Mapping[str, Mapping[str, str]]) -> str:
    """Return a node with the file's own names; `names` has the old names by the new ones, by file."""
    file, separator, test_name = node.partition("::")
    old = names.get(file, {})
    parts, bracket, parameters = test_name.partition("[")
    original = "::".join(old.get(part, part) for part in parts.split("::"))
    return f"{file}{separator}{original}{bracket}{parameters}"


def by_original_names(by_node: Mapping[str, T], names: Mapping[str, Mapping[str, str]]) -> dict[str, T]:
    """Return the mapping with its keys replaced by `original_node`."""
    return {original_node(node, names): value for node, value in by_node.items()}


def insert_first(tree: ast.Module, statement: str) -> None:
    """Insert a statement before all others of a module, but those that Python wants to come first."""
    position = 1 if ast.get_docstring(tree, clean=False) is not None else 0
    while position < len(tree.body):
        existing = tree.body[position]
        if not (isinstance(existing, ast.ImportFrom) and existing.module == "__future__"):
            break
        position += 1
    tree.body[position:position] = parse_module(statement).body
