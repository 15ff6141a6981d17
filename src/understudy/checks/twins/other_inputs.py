"""Compares a patch's answers to other inputs than the tests' own with those of the gold patch.

Twins withhold what a test expects, but code can know it without computing it: it is usual, the instruction names
it, or the code was told. So validation also runs versions with other inputs (see `input_changes`) over the gold
patch, and stores its answers where they differ from those to the tests' own inputs. Nothing names these, and they
never enter a sandbox. A patch that gives the same answers computes them; one that gives hardly any of them answers
only the tests' own inputs. That is no proof of forging, since a task may leave open what such inputs yield.

Where an input has to be right in itself (a check digit, a date), most others are not, and the gold patch refuses
them. Where the tests expect such an exception of some inputs, refusing others is an answer too.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.base import GradingOptions, OtherInputs, TwinTest
from understudy.checks.input_changes import InputChanges, draw_tokens, tokens_of, words_of_code
from understudy.checks.twins.clues import Clues
from understudy.checks.twins.guessing import secret_bits
from understudy.checks.twins.judge import Observation, holds, without_rest
from understudy.checks.twins.run import (
    ENOUGH_BITS,
    References,
    VersionRun,
    WrittenVersion,
    names_in_version,
    readable_values,
    write_versions,
)
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.test_ids import DecidingTests

_MAX_ANSWER_CHARS, _MAX_ANSWERS_CHARS = 20_000, 2 << 20
"""The length of one stored answer, and of all answers of a validation, in characters."""
_NUMBERS, _WORDS, _LONGER = range(3)
_DRAWS = 3
"""How many other inputs are tried at most while the gold patch refuses all those of some test."""

_CONTRADICTING_SHARE = 0.5
"""A patch that gives less than this share of the gold patch's answers to other inputs does not compute them."""
CONFIRMING_SHARE = 0.9
"""A patch that gives at least this share of the gold patch's answers to other inputs computes them."""

_Answers = dict[str, dict[int, tuple[TwinSite, list[Observation]]]]
"""By node and number, each site as it is compared, and what the gold patch answers there."""


class _InputRuns(Struct, frozen=True):
    """The runs that other inputs are learned from."""

    own_inputs: VersionRun
    """The gold patch with the tests' own inputs."""
    gold: tuple[VersionRun, ...]
    """The gold patch with other inputs."""
    effortless: tuple[VersionRun, ...] = ()
    """Code that computes nothing new, with the same other inputs."""


class InputAgreement(Struct, frozen=True):
    """How far a patch answers other inputs as the gold patch does.

    The share of an answer is how often the patch gives it where the gold patch does: 1 if always, and half if it
    always gives one of two.
    """

    answers: int = 0
    """The number of different answers that the tests to fix get from the gold patch."""
    share: float = 1.0
    """The mean share of these answers."""
    confirmed: frozenset[str] = frozenset()
    """The ids of the deciding tests with a high share."""
    contradicted: dict[str, float] = {}
    """The functions of tests to fix with a low share over all their parameters, and that share: of their answers,
    of those to longer inputs alone, or of the inputs that the gold patch refuses.
    """


def full_agreement(tests: DecidingTests, options: GradingOptions) -> InputAgreement:
    """Return the agreement of a patch that always answers as the gold patch does."""
    same_size = [inputs for inputs in options.twin_inputs if not inputs.changes.longer]
    nodes = frozenset(node for inputs in same_size for node in inputs.tests)
    gold = [
        text
        for inputs in same_size
        for node in tests.fail_to_pass
        if node in inputs.tests
        for text in inputs.tests[node].gold.values()
    ]
    return InputAgreement(len(set(gold)), 1.0, nodes)


def input_versions(tests: DecidingTests, options: GradingOptions) -> list[WrittenVersion]:
    """Return the versions with other inputs that a patch which passes the tests is run with."""
    return [
        write_versions(tests, options, lambda _: False, inputs=inputs.changes) for inputs in options.twin_inputs
    ]


