"""Generates tasks from a real package: one to three mutations that its tests notice; these tests are hidden."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.checks.pytest_checks import PytestReport, run_pytest
from understudy.errors import ProcessKilled, TaskError
from understudy.sandbox.base import Mount, Sandbox, Sandboxes, SandboxLimits
from understudy.tasks.environment import python_environment
from understudy.tasks.generate.mutations import ParsedModule, Site, hide_tests, mutate, sites
from understudy.tasks.generate.ordered import ordered
from understudy.tasks.generate.package_instruction import FailedCheck, compose, leaks_fault, normalise_message
from understudy.tasks.generate.packages import Baseline, Package, find_package, measure_baseline, modules
from understudy.tasks.prepare import sandbox_spec
from understudy.types import PytestChecks, Task
from understudy.util.diffs import unified

Progress = Callable[[int, int], None]
"""Called with how many tasks are made and how many mutants were tried."""

_FAILING_SHARE_BOUNDS = (0.01, 0.5)  # of the tests that reach the mutated lines
_MUTATION_COUNT_WEIGHTS = {1: 50, 2: 35, 3: 15}  # weights of the number of mutations in a task
_TRIES_PER_TASK = 40
_CHECK_TIMEOUT_S = 60.0

_LAUNCHER_MOUNT = "/opt/understudy/launcher"
# A mutant may loop forever or use up memory. It is limited by CPU seconds, which do not depend on the load of the
# machine, so that the same mutants are kept everywhere. The wall-clock limit is for mutants that sleep.
_CPU_FILE = "cpu-seconds"
_WALL_CLOCK_LIMIT_S = 120.0
_LIMITS = SandboxLimits(memory_bytes=1 << 30, processes=256, disk_bytes=256 << 20)


class Mutant(Struct, frozen=True):
    """A candidate: a module with some sites changed, and the test files that reach these sites."""

    module: str
    sites: tuple[Site, ...]
    original: str
    changed: str
    files: tuple[str, ...]


class _MutationTarget(Struct, frozen=True):
    """A module that can be mutated: its text, and each reached site with the test files that reach it."""

    path: str
    text: str
    reached: dict[Site, tuple[str, ...]]


async def make_mutated(
    package: str, count: int, seed: int, *, sandboxes: Sandboxes, cache: Path, jobs: int, progress: Progress
) -> list[Task]:
    """Return `count` tasks from a package of the catalog; deterministic for a seed, whatever `jobs` is.

    `jobs` sandboxes try mutants in parallel. Raises TaskError when the package is unknown, or has too few mutants
    that its tests notice.
    """
    chosen = find_package(package)
    environment = await asyncio.to_thread(python_environment, cache)
    prepared, measured = await measure_baseline(chosen, sandboxes=sandboxes, environment=environment, cache=cache)
    targets = await asyncio.to_thread(_targets, chosen, prepared.tree, measured)
    candidates = _candidates(targets, f"{chosen.sdist.sha256}:{seed}", count * _TRIES_PER_TASK)
    free: asyncio.Queue[Sandbox] = asyncio.Queue()
    sandboxes_open: list[Sandbox] = []
    tasks: dict[str, Task] = {}

    async def attempt(mutant: Mutant) -> Task | None:
        sandbox = await free.get()
        try:
            return await _task_of_mutant(mutant, chosen, seed, measured, prepared.tree, sandbox)
        finally:
            free.put_nowait(sandbox)

    launcher = await asyncio.to_thread(_launcher, environment.path_prefixes[0])
    spec = sandbox_spec(prepared, environment, mounts=(Mount(Path(launcher.name), _LAUNCHER_MOUNT),))
    spec = msgspec.structs.replace(spec, path_prefixes=(_LAUNCHER_MOUNT, *spec.path_prefixes), limits=_LIMITS)
    try:
        for _ in range(max(1, jobs)):
            sandboxes_open.append(await sandboxes.open(spec))
            free.put_nowait(sandboxes_open[-1])
        tried = 0
        async with aclosing(ordered(candidates, attempt, jobs + 1)) as results:
            async for task in results:
                tried += 1
                if task:
                    tasks.setdefault(task.instruction, task)
                progress(len(tasks), tried)
                if len(tasks) == count:
                    return list(tasks.values())
        raise TaskError(
            f"{package}: made only {len(tasks)} of {count} tasks from {tried} mutants with seed {seed}; give "
            "a smaller --count, another --seed or another package"
        )
    finally:
        for sandbox in sandboxes_open:
            await sandbox.close()
        launcher.cleanup()


def _launcher(python_home: str) -> tempfile.TemporaryDirectory[str]:
    """Return a directory with a `python` that limits its CPU seconds to the number in `_CPU_FILE` in its home
    directory.

    At this limit it gets SIGXCPU, which says that the mutant hangs. A hard limit alone would send SIGKILL, which
    is taken for a machine without free memory.
    """
    directory = tempfile.TemporaryDirectory(prefix="understudy-")
    script = Path(directory.name, "python")
    limited = f'ulimit -S -t "$(cat "$HOME/{_CPU_FILE}")" && exec setarch -R "{python_home}/python" "$@"'
    script.write_text(f"#!/bin/sh\n{limited}\n", encoding="utf-8")
    for path in (script, script.parent):
        path.chmod(0o755)
    return directory


def _targets(package: Package, tree: Path, measured: Baseline) -> list[_MutationTarget]:
    targets: list[_MutationTarget] = []
    for path in modules(package, tree):
        text = _read(tree, path)
        reached: dict[Site, tuple[str, ...]] = {}
        by_lines: dict[range, tuple[str, ...]] = {}
        try:
            module = ParsedModule(text)
        except TaskError as error:
            raise TaskError(f"{path}: {error}") from error
        for site in sites(module):
            lines = range(site.line, site.line + text.count("\n", site.start, site.end - 1) + 1)
            if lines not in by_lines:
                by_lines[lines] = tuple(measured.files_reaching(path, lines))
            if by_lines[lines]:
                reached[site] = by_lines[lines]
        if reached:
            targets.append(_MutationTarget(path, text, reached))
    return targets


def _candidates(targets: list[_MutationTarget], seed: str, limit: int) -> Iterator[Mutant]:
    """Yield different mutants in an order that the seed determines: modules weighted by size, operators equally
    often.
    """
    drawn: set[tuple[str, tuple[Site, ...]]] = set()
    weights = [len(target.reached) ** 0.5 for target in targets]
    for number in range(limit if targets else 0):
        rng = random.Random(f"{seed}:{number}")
        target = rng.choices(targets, weights)[0]
        (size,) = rng.choices(list(_MUTATION_COUNT_WEIGHTS), list(_MUTATION_COUNT_WEIGHTS.values()))
        picked: list[Site] = []
        for _ in range(size):
            free_sites = [site for site in target.reached if all(_are_apart(site, other) for other in picked)]
            if not free_sites:
                break
            operator = rng.choice(sorted({site.operator for site in free_sites}))
            picked.append(rng.choice([site for site in free_sites if site.operator == operator]))
        chosen = tuple(sorted(picked))
        changed = mutate(target.text, chosen)
        if (target.path, chosen) in drawn or not _compiles(changed):
            continue
        drawn.add((target.path, chosen))
        files = sorted({file for site in chosen for file in target.reached[site]})
        yield Mutant(target.path, chosen, target.text, changed, tuple(files))


def _are_apart(site: Site, other: Site) -> bool:
    return site.line != other.line and (site.end <= other.start or other.end <= site.start)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


async def _task_of_mutant(
    mutant: Mutant, package: Package, seed: int, measured: Baseline, tree: Path, sandbox: Sandbox
) -> Task | None:
    """Return the task of a mutant; None if too few or too many tests notice it, or not reliably."""
    relevant = [node_id for node_id in measured.stable if node_id.partition("::")[0] in mutant.files]
    report = await _run_tests(mutant, measured, sandbox)
    if report is None or not (broken := _broken(report, relevant)):
        return None
    failures = _failures(report, broken, sandbox)
    try:
        task = _task(mutant, package, seed, tree, relevant, failures)
    except TaskError:
        return None  # a failing test cannot be removed from its file
    if leaks_fault(task.instruction, _faulty_lines(mutant)):
        return None
    again = await _run_tests(mutant, measured, sandbox)
    if again is None or _broken(again, relevant) != broken:
        return None
    return task if _failures(again, broken, sandbox) == failures else None


def _failures(report: PytestReport, broken: list[str], sandbox: Sandbox) -> list[FailedCheck]:
    """Return pytest's messages for the broken tests, without what differs from run to run."""
    messages = ((id, normalise_message(report.messages.get(id, ""), sandbox.workdir)) for id in broken)
    return [FailedCheck(id, message) for id, message in messages]


