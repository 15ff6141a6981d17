"""Task folders in containers: their Dockerfile is built by the engine, or the image they name is used."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.errors import TaskError
from understudy.run.runner import ValidatedTasks, validate_tasks
from understudy.sandbox.docker.sandboxes import DockerSandboxes
from understudy.tasks import load
from understudy.tasks.environment import TaskEnvironment
from understudy.types import ImageTree, Task

from support import docker_engine

pytestmark = pytest.mark.services

TEST = """\
#!/bin/bash
mkdir -p /logs/verifier
[ "$(cat answer.txt)" = 42 ] && [ "$(cat /srv/built)" = "outside the tree" ] && echo 1 || echo 0
[ "$(cat answer.txt)" = 42 ] && echo 1 >/logs/verifier/reward.txt || echo 0 >/logs/verifier/reward.txt
"""


@pytest.fixture
def sandboxes(engine: docker_engine.Engine) -> Iterator[DockerSandboxes]:
    backend = DockerSandboxes()
    yield backend
    asyncio.run(backend.aclose())


def folder(directory: Path, image: str, *, dockerfile: str = "", settings: str = "") -> Path:
    files = {
        "instruction.md": "Write the answer.",
        "task.toml": f'[environment]\nbuild_timeout_sec = 120.0\nenv = {{ LEVEL = "2" }}\n{settings}',
        "tests/test.sh": TEST,
        "solution/solve.sh": "echo 42 > answer.txt\n",
    }
    if not settings:
        files["environment/Dockerfile"] = dockerfile or (
            f"FROM {image}\nRUN mkdir -p /srv && echo outside the tree > /srv/built\n"
            "WORKDIR /app\nCOPY start.txt answer.txt\n"
        )
        files["environment/start.txt"] = "41\n"
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    return directory


def validate_folder(directory: Path, sandboxes: DockerSandboxes, cache: Path) -> tuple[Task, ValidatedTasks]:
    async def work() -> tuple[Task, ValidatedTasks]:
        (task,) = (await load.load_source(str(directory), sandboxes=sandboxes, cache=cache)).tasks
        environment = TaskEnvironment()
        return task, await validate_tasks(
            [task], cache=cache, sandboxes=sandboxes, environment=environment, concurrency=1
        )

    return asyncio.run(work())


def test_a_dockerfile_is_built_by_the_engine(
    engine: docker_engine.Engine, sandboxes: DockerSandboxes, tmp_path: Path
):
    directory = folder(tmp_path / "answer", docker_engine.test_image(engine))
    task, intake = validate_folder(directory, sandboxes, tmp_path / "cache")
    assert task.source == ImageTree()
    assert task.image.startswith("understudy/task:")
    assert task.workdir == "/app"
    assert task.env == {"LEVEL": "2"}
    assert "-41\n+42\n" in task.gold_patch
    assert intake.refused == {}
    again, _ = validate_folder(directory, sandboxes, tmp_path / "cache")
    assert again == task


def test_an_image_that_is_named_is_used(engine: docker_engine.Engine, sandboxes: DockerSandboxes, tmp_path: Path):
    built, _ = validate_folder(
        folder(tmp_path / "one", docker_engine.test_image(engine)), sandboxes, tmp_path / "cache"
    )
    directory = folder(tmp_path / "two", "", settings=f'docker_image = "{built.image}"\n')
    task, intake = validate_folder(directory, sandboxes, tmp_path / "cache")
    assert (task.image, task.workdir) == (built.image, "/app")
    assert intake.refused == {}


def test_what_cannot_be_built_says_why(engine: docker_engine.Engine, sandboxes: DockerSandboxes, tmp_path: Path):
    image = docker_engine.test_image(engine)
    for name, dockerfile, message in (
        (
            "a",
            f"FROM {image}\nWORKDIR /app\nRUN echo so it is && exit 3\n",
            r"Dockerfile: the build failed: .*\n?.*so it is",
        ),
        ("b", f"FROM {image}\nWORKDIR /\n", "expected a directory below /"),
        ("c", "FRO nothing\n", "Dockerfile: cannot be built"),
    ):
        directory = folder(tmp_path / name, image, dockerfile=dockerfile)
        with pytest.raises(TaskError, match=message):
            validate_folder(directory, sandboxes, tmp_path / "cache")