def judge_inputs(
    tests: DecidingTests, options: GradingOptions, runs: Sequence[VersionRun | None]
) -> InputAgreement:
    """Return how far a patch agrees; `runs` are those of `input_versions`, in their order. A version that did not
    run (None) agrees nowhere.
    """
    to_fix = frozenset(tests.fail_to_pass)
    by_answer: dict[str, list[bool]] = {}
    by_node: dict[str, dict[str, list[bool]]] = {}
    by_function: dict[tuple[str, bool], dict[str, list[bool]]] = {}
    refused: dict[str, list[bool]] = {}
    for inputs, run in zip(options.twin_inputs, runs, strict=True):
        for node, name in inputs.refused.items():
            # Which exception it is does not matter: it depends on how the code is written.
            refuses = run is not None and name in run.stopped and run.outcomes.get(name) != "passed"
            refused.setdefault(_unparametrised(node), []).append(refuses)
        for node, test in inputs.tests.items():
            observations = run.observations.get(test.name, {}) if run else {}
            for number, text in test.gold.items():
                gold = json.loads(text)
                site = _compared(run.sites[number], gold) if run and number in run.sites else None
                agrees = site is not None and holds(site, gold, observations.get(number, []))
                longer = inputs.changes.longer
                if not longer:
                    by_node.setdefault(node, {}).setdefault(text, []).append(agrees)
                    if node in to_fix:
                        by_answer.setdefault(text, []).append(agrees)
                if node in to_fix:
                    by_function.setdefault((_unparametrised(node), longer), {}).setdefault(text, []).append(agrees)
    shares = {function: sum(refusals) / len(refusals) for function, refusals in refused.items()}
    for (function, _), of_answers in by_function.items():
        shares[function] = min(_share(of_answers), shares.get(function, 1.0))
    return InputAgreement(
        len(by_answer),
        _share(by_answer),
        frozenset(node for node, answers in by_node.items() if _share(answers) >= CONFIRMING_SHARE),
        {function: share for function, share in shares.items() if share < _CONTRADICTING_SHARE},
    )


def _unparametrised(node: str) -> str:
    """Return a node without its parameters."""
    return node.partition("[")[0]


def _share(answers: Mapping[str, Sequence[bool]]) -> float:
    return (
        sum(sum(agreements) / len(agreements) for agreements in answers.values()) / len(answers)
        if answers
        else 1.0
    )


class InputDraws:
    """Draws other inputs for a task's deciding tests. First only numbers are changed, then words and the lengths
    of lists too, which more often yields what the gold patch does not accept; in the third, numbers, words and
    lists are longer than the tests' own.
    """

    def __init__(self, tests: DecidingTests, code: Iterable[str]) -> None:
        """`code` are the files of the gold patch."""
        self._tests = tests
        self._tokens, self._fixed = _tokens(tests, code)
        self._rng = random.Random(secrets.randbits(64))
        self._written: dict[bytes, WrittenVersion] = {}
        self.first = [self.draw(kind) for kind in (_NUMBERS, _WORDS, _LONGER)]

    def draw(self, kind: int) -> InputChanges:
        """Return new inputs of a kind, which have no tokens if nothing can be changed."""
        changed = frozenset(filter(str.isdigit, self._tokens)) if kind == _NUMBERS else self._tokens
        seed = secrets.randbits(32) | 1 if kind != _NUMBERS else 0
        longer = kind == _LONGER
        return InputChanges(draw_tokens(changed, self._fixed, self._rng, longer=longer), seed, longer)

    def write(self, options: GradingOptions, changes: InputChanges) -> WrittenVersion:
        """Return the version with these inputs, which is written once for equal options."""
        of_version = (options.twin_plain, options.twin_uncut, options.twin_named, changes)
        key = msgspec.json.encode(of_version)
        if key not in self._written:
            self._written[key] = write_versions(self._tests, options, lambda _: False, inputs=changes)
        return self._written[key]

    def likely(self, options: GradingOptions) -> list[WrittenVersion]:
        """Return the versions with the first inputs of each kind, if the tests turn out to have twins."""
        return [self.write(options, changes) for changes in self.first if changes.tokens]


