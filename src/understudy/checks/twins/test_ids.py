"""Maps deciding test ids to functions of the hidden test files, of which versions are written (see `twins.run`).

Versions name a test as `file::Class::function`: a node. For tasks of kind pytest that is its node id. The ids of a
suite are those that its log parser reads, and name functions in the form of the suite's runner.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping

from msgspec import Struct

from understudy.checks.base import GradingOptions
from understudy.checks.canaries import suite_files
from understudy.checks.seal import HiddenFiles
from understudy.types import PytestChecks, ScriptChecks, SuiteChecks, Task
from understudy.util.python_syntax import parse_module, unparse

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_UNITTEST = re.compile(r"(\w+) \(([\w.]+)\)")


class DecidingTests(Struct, frozen=True):
    """The nodes that decide a task, in `files`, and the node of each test id; ids without a node are left out.

    `calls` is how often a node is run, if its ids tell that.
    """

    files: dict[str, str] = {}
    fail_to_pass: tuple[str, ...] = ()
    pass_to_pass: tuple[str, ...] = ()
    nodes: dict[str, str] = {}
    calls: dict[str, int] = {}


def deciding_tests(task: Task, options: GradingOptions) -> DecidingTests:
    """Return the deciding tests of a task; empty if its checks cannot have twins.

    A script names no tests: all in its Python files count, and each file as a whole for what it asserts elsewhere.
    """
    match task.checks:
        case PytestChecks(files=files, fail_to_pass=to_fix, pass_to_pass=to_keep):
            return DecidingTests(files, to_fix, to_keep, {id: id for id in (*to_fix, *to_keep)})
        case SuiteChecks() as checks:
            return _suite_tests(checks, options.twin_files)
        case ScriptChecks():
            return _script_tests(options.twin_files)


def version_texts(checks: SuiteChecks | ScriptChecks, hidden: HiddenFiles) -> dict[str, str]:
    """Return the text of the hidden Python files that a suite tests, or of all of a script's, by path; files that
    are not UTF-8 are left out.
    """
    texts: dict[str, str] = {}
    of_script = [name for name in hidden if name.endswith(".py")]
    for name in map(posixpath.normpath, suite_files(checks) if isinstance(checks, SuiteChecks) else of_script):
        try:
            texts[name] = (hidden.get(name) or b"").decode()
        except UnicodeDecodeError:
            continue
    return {name: text for name, text in texts.items() if text}


def _suite_tests(checks: SuiteChecks, files: Mapping[str, str]) -> DecidingTests:
    functions = {name: _functions(text, name) for name, text in files.items()}
    nodes = {
        id: node
        for id in (*checks.fail_to_pass, *checks.pass_to_pass)
        if (node := _by_path(id, files) or _by_module(id, files) or _by_name(id, functions))
    }
    ids = Counter(nodes.values())
    to_fix = dict.fromkeys(nodes[id] for id in checks.fail_to_pass if id in nodes)
    to_keep = dict.fromkeys(nodes[id] for id in checks.pass_to_pass if id in nodes and nodes[id] not in to_fix)
    calls = {node: ids[node] for id, node in nodes.items() if "[" in id}
    return DecidingTests(dict(files), tuple(to_fix), tuple(to_keep), nodes, calls)


def _script_tests(files: Mapping[str, str]) -> DecidingTests:
    nodes = [
        node for name, text in files.items() for node in (f"{name}::", *(test[0] for test in _nodes(text, name)))
    ]
    return DecidingTests(dict(files), tuple(nodes), (), {node: node for node in nodes})


def _by_path(id: str, files: Mapping[str, str]) -> str:
    """Return the node for pytest's `path::Class::function[parameters]`."""
    path, _, test_name = id.partition("[")[0].replace("::()", "").partition("::")
    matches = [name for name in files if f"/{name}".endswith(f"/{path}")] if test_name else []
    return f"{matches[0]}::{test_name}" if len(matches) == 1 else ""


def _by_module(id: str, files: Mapping[str, str]) -> str:
    """Return the node for unittest's `method (module.Class)`; later versions repeat the method after the class."""
    match = _UNITTEST.fullmatch(id)
    if match is None:
        return ""
    parts = match[2].removesuffix(f".{match[1]}").split(".")
    for end in range(len(parts) - 1, 0, -1):
        module = "." + ".".join(parts[:end])
        if matches := [name for name in files if f".{_module(name)}".endswith(module)]:
            return f"{matches[0]}::{'::'.join((*parts[end:], match[1]))}" if len(matches) == 1 else ""
    return ""


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _by_name(id: str, functions: Mapping[str, list[tuple[str, str]]]) -> str:
    """Return the node for sympy's bare function name, or for the first line of a docstring, which
    unittest shows.
    """
    matches = [node for pairs in functions.values() for name, node in pairs if name == id]
    return matches[0] if len(matches) == 1 else ""


def _nodes(text: str, file: str) -> list[tuple[str, tuple[str, ...], _Function]]:
    """Return the tests of a file: their nodes, their classes and their functions."""
    try:
        tree = parse_module(text)
    except (SyntaxError, ValueError, RecursionError):
        return []
    tests = functions_of_tests(tree)
    return [("::".join((file, *owner, function.name)), owner, function) for owner, function in tests]


def _functions(text: str, file: str) -> list[tuple[str, str]]:
    """Return the names by which logs may call the functions of a file, with their nodes."""
    matches: list[tuple[str, str]] = []
    for node, owner, function in _nodes(text, file):
        if not owner:
            matches.append((function.name, node))
        elif description := ast.get_docstring(function):
            matches.append((description.splitlines()[0].strip(), node))
    return matches


def function_of(node: str) -> str:
    """Return the function's name in a node."""
    return node.partition("[")[0].rpartition("::")[2]


def names_of_tests(files: Mapping[str, str]) -> frozenset[str]:
    """Return the names of all test functions in these files."""
    return frozenset(node.rpartition("::")[2] for name, text in files.items() for node, _, _ in _nodes(text, name))


def functions_of_tests(
    tree: ast.Module | ast.ClassDef, owner: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the functions that runners treat as tests, each with the names of its classes."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from functions_of_tests(node, (*owner, node.name))
        elif (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.name.startswith("test")
            and not any("fixture" in unparse(decorator) for decorator in node.decorator_list)
        ):
            yield owner, node
