"""Tasks made from a real package: one to three mutations that its own tests notice, and those tests hidden."""

from __future__ import annotations

import asyncio
import hashlib
import posixpath
import random
import re
import tempfile
import textwrap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.checks.pytest_checks import PytestReport, run_pytest
from understudy.errors import TaskError
from understudy.sandbox.base import Mount, Sandbox, Sandboxes, SandboxLimits
from understudy.tasks.environment import python_environment
from understudy.tasks.generate.mutations import ParsedModule, Site, hide_tests, mutate, sites
from understudy.tasks.generate.packages import Baseline, Package, find_package, measure_baseline, modules
from understudy.tasks.prepare import sandbox_spec
from understudy.types import PytestChecks, Task
from understudy.util.diffs import unified

Progress = Callable[[int, int], None]
"""Called with how many tasks are made and how many mutants were tried."""

_BROKEN_SHARE = (0.01, 0.5)
_MUTATIONS = {1: 50, 2: 35, 3: 15}  # how many a task gets, with weights
_TRIES_PER_TASK = 40
_CHECK_TIMEOUT_S = 60.0

# A mutant may loop for ever or eat memory. CPU seconds end it whatever else the machine does meanwhile: the
# same mutants are kept everywhere. The wall clock is for those that sleep.
_LAUNCHER_MOUNT = "/opt/understudy/launcher"
_CPU_FILE = "cpu-seconds"
_WALL_S = 120.0
_LIMITS = SandboxLimits(memory_bytes=1 << 30, processes=256, disk_bytes=256 << 20)


class Mutant(Struct, frozen=True):
    """One candidate: a module with some sites changed, and the test files that reach them."""

    module: str
    sites: tuple[Site, ...]
    original: str
    changed: str
    files: tuple[str, ...]


class _MutationTarget(Struct, frozen=True):
    """A module that can be mutated: its text, and every reached site with the test files that reach it."""

    path: str
    text: str
    reached: dict[Site, tuple[str, ...]]


async def make_mutated(
    package: str, count: int, seed: int, *, sandboxes: Sandboxes, cache: Path, jobs: int, progress: Progress
) -> list[Task]:
    """`count` tasks from a package of the catalog, the same ones for the same seed, whatever `jobs` is.

    `jobs` sandboxes try mutants at once. Raises TaskError when the package is not known or has not enough mutants
    that its tests notice.
    """
    chosen = find_package(package)
    environment = await asyncio.to_thread(python_environment, cache)
    prepared, measured = await measure_baseline(chosen, sandboxes=sandboxes, environment=environment, cache=cache)
    targets = await asyncio.to_thread(_targets, chosen, prepared.tree, measured)
    candidates = _candidates(targets, f"{chosen.sdist.sha256}:{seed}", count * _TRIES_PER_TASK)
    free: asyncio.Queue[Sandbox] = asyncio.Queue()
    opened: list[Sandbox] = []
    pending: deque[asyncio.Task[Task | None]] = deque()
    tasks: dict[str, Task] = {}

    async def attempt(mutant: Mutant) -> Task | None:
        sandbox = await free.get()
        try:
            return await _try(mutant, chosen, seed, measured, prepared.tree, sandbox)
        finally:
            free.put_nowait(sandbox)

    launcher = await asyncio.to_thread(_launcher, environment.path_prefixes[0])
    spec = sandbox_spec(prepared, environment, mounts=(Mount(Path(launcher.name), _LAUNCHER_MOUNT),))
    spec = msgspec.structs.replace(spec, path_prefixes=(_LAUNCHER_MOUNT, *spec.path_prefixes), limits=_LIMITS)
    try:
        for _ in range(max(1, jobs)):
            opened.append(await sandboxes.open(spec))
            free.put_nowait(opened[-1])
        tried = 0
        # Mutants are tried several at a time and judged in their order: the result does not depend on timing.
        while len(tasks) < count:
            while len(pending) < jobs + 1 and (mutant := next(candidates, None)):
                pending.append(asyncio.create_task(attempt(mutant)))
            if not pending:
                raise TaskError(
                    f"{package}: found only {len(tasks)} of {count} tasks after {tried} mutants with seed {seed}; "
                    f"use a smaller --count, another --seed or another package"
                )
            task = await pending.popleft()
            tried += 1
            if task:
                tasks.setdefault(task.instruction, task)
            progress(len(tasks), tried)
    finally:
        for unfinished in pending:
            unfinished.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        for sandbox in opened:
            await sandbox.close()
        launcher.cleanup()
    return list(tasks.values())


