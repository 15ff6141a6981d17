"""Runs versions of deciding tests (see `twins`) and judges what they observed.

Each version runs alone: in a fresh sandbox, in place of the original file, with all tests of the files in their
own order, so that tested code cannot learn what another version expected. Only versions with other inputs, which
say nothing of what is expected, and those of validation may share a sandbox. Validation runs three versions with
the gold patch and keeps the sites that observe the same in all of them. These observations never enter a sandbox;
other patches have to send the same.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.base import (
    GradingOptions,
    check_not_killed,
    output_tail,
    read_result_file,
    report_lines,
)
from understudy.checks.input_changes import InputChanges
from understudy.checks.pytest_checks import PLUGIN_MOUNT, deciding_files, parse_outcomes
from understudy.checks.twins import twin_driver, twin_encoding
from understudy.checks.twins.exposure import ReadableValues
from understudy.checks.twins.judge import (
    Observation,
    judge,
    load_observations,
    raised_by_gold,
)
from understudy.checks.twins.neutral_names import by_original_names
from understudy.checks.twins.operands import NUMBERS_PER_FILE
from understudy.checks.twins.sites import IMPORT, TwinSite
from understudy.checks.twins.test_ids import DecidingTests, function_of, names_of_tests
from understudy.checks.twins.versions import write_version
from understudy.checks.twins.weakness import weakness
from understudy.sandbox.base import Completed, Mount, Sandbox
from understudy.types import Evidence, Integrity, PytestChecks, TestOutcome

DRIVER_MOUNT = Mount(Path(twin_driver.__file__), "/opt/understudy/twin_driver.py")
DRIVER_MOUNTS = (
    DRIVER_MOUNT,
    # The driver loads it from its own directory.
    Mount(Path(twin_encoding.__file__), "/opt/understudy/twin_encoding.py"),
)
"""Every sandbox in which `run_versions` is called must have these mounts and `PLUGIN_MOUNT`."""

ATTEMPTS = 2
"""How often the versions are run for a patch that fails them, because some tests are flaky."""

REPORT_BYTES = 64 << 20
_MAX_CODES_BYTES = 4096
ENOUGH_BITS = 10.0  # a guess then succeeds once in a thousand times


class WrittenVersion(Struct, frozen=True):
    """One rewritten version of all hidden files. `files` has the files by path, `sites` their sites (rewritten
    assertions) by number, and `names` by file the tests' old names by their new ones. The functions in `emptied`
    do nothing. If `reseeded`, it runs with another hash seed than the tests, and so with sets in another order.
    """

    files: dict[str, str]
    sites: dict[int, TwinSite]
    names: dict[str, dict[str, str]] = {}
    emptied: frozenset[str] = frozenset()
    reseeded: bool = False


class VersionRun(Struct, frozen=True):
    """The result of running a version: outcomes and observations by node id, in the tests' own names and order.

    `changed_files` are the version's files that had changed when it ended. There are no results for functions in
    `emptied`. `stopped` has the tests that an exception ended, with the names of its classes, its own first.
    """

    sites: dict[int, TwinSite]
    outcomes: dict[str, TestOutcome]
    observations: dict[str, dict[int, list[Observation]]]
    exit_code: int | None
    timed_out: bool
    log: str
    changed_files: tuple[str, ...] = ()
    emptied: frozenset[str] = frozenset()
    stopped: dict[str, tuple[str, ...]] = {}


class References(Struct, frozen=True):
    """What validation learns from and compares with. `gold` runs a version over the gold patch, perhaps beside
    others that will probably be needed. `solution` runs several; it returns None for one that broke the sandbox or
    observed nothing. `effortless` runs them over code that computes nothing new: the names
    that the tests need, and the old behaviour. It returns the runs of each version without those that failed.

    `texts` (the instruction and docstrings) and `sources` (the changed files without the gold patch) are what a
    guess can go by; `code` are these files with the gold patch.
    """

    gold: Callable[[WrittenVersion, Sequence[WrittenVersion]], Awaitable[VersionRun]]
    solution: Callable[[Sequence[WrittenVersion]], Awaitable[Sequence[VersionRun | None]]]
    effortless: Callable[[Sequence[WrittenVersion]], Awaitable[Sequence[Sequence[VersionRun]]]]
    texts: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


def write_versions(
    tests: DecidingTests,
    options: GradingOptions,
    changed: Callable[[int], bool],
    *,
    cut: bool = True,
    emptied: frozenset[str] = frozenset(),
    inputs: InputChanges | None = None,
) -> WrittenVersion:
    """Return a version of the hidden files; files that are not valid Python are left as they are."""
    files = dict(tests.files)
    sites: dict[int, TwinSite] = {}
    names: dict[str, dict[str, str]] = {}
    plain = frozenset(options.twin_plain)
    for number, name in enumerate(sorted(name for name in files if name.endswith(".py"))):
        try:
            version = write_version(
                files[name],
                first=number * NUMBERS_PER_FILE,
                plain=plain,
                cut=cut and name not in options.twin_uncut,
                neutral=name not in options.twin_named,
                emptied=emptied,
                changed=changed,
                seed=options.twin_seed,
                inputs=inputs,
            )
        except ValueError:
            continue
        files[name] = version.source
        sites |= version.sites
        names[posixpath.normpath(name)] = version.names
    return WrittenVersion(files, sites, names, emptied)


def readable_values(version: WrittenVersion, data: Mapping[str, bytes]) -> ReadableValues:
    """Return what tested code can read while a version runs; `data` are hidden files without versions, by path."""
    sources = [text for name, text in version.files.items() if name.endswith(".py") and IMPORT in text]
    other_files = [text.encode() for text in version.files.values() if text not in sources]
    return ReadableValues(
        sources, [*other_files, *(raw for name, raw in data.items() if name not in version.files)]
    )


def _by_file(names: Mapping[str, TestOutcome]) -> dict[str, list[str]]:
    files: dict[str, list[str]] = {}
    for name in names:
        files.setdefault(name.partition("::")[0], []).append(name)
    return files


def names_in_version(named: VersionRun, run: VersionRun) -> dict[str, str]:
    """Return a test's id in a version by its original node id: the test at the same position in the file."""
    after = _by_file(run.outcomes)
    names: dict[str, str] = {}
    for file, before in _by_file(named.outcomes).items():
        if len(before) == len(after.get(file, [])):
            names |= zip(before, after[file], strict=True)
    return {node: name for node, name in names.items() if node.partition("[")[0] == name.partition("[")[0]}


