"""Tasks in folders: Harbor's layout, and a simpler one with `tree/` and `gold.patch`.

task.toml              settings (may be absent in the simple layout)
instruction.md         what the agent is told
environment/           Dockerfile and build context       or  tree/: the files themselves
tests/test.sh          decides; its directory is /tests
solution/solve.sh      solves the task                    or  gold.patch: a unified diff
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import shutil
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, TaskError
from understudy.sandbox.base import Mount, Sandboxes
from understudy.tasks import dockerfile, records
from understudy.tasks.dockerfile import build_tree, copy_entry, describe_end
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import GIT_MOUNT, git_program, prepare, sandbox_spec
from understudy.types import Directory, ImageTree, ScriptChecks, Task
from understudy.util.files import atomic_write

_FORMAT = "1"  # part of every digest: a change of what is made here remakes it
_SOLUTION = "/solution"
_BUILT = "understudy/task"
_DEFAULT_WORKDIR = "/workspace"
_MAX_FILES = 100_000

_TAKE_DIFF = r"""
set -eu
work=$1 git=$2 pristine=$3
scratch=$(mktemp -d)
mkdir "$scratch/objects"
cp "$pristine/index" "$scratch/index"
export GIT_DIR="$pristine" GIT_WORK_TREE="$work" GIT_INDEX_FILE="$scratch/index"
export GIT_OBJECT_DIRECTORY="$scratch/objects" GIT_ALTERNATE_OBJECT_DIRECTORIES="$pristine/objects"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null HOME=/nonexistent
cd "$work"
"$git" -c core.excludesFile="$pristine/info/ignored" add --all
"$git" diff --cached --binary --full-index --no-renames --no-color --src-prefix=a/ --dst-prefix=b/ HEAD --
"""


class _VerifierSection(Struct, frozen=True):
    timeout_sec: float = 300.0
    env: dict[str, str] = {}
    environment_mode: str | None = None


class _AgentSection(Struct, frozen=True):
    timeout_sec: float | None = None


class _EnvironmentSection(Struct, frozen=True):
    build_timeout_sec: float = 600.0
    env: dict[str, str] = {}
    docker_image: str | None = None
    gpus: int | None = None
    mcp_servers: list[Any] = []


class _SolutionSection(Struct, frozen=True):
    env: dict[str, str] = {}


class _TaskSection(Struct, frozen=True):
    name: str = ""


class _FolderSettings(Struct, frozen=True):
    """The keys of task.toml that decide something here; all others are for people or other runners."""

    task: _TaskSection = _TaskSection()
    metadata: dict[str, Any] = {}
    verifier: _VerifierSection = _VerifierSection()
    agent: _AgentSection = _AgentSection()
    environment: _EnvironmentSection = _EnvironmentSection()
    solution: _SolutionSection = _SolutionSection()
    steps: list[Any] = []


class _TaskFolder(Struct, frozen=True):
    """A folder as it was read; `cached` is its task when it was loaded before."""

    path: Path
    settings: _FolderSettings
    instruction: str
    home: Path
    cached: Task | None


def is_task(path: Path) -> bool:
    """Whether a directory means to be one task."""
    return (path / "task.toml").is_file() or (path / "instruction.md").is_file()


async def load_folder(folder: Path, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path) -> Task:
    """The task of a folder. Its tree is built, and its solution run, in sandboxes on the first call only.

    Raises TaskError, naming the file, for whatever is missing, malformed or asks for more than a sandbox has.
    """
    read = await asyncio.to_thread(_read_folder, folder, sandboxes, cache)
    folder, settings, home = read.path, read.settings, read.home
    image = "" if sandboxes.host_programs else await asyncio.to_thread(_image, folder, settings, sandboxes)
    if read.cached:
        return read.cached
    if image:
        await _keep_tests(folder, home)
        workdir, env = await asyncio.to_thread(_workdir, folder, image, sandboxes), dict[str, str]()
    else:
        workdir, env = await _make_home(folder, settings, home, sandboxes, environment)
    task = Task(
        instance_id=instance_id(folder),
        repo=settings.task.name or folder.name,
        instruction=read.instruction,
        source=ImageTree() if image else Directory(str(home / "tree")),
        image=image,
        checks=ScriptChecks(
            source=Directory(str(home / "tests")),
            command=(*_env_command(settings.verifier.env), "bash", "/tests/test.sh"),
            timeout_s=settings.verifier.timeout_sec,
        ),
        gold_patch="",
        workdir=workdir,
        env={**env, **settings.environment.env},
        meta=_meta(settings),
    )
    gold = await _gold(folder, settings, task, sandboxes, environment, cache)
    task = msgspec.structs.replace(task, gold_patch=gold)
    records.check(task, str(folder))
    await asyncio.to_thread(_remember, task, home)
    return task


def _image(folder: Path, settings: _FolderSettings, sandboxes: Sandboxes) -> str:
    """The image of a folder, built by the engine unless it is named; "" for a folder with `tree/`."""
    if named := settings.environment.docker_image:
        return named
    context = folder / "environment"
    if not (context / "Dockerfile").is_file():
        return ""
    name = f"{_BUILT}:{_digest(context, _FORMAT)}"
    sandboxes.build_image(context, name, timeout_s=settings.environment.build_timeout_sec)
    return name


def _workdir(folder: Path, image: str, sandboxes: Sandboxes) -> str:
    workdir = sandboxes.workdir_of(image)
    if workdir in ("", "/"):
        raise TaskError(
            f"{folder}: its image {image} has no WORKDIR below /, whose content is the task's tree; set one"
        )
    return workdir


async def _keep_tests(folder: Path, home: Path) -> None:
    """Create `home` with `tests` unless it exists."""
    _text(folder / "tests" / "test.sh", "the script that decides")
    aside = await asyncio.to_thread(_aside, home)
    if aside is None:
        return
    try:
        await asyncio.to_thread(copy_entry, folder / "tests", aside / "tests")
        await asyncio.to_thread(_settle, aside, home)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


async def _make_home(
    folder: Path, settings: _FolderSettings, home: Path, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[str, dict[str, str]]:
    """Create `home` with `tree` and `tests` unless it exists; returns the working directory and variables."""
    recipe_path, tree = folder / "environment" / "Dockerfile", folder / "tree"
    if recipe_path.is_file() == tree.is_dir():
        raise TaskError(f"{folder}: expected either environment/Dockerfile or tree/, one of them")
    _text(folder / "tests" / "test.sh", "the script that decides")
    recipe = await asyncio.to_thread(dockerfile.read_dockerfile, recipe_path) if recipe_path.is_file() else None
    result = (recipe.workdir, recipe.env) if recipe else (_DEFAULT_WORKDIR, dict[str, str]())
    aside = await asyncio.to_thread(_aside, home)
    if aside is None:
        return result
    try:
        if recipe:
            await build_tree(
                recipe,
                recipe_path,
                aside / "tree",
                sandboxes=sandboxes,
                environment=environment,
                timeout_s=settings.environment.build_timeout_sec,
            )
        else:
            await asyncio.to_thread(copy_entry, tree, aside / "tree")
        await asyncio.to_thread(copy_entry, folder / "tests", aside / "tests")
        await asyncio.to_thread(_settle, aside, home)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return result


async def _gold(
    folder: Path,
    settings: _FolderSettings,
    task: Task,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    cache: Path,
) -> str:
    """The folder's gold.patch, or what its solve.sh changes."""
    patch, script = folder / "gold.patch", folder / "solution" / "solve.sh"
    if patch.is_file():
        return _text(patch, "a unified diff")
    if not script.is_file():
        raise TaskError(
            f"{folder}: neither gold.patch nor solution/solve.sh; add one: the solution validates the task"
        )
    git = git_program() if sandboxes.host_programs else "git"  # in an image that no agent has been in yet
    prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
    with tempfile.TemporaryDirectory() as directory:
        await asyncio.to_thread(os.chmod, directory, 0o755)
        await asyncio.to_thread(copy_entry, script.parent, Path(directory, "solution"))
        mounts = (Mount(Path(directory, "solution"), _SOLUTION),)
        sandbox = await sandboxes.open(sandbox_spec(prepared, environment, mounts=mounts))
        try:
            done = await sandbox.run(
                ["bash", f"{sandbox.locate(_SOLUTION)}/solve.sh"],
                timeout_s=settings.agent.timeout_sec or settings.verifier.timeout_sec,
                env=settings.solution.env,
                cwd=sandbox.workdir,
            )
            if done.exit_code != 0:
                raise TaskError(f"{script}: {describe_end(done)}")
            taken = await sandbox.run(
                ["/bin/sh", "-c", _TAKE_DIFF, "sh", sandbox.workdir, git, sandbox.locate(GIT_MOUNT)],
                timeout_s=settings.verifier.timeout_sec,
                cwd="/",
                reveal=True,
            )
        finally:
            await sandbox.close()
    if taken.exit_code != 0 or taken.truncated:
        raise TaskError(f"{script}: its changes cannot be read: git {describe_end(taken)}")
    try:
        return taken.stdout.decode()
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{script}: it changes a text file that is not UTF-8, which a record cannot hold"
        ) from error


