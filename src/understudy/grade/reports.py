"""Verdicts as files, in the places and shapes of SWE-bench's own harness, so that what reads those reads ours.

`logs/run_evaluation/<run_id>/<model>/<instance_id>/` has what the harness leaves of an instance, and beside it
`verdict.json`, which is ours and whole. `<model>.<run_id>.json` sums a run up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, TaskError
from understudy.types import KEEPS, SOLVES, PytestChecks, ScriptChecks, SuiteChecks, Task, Verdict, is_solved
from understudy.util.files import atomic_write, write_remedy

LOGS = Path("logs", "run_evaluation")
REPORT, VERDICT = "report.json", "verdict.json"
UNNAMED_MODEL = "unnamed-model"
"""The model name of predictions without one, in the names of their report files."""

_TIMED_OUT = "did not end in"
UNSURE = "unsure, for the task did not pass validation"
"""Part of the reason of a verdict if the gold patch does not pass here either."""

Tier = Literal["environment", "ambiguous"]

# Signs of a cause other than the patch, for a person to look at: they never change a verdict.
_SIGNS: tuple[tuple[str, Tier, re.Pattern[str]], ...] = (
    ("out_of_memory", "environment", re.compile(r"Cannot allocate memory|^Killed$", re.MULTILINE)),
    ("network_unreachable", "environment", re.compile(r"Could not resolve host|failure in name resolution")),
    ("missing_module", "ambiguous", re.compile(r"ModuleNotFoundError|MODULE_NOT_FOUND|Cannot find module")),
    ("no_tests_collected", "ambiguous", re.compile(r"no tests ran|collected 0 items")),
)
# The groups of the harness's summary, by the statuses or the tier of the outcomes in them.
_GROUPS: dict[str, set[str]] = {
    "completed": {"resolved", "unresolved"},
    "resolved": {"resolved"},
    "unresolved": {"unresolved"},
    "infra_failure": {"environment"},
    "ambiguous_failure": {"ambiguous"},
    "empty_patch": {"empty"},
    "error": {"error"},
}
_REWORDED = {
    " tests to mend still fail": " tests to fix still fail",
    " tests are said to have passed and failed: ": " tests both passed and failed in the output: ",
    ", where canaries fail it is 1": ", expected 1 because canaries fail",
    ", but none is said to have failed": ", but none failed by their output",
    "git reads other files in it than the gate": "git and the gate read different files in it",
    "the output of the tests cannot be read: ": "the output of the tests cannot be parsed: ",
}
_FAULTS: dict[str, str] = {"sandbox": "container_unavailable", "grader": "grader_error"}


class GradingOutcome(Struct, frozen=True):
    """The outcome of one prediction. `reason` is one line for a person.

    `cause` names what may be at fault besides the patch, `tier` how certain that is; both are "" if nothing points
    to it. An `error` is no verdict: the patch may be good.
    """

    status: Literal["resolved", "unresolved", "empty", "error"]
    reason: str = ""
    cause: str = ""
    tier: Tier | Literal[""] = ""
    suspicious: bool = False


class _StoredVerdict(Struct, frozen=True):
    key: str
    verdict: Verdict


def outcome_of(verdict: Verdict) -> GradingOutcome:
    """Return the outcome that a verdict has in the summary."""
    suspicious = verdict.integrity.status == "suspicious"
    if is_solved(verdict.reward):
        return GradingOutcome("resolved", verdict.reason, suspicious=suspicious)
    cause, tier = _cause(verdict)
    return GradingOutcome("unresolved", verdict.reason, cause, tier, suspicious)


def current_reason(reason: str) -> str:
    """Return a verdict's reason in its current wording. Stores of 0.1 word some reasons differently."""
    for old, new in _REWORDED.items():
        reason = reason.replace(old, new)
    return reason


def failed_outcome(boundary: str, message: str) -> GradingOutcome:
    """Return the outcome of a patch that could not be judged, by the boundary of the error."""
    cause = _FAULTS.get(boundary, "")
    return GradingOutcome("error", f"{boundary}: {message}", cause, "environment" if cause else "")


def instance_dir(output: Path, run_id: str, model: str, instance_id: str) -> Path:
    """Return the directory of an instance's files. Raises TaskError for a name that cannot be part of a path."""
    return output / LOGS / name_part(run_id) / name_part(model) / name_part(instance_id)


def name_part(name: str) -> str:
    """Return a run's, model's or instance's name for file names, with `__` for `/`. Raises TaskError if it cannot
    be one.
    """
    part = name.replace("/", "__")
    if not part or part.startswith(".") or not part.isprintable() or "\\" in part or len(os.fsencode(part)) > 180:
        raise TaskError(
            f"{name[:80]!r} cannot be part of a file name, as ids of runs and instances and names of models are; "
            "use printable characters, no backslash, not beginning with a dot, at most 180 bytes"
        )
    return part


