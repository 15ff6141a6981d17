"""Functions that stand in a watched process for those of Python that raise no audit event (see `process_watch`).

The hook does what their events ask for, so that no reference leads from here to the hook. Also makes functions
that the hook calls.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from understudy.checks.watch.audit_events import CREATE_BUILTIN, EXIT, FORK_EXEC
else:
    from audit_events import CREATE_BUILTIN, EXIT, FORK_EXEC


def create_audited(spec: Any) -> Any:
    """Replaces `_imp.create_builtin` in a watched process, because that raises no audit event: the hook creates
    the module.
    """
    modules: list[Any] = []
    sys.audit(CREATE_BUILTIN, spec.name, modules)
    return modules[0]


def exit_audited(status: int, audit: Any = sys.audit, event: str = EXIT) -> Any:
    """Replaces `os._exit`, which raises no audit event; works even while modules are torn down."""
    audit(event, status)


def fork_exec_audited(*arguments: Any) -> int:
    """Replaces `_posixsubprocess.fork_exec`: the hook reports the program, then gives the function that starts
    it.
    """
    starters: list[Any] = []
    sys.audit(FORK_EXEC, arguments, starters)
    return starters[0](*arguments)


def replace_fork_exec() -> Callable[..., int]:
    """Replace `_posixsubprocess.fork_exec`; return the function that it was."""
    import _posixsubprocess

    module: Any = _posixsubprocess
    start, module.fork_exec = module.fork_exec, fork_exec_audited
    subprocess: Any = sys.modules.get("subprocess")
    if hasattr(subprocess, "_fork_exec"):  # since Python 3.11
        subprocess._fork_exec = fork_exec_audited
    return start


def program_namer(installed_in: tuple[str, ...], base: str) -> Callable[[str, Any], frozenset[str]]:
    """Return a function from an audit event and its arguments to the programs that it may start: names of
    installed ones, "-" for any other, and "NAME?" for one that is not there (yet).

    `installed_in` are the directories of installed programs, `base` is that of the tree.
    """
    # The hook uses what tested code could replace in modules or builtins only as it is bound here.
    stat, octets, string, kind_of = os.stat, bytes, str, type
    no_names: frozenset[str] = frozenset()
    sequences, missing, program_directories = (
        (tuple, list),
        (OSError, ValueError),
        (*installed_in, "/bin/", "/sbin/"),
    )

    def programs(event: str, args: Any) -> frozenset[str]:
        if event == "os.system":
            return no_names | {"sh"}
        paths = (args[0],)
        if event == FORK_EXEC:
            paths = args[0][1] if kind_of(args[0][1]) in sequences else (None,)
        names = no_names
        for path in paths:
            text = path.decode("utf-8", "surrogateescape") if kind_of(path) is octets else path
            if kind_of(text) is not string or text[:1] != "/":
                names |= {"-"}
                continue
            installed = text.startswith(program_directories) and "/../" not in text and not text.startswith(base)
            name = text.rpartition("/")[2].replace(" ", "_")
            try:
                stat(text)
            except missing:
                if not installed:
                    names |= {name + "?"}
                continue
            names |= {name if installed else "-"}
        return names

    return programs


def hidden_finder(hidden: frozenset[Any]) -> Callable[[str], Any]:
    """Return a function from a relative path to the identity of a hidden file that it leads to from an open
    directory, None if there is none: the event of `os.open` does not say which directory it was given.
    """
    stat, integer, list_directory, os_error = os.stat, int, os.listdir, OSError

    def find(path: str) -> Any:
        for number in list_directory("/proc/self/fd"):
            try:
                status = stat(path, dir_fd=integer(number))
            except os_error:
                continue
            if (status.st_dev, status.st_ino) in hidden:
                return status.st_dev, status.st_ino
        return None

    return find


def directories_above(paths: tuple[str, ...], root: str) -> dict[Any, str]:
    """Return the directories below `root` that hold files: their paths from there, by their identities."""
    above: dict[Any, str] = {}
    for path in paths:
        directory = os.path.dirname(os.path.relpath(path, root))
        while directory.strip("./"):
            try:
                status = os.stat(os.path.join(root, directory))
            except OSError:
                break
            above[status.st_dev, status.st_ino] = directory
            directory = os.path.dirname(directory)
    return above


def find_sha256() -> Any:
    """Return Python's own sha256 function, which loads no library; its module's name depends on the version."""
    try:
        import _sha2 as sha  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        import _sha256 as sha  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    return getattr(sha, "sha256")  # noqa: B009 - which of the two it is, no type says
