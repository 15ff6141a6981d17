"""Comparing a patch's answers to other inputs with the gold patch's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.checks.base import GradingOptions, OtherInputs, TwinTest
from understudy.checks.input_changes import InputChanges
from understudy.checks.protection import protection_of
from understudy.checks.twins.judge import Observation
from understudy.checks.twins.other_inputs import (
    InputAgreement,
    InputDraws,
    full_agreement,
    input_versions,
    judge_inputs,
    learn_inputs,
)
from understudy.checks.twins.run import References, VersionRun, WrittenVersion, write_versions
from understudy.checks.twins.sites import TwinSite
from understudy.checks.twins.test_ids import DecidingTests
from understudy.types import TestOutcome

from support import calc_task

SHIFT, SAME = "test_calc.py::test_shift", "test_calc.py::test_same"
FILES = {"test_calc.py": "from calc import shift\n\ndef test_shift():\n    assert shift(25) == 26\n"}
TESTS = DecidingTests(FILES, (SHIFT,), (SAME,), {SHIFT: SHIFT, SAME: SAME})


def values(*numbers: int) -> list[Observation]:
    return [["value", ["i", hex(number)]] for number in numbers]


def run_with(
    seen: dict[str, dict[int, list[Observation]]], *, version: WrittenVersion | None = None
) -> VersionRun:
    outcomes: dict[str, TestOutcome] = dict.fromkeys((SHIFT, SAME), "passed")
    sites = version.sites if version else {number: TwinSite("equal") for number in range(9)}
    return VersionRun(sites, outcomes, seen, 0, False, "")


def answers(by_node: dict[str, dict[int, int]], bits: float = 20.0) -> OtherInputs:
    tests = {
        node: TwinTest(node, {number: json.dumps(values(answer)) for number, answer in each.items()})
        for node, each in by_node.items()
    }
    return OtherInputs(InputChanges({"25": "17"}), tests, bits)


def test_each_answer_counts_as_much_as_another() -> None:
    options = GradingOptions(twin_inputs=(answers({SHIFT: {0: 7, 1: 7, 2: 7, 3: 8}, SAME: {4: 9}}),))
    always_seven = run_with({SHIFT: {number: values(7) for number in range(4)}, SAME: {4: values(9)}})
    assert judge_inputs(TESTS, options, [always_seven]) == InputAgreement(2, 0.5, frozenset({SAME}))
    right = run_with({SHIFT: {0: values(7), 1: values(7), 2: values(7), 3: values(8)}, SAME: {4: values(9)}})
    assert judge_inputs(TESTS, options, [right]) == full_agreement(TESTS, options)


def test_a_version_that_did_not_run_agrees_nowhere() -> None:
    options = GradingOptions(twin_inputs=(answers({SHIFT: {0: 7}}),))
    assert judge_inputs(TESTS, options, [None]) == InputAgreement(1, 0.0, frozenset(), {SHIFT: 0.0})
    assert judge_inputs(TESTS, GradingOptions(), []) == InputAgreement()
    two = GradingOptions(twin_inputs=(answers({SHIFT: {0: 7}}), answers({SHIFT: {0: 8}})))
    only_second = judge_inputs(TESTS, two, [None, run_with({SHIFT: {0: values(8)}})])
    assert (only_second.answers, only_second.share) == (2, 0.5), "its answers count for its own inputs"


def test_answers_to_longer_inputs_only_contradict() -> None:
    alike = answers({SHIFT: {number: number for number in range(4)}})
    longer = replace(answers({SHIFT: {number: 90 + number for number in range(2)}}), bits=0.0)
    longer = replace(longer, changes=replace(longer.changes, longer=True))
    options = GradingOptions(twin_inputs=(alike, longer))
    short = run_with({SHIFT: {number: values(number) for number in range(4)}})
    right = run_with({SHIFT: {number: values(90 + number) for number in range(2)}})
    wrong = run_with({SHIFT: {number: values(9 + number) for number in range(2)}})
    assert judge_inputs(TESTS, options, [short, right]) == full_agreement(TESTS, options)
    only_short = judge_inputs(TESTS, options, [short, wrong])
    assert only_short == replace(full_agreement(TESTS, options), contradicted={SHIFT: 0.0})
    assert judge_inputs(TESTS, options, [None, right]) == InputAgreement(4, 0.0, frozenset(), {SHIFT: 0.0})


@pytest.mark.parametrize(
    ("options", "agreement", "level", "reason"),
    [
        ({"twin_bits": 3.0}, 1.0, "twins", ""),
        ({"twin_bits": 3.0}, 0.8, "partial", "right once in 8 times"),
        ({"twin_bits": 20.0}, 0.6, "twins", ""),
        (
            {"twin_bits": 20.0},
            0.4,
            "partial",
            f"to other inputs it gives 40% of the answers of the gold patch in {SHIFT}",
        ),
        ({"twin_bits": 20.0, "partial_twins": (SHIFT,)}, 1.0, "twins", ""),
        ({"twin_bits": 20.0, "partial_twins": (SAME,)}, 1.0, "partial", f"as {SAME}"),
    ],
)
def test_answers_to_other_inputs_raise_and_lower_the_protection(
    options: dict[str, Any], agreement: float, level: str, reason: str
) -> None:
    twins = dict.fromkeys((SHIFT, SAME), TwinTest("", {0: "[]"}))
    of_task = GradingOptions(twins=twins, twin_all_bits=20.0, twin_inputs=(answers({SHIFT: {0: 7}}),), **options)
    confirmed = frozenset({SHIFT}) if agreement >= 0.9 else frozenset[str]()
    contradicted = {SHIFT: agreement} if agreement < 0.5 else dict[str, float]()
    of_patch = InputAgreement(4, agreement, confirmed, contradicted)
    protection, why = protection_of(calc_task(), of_task, agreement=of_patch)
    assert (protection, reason in why) == (level, True), why


async def not_asked(version: WrittenVersion, likely: Sequence[WrittenVersion]) -> VersionRun:
    raise AssertionError("other inputs are learned from runs that may fail")


async def learned(
    gold: list[Observation],
    again: list[Observation],
    effortless: list[Observation],
    *,
    to_fix: tuple[str, ...] = (SHIFT,),
    **options: Any,
) -> OtherInputs:
    """Return the other inputs of a test whose own input is answered with 26, by what is answered to others."""
    tests = replace(TESTS, fail_to_pass=to_fix)
    twins = dict.fromkeys((SHIFT, SAME), TwinTest(SHIFT, {0: json.dumps(values(26))}))
    own = GradingOptions(twins=twins, **options)
    named = run_with({SHIFT: {0: values(26)}}, version=write_versions(tests, own, lambda _: False))

    async def solution(versions: Sequence[WrittenVersion]) -> list[VersionRun]:
        assert not any("shift(25)" in version.files["test_calc.py"] for version in versions)
        assert len({version.reseeded for version in versions}) <= 1, "one process runs them all"
        return [
            run_with({SHIFT: {0: again if version.reseeded else gold}}, version=version) for version in versions
        ]

    async def without(versions: Sequence[WrittenVersion]) -> list[list[VersionRun]]:
        return [[run_with({SHIFT: {0: effortless}}, version=version)] for version in versions]

    references = References(not_asked, solution, without)
    with_inputs = await learn_inputs(tests, own, named, {}, references, InputDraws(tests, ()))
    for version in input_versions(tests, with_inputs):
        assert version.files != write_versions(tests, own, lambda _: False).files
    return next(iter(with_inputs.twin_inputs), OtherInputs(InputChanges({}), {}, 0.0))


async def test_answers_of_other_tests_count_where_they_change_something() -> None:
    answers = (values(4711), values(4711), values(0))
    assert not (await learned(*answers, to_fix=(SAME,))).tests
    assert not (await learned(*answers, to_fix=(SAME,), twin_bits=20.0)).tests
    assert (await learned(*answers, to_fix=(SAME,), twin_bits=20.0, partial_twins=(SHIFT,))).tests


async def test_answers_count_that_only_a_computation_gives() -> None:
    usual = await learned(values(4711), values(4711), values(0))
    assert usual.tests == {SHIFT: TwinTest(SHIFT, {0: json.dumps(values(4711))})}
    assert usual.bits > 5
    assert not (await learned(values(4711), values(4712), values(0))).tests, "it is not the same each time"
    assert not (await learned(values(4711), values(4711), values(4711))).tests, "code without effort gives it"
    assert not (await learned(values(26), values(26), values(0))).tests, "it does not depend on the input"


async def test_what_cannot_be_compared_is_no_answer() -> None:
    unreadable: list[Observation] = [["warnings"]]
    assert not (await learned(unreadable, unreadable, values(0))).tests


def test_a_test_whose_exception_does_not_come_is_contradicted_whatever_others_show() -> None:
    raised = json.dumps([["kind", ["ValueError", "Exception", "BaseException", "object"], "invalid port 81234"]])
    right = {number: json.dumps(values(number)) for number in range(9)}
    tests = {SAME: TwinTest(SAME, right), SHIFT: TwinTest(SHIFT, {9: raised})}
    options = GradingOptions(twin_inputs=(OtherInputs(InputChanges({"25": "17"}), tests, 20.0),))
    sites = {number: TwinSite("equal") for number in range(9)} | {
        9: TwinSite("raises", "['ValueError']", "'port'")
    }
    both = replace(TESTS, fail_to_pass=(SHIFT, SAME))
    for observed, contradicted in (
        (["kind", [], ""], {SHIFT: 0.0}),
        (["kind", ["KeyError", "LookupError", "Exception", "BaseException", "object"], "x"], {SHIFT: 0.0}),
        (["kind", ["ValueError", "Exception", "BaseException", "object"], "bad"], {}),
    ):
        seen = {SAME: {number: values(number) for number in range(9)}, SHIFT: {9: [observed]}}
        run = VersionRun(sites, dict.fromkeys((SHIFT, SAME), "passed"), seen, 0, False, "")
        assert judge_inputs(both, options, [run]).contradicted == contradicted, observed


def test_the_parameters_of_a_function_count_together() -> None:
    nodes = tuple(f"{SHIFT}[{number}]" for number in range(3))
    gold = answers({node: {0: number} for number, node in enumerate(nodes)})
    options = GradingOptions(twin_inputs=(gold,))
    tests = replace(TESTS, fail_to_pass=nodes)
    two_of_three = run_with({node: {0: values(min(number, 1))} for number, node in enumerate(nodes)})
    assert judge_inputs(tests, options, [two_of_three]).contradicted == {}
    one_of_three = run_with({node: {0: values(0)} for node in nodes})
    assert judge_inputs(tests, options, [one_of_three]).contradicted.keys() == {SHIFT}


VALUE_ERROR = ("ValueError", "Exception", "BaseException", "object")


def refusing(*nodes: str, by: tuple[str, ...] = VALUE_ERROR) -> VersionRun:
    return replace(run_with({}), stopped=dict.fromkeys(nodes, by))


def test_a_patch_that_answers_what_the_gold_patch_refuses_is_contradicted() -> None:
    nodes = tuple(f"{SHIFT}[{number}]" for number in range(4))
    only_refused = OtherInputs(InputChanges({"25": "17"}), {}, 0.0, {node: node for node in nodes})
    options = GradingOptions(twin_inputs=(only_refused,))
    tests = replace(TESTS, fail_to_pass=nodes)
    assert judge_inputs(tests, options, [refusing()]).contradicted == {SHIFT: 0.0}
    assert judge_inputs(tests, options, [None]).contradicted == {SHIFT: 0.0}
    assert judge_inputs(tests, options, [refusing(nodes[0])]).contradicted == {SHIFT: 0.25}
    other_exception = refusing(*nodes[:3], by=("KeyError", "LookupError", "Exception", "BaseException", "object"))
    assert judge_inputs(tests, options, [other_exception]).contradicted == {}
    passed: dict[str, TestOutcome] = dict.fromkeys(nodes, "passed")
    also_passed = replace(refusing(*nodes), outcomes=passed)
    assert judge_inputs(tests, options, [also_passed]).contradicted == {SHIFT: 0.0}, "the code reported it itself"


def test_refusing_all_other_inputs_does_not_stand_for_answers() -> None:
    both = replace(answers({SHIFT: {0: 7}}), refused={f"{SHIFT}[1]": "one"})
    refuses_all = replace(run_with({SHIFT: {}}), stopped={SHIFT: VALUE_ERROR, "one": VALUE_ERROR})
    agreement = judge_inputs(TESTS, GradingOptions(twin_inputs=(both,)), [refuses_all])
    assert (agreement.contradicted, agreement.confirmed) == ({SHIFT: 0.0}, frozenset())


CHECKED = """\
import pytest
from calc import shift

