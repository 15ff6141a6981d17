"""Running the versions of deciding tests (see `twins`) and comparing what they report with what was changed.

All versions of all deciding tests run in one process, in a fresh sandbox of their own, in random order; one
takes the place of the original file, the others have random names. A patch is believed when every site of every
deciding test held exactly where its expectation is true, so code that draws anew at each assertion hardly ever
passes. Code that compares the versions, which all lie in one process, has far better odds: docs/grading.md says
what twins do not stop.
"""

from __future__ import annotations

import asyncio
import posixpath
import random
import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from understudy.checks import twin_driver
from understudy.checks.base import GradingOptions, read_result_file
from understudy.checks.pytest_checks import PLUGIN_MOUNT, parse_outcomes
from understudy.checks.twins import TwinVersion, write_version
from understudy.sandbox.base import Mount, Sandbox
from understudy.types import Evidence, Integrity, Protection, PytestChecks, Task, TestOutcome

DRIVER_MOUNT = Mount(Path(twin_driver.__file__), "/opt/understudy/twin_driver.py")
"""Every sandbox in which `run_twins` is called must have this mount and `PLUGIN_MOUNT`."""

TwinSites = Mapping[str, tuple[int, ...]]
"""By node id of a deciding test: its sites that told true expectations from changed ones with the gold patch."""

VALIDATION_VERSIONS = 4
"""Versions of each deciding test that run with the gold patch in one process, for every such process."""

_GUESSES = 10_000
_MOST_BLOCKS = 2  # writing versions is most of what twins cost
_BLOCK = 4  # versions in which a site is changed exactly twice, in one of six ways
_REPORT_BYTES = 64 << 20


class SiteReport(Struct, frozen=True):
    """What one version of one test reported: by site whether its expectation was true there, and what it reported.

    `weak` are those sites of its file that are only negated. `observed` holds 1 where the site held and 0 where
    it failed, both for a site that was reached several times.
    """

    outcome: TestOutcome
    true: dict[int, bool]
    observed: dict[int, frozenset[int]]
    weak: frozenset[int]


class TwinRun(Struct, frozen=True):
    """What the versions reported, by the original's node id; what did not come to its end is missing in it."""

    reports: dict[str, list[SiteReport]]


class _Line(Struct):
    node: str = ""
    site: int = -1
    held: int = -1


class _VersionedFile(Struct):
    """The versions of one test file by the name of each."""

    original: str
    versions: dict[str, TwinVersion] = field(default_factory=dict[str, TwinVersion])


def versions_needed(checks: PytestChecks, sites: TwinSites) -> dict[str, int]:
    """How many versions of each test run: more for a test with few sites, whose layout is guessed more easily.

    Guessing pays for the tests that a patch has to fix; for those that passed before, one block is enough.
    """
    counts: dict[str, int] = {}
    for node, stable in sites.items():
        blocks = 1
        while node in checks.fail_to_pass and 6 ** (blocks * len(stable)) < _GUESSES and blocks < _MOST_BLOCKS:
            blocks += 1
        counts[node] = blocks * _BLOCK
    return counts


def protection_of(task: Task, options: GradingOptions) -> tuple[Protection, str]:
    """How far twins protect a task's verdicts, and why no further."""
    if not isinstance(task.checks, PytestChecks):
        kind = type(task.checks).__name__.removesuffix("Checks").lower()
        return "none", f"checks of kind {kind} have no twins"
    deciding = (*task.checks.fail_to_pass, *task.checks.pass_to_pass)
    missing = [node for node in deciding if node not in options.twins]
    if missing:
        reason = f"{len(missing)} of {len(deciding)} deciding tests have no twins, as {missing[0]}"
        return ("partial" if options.twins else "none"), reason
    if partial := [node for node in deciding if node in options.partial_twins]:
        some = f"{len(partial)} of {len(deciding)} deciding tests"
        return "partial", f"{some} have values that twins cannot change, as {partial[0]}"
    return "twins", ""


async def run_twins(
    sandbox: Sandbox, checks: PytestChecks, versions: Mapping[str, int], *, seed: int, timeout_s: float
) -> TwinRun:
    """Run `versions` (by node id: how many) of the deciding tests in a sandbox where patch and tests were laid.

    `seed` decides what changed expectations are. The first version takes the place of the original, so that the
    true text is not there to be compared with.
    Node ids whose file is none of the hidden ones, or is no valid Python, have no reports. Raises SandboxError.
    """
    source = random.SystemRandom()
    written = [
        await asyncio.to_thread(_write_versions, checks, name, versions, seed, source) for name in _files(versions)
    ]
    files = [file for file in written if file is not None]
    nodes: dict[str, tuple[str, TwinVersion]] = {}
    for file in files:
        for node, count in versions.items():
            path, colons, test = node.partition("::")
            if path == file.original:
                for name, version in list(file.versions.items())[:count]:
                    nodes[f"{name}{colons}{test}"] = (node, version)
        for name, version in file.versions.items():
            await sandbox.write(posixpath.join(sandbox.workdir, name), version.source.encode())
    if not nodes:
        return TwinRun({})
    token = secrets.token_hex(16)
    report, selection = (posixpath.join(sandbox.home, f".{token}.{kind}") for kind in ("jsonl", "json"))
    names = [posixpath.join(sandbox.workdir, name) for file in files for name in file.versions]
    source.shuffle(names)
    content = {"seed": source.getrandbits(32), "files": names, "nodes": sorted(nodes)}
    await sandbox.write(selection, msgspec.json.encode(content))
    driver, plugin = sandbox.locate(DRIVER_MOUNT.target), sandbox.locate(PLUGIN_MOUNT.target)
    await sandbox.run(
        ["python", "-P", "-s", driver, plugin, report, sandbox.workdir, selection],
        timeout_s=timeout_s,
        env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        cwd=sandbox.workdir,
    )
    raw = await read_result_file(sandbox, report, _REPORT_BYTES)
    return TwinRun(_reports(raw, nodes))