def instance_report(task: Task, patch: bytes | None, verdict: Verdict) -> dict[str, Any]:
    """Return the report of one instance in the format of SWE-bench's harness: its id mapped to an object."""
    entry: dict[str, Any] = {
        "patch_is_None": patch is None,
        "patch_exists": bool(patch),
        "patch_successfully_applied": bool(patch) and verdict.applied,
        "resolved": is_solved(verdict.reward),
        "infra_failure": False,
    }
    cause, tier = _cause(verdict)
    if cause and not verdict.tests:
        entry |= {"infra_failure": tier == "environment", "infra_failure_reason": cause}
    if verdict.tests:
        entry["tests_status"] = _tests_status(task, verdict)
    return {task.instance_id: entry}


def write_report(
    directory: Path, task: Task, patch: bytes | None, verdict: Verdict, *, elapsed_s: float = 0.0, key: str = ""
) -> Path:
    """Write the files of one graded instance, each atomically, the report last. Returns the path of the report.

    `patch` is None if there was none; `elapsed_s` is how long grading took in seconds. `key` is what the verdict
    depends on, for `read_verdict` (`grade.batch` makes it); reports of a run have none, because nothing
    reuses them. Raises ConfigError if they cannot be written.
    """
    log = [
        f"{task.instance_id}: {len(patch or b'')} bytes of patch, judged in {elapsed_s:.2f} s",
        "the patch was applied" if verdict.applied else "the patch was not applied",
        f"the checks ran {verdict.checks_s:.2f} s",
        f"reward {verdict.reward:g}: {verdict.reason}",
        f"integrity: {verdict.integrity.status} {verdict.integrity.reason}".rstrip(),
        *(
            f"  {evidence.rule} {evidence.path}:{evidence.line} {evidence.text}"
            for evidence in verdict.integrity.evidence
        ),
    ]
    files = {
        **_inputs(task, patch, log, verdict),
        "test_output.txt": _output(verdict).encode(errors="replace"),
        VERDICT: msgspec.json.format(msgspec.json.encode(_StoredVerdict(key, verdict)), indent=2),
        REPORT: _json(instance_report(task, patch, verdict)),
    }
    _write(directory, files)
    return directory / REPORT


def read_verdict(directory: Path, key: str) -> Verdict | None:
    """Return the stored verdict with this key, which `grade.batch` makes (`_key`); None if there is no complete
    one.
    """
    try:
        if not (directory / REPORT).exists():
            return None
        stored = msgspec.json.decode((directory / VERDICT).read_bytes(), type=_StoredVerdict)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return stored.verdict if stored.key == key else None


def write_failure(directory: Path, task: Task, patch: bytes | None, message: str) -> None:
    """Write the inputs and the error of an instance that could not be graded; without a report, it is tried again.

    Raises ConfigError when it cannot be written.
    """
    _write(directory, _inputs(task, patch, [f"{task.instance_id}: not judged: {message}"]))
    for name in (REPORT, VERDICT):
        (directory / name).unlink(missing_ok=True)


def write_metadata(output: Path, run_id: str, dataset: str) -> None:
    """Write what a run is graded against to the file that SWE-bench's harness reads when it reads the reports
    again.
    """
    created_at = datetime.now(UTC).isoformat(timespec="seconds")
    metadata = {"dataset": dataset, "split": "test", "task_repo": None, "created_at": created_at}
    _write(output / LOGS / name_part(run_id), {"run.json": _json(metadata) + b"\n"})


def write_summary(
    output: Path,
    run_id: str,
    model: str,
    outcomes: Mapping[str, GradingOutcome],
    tasks: Collection[str],
    *,
    images: Collection[str] = (),
) -> Path:
    """Write a run's summary as SWE-bench's harness does, and return the file's path.

    `outcomes` has every instance with a prediction, even one that is not in `tasks`. `images` are the container
    images that are kept on this machine. Raises ConfigError if the file cannot be written.
    """
    path = output / f"{name_part(model)}.{name_part(run_id)}.json"
    _write(output, {path.name: _json(summary(outcomes, tasks, images=images)) + b"\n"})
    return path


def summary(
    outcomes: Mapping[str, GradingOutcome], tasks: Collection[str], *, images: Collection[str] = ()
) -> dict[str, Any]:
    """Return the summary that SWE-bench's harness writes for a run (schema version 2)."""

    groups = {
        name: sorted(id for id, outcome in outcomes.items() if {outcome.status, outcome.tier} & members)
        for name, members in _GROUPS.items()
    }
    return {
        "total_instances": len(tasks),
        "submitted_instances": len(outcomes),
        **{f"{name}_instances": len(ids) for name, ids in groups.items()},
        "completed_ids": groups["completed"],
        "incomplete_ids": sorted(set(tasks) - outcomes.keys()),
        "empty_patch_ids": groups["empty_patch"],
        "submitted_ids": sorted(outcomes),
        "resolved_ids": groups["resolved"],
        "unresolved_ids": groups["unresolved"],
        "infra_failure_ids": groups["infra_failure"],
        "ambiguous_failure_ids": groups["ambiguous_failure"],
        "failure_reasons": {id: outcome.cause for id, outcome in sorted(outcomes.items()) if outcome.cause},
        "error_ids": groups["error"],
        "schema_version": 2,
        "unstopped_instances": 0,  # a sandbox that was closed is gone
        "unstopped_containers": [],
        "unremoved_images": sorted(images),
    }


