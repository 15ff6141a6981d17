"""The `docker` kind of sandbox: finds the engine, prepares images and containers, and cleans up."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tarfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, Literal, get_args

import requests
import urllib3.exceptions
from msgspec.structs import replace

from understudy.errors import ConfigError, SandboxError, TaskError, UnderstudyError
from understudy.sandbox.base import Sandboxes, SandboxSpec
from understudy.sandbox.docker.container import (
    DockerSandbox,
    check_container_spec,
    container_config,
    container_key,
)
from understudy.sandbox.docker.engine import (
    ContainerEngine,
    EngineNotFound,
    EngineRefused,
    engine_errors,
    engine_message,
    find_engine,
    isolated,
    remove_container,
    remove_orphans,
    start_container,
)
from understudy.sandbox.docker.files import ContainerFiles, unpack_tar
from understudy.sandbox.docker.images import ImageStore, PreparedImage, PullProgress, log_progress

CacheLevel = Literal["none", "base", "env", "instance"]

WARM = 4
"""The most containers that are prepared in advance."""

_MAKERS = 8
ORPHANS_S = 10.0
"""How often containers of processes that have ended are looked for, in seconds, when sandboxes are opened."""

_QUOTA_DRIVERS = frozenset({"btrfs", "zfs"})

_log = logging.getLogger("understudy.sandbox.docker")


class _EngineResources:
    """One engine in use: its images, and the containers that are being made on it."""

    def __init__(self, engine: ContainerEngine, images: ImageStore, cpus: float | None) -> None:
        self.engine = engine
        self.images = images
        self.quota = _has_quota(engine)
        self._cpus = cpus
        self._pool = ThreadPoolExecutor(_MAKERS, "docker-make")
        self._guard = Lock()
        self._orphans_at = 0.0
        self._ready: list[tuple[tuple[object, ...], Future[tuple[str, PreparedImage]]]] = []

    def expect(self, spec: SandboxSpec, image: str) -> None:
        """Start making a container in advance, unless there are WARM of them already."""
        with self._guard:
            if len(self._ready) < WARM:
                self._ready.append((container_key(spec, image), self._pool.submit(self._make, spec, image)))

    async def make(self, spec: SandboxSpec) -> tuple[str, PreparedImage]:
        """Return a started container for a spec, made in advance or now. Raises SandboxError, TaskError."""
        key = container_key(spec, spec.image)
        with self._guard:
            position = next((n for n, (ready_key, _) in enumerate(self._ready) if ready_key == key), None)
            future = None if position is None else self._ready.pop(position)[1]
        if future is not None:
            with contextlib.suppress(UnderstudyError):  # a failure in advance is retried now
                return await self._wait(future)
        return await self._wait(self._pool.submit(self._make, spec, spec.image))

    async def _wait(self, future: Future[tuple[str, PreparedImage]]) -> tuple[str, PreparedImage]:
        try:
            return await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            # In a thread, because removing a finished container would block the event loop.
            asyncio.get_running_loop().run_in_executor(None, self._discard, future)
            raise

    def _discard(self, future: Future[tuple[str, PreparedImage]]) -> None:
        """Remove a container that is no longer needed, now or when it is finished."""

        def drop(result: Future[tuple[str, PreparedImage]]) -> None:
            if not result.cancelled() and result.exception() is None:
                self._remove(result.result()[0])

        future.cancel()
        future.add_done_callback(drop)

    def remove_orphans(self) -> None:
        """Remove the containers of processes that have ended, unless that was done a moment ago.

        Raises SandboxError.
        """
        with self._guard:
            if time.monotonic() < self._orphans_at:
                return
            self._orphans_at = time.monotonic() + ORPHANS_S
        remove_orphans(self.engine)

    def _make(self, spec: SandboxSpec, image: str) -> tuple[str, PreparedImage]:
        # Also while this process works: a worker beside it may have been killed.
        self.remove_orphans()
        for may_retry in (True, False):
            prepared = self.images.prepared(spec, image).result()
            try:
                return self._start(spec, prepared), prepared
            except EngineNotFound as error:
                self.images.forget(prepared)
                if not may_retry:
                    raise SandboxError(
                        f"cannot open a sandbox of the image {image}: {engine_message(error)}; check the "
                        "engine with `understudy doctor`, then run the same command again"
                    ) from error
        raise AssertionError("internal error: the last pass of the loop returns a container or raises")

    def _start(self, spec: SandboxSpec, prepared: PreparedImage) -> str:
        with engine_errors(f"open a sandbox of the image {prepared.image}"):
            container = self._create(spec, prepared)
            try:
                start_container(self.engine, container)
            except BaseException:
                remove_container(self.engine, container)
                raise
        return container

    def _create(self, spec: SandboxSpec, prepared: PreparedImage) -> str:
        config = container_config(spec, prepared, cpus=self._cpus, quota=self.quota)
        try:
            return self.engine.create_container(config)
        except EngineRefused as error:
            if not self.quota or "storage-opt" not in str(error).lower():
                raise
        self.quota = False
        config = container_config(spec, prepared, cpus=self._cpus, quota=False)
        return self.engine.create_container(config)

    def _remove(self, container: str) -> None:
        try:
            remove_container(self.engine, container)
        except SandboxError as error:
            _log.warning("%s; it is removed when Understudy runs next", error)

    async def drop(self, container: str) -> None:
        """Remove a container; never raises."""
        await self.engine.do("remove a container", self._remove, container)

    def close(self) -> None:
        """Drop containers made in advance and cancel running pulls."""
        self.images.stop()
        with self._guard:
            ready, self._ready = self._ready, []
        for _, future in ready:
            self._discard(future)
        self._pool.shutdown(wait=True)
        self.images.close()
        self.engine.close()


def _has_quota(engine: ContainerEngine) -> bool:
    """Return whether the engine's storage may be able to limit what one container writes."""
    with contextlib.suppress(SandboxError):
        info = engine.info()
        backing = {name: value for name, value in info.get("DriverStatus") or () if name == "Backing Filesystem"}
        driver = info.get("Driver")
        return driver in _QUOTA_DRIVERS or (driver == "overlay2" and "xfs" in backing.values())
    return False