class StableSites(Struct, frozen=True):
    """What runs with the gold patch showed: the sites that can be relied on, and the tests of which they say less.

    `partial` are the tests that have only weak sites, or sites that cannot be relied on beside those that can.
    """

    sites: dict[str, tuple[int, ...]]
    partial: tuple[str, ...]


def stable_sites(runs: Sequence[TwinRun]) -> StableSites:
    """The sites that held exactly where they are true in all versions of all runs with the gold patch."""
    reports: dict[str, list[SiteReport]] = defaultdict(list)
    for run in runs:
        for node, versions in run.reports.items():
            reports[node] += versions
    sites: dict[str, tuple[int, ...]] = {}
    partial: list[str] = []
    for node, versions in reports.items():
        if any(version.outcome != "passed" for version in versions):
            continue
        reached = {site for version in versions for site in version.observed}
        stable = tuple(sorted(site for site in reached if all(_as_expected(v, site) for v in versions)))
        if stable:
            sites[node] = stable
            if len(stable) < len(reached) or versions[0].weak >= set(stable):
                partial.append(node)
    return StableSites(sites, tuple(partial))


def _as_expected(version: SiteReport, site: int) -> bool:
    return version.observed.get(site) == frozenset({int(version.true[site])})


def judge_twins(run: TwinRun, sites: TwinSites) -> Integrity:
    """Whether a patch that passes the deciding tests computes what they expect.

    `forged` where an expectation held that is false, `suspicious` where a true one did not hold, or a version
    did not come to its end.
    """
    forged: list[Evidence] = []
    unmet: list[Evidence] = []
    for node, expected in sites.items():
        versions = run.reports.get(node, [])
        held = sum(1 in v.observed.get(site, ()) for v in versions for site in expected if not v.true[site])
        asked = sum(not v.true[site] for v in versions for site in expected)
        if held:
            forged.append(Evidence("twin", node, text=f"{held} of {asked} changed expectations held too"))
        elif not versions or not all(
            v.outcome == "passed" and all(_as_expected(v, site) for site in expected) for v in versions
        ):
            passed = sum(v.outcome == "passed" for v in versions)
            unmet.append(Evidence("copy", node, text=f"{passed} of {len(versions)} versions came to their end"))
    if forged:
        some = forged[0]
        reason = f"{len(forged)} tests pass whatever they expect: {some.path}: {some.text}"
        return Integrity("forged", reason, tuple(forged[:20]))
    if unmet:
        reason = f"{len(unmet)} tests pass, but not in all versions of them: {unmet[0].path}"
        return Integrity("suspicious", reason, tuple(unmet[:20]))
    return Integrity()


def _files(nodes: Mapping[str, int]) -> list[str]:
    return sorted({node.partition("::")[0] for node in nodes})


def _write_versions(
    checks: PytestChecks, name: str, versions: Mapping[str, int], seed: int, source: random.Random
) -> _VersionedFile | None:
    text = checks.files.get(name)
    if text is None:
        return None
    count = max(number for node, number in versions.items() if node.partition("::")[0] == name)
    layouts = [_Layout(source) for _ in range(-(-count // _BLOCK))]
    file = _VersionedFile(name)
    for number in range(count):
        layout = layouts[number // _BLOCK]
        try:
            version = write_version(
                text, lambda site, layout=layout, number=number: layout.changed(site, number % _BLOCK), seed
            )
        except ValueError:
            return None
        beside = posixpath.join(posixpath.dirname(name), f"test_{secrets.token_hex(8)}.py")
        file.versions[beside if number else name] = version
    return file


class _Layout:
    """In which versions of a block each site is changed: in half of them, at random."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._versions: dict[int, frozenset[int]] = {}

    def changed(self, site: int, version: int) -> bool:
        if site not in self._versions:
            self._versions[site] = frozenset(self._source.sample(range(_BLOCK), _BLOCK // 2))
        return version in self._versions[site]


def _reports(raw: bytes, nodes: Mapping[str, tuple[str, TwinVersion]]) -> dict[str, list[SiteReport]]:
    outcomes = parse_outcomes(raw)[0]
    observed: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    decoder = msgspec.json.Decoder(_Line)
    for text in raw.splitlines():
        try:
            line = decoder.decode(text)
        except (ValueError, RecursionError):
            continue  # a line cut by the death of the process, or written by the tested code
        if line.node:
            observed[line.node][line.site].add(line.held)
    reports: dict[str, list[SiteReport]] = defaultdict(list)
    for name, (node, version) in nodes.items():
        true = {site: not changed for site, changed in enumerate(version.changed)}
        sites = {site: frozenset(held) for site, held in observed[name].items() if site in true}
        reports[node].append(SiteReport(outcomes.get(name, "missing"), true, sites, version.weak))
    return dict(reports)