def test_shift():
    assert shift(2525) == 26

def test_refuses():
    with pytest.raises(ValueError):
        shift(0)
"""
REFUSES = "test_calc.py::test_refuses"


@pytest.mark.parametrize(
    ("by_gold", "by_effortless", "refused"),
    [
        ((VALUE_ERROR, VALUE_ERROR), (), True),
        ((VALUE_ERROR, ()), (), False),
        ((VALUE_ERROR, VALUE_ERROR), VALUE_ERROR, False),
        ((("TypeError", "Exception", "BaseException", "object"),) * 2, (), False),
    ],
    ids=["both times", "once", "by any code", "with an exception that no test expects"],
)
async def test_inputs_count_as_refused_by_an_exception_that_a_test_expects(
    by_gold: tuple[tuple[str, ...], tuple[str, ...]], by_effortless: tuple[str, ...], refused: bool
) -> None:
    tests = DecidingTests({"test_calc.py": CHECKED}, (SHIFT,), (REFUSES,), {SHIFT: SHIFT, REFUSES: REFUSES})
    version = write_versions(tests, GradingOptions(), lambda _: False)
    raises, equal = (
        next(number for number, site in version.sites.items() if site.operation == operation)
        for operation in ("raises", "equal")
    )
    raised = json.dumps([["kind", VALUE_ERROR, ""], ["kind", [], ""], ["truth", 1]])
    twins = {SHIFT: TwinTest(SHIFT, {equal: json.dumps(values(26))}), REFUSES: TwinTest(REFUSES, {raises: raised})}
    passed: dict[str, TestOutcome] = dict.fromkeys((SHIFT, REFUSES), "passed")
    named = VersionRun(version.sites, passed, {}, 0, False, "")
    draws = 0

    def run(written: WrittenVersion, by: tuple[str, ...]) -> VersionRun:
        stopped = {SHIFT: by} if by else dict[str, tuple[str, ...]]()
        return replace(named, sites=written.sites, stopped=stopped)

    async def solution(versions: Sequence[WrittenVersion]) -> list[VersionRun]:
        nonlocal draws
        draws += sum(not version.reseeded for version in versions)
        return [run(version, by_gold[version.reseeded]) for version in versions]

    async def without(versions: Sequence[WrittenVersion]) -> list[list[VersionRun]]:
        return [[run(version, by_effortless)] for version in versions]

    references = References(not_asked, solution, without)
    own = GradingOptions(twins=twins)
    options = await learn_inputs(tests, own, named, {}, references, InputDraws(tests, ()))
    assert [each.refused for each in options.twin_inputs] == ([{SHIFT: SHIFT}] * 2 if refused else [])
    assert draws == (7 if refused else 3), "as long as all is refused, others are tried"