def _launcher(python_home: str) -> tempfile.TemporaryDirectory[str]:
    """A directory with a `python` that ends itself after the CPU seconds that `_CPU_FILE` in its home says."""
    directory = tempfile.TemporaryDirectory(prefix="understudy-")
    script = Path(directory.name, "python")
    limited = f'ulimit -t "$(cat "$HOME/{_CPU_FILE}")" && exec setarch -R "{python_home}/python" "$@"'
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
        for site in sites(ParsedModule(text)):
            lines = range(site.line, site.line + text.count("\n", site.start, site.end - 1) + 1)
            if lines not in by_lines:
                by_lines[lines] = tuple(measured.files_reaching(path, lines))
            if by_lines[lines]:
                reached[site] = by_lines[lines]
        if reached:
            targets.append(_MutationTarget(path, text, reached))
    return targets


def _candidates(targets: list[_MutationTarget], seed: str, limit: int) -> Iterator[Mutant]:
    """Different mutants in an order that the seed fixes: modules by size, operators alike often."""
    drawn: set[tuple[str, tuple[Site, ...]]] = set()
    weights = [len(target.reached) ** 0.5 for target in targets]
    for number in range(limit if targets else 0):
        draw = random.Random(f"{seed}:{number}")
        target = draw.choices(targets, weights)[0]
        (size,) = draw.choices(list(_MUTATIONS), list(_MUTATIONS.values()))
        picked: list[Site] = []
        for _ in range(size):
            near = [site for site in target.reached if all(_apart(site, other) for other in picked)]
            if not near:
                break
            operator = draw.choice(sorted({site.operator for site in near}))
            picked.append(draw.choice([site for site in near if site.operator == operator]))
        chosen = tuple(sorted(picked))
        changed = mutate(target.text, chosen)
        if (target.path, chosen) in drawn or not _compiles(changed):
            continue
        drawn.add((target.path, chosen))
        files = sorted({file for site in chosen for file in target.reached[site]})
        yield Mutant(target.path, chosen, target.text, changed, tuple(files))


def _apart(site: Site, other: Site) -> bool:
    return site.line != other.line and (site.end <= other.start or other.end <= site.start)


