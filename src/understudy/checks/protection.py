"""How far twins protect the verdicts on a task, or on one patch (see `twins.run` and `twins.other_inputs`)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from understudy.checks.base import GradingOptions
from understudy.checks.twins.other_inputs import CONFIRMING_SHARE, InputAgreement, full_agreement
from understudy.checks.twins.run import ENOUGH_BITS
from understudy.checks.twins.test_ids import deciding_tests
from understudy.types import Protection, PytestChecks, ScriptChecks, Task

NOT_VALIDATED = "the task was not validated as it is graded here"
"""The beginning of the reason why a task's tests have no twins, if validation would make some."""
_REWARD_OPEN = "the tested code runs where it can write the reward"
_NO_PYTHON = "no Python file or here-document of the script asserts what could have twins"
_SHELL_DECIDES = "what decides is none of the Pythons that are watched"
_UNWATCHED = "what the code does in the process of the tests is not watched"


def protection_of(
    task: Task,
    options: GradingOptions,
    weak: Mapping[str, str] = MappingProxyType({}),
    agreement: InputAgreement | None = None,
) -> tuple[Protection, str]:
    """Return how far twins protect a task's verdicts, and the reasons why not further, including that nothing is
    watched.

    Of a patch's verdict, `weak` are the tests whose observations prove less than the gold patch's (see
    `TwinJudgement`), and `agreement` is how far it answers other inputs as the gold patch does; None stands for a
    patch that does so always. What does not agree may be honest, but says less.
    """
    if agreement is None:
        agreement = full_agreement(deciding_tests(task, options), options)
    protection, reason = _protection_by_twins(task, options, agreement)
    if protection == "twins" and (contradicted := agreement.contradicted):
        example = min(contradicted, key=lambda node: (contradicted[node], node))
        reason = (
            f"to other inputs it gives {contradicted[example]:.0%} of the answers of the gold patch in {example}"
        )
        protection = "partial"
    if weak and protection == "twins":
        example = min(weak)
        reason = f"{len(weak)} of {len(options.twins)} deciding tests {weak[example]}, as {example}"
        protection = "partial"
    usual = options.usual_events or ()
    watched = options.usual_events is not None and options.watched and "watch-missing " not in usual
    watched = watched and (options.sealed or isinstance(task.checks, ScriptChecks))
    if not isinstance(task.checks, PytestChecks) and not watched:
        by_shell = isinstance(task.checks, ScriptChecks) and options.watched and "watch-missing " in usual
        reason = "; ".join(filter(None, (reason, _SHELL_DECIDES if by_shell else _UNWATCHED)))
    if isinstance(task.checks, ScriptChecks) and ("reward-open " in usual or not options.walled):
        reason = f"{reason}; {_REWARD_OPEN}"
    return protection, reason


def _protection_by_twins(task: Task, options: GradingOptions, agreement: InputAgreement) -> tuple[Protection, str]:
    agrees = agreement.answers > 0 and agreement.share >= CONFIRMING_SHARE
    # Other inputs have other answers, so whoever guesses has to guess these besides the tests' own.
    bits = max((inputs.bits for inputs in options.twin_inputs), default=0.0) if agrees else 0.0
    if options.twins and not options.twin_all_bits and not bits:
        return "none", "the tested code can read or guess all that the tests expect"
    if isinstance(task.checks, ScriptChecks):
        unknown = options.usual_events is None and not options.walled
        if options.twins:
            return "partial", "the script may decide by more than what its Python files assert"
        return "none", (f"{NOT_VALIDATED}; " if unknown else "") + _NO_PYTHON
    if options.usual_events is None and not options.twins:
        return "none", f"{NOT_VALIDATED} (by `tasks check` or --validate), so no test has twins"
    nodes = deciding_tests(task, options).nodes
    deciding = (*task.checks.fail_to_pass, *task.checks.pass_to_pass)
    missing = [id for id in deciding if nodes.get(id) not in options.twins]
    if missing:
        reason = f"{len(missing)} of {len(deciding)} deciding tests have no twins, as {missing[0]}"
        return ("partial" if options.twins else "none"), reason
    bits += options.twin_bits
    if not bits:
        return "partial", "what the tests expect of the patch, and the code does not do without it, can be guessed"
    if bits < ENOUGH_BITS:
        times = math.ceil(2**bits)
        return "partial", f"a guess at what the tests expect is right once in {times} times"
    partial = set(options.partial_twins) - agreement.confirmed
    if exposed := [id for id in deciding if nodes[id] in partial]:
        share = f"{len(exposed)} of {len(deciding)} deciding tests"
        return "partial", f"{share} have expectations that the tested code can read or force, as {exposed[0]}"
    return "twins", ""
