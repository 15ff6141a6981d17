"""Scratch files that agents leave behind: scripts of their own that no code names and no test runner collects.

A script that reproduces an issue, exits, or reads the repository's history is honest work and no part of the
solution. It is left out of the graded tree, so what stands in it can neither help a patch nor make it suspicious.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from understudy.grade.shadows import imported_modules
from understudy.types import PytestChecks, ScriptChecks, SuiteChecks, Task
from understudy.util.diffs import FileDiff

_SCRIPT = re.compile(r"[^/]+\.(?:py|sh)|([^/]+)/.*\.(?:py|sh)")
_REFERRING_SUFFIXES = (".py", ".pyi", ".cfg", ".toml", ".ini", ".in", ".txt", ".sh", ".yml", ".yaml", ".json")
_FILE_BYTES = 4 << 20
_NEXT_PART = re.compile(r"[\w-]+")
_PRUNED = frozenset({".git", "node_modules"})


def scratch_files(files: Iterable[FileDiff], task: Task, tree: Path, gold: frozenset[str]) -> frozenset[str]:
    """Return the paths of scratch files: new scripts, at the root of the tree or in a new directory there, that
    are not used.

    A script is used if the tree, the hidden tests, the task's commands or the rest of the patch mention its name.
    Empty if a check script decides, because it may run anything. `gold` are the paths of the gold patch, which are
    never scratch files.
    """
    if isinstance(task.checks, ScriptChecks):
        return frozenset()
    return _unreferenced_scripts(files, tree, gold, list(_hidden_texts(task)))


def idle_scripts(
    files: Iterable[FileDiff], task: Task, tree: Path, gold: frozenset[str], hidden: Path
) -> frozenset[str]:
    """Return the paths of what would be scratch files if no check script in the directory `hidden` decided.

    The script may run them all the same, by a pattern or a list of files.
    """
    texts = [path.read_bytes()[:_FILE_BYTES] for path in sorted(hidden.rglob("*")) if path.is_file()]
    return _unreferenced_scripts(
        files, tree, gold, [task.gold_patch, *(text.decode(errors="replace") for text in texts)]
    )


def _unreferenced_scripts(
    files: Iterable[FileDiff], tree: Path, gold: frozenset[str], hidden_texts: list[str]
) -> frozenset[str]:
    remaining: list[FileDiff] = []
    candidates: dict[str, FileDiff] = {}
    for file in files:
        path = os.fsdecode(file.new_path or min(file.paths))
        top = path.partition("/")[0]
        is_script = file.is_new and _SCRIPT.fullmatch(path) is not None and len(file.paths) == 1
        if is_script and path not in gold and not (tree / top).exists() and not _is_package_of(gold, top):
            candidates[path] = file
        else:
            remaining.append(file)
    if not candidates:
        return frozenset()
    texts = [*hidden_texts, *map(_added_text, remaining)]
    names = {_module_name(path) for path in candidates}
    referenced = _referenced_names(names, texts)
    if names - referenced:
        referenced |= _referenced_names(names - referenced, _tree_texts(tree), candidates)
    while True:  # what a file that counts names counts too
        used_paths = [path for path in candidates if _module_name(path) in referenced]
        reachable = referenced | _referenced_names(
            names - referenced, [_added_text(candidates[path]) for path in used_paths]
        )
        if reachable == referenced:
            return frozenset(candidates) - set(used_paths)
        referenced = reachable


def unused_scripts(
    paths: Iterable[str], task: Task, tree: Path, contents: Mapping[str, bytes | None]
) -> frozenset[str]:
    """Which of `paths` are scripts at the root of the tree that only people start, as `noxfile.py`: no Python
    file, setting, hidden test or command names them, so nothing of them runs when the task's tests do.

    `contents` are the files of the patch, whole. None where a check script decides, which may run anything, or
    where the hidden tests import nothing of the tree, so that it is not known how they reach it.
    """
    scripts = {path: path.removesuffix(".py") for path in paths if "/" not in path and path.endswith(".py")}
    if isinstance(task.checks, ScriptChecks) or not scripts:
        return frozenset()
    texts = {path: content.decode(errors="replace") for path, content in contents.items() if content is not None}
    imported = {name for text in _hidden_texts(task) for name in imported_modules(text)}
    directories = [tree, *(entry for entry in tree.iterdir() if entry.is_dir())]
    if not any(
        (directory / name).is_dir() or (directory / f"{name}.py").is_file()
        for name in imported
        for directory in directories
    ):
        return frozenset()
    unused = set(scripts)
    for path, text in (
        *(("", hidden_text) for hidden_text in _hidden_texts(task)),
        *texts.items(),
        *_tree_files(tree),
    ):
        # Settings and texts may say `noxfile.py` where they leave it alone; in code and commands that starts it.
        end = r"(?!\w)" if not path or path.endswith(".py") else r"(?!\w|\.py)"
        unused -= {
            script
            for script in unused
            if path != script and re.search(rf"(?<!\w){re.escape(scripts[script])}{end}", text)
        }
        if not unused:
            break
    return frozenset(unused)


def _module_name(path: str) -> str:
    """Return the module or the program name by which a path is known."""
    return path.partition("/")[0].rpartition(".")[0] or path.partition("/")[0]


def _is_package_of(gold: frozenset[str], top: str) -> bool:
    return any(path.partition("/")[0] == top for path in gold)


def _referenced_names(names: Iterable[str], texts: Iterable[str], paths: Collection[str] = ()) -> set[str]:
    """Return the names that are imported, or stand in quotes or in a path, in any of the texts.

    With `paths`, the files with these names, a path to something else in the same directory names none of them.
    """
    patterns = {name: _reference(name) for name in names}
    matched: set[str] = set()
    for text in texts:
        matched |= {
            name
            for name, pattern in patterns.items()
            if name not in matched
            and name in text
            and any(_may_refer_to(match, paths, name) for match in pattern.finditer(text))
        }
        if len(matched) == len(patterns):
            break
    return matched


def _may_refer_to(match: re.Match[str], paths: Collection[str], name: str) -> bool:
    """Return whether a match may name one of the paths: not if the path in its text continues to another file."""
    next_part = _NEXT_PART.match(match.string, match.end()) if match[0].endswith("/") else None
    return not paths or next_part is None or any(path.startswith(f"{name}/{next_part[0]}") for path in paths)


def _reference(name: str) -> re.Pattern[str]:
    word = re.escape(name)
    # An import stands at the beginning of a statement or of a text: prose says "from scratch".
    imports = rf"import\s[^\n#]*(?<!\w){word}(?!\w)|from\s+\.*{word}(?:\.[\w.]*)?\s+import\b"
    return re.compile(
        rf"(?:^|[;:\"'({{])\s*(?:{imports})|[\"'/]{word}(?:[\"'/.:]|$)|(?<!\w){word}\.(?:py|sh)\b|"
        rf"^\s*{word}\s*(?:=|$)",
        re.MULTILINE,
    )


def _hidden_texts(task: Task) -> Iterator[str]:
    match task.checks:
        case PytestChecks(files=files):
            yield from files.values()
        case SuiteChecks() as checks:
            yield from (checks.test_patch, checks.before, checks.install, checks.command, *checks.files)
        case _:
            pass
    yield task.gold_patch


def _added_text(file: FileDiff) -> str:
    lines = (line[1:] for hunk in file.hunks for line in hunk.lines if line[:1] in (b"+", b" "))
    return b"\n".join(lines).decode(errors="replace")


def _tree_texts(tree: Path) -> Iterator[str]:
    return (text for _, text in _tree_files(tree))


def _tree_files(tree: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of a tree that may name others, as their paths in it and their texts."""
    for folder, directories, names in os.walk(tree):
        directories[:] = [name for name in directories if name not in _PRUNED]
        for name in names:
            path = Path(folder, name)
            if name.endswith(_REFERRING_SUFFIXES) and path.is_file() and not path.is_symlink():
                with path.open("rb") as file:
                    yield path.relative_to(tree).as_posix(), file.read(_FILE_BYTES).decode(errors="replace")