def _compiles(text: str) -> bool:
    try:
        compile(text, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


async def _try(
    mutant: Mutant, package: Package, seed: int, measured: Baseline, tree: Path, sandbox: Sandbox
) -> Task | None:
    """The task of a mutant, or None when its tests notice it too little, too much, or not every time."""
    relevant = [node_id for node_id in measured.stable if node_id.partition("::")[0] in mutant.files]
    report = await _test(mutant, measured, sandbox)
    if report is None or not (broken := _broken(report, relevant)):
        return None
    failures = _failures(report, broken, sandbox)
    try:
        task = _task(mutant, package, seed, tree, relevant, failures)
    except TaskError:
        return None  # a failing test that cannot be taken out of its file
    if leaks_fault(task.instruction, _faulty_lines(mutant)):
        return None
    again = await _test(mutant, measured, sandbox)
    if again is None or _broken(again, relevant) != broken:
        return None
    return task if _failures(again, broken, sandbox) == failures else None


def _failures(report: PytestReport, broken: list[str], sandbox: Sandbox) -> list[FailedCheck]:
    """Pytest's messages for the broken tests, without what differs from run to run."""
    messages = ((id, normalise_message(report.messages.get(id, ""), sandbox.workdir)) for id in broken)
    return [FailedCheck(id, message) for id, message in messages]


async def _test(mutant: Mutant, measured: Baseline, sandbox: Sandbox) -> PytestReport | None:
    """The report of the mutant's test files; None when they did not come to their end in time."""
    files = list(mutant.files)
    try:
        await sandbox.write(posixpath.join(sandbox.workdir, mutant.module), mutant.changed.encode())
        await sandbox.write(posixpath.join(sandbox.home, _CPU_FILE), str(measured.cpu_s(files)).encode())
        report = await run_pytest(sandbox, files, timeout_s=_WALL_S)
    finally:
        await sandbox.reset()
    return report if report.finished and not report.timed_out else None


def _broken(report: PytestReport, relevant: list[str]) -> list[str]:
    """The relevant tests that fail, or none when they are too few, too many, or some were not run."""
    outcomes = [report.outcomes.get(node_id, "missing") for node_id in relevant]
    broken = [node_id for node_id, outcome in zip(relevant, outcomes, strict=True) if outcome != "passed"]
    least, most = (share * len(relevant) for share in _BROKEN_SHARE)
    fits = least <= len(broken) <= most and set(outcomes) <= {"passed", "failed", "error"}
    return broken if fits else []


def _faulty_lines(mutant: Mutant) -> list[str]:
    lines: list[str] = []
    moved = 0
    for site in mutant.sites:
        for text, start, end in (
            (mutant.original, site.start, site.end),
            (mutant.changed, site.start + moved, site.start + moved + len(site.replacement)),
        ):
            first = text.rfind("\n", 0, start) + 1
            last = text.find("\n", max(start, end - 1))
            lines += text[first : last if last >= 0 else len(text)].splitlines()
        moved += len(site.replacement) - (site.end - site.start)
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
    shown = {file: hide_tests(tests[file], ids) for file, ids in failing.items()}
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
        setup_patch=unified({**original, **{file: tests[file] for file in hidden_in}}, {**changed, **shown}),
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
        raise TaskError(f"{path}: is not UTF-8 ({error}); add it to the package's skip list") from error


# --- the instruction: what fails, as the tests show it, without where the fault is ---------------------

_MAX_EXAMPLES = 4
_CONTEXT_LINES = 10
_SAID_LINES = 12
_LINE_CHARS = 200


class FailedCheck(Struct, frozen=True):
    """One failing test: its node id and what pytest says of it, as seen from the test's own file."""

    node_id: str
    message: str


def compose(package: str, version: str, module: str, failures: Sequence[FailedCheck]) -> str:
    """The instruction for a package with a fault in `module` (a dotted name), from at least one failure.

    Test functions are shown once each, however many of their parameters fail.
    """
    by_function: dict[str, FailedCheck] = {}
    for failure in failures:
        by_function.setdefault(failure.node_id.partition("[")[0], failure)
    shown = list(by_function.values())[:_MAX_EXAMPLES]
    number = len(by_function)
    broken = "One check that passed before fails" if number == 1 else f"{number} checks that passed before fail"
    parts = [
        f"# {package}: `{module}` misbehaves",
        f"This is the source of {package} {version}. Code in `{module}` used to work and no longer does. "
        f"{broken}:",
        *(_example(number, failure) for number, failure in enumerate(shown, start=1)),
    ]
    if rest := number - len(shown):
        checks = "check on the same code fails" if rest == 1 else "checks on the same code fail"
        parts.append(f"{rest} further {checks} too.")
    parts.append(
        "Find the cause in the package's source and correct it there, so that the checks hold again and all "
        "that works now goes on working. The checks themselves are not in this tree; tests and public interfaces "
        "are to stay as they are."
    )
    return "\n\n".join(parts) + "\n"


def leaks_fault(statement: str, lines: Sequence[str]) -> bool:
    """Whether a statement contains one of the source lines that hold the fault, in its right or wrong form.

    Lines of one word (`pass`, `else:`) say nothing and do not count.
    """
    flat = " ".join(statement.split())
    telling = [line for line in (" ".join(line.split()) for line in lines) if not re.fullmatch(r"\w*:?", line)]
    return any(line in flat for line in telling)


def normalise_message(message: str, workdir: str) -> str:
    """A failure's message without what differs from run to run: places on disk and in memory."""
    message = message.replace(workdir, ".")
    message = re.sub(r"\b0x[0-9a-f]{4,}\b", "0x…", message)
    return re.sub(r"/(?:tmp|home|root|mnt|media|srv|opt|run|var)/[^\s'\",)\]]*", "/…", message)


def _example(number: int, failure: FailedCheck) -> str:
    name = failure.node_id.split("::")[-1].partition("[")[0]
    source, error = _parts(failure.message)
    runs = f" runs\n\n{_fenced('python', source)}\n\nand" if source else ""
    return f"{number}. `{name}`{runs} gets\n\n{_fenced('text', error or 'an error without a message')}"


def _parts(message: str) -> tuple[str, str]:
    """The test's lines down to the statement that failed, and what pytest says of it."""
    source: list[str] = []
    error_lines: list[str] = []
    marked = False
    for line in message.splitlines():
        if re.match(r"E(?: |$)", line):
            error_lines.append(line[4:])
        elif not error_lines:
            marked = marked or line.startswith(">")
            source.append(" " + line[1:] if line.startswith(">") else line)
    if not marked:
        source = []
    code = textwrap.dedent("\n".join(source[-_CONTEXT_LINES:])).strip("\n")
    if len(error_lines) > _SAID_LINES:
        error_lines = [*error_lines[:_SAID_LINES], "…"]
    short = (line if len(line) <= _LINE_CHARS else line[:_LINE_CHARS] + "…" for line in error_lines)
    return code, textwrap.dedent("\n".join(short)).strip("\n")


def _fenced(language: str, text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
