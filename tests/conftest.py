"""Fixtures for every test."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.python import importtestmodule
from hypothesis import settings

from understudy.store.address import StoreLocation, StoreUrl
from understudy.tasks.records import dump

from support import calc_task, docker_engine, example_count, imports_torch, kubernetes_server, postgresql, require
from support import s3_server as s3_server_

if TYPE_CHECKING:
    from understudy.sandbox.base import Sandboxes
    from understudy.tasks.environment import TaskEnvironment

    from support.swebench import Harness

# Millions of objects come with the imports of collection, and none of them goes: looking for garbage can wait.
gc.disable()

# Tests run side by side, and so do the processes that they start: with a thread a core in each of them, torch's
# would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

# A shell starts jobs in the background (`nohup make test &`, as CI systems do) with SIGINT ignored, and a process
# hands that on to all that it starts. The tests of Ctrl-C are about processes that heed it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples each time, and no verdict by the clock: a busy machine is not a bug.
settings.register_profile("understudy", deadline=None, derandomize=True, max_examples=example_count(100))
settings.load_profile("understudy")


@pytest.fixture
def claude_code() -> Path:
    """The real CLI's binary; the test is skipped where it has not been fetched."""
    from understudy.agents.claude_code import ClaudeCode
    from understudy.agents.packages import AGENT_PACKAGES

    require(ClaudeCode().problems())
    package = AGENT_PACKAGES["claude-code"]
    return package.program_path(package.directory())


@pytest.fixture
def isolation() -> None:
    """The local sandbox works here; the test is skipped where it cannot."""
    from understudy.sandbox.local.sandboxes import LocalSandboxes

    require(LocalSandboxes().problems())


@pytest.fixture(scope="session")
def sandboxes() -> Sandboxes:
    """Local sandboxes; the test is skipped where there can be none."""
    from understudy.sandbox.local.sandboxes import LocalSandboxes

    kind = LocalSandboxes()
    require(kind.problems())
    return kind


@pytest.fixture(scope="session")
def environment() -> TaskEnvironment:
    """The Python that pytest runs in inside sandboxes."""
    from understudy.config import cache_dir
    from understudy.tasks.environment import python_environment

    return python_environment(cache_dir())


@pytest.fixture(scope="session")
def harness() -> Iterator[Harness]:
    """The parsers and the grading of the package swebench; the test is skipped where it cannot be installed."""
    from support.swebench import Harness

    try:
        official = Harness()
    except (OSError, subprocess.SubprocessError) as error:
        require([f"the swebench package could not be installed: {error}"])
        raise
    yield official
    official.close()


@pytest.fixture(scope="session")
def engine() -> Iterator[docker_engine.Engine]:
    """A container engine, which DOCKER_HOST names meanwhile; the test is skipped where there can be none."""
    try:
        container_engine = docker_engine.engine()
    except docker_engine.NoEngine as error:
        require([str(error)])
        raise
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", container_engine.url)
        yield container_engine


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the engine that the tests started, when all of this session's processes are done with it."""
    if not hasattr(config, "workerinput"):
        docker_engine.stop_engine()


@pytest.fixture
def calc_tasks(tmp_path: Path) -> Path:
    """A JSONL file of four small tasks."""
    path = tmp_path / "tasks.jsonl"
    dump([calc_task(number) for number in range(4)], path)
    return path


def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the files of tests first, where several processes are to collect them all.

    pytest rewrites the assertions of a file when it imports it, and keeps the result beside the file. In a fresh
    checkout each process would rewrite each file, half a minute of CPU; so each begins with other files.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None or session.config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(Path(__file__).parent.rglob("test_*.py"))[number::count]:
        # What is wrong with a file, or skips it, is reported when it is collected.
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importtestmodule(path, session.config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that import torch beside each other, and leave the harness's to `make test-services`.

    A process that imports torch and transformers needs five seconds of CPU for it. It is few processes that do, as
    each begins with tests that stand side by side. The harness's package is installed apart.
    """
    for item in items:
        if "harness" in getattr(item, "fixturenames", ()):
            item.add_marker("services")
    items.sort(key=lambda item: not _imports_torch(item))


def _imports_torch(item: pytest.Item) -> bool:
    module = item.getparent(pytest.Module)
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    fixtures = {"model", "tiny_tokenizer"} & set(getattr(item, "fixturenames", ())) - set(parameters)
    return bool(fixtures) or (module is not None and imports_torch(module.obj))


def pytest_collection_finish() -> None:
    """From now on the garbage collector works, and passes over what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kubernetes_server.Cluster]:
    """A server of Kubernetes' API for the real kubectl; the test is skipped where there is none."""
    require(kubernetes_server.problems())
    with kubernetes_server.cluster(tmp_path_factory.mktemp("kubernetes")) as started:
        yield started


@pytest.fixture(scope="session")
def postgresql_server() -> Iterator[postgresql.PostgresqlServer]:
    """A PostgreSQL server; the test is skipped where none is installed."""
    require(postgresql.problems())
    with postgresql.running_server() as server:
        yield server


@pytest.fixture
def postgresql_url(postgresql_server: postgresql.PostgresqlServer) -> StoreUrl:
    """An empty database of its own."""
    return postgresql_server.new_database()


@pytest.fixture
def postgresql_store(postgresql_server: postgresql.PostgresqlServer) -> StoreUrl:
    """A database of its own with an empty store in it."""
    return postgresql_server.new_store()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server_.S3Server]:
    """An S3 server, whose credentials are in this process's environment."""
    with s3_server_.running_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.credentials().items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(
    params=[
        "directory",
        pytest.param("postgresql", marks=pytest.mark.services),
        pytest.param("bucket", marks=pytest.mark.services),
    ]
)
def location(request: pytest.FixtureRequest, tmp_path: Path) -> StoreLocation:
    """Where a new store may be: a directory, a database, a database with each content in a bucket."""
    if request.param == "directory":
        return tmp_path / "s"
    url: StoreUrl = request.getfixturevalue("postgresql_store")
    if request.param == "bucket":
        server: s3_server_.S3Server = request.getfixturevalue("s3_server")
        server.give_bucket(url, min_bytes=1)
    return url
