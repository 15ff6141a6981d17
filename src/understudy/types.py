"""The types that all packages share: task, rollout, attempt, call, verdict. Plain data without behaviour.

All are msgspec structs, so that reading and writing JSON checks types and gives exact error paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal

from msgspec import Struct, field

from understudy.errors import UnderstudyError

SCHEMA: Final = 1
"""The version of the schema of exports, states and pairs, and of what `--json` prints.

It increases when a column or key is removed or changes its meaning. Data without a version, from earlier releases,
has version 1.
"""


# --- tasks ---------------------------------------------------------------------------------------------


class Sdist(Struct, frozen=True, tag="sdist", tag_field="kind", forbid_unknown_fields=True):
    """A source distribution on the package index, pinned by hash."""

    name: str
    version: str
    sha256: str


class Directory(Struct, frozen=True, tag="directory", tag_field="kind", forbid_unknown_fields=True):
    """A directory on disk; in a JSONL file a relative path is taken from the file's own directory."""

    path: str


class Files(Struct, frozen=True, tag="files", tag_field="kind", forbid_unknown_fields=True):
    """Text files given in place: relative path → content."""

    files: dict[str, str]


class ImageTree(Struct, frozen=True, tag="image", tag_field="kind", forbid_unknown_fields=True):
    """The tree in the task's container image, at the task's `workdir`.

    If `base_commit` is given, the image's repository must be at that commit or a descendant of it.
    """

    base_commit: str = ""


Source = Sdist | Directory | Files | ImageTree


class PytestChecks(Struct, frozen=True, tag="pytest", tag_field="kind", forbid_unknown_fields=True):
    """Hidden pytest files and the node ids that decide.

    `files` are laid over the patched tree before the tests run (path relative to the tree → content). The
    patch is resolved when every id of `fail_to_pass` passes and no id of `pass_to_pass` fails.
    """

    files: dict[str, str]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    timeout_s: float = 120.0


class ScriptChecks(Struct, frozen=True, tag="script", tag_field="kind", forbid_unknown_fields=True):
    """A hidden directory, mounted read-only at `target`, with a script that checks the patch.

    The reward is the number that the script writes to `reward_file` (or the key `reward` of a `.json` file beside
    it). If it writes neither, the reward is 1 if it exits with 0. If it exits with another code, the task is not
    solved.
    """

    source: Directory | Files
    command: tuple[str, ...] = ("bash", "/tests/test.sh")
    target: str = "/tests"
    reward_file: str = "/logs/verifier/reward.txt"
    timeout_s: float = 300.0


class SuiteChecks(Struct, frozen=True, tag="suite", tag_field="kind", forbid_unknown_fields=True):
    """A test suite that is run by its own command and read from what it prints, as in SWE-bench.

    All commands are for bash, in the task's `workdir`. The patch is resolved when every id of `fail_to_pass`
    passes and no id of `pass_to_pass` fails.
    """

    parser: str
    """How the output is read: a key of `understudy.checks.log_parsers`. Test ids are those that it finds."""
    command: str
    """Runs the tests; it ends with the names of what to test."""
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    """The test files that `command` runs, relative to the tree."""
    test_patch: str = ""
    """Laid over the patched tree."""
    activate: str = ""
    """Comes before every other command."""
    before: str = ""
    """Runs before any patch is applied."""
    install: str = ""
    """Runs after the patch, where that changes what is installed."""
    only_failures_count: bool = False
    """An id that is not in the output counts as passed (SWE-bench's `fail_only`)."""
    timeout_s: float = 1800.0


Checks = PytestChecks | ScriptChecks | SuiteChecks