async def _run_tests(mutant: Mutant, measured: Baseline, sandbox: Sandbox) -> PytestReport | None:
    """Return the report of the mutant's test files; None if they did not end in time, or twice used up the
    sandbox's memory.
    """
    files = list(mutant.files)
    for _ in range(2):
        try:
            await sandbox.write(posixpath.join(sandbox.workdir, mutant.module), mutant.changed.encode())
            await sandbox.write(posixpath.join(sandbox.home, _CPU_FILE), str(measured.cpu_s(files)).encode())
            report = await run_pytest(sandbox, files, timeout_s=_WALL_CLOCK_LIMIT_S)
            break
        except ProcessKilled:
            continue  # for its own memory, or for that of other programs on this machine
        finally:
            await sandbox.reset()
    else:
        return None
    return report if report.finished and not report.timed_out else None


def _broken(report: PytestReport, relevant: list[str]) -> list[str]:
    """Return the relevant tests that fail; empty if there are too few or too many, or if some were not run."""
    outcomes = [report.outcomes.get(node_id, "missing") for node_id in relevant]
    broken = [node_id for node_id, outcome in zip(relevant, outcomes, strict=True) if outcome != "passed"]
    least, most = (share * len(relevant) for share in _FAILING_SHARE_BOUNDS)
    fits = least <= len(broken) <= most and set(outcomes) <= {"passed", "failed", "error"}
    return broken if fits else []