async def learn_inputs(
    tests: DecidingTests,
    options: GradingOptions,
    own_inputs: VersionRun,
    data: Mapping[str, bytes],
    references: References,
    inputs: InputDraws,
) -> GradingOptions:
    """Return the options with other inputs for a task's deciding tests, as far as there are any.

    Of several draws that one counts to which the gold patch answers in most tests; the longer inputs count if it
    answered to others. `own_inputs` is the run with the gold patch and the
    tests' own values.
    """
    if not any(node in options.twins for node in tests.fail_to_pass):
        return options
    learn = partial(_learn, tests, options, own_inputs, data, references, inputs)
    candidates = [[learned] for learned in await learn(inputs.first)]
    for kind in (_NUMBERS, _WORDS):
        while _only_refused(candidates[kind][-1]) and len(candidates[kind]) < _DRAWS:
            candidates[kind] += await learn([inputs.draw(kind)])
    numbers, words, longer = (
        max(of_kind, key=lambda learned: len(frozenset(map(_unparametrised, learned.tests))))
        for of_kind in candidates
    )
    learned = [numbers, words]
    if numbers.tests or words.tests:
        # A task seldom says what becomes of inputs of any size: they show what a patch cannot do, and no more.
        learned.append(replace(longer, bits=0.0, refused={}))
    return replace(options, twin_inputs=tuple(other for other in learned if other.tests or other.refused))


def _only_refused(inputs: OtherInputs) -> bool:
    """Return whether there is a test of whose inputs the gold patch refuses all."""
    return not {*map(_unparametrised, inputs.refused)} <= {*map(_unparametrised, inputs.tests)}


async def _learn(
    tests: DecidingTests,
    options: GradingOptions,
    own_inputs: VersionRun,
    data: Mapping[str, bytes],
    references: References,
    inputs: InputDraws,
    draws: Sequence[InputChanges],
) -> list[OtherInputs]:
    """Return other inputs with these changes, without tests where the gold patch's answers to them show nothing.

    Each further run is made only of those inputs that have shown something before.
    """
    expected = _expected_exceptions(options, own_inputs)

    # Answers of tests that need no fix can only confirm these, which changes nothing where guesses pass.
    useful = {*tests.fail_to_pass, *(options.partial_twins if options.twin_bits >= ENOUGH_BITS else ())}

    def read(runs: _InputRuns) -> tuple[_Answers, dict[str, str]]:
        answers = _answers(tests, options, runs)
        return answers if answers.keys() & useful else {}, _refused(tests, options, runs, expected)

    async def still_shown(runs: Mapping[int, _InputRuns]) -> dict[int, _InputRuns]:
        return {number: of_draw for number, of_draw in runs.items() if any(await asyncio.to_thread(read, of_draw))}

    versions = {
        number: await asyncio.to_thread(inputs.write, options, changes)
        for number, changes in enumerate(draws)
        if changes.tokens
    }
    gold = await references.solution(list(versions.values()))
    shown = await still_shown(
        {number: _InputRuns(own_inputs, (run,)) for number, run in zip(versions, gold, strict=True) if run}
    )
    again = await references.solution([replace(versions[number], reseeded=True) for number in shown])
    shown = await still_shown(
        {
            number: replace(shown[number], gold=(*shown[number].gold, run))
            for number, run in zip(shown, again, strict=True)
            if run
        }
    )
    effortless = await references.effortless([versions[number] for number in shown])
    learned = [OtherInputs(changes, {}, 0.0) for changes in draws]
    for number, of_version in zip(shown, effortless, strict=True):
        runs = replace(shown[number], effortless=tuple(of_version))
        answers, refused = await asyncio.to_thread(read, runs)
        readable = await asyncio.to_thread(readable_values, versions[number], data)
        clues = Clues(readable, references.texts, references.sources)
        learned[number] = _other_inputs(tests, draws[number], runs, answers, refused, clues)
    return learned


def _other_inputs(
    tests: DecidingTests,
    changes: InputChanges,
    runs: _InputRuns,
    answers: _Answers,
    refused: dict[str, str],
    clues: Clues,
) -> OtherInputs:
    to_fix = [
        (site, observations)
        for node in tests.fail_to_pass
        for site, observations in answers.get(node, {}).values()
        if site.operation != "raises"
    ]
    names = names_in_version(runs.own_inputs, runs.gold[0])
    twin_tests = {
        node: TwinTest(
            names[node], {number: json.dumps(observations) for number, (_, observations) in sites.items()}
        )
        for node, sites in answers.items()
    }
    bits = secret_bits(((site, without_rest(observations)) for site, observations in to_fix), clues)
    return OtherInputs(changes, twin_tests, round(bits, 1), refused)


