"""The one place where a verdict is decided: of a patch by `grade`, of a task before it is used by `validate`.

A patch goes through the gate, is applied in a fresh sandbox with the hidden files, and the checks and the audit
say what it is worth. A task is valid when its gold patch scores 1 and the empty patch 0, both by running the
checks.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from understudy import __version__
from understudy.checks.base import CheckResult, GradingOptions, failed_result
from understudy.checks.log_parsers import check_parser
from understudy.checks.protection import protection_of
from understudy.checks.run import run_checks
from understudy.checks.runtime_events import event_keys
from understudy.checks.seal import read_hidden
from understudy.checks.suite import run_before_patch
from understudy.checks.twins.learning import learn_twins
from understudy.checks.twins.other_inputs import InputAgreement, judge_inputs
from understudy.checks.twins.run import (
    ATTEMPTS,
    References,
    TwinJudgement,
    VersionRun,
    WrittenVersion,
    judge_twins,
)
from understudy.checks.twins.script import (
    hidden_contents,
    one_word_scripts,
    placed_one_word_scripts,
)
from understudy.checks.twins.templates import VERSIONS, VersionTemplates, draw_versions, load_templates
from understudy.checks.twins.test_ids import DecidingTests, deciding_tests, version_texts
from understudy.config import cache_dir
from understudy.errors import GraderError, TaskError
from understudy.grade.apply import apply_patch
from understudy.grade.audit import audit
from understudy.grade.environment_reads import environment_read
from understudy.grade.faults import PatchFault, attribute_faults, with_untrusted_code
from understudy.grade.gate import GatedPatch, gate, intruder_predicate
from understudy.grade.gold_outlines import outlines_of_gold
from understudy.grade.grading_lock import grading_lock
from understudy.grade.recording import APPLIED_HERE, RecordingSandbox
from understudy.grade.version_runs import ReferenceRuns, run_or_fault
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, hidden_mounts, sandbox_spec
from understudy.tasks.records import task_digest
from understudy.types import Integrity, PytestChecks, ScriptChecks, SuiteChecks, Verdict, is_solved
from understudy.util.files import atomic_write

_FORMAT = "61"  # part of every digest: a change of how patches are judged validates anew
GRADER = f"{__version__}+{_FORMAT}"
"""The version of the grader, stored in each verdict: the release, and how its patches are judged."""

FAULT_REASON = "the patch's code made its grading fail twice, which does not fail without it"
"""The beginning of the reason if the code of a patch broke its own grading, which gives reward 0."""

_BEHAVES_OTHERWISE = "which the gold patch does not, and may behave otherwise elsewhere"

REVALIDATION_HINT = "`understudy tasks check` validates it anew"


async def grade(
    prepared: PreparedTask, patch: bytes, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> Verdict:
    """Grade a patch in a fresh sandbox. A patch of which nothing passes the gate gets 0 without running.

    The audit's findings are in the verdict's `integrity`; the reward is what the checks say. Raises GraderError
    or SandboxError when the patch could not be graded: that is never a reward. Gradings with the same hidden tests
    wait for each other (see `understudy.grade.grading_lock`).
    """
    gated = await asyncio.to_thread(gate, patch, prepared.task, prepared.tree)
    weak: dict[str, str] = {}
    agreement: InputAgreement | None = None
    if gated.refused:
        verdict = Verdict(reward=0.0, reason=f"patch refused: {gated.refused}", applied=False)
    elif not gated.patch:
        dropped = ", ".join(gated.dropped[:5])
        reason = f"only files that do not count: {dropped}" if dropped else "empty patch"
        verdict = Verdict(reward=0.0, reason=reason)
    else:
        async with grading_lock(prepared.task, cache_dir()):
            # The versions run before the tests: what runs later can read what earlier code left in the kernel,
            # such as which pages of a file are cached, and the tests hold all that the versions withhold.
            judgement = await _run_versions(prepared, gated, sandboxes, environment)
            verdict = (await _evaluate(prepared, gated, sandboxes, environment)).verdict
            if is_solved(verdict.reward):
                if isinstance(judgement, TwinJudgement) and _fails_all(prepared, judgement):
                    judgement = await _run_versions_again(prepared, gated, judgement, sandboxes, environment)
                verdict = _confirmed(verdict, judgement)
                weak = judgement.weak if isinstance(judgement, TwinJudgement) else weak
            if is_solved(verdict.reward) and verdict.integrity.status == "clean":
                agreement = await _run_other_inputs(prepared, gated, sandboxes, environment)
    if verdict.integrity.status != "forged":
        integrity = await asyncio.to_thread(
            audit, patch, prepared.task, gated, verdict, prepared.tree, prepared.hidden
        )
        if integrity.evidence != verdict.integrity.evidence:  # otherwise the verdict's own reason is the clearest
            verdict = replace(verdict, integrity=integrity)
    protection, unprotected = protection_of(prepared.task, prepared.options, weak, agreement)
    if protection == "twins" and is_solved(verdict.reward):
        read = await asyncio.to_thread(environment_read, gated.patch, prepared.task, prepared.tree)
        if read is not None:
            where = f"{read.path}, line {read.line}: {read.what}"
            protection, unprotected = "partial", f"it reads its environment ({where}), {_BEHAVES_OTHERWISE}"
    return replace(
        verdict,
        protection=protection,
        unprotected=unprotected,
        grader=GRADER,
        task_digest=task_digest(prepared.task),
        patch_digest=hashlib.sha256(patch).hexdigest(),
    )


async def _run_versions(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> TwinJudgement | PatchFault:
    """Return what rewritten versions of the deciding tests show of a patch; `clean` also for tasks without them.

    What contradicts the tests only counts if it is seen again, because they may not be deterministic. A patch that
    fails all tests that it should fix is not run again before the tests, which most such patches fail.
    """
    judgement: TwinJudgement | PatchFault = TwinJudgement(Integrity())
    for _ in range(ATTEMPTS if prepared.options.twins else 0):
        judgement = await _judge_versions(prepared, gated, sandboxes, environment)
        if (
            isinstance(judgement, PatchFault)
            or judgement.integrity.status == "clean"
            or _fails_all(prepared, judgement)
        ):
            break
    return judgement


async def _run_versions_again(
    prepared: PreparedTask,
    gated: GatedPatch,
    judgement: TwinJudgement,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
) -> TwinJudgement | PatchFault:
    """Return what one more attempt shows of a patch that passes the tests although it failed their rewritten
    versions.

    The tests have already run, so the attempt can only make the patch `forged`, never clean.
    """
    second = await _judge_versions(prepared, gated, sandboxes, environment)
    if isinstance(second, PatchFault) or second.integrity.status == judgement.integrity.status:
        return second
    reason = f"{judgement.integrity.reason}; a second attempt did not show it"
    return replace(judgement, integrity=replace(judgement.integrity, status="suspicious", reason=reason))


async def _run_other_inputs(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> InputAgreement:
    """Return how far a patch that solves a task answers other inputs as the gold patch does.

    The tests have run before: they hold none of these answers. A version agrees nowhere if the patch's code broke
    its run. Raises GraderError or SandboxError when the infrastructure did.
    """
    tests = deciding_tests(prepared.task, prepared.options)
    runs: list[VersionRun | None] = []
    templates = await asyncio.to_thread(_templates, tests, prepared.options)
    while versions := templates.inputs[len(runs) :]:
        some = await run_or_fault(prepared, gated, versions, sandboxes, environment)
        runs += some if isinstance(some, list) else [None]
    return await asyncio.to_thread(judge_inputs, tests, prepared.options, runs)


def _fails_all(prepared: PreparedTask, judgement: TwinJudgement) -> bool:
    """Return whether a patch fails the rewritten versions of all tests that it should fix."""
    tests = deciding_tests(prepared.task, prepared.options)
    to_fix = {node for node in tests.fail_to_pass if node in prepared.options.twins}
    return bool(to_fix) and to_fix <= judgement.failed


async def _judge_versions(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> TwinJudgement | PatchFault:
    """Run each rewritten version of the deciding tests once on the patch, and judge what they observed.

    Returns a PatchFault if the patch's code broke a run, and a `clean` judgement if the patch does not apply,
    which the ordinary tests report. A wrong value does not end the loop: from the number of versions that ran, a
    patch could learn which expected values had been changed. A test that fails or times out does end it, because
    the patch's code decides that itself and so learns nothing.
    """
    tests = deciding_tests(prepared.task, prepared.options)
    names = [twin.name for twin in prepared.options.twins.values()]
    runs: list[VersionRun] = []
    for version in await asyncio.to_thread(_versions, tests, prepared.options):
        alone = await run_or_fault(prepared, gated, [version], sandboxes, environment)
        if alone is None:
            return TwinJudgement(Integrity())
        if isinstance(alone, PatchFault):
            return alone
        (run,) = alone
        runs.append(run)
        if run.timed_out or any(run.outcomes.get(name) != "passed" for name in names):
            break
    return await asyncio.to_thread(judge_twins, prepared.options, runs, prepared.task.checks.timeout_s)


def _templates(tests: DecidingTests, options: GradingOptions) -> VersionTemplates:
    return load_templates(tests, options, cache_dir() / VERSIONS, GRADER)


def _versions(tests: DecidingTests, options: GradingOptions) -> list[WrittenVersion]:
    return draw_versions(tests, options, _templates(tests, options))


def _confirmed(verdict: Verdict, judgement: TwinJudgement | PatchFault) -> Verdict:
    """Return the verdict on a patch that passes the tests, with what their rewritten versions have shown."""
    if isinstance(judgement, PatchFault):
        return replace(verdict, reward=0.0, reason=f"{FAULT_REASON}: {judgement}")
    integrity = judgement.integrity
    if integrity.status == "clean":
        return verdict
    return replace(verdict, reward=0.0, reason=integrity.reason, integrity=integrity)


async def _hidden_files(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment
) -> dict[str, bytes]:
    """Return the hidden files of a script, or of a suite after the test patch; empty for other checks."""
    checks = prepared.task.checks
    if prepared.hidden is not None:
        return await asyncio.to_thread(hidden_contents, prepared.hidden)
    if not isinstance(checks, SuiteChecks):
        return {}
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment))
    try:
        await run_before_patch(sandbox, checks)
        await apply_patch(sandbox, prepared.task, b"", host_programs=sandboxes.host_programs, tree=prepared.tree)
        files = await read_hidden(sandbox, prepared.task)
        return {name: content for name, content in files.items() if content is not None}
    finally:
        await sandbox.close()


async def _evaluate(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> CheckResult:
    """Apply a gated patch, which may be empty, in a fresh sandbox and run the checks.

    Raises GraderError or SandboxError when that failed and the patch's code is not the cause, TaskError when the
    task's own test patch does not apply.
    """
    attempt = partial(_evaluate_once, prepared, gated, sandboxes, environment)
    control = partial(_evaluate_once, prepared, GatedPatch(b""), sandboxes, environment)
    result = await attribute_faults(attempt, control)
    if isinstance(result, CheckResult) and result.killed:
        # By the tested code, the kernel or another process of this machine: what comes again is the patch's own.
        result = await attribute_faults(attempt, control)
    if isinstance(result, PatchFault):
        return failed_result(f"{FAULT_REASON}: {result}", "")
    if not gated.dropped:
        return result
    note = f"(changes left out: {', '.join(gated.dropped[:5])})"
    return replace(result, verdict=replace(result.verdict, reason=f"{result.verdict.reason} {note}"))


async def _evaluate_once(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> CheckResult:
    task = prepared.task
    is_intruder = intruder_predicate(task, prepared.tree)
    async with AsyncExitStack() as stack:
        if prepared.hidden is not None and prepared.options.one_word:
            placed = await asyncio.to_thread(stack.enter_context, placed_one_word_scripts(prepared.hidden))
            prepared = replace(prepared, hidden=placed)
        opened_sandbox = await sandboxes.open(sandbox_spec(prepared, environment, mounts=hidden_mounts(prepared)))
        stack.push_async_callback(opened_sandbox.close)
        sandbox = RecordingSandbox(opened_sandbox)
        if isinstance(task.checks, SuiteChecks):
            await run_before_patch(sandbox, task.checks)
        with with_untrusted_code():
            sandbox.commands.append(APPLIED_HERE)
            if problem := await apply_patch(
                opened_sandbox, task, gated.patch, host_programs=sandboxes.host_programs, tree=prepared.tree
            ):
                return CheckResult(Verdict(reward=0.0, reason=problem, applied=False))
            result = await run_checks(
                sandbox, task, gated.patch, prepared.options, hidden=prepared.hidden, is_intruder=is_intruder
            )
            return replace(result, verdict=replace(result.verdict, commands=tuple(sandbox.commands)))


# --- validation ----------------------------------------------------------------------------------------


async def validate(
    prepared: PreparedTask,
    *,
    sandboxes: Sandboxes,
    environment: TaskEnvironment,
    cache: Path,
    forget_failure: bool = False,
) -> PreparedTask:
    """Grade the gold patch and the empty one; whether a task passed is stored in the cache by its content.

    A task that failed before fails with the same reason at once, unless `forget_failure` is given.
    Returns the task with the options that its grading needs. Raises TaskError with the reason unless they score
    1 and 0, GraderError or SandboxError when they could not be graded.
    """
    task = prepared.task
    record, *other_records = _record_paths(prepared, sandboxes, environment, cache)
    if record.exists():
        return as_validated(prepared, sandboxes=sandboxes, environment=environment, cache=cache)
    failure = record.with_suffix(".failed")
    if forget_failure:
        failure.unlink(missing_ok=True)
    if failure.exists():
        raise TaskError(
            f"{failure.read_text(encoding='utf-8')}\n(from an earlier validation; {REVALIDATION_HINT})"
        )
    if isinstance(task.checks, SuiteChecks):
        await asyncio.to_thread(check_parser, task.checks.parser, f"task {task.instance_id}")
    gated = gate(task.gold_patch.encode(errors="surrogateescape"), task, prepared.tree)
    if gated.refused:
        raise TaskError(f"task {task.instance_id}: gold_patch is refused: {gated.refused}; correct it in the task")
    if not gated.patch:
        dropped = ", ".join(gated.dropped)[:200]
        problem = f"changes only files that a patch may not change ({dropped})" if dropped else "is empty"
        raise TaskError(
            f"task {task.instance_id}: gold_patch {problem}; expected changes of the code under test: correct it "
            "in the task"
        )
    empty_patch = GatedPatch(b"")
    gold_grading = asyncio.create_task(_grade_gold(prepared, gated, sandboxes, environment))
    empty_grading = asyncio.create_task(_evaluate(prepared, empty_patch, sandboxes, environment))
    try:
        (validated, gold), empty = await asyncio.gather(gold_grading, empty_grading)
    finally:  # if one raises, wait for the other: its sandbox must not outlive this call
        await asyncio.wait((gold_grading, empty_grading))
    usual = prepared.options
    needed = replace(
        validated,
        options=replace(validated.options, usual_events=usual.usual_events, usual_installed=usual.usual_installed),
    )
    if needed != prepared and is_solved(gold.reward):
        # The empty patch was graded without the options that the gold patch turned out to need.
        empty = await _evaluate(validated, empty_patch, sandboxes, environment)
    if is_solved(gold.reward) and is_solved(empty.verdict.reward) and validated.options.canaries:
        # The canaries may be what makes the tests pass: a file that imports something is enough for some.
        without_canaries = replace(validated, options=replace(validated.options, canaries=False))
        second = await _evaluate(without_canaries, gated, sandboxes, environment)
        if is_solved(second.verdict.reward):
            empty = await _evaluate(without_canaries, empty_patch, sandboxes, environment)
            validated, gold = without_canaries, second.verdict
    for name, verdict, expected, remedy in (
        ("the gold patch", gold, 1.0, "correct the gold patch or the checks"),
        ("the empty patch", empty.verdict, 0.0, "give checks that fail without the gold patch"),
    ):
        if verdict.reward != expected:
            reason = (
                f"task {task.instance_id}: {name} scores {verdict.reward:g} instead of {expected:g}: "
                f"{verdict.reason}; {remedy}\n{verdict.log[-2000:]}".rstrip()
            )
            if "did not end in" not in verdict.reason:  # they may on another attempt with less load
                failure.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(failure, reason.encode(errors="replace"))
            raise TaskError(reason)
    validated = await _with_one_word(validated, gated, sandboxes, environment)
    hidden = await _hidden_files(validated, sandboxes, environment)
    texts = {} if isinstance(task.checks, PytestChecks) else version_texts(task.checks, hidden)
    validated = replace(validated, options=replace(validated.options, twin_files=texts))
    tests = deciding_tests(task, validated.options)
    if tests.nodes:
        outlines = await asyncio.to_thread(outlines_of_gold, validated, gated)
        runs = ReferenceRuns(
            validated,
            gated,
            outlines.patches,
            checks_s=gold.checks_s,
            sandboxes=sandboxes,
            environment=environment,
        )
        references = References(
            runs.gold, runs.solution, runs.effortless, outlines.texts, outlines.sources, outlines.code
        )
        try:
            validated = replace(validated, options=await learn_twins(tests, validated.options, hidden, references))
        except PatchFault as fault:
            raise GraderError(
                f"task {task.instance_id}: grading broke while the gold patch ran with instrumented copies of the "
                f"tests: {fault}; check that the tests pass repeatedly with the gold patch, and neither kill "
                "processes nor remove their directory"
            ) from fault
    record.parent.mkdir(parents=True, exist_ok=True)
    if validated.options.twins:
        # Now, not while the first patch waits for it.
        await asyncio.to_thread(_templates, tests, validated.options)
    for path in (record, *other_records):
        atomic_write(path, msgspec.json.encode(validated.options))
    return validated


async def _with_one_word(
    validated: PreparedTask, gold: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> PreparedTask:
    """Return a task with the option `one_word`, if its script has such operands and still tells the gold patch
    from the empty one.
    """
    if validated.hidden is None or not await asyncio.to_thread(one_word_scripts, validated.hidden):
        return validated
    changed = replace(validated, options=replace(validated.options, one_word=True))
    solved, unsolved = [
        await _evaluate(changed, patch, sandboxes, environment) for patch in (gold, GatedPatch(b""))
    ]
    as_before = is_solved(solved.verdict.reward) and solved.verdict.integrity.status == "clean"
    return changed if as_before and not is_solved(unsolved.verdict.reward) else validated


def as_validated(
    prepared: PreparedTask, *, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> PreparedTask:
    """Return the task with the grading options that validation found, with this time limit if it was validated
    with it; unchanged if it was not validated.
    """
    for path in _record_paths(prepared, sandboxes, environment, cache):
        with suppress(FileNotFoundError):
            return replace(prepared, options=msgspec.json.decode(path.read_bytes(), type=GradingOptions))
    return prepared


_OPTION_SETS: dict[type, tuple[GradingOptions, ...]] = {
    PytestChecks: (
        GradingOptions(),
        GradingOptions(canaries=False),
        GradingOptions(canaries=False, sealed=False),
    ),
    SuiteChecks: (
        GradingOptions(),
        GradingOptions(canaries=False),
        GradingOptions(watched=False),
        GradingOptions(canaries=False, sealed=False, watched=False),
    ),
    ScriptChecks: (
        GradingOptions(),
        GradingOptions(walled=False),
        GradingOptions(walled=False, watched=False),
    ),
}
"""The options to try, by kind of checks: first with all protections, then with fewer."""


async def _grade_gold(
    prepared: PreparedTask, gated: GatedPatch, sandboxes: Sandboxes, environment: TaskEnvironment
) -> tuple[PreparedTask, Verdict]:
    """Return the task with the first grading options with which its gold patch scores 1, and the gold patch's
    verdict.

    If it fails only because of how it is graded, other options are tried: as root, for images whose programs only
    root can use; `_OPTION_SETS`, for tests that do not run with canaries or watched, that change their own files,
    or whose Python writes the reward; and names of tests that both pass and fail, if they do so with the gold
    patch too. If none works, the result is the unchanged task and the first verdict.
    """
    first: Verdict | None = None
    for as_root in (False,) if sandboxes.host_programs else (False, True):
        for option_set in _OPTION_SETS[type(prepared.task.checks)]:
            options = replace(option_set, as_root=as_root)
            result = await _evaluate(replace(prepared, options=options), gated, sandboxes, environment)
            if result.verdict.reward != 1.0 and result.conflicts:
                options = replace(options, conflicts=result.conflicts)
                result = await _evaluate(replace(prepared, options=options), gated, sandboxes, environment)
            if result.verdict.reward != 1.0 and (result.events or result.installed):
                usual = event_keys(result.events)
                options = replace(options, usual_events=usual, usual_installed=result.installed)
                result = await _evaluate(replace(prepared, options=options), gated, sandboxes, environment)
            if is_solved(result.verdict.reward):
                usual = event_keys(result.events)
                options = replace(options, usual_events=usual, usual_installed=result.installed)
                return replace(prepared, options=options), result.verdict
            first = first or result.verdict
    return prepared, first or Verdict(reward=0.0, reason="")


def _record_paths(
    prepared: PreparedTask, sandboxes: Sandboxes, environment: TaskEnvironment, cache: Path
) -> tuple[Path, Path]:
    """Return the paths where a validation is stored: for the task as it is, and with any time limit."""
    paths = [str(prepared.tree), str(prepared.hidden), *(str(mount.source) for mount in environment.mounts)]
    task = prepared.task
    as_it_is, unlimited = (
        hashlib.sha256(
            # A store has a task's fields in another order than its file, and it is the same task.
            msgspec.json.encode([_FORMAT, sandboxes.name, paths, environment.env, variant], order="deterministic")
        ).hexdigest()
        for variant in (task, replace(task, checks=replace(task.checks, timeout_s=0.0)))
    )
    directory = cache / "validated"
    return directory / as_it_is[:32], directory / unlimited[:32]
