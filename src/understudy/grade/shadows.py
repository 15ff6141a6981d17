"""Which new files would be imported in place of what the hidden tests import.

The rule: except for the code under test, hidden tests import the same as without the patch. So a new file must
not take the place of a hidden file, of a helper or library that hidden tests import, of what runs them, or of a
module of the standard library. A name that the tree itself defines outside of its tests is the code under test.
"""

from __future__ import annotations

import posixpath
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from understudy.types import SuiteChecks, Task

# What the usual test runners are made of, and modules that came with versions of Python other than this one.
_RUNNER_MODULES = """
pytest _pytest py pluggy iniconfig packaging exceptiongroup tomli pygments colorama attr attrs more_itertools
wcwidth nose xdist execnet coverage hypothesis mock asynchat asyncore smtpd imp distutils tomllib compression
annotationlib
"""
_RUNNERS = frozenset(_RUNNER_MODULES.split())
_RUNNER = re.compile(r"pytest_\w+")
_IMPORT = re.compile(r"^[+ ]?\s*(?:from\s+(\w[\w.]*)\s+import\b|import\s+([\w., \t]+))", re.MULTILINE)
_DYNAMIC_IMPORT = re.compile(r"(?:importorskip|import_module|__import__)\(\s*['\"](\w+)")
_PYTHONPATH = re.compile(r"PYTHONPATH=([^\s;&|]+)")
_FILE_BYTES = 4 << 20


def normalised_path(path: str) -> str:
    """Return a path as those file systems compare it that ignore case and the form of letters."""
    return unicodedata.normalize("NFKC", path).casefold()


class TestImports:
    """What the hidden tests of a task import, as the tree before the patch has it. Only names and texts are read.

    `hidden` are the paths of the hidden files, `tests` the directories of tests (with a slash at the end), and
    `gold` the paths that the gold patch names, which are always allowed. Paths are relative to `tree`.
    """

    __test__ = False  # it is no test, whatever its name

    def __init__(
        self, task: Task, tree: Path, hidden: frozenset[str], tests: tuple[str, ...], gold: frozenset[str]
    ) -> None:
        self._tree = tree
        self._hidden = hidden
        self._tests = tests
        self._gold = gold
        self._python = [path for path in hidden if path.endswith(".py")]
        self._parents = {parent for path in self._python for parent in _parents(path)}
        self._roots = self._import_roots(task)
        self._imported = self._imported_names(task)

    def is_replaced_by(self, path: str) -> bool:
        """Return whether a new file at `path` would be imported in place of something that the tests import."""
        if path in self._gold:
            return False
        if posixpath.basename(path).startswith("__init__.") and posixpath.dirname(path) in self._parents:
            return True  # it would decide from which directory the tests below are imported, and run before them
        return any(_shadows(path, hidden) for hidden in self._hidden) or any(
            self._is_reserved(name) for root in self._roots if (name := _module(path, root))
        )

    def _is_reserved(self, name: str) -> bool:
        """Return whether a module of this name is imported that is not the code under test."""
        is_reserved = name in self._imported or name in _RUNNERS or name in sys.stdlib_module_names
        return (is_reserved or _RUNNER.fullmatch(name) is not None) and not self._is_under_test(name)

    def _is_under_test(self, name: str) -> bool:
        """Return whether the tree, or the gold patch, has a module of this name that is no part of the tests."""
        for root in self._roots:
            for path in (posixpath.join(root, name), posixpath.join(root, f"{name}.py")):
                is_hidden = any(hidden == path or hidden.startswith(path + "/") for hidden in self._hidden)
                if is_hidden or f"{path}/".startswith(self._tests) or path.startswith(self._tests):
                    continue
                if (self._tree / path).exists() or any(_module(gold, root) == name for gold in self._gold):
                    return True
        return False

    def _import_roots(self, task: Task) -> frozenset[str]:
        """Return the directories that may be on the path when tests run, "" for the tree itself.

        These are the tree, the directories in it that are no packages, those in PYTHONPATH, and for each hidden
        file the first directory above it that is no package, from which pytest imports it.
        """
        roots = {""}
        for entry in self._tree.iterdir():
            if entry.is_dir() and not entry.name.startswith(".") and not (entry / "__init__.py").exists():
                roots.add(entry.name)
        activate = task.checks.activate if isinstance(task.checks, SuiteChecks) else ""
        variables = [task.env.get("PYTHONPATH", ""), *_PYTHONPATH.findall(activate)]
        for entry in ":".join(variables).replace("'", "").replace('"', "").split(":"):
            relative = posixpath.relpath(posixpath.join(task.workdir, entry), task.workdir)
            if entry and not relative.startswith(".."):
                roots.add("" if relative == "." else relative)
        for path in self._python:
            roots.add(self._base(posixpath.dirname(path)))
        return frozenset(roots)

    def _base(self, directory: str) -> str:
        while directory:
            package = posixpath.join(directory, "__init__.py")
            if not (self._tree / package).exists() and package not in self._hidden:
                break
            directory = posixpath.dirname(directory)
        return directory

    def _imported_names(self, task: Task) -> frozenset[str]:
        """Return the first names of all that hidden files and files beside them import, and their own names."""
        texts = [task.checks.test_patch] if isinstance(task.checks, SuiteChecks) else []
        texts += getattr(task.checks, "files", {}).values() if not texts else []
        sibling_directories = {
            self._tree / parent for path in self._python for parent in [posixpath.dirname(path)]
        }
        files = [
            file for directory in sibling_directories if directory.is_dir() for file in directory.glob("*.py")
        ]
        files += [self._tree / parent / "conftest.py" for parent in self._parents]
        for file in files:
            if file.is_file() and not file.is_symlink() and file.stat().st_size < _FILE_BYTES:
                texts.append(file.read_text(encoding="utf-8", errors="replace"))
        own_modules = {name for path in self._python for root in self._roots if (name := _module(path, root))}
        return frozenset(own_modules | {name for text in texts for name in imported_modules(text)})


def imported_modules(text: str) -> Iterator[str]:
    """Return the first names of the modules that a Python source imports, also if it is given as added lines of a
    patch.
    """
    for match in _IMPORT.finditer(text):
        modules: list[str] = [match[1]] if match[1] else match[2].split(",")
        yield from (module.split()[0].partition(".")[0] for module in modules if module.split())
    yield from _DYNAMIC_IMPORT.findall(text)


def _module(path: str, root: str) -> str:
    """Return the name under which a new file could be imported from `root`; "" if it could not.

    That is a module in `root` itself, or a directory that gets an `__init__.py`. For any file in a directory named
    like a package of `_RUNNERS`, it is that directory.
    """
    relative = path.removeprefix(root + "/") if root else path
    if root and relative == path:
        return ""
    first, _, below_first = relative.partition("/")
    name, dot, _ = (below_first or first).partition(".")
    if below_first and first in _RUNNERS:
        return first
    if "/" in below_first or (below_first and name != "__init__") or not dot:
        return ""
    return first if below_first else name


def _shadows(path: str, hidden: str) -> bool:
    """Return whether `path` would be found in place of `hidden` or a directory above it: the same name with
    another suffix.
    """
    for new, old in zip(path.split("/"), hidden.split("/"), strict=False):
        if new != old:
            return normalised_path(new).partition(".")[0] == normalised_path(old).partition(".")[0]
    return path != hidden


def _parents(path: str) -> Iterable[str]:
    while path:
        path = posixpath.dirname(path)
        yield path