def emptied_functions(tests: DecidingTests, options: GradingOptions) -> list[frozenset[str]]:
    """Return, for each version that the tests are spread over, the functions that do nothing in it.

    The tests that the patch must fix are in the first version.
    """
    if not options.twin_apart:
        return [frozenset()]
    to_fix = frozenset(map(function_of, tests.fail_to_pass))
    return [names_of_tests(tests.files) - to_fix, to_fix]


async def run_versions(
    sandbox: Sandbox,
    checks: PytestChecks,
    versions: Sequence[WrittenVersion],
    *,
    timeout_s: float,
    later_s: float = 0.0,
) -> list[VersionRun]:
    """Run the deciding files, after the first version of them was placed in the sandbox; then the next ones, as
    long as nothing is left there of those before, and each of them takes at most `later_s` if that is given.
    Returns at least one run. Raises SandboxError.

    Each has a process of its own, forked from one that has imported pytest. So all have the same hash seed, and
    tested code can learn what later versions hold.
    """
    report = posixpath.join(sandbox.home, f".report-{secrets.token_hex(16)}.jsonl")
    paths = [posixpath.join(sandbox.workdir, name) for name in deciding_files(checks)]
    later = [
        {posixpath.join(sandbox.workdir, name): text for name, text in version.files.items()}
        for version in versions[1:]
    ]
    driver, plugin = sandbox.locate(DRIVER_MOUNT.target), sandbox.locate(PLUGIN_MOUNT.target)
    completed = await sandbox.run(
        ["python", "-P", "-s", driver, plugin, report, sandbox.workdir, *paths],
        timeout_s=timeout_s,
        stdin=json.dumps([later_s, later]).encode() if later else b"",
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=sandbox.workdir,
    )
    if not later:
        return [await _read_run(sandbox, report, versions[0], completed)]
    codes = await _exit_codes(sandbox, report)
    if not codes:
        return [await _read_run(sandbox, f"{report}.0", versions[0], completed)]
    return [
        await _read_run(
            sandbox, f"{report}.{number}", version, replace(completed, exit_code=code, timed_out=False)
        )
        for number, (version, code) in enumerate(zip(versions, codes, strict=False))
    ]


async def _exit_codes(sandbox: Sandbox, report: str) -> list[int]:
    """Return the exit codes of the versions that came to their end, as the driver wrote them."""
    try:
        return msgspec.json.decode(
            await read_result_file(sandbox, report, _MAX_CODES_BYTES) or b"[]", type=list[int]
        )
    except msgspec.MsgspecError:  # tested code can write there
        return []


async def _read_run(sandbox: Sandbox, report: str, version: WrittenVersion, completed: Completed) -> VersionRun:
    check_not_killed(completed)
    raw = await read_result_file(sandbox, report, REPORT_BYTES) or b""
    outcomes, observations, stopped = await asyncio.to_thread(
        lambda: (parse_outcomes(raw)[0], load_observations(raw), load_stopped(raw))
    )
    outcomes, observations = (
        by_original_names(outcomes, version.names),
        by_original_names(observations, version.names),
    )
    return VersionRun(
        version.sites,
        outcomes,
        observations,
        completed.exit_code,
        completed.timed_out,
        output_tail(completed),
        emptied=version.emptied,
        stopped=by_original_names(stopped, version.names),
    )


