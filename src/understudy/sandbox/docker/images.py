"""Prepared images: a base image with a task's tree in it, owned by the sandbox's user, without any later git
history.

One is made for each combination of image, tree and owner, and stays in the engine under its own name. Programs of
the base image (its shell, its git) are trusted here, because no agent has run in it yet. They still run without a
network.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from msgspec import Struct

from understudy.errors import SandboxError, TaskError
from understudy.sandbox.base import SandboxSpec, missing_tree
from understudy.sandbox.docker.engine import (
    ContainerEngine,
    EngineNotFound,
    EngineRefused,
    engine_errors,
    engine_message,
    isolated,
    remove_container,
)
from understudy.sandbox.docker.files import ContainerFiles

REPOSITORY = "understudy/prepared"
PREPARED = "understudy.prepared"
"""The label of prepared images; its value is the name of the image they were made of."""

HOME = "/home/agent"
USER_ID = 1000
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PREPARE_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER"]

_FORMAT = "1"
_WORKERS = 4
_TIMEOUT_S = 900
CONFLICT = 409
"""The engine's answer when an image is in use."""


PullProgress = Callable[[str], None]
"""Called with one line on how far a pull is, at most once a second."""

_TRIES = 5
_MAX_WAIT_S = 600.0
_EVERY_S = 1.0
_LIMITED = re.compile(r"toomanyrequests|too many requests|rate limit|status.{0,10}429", re.I)
_RETRY_AFTER = re.compile(r"retry[- ]after\W{0,3}(\d+(?:\.\d+)?)\s*(ms|m\b|s|)", re.I)
_ABSENT = re.compile(r"not found|manifest unknown|does not exist|access denied|denied: requested access", re.I)
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}

_log = logging.getLogger("understudy.sandbox.docker")


def log_progress(line: str) -> None:
    """The default progress callback."""
    _log.info("%s", line)


