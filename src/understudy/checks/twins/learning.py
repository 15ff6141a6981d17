"""Learns at validation which assertions of deciding tests have twins (see `twins`), and how much they protect.

Three versions are run with the gold patch, and the sites that observe the same in all of them are used. Their
observations never enter a sandbox; other patches have to send the same. The last version is also run over code
that computes nothing new (see `outline`): what it observes rightly needs no guess.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.base import GradingOptions, TwinTest
from understudy.checks.twins.clues import Clues
from understudy.checks.twins.guessing import is_readable_elsewhere, secret_bits
from understudy.checks.twins.judge import (
    DIGESTED,
    Observation,
    holds,
    is_reordered,
    is_rest,
    without_rest,
)
from understudy.checks.twins.other_inputs import InputDraws, learn_inputs
from understudy.checks.twins.run import (
    ENOUGH_BITS,
    References,
    VersionRun,
    WrittenVersion,
    emptied_functions,
    names_in_version,
    readable_values,
    write_versions,
)
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.test_ids import DecidingTests, function_of
from understudy.checks.twins.twin_decoding import decode
from understudy.types import TestOutcome
from understudy.util.python_syntax import parse_literal

RunVersions = Callable[[GradingOptions, Sequence[WrittenVersion]], Awaitable[VersionRun]]
"""Runs a version over the gold patch. Others after it may run beside it; all were written with the options."""


class _Runs(Struct, frozen=True):
    """The runs that twins are learned from: with the gold patch, with the tests' own names and values; all
    expectations changed; as used for grading. `effortless` are those of the last one over effortless code.
    """

    named: VersionRun
    changed: VersionRun
    true: VersionRun
    effortless: tuple[VersionRun, ...] = ()


async def learn_twins(
    tests: DecidingTests,
    options: GradingOptions,
    data: Mapping[str, bytes],
    references: References,
) -> GradingOptions:
    """Return the options with the twins of a task's deciding tests, as learned by runs with the gold patch.

    `data` are hidden files without versions, by path: tested code can read them.
    """
    options = replace(options, twin_seed=secrets.randbits(32), twin_plain=(), twin_named=())
    options = replace(options, twin_uncut=(), twin_fixed=())
    inputs = await asyncio.to_thread(InputDraws, tests, references.code)
    run = partial(_run_beside_inputs, inputs, references)
    named = await _run_uncut(tests, options, run)
    if not_passing := _files_not_passing(tests, named):
        options = replace(options, twin_named=not_passing)
        named = await _run_uncut(tests, options, run)
    options = replace(options, twin_plain=_sites_to_evaluate(named))
    runs = await _run_both(tests, options, run, named)
    broken = _broken_files(named, runs.true)
    if broken:
        options = replace(options, twin_uncut=broken)
        runs = await _run_both(tests, options, run, named)
    learn = partial(_options_of_runs, tests, data=data, references=references)
    learned = await asyncio.to_thread(learn, options, runs)
    # Inputs of other tests may reveal what a test expects. Whether fewer expectations are revealed without those
    # tests is first computed from the observations that exist already.
    split_options = replace(options, twin_apart=True)
    if _quality(await asyncio.to_thread(learn, split_options, runs)) > _quality(learned):
        split_runs = await _run_both(tests, split_options, run, named)
        if not _broken_files(named, split_runs.true):
            split_learned = await asyncio.to_thread(learn, split_options, split_runs)
            if _quality(split_learned) > _quality(learned):
                options, runs = split_options, split_runs
    versions = [
        await asyncio.to_thread(write_versions, tests, options, lambda _: False, emptied=emptied)
        for emptied in emptied_functions(tests, options)
    ]
    effortless = await references.effortless(versions)
    runs = replace(runs, effortless=tuple(run for of_version in effortless for run in of_version))
    options = await asyncio.to_thread(learn, options, runs)
    return await learn_inputs(tests, options, named, data, references, inputs)


async def _run_beside_inputs(
    inputs: InputDraws, references: References, options: GradingOptions, versions: Sequence[WrittenVersion]
) -> VersionRun:
    """Run a version over the gold patch, and let those run beside it that are mostly needed next: the rest of
    `versions`, and those with other inputs.
    """
    version, *others = versions
    others += [
        replace(other, reseeded=version.reseeded) for other in await asyncio.to_thread(inputs.likely, options)
    ]
    return await references.gold(version, others)


def _quality(options: GradingOptions) -> tuple[int, float, int]:
    """Return a sort key of options: more tests with twins, then more bits to guess, then fewer partial twins are
    better.
    """
    return len(options.twins), min(options.twin_bits, ENOUGH_BITS), -len(options.partial_twins)


def _options_of_runs(
    tests: DecidingTests,
    options: GradingOptions,
    runs: _Runs,
    *,
    data: Mapping[str, bytes],
    references: References,
) -> GradingOptions:
    """Return the options with the twins that the runs with the gold patch confirm."""
    named_run, changed_run, true_run = runs.named, runs.changed, runs.true
    names = names_in_version(named_run, true_run)
    fixed = _not_changeable(names, changed_run, true_run)
    options = replace(options, twin_fixed=tuple(sorted(fixed)))
    clues_by_version = [
        (emptied, Clues(readable_values(write_versions(tests, options, lambda _: False, emptied=emptied), data)))
        for emptied in emptied_functions(tests, options)
    ]
    twins: dict[str, TwinTest] = {}
    exposed: list[str] = []
    expected: list[tuple[TwinSite, list[Observation]]] = []
    secret: list[tuple[TwinSite, list[Observation]]] = []
    for node in (*tests.fail_to_pass, *tests.pass_to_pass):
        name = names.get(node, "")
        if named_run.outcomes.get(node) != "passed" or true_run.outcomes.get(name) != "passed":
            continue
        gold = true_run.observations.get(name, {})
        ended = changed_run.outcomes.get(name) == "passed"
        confirming = (
            (named_run, node, frozenset(options.twin_plain)),
            (changed_run, name, frozenset(fixed if ended else gold)),
            (true_run, name, frozenset[int]()),
        )
        stable = _stable_sites(confirming, gold)
        results = {number for number in stable if true_run.sites[number].operation in ("result", "own")}
        ends = {
            number: observations
            for number, observations in stable.items()
            if true_run.sites[number].operation == "end"
        }
        sites = {
            number: observations for number, observations in stable.items() if number not in results | ends.keys()
        } or ends
        if not sites and not results:
            continue
        gold_observations = {
            number: json.dumps(observations) for number, observations in sites.items()
        } | dict.fromkeys(results, "[]")
        twins[node] = TwinTest(name, gold_observations)
        version_clues = next(clues for emptied, clues in clues_by_version if function_of(node) not in emptied)
        effective_sites = {
            number: _effective_site(true_run.sites[number], observations, version_clues, fixed=number in fixed)
            for number, observations in sites.items()
        }
        some_exposed = not effective_sites or not all(
            site.withheld or site.changeable for site in effective_sites.values()
        )
        some_exposed |= ended and any(
            is_reordered(true_run.sites[number], observations, changed_run.observations[name][number])
            for number, observations in sites.items()
            if number not in fixed
        )
        if some_exposed or _evaluates_other_sites(named_run, node, sites):
            exposed.append(node)
        if node in tests.fail_to_pass:
            for number, observations in sites.items():
                expected.append((effective_sites[number], without_rest(observations)))
                if not _is_effortless(runs, node, name, number, observations):
                    secret.append(expected[-1])
    clues = Clues(clues_by_version[0][1].readable, references.texts, references.sources)
    options = replace(options, twin_bits=round(secret_bits(secret, clues), 1))
    options = replace(options, twin_all_bits=round(secret_bits(expected, clues), 1))
    return replace(options, twins=twins, partial_twins=tuple(exposed))


def _is_effortless(runs: _Runs, node: str, name: str, number: int, gold: Sequence[Observation]) -> bool:
    """Return whether code that computes nothing new observes at a site what the gold patch does."""
    return any(
        function_of(node) not in run.emptied
        and number in run.sites
        and bool(observations := run.observations.get(name, {}).get(number, []))
        and holds(runs.true.sites[number], gold, observations)
        for run in runs.effortless
    )


def _effective_site(site: TwinSite, observations: Sequence[Observation], clues: Clues, *, fixed: bool) -> TwinSite:
    """Return a site with the protection that it really gives.

    It is not changeable if tested code can detect the change, and not withheld if tested code can read the
    expectation elsewhere, or if not all its observations are sent and a digest of the rest is no evidence.
    """
    is_cut_off = site.operation not in DIGESTED and any(map(is_rest, observations))
    is_recognisable = site.changeable and clues.readable.occurs_twice(parse_literal(site.expected))
    return replace(
        site,
        changeable=site.changeable and not fixed and not is_recognisable,
        withheld=site.withheld
        and not is_cut_off
        and not is_readable_elsewhere(site, without_rest(observations), clues),
    )


def _not_changeable(names: Mapping[str, str], changed: VersionRun, true: VersionRun) -> set[int]:
    """Return the sites that did not fail with a changed expectation, or whose test did not come to its end."""
    return {
        number
        for name in names.values()
        for number, observations in true.observations.get(name, {}).items()
        if true.sites[number].changeable
        and (
            changed.outcomes.get(name) != "passed"
            or not holds(changed.sites[number], observations, changed.observations.get(name, {}).get(number, []))
        )
    }


def _stable_sites(
    runs: Sequence[tuple[VersionRun, str, frozenset[int]]], gold: Mapping[int, list[Observation]]
) -> dict[int, list[Observation]]:
    """Return the sites that hold in all runs. `runs` has for each run the test's name in it, and the sites that it
    does not cover.
    """
    return {
        number: observations
        for number, observations in gold.items()
        if all(
            number in excluded
            or (
                number in run.sites
                and holds(run.sites[number], observations, run.observations.get(name, {}).get(number, []))
            )
            for run, name, excluded in runs
        )
    }


async def _run_both(tests: DecidingTests, options: GradingOptions, run: RunVersions, named: VersionRun) -> _Runs:
    """Run the version with every changeable expectation changed, then the true version.

    The first runs with another hash seed: what depends on the order of sets differs between the two.
    """
    joined_runs: list[VersionRun] = []
    for changed in (True, False):
        write = partial(write_versions, tests, options, lambda _, changed=changed: changed)
        versions = [
            replace(await asyncio.to_thread(write, emptied=emptied), reseeded=changed)
            for emptied in emptied_functions(tests, options)
        ]
        joined_runs.append(_join_runs([await run(options, versions[number:]) for number in range(len(versions))]))
    return _Runs(named, joined_runs[0], joined_runs[1])


def _join_runs(runs: Sequence[VersionRun]) -> VersionRun:
    """Join the runs that one version's tests are spread over: each test comes from the run in which it is not
    emptied.
    """
    if len(runs) == 1:
        return runs[0]
    sites: dict[int, TwinSite] = {}
    outcomes: dict[str, TestOutcome] = {}
    observations: dict[str, dict[int, list[Observation]]] = {}
    for results in zip(*(run.outcomes.items() for run in runs), strict=False):
        for run, (node, outcome) in zip(runs, results, strict=True):
            if function_of(node) in run.emptied:
                continue
            outcomes[node], observations[node] = outcome, run.observations.get(node, {})
            for number in observations[node].keys() & run.sites.keys():
                previous = sites.get(number, run.sites[number])
                sites[number] = replace(
                    run.sites[number], withheld=previous.withheld and run.sites[number].withheld
                )
    return replace(runs[0], sites=sites, outcomes=outcomes, observations=observations, emptied=frozenset())


async def _run_uncut(tests: DecidingTests, options: GradingOptions, run: RunVersions) -> VersionRun:
    """Run the true version with all values and test ids, by which tests are identified in the other versions. The
    one without them, which is used for grading, mostly comes next.
    """
    versions = [
        await asyncio.to_thread(write_versions, tests, options, lambda _: False, cut=cut) for cut in (False, True)
    ]
    return await run(options, versions)


def _files_not_passing(tests: DecidingTests, named: VersionRun) -> tuple[str, ...]:
    """Return the files with deciding tests that do not pass as versions; maybe they need their own names."""
    nodes = (*tests.fail_to_pass, *tests.pass_to_pass)
    return tuple(sorted({node.partition("::")[0] for node in nodes if named.outcomes.get(node) != "passed"}))


def _evaluates_other_sites(run: VersionRun, node: str, sites: Mapping[int, object]) -> bool:
    """Return whether a test evaluated an assertion in this run that is not among `sites`."""
    return any(
        run.sites[site].operation not in ("end", "result", "own")
        for site in run.observations.get(node, {})
        if site not in sites
    )


def _sites_to_evaluate(run: VersionRun) -> tuple[int, ...]:
    """Return the sites whose observations cannot be judged outside of the process."""
    indexes: set[int] = set()
    for sites in run.observations.values():
        for number, observations in sites.items():
            site = run.sites.get(number)
            if site is None or site.operation in ("truth", "pair", "end", "result", "own"):
                continue
            if not holds(site, observations, observations) or any(
                observation[0] == "value" and not _is_readable(observation) for observation in observations
            ):
                indexes.add(number)
    return tuple(sorted(indexes))


def _is_readable(observation: Observation) -> bool:
    try:
        decode(observation[1])
    except (ValueError, IndexError):
        return False
    return True


def _broken_files(named: VersionRun, run: VersionRun) -> tuple[str, ...]:
    """Return the files whose tests no longer pass once unused values are removed."""
    names = names_in_version(named, run)
    return tuple(
        sorted(
            {
                node.partition("::")[0]
                for node, outcome in named.outcomes.items()
                if outcome == "passed" and run.outcomes.get(names.get(node, "")) != "passed"
            }
        )
    )
