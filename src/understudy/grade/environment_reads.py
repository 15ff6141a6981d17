"""Finds new code of a patch that reads its environment: where, when or by what it is run.

Twins and other inputs compare what code does while it is tested. Code that reads the working directory, the
terminal, the clock or the loaded modules may behave otherwise anywhere else, and no run of tests shows that. Much
honest code reads them too, so this lowers only a verdict's `protection`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from understudy.grade.changed_files import changed_files
from understudy.grade.python_source import MAX_SOURCE_BYTES, Names, ParsedSource, SourceStatement
from understudy.grade.scratch import unused_scripts
from understudy.types import Task
from understudy.util.diffs import DiffError

_READ = re.compile(
    r"(?<![\w.])(?:"
    r"os\.(?:environb?|getenvb?|getcwdb?|uname|get(?:pp?id|e?[ug]id|login|pgrp|groups|loadavg|priority)"
    r"|isatty|ttyname|fstat|times|cpu_count|sched_getaffinity|get_terminal_size|path\.expanduser|ctermid)"
    r"|pathlib\.Path\.(?:cwd|home)|shutil\.get_terminal_size"
    r"|(?:platform|pwd|grp|resource|tracemalloc|site|sysconfig|termios|psutil)\.\w+|gc\.(?:get|is)_?\w*"
    r"|socket\.(?:gethostname|getfqdn|gethostby\w+|if_\w+|getaddrinfo|create_connection)"
    r"|getpass\.getuser|uuid\.(?:uuid1|getnode)|locale\.get\w+|tempfile\.gettempdirb?"
    r"|(?<!file=)sys\.(?:__)?std(?:in|out|err)(?:__)?(?!\.(?:buffer\.)?(?:write|writelines|flush|read\w*)\b)"
    r"|sys\.(?:(?:orig_)?argv|flags|modules|warnoptions|_xoptions|executable|path|(?:base_)?(?:exec_)?prefix"
    r"|meta_path|path_hooks|path_importer_cache|platform|version(?:_info)?|hexversion|implementation"
    r"|get(?:recursionlimit|switchinterval|trace|profile|refcount|allocatedblocks)|_getframe(?:modulename)?"
    r"|_current_\w+|dont_write_bytecode|pycache_prefix|excepthook|unraisablehook|displayhook)"
    r"|time\.(?!sleep\b|strftime\b|strptime\b|mktime\b|struct_time\b)\w+"
    r"|datetime\.(?:datetime|date)\.(?:now|today|utcnow)"
    r"|threading\.(?:current_thread|main_thread|enumerate|active_count|get_(?:native_)?ident)"
    r"|multiprocessing\.(?:current_process|parent_process|active_children|cpu_count)"
    r"|inspect\.(?:stack|currentframe|trace|getouterframes)|traceback\.(?:extract|walk|format|print)_stack"
    r"|logging\.(?:root|lastResort)|warnings\.filters|random\.getstate|signal\.getsignal|faulthandler\.is_enabled"
    r"|logging\.getLogger\(\)|__debug__)(?!\w)"
)
_METHOD = re.compile(r"\.(?:isatty|hasHandlers)\(\)")
_ALL_NAMES = re.compile(r"import (?:os|sys|time|platform|socket|threading|posix)\.\*")
_SYSTEM_FILE = re.compile(
    r"\b(?:open|os|pathlib|glob)\b.*[\"']/(?:proc|sys|dev|etc|opt|home|root|run|var|tmp|work)\b"
)
_TEXT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_ASSIGNED = re.compile(r"[\w.]+(?:\[(?:''|\w+)\])? = ")
"""What a statement assigns to, such as `os.environ['KEY'] = `: it is written, not read."""
_TESTS = re.compile(r"(?:.*/)?(?:tests?/.*|test_[^/]*|conftest\.py)")
_LIMIT_ERRORS = frozenset({"RecursionError"})


class EnvironmentRead(Struct, frozen=True):
    """One place where code reads its environment: what it reads, such as `os.getcwd`, and where."""

    what: str
    path: str
    line: int


def environment_read(patch: bytes, task: Task, tree: Path) -> EnvironmentRead | None:
    """Return the first place where new code of a patch reads something of its environment that no new code of the
    gold patch reads; None if there is none, or if the patch cannot be parsed.

    Left out are tests, and scripts of the tree's root that nothing names.
    """
    try:
        reads = list(_reads(patch, tree))
        if not reads:
            return None
        gold = {read.what for read in _reads(task.gold_patch.encode(errors="surrogateescape"), tree)}
        contents = {file.path: file.after for file in changed_files(patch, tree).files}
    except DiffError:
        return None
    reads = [read for read in reads if read.what not in gold]
    unused = unused_scripts({read.path for read in reads}, task, tree, contents)
    return next((read for read in reads if read.path not in unused), None)


def _reads(patch: bytes, tree: Path) -> Iterator[EnvironmentRead]:
    for file in changed_files(patch, tree).files:
        if file.after is None or not file.path.endswith((".py", ".pyw")) or _TESTS.fullmatch(file.path):
            continue
        statements, names = _new_statements(file.before or b"", file.after)
        for statement in statements:
            for what in _read_by(statement, names):
                yield EnvironmentRead(what, file.path, statement.line)


def _new_statements(before: bytes, after: bytes) -> tuple[list[SourceStatement], Names]:
    """Return the statements after a patch that were not there before, at any place, and their file's names."""
    if len(after) > MAX_SOURCE_BYTES:
        return [], Names()
    try:
        old_source, new_source = ParsedSource(before), ParsedSource(after)
        old, new = old_source.read(new_source.segments()), new_source.read(old_source.segments())
    except RecursionError:
        return [], Names()
    unmatched = Counter(map(_key, old.statements))
    changed: list[SourceStatement] = []
    for statement in new.statements:
        if unmatched[_key(statement)] > 0:
            unmatched[_key(statement)] -= 1
        else:
            changed.append(statement)
    return changed, new.names


def _key(statement: SourceStatement) -> tuple[str, tuple[str, ...]]:
    """Return what makes two statements the same: the canonical text lacks what a `try` catches."""
    return statement.text, tuple(_caught(statement.node))


def _read_by(statement: SourceStatement, names: Names) -> Iterator[str]:
    yield from _caught(statement.node)
    if statement.text.startswith("import "):
        if match := _ALL_NAMES.search(statement.text):
            yield match[0].removeprefix("import ")
        return
    code = _TEXT.sub("''", statement.text)
    if assigned := _ASSIGNED.match(code):
        code = code[assigned.end() :]
    for match in _READ.finditer(code):
        if not names.is_variable(match[0].partition(".")[0]):
            yield match[0]
    for match in _METHOD.finditer(code):
        yield match[0].lstrip(".")
    if _SYSTEM_FILE.search(statement.text):
        yield "a file of the system"


def _caught(node: ast.stmt) -> Iterator[str]:
    """Yield the errors caught by a `try` that tell how much of a limit is left."""
    for handler in node.handlers if isinstance(node, ast.Try | ast.TryStar) else ():
        for name in ast.walk(handler.type) if handler.type is not None else ():
            if isinstance(name, ast.Name) and name.id in _LIMIT_ERRORS:
                yield name.id