def _faulty_lines(mutant: Mutant) -> list[str]:
    lines: list[str] = []
    shift = 0
    for site in mutant.sites:
        for text, start, end in (
            (mutant.original, site.start, site.end),
            (mutant.changed, site.start + shift, site.start + shift + len(site.replacement)),
        ):
            first = text.rfind("\n", 0, start) + 1
            last = text.find("\n", max(start, end - 1))
            lines += text[first : last if last >= 0 else len(text)].splitlines()
        shift += len(site.replacement) - (site.end - site.start)
    return lines


def _task(
    mutant: Mutant,
    package: Package,
    seed: int,
    tree: Path,
    relevant: list[str],
    failures: list[FailedCheck],
) -> Task:
    dotted = mutant.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    broken = [failure.node_id for failure in failures]
    hidden_in = sorted({node_id.partition("::")[0] for node_id in broken})
    tests = {file: _read(tree, file) for file in mutant.files}
    failing = {file: [id for id in broken if id.partition("::")[0] == file] for file in hidden_in}
    visible_tests = {file: hide_tests(tests[file], ids) for file, ids in failing.items()}
    original, changed = {mutant.module: mutant.original}, {mutant.module: mutant.changed}
    gold = unified(changed, original)
    digest = hashlib.sha256(f"{package.sdist.sha256}\n{gold}".encode()).hexdigest()
    return Task(
        instance_id=f"{package.sdist.name}__{dotted.rpartition('.')[2].strip('_')}-{digest[:8]}",
        repo=package.sdist.name,
        instruction=compose(package.sdist.name, package.sdist.version, dotted, failures),
        source=package.sdist,
        checks=PytestChecks(
            files=tests,
            fail_to_pass=tuple(broken),
            pass_to_pass=tuple(node_id for node_id in relevant if node_id not in set(broken)),
            timeout_s=_CHECK_TIMEOUT_S,
        ),
        gold_patch=gold,
        setup_patch=unified(
            {**original, **{file: tests[file] for file in hidden_in}}, {**changed, **visible_tests}
        ),
        meta={
            "license": package.license,
            "operators": [site.operator for site in mutant.sites],
            "seed": seed,
            "broken": len(broken),
            "relevant": len(relevant),
        },
    )


def _read(tree: Path, path: str) -> str:
    try:
        return (tree / path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise TaskError(
            f"{path}: is not UTF-8 ({error}), and only UTF-8 can be mutated; convert the file, or choose another "
            "package"
        ) from error
