"""Making tasks from a real package: the same ones every time, and each as it promises to be."""

from __future__ import annotations

import ast
import hashlib
import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from understudy.config import cache_dir
from understudy.errors import TaskError
from understudy.sandbox.base import Sandboxes
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.sandbox.unsafe import UnsafeSandboxes
from understudy.tasks.generate.mutated import make_mutated
from understudy.tasks.generate.packages import CATALOG, Package
from understudy.tasks.materialise import archive_path, materialise
from understudy.types import PytestChecks, Sdist, Task


def sandboxes() -> Sandboxes:
    local = LocalSandboxes()
    return UnsafeSandboxes() if local.problems() else local


async def made(count: int, seed: int, jobs: int) -> list[Task]:
    return await make_mutated(
        "toolz",
        count,
        seed,
        sandboxes=sandboxes(),
        cache=cache_dir(),
        jobs=jobs,
        progress=lambda accepted, tried: None,
    )


@pytest.mark.services
async def test_mutated_tasks_are_deterministic_and_gold_restores_the_original(tmp_path: Path) -> None:
    tasks = await made(2, 7, 1)
    assert await made(2, 7, 2) == tasks
    assert len({task.instance_id for task in tasks}) == len({task.instruction for task in tasks}) == 2
    original = tmp_path / "original"
    materialise(tasks[0].source, original, cache_dir())
    for task in tasks:
        tree = tmp_path / task.instance_id
        materialise(task.source, tree, cache_dir())
        _apply(task.setup_patch, tree)
        _check_hidden(task, tree)
        assert _changed_lines(task).isdisjoint(" ".join(line.split()) for line in task.instruction.splitlines())
        _apply(task.gold_patch, tree)
        source = [path for path in original.rglob("*.py") if "tests" not in path.parts]
        assert all(path.read_bytes() == (tree / path.relative_to(original)).read_bytes() for path in source)


def _apply(patch: str, tree: Path) -> None:
    subprocess.run(["git", "apply", "-"], cwd=tree, input=patch.encode(), check=True)


def _check_hidden(task: Task, tree: Path) -> None:
    checks = task.checks
    assert isinstance(checks, PytestChecks)
    assert checks.fail_to_pass
    assert len(checks.fail_to_pass) <= 0.5 * len(checks.fail_to_pass + checks.pass_to_pass)
    for node_id in checks.fail_to_pass:
        file, *_, name = node_id.split("::")
        assert f"def {name.partition('[')[0]}(" in checks.files[file]
        assert f"def {name.partition('[')[0]}(" not in (tree / file).read_text()
        ast.parse((tree / file).read_text())


def _changed_lines(task: Task) -> set[str]:
    lines = [line for line in task.gold_patch.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    return {" ".join(line[1:].split()) for line in lines}


@pytest.mark.parametrize(("at_ten", "seed"), [("continue", 1072), ("os.kill(os.getpid(), 9)", 99)])
async def test_a_mutant_that_is_killed_is_left_out(
    at_ten: str, seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one that adds where it should subtract: it uses up its CPU seconds, or gets SIGKILL, as a process does
    that uses up its memory. Neither is a fault of this machine.
    """
    code = (
        "import os\n\n\ndef count(n):\n    while n > 0:\n        n = n - 1\n        if n == 10:\n"
        f"            {at_ten}\n    return n\n\n\ndef double(n):\n    return n + n\n"
    )
    cases = [f"{name}({n}) == {n * factor}" for name, factor in (("count", 0), ("double", 2)) for n in range(4)]
    tests = "".join(f"\n\ndef test_{number}():\n    assert {case}\n" for number, case in enumerate(cases))
    archive = tmp_path / "loops-1.0.tar.gz"
    with tarfile.open(archive, "w:") as tar:
        for name, text in (
            ("loops/__init__.py", code),
            ("test_loops.py", f"from loops import count, double\n{tests}"),
        ):
            entry = tarfile.TarInfo(f"loops-1.0/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    loops = Sdist("loops", "1.0", hashlib.sha256(archive.read_bytes()).hexdigest())
    monkeypatch.setitem(CATALOG, "loops", Package(loops, "MIT", "loops", ("test_loops.py",)))
    cache = tmp_path / "cache"
    cached = archive_path(loops, cache)
    cached.parent.mkdir(parents=True)
    archive.rename(cached)
    (cache / "envs").symlink_to(cache_dir() / "envs")
    results: list[tuple[int, int]] = []
    tasks = await make_mutated(
        "loops", 1, seed, sandboxes=sandboxes(), cache=cache, jobs=1, progress=lambda *each: results.append(each)
    )
    assert (len(tasks), results) == (1, [(0, 1), (1, 2)])


async def test_an_unknown_package_is_refused() -> None:
    with pytest.raises(TaskError, match="give one of boltons, inflection, sqlparse, toolz"):
        await make_mutated(
            "left-pad",
            1,
            1,
            sandboxes=sandboxes(),
            cache=cache_dir(),
            jobs=1,
            progress=lambda accepted, tried: None,
        )


def test_catalog_packages_are_pinned_and_permissively_licensed() -> None:
    for name, package in CATALOG.items():
        assert name == package.sdist.name
        assert len(package.sdist.sha256) == 64
        assert package.license in {"MIT", "BSD-3-Clause", "Apache-2.0"}