class DockerSandboxes(Sandboxes):
    """The kind of sandbox that is a container.

    `image` is used for tasks that name none. With another `cache_level` than "instance", `aclose` removes the
    images that this run pulled, and with `clean` also those that were there before. `force_rebuild` pulls and
    prepares images again. `cpus` limits the processors of each container. `progress` is called with lines about
    pulls.
    """

    name: ClassVar[str] = "docker"
    host_programs: ClassVar[bool] = False

    def __init__(
        self,
        *,
        image: str = "",
        cache_level: CacheLevel = "instance",
        clean: bool = False,
        force_rebuild: bool = False,
        cpus: float | None = None,
        progress: PullProgress = log_progress,
        pull_wait_s: float = 15.0,
    ) -> None:
        if cache_level not in get_args(CacheLevel):
            raise ConfigError(f"cache_level: got {cache_level!r}; give one of {', '.join(get_args(CacheLevel))}")
        self._image = image
        self._cache_level: CacheLevel = cache_level
        self._clean = clean
        self._force_rebuild = force_rebuild
        self._cpus = cpus
        self._progress = progress
        self._pull_wait_s = pull_wait_s
        self._guard = Lock()
        self._resources: _EngineResources | None = None

    def _in_use(self) -> _EngineResources:
        """Return the engine in use, which the first call finds. Raises ConfigError, SandboxError."""
        with self._guard:
            if self._resources is None:
                engine = find_engine()
                images = ImageStore(
                    engine, self._progress, force_rebuild=self._force_rebuild, pull_wait_s=self._pull_wait_s
                )
                self._resources = _EngineResources(engine, images, self._cpus)
                self._resources.remove_orphans()
            return self._resources

    def problems(self) -> list[str]:
        """Return the reasons why containers cannot be used here."""
        try:
            engine = find_engine()
            with contextlib.closing(engine):
                system = engine.info().get("OSType", "linux")
        except (ConfigError, SandboxError) as error:
            return [str(error)]
        return [] if system == "linux" else [f"the container engine runs {system} containers; expected linux ones"]

    def _imaged(self, spec: SandboxSpec) -> SandboxSpec:
        """Return the spec with an image. Raises TaskError when neither the task nor `image` names one."""
        if spec.image:
            return spec
        if not self._image:
            raise TaskError(
                "the task names no container image; name one for such tasks with --image, or run them with "
                "--sandbox local"
            )
        return replace(spec, image=self._image)

    def export_tree(self, image: str, path: str, base_commit: str, into: Path) -> None:
        """See Sandboxes. Raises TaskError, SandboxError, ConfigError."""
        home = self._in_use()
        export_tree(home.engine, home.images, image or self._image, path, base_commit, into)

    def image_id(self, image: str, *, fetch: bool) -> str:
        """Return the engine's id of an image. Raises TaskError, SandboxError, ConfigError."""
        images = self._in_use().images
        details = images.ensure(image) if fetch or self._force_rebuild else images.inspect(image)
        return details["Id"] if details else ""

    def build_image(self, context: Path, name: str, *, timeout_s: float) -> None:
        """Build the image of a Dockerfile unless it exists. Raises TaskError, SandboxError, ConfigError."""
        home = self._in_use()
        with engine_errors(f"look for the image {name}"):
            there = bool(home.engine.api.images(name, quiet=True))
        if not there or self._force_rebuild:
            build_image(home.engine, context, name, timeout_s=timeout_s, progress=self._progress)

    def workdir_of(self, image: str) -> str:
        """Return an image's working directory, "" if it sets none; fetches the image."""
        config: dict[str, str] = self._in_use().images.ensure(image)["Config"] or {}
        return config.get("WorkingDir") or ""

    def expect(self, spec: SandboxSpec) -> None:
        """Make a container for this spec in the background; its errors are raised when it is opened."""
        with contextlib.suppress(UnderstudyError):
            spec = self._imaged(spec)
            check_container_spec(spec)
            self._in_use().expect(spec, spec.image)

    async def open(self, spec: SandboxSpec) -> DockerSandbox:
        """Open a sandbox. Raises SandboxError, and TaskError when its image cannot be used."""
        spec = self._imaged(spec)
        check_container_spec(spec)
        try:
            home = await asyncio.to_thread(self._in_use)
        except ConfigError as error:  # `problems` found an engine earlier, so this one has stopped since
            raise SandboxError(str(error)) from error
        container, prepared = await home.make(spec)
        return DockerSandbox(spec, home, container, prepared)

    async def aclose(self) -> None:
        """Drop containers made in advance, and the images that the cache level does not keep."""
        with self._guard:
            home, self._resources = self._resources, None
        if home is not None:
            await asyncio.to_thread(self._close, home)

    def _close(self, home: _EngineResources) -> None:
        home.close()
        if self._cache_level != "instance":
            try:
                home.images.drop_all(lambda image: self._clean or image in home.images.fetched)
            except UnderstudyError as error:
                _log.warning("%s", error)
            home.engine.close()


