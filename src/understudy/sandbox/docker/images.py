"""Prepared images: an image with a task's tree in it, owned by the sandbox's user, without any of the future.

One is made for each image, tree and owner, and kept in the engine under a name of its own. What an image holds is
believed here (its shell, its git): no agent has been in it yet. It runs without a network all the same.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tarfile
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from msgspec import Struct

from understudy.errors import SandboxError, TaskError
from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.docker import owner, scripts
from understudy.sandbox.docker.engine import Engine, Missing, Refused, doing, explain
from understudy.sandbox.docker.pull import Progress, Puller

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


class Prepared(Struct, frozen=True):
    """An image to open sandboxes from: its id, the image it came from, and that one's PATH and variables."""

    id: str
    image: str
    path: str
    variables: tuple[str, ...]


class Images:
    """The images of one engine that tasks need: there once each, however many ask at once."""

    def __init__(self, engine: Engine, progress: Progress, *, force_rebuild: bool, pull_wait_s: float) -> None:
        self.fetched: set[str] = set()
        self.prepared_from: dict[str, set[str]] = {}
        self._renewed: set[str] = set()
        self._engine = engine
        self._puller = Puller(engine, progress, pull_wait_s)
        self._force = force_rebuild
        self._progress = progress
        self._pool = ThreadPoolExecutor(_WORKERS, "docker-images")
        self._guard = threading.Lock()
        self._locks: dict[str, threading.Lock] = {}
        self._made: dict[tuple[str, ...], Future[Prepared]] = {}
        self._trees: dict[Path, str] = {}

    def ensure(self, image: str) -> Mapping[str, Any]:
        """What the engine knows of an image, which is fetched when it is not there.

        Raises TaskError when there is none, SandboxError when it cannot be had now.
        """
        with self._guard:
            lock = self._locks.setdefault(image, threading.Lock())
        with lock:
            known = self.here(image)
            if known and (not self._force or image in self._renewed):
                return known
            try:
                self._puller.pull(image)
                self.fetched.add(image)
            except TaskError:
                if not known:
                    raise
                # It was built on this machine, or its registry has it no more.
                self._progress(f"{image}: no registry has it; what is here is prepared anew")
            self._renewed.add(image)
            with doing(f"look for the image {image}"):
                return self._engine.api.inspect_image(image)

    def here(self, image: str) -> Mapping[str, Any] | None:
        """What the engine knows of an image, or None when it is not there. Raises SandboxError."""
        try:
            with doing(f"look for the image {image}"):
                return self._engine.api.inspect_image(image)
        except Missing:
            return None

    def prepared(self, spec: SandboxSpec, image: str) -> Future[Prepared]:
        """The prepared image for a spec, found or made in a thread. Gives TaskError or SandboxError."""
        tree = "" if spec.tree_in_image else str(spec.tree)
        key = (image, tree, spec.workdir, str(spec.as_root))
        with self._guard:
            found = self._made.get(key)
            if found is None or (found.done() and found.exception() is not None):
                found = self._made[key] = self._pool.submit(self._prepare, spec, image)
            return found

    def forget(self, prepared: Prepared) -> None:
        """A prepared image turned out to be gone: the next to ask makes it again."""
        with self._guard:
            for key, made in list(self._made.items()):
                if made.done() and made.exception() is None and made.result().id == prepared.id:
                    del self._made[key]

    def _prepare(self, spec: SandboxSpec, image: str) -> Prepared:
        base = self.ensure(image)
        config: Mapping[str, Any] = base["Config"] or {}
        _check_volumes(config, spec, image)
        tree = "" if spec.tree_in_image else self._tree_digest(spec.tree)
        parts = (_FORMAT, base["Id"], tree, spec.workdir, HOME, str(spec.as_root))
        tag = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
        name = f"{REPOSITORY}:{tag}"
        with doing(f"look for the prepared image of {image}"):
            try:
                found = None if self._force else self._engine.api.inspect_image(name)
            except Missing:
                found = None
        if found is None:
            self._progress(f"{image}: preparing it for {spec.workdir}")
            self._make(spec, image, base["Id"], tag)
            with doing(f"look for the prepared image of {image}"):
                found = self._engine.api.inspect_image(name)
        with self._guard:
            self.prepared_from.setdefault(image, set()).add(name)
        variables: list[str] = config.get("Env") or []
        own = {name: value for name, _, value in (variable.partition("=") for variable in variables)}
        return Prepared(found["Id"], image, own.get("PATH") or DEFAULT_PATH, tuple(sorted(own)))

    def _make(self, spec: SandboxSpec, image: str, base: str, tag: str) -> None:
        user = 0 if spec.as_root else USER_ID
        script = scripts.SCRUB if spec.tree_in_image else scripts.REPLACE
        container = self._create(base, script, spec.workdir, f"{user}:{user}", HOME)
        try:
            with doing(f"prepare the image {image}"):
                code, said = self._run(container, image)
                if code:
                    raise _failure(code, said, image, spec.workdir)
                if not spec.tree_in_image:
                    _put_tree(self._engine, container, spec.tree, spec.workdir, user)
                _add_user(self._engine, container)
                changes = [f'LABEL {PREPARED}="{image}"', "USER 0:0"]
                self._engine.api.commit(container, REPOSITORY, tag, pause=False, changes=changes)
        except Missing as error:
            raise SandboxError(
                f"cannot prepare the image {image}: what it is made of has gone: {error}"
            ) from error
        finally:
            owner.remove(self._engine, container)

    def _create(self, image: str, script: str, *args: str) -> str:
        with doing("make a container"):
            return self._engine.api.create_container_from_config(
                {
                    "Image": image,
                    "Entrypoint": ["/bin/sh", "-c", script, "prepare"],
                    "Cmd": list(args),
                    "User": "0:0",
                    "WorkingDir": "/",
                    "Labels": owner.labels("prepare"),
                    "NetworkDisabled": True,
                    "Healthcheck": {"Test": ["NONE"]},
                    "HostConfig": {
                        "NetworkMode": "none",
                        "CapDrop": ["ALL"],
                        "CapAdd": PREPARE_CAPABILITIES,
                        "SecurityOpt": ["no-new-privileges"],
                        "PidsLimit": 512,
                        "LogConfig": {"Type": "json-file", "Config": {"max-size": "1m"}},
                    },
                }
            )["Id"]

    def _run(self, container: str, image: str) -> tuple[int, str]:
        """Run a made container to its end; its exit code and the end of what it said."""
        try:
            self._engine.api.start(container)
        except Missing as error:
            raise no_shell(image, error) from error
        except Refused as error:
            if "/bin/sh" in str(error):
                raise no_shell(image, error) from error
            raise
        code: int = self._engine.api.wait(container, timeout=_TIMEOUT_S)["StatusCode"]
        said: bytes = self._engine.api.logs(container, tail=20)
        return code, said.decode(errors="replace")

    def check_ancestry(self, image: str, path: str, base_commit: str) -> None:
        """Raise TaskError unless the repository at `path` of an image is at a commit, or at one made upon it."""
        container = self._create(image, scripts.ANCESTRY, path, base_commit)
        try:
            with doing(f"look at the repository of the image {image}"):
                code, said = self._run(container, image)
        finally:
            owner.remove(self._engine, container)
        if code in (scripts.NO_DIRECTORY, scripts.NO_GIT, scripts.NO_COMMIT):
            raise _failure(code, said, image, path)
        if code:
            there = said.split("\n", 1)[0].strip()
            raise TaskError(
                f"the repository at {path} of the image {image} is at {there}, which is neither the task's base "
                f"commit {base_commit} nor made upon it; the image and the task are not of one version"
            )

    def _tree_digest(self, tree: Path) -> str:
        """What a directory is recognised by: names, modes, sizes and times of all below it."""
        if tree not in self._trees:
            if not tree.is_dir():
                raise SandboxError(
                    f"cannot open a sandbox on {tree}: it is not a directory; expected a prepared tree"
                )
            sha = hashlib.sha256(os.fsencode(tree.resolve()))
            for folder, names, files in os.walk(tree):
                names.sort()
                for name in sorted((*names, *files)):
                    status = os.lstat(os.path.join(folder, name))  # noqa: PTH118 (a Path each is twice the time)
                    kept = (status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
                    sha.update(os.fsencode(os.path.join(folder, name)) + repr(kept).encode())  # noqa: PTH118
            self._trees[tree] = sha.hexdigest()
        return self._trees[tree]

    def remove(self, names: set[str]) -> None:
        """Remove images by name; those that are gone or in use stay as they are. Raises SandboxError."""
        for name in sorted(names):
            with doing(f"remove the image {name}"):
                try:
                    self._engine.api.remove_image(name)
                except Missing:
                    continue
                except Refused as error:
                    if error.status_code != CONFLICT:
                        raise

    def stop(self) -> None:
        """Call off what is being fetched."""
        self._puller.stop()

    def close(self) -> None:
        """Wait until nothing is being made any more."""
        self._pool.shutdown(wait=True)

    def drop_all(self, image_too: Callable[[str], bool]) -> None:
        """Remove every prepared image that was used, and the images they came from where `image_too` says so."""
        with self._guard:
            used, self.prepared_from, self._made = self.prepared_from, {}, {}
        for image, names in used.items():
            self.remove(names | ({image} if image_too(image) else set()))


def no_shell(image: str, error: Exception) -> SandboxError:
    """The error for an image in which nothing can be run."""
    return SandboxError(
        f"nothing can be run in the image {image}: it has no /bin/sh, which a sandbox needs ({explain(error)}); "
        "use an image with a shell and, for agents, glibc"
    )


def _failure(code: int, said: str, image: str, workdir: str) -> TaskError | SandboxError:
    reasons = {
        scripts.NO_DIRECTORY: f"the image {image} has no directory {workdir}; check the task's workdir and image",
        scripts.NO_GIT: f"the image {image} has a repository at {workdir} but no git to look at it with",
        scripts.NO_COMMIT: f"the repository at {workdir} of the image {image} has no commit; it is not usable",
    }
    if code in reasons:
        return TaskError(reasons[code])
    if "no space left on device" in said.lower():
        return SandboxError(
            f"cannot prepare the image {image}: the container engine's disk is full; make room there, as: "
            "docker system prune"
        )
    return SandboxError(f"cannot prepare the image {image} (exit code {code}): {said.strip()[-1000:]}")


def _check_volumes(config: Mapping[str, Any], spec: SandboxSpec, image: str) -> None:
    """What lies in a volume is in no image and in no difference."""
    volumes: Mapping[str, Any] = config.get("Volumes") or {}
    for volume in volumes:
        for place in (spec.workdir, HOME):
            if Path(place).is_relative_to(volume) or Path(volume).is_relative_to(place):
                raise TaskError(
                    f"the image {image} declares the volume {volume}, where the task's {place} is to be; "
                    "use another workdir, or an image without that volume"
                )


def _put_tree(engine: Engine, container: str, tree: Path, workdir: str, user: int) -> None:
    with tempfile.TemporaryFile() as archive:
        pack(tree, archive, user)
        archive.seek(0)
        engine.api.put_archive(container, workdir, archive)


def pack(tree: Path, output: BinaryIO, user: int, name: str = ".", *, read_only: bool = False) -> None:
    """Write a file or directory to a tar archive as `name`, with its parents, owned by `user`; links stay."""

    def owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = user
        info.uname = info.gname = ""
        if read_only and not info.issym():
            info.mode = 0o755 if info.isdir() or info.mode & stat.S_IXUSR else 0o644
        return info

    with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for parent in reversed(PurePosixPath(name).parents[:-1]):
            info = tarfile.TarInfo(str(parent))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(owned(info))
        tar.add(tree, name, filter=owned)


def _add_user(engine: Engine, container: str) -> None:
    """Let the sandbox's user have a name: programs ask for it."""
    from understudy.sandbox.docker import files

    for path, line in (
        ("/etc/passwd", f"agent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/sh\n"),
        ("/etc/group", f"agent:x:{USER_ID}:\n"),
    ):
        try:
            known = files.read(engine, container, path, limit=1 << 20)
        except FileNotFoundError:
            known = b""
        if any(entry.split(b":")[2:3] == [str(USER_ID).encode()] for entry in known.splitlines()):
            continue
        known += b"" if known.endswith(b"\n") or not known else b"\n"
        files.write(engine, container, path, known + line.encode(), mode=0o644, user=0)
