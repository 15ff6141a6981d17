"""Says whose code is whose in a watched process (see `process_watch`)."""

from __future__ import annotations

import os
import sys


class CodeOwners:
    """Which directories (ending in "/") and files the owners' code is in.

    `from_tree` are paths that are tested although they are inside a library; `pytest_directory` is that of
    `_pytest`, if any.
    """

    def __init__(
        self,
        runner: tuple[str, ...],
        pytest_directory: str,
        libraries: tuple[str, ...],
        from_tree: tuple[str, ...] = (),
    ) -> None:
        self.runner = runner
        self.pytest_directory = pytest_directory
        self.libraries = libraries
        self.from_tree = from_tree


def owners_in(root: str) -> CodeOwners:
    """Return which code in this interpreter is the test runner's, a library's and tested."""
    from importlib.machinery import PathFinder

    def is_inside(path: str) -> bool:
        return (os.path.realpath(path) + "/").startswith(inside)

    inside = os.path.realpath(root) + "/"
    runner, pytest_directory = [sys.prefix + "/bin/"], ""
    for name in ("pytest", "_pytest", "pluggy"):
        spec = PathFinder.find_spec(name)
        if spec is not None and spec.origin and not is_inside(spec.origin):
            runner.append(os.path.dirname(spec.origin) + "/")
            pytest_directory = runner[-1] if name == "_pytest" else pytest_directory
    # Files that an install put beside the libraries count as tested code, if the tree has something with that
    # name.
    tops = [top for top in (root, root + "/src") if os.path.isdir(top)]
    names = {name.partition(".")[0] for top in tops for name in os.listdir(top)}
    libraries = tuple(entry + "/" for entry in sys.path if entry.endswith("-packages") and not is_inside(entry))
    from_tree = tuple(entry + name + end for entry in libraries for name in names for end in ("/", ".py"))
    return CodeOwners(tuple(runner), pytest_directory, libraries, from_tree)