def _expected_exceptions(options: GradingOptions, own_inputs: VersionRun) -> frozenset[str]:
    """Return the names of the exceptions that the gold patch raises where the deciding tests expect one."""
    observed = (
        json.loads(text)
        for twin in options.twins.values()
        for number, text in twin.gold.items()
        if number in own_inputs.sites and own_inputs.sites[number].operation == "raises"
    )
    # Where it is evaluated in the process, only whether it holds was observed.
    raised = (
        observation[1]
        for observations in observed
        for observation in without_rest(observations)
        if observation[0] == "kind"
    )
    return frozenset(str(kinds[0]) for kinds in raised if kinds)


def _refused(
    tests: DecidingTests, options: GradingOptions, runs: _InputRuns, expected: frozenset[str]
) -> dict[str, str]:
    """Return the tests to fix that an expected exception ends in all runs of the gold patch, and in none without
    it, by their names in the version.
    """
    names = names_in_version(runs.own_inputs, runs.gold[0])
    return {
        node: name
        for node in tests.fail_to_pass
        if node in options.twins
        and (name := names.get(node, ""))
        and all(expected.intersection(run.stopped.get(name, ())[:1]) for run in runs.gold)
        and not any(name in run.stopped for run in runs.effortless)
    }


def _tokens(tests: DecidingTests, code: Iterable[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return what can be changed in the hidden files, and the words among it that keep their meaning only as they
    are.
    """
    tokens: set[str] = set()
    for name, text in tests.files.items():
        if name.endswith(".py"):
            with suppress(ValueError):  # no version is made of such a file
                tokens |= tokens_of(text)
    return frozenset(tokens), words_of_code(code)


def _answers(tests: DecidingTests, options: GradingOptions, runs: _InputRuns) -> _Answers:
    """Return the answers of the gold patch that say something, by node and site: the same in all its runs, others
    than to the tests' own inputs, and in the tests to fix others than those of code that computes nothing new.
    An exception counts where the test expects one.
    """
    names = names_in_version(runs.own_inputs, runs.gold[0])
    answers: _Answers = {}
    remaining_chars = _MAX_ANSWERS_CHARS
    for node, twin in options.twins.items():
        name = names.get(node, "")
        effortless = runs.effortless if node in tests.fail_to_pass else ()
        for number, gold in runs.gold[0].observations.get(name, {}).items():
            site = _compared(runs.gold[0].sites[number], gold) if number in runs.gold[0].sites else None
            if site is None or number not in twin.gold:
                continue
            meaningless_answers = [run.observations.get(name, {}).get(number, []) for run in effortless]
            if site.operation != "raises":
                meaningless_answers.append(json.loads(twin.gold[number]))
            if any(holds(site, gold, meaningless) for meaningless in meaningless_answers) or not all(
                holds(site, gold, run.observations.get(name, {}).get(number, [])) for run in runs.gold
            ):
                continue
            size = len(json.dumps(gold))
            if size <= min(_MAX_ANSWER_CHARS, remaining_chars):
                remaining_chars -= size
                answers.setdefault(node, {})[number] = (site, gold)
    return answers


def _compared(site: TwinSite, gold: Sequence[Observation]) -> TwinSite | None:
    """Return the site as its answers are compared with the gold patch's; None for one whose answers honest patches
    need not share, such as a message of which the test looks for a part.
    """
    kinds = {str(observation[0]) for observation in gold}
    site = replace(site, withheld=True, changeable=False)
    if site.operation in ("equal", "same", "count", "approx") and kinds <= {"value", "rest"}:
        return site
    if site.operation == "compare" and site.operator == "is" and kinds == {"value"}:
        return replace(site, operation="equal")
    if site.operation == "raises" and kinds == {"kind"}:
        return replace(site, operator="")
    if (
        site.operation == "truth"
        and kinds == {"truth"}
        and len({bool(observation[1]) for observation in gold}) == 1
    ):
        return replace(site, want=bool(gold[0][1]))
    return None