def load_stopped(raw: bytes) -> dict[str, tuple[str, ...]]:
    """Return the tests that an exception ended by the lines of a report, with the names of its classes."""
    stopped: dict[str, tuple[str, ...]] = {}
    for line in report_lines(raw, json.loads):
        match line:
            case {"node": str(node), "stopped": [str(), *_] as names}:
                stopped[node] = tuple(map(str, names))
            case _:
                pass
    return stopped


# --- grading


class TwinJudgement(Struct, frozen=True):
    """The judgement of a patch by its versions: its integrity, and all nodes of which a version failed.

    `integrity` lists only the first pieces of evidence. `weak` has the nodes whose observations agree but prove
    less than the gold patch's, with what they observed, such as the expected values in another order.
    """

    integrity: Integrity
    failed: frozenset[str] = frozenset()
    weak: dict[str, str] = {}


def judge_twins(options: GradingOptions, runs: Sequence[VersionRun], timeout_s: float) -> TwinJudgement:
    """Judge whether a patch that passes the deciding tests computes what they expect.

    `forged` if a test passes although it observed what no correct solution can: a value that differs from the
    expected one, or a changed expectation that held. `suspicious` if a test did not come to its end, observed
    less, or observed something that cannot be compared.
    """
    forged: list[Evidence] = []
    suspicious: list[Evidence] = []
    weak: dict[str, str] = {}
    gold = {
        node: {number: json.loads(text) for number, text in twin.gold.items()}
        for node, twin in options.twins.items()
    }
    for run in runs:
        raised = raised_by_gold(
            (run.sites[number], gold_observations)
            for observed_by_site in gold.values()
            for number, gold_observations in observed_by_site.items()
            if number in run.sites
        )
        for node, twin in options.twins.items():
            if function_of(node) in run.emptied:
                continue
            observations, outcome = run.observations.get(twin.name, {}), run.outcomes.get(twin.name, "missing")
            judgements = {
                number: judge(run.sites[number], gold_observations, observations.get(number, []), raised)
                for number, gold_observations in gold[node].items()
                if number in run.sites
            }
            wrong = sum(judgement == "contradicts" for judgement in judgements.values())
            reached = [number for number in judgements if observations.get(number)]
            unclear = sum(judgements[number] == "unclear" for number in reached)
            optional = ("result", "own")
            may_miss = sum(
                run.sites[number].operation in optional for number in judgements if not observations.get(number)
            )
            missing = len(twin.gold) - len(reached) - may_miss
            if wrong:
                contradiction = f"{wrong} of {len(twin.gold)} assertions observed another value than they expect"
                forged.append(Evidence("twin", node, text=contradiction))
            elif unclear or missing or outcome != "passed":
                text = f"{outcome}; {missing} of {len(twin.gold)} assertions were not reached"
                text += f", {unclear} observed what cannot be compared" if unclear else ""
                suspicious.append(Evidence("version", node, text=text))
            elif weak_reason := weakness(run.sites, gold[node], observations):
                weak[node] = weak_reason
    failed = frozenset(evidence.path for evidence in (*forged, *suspicious))
    return TwinJudgement(_integrity_of(runs, forged, suspicious, timeout_s), failed, weak)


def _integrity_of(
    runs: Sequence[VersionRun], forged: Sequence[Evidence], suspicious: Sequence[Evidence], timeout_s: float
) -> Integrity:
    for run in runs:
        if run.changed_files:
            reason = (
                f"{len(run.changed_files)} hidden files were changed while the tests ran: {run.changed_files[0]}"
            )
            return Integrity("forged", reason, tuple(Evidence("sealed", path) for path in run.changed_files[:20]))
        if run.timed_out:
            reason = f"a version of the deciding tests did not end in {timeout_s:g} s, though the tests did"
            return Integrity("suspicious", reason, tuple(suspicious[:20]))
    if forged:
        example = forged[0]
        reason = f"{len(forged)} tests pass whatever they expect: {example.path}: {example.text}"
        return Integrity("forged", reason, tuple(forged[:20]))
    if suspicious:
        ending = "" if all(run.exit_code in (0, 1) for run in runs) else "; the process died"
        example = f"{suspicious[0].path} ({suspicious[0].text})"
        reason = f"{len(suspicious)} tests pass, but not in all versions of them: {example}{ending}"
        return Integrity("suspicious", reason, tuple(suspicious[:20]))
    return Integrity()