def _cause(verdict: Verdict) -> tuple[str, Tier | Literal[""]]:
    if is_solved(verdict.reward):
        return "", ""
    if _TIMED_OUT in verdict.reason:
        return "tests_timed_out", "ambiguous"
    if UNSURE in verdict.reason:
        return "gold_patch_fails", "ambiguous"
    for name, tier, sign in _SIGNS:
        if sign.search(verdict.log):
            return name, tier
    return "", ""


def _tests_status(task: Task, verdict: Verdict) -> dict[str, dict[str, list[str]]]:
    """Return how the deciding tests ended, by the harness's names. Two of its groups are always empty here."""
    checks = task.checks
    groups: dict[str, tuple[Sequence[str], Collection[str]]] = {}
    if not isinstance(checks, ScriptChecks):
        absent = {"missing"} if isinstance(checks, SuiteChecks) and checks.only_failures_count else set[str]()
        groups["FAIL_TO_PASS"] = checks.fail_to_pass, SOLVES | absent
        groups["PASS_TO_PASS"] = checks.pass_to_pass, KEEPS | absent
    status: dict[str, dict[str, list[str]]] = {}
    for name in ("FAIL_TO_PASS", "PASS_TO_PASS", "FAIL_TO_FAIL", "PASS_TO_FAIL"):
        ids, good = groups.get(name, ((), ()))
        status[name] = {"success": [], "failure": []}
        for id in ids:
            status[name]["success" if verdict.tests.get(id, "missing") in good else "failure"].append(id)
    return status


def _inputs(
    task: Task, patch: bytes | None, log: Sequence[str], verdict: Verdict | None = None
) -> dict[str, bytes]:
    return {
        "patch.diff": patch or b"",
        "eval.sh": _script(task, verdict).encode(errors="surrogateescape"),
        "run_instance.log": "\n".join((*log, "")).encode(errors="replace"),
    }


def _script(task: Task, verdict: Verdict | None) -> str:
    """Return the commands that the grader ran, as a script. Each was a phase of its own, whose processes ended
    with it.

    For a verdict of 0.1, or without one, the commands are those of the task's checks.
    """
    if verdict is None or not verdict.grader:
        return _commands(task)
    return "\n".join(("#!/bin/bash", *(verdict.commands or ("# nothing ran in a sandbox to the end",)), ""))


def _commands(task: Task) -> str:
    """Return the commands of a task's checks as a script for people."""
    match task.checks:
        case SuiteChecks() as checks:
            steps = [checks.activate, checks.before, "git apply patch.diff", checks.install, checks.command]
        case PytestChecks() as checks:
            names = {id.split("::", 1)[0]: None for id in (*checks.fail_to_pass, *checks.pass_to_pass)}
            steps = ["git apply patch.diff", f"python -m pytest {' '.join(names)}"]
        case ScriptChecks() as checks:
            steps = ["git apply patch.diff", " ".join(checks.command)]
    return "\n".join(("#!/bin/bash", f"cd {task.workdir}", *(step for step in steps if step), ""))


def _output(verdict: Verdict) -> str:
    """Return the checks' output between the markers of SWE-bench's harness, which other tools search for."""
    if not verdict.log and not verdict.tests:
        return f"{verdict.reason}\n"
    return f">>>>> Start Test Output\n{verdict.log.rstrip()}\n>>>>> End Test Output\n"


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=4).encode()


def half_written(output: Path, run_id: str) -> list[Path]:
    """Return the files that a killed process left beside a run's summary. Raises OSError."""
    temporary_file = re.compile(rf"\..*\.{re.escape(name_part(run_id))}\.json\.\d+\.new")
    return [path for path in output.iterdir() if temporary_file.fullmatch(path.name) and path.is_file()]


def _write(directory: Path, files: Mapping[str, bytes]) -> None:
    """Write files in this order, each atomically. Raises ConfigError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            # Named so that `half_written` can tell which run a leftover is of.
            temporary = directory / f".{name}.{os.getpid()}.new"
            atomic_write(directory / name, content, temporary=temporary)
    except OSError as error:
        path = error.filename or directory
        remedy = write_remedy(error, "choose another --output-dir")
        raise ConfigError(f"{path}: a report cannot be written: {error.strerror}; {remedy}") from error
