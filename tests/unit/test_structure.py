"""The rules of the house that no linter has: what CONTRIBUTING.md asks of names, imports and sizes."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "understudy"
PATHS = sorted(SOURCE.rglob("*.py"))

VAGUE = {
    *("found", "said", "told", "known", "kept", "given", "place", "words", "made", "begun", "way"),
    *("every", "may", "moved", "one", "others", "over", "rest", "some"),
}
"""Names that say how a value came to be here instead of what it is."""


def dotted(path: Path) -> str:
    return ".".join(("understudy", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


NAMES = {dotted(path) for path in PATHS}


@functools.cache
def parsed() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in PATHS}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes of a module but those that only a type checker reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        yield node
        yield from statements(node)


def imports(tree: ast.Module) -> set[str]:
    """The modules of ours that a module imports, anywhere in it."""
    modules: set[str] = set()
    for node in statements(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            modules |= inner & NAMES if inner <= NAMES else {node.module} | (inner & NAMES)
    return modules & NAMES


def assigned(tree: ast.Module) -> Iterator[str]:
    """Every name that a module gives to something: variables, attributes, parameters, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.arg(arg=name)
            ):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case _:
                pass


def test_no_imports_in_a_circle():
    graph = {dotted(path): imports(tree) - {dotted(path)} for path, tree in parsed().items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"these modules import one another: {' -> '.join(error.args[1])}")


def test_a_class_name_stands_for_one_thing():
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in parsed().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                modules[node.name.lstrip("_")].append(dotted(path))
    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def test_names_say_what_they_stand_for():
    names = Counter[str]()
    vague = Counter[str]()
    for path, tree in parsed().items():
        for name in assigned(tree):
            names[name] += 1
            if name.strip("_") in VAGUE:
                vague[f"{name} in {dotted(path)}"] += 1
    assert vague.total() <= names.total() * 2 / 1000, vague.most_common(20)


def test_limits_are_called_max_or_min():
    """An engineer who looks for a limit searches for MAX_ or MIN_."""
    limit = re.compile(r"_?(MOST|LONGEST|LARGEST|LEAST|FEWEST|DEEPEST|SHORTEST|SMALLEST)_\w+")
    constants = {(dotted(path), name) for path, tree in parsed().items() for name in assigned(tree)}
    assert {(module, name) for module, name in constants if limit.fullmatch(name)} == set()


def test_comments_name_what_exists():
    """A reference such as `package.module.name` in a comment or docstring names what that module of ours has."""
    texts = {dotted(path): path.read_text() for path in PATHS}
    missing: list[str] = []
    for module, text in texts.items():
        for reference in re.findall(r"`((?:[a-z_]+\.){2,}\w+)`", text):
            prefix, _, name = reference.rpartition(".")
            if any(f".{other}".endswith(f".{reference}") for other in texts):
                continue
            owners = [other for other in texts if f".{other}".endswith(f".{prefix}")]
            if owners and not any(re.search(rf"\b{name}\b", texts[owner]) for owner in owners):
                missing.append(f"{reference} in {module}")
    assert missing == []


def test_functions_have_at_most_twelve_parameters():
    wide = [
        f"{dotted(path)}:{node.lineno} {node.name}"
        for path, tree in parsed().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) > 12
    ]
    assert wide == []


def test_modules_have_at_most_six_hundred_lines():
    assert {dotted(path) for path in PATHS if path.read_text().count("\n") > 600} == set()


def test_every_module_says_what_it_is_for():
    assert {dotted(path) for path, tree in parsed().items() if not ast.get_docstring(tree)} == set()


def named_in_the_map() -> Iterator[tuple[str, str]]:
    """The files and directories in docs/architecture.md, and each name in parentheses behind a file."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    for match in re.finditer(r"`([\w<>./-]+(?:\.py|/))`(?: \(([^()]*)\))?", text):
        path = match[1]
        yield path, ""
        if path.endswith(".py"):
            yield from ((path, name) for name in re.findall(r"`(\w+)`", match[2] or ""))


def test_the_map_names_what_exists():
    missing: list[str] = []
    for path, name in named_in_the_map():
        pattern = re.sub("<[a-z]+>", "*", path)
        files = [*SOURCE.glob(pattern), *ROOT.glob(pattern)]
        if not files or (name and not any(re.search(rf"\b{name}\b", file.read_text()) for file in files)):
            missing.append(f"{path} {name}".strip())
    assert missing == []


def test_lock_files_name_no_package_index():
    locks = sorted((ROOT / "requirements").glob("*.txt"))
    assert [path.name for path in locks] == ["base.txt", "docs.txt", "node.txt", "train.txt"]
    for path in locks:
        text = path.read_text()
        assert "://" not in text and "--index-url" not in text and "--find-links" not in text
        assert "--hash=sha256:" in text