class _RateLimited(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        match = _RETRY_AFTER.search(message)
        self.wait_s = float(match[1]) * _UNITS[match[2].lower()] if match else None


class ImagePuller:
    """Pulls images through one engine. `wait_s` is the first pause after a rate limit; it doubles each time."""

    def __init__(self, engine: ContainerEngine, progress: PullProgress, wait_s: float) -> None:
        self._engine = engine
        self._progress = progress
        self._wait_s = wait_s
        self._stop = threading.Event()

    def stop(self) -> None:
        """Cancel running pulls, and refuse new ones."""
        self._stop.set()

    def pull(self, image: str) -> None:
        """Pull an image. Raises TaskError if the registry does not have it, SandboxError if it cannot be pulled
        now.
        """
        pause = self._wait_s
        for attempt in range(1, _TRIES + 1):
            try:
                with engine_errors(f"fetch the image {image}"):
                    self._pull(image)
                return
            except EngineNotFound as error:
                raise _absent(image, engine_message(error)) from error
            except _RateLimited as error:
                if attempt == _TRIES:
                    raise SandboxError(
                        f"cannot fetch the image {image}: the registry's rate limit was hit {_TRIES} times "
                        f"({error}); log in with `docker login`, or run the same command again later"
                    ) from error
                wait = min(pause if error.wait_s is None else error.wait_s, _MAX_WAIT_S)
                self._progress(f"{image}: the registry limits pulls; trying again in {wait:.0f} s")
                if self._stop.wait(wait):
                    raise _cancelled(image) from error
                pause *= 2

    def _pull(self, image: str) -> None:
        layers: dict[str, tuple[int, int]] = {}
        reported_at = 0.0
        try:
            for event in self._engine.api.pull(image, stream=True, decode=True):
                if self._stop.is_set():
                    raise _cancelled(image)
                if message := event.get("error"):
                    _raise_refusal(image, str(message))
                _note(layers, event)
                if time.monotonic() - reported_at >= _EVERY_S:
                    reported_at = time.monotonic()
                    self._progress(f"{image}: {_summary(layers)}")
        except EngineNotFound:
            raise
        except EngineRefused as error:
            _raise_refusal(image, f"{engine_message(error)}{_after(error)}", error)
            raise
        self._progress(f"{image}: fetched")


def _cancelled(image: str) -> SandboxError:
    return SandboxError(
        f"pulling the image {image} was cancelled, because the sandboxes were closed; run the same command again"
    )


def _after(error: Any) -> str:
    """Return the status 429 and the Retry-After header of an error as text, or ""."""
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    status = " (status 429)" if getattr(error.response, "status_code", 0) == 429 else ""
    return status + (f" Retry-After: {headers['Retry-After']}" if "Retry-After" in headers else "")


def _raise_refusal(image: str, message: str, cause: Exception | None = None) -> None:
    """Raise the error that a registry's message means: _RateLimited, TaskError, or SandboxError if there is no
    `cause`.

    Returns if there is a `cause` and the message has no special meaning.
    """
    if _LIMITED.search(message):
        raise _RateLimited(message) from cause
    if _ABSENT.search(message):
        raise _absent(image, message) from cause
    if cause is None:
        raise SandboxError(
            f"cannot fetch the image {image}: {message}; check that the engine can reach the registry, for "
            f"example with: docker pull {image}"
        )


def _absent(image: str, message: str) -> TaskError:
    return TaskError(
        f"image {image!r} not found on this machine or in its registry ({message}); check the name, namespace "
        "and tag, log in with `docker login` when it is private, or build it under this name"
    )


def _note(layers: dict[str, tuple[int, int]], event: Mapping[str, Any]) -> None:
    detail: Mapping[str, int] = event.get("progressDetail") or {}
    if "id" in event and (status := event.get("status")) in ("Downloading", "Extracting"):
        total = int(detail.get("total") or 0)
        downloaded = int(detail.get("current") or 0) if status == "Downloading" else total
        layers[event["id"]] = (downloaded, max(total, layers.get(event["id"], (0, 0))[1]))


def _summary(layers: Mapping[str, tuple[int, int]]) -> str:
    downloaded, total = (sum(layer[which] for layer in layers.values()) for which in (0, 1))
    return f"fetching, {downloaded / 1e6:.0f} of {total / 1e6:.0f} MB in {len(layers)} layers"


class PreparedImage(Struct, frozen=True):
    """An image to open sandboxes from: its id, its base image, and the base image's PATH and variable names."""

    id: str
    image: str
    path: str
    variables: tuple[str, ...]


class ImageStore:
    """The images that tasks need on one engine. Concurrent requests for an image share one pull and one
    preparation.
    """

    def __init__(
        self, engine: ContainerEngine, progress: PullProgress, *, force_rebuild: bool, pull_wait_s: float
    ) -> None:
        self.fetched: set[str] = set()
        self.prepared_from: dict[str, set[str]] = {}
        self._renewed: set[str] = set()
        self._engine = engine
        self._puller = ImagePuller(engine, progress, pull_wait_s)
        self._force = force_rebuild
        self._progress = progress
        self._pool = ThreadPoolExecutor(_WORKERS, "docker-images")
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._preparing: dict[tuple[str, ...], Future[PreparedImage]] = {}
        self._trees: dict[Path, str] = {}

    def ensure(self, image: str) -> Mapping[str, Any]:
        """Return the engine's description of an image, which is pulled if it is missing.

        Raises TaskError if no registry has it, SandboxError if it cannot be pulled now.
        """
        with self._guard:
            lock = self._locks.setdefault(image, threading.Lock())
        with lock:
            details = self.inspect(image)
            if details and (not self._force or image in self._renewed):
                return details
            try:
                self._puller.pull(image)
                self.fetched.add(image)
            except TaskError:
                if not details:
                    raise
                # It was built on this machine, or its registry no longer has it.
                self._progress(f"{image}: no registry has it; what is here is prepared anew")
            self._renewed.add(image)
            return self._details(image)

    def _details(self, image: str) -> Mapping[str, Any]:
        with engine_errors(f"look for the image {image}"):
            return self._engine.api.inspect_image(image)

    def inspect(self, image: str) -> Mapping[str, Any] | None:
        """Return the engine's description of an image, or None if it is missing. Raises SandboxError."""
        try:
            return self._details(image)
        except EngineNotFound:
            return None

    def prepared(self, spec: SandboxSpec, image: str) -> Future[PreparedImage]:
        """Return a future of the prepared image for a spec, found or made in a thread. It may raise TaskError or
        SandboxError.
        """
        tree = "" if spec.tree_in_image else str(spec.tree)
        key = (image, tree, spec.workdir, str(spec.as_root))
        with self._guard:
            future = self._preparing.get(key)
            if future is None or (future.done() and future.exception() is not None):
                future = self._preparing[key] = self._pool.submit(self._prepare, spec, image)
            return future

    def forget(self, prepared: PreparedImage) -> None:
        """Forget a prepared image that turned out to be gone, so that the next request makes it again."""
        with self._guard:
            for key, future in list(self._preparing.items()):
                if future.done() and future.exception() is None and future.result().id == prepared.id:
                    del self._preparing[key]

    def _prepare(self, spec: SandboxSpec, image: str) -> PreparedImage:
        base = self.ensure(image)
        config: Mapping[str, Any] = base["Config"] or {}
        _check_volumes(config, spec, image)
        tree = "" if spec.tree_in_image else self._tree_digest(spec.tree)
        parts = (_FORMAT, base["Id"], tree, spec.workdir, HOME, str(spec.as_root))
        tag = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        name = f"{REPOSITORY}:{tag}"
        details = None if self._force else self.inspect(name)
        if details is None:
            self._progress(f"{image}: preparing it for {spec.workdir}")
            self._make(spec, image, base["Id"], tag)
            details = self._details(name)
        with self._guard:
            self.prepared_from.setdefault(image, set()).add(name)
        variables: list[str] = config.get("Env") or []
        environment = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
        return PreparedImage(
            details["Id"], image, environment.get("PATH") or DEFAULT_PATH, tuple(sorted(environment))
        )

    def _make(self, spec: SandboxSpec, image: str, base: str, tag: str) -> None:
        user = 0 if spec.as_root else USER_ID
        script = SCRUB if spec.tree_in_image else REPLACE
        container = self._create(base, script, spec.workdir, f"{user}:{user}", HOME)
        try:
            with engine_errors(f"prepare the image {image}"):
                code, output = self._run(container, image)
                if code:
                    raise _failure(code, output, image, spec.workdir)
                files = ContainerFiles(self._engine, container)
                if not spec.tree_in_image:
                    files.put_tree(spec.tree, spec.workdir, user)
                _add_user(files)
                changes = [f'LABEL {PREPARED}="{image}"', "USER 0:0"]
                self._engine.api.commit(container, REPOSITORY, tag, pause=False, changes=changes)
        except EngineNotFound as error:
            raise SandboxError(
                f"cannot prepare the image {image}: its base image or container was removed meanwhile: "
                f"{error}; run the same command again"
            ) from error
        finally:
            remove_container(self._engine, container)

    def _create(self, image: str, script: str, *args: str) -> str:
        log = {"Type": "json-file", "Config": {"max-size": "1m"}}
        config = isolated(
            *(image, ["/bin/sh", "-c", script, "prepare"], args, "prepare"),
            capabilities=PREPARE_CAPABILITIES,
            PidsLimit=512,
            LogConfig=log,
        )
        with engine_errors("make a container"):
            return self._engine.create_container(config)

    def _run(self, container: str, image: str) -> tuple[int, str]:
        """Run a created container to its end; return its exit code and the end of its output."""
        try:
            self._engine.api.start(container)
        except EngineNotFound as error:
            raise no_shell(image, error) from error
        except EngineRefused as error:
            if "/bin/sh" in str(error):
                raise no_shell(image, error) from error
            raise
        code: int = self._engine.api.wait(container, timeout=_TIMEOUT_S)["StatusCode"]
        output: bytes = self._engine.api.logs(container, tail=20)
        return code, output.decode(errors="replace")

    def check_ancestry(self, image: str, path: str, base_commit: str) -> None:
        """Raise TaskError unless the repository at `path` of an image is at `base_commit` or a descendant
        of it.
        """
        container = self._create(image, ANCESTRY, path, base_commit)
        try:
            with engine_errors(f"look at the repository of the image {image}"):
                code, output = self._run(container, image)
        finally:
            remove_container(self._engine, container)
        if code in (NO_DIRECTORY, NO_GIT, NO_COMMIT):
            raise _failure(code, output, image, path)
        if code:
            actual = output.split("\n", 1)[0].strip()
            raise TaskError(
                f"the repository at {path} of the image {image} is at {actual}, which is neither the task's "
                f"base commit {base_commit} nor a descendant of it; use an image that was built from that "
                "commit"
            )

    def _tree_digest(self, tree: Path) -> str:
        """Return a digest of a directory: of the names, modes, sizes and times of everything in it."""
        if tree not in self._trees:
            if not tree.is_dir():
                raise missing_tree(tree)
            sha = hashlib.sha256(os.fsencode(tree.resolve()))
            for folder, names, files in os.walk(tree):
                names.sort()
                for name in sorted((*names, *files)):
                    status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 (a Path each is twice the time)
                    identity = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    sha.update(os.fsencode(os.path.join(folder, name)) + repr(identity).encode())  # noqa: PTH118
            self._trees[tree] = sha.hexdigest()
        return self._trees[tree]

    def stop(self) -> None:
        """Cancel running pulls."""
        self._puller.stop()

    def close(self) -> None:
        """Wait until no image is being prepared any more."""
        self._pool.shutdown(wait=True)

    def drop_all(self, image_too: Callable[[str], bool]) -> None:
        """Remove all prepared images that were used, and those base images for which `image_too` returns True."""
        with self._guard:
            used, self.prepared_from, self._preparing = self.prepared_from, {}, {}
        for image, names in used.items():
            remove_images(self._engine, names | ({image} if image_too(image) else set()))


def remove_images(engine: ContainerEngine, names: Iterable[str]) -> list[str]:
    """Remove images by name, except those in use. Return the names that do not exist any more. Raises
    SandboxError.
    """
    removed: list[str] = []
    for name in sorted(names):
        with engine_errors(f"remove the image {name}"):
            try:
                engine.api.remove_image(name)
            except EngineNotFound:
                pass
            except EngineRefused as error:
                if error.status_code != CONFLICT:
                    raise
                continue
        removed.append(name)
    return removed


class StoredImage(Struct, frozen=True):
    """A prepared image: its name, the bytes that it shares with no other image, and when it was made (Unix
    seconds).
    """

    name: str
    bytes: int
    created_at: float


def stored_images(engine: ContainerEngine) -> list[StoredImage]:
    """Return the prepared images of an engine, which can all be made again from their tasks. Raises
    SandboxError.
    """
    with engine_errors("list the prepared images"):
        listed: Sequence[Mapping[str, Any]] = engine.api.df()["Images"] or ()
    return [
        StoredImage(name, max(0, image["Size"] - max(0, image.get("SharedSize") or 0)), float(image["Created"]))
        for image in listed
        for name in image.get("RepoTags") or ()
        if name.startswith(f"{REPOSITORY}:")
    ]


def no_shell(image: str, error: Exception) -> SandboxError:
    """Return the error for an image in which no command can run."""
    return SandboxError(
        f"no command can run in the image {image}: it has no /bin/sh ("
        f"{engine_message(error)}); use an image with a shell and, for agents, glibc"
    )


def _failure(code: int, output: str, image: str, workdir: str) -> TaskError | SandboxError:
    reasons = {
        NO_DIRECTORY: f"the image {image} has no directory {workdir}, expected the task's workdir; correct "
        "workdir in the task, or use another image",
        NO_GIT: f"the image {image} has a repository at {workdir} but no git; install git in the image",
        NO_COMMIT: f"the repository at {workdir} of the image {image} has no commit, expected at least one; "
        "commit its files when the image is built, or use another image",
    }
    if code in reasons:
        return TaskError(reasons[code])
    if "no space left on device" in output.lower():
        return SandboxError(
            f"cannot prepare the image {image}: the container engine's disk is full; free some space, for "
            f"example: docker system prune"
        )
    return SandboxError(
        f"cannot prepare the image {image}: expected its shell to end with exit code 0, got {code}: "
        f"{output.strip()[-1000:]}; correct the image, or choose another"
    )


def _check_volumes(config: Mapping[str, Any], spec: SandboxSpec, image: str) -> None:
    """Raise TaskError when the image has a volume where the task needs files: volumes are in no image and
    no diff.
    """
    volumes: Mapping[str, Any] = config.get("Volumes") or {}
    for volume in volumes:
        for directory in (spec.workdir, HOME):
            if Path(directory).is_relative_to(volume) or Path(volume).is_relative_to(directory):
                elsewhere = "set another workdir in the task" if directory != HOME else "use another image"
                raise TaskError(
                    f"the image {image} declares a volume at {volume}, which overlaps {directory}; expected no "
                    "volume there, because files in volumes are in no diff: remove VOLUME from the image's "
                    f"Dockerfile, or {elsewhere}"
                )


def _add_user(files: ContainerFiles) -> None:
    """Give the sandbox's user a name in /etc/passwd and /etc/group, because some programs need one."""
    for path, line in (
        ("/etc/passwd", f"agent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/sh\n"),
        ("/etc/group", f"agent:x:{USER_ID}:\n"),
    ):
        try:
            content = files.read(path, limit=1 << 20)
        except FileNotFoundError:
            content = b""
        if any(entry.split(b":")[2:3] == [str(USER_ID).encode()] for entry in content.splitlines()):
            continue
        content += b"" if content.endswith(b"\n") or not content else b"\n"
        files.write(path, content + line.encode(), mode=0o644, user=0)


NO_DIRECTORY, NO_GIT, NO_COMMIT = 96, 97, 98

_HOME = r"""
set -eu
work=$1 owner=$2 home=$3
rm -rf "$home"; mkdir -p "$home" /tmp; chown "$owner" "$home"; chmod 1777 /tmp
"""

# The repository is made anew from what HEAD reaches, so that nothing else remains of the old one: no later
# commits, refs, hooks or alternates.
SCRUB = (
    _HOME
    + rf"""
[ -d "$work" ] && [ ! -L "$work" ] || exit {NO_DIRECTORY}
cd "$work"
find . -mindepth 1 ! -path ./.git -iname .git -prune -exec rm -rf {{}} +
if [ -e .git ]; then
  new=/understudy-new-git
  mkdir -p "$new"
  printf '[safe]\n\tdirectory = *\n' >"$new/.gitconfig"
  export HOME="$new" GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C
  command -v git >/dev/null || exit {NO_GIT}
  head=$(git rev-parse --verify --quiet 'HEAD^{{commit}}') || exit {NO_COMMIT}
  branch=$(git symbolic-ref --quiet HEAD || true)
  git for-each-ref --merged "$head" --format='%(objectname) %(refname)' refs/tags >"$new/tags"
  git init --quiet --bare --template= "$new/git"
  mkdir -p "$new/git/objects/pack"
  {{ echo "$head"; while read -r tag _; do echo "$tag"; done <"$new/tags"; }} |
    git pack-objects --quiet --revs "$new/git/objects/pack/pack" >/dev/null
  shallow=$(git rev-parse --git-dir)/shallow
  [ ! -e "$shallow" ] || cp "$shallow" "$new/git/shallow"
  rm -rf .git
  mv "$new/git" .git
  git config core.bare false
  while read -r tag name; do git update-ref "$name" "$tag"; done <"$new/tags"
  if [ -n "$branch" ]; then
    git update-ref "$branch" "$head"
    git symbolic-ref HEAD "$branch"
  else
    git update-ref --no-deref HEAD "$head"
  fi
  rm -rf .git/logs
  git read-tree HEAD
  git update-index -q --refresh || true
  cd /
  rm -rf "$new"
fi
# Where an owner is set, even to what it is, the engine copies the file up.
find "$work" ! "(" -user "${{owner%%:*}}" -group "${{owner##*:}}" ")" -exec chown -h "$owner" {{}} +
"""
)
REPLACE = (
    _HOME
    + r"""
rm -rf "$work"
mkdir -p "$work"
chown "$owner" "$work"
"""
)
ANCESTRY = rf"""
printf '[safe]\n\tdirectory = *\n' >/tmp/.gitconfig
export HOME=/tmp GIT_CONFIG_NOSYSTEM=1 GIT_NO_REPLACE_OBJECTS=1 LC_ALL=C
cd "$1" || exit {NO_DIRECTORY}
command -v git >/dev/null || exit {NO_GIT}
git rev-parse --verify HEAD || exit {NO_COMMIT}
git merge-base --is-ancestor "$2" HEAD
"""
