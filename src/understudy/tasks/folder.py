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
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from understudy.errors import ConfigError, GraderError, TaskError
from understudy.sandbox.base import Mount, Sandboxes
from understudy.tasks import records
from understudy.tasks.dockerfile import DockerfileRecipe, build_tree, copy_entry, describe_end, read_dockerfile
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.materialise import read_text
from understudy.tasks.patch import NO_PATCH, extract_patch
from understudy.tasks.prepare import prepare, sandbox_spec
from understudy.types import Directory, ImageTree, ScriptChecks, Task
from understudy.util.files import atomic_write, write_remedy
from understudy.util.validation import describe_invalid

_FORMAT = "1"  # part of every digest: raise it when what is made here changes, so that it is made again
_SOLUTION = "/solution"
_IMAGE_REPOSITORY = "understudy/task"
_DEFAULT_WORKDIR = "/workspace"
_MAX_FILES = 100_000
_OMIT_KEY = "remove the key if the task works without it, or leave the task out"

_Seconds = Annotated[float, Meta(gt=0, le=1e9)]


class _VerifierSection(Struct, frozen=True):
    timeout_sec: _Seconds = 300.0
    env: dict[str, str] = {}
    environment_mode: str | None = None


class _AgentSection(Struct, frozen=True):
    timeout_sec: _Seconds | None = None


class _EnvironmentSection(Struct, frozen=True):
    build_timeout_sec: _Seconds = 600.0
    env: dict[str, str] = {}
    docker_image: str | None = None
    gpus: int | None = None
    mcp_servers: list[Any] = []


class _SolutionSection(Struct, frozen=True):
    env: dict[str, str] = {}


class _TaskSection(Struct, frozen=True):
    name: str = ""


class _FolderSettings(Struct, frozen=True):
    """The keys of task.toml that are used here; all others are for people or other runners."""

    task: _TaskSection = _TaskSection()
    metadata: dict[str, Any] = {}
    verifier: _VerifierSection = _VerifierSection()
    agent: _AgentSection = _AgentSection()
    environment: _EnvironmentSection = _EnvironmentSection()
    solution: _SolutionSection = _SolutionSection()
    steps: list[Any] = []


def is_task(path: Path) -> bool:
    """Return whether a directory looks like one task."""
    return (path / "task.toml").is_file() or (path / "instruction.md").is_file()


async def load_folder(folder: Path, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path) -> Task:
    """Return the task of a folder. On the first call its tree is built, and its solution run, in sandboxes.

    Raises TaskError, naming the file, for anything missing, malformed or unsupported by sandboxes.
    """
    settings, instruction, home, cached = await asyncio.to_thread(_read_folder, folder, sandboxes, cache)
    image = "" if sandboxes.host_programs else await asyncio.to_thread(_image, folder, settings, sandboxes)
    if cached:
        return cached
    recipe = None if image else await asyncio.to_thread(_recipe, folder)
    if staging := await asyncio.to_thread(_new_directory, home):
        try:
            if recipe:
                timeout_s = settings.environment.build_timeout_sec
                await build_tree(recipe, staging / "tree", sandboxes, environment, timeout_s=timeout_s)
            await asyncio.to_thread(_copy_content, staging, home, folder, tree=not image and not recipe)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    workdir = recipe.workdir if recipe else _DEFAULT_WORKDIR
    task = Task(
        instance_id=instance_id(folder),
        repo=settings.task.name or folder.name,
        instruction=instruction,
        source=ImageTree() if image else Directory(str(home / "tree")),
        image=image,
        checks=ScriptChecks(
            source=Directory(str(home / "tests")),
            command=(*_env_command(settings.verifier.env), "bash", "/tests/test.sh"),
            timeout_s=settings.verifier.timeout_sec,
        ),
        gold_patch="",
        workdir=await asyncio.to_thread(_workdir, folder, image, sandboxes) if image else workdir,
        env={**(recipe.env if recipe else {}), **settings.environment.env},
        meta=_meta(settings),
    )
    gold = await _gold_patch(folder, settings, task, sandboxes, environment, cache)
    task = msgspec.structs.replace(task, gold_patch=gold)
    records.check(task, str(folder))
    await asyncio.to_thread(atomic_write, home / "task.json", msgspec.json.encode(task), mode=0o600)
    return task