# --- the cache ------------------------------------------------------------------------------------------


def _read_folder(folder: Path, sandboxes: Sandboxes, cache: Path) -> _TaskFolder:
    folder = folder.absolute()
    settings = _settings(folder, images=not sandboxes.host_programs)
    instruction = _text(folder / "instruction.md", "what the agent is told")
    digest = _digest(folder, f"{_FORMAT} {folder.name} {sandboxes.name} {os.geteuid()}")
    home = cache.absolute() / "folders" / digest
    record = home / "task.json"
    cached = msgspec.json.decode(record.read_bytes(), type=Task) if record.is_file() else None
    return _TaskFolder(folder, settings, instruction, home, cached)


def _aside(home: Path) -> Path | None:
    """A new directory beside `home` to build its content in; None when `home` exists."""
    if home.is_dir():
        return None
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=home.parent, prefix=f"{home.name}-"))
    except OSError as error:
        raise ConfigError(f"{home.parent}: the cache cannot be written: {error.strerror}") from error


def _settle(aside: Path, home: Path) -> None:
    aside.chmod(0o755)
    try:
        aside.rename(home)
    except OSError:
        if not home.is_dir():  # else another process was first, with the same content
            raise


def _remember(task: Task, home: Path) -> None:
    atomic_write(home / "task.json", msgspec.json.encode(task), mode=0o600)