class Task(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One programming task: an instruction, a source tree and hidden checks.

    The agent gets `source` with `setup_patch` applied, as a single root commit in `workdir`. `gold_patch` is a
    unified diff against that tree which must score 1; the empty patch must score 0. `image` is the container image
    with the programs that the task needs, for sandboxes that run images; without one it is this machine's Python,
    with the `packages` that the task needs: requirements as pip reads them, each pinned with its hashes.
    """

    instance_id: str
    repo: str
    instruction: str
    source: Source
    checks: Checks
    gold_patch: str
    setup_patch: str = ""
    workdir: str = "/workspace"
    image: str = ""
    env: dict[str, str] = field(default_factory=dict[str, str])
    packages: tuple[str, ...] = ()
    meta: dict[str, Any] = field(default_factory=dict[str, Any])


# --- the life of a rollout -----------------------------------------------------------------------------

RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "cancelled", "requeuing"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "timeout", "unresponsive"]

ROLLOUT_TRANSITIONS: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"running", "failed", "cancelled", "requeuing"}),
    "running": frozenset({"succeeded", "failed", "cancelled", "requeuing"}),
    "requeuing": frozenset({"preparing", "failed", "cancelled"}),
    "succeeded": frozenset(),
    # A resumed run retries infrastructure failures and cancelled rollouts.
    "failed": frozenset({"requeuing"}),
    "cancelled": frozenset({"requeuing"}),
}
ENDED: tuple[RolloutStatus, ...] = ("succeeded", "failed", "cancelled")
"""The states of a rollout that has ended: it is neither worked on nor queued."""
ATTEMPT_TRANSITIONS: dict[AttemptStatus, frozenset[AttemptStatus]] = {
    "preparing": frozenset({"running", "failed", "unresponsive"}),
    "running": frozenset({"succeeded", "failed", "timeout", "unresponsive"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
    "unresponsive": frozenset(),
}


class ErrorInfo(Struct, frozen=True):
    """A fault as it is stored: the boundary it crossed, its type and its message."""

    boundary: str
    type: str
    message: str


class Run(Struct, frozen=True, kw_only=True):
    """One invocation over many rollouts, with the configuration it must keep. `created_at` in Unix seconds."""

    id: str
    config: dict[str, Any]
    created_at: float


def info_of(error: UnderstudyError) -> ErrorInfo:
    """Return an error in the form in which it is stored."""
    return ErrorInfo(error.boundary, type(error).__name__, str(error))


class AgentIdentity(Struct, frozen=True):
    """The agent that works on a rollout: its name among `understudy.agents`, and the version of its program.

    `version` is None if it is unknown, as for a shell command. Two versions count as two agents: rollouts are
    compared, in groups and pairs, only with those of the same agent.
    """

    name: str
    version: str | None = None

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else self.name


def group_name(task_id: str, agent: AgentIdentity) -> str:
    """Return the name of a group of rollouts in exports and trainers. It contains the agent if several worked on
    the task.
    """
    return f"{task_id} by {agent}"


class Rollout(Struct, frozen=True, kw_only=True):
    """One task, one sample index and one agent, within one run. Times are Unix seconds."""

    id: str
    run_id: str
    task_id: str
    sample_index: int
    agent: AgentIdentity
    status: RolloutStatus
    created_at: float
    updated_at: float
    error: ErrorInfo | None = None


class Finding(Struct, frozen=True, kw_only=True):
    """Something notable about an attempt that did not end it; `kind` is a short name, `message` explains it.

    Kinds: `answer limit` (the last answer was cut off at its maximum length, and the agent gave up), `budget` (the
    attempt used up its budget), `context` (it filled the model's context), `session-log` (the agent's own log
    differs from the calls). `call_id` is the call concerned, if it is about one.
    """

    kind: str
    message: str
    call_id: str | None = None


class Attempt(Struct, frozen=True, kw_only=True):
    """One execution of a rollout. `number` counts from 1 within the rollout.

    Without a rollout it is a client of a gateway that runs alone; `number` is 1.
    """

    id: str
    rollout_id: str | None
    number: int
    status: AttemptStatus
    started_at: float
    heartbeat_at: float
    ended_at: float | None = None
    error: ErrorInfo | None = None
    timings: dict[str, float] = field(default_factory=dict[str, float])
    findings: tuple[Finding, ...] = ()


class Evidence(Struct, frozen=True):
    """One place that made a patch suspicious: the rule it met, and where. `line` counts from 1 in the new file."""

    rule: str
    path: str = ""
    line: int = 0
    text: str = ""


IntegrityStatus = Literal["clean", "suspicious", "forged"]


class Integrity(Struct, frozen=True):
    """Whether a patch was made to deceive the grader; `reason` is one line for a person.

    `suspicious` is what looks so by its text or behaviour. `forged` is proven: tests passed whatever they
    expected.
    """

    status: IntegrityStatus = "clean"
    reason: str = ""
    evidence: tuple[Evidence, ...] = ()


TestOutcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "missing"]

SOLVES = frozenset[TestOutcome]({"passed", "xfailed", "xpassed"})
"""Outcomes with which a test of `fail_to_pass` counts as fixed."""

KEEPS = SOLVES | {"skipped"}
"""Outcomes with which a test of `pass_to_pass` counts as unbroken."""


SOLVED_REWARD: Final = 1.0
"""The minimum reward of a solved task."""


def is_solved(reward: float) -> bool:
    """Return whether a reward means that the task was solved. SQL compares with SOLVED_REWARD; everything else
    calls this.
    """
    return reward >= SOLVED_REWARD


Protection = Literal["none", "partial", "twins"]
PROTECTION_LEVELS: tuple[Protection, ...] = ("none", "partial", "twins")
"""From the weakest to the strongest."""


class Verdict(Struct, frozen=True, kw_only=True):
    """The grader's result for one patch.

    A suspicious patch keeps its reward; code that learns from it must look at `integrity`.
    """

    reward: float
    """From 0 to 1; 1 is solved."""
    reason: str
    """One line for a person."""
    tests: dict[str, TestOutcome] = field(default_factory=dict[str, TestOutcome])
    """The outcomes of the deciding tests, by id."""
    log: str = ""
    """The end of the checks' output."""
    checks_s: float = 0.0
    """How many seconds the checks themselves took."""
    applied: bool = True
    """False if the patch was refused or git could not apply it."""
    integrity: Integrity = Integrity()
    protection: Protection = "none"
    """How far twins confirm the reward (`understudy.checks.twins`): "twins"; "partial", where some deciding tests
    have none, or what they expect can be guessed, read or forced, or a script decides; "none".
    """
    unprotected: str = ""
    """Why the protection is not "twins", and also if nothing watches the tests' process
    (`understudy.checks.runtime_events`).
    """
    grader: str = ""
    """The version of the grader. This and both digests are empty in verdicts of 0.1."""
    task_digest: str = ""
    """The SHA-256 of the task's record."""
    patch_digest: str = ""
    """The SHA-256 of the graded patch."""
    earlier: tuple[Verdict, ...] = ()
    """The verdicts that this one replaced, oldest first."""
    commands: tuple[str, ...] = ()
    """The shell commands that ran in the sandbox of the deciding checks."""
    reused_from: str = ""
    """The attempt of the same run whose identical patch got this verdict; empty if this one was graded itself."""

    def has_protection(self, level: Protection) -> bool:
        """Return whether the reward has at least this protection. A reward of 0 needs none."""
        levels = PROTECTION_LEVELS
        return self.reward <= 0 or levels.index(self.protection) >= levels.index(level)


# --- calls ---------------------------------------------------------------------------------------------


class Usage(Struct, frozen=True, omit_defaults=True):
    """Token counts as the backend reports them.

    `prompt_tokens` includes those read from a cache (`cached_tokens`) and those written to one
    (`cache_write_tokens`, which only some providers report and charge for).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class PolicySpan(Struct, frozen=True, array_like=True):
    """The completion tokens from `start` up to `end` were sampled from this version of the weights.

    A bound is None if it is unknown: the weights changed during the call, and the server did not say where.
    """

    version: str
    start: int | None = None
    end: int | None = None


CallStatus = Literal["ok", "error", "abandoned"]


class Call(Struct, frozen=True, kw_only=True):
    """One model request and its response. What a backend does not report (token ids, logprobs, a policy version)
    is None, never made up.

    The branch is identified by (`session_id`, `agent_id`).
    """

    id: str
    attempt_id: str
    sequence: int
    """Counts from 0 within the attempt, in the order in which calls ended."""
    dialect: str
    requested_model: str
    backend: str
    backend_model: str
    request: bytes
    """The exact body that the agent sent."""
    response: bytes
    """The exact JSON message that the agent got (a streamed response is a rendering of it), or the body of the
    error.
    """
    status: CallStatus
    started_at: float
    ended_at: float
    parent_id: str | None = None
    """The last call of the branch that had its response when this one began. Storage relies on it, but it is only
    a first guess: the tree that `trajectory` computes from the messages is authoritative.
    """
    session_id: str | None = None
    agent_id: str | None = None
    policy_version: str | None = None
    """The version with which the call ended."""
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: tuple[float, ...] | None = None
    """`logprobs[i]` belongs to `completion_token_ids[i]`."""
    finish_reason: str | None = None
    """A value of chat completions in every dialect (stop, length, tool_calls, content_filter), or the provider's
    own value if none of them fits. `response` has the dialect's own value.
    """
    usage: Usage = Usage()
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    error: ErrorInfo | None = None
    policy_spans: tuple[PolicySpan, ...] = ()
    """Which tokens came from which version; empty if no version is known."""
    cost_usd: float | None = None
    """None if the price is unknown."""
    audit: dict[str, Any] = field(default_factory=dict[str, Any])
    """What token-in-token-out records about the call: how its prompt was made, and how it differs from rendering
    the messages again.
    """


WORK_ROLES: tuple[Literal["main", "subagent"], ...] = ("main", "subagent")
"""The roles of calls and of conversations that did what was wanted; the others an agent started for itself."""