def _image(folder: Path, settings: _FolderSettings, sandboxes: Sandboxes) -> str:
    """Return the folder's image, built by the engine unless it is named; "" for a folder with `tree/`."""
    if named := settings.environment.docker_image:
        return named
    context = folder / "environment"
    if not (context / "Dockerfile").is_file():
        return ""
    name = f"{_IMAGE_REPOSITORY}:{_digest(context, _FORMAT)}"
    sandboxes.build_image(context, name, timeout_s=settings.environment.build_timeout_sec)
    return name


def _workdir(folder: Path, image: str, sandboxes: Sandboxes) -> str:
    workdir = sandboxes.workdir_of(image)
    if workdir in ("", "/"):
        raise TaskError(
            f"{folder}: its image {image} has the WORKDIR {workdir or '/'}; expected a directory below /, whose "
            "content becomes the task's tree: set one in its Dockerfile, such as WORKDIR /app"
        )
    return workdir


def _recipe(folder: Path) -> DockerfileRecipe | None:
    """Return the folder's parsed Dockerfile; None for a folder with `tree/`."""
    path = folder / "environment" / "Dockerfile"
    if path.is_file() == (folder / "tree").is_dir():
        problem, remedy = ("both", "remove one") if path.is_file() else ("neither", "add one")
        raise TaskError(
            f"{folder}: expected exactly one of environment/Dockerfile and tree/, got {problem}; {remedy}"
        )
    return read_dockerfile(path) if path.is_file() else None


def _new_directory(home: Path) -> Path | None:
    """Return a new directory beside `home` to write the content to; None if `home` exists already."""
    if home.is_dir():
        return None
    try:
        home.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(dir=home.parent, prefix=f"{home.name}-"))
    except OSError as error:
        raise ConfigError(
            f"{home.parent}: the cache cannot be written: {error.strerror}; "
            f"{write_remedy(error, 'set UNDERSTUDY_CACHE to a directory that you can write')}"
        ) from error


def _copy_content(staging: Path, home: Path, folder: Path, *, tree: bool) -> None:
    """Copy the folder's tests, and its `tree` if it has one, to `staging`, and rename that to `home`."""
    if tree:
        copy_entry(folder / "tree", staging / "tree")
    copy_entry(folder / "tests", staging / "tests")
    staging.chmod(0o755)
    try:
        staging.rename(home)
    except OSError:
        if not home.is_dir():  # otherwise another process has made the same content first
            raise


async def _gold_patch(
    folder: Path,
    settings: _FolderSettings,
    task: Task,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    cache: Path,
) -> str:
    """Return the folder's gold.patch, or the changes that its solve.sh makes."""
    patch, script = folder / "gold.patch", folder / "solution" / "solve.sh"
    if patch.is_file():
        return read_text(patch, "a unified diff")
    if not script.is_file():
        raise TaskError(
            f"{folder}: has neither gold.patch nor solution/solve.sh, one of which validating the "
            "task needs; add one"
        )
    prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
    with tempfile.TemporaryDirectory() as directory:
        await asyncio.to_thread(os.chmod, directory, 0o755)
        await asyncio.to_thread(copy_entry, script.parent, Path(directory, "solution"))
        mounts = (Mount(Path(directory, "solution"), _SOLUTION),)
        sandbox = await sandboxes.open(sandbox_spec(prepared, environment, mounts=mounts))
        try:
            completed = await sandbox.run(
                ["bash", f"{sandbox.locate(_SOLUTION)}/solve.sh"],
                timeout_s=settings.agent.timeout_sec or settings.verifier.timeout_sec,
                env=settings.solution.env,
                cwd=sandbox.workdir,
            )
            if completed.exit_code != 0:
                raise TaskError(
                    f"{script}: {describe_end(completed)}; expected it to solve the task and end with exit "
                    "code 0; correct it"
                )
            gold_patch = await extract_patch(sandbox, prepared.git)
        except GraderError as error:
            raise TaskError(
                f"{script}: the changes that it made cannot be read: {error}. If that does not help, give "
                "its changes as gold.patch"
            ) from error
        finally:
            await sandbox.close()
    if gold_patch.startswith(NO_PATCH):
        reason = gold_patch.removeprefix(NO_PATCH).decode().strip()
        raise TaskError(
            f"{script}: its changes cannot be used as the solution: {reason}; correct the script, or give its "
            "changes as gold.patch"
        )
    try:
        return gold_patch.decode()
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{script}: it changes a text that is not UTF-8 ({error}), which a task record cannot hold; let it "
            "change files in UTF-8 only, or give a gold.patch that does"
        ) from error


