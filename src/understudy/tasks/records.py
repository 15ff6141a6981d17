"""Task records: one JSON object per line."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import msgspec.inspect
from msgspec import Struct
from msgspec.structs import replace

from understudy.config import ANY_DIRECTORY, any_directory_allowed, cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.types import Directory, ImageTree, PytestChecks, ScriptChecks, Sdist, SuiteChecks, Task
from understudy.util.files import atomic_write, write_remedy
from understudy.util.text import closest
from understudy.util.validation import describe_invalid, shown

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,149}")

_PINNED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+( --hash=sha256:[0-9a-f]{64})+")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SHOWN = 200  # characters of a path in an error
_RESERVED_VARIABLES = ("PATH", "HOME")
_SYSTEM_DIRECTORIES = frozenset(
    ("", "bin", "boot", "dev", "etc", "lib", "lib32", "lib64", "libx32", "proc", "run", "sbin", "sys", "usr")
)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _is_inside(path: str) -> bool:
    return bool(path) and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path


def _commands(checks: SuiteChecks) -> str:
    return checks.activate + checks.before + checks.install + checks.command


# Rules beyond the types: the key, a test, and what is expected.
_RULES: tuple[tuple[str, Callable[[Task], bool], str], ...] = (
    (
        "instance_id",
        lambda task: bool(_ID.fullmatch(task.instance_id)),
        "letters, digits and ._+- only, at most 150, because it names files",
    ),
    (
        "instruction",
        lambda task: bool(task.instruction.strip()) and "\0" not in task.instruction,
        "a text for the agent",
    ),
    ("gold_patch", lambda task: bool(task.gold_patch.strip()), "a unified diff that solves the task"),
    (
        "workdir",
        lambda task: (
            task.workdir.startswith("/")
            and ".." not in task.workdir.split("/")
            and task.workdir.strip("/").split("/")[0] not in _SYSTEM_DIRECTORIES
        ),
        "an absolute path below / and outside of the system's directories, as /workspace",
    ),
    (
        "env",
        lambda task: all(
            _VARIABLE.fullmatch(name) and name not in _RESERVED_VARIABLES and "\0" not in value
            for name, value in task.env.items()
        ),
        "names of variables other than PATH and HOME, with values without NUL",
    ),
    (
        "checks.fail_to_pass",
        lambda task: isinstance(task.checks, ScriptChecks) or bool(task.checks.fail_to_pass),
        "at least one test id",
    ),
    (
        "checks.command",
        lambda task: isinstance(task.checks, PytestChecks) or bool(task.checks.command),
        "a command",
    ),
    (
        "checks",
        lambda task: not isinstance(task.checks, SuiteChecks) or "\0" not in _commands(task.checks),
        "commands without NUL",
    ),
    (
        "checks.files",
        lambda task: not isinstance(task.checks, SuiteChecks) or all(map(_is_inside, task.checks.files)),
        "paths inside the tree",
    ),
    (
        "packages",
        lambda task: not task.packages or (not task.image and all(map(_PINNED.fullmatch, task.packages))),
        "pinned requirements with hashes, as `name==1.0 --hash=sha256:…`, for a task without an image",
    ),
    (
        "image",
        lambda task: bool(task.image) or not isinstance(task.source, ImageTree),
        "the container image that holds the source",
    ),
    ("checks.timeout_s", lambda task: _is_seconds(task.checks.timeout_s), "a number of seconds above 0"),
    (
        "meta.agent_timeout_s",
        lambda task: _is_seconds(task.meta.get("agent_timeout_s", 1.0)),
        "a number of seconds above 0",
    ),
    (
        "source.sha256",
        lambda task: not isinstance(task.source, Sdist) or bool(re.fullmatch("[0-9a-f]{64}", task.source.sha256)),
        "64 lower-case hex digits",
    ),
)


def check(task: Task, where: str) -> None:
    """Raise TaskError, naming `where` and the key, when a task violates a rule that its types cannot express."""
    for key, is_met, expected in _RULES:
        if not is_met(task):
            raise TaskError(
                f"{where}: {key}: got {_shown(task, key)}, expected {expected}; correct it in the task"
            )


def _shown(task: Task, key: str) -> str:
    """Return the beginning of the value of a key with dots in it."""
    value: Any = task
    for name in key.split("."):
        value = cast(dict[str, Any], value).get(name) if isinstance(value, dict) else getattr(value, name, None)
    return shown(sorted(value) if key == "env" else value)  # the values of variables may be secret


def record(data: object, where: str, base: Path) -> Task:
    """Return the task of a decoded record; relative directories are relative to `base`.

    Raises TaskError, with `where` and the key, for anything malformed, and for a directory that is not below
    `base`: the author of a record must not choose which files of this machine get into a sandbox.
    """
    try:
        task = msgspec.convert(data, Task)
    except (msgspec.ValidationError, RecursionError) as error:
        problem = _unknown_key(data, msgspec.inspect.type_info(Task))
        problem = problem or f"{describe_invalid(error, data, Task)}; correct this key"
        raise TaskError(f"{where}: invalid task record: {problem}") from error
    check(task, where)
    checks, source = task.checks, task.source
    outside: list[str] = []
    if isinstance(source, Directory):
        source = _directory(source, f"{where}: source.path", base, outside)
    if isinstance(checks, ScriptChecks) and isinstance(checks.source, Directory):
        checks = replace(checks, source=_directory(checks.source, f"{where}: checks.source.path", base, outside))
    task = replace(task, source=source, checks=checks)
    if outside and not any_directory_allowed() and not _remembered_file(task).is_file():
        raise TaskError(
            f"{outside[0]} is not below {base}, the directory of the task file; move the files there, "
            f"or set {ANY_DIRECTORY}=1 if you trust whoever wrote the record with every file of this machine"
        )
    return task


def _unknown_key(data: object, expected: Any, path: str = "") -> str | None:
    """Return what is wrong with the first key of a record that its type does not have; None if it has all."""
    if not isinstance(data, dict):
        return None
    record: dict[str, Any] = data  # pyright: ignore[reportUnknownVariableType]
    if isinstance(expected, msgspec.inspect.UnionType):
        structs: list[Any] = [type for type in expected.types if isinstance(type, msgspec.inspect.StructType)]
        expected = next((struct for struct in structs if struct.tag == record.get(struct.tag_field)), None)
    if not isinstance(expected, msgspec.inspect.StructType):
        return None
    types = {field.encode_name: field.type for field in expected.fields}
    keys = [*([expected.tag_field] if expected.tag_field else []), *types]
    for key, value in record.items():
        if key not in keys:
            similar = closest(key[:100], keys)
            remedy = (
                f"did you mean {similar!r}? Correct it" if similar else f"remove it, or give {', '.join(keys)}"
            )
            return f"unknown key {path + key[:100]!r}; {remedy}"
        if key in types and (problem := _unknown_key(value, types[key], f"{path}{key}.")):
            return problem
    return None


def _directory(source: Directory, where: str, base: Path, outside: list[str]) -> Directory:
    """Return a record's directory as an absolute path; if it is not below `base`, with links followed, it is added
    to `outside`.
    """
    path = base / source.path
    try:
        if not path.resolve().is_relative_to(base.resolve()):
            outside.append(f"{where}: {source.path!r}")
    except (OSError, ValueError, RuntimeError) as error:  # a circle of links, or a NUL byte
        raise TaskError(
            f"{where}: {source.path[:_SHOWN]!r} is not a usable path: {error}; give the path of a directory, "
            "without NUL and without links that lead in a circle"
        ) from error
    return Directory(str(path))


def _remembered_file(task: Task) -> Path:
    return cache_dir() / "records" / task_digest(task)


def remember(tasks: Iterable[Task]) -> None:
    """Remember tasks that this user has run, so that their records are accepted in files at any path.

    A record is recognised by its digest, which includes its directories, so accepting it again gives access to
    nothing new. Raises ConfigError.
    """
    for task in tasks:
        checked = task.checks.source if isinstance(task.checks, ScriptChecks) else None
        if isinstance(task.source, Directory) or isinstance(checked, Directory):
            file = _remembered_file(task)
            try:
                file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                file.touch(mode=0o600)
            except OSError as error:
                raise ConfigError(
                    f"{file}: cannot be written: {error.strerror}; "
                    f"{write_remedy(error, 'set UNDERSTUDY_CACHE to a directory that you can write')}"
                ) from error


def dump(tasks: Iterable[Task], path: Path) -> None:
    """Write tasks as JSONL, atomically. Raises ConfigError."""
    try:
        content = b"".join(msgspec.json.encode(task) + b"\n" for task in tasks)
        atomic_write(path, content, fsync=True, mode=0o644)
    except OSError as error:
        raise ConfigError(
            f"{path}: tasks cannot be written: {error.strerror}; {write_remedy(error, 'choose another path')}"
        ) from error


class RefusedRow(Struct, frozen=True):
    """A row that cannot become a task: its id (may be ""), its location, and the reason, without the location."""

    instance_id: str
    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.instance_id + ': ' if self.instance_id else ''}{self.reason}"


class LoadedTasks(Struct, frozen=True):
    """The tasks of a source, in its order, and the refused rows; `unknown` are requested ids that do not exist."""

    tasks: list[Task]
    refused: tuple[RefusedRow, ...] = ()
    unknown: tuple[str, ...] = ()

    def report(self, max_reasons: int = 8) -> list[str]:
        """Return lines of text that count the refused rows by reason, with an example of each."""
        return summarise_refusals(self.refused, max_reasons)


def summarise_refusals(refused: Sequence[RefusedRow], max_reasons: int = 8) -> list[str]:
    """Return counts of refusals by reason, most frequent first, with the location of the first one."""
    counts = Counter(refusal.reason for refusal in refused)
    first = {refusal.reason: refusal for refusal in reversed(refused)}
    lines: list[str] = []
    for reason, count in counts.most_common(max_reasons):
        rows = f"{count} rows, the first at " if count > 1 else f"{count} row, "
        example = f" ({first[reason].instance_id})" if first[reason].instance_id else ""
        lines.append(f"refused {rows}{first[reason].where}{example}: {reason}")
    if unshown := len(counts) - len(lines):
        lines.append(f"and rows refused for {unshown} other reasons")
    return lines


def task_digest(task: Task) -> str:
    """Return the SHA-256 of a task's record, in hex: the version of the task that a verdict refers to."""
    return hashlib.sha256(msgspec.json.encode(task, order="deterministic")).hexdigest()