# --- reading the files ---------------------------------------------------------------------------------


def _settings(folder: Path, *, images: bool) -> _FolderSettings:
    path = folder / "task.toml"
    if not folder.is_dir():
        raise TaskError(f"{folder}: no such directory; expected a task folder")
    if not path.is_file():
        if (folder / "environment").is_dir():
            raise TaskError(f"{path}: missing; a folder with environment/ needs it")
        return _FolderSettings()
    try:
        settings = msgspec.convert(tomllib.loads(_text(path, "settings")), _FolderSettings)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path}: not TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise TaskError(f"{path}: {error}") from error
    asked = settings.environment
    refusals = {
        "steps: a task in several steps": settings.steps,
        "environment.docker_image": asked.docker_image
        and not images
        and not (folder / "environment" / "Dockerfile").is_file(),
        "environment.gpus": asked.gpus,
        "environment.mcp_servers": asked.mcp_servers,
        "verifier.environment_mode: a verifier with an environment of its own": (
            settings.verifier.environment_mode not in (None, "shared")
        ),
    }
    for key, refused in refusals.items():
        if refused:
            raise TaskError(f"{path}: {key}: unsupported in a {'docker' if images else 'local'} sandbox")
    for seconds, key in (
        (settings.verifier.timeout_sec, "verifier.timeout_sec"),
        (settings.agent.timeout_sec, "agent.timeout_sec"),
        (asked.build_timeout_sec, "environment.build_timeout_sec"),
    ):
        if seconds is not None and not 0 < seconds < float("inf"):
            raise TaskError(f"{path}: {key}: expected a number of seconds above 0, got {seconds}")
    for key, env in (
        ("verifier", settings.verifier.env),
        ("solution", settings.solution.env),
        ("environment", asked.env),
    ):
        for name, value in env.items():
            if "${" in value or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise TaskError(
                    f"{path}: {key}.env.{name}: expected a plain value: variables of this machine are not "
                    f"passed to sandboxes"
                )
    return settings


def _meta(settings: _FolderSettings) -> dict[str, Any]:
    meta: dict[str, Any] = {"agent_timeout_s": settings.agent.timeout_sec} if settings.agent.timeout_sec else {}
    if settings.metadata:
        meta["metadata"] = msgspec.to_builtins(settings.metadata)
    return meta


def _env_command(env: dict[str, str]) -> tuple[str, ...]:
    return ("env", *(f"{name}={value}" for name, value in env.items())) if env else ()


def instance_id(folder: Path) -> str:
    """The id of the task of a folder, from its name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", folder.name).strip("-.") or "task"


def _text(path: Path, what: str) -> str:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror}; expected {what}") from error
    except UnicodeDecodeError as error:
        raise TaskError(f"{path}: is not UTF-8: {error}") from error
    if not text.strip():
        raise TaskError(f"{path}: is empty; expected {what}")
    return text


def _digest(folder: Path, salt: str) -> str:
    """A digest of every file of a folder, with names, modes and links."""
    sha = hashlib.sha256(salt.encode())
    try:
        for count, path in enumerate(sorted(folder.rglob("*"))):
            if count > _MAX_FILES:
                raise TaskError(f"{folder}: more than {_MAX_FILES} files; is this a task folder?")
            status = path.lstat()
            sha.update(f"\0{os.fsencode(path.relative_to(folder))!r} {status.st_mode:o}\0".encode())
            if path.is_symlink():
                sha.update(os.fsencode(path.readlink()))
            elif path.is_file():
                with path.open("rb") as file:
                    sha.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise TaskError(f"{error.filename or folder}: cannot be read: {error.strerror}") from error
    return sha.hexdigest()[:32]