# --- reading the files ---------------------------------------------------------------------------------


def _read_folder(
    folder: Path, sandboxes: Sandboxes, cache: Path
) -> tuple[_FolderSettings, str, Path, Task | None]:
    """Return a folder's settings and instruction, where its parts are cached, and its task if it was loaded
    before.
    """
    settings = _read_settings(folder, images=not sandboxes.host_programs)
    instruction = read_text(folder / "instruction.md", "the agent's instruction")
    read_text(folder / "tests" / "test.sh", "the script that tests the solution and writes the reward")
    digest = _digest(folder, f"{_FORMAT} {folder.name} {sandboxes.name} {os.geteuid()}")
    home = cache.absolute() / "folders" / digest
    record = home / "task.json"
    cached = msgspec.json.decode(record.read_bytes(), type=Task) if record.is_file() else None
    return settings, instruction, home, cached


def _read_settings(folder: Path, *, images: bool) -> _FolderSettings:
    path = folder / "task.toml"
    if not folder.is_dir():
        raise TaskError(
            f"{folder}: no such directory; give a task folder, which has instruction.md and tests/test.sh"
        )
    if not path.is_file():
        if (folder / "environment").is_dir():
            raise TaskError(
                f"{path}: missing, but expected in a folder with environment/; add it, with a line such as "
                'version = "1.0"'
            )
        return _FolderSettings()
    content: dict[str, Any] = {}
    try:
        content = tomllib.loads(read_text(path, "the task's settings"))
        settings = msgspec.convert(content, _FolderSettings)
    except tomllib.TOMLDecodeError as error:
        raise TaskError(f"{path}: invalid TOML: {error}; correct it at this place") from error
    except msgspec.ValidationError as error:
        raise TaskError(
            f"{path}: {describe_invalid(error, content, _FolderSettings)}; correct this key"
        ) from error
    environment = settings.environment
    mode = settings.verifier.environment_mode
    refusals = {
        "steps: tasks in several steps are unsupported; leave this task out": settings.steps,
        f"environment.docker_image {environment.docker_image}: local sandboxes have no images; use --sandbox "
        "docker, "
        "or add environment/Dockerfile": environment.docker_image
        and not images
        and not (folder / "environment" / "Dockerfile").is_file(),
        f"environment.gpus is {environment.gpus}: sandboxes have no GPU; {_OMIT_KEY}": environment.gpus,
        f"environment.mcp_servers: unsupported in sandboxes; {_OMIT_KEY}": environment.mcp_servers,
        f"verifier.environment_mode is {mode!r}, expected 'shared': a verifier with an environment of its own is "
        f"unsupported; {_OMIT_KEY}": mode not in (None, "shared"),
    }
    for refusal, refused in refusals.items():
        if refused:
            raise TaskError(f"{path}: {refusal}")
    for key, env in (
        ("verifier", settings.verifier.env),
        ("solution", settings.solution.env),
        ("environment", environment.env),
    ):
        for name, value in env.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
                raise TaskError(
                    f"{path}: {key}.env: invalid name {name[:80]!r}; give letters, digits and _, not "
                    "beginning with a digit"
                )
            if "${" in value:
                reference = "${" + value.partition("${")[2].partition("}")[0][:80] + "}"
                raise TaskError(
                    f"{path}: {key}.env.{name}: has {reference}, but variables of this machine are not passed to "
                    "sandboxes; give a plain value"
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
    """Return the id of a folder's task, made from the folder's name."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", folder.name).strip("-.") or "task"


def _digest(folder: Path, salt: str) -> str:
    """Return a digest of all files of a folder, with their names, modes and link targets."""
    sha = hashlib.sha256(salt.encode())
    try:
        for count, path in enumerate(sorted(folder.rglob("*"))):
            if count > _MAX_FILES:
                raise TaskError(
                    f"{folder}: expected at most {_MAX_FILES} files in a task folder, got more; give another "
                    "folder, or remove files that do not belong to the task"
                )
            status = path.lstat()
            sha.update(f"\0{os.fsencode(path.relative_to(folder))!r} {status.st_mode:o}\0".encode())
            if path.is_symlink():
                sha.update(os.fsencode(path.readlink()))
            elif path.is_file():
                with path.open("rb") as file:
                    sha.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
        raise TaskError(
            f"{error.filename or folder}: cannot be read: {error.strerror}; make it readable (chmod)"
        ) from error
    return sha.hexdigest()[:32]
