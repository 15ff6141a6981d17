"""The packages that mutated tasks are made from, and their baselines.

All packages are pinned, permissively licensed and tested by pytest alone. A baseline lists the tests of the
unmodified package that always pass, and the lines that each test file reaches.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import posixpath
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.checks import pytest_checks
from understudy.errors import TaskError
from understudy.sandbox.base import Sandbox, Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.generate import reach_plugin
from understudy.tasks.prepare import PreparedTask, prepare, sandbox_spec
from understudy.types import PytestChecks, Sdist, Task
from understudy.util.files import atomic_write


class Package(Struct, frozen=True):
    """A pinned package.

    `code` is the directory of its modules in the sdist, and `tests` are the paths of its test files; `skip` are
    modules or test files that are not used (they need the network, other packages, or much time).
    """

    sdist: Sdist
    license: str
    code: str
    tests: tuple[str, ...]
    skip: tuple[str, ...] = ()


CATALOG: dict[str, Package] = {
    package.sdist.name: package
    for package in (
        Package(
            sdist=Sdist("boltons", "26.2.0", "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c"),
            license="BSD-3-Clause",
            code="boltons",
            tests=("tests",),
            skip=("boltons/ecoutils.py", "tests/test_ecoutils.py"),
        ),
        Package(
            sdist=Sdist("toolz", "1.2.0", "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490"),
            license="BSD-3-Clause",
            code="toolz",
            tests=("toolz/tests",),
            skip=("toolz/sandbox",),
        ),
        Package(
            sdist=Sdist("sqlparse", "0.6.1", "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7"),
            license="BSD-3-Clause",
            code="sqlparse",
            tests=("tests",),
            skip=("tests/test_dos_prevention.py", "tests/test_cli.py"),
        ),
        Package(
            sdist=Sdist("inflection", "0.5.1", "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417"),
            license="MIT",
            code="inflection",
            tests=("test_inflection.py",),
        ),
    )
}


def find_package(name: str) -> Package:
    """Return the package with that name. Raises TaskError, with the known names, if it is not in the catalog."""
    if entry := CATALOG.get(name):
        return entry
    raise TaskError(f"unknown package {name[:80]!r}; give one of {', '.join(sorted(CATALOG))}, or functions")


# --- the baseline --------------------------------------------------------------------------------------

_RUN_TIMEOUT_S = 300.0


class ReachedLines(Struct, frozen=True):
    """What one test file reaches: the CPU seconds that it takes while traced, and the lines it runs, by module."""

    seconds: float
    lines: dict[str, list[int]]


class Baseline(Struct, frozen=True):
    """Node ids of the tests that always pass, and what each test file reaches (under "": what runs at import)."""

    stable: tuple[str, ...]
    reach: dict[str, ReachedLines]

    def files_reaching(self, module: str, lines: range) -> list[str]:
        """Return the test files that run any of these lines; all of them if the lines run at import."""

        def reaches(file: str) -> bool:
            reached = self.reach.get(file)
            return reached is not None and any(line in lines for line in reached.lines.get(module, ()))

        files = sorted({node_id.partition("::")[0] for node_id in self.stable})
        return files if reaches("") else [file for file in files if reaches(file)]

    def cpu_s(self, files: Iterable[str]) -> int:
        """Return the CPU seconds after which a run of these files counts as hanging: far more than normal runs
        take.
        """
        return 4 + math.ceil(3 * sum(self.reach[file].seconds for file in files))


def unmodified_task(package: Package) -> Task:
    """Return the unchanged package as a task, to open sandboxes on."""
    return Task(
        instance_id=package.sdist.name,
        repo=package.sdist.name,
        instruction="",
        source=package.sdist,
        checks=PytestChecks(files={}, fail_to_pass=()),
        gold_patch="",
    )


async def measure_baseline(
    package: Package, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> tuple[PreparedTask, Baseline]:
    """Return the unchanged package's tree and baseline, measured in sandboxes on the first call and then cached.

    Raises TaskError when none of its tests pass.
    """
    prepared = await asyncio.to_thread(prepare, unmodified_task(package), cache, sandboxes)
    scripts = [Path(__file__), Path(reach_plugin.__file__), Path(pytest_checks.__file__)]
    key = hashlib.sha256(b"".join(await asyncio.to_thread(lambda: [path.read_bytes() for path in scripts])))
    key.update(msgspec.json.encode((package, environment.path_prefixes, environment.env, sandboxes.name)))
    stored = cache / "baselines" / f"{key.hexdigest()[:24]}.json"
    if not stored.exists():
        result = await _measure(package, prepared, sandboxes, environment)
        stored.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(stored, msgspec.json.encode(result))
    return prepared, msgspec.json.decode(stored.read_bytes(), type=Baseline)


async def _measure(
    package: Package, prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Baseline:
    files = test_files(package, prepared.tree)
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment))
    try:
        reach = await _reach(sandbox, package, files)
        await sandbox.reset()
        once = await pytest_checks.run_pytest(sandbox, files, timeout_s=_RUN_TIMEOUT_S)
        await sandbox.reset()
        # The second run is in reverse order, which reveals tests that depend on earlier ones.
        reversed_report = await pytest_checks.run_pytest(sandbox, files[::-1], timeout_s=_RUN_TIMEOUT_S)
    finally:
        await sandbox.close()
    stable = [
        node_id
        for node_id, outcome in once.outcomes.items()
        if outcome == reversed_report.outcomes.get(node_id) == "passed" and node_id.partition("::")[0] in reach
    ]
    if not stable:
        raise TaskError(
            f"{package.sdist.name}: none of its tests pass twice with this machine's Python, expected some that "
            f"do; choose another package, or correct what pytest reports:\n{once.log[-2000:]}"
        )
    return Baseline(tuple(sorted(stable)), reach)


async def _reach(sandbox: Sandbox, package: Package, files: list[str]) -> dict[str, ReachedLines]:
    script, out = (posixpath.join(sandbox.home, name) for name in ("reach.py", "reach.json"))
    await sandbox.write(script, await asyncio.to_thread(Path(reach_plugin.__file__).read_bytes))
    paths = [posixpath.join(sandbox.workdir, file) for file in files]
    completed = await sandbox.run(
        ["python", "-P", "-s", script, out, sandbox.workdir, package.code, *paths],
        timeout_s=_RUN_TIMEOUT_S,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=sandbox.workdir,
    )
    if completed.timed_out:
        raise TaskError(
            f"{package.sdist.name}: its tests, traced, did not end within {_RUN_TIMEOUT_S:.0f} s; run the same "
            "command again while this machine is less busy, or with fewer --jobs"
        )
    try:
        return msgspec.json.decode(await sandbox.read(out), type=dict[str, ReachedLines])
    except (FileNotFoundError, msgspec.MsgspecError) as error:
        output = (completed.stdout + completed.stderr)[-2000:].decode(errors="replace")
        raise TaskError(
            f"{package.sdist.name}: its tests cannot be traced with this machine's Python ({error}); choose "
            f"another package, or correct what the tests report:\n{output}"
        ) from error


def test_files(package: Package, tree: Path) -> list[str]:
    """Return the package's test files, sorted, relative to the tree."""
    return _python_files(tree, package.tests, package.skip, "test_*.py")


def modules(package: Package, tree: Path) -> list[str]:
    """Return the package's modules without its tests, sorted, relative to the tree."""
    return _python_files(tree, (package.code,), (*package.skip, *package.tests), "*.py")


def _python_files(tree: Path, starts: tuple[str, ...], skip: tuple[str, ...], pattern: str) -> list[str]:
    roots = [tree / start for start in starts]
    paths = [path for root in roots for path in ([root] if root.is_file() else root.rglob(pattern))]
    files = (path.relative_to(tree) for path in paths if path.is_file() and not path.is_symlink())
    return sorted(file.as_posix() for file in files if not any(file.is_relative_to(out) for out in skip))
