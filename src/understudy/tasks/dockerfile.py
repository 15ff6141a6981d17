"""The subset of Dockerfiles that local sandboxes support: parses it, and executes its steps on a tree.

Everything else is an error that names the line.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import posixpath
import re
import shlex
import shutil
import stat
import tarfile
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath

from msgspec import Struct, field

from understudy.errors import TaskError
from understudy.sandbox.base import Completed, Sandboxes, SandboxLimits, SandboxSpec
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.materialise import extract, read_text
from understudy.util.files import write_remedy

_UNSUPPORTED_HINT = "unsupported in a local sandbox; use --sandbox docker"
_SHOWN = 120  # characters of an instruction that an error shows


class CopyStep(Struct, frozen=True):
    """COPY or ADD: patterns of the build context, and the absolute target (with `/` at its end: a directory to
    copy into).
    """

    line: int
    sources: tuple[str, ...]
    target: str


class RunStep(Struct, frozen=True):
    """RUN: the command, with its working directory and variables."""

    line: int
    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]


class WorkdirStep(Struct, frozen=True):
    """WORKDIR: the directory is created if it is missing."""

    line: int
    path: str


Step = CopyStep | RunStep | WorkdirStep


class DockerfileRecipe(Struct):
    """A parsed Dockerfile at `path`: its base image, its last WORKDIR, all variables, and its steps."""

    path: Path
    image: str = ""
    workdir: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    steps: list[Step] = field(default_factory=list[Step])


def read_dockerfile(path: Path) -> DockerfileRecipe:
    """Parse a Dockerfile. Raises TaskError, naming file and line, for everything unsupported."""
    recipe = DockerfileRecipe(path)
    for line, instruction in _instructions(read_text(path, "a Dockerfile")):
        word, _, arguments = instruction.partition(" ")
        handler = _HANDLERS.get(word.upper())
        try:
            if handler is None:
                raise _UnsupportedInstruction(
                    f"unknown instruction {word.upper()}: expected one of {', '.join(_HANDLERS)}; others are "
                    f"{_UNSUPPORTED_HINT}"
                )
            if not recipe.image and word.upper() != "FROM":
                raise _UnsupportedInstruction(
                    f"{word.upper()} before FROM, expected FROM as the first instruction; move it"
                )
            handler(recipe, line, arguments.strip())
        except _UnsupportedInstruction as refusal:
            raise TaskError(f"{path}:{line}: {refusal}") from refusal
    if not recipe.image:
        raise TaskError(f"{path}: has no instruction; expected FROM IMAGE as the first one: add it")
    if recipe.workdir in ("", "/"):
        raise TaskError(
            f"{path}: WORKDIR is {recipe.workdir or 'missing'}; expected a directory below /, whose content "
            "becomes the task's tree: add a line such as WORKDIR /app"
        )
    _check_paths(recipe)
    return recipe


class _UnsupportedInstruction(Exception):
    """An unsupported instruction; becomes a TaskError with file and line."""


def _instructions(text: str) -> list[tuple[int, str]]:
    """Return each instruction joined to one line, with the number of its first line; comments are removed."""
    instructions: list[tuple[int, str]] = []
    parts: list[str] = []
    first = 0
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if stripped.startswith("#") or not stripped:
            continue
        first = first if parts else number
        open_ended = stripped.endswith("\\")
        parts.append(stripped[:-1].rstrip() if open_ended else stripped)
        if not open_ended:
            instructions.append((first, re.sub(r"\t", " ", " ".join(parts), count=1)))
            parts = []
    if parts:
        instructions.append((first, " ".join(parts)))
    return instructions


def _from(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    words = [word for word in arguments.split() if not word.startswith("--platform=")]
    if recipe.image:
        raise _UnsupportedInstruction(f"a second FROM: multi-stage builds are {_UNSUPPORTED_HINT}")
    if not words or words[0].startswith("-") or "$" in words[0]:
        raise _UnsupportedInstruction(
            f"FROM {arguments[:_SHOWN]}: expected FROM IMAGE, without variables and options other than "
            "--platform; write the image's name out"
        )
    recipe.image = words[0]


def _workdir(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    paths = _arguments(recipe, arguments)
    if len(paths) != 1 or not paths[0]:
        raise _UnsupportedInstruction(
            f"WORKDIR {arguments[:_SHOWN]}: expected one path, got {len([path for path in paths if path])}; give "
            "one, in quotes if it contains spaces"
        )
    recipe.workdir = posixpath.normpath(posixpath.join(recipe.workdir or "/", paths[0]))
    recipe.steps.append(WorkdirStep(line, recipe.workdir))


def _env(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    name, space, value = arguments.partition(" ")
    old_form = space and "=" not in name
    pairs = (
        [(name, " ", value.strip())]
        if old_form
        else [word.partition("=") for word in _arguments(recipe, arguments)]
    )
    if not all(name and separator for name, separator, _ in pairs):
        raise _UnsupportedInstruction(
            f"ENV {arguments[:_SHOWN]}: expected NAME=value; write it like this, with a value that has spaces in "
            "quotes"
        )
    for name, _, value in pairs:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name in ("PATH", "HOME"):
            raise _UnsupportedInstruction(
                f"ENV {name[:_SHOWN]}: expected a name of letters, digits and _, other than PATH and HOME; others "
                f"are {_UNSUPPORTED_HINT}"
            )
        recipe.env[name] = value


def _copy(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    words = _json_arguments(arguments) if arguments.startswith("[") else _arguments(recipe, arguments)
    if words and words[0].startswith("--"):
        raise _UnsupportedInstruction(
            f"{words[0][:_SHOWN]}: options of COPY and ADD are {_UNSUPPORTED_HINT}, or remove the option"
        )
    *sources, target = words or [""]
    if not sources or any("<<" in source for source in sources):
        raise _UnsupportedInstruction(
            f"COPY or ADD {arguments[:_SHOWN]}: expected at least one source and a target, and no here-document: "
            "put the content in a file beside the Dockerfile and copy that"
        )
    for source in sources:
        if re.match(r"[a-z][a-z0-9+.-]*://|git@", source):
            raise _UnsupportedInstruction(
                f"{source[:_SHOWN]}: URLs are {_UNSUPPORTED_HINT}, or download it beforehand and copy the file"
            )
        if ".." in source.split("/"):
            raise _UnsupportedInstruction(
                f"{source[:_SHOWN]}: is outside of the build context, the directory of the Dockerfile; copy it "
                "into that directory, and give its path there"
            )
    slash = "/" if target.endswith(("/", "/.")) or target == "." or len(sources) > 1 else ""
    absolute = posixpath.normpath(posixpath.join(recipe.workdir or "/", target))
    recipe.steps.append(CopyStep(line, tuple(sources), absolute.rstrip("/") + slash))


def _add(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    if re.search(r"\.(tar|tgz|tbz2?|txz|zip|gz|bz2|xz|zst)\b", arguments):
        raise _UnsupportedInstruction(
            f"ADD {arguments[:_SHOWN]}: archives are {_UNSUPPORTED_HINT}, or unpack it beforehand and use COPY"
        )
    _copy(recipe, line, arguments)


def _run(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    if not arguments:
        raise _UnsupportedInstruction("RUN: expected a command, got none; add one, or remove the line")
    if arguments.startswith("--"):
        option = arguments.split(" ")[0][:_SHOWN]
        raise _UnsupportedInstruction(
            f"RUN {option}: options of RUN are {_UNSUPPORTED_HINT}, or remove the option"
        )
    if re.search(r"<<-?\s*['\"]?[A-Za-z_]", arguments):
        raise _UnsupportedInstruction(
            f"RUN {arguments[:_SHOWN]}: a here-document is {_UNSUPPORTED_HINT}, or copy a script and run it"
        )
    argv = tuple(_json_arguments(arguments)) if arguments.startswith("[") else ("/bin/sh", "-c", arguments)
    recipe.steps.append(RunStep(line, argv, recipe.workdir or "/", dict(recipe.env)))


def _no_effect(recipe: DockerfileRecipe, line: int, arguments: str) -> None:
    """Ignore an instruction that does not change the tree: metadata, or what starts in a container of the
    image.
    """


_HANDLERS: dict[str, Callable[[DockerfileRecipe, int, str], None]] = {
    "FROM": _from,
    "WORKDIR": _workdir,
    "COPY": _copy,
    "ADD": _add,
    "ENV": _env,
    "RUN": _run,
    **dict.fromkeys(("LABEL", "MAINTAINER", "EXPOSE", "CMD", "STOPSIGNAL"), _no_effect),
}


def _arguments(recipe: DockerfileRecipe, text: str) -> list[str]:
    """Return the arguments of an instruction: unquoted, with variables of earlier ENV lines substituted."""
    if "$" in text and ("'" in text or "\\$" in text):
        raise _UnsupportedInstruction(
            f"{text[:_SHOWN]}: a quoted or escaped dollar sign is {_UNSUPPORTED_HINT}, or write the value without "
            "$"
        )

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in recipe.env:
            raise _UnsupportedInstruction(
                f"${name[:_SHOWN]}: not set by an earlier ENV; other variables, such as ARG, are "
                f"{_UNSUPPORTED_HINT}, or set it with ENV"
            )
        return recipe.env[name]

    try:
        tokens = shlex.split(text, posix=True)
    except ValueError as error:
        raise _UnsupportedInstruction(
            f"{text[:_SHOWN]}: invalid quotes: {error}; expected pairs of quotes: close or escape the open one"
        ) from error
    return [re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, word) for word in tokens]


def _json_arguments(text: str) -> list[str]:
    try:
        tokens: object = json.loads(text)
    except ValueError:
        tokens = None
    if not isinstance(tokens, list) or not all(isinstance(word, str) for word in tokens):  # pyright: ignore[reportUnknownVariableType]
        raise _UnsupportedInstruction(
            f"{text[:_SHOWN]}: begins with [ and is not a JSON array of strings; expected one, such as "
            '["pip", "install", "."]: correct it, or, in a RUN, write the shell\'s `test` in place of ['
        )
    return [str(word) for word in tokens]  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType]


def _check_paths(recipe: DockerfileRecipe) -> None:
    """Raise TaskError when a step writes outside of the last WORKDIR, because only that becomes the
    task's tree.
    """
    for step in recipe.steps:
        if isinstance(step, WorkdirStep):
            continue  # such a directory is empty: it is on the way, or unused after a later WORKDIR
        directory, action = (step.target, "COPY to") if isinstance(step, CopyStep) else (step.cwd, "RUN in")
        if posixpath.commonpath([directory, recipe.workdir]) != recipe.workdir:
            outside = f"{action} {directory}, outside the last WORKDIR {recipe.workdir}"
            raise TaskError(f"{recipe.path}:{step.line}: {outside}: {_UNSUPPORTED_HINT}")


# --- executing a recipe -------------------------------------------------------------------------------

_ARCHIVE_BYTES = 256 << 20


async def build_tree(
    recipe: DockerfileRecipe, tree: Path, sandboxes: Sandboxes, environment: TaskEnvironment, *, timeout_s: float
) -> None:
    """Build the directory `tree` as the recipe says, with the Dockerfile's own directory as build context.

    A RUN has no network and keeps only what it writes to the working directory; each may take `timeout_s`. Raises
    TaskError, naming file and line, when a step fails.
    """
    await asyncio.to_thread(tree.mkdir)
    for _, group in groupby(recipe.steps, key=type):
        steps = list(group)
        if runs := [step for step in steps if isinstance(step, RunStep)]:
            await _execute_runs(runs, recipe, tree, sandboxes, environment, timeout_s)
        for step in steps:
            if isinstance(step, CopyStep):
                await asyncio.to_thread(_apply_copy, step, recipe, tree)
            elif isinstance(step, WorkdirStep) and PurePosixPath(step.path).is_relative_to(recipe.workdir):
                directory = _inside(tree, recipe, step.path)
                await asyncio.to_thread(_make_directory, directory, tree, f"{recipe.path}:{step.line}")


def copy_entry(source: Path, target: Path) -> None:
    """Copy a file, link or directory of the host to `target`; an existing file is replaced, directories are
    merged.

    Links are copied as links and never followed. Raises TaskError for special files.
    """
    mode = source.lstat().st_mode
    existing_mode = target.lstat().st_mode if os.path.lexists(target) else None
    if existing_mode is not None and not (stat.S_ISDIR(mode) and stat.S_ISDIR(existing_mode)):
        shutil.rmtree(target) if stat.S_ISDIR(existing_mode) else target.unlink()
    if stat.S_ISLNK(mode):
        target.symlink_to(source.readlink())
    elif stat.S_ISDIR(mode):
        target.mkdir(exist_ok=True)
        for entry in sorted(source.iterdir()):
            copy_entry(entry, target / entry.name)
    elif stat.S_ISREG(mode):
        shutil.copyfile(source, target)
        target.chmod(0o755 if mode & 0o100 else 0o644)
    else:
        raise TaskError(
            f"{source}: is a special file; expected a file, directory or link: remove it from the task"
        )


def describe_end(completed: Completed) -> str:
    """Return how a command ended, with the end of its output."""
    how = "did not end in time" if completed.timed_out else f"ended with exit code {completed.exit_code}"
    tail = (completed.stdout + completed.stderr)[-2000:].decode(errors="replace").strip()
    return f"{how}; its output ends with:\n{tail}" if tail else f"{how}, without output"


def _inside(tree: Path, recipe: DockerfileRecipe, path: str) -> Path:
    return tree / PurePosixPath(path).relative_to(recipe.workdir)


def _make_directory(path: Path, tree: Path, where: str) -> None:
    """Create a directory below the tree. Raises TaskError when a link on the way leads out of it."""
    if not path.resolve().is_relative_to(tree.resolve()):
        raise TaskError(
            f"{where}: {path.relative_to(tree)} leads outside of the working directory through a symbolic link; "
            "expected a path inside: use a target that is not behind the link, or do not copy the link"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TaskError(
            f"{where}: the directory {path.relative_to(tree)} cannot be created: {error.strerror}; "
            f"{write_remedy(error, 'use another target')}"
        ) from error


def _apply_copy(step: CopyStep, recipe: DockerfileRecipe, tree: Path) -> None:
    where = f"{recipe.path}:{step.line}"
    context = recipe.path.parent.resolve()
    if (context / ".dockerignore").exists():
        raise TaskError(
            f"{where}: {context} has a .dockerignore; it is {_UNSUPPORTED_HINT}, or remove it and the files that "
            "it excludes"
        )
    target = _inside(tree, recipe, step.target)
    for pattern in step.sources:
        relative = pattern.strip("/") or "."
        try:
            matches = [context] if relative == "." else sorted(context.glob(relative))
        except ValueError as error:
            raise TaskError(
                f"{where}: invalid source {pattern!r}: {error}; give a path or pattern relative to {context}"
            ) from error
        if not matches:
            raise TaskError(
                f"{where}: {pattern[:_SHOWN]!r} matches no file in {context}; expected at least one: correct the "
                "path or pattern, or add the file there"
            )
        for source in matches:
            real = source.resolve()
            if not real.is_relative_to(context):
                raise TaskError(f"{where}: {source} is outside of the build context; copy it into {context}")
            into = step.target.endswith("/") or len(matches) > 1 or target.is_dir()
            if real.is_dir():
                _make_directory(target, tree, where)
                for entry in sorted(real.iterdir()):
                    copy_entry(entry, target / entry.name)
            else:
                destination = target / source.name if into else target
                _make_directory(destination.parent, tree, where)
                copy_entry(real, destination)


async def _execute_runs(
    runs: Sequence[RunStep],
    recipe: DockerfileRecipe,
    tree: Path,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    timeout_s: float,
) -> None:
    await asyncio.to_thread(sandboxes.prepare_tree, tree)
    sandbox = await sandboxes.open(
        SandboxSpec(
            tree=tree,
            workdir=recipe.workdir,
            mounts=environment.mounts,
            env=environment.env,
            path_prefixes=environment.path_prefixes,
            limits=SandboxLimits(output_bytes=_ARCHIVE_BYTES),
        )
    )
    try:
        for run in runs:
            completed = await sandbox.run(run.argv, timeout_s=timeout_s, env=run.env, cwd=run.cwd)
            if completed.exit_code != 0:
                raise TaskError(
                    f"{recipe.path}:{run.line}: RUN {describe_end(completed)}\nHere it has no network and may "
                    f"write to {recipe.workdir}, its home and /tmp only; if it needs more, run it with "
                    f"--sandbox docker"
                )
        argv = ["tar", "-c", "-f", "-", "--exclude=__pycache__", "--exclude=./.git", "."]
        packed = await sandbox.run(argv, timeout_s=timeout_s, cwd=recipe.workdir)
    finally:
        await sandbox.close()
    where = f"{recipe.path}:{runs[-1].line}"
    if packed.truncated:
        raise TaskError(
            f"{where}: after this RUN, {recipe.workdir} has too many bytes; expected at most "
            f"{_ARCHIVE_BYTES >> 20} MiB: remove build output and caches in the RUN, or use --sandbox docker"
        )
    if packed.exit_code != 0:
        raise TaskError(
            f"{where}: the files of {recipe.workdir} after this RUN cannot be read; expected files that their "
            f"owner can read: correct the RUN, for example with chmod -R u+rX. tar {describe_end(packed)}"
        )
    await asyncio.to_thread(_unpack, packed.stdout, tree, where)


def _unpack(archive: bytes, tree: Path, where: str) -> None:
    shutil.rmtree(tree)
    tree.mkdir()
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                extract(tar, member, member.name, tree)
    except (tarfile.TarError, KeyError) as error:
        raise TaskError(
            f"{where}: the files written by RUN cannot be used: {error}. Correct the RUN, or remove that entry at "
            "its end with rm"
        ) from error
    except OSError as error:
        raise TaskError(
            f"{where}: the files written by RUN cannot be unpacked on this machine: {error}; check its disk "
            "space, then run the same command again"
        ) from error