BUILT = "understudy.task"
"""The label of images that were built for task folders."""

_OUTPUT_CHARS = 2000


def build_image(
    engine: ContainerEngine, context: Path, name: str, *, timeout_s: float, progress: PullProgress
) -> None:
    """Build the image `name` from the Dockerfile in the directory `context`, as `docker build` does.

    The build has the engine's network. Raises TaskError with the end of the output when a step fails or the build
    takes longer than `timeout_s`, SandboxError when the engine fails.
    """
    output, ends = "", time.monotonic() + timeout_s
    options: dict[str, Any] = {"tag": name, "labels": {BUILT: "1"}, "timeout": timeout_s}
    progress(f"{name}: building it from {context}")
    with engine_errors(f"build {context}"):
        events = engine.api.build(path=str(context), rm=True, forcerm=True, decode=True, **options)
    try:
        with contextlib.closing(events):  # closing the events cancels the build
            for event in events:
                output = (output + str(event.get("stream") or ""))[-_OUTPUT_CHARS:]
                if failed := event.get("error"):
                    raise TaskError(
                        f"{context / 'Dockerfile'}: the build failed: {failed}; correct the Dockerfile. The "
                        f"end of its output:\n{output}"
                    )
                if time.monotonic() > ends:
                    raise requests.Timeout
    except EngineRefused as error:
        raise TaskError(
            f"{context / 'Dockerfile'}: cannot be built: the engine refused it: {engine_message(error)}; "
            f"correct the Dockerfile, and try it with: docker build {context}"
        ) from error
    except (requests.Timeout, urllib3.exceptions.TimeoutError) as error:
        raise TaskError(
            f"{context / 'Dockerfile'}: the build did not end within {timeout_s:.0f} s; raise "
            f"environment.build_timeout_sec in task.toml. The end of its output:\n{output}"
        ) from error
    except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise SandboxError(
            f"cannot build {context}: the connection to the container engine was lost: "
            f"{engine_message(error)}; check that the engine is running, then run the same command again"
        ) from error
    progress(f"{name}: built")


def export_tree(
    engine: ContainerEngine, images: ImageStore, image: str, path: str, base_commit: str, into: Path
) -> None:
    """Create the directory `into` with the content of `path` in an image, without any `.git`; fetches the image.

    Links are kept and never followed; devices, pipes and sockets are left out. Raises TaskError when the image or
    the path does not exist, or its repository is not at `base_commit`.
    """
    images.ensure(image)
    if base_commit:
        images.check_ancestry(image, path, base_commit)
    with engine_errors(f"export {path} from the image {image}"):
        container = engine.create_container(isolated(image, ["/bin/true"], (), "export"))
    try:
        with engine_errors(f"export {path} from the image {image}"):
            files = ContainerFiles(engine, container)
            if not files.is_directory(path, link=False):
                raise TaskError(
                    f"the image {image} has no directory {path}, the task's workdir; correct workdir, or use "
                    "another image"
                )
            try:
                with files.archive(path) as tar:
                    unpack_tar(tar, into)
            except tarfile.ReadError as error:
                raise TaskError(
                    f"the tree at {path} of the image {image} cannot be read: {error}; check the container "
                    "engine, then run the same command again"
                ) from error
            except tarfile.TarError as error:
                raise TaskError(
                    f"the tree at {path} of the image {image} cannot be unpacked: {error}. Build the image "
                    "without that entry"
                ) from error
    except EngineNotFound as error:
        raise SandboxError(
            f"cannot export {path} from the image {image}: {engine_message(error)}; the image or its container "
            "was removed meanwhile: run the same command again"
        ) from error
    finally:
        remove_container(engine, container)
