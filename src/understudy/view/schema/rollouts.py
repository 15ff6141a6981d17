"""Answers about rollouts: lists, heads, turns, tokens, and rollouts side by side."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

from understudy.types import (
    AttemptStatus,
    CallStatus,
    ErrorInfo,
    Evidence,
    Finding,
    IntegrityStatus,
    Protection,
    RolloutStatus,
    TestOutcome,
    Usage,
)
from understudy.view.schema import Size
from understudy.view.schema.actions import VoteView

# --- rollouts --------------------------------------------------------------------------------------------


class RolloutRow(Struct, frozen=True, kw_only=True):
    """A rollout in a list.

    Reward, reason and integrity are those of the attempt that decided it, None if there is none. Turns, tokens,
    cost and seconds are also that attempt's, else the last one's. `reviewed`: a person decided whether its patch
    is clean.
    """

    id: str
    run_id: str
    task_id: str
    sample_index: int
    agent: str
    status: RolloutStatus
    attempts: int
    updated_at: float
    reward: float | None = None
    reason: str | None = None
    integrity: IntegrityStatus | None = None
    reviewed: bool = False
    turns: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0
    seconds: float | None = None
    error: ErrorInfo | None = None
    labels: dict[str, int] = field(default_factory=dict[str, int])


class RolloutPage(Struct, frozen=True, kw_only=True):
    """A page of the rollouts that match the filter; `total` is their number.

    `matches` holds the text around matches of `q`. `unsearched` is how many rollouts the full-text index still
    lacks; it shrinks with each request.
    """

    rollouts: tuple[RolloutRow, ...]
    total: int
    next: str | None
    unsearched: int = 0
    matches: dict[str, str] = field(default_factory=dict[str, str])


class TaskSample(Struct, frozen=True, kw_only=True):
    """A rollout as a cell of the grid of tasks and samples."""

    rollout_id: str
    sample_index: int
    agent: str
    status: RolloutStatus
    reward: float | None
    integrity: IntegrityStatus | None


class TaskGridRow(Struct, frozen=True, kw_only=True):
    """A task with its rollouts, by agent and sample index.

    If they are too many for a page, the next page begins with the same task and the rest of its `samples`.
    `solved` and `graded` count all of them.
    """

    task_id: str
    solved: int
    graded: int
    samples: tuple[TaskSample, ...]


class TaskGridPage(Struct, frozen=True, kw_only=True):
    """Tasks in order of their ids."""

    tasks: tuple[TaskGridRow, ...]
    total: int
    next: str | None


class AttemptView(Struct, frozen=True, kw_only=True):
    """An attempt. `timings` are seconds by phase."""

    id: str
    number: int
    status: AttemptStatus
    started_at: float
    ended_at: float | None
    timings: dict[str, float]
    graded: bool
    findings: tuple[Finding, ...] = ()
    error: ErrorInfo | None = None


class TaskView(Struct, frozen=True, kw_only=True):
    """The task of a rollout. `gold_patch` is the reference solution that the grader has."""

    task_id: str
    repo: str
    instruction: str
    gold_patch: str


class GradedTest(Struct, frozen=True, kw_only=True):
    """A test that decides: its outcome with the patch, and without it, as validation of the task found.

    `unpatched` is None if the task does not say; `regraded` is the outcome in the verdict that this one replaced,
    None if this is the first verdict.
    """

    id: str
    outcome: TestOutcome
    unpatched: Literal["failed", "passed"] | None = None
    regraded: TestOutcome | None = None


class ReusedVerdict(Struct, frozen=True, kw_only=True):
    """The attempt that was graded with the same patch, and its rollout, None where the store does not have it."""

    attempt_id: str
    rollout_id: str | None = None
    sample_index: int | None = None


class IntegrityView(Struct, frozen=True, kw_only=True):
    """What the grader found about a patch's integrity, or what a person decided after it (`review`)."""

    status: IntegrityStatus
    reason: str
    evidence: tuple[Evidence, ...]
    reviewed: bool


class VerdictView(Struct, frozen=True, kw_only=True):
    """The grader's verdict on the shown attempt. `log` is the end of the checks' output.

    `reused_from` is the attempt whose verdict this is; None where the patch was graded itself.
    """

    reward: float
    reason: str
    applied: bool
    checks_s: float
    protection: Protection
    unprotected: str
    grader: str
    tests: tuple[GradedTest, ...]
    integrity: IntegrityView
    log: str
    commands: tuple[str, ...]
    reused_from: ReusedVerdict | None = None


class BranchView(Struct, frozen=True, kw_only=True):
    """A branch of the calls: the session itself, a subagent, a compaction, a retry.

    `above` is the branch that it hangs under; `spawned_by` and `continues` are the ids of the calls that started
    it.
    """

    name: str
    role: str
    above: str | None
    depth: int
    origin: str
    calls: int
    superseded: bool
    first_turn: int
    started_at: float
    ended_at: float
    prompt_tokens: int
    completion_tokens: int
    cost_usd: float | None
    spawned_by: str | None = None
    continues: str | None = None


class SegmentView(Struct, frozen=True, kw_only=True):
    """A token sequence of one or more `calls`, and the reason why it begins where it does."""

    index: int
    reason: str
    branch: str
    role: str
    calls: int
    tokens: int
    sampled: int
    superseded: bool


class RolloutHead(Struct, frozen=True, kw_only=True):
    """Everything about a rollout except its turns, tokens, patch and raw bodies.

    `attempt_id` is the shown attempt.

    For the client of a gateway that runs alone, `row`, `task` and `verdict` are None. `segments` is empty if
    the backend returned no token ids; `segment_calls` are the ids of the calls of all segments, one segment
    after the other, and `segment_reasons` counts the reasons why segments begin. `unread` is the number of
    calls of a long rollout that have not been read yet, so branches and segments lack them; it shrinks with
    each request.
    """

    id: str
    row: RolloutRow | None
    attempt_id: str | None
    attempts: tuple[AttemptView, ...]
    task: TaskView | None
    verdict: VerdictView | None
    has_patch: bool
    logs: dict[str, int]
    turns: int
    unread: int
    branches: tuple[BranchView, ...]
    segments: tuple[SegmentView, ...]
    segment_calls: tuple[str, ...]
    segment_reasons: dict[str, int]
    votes: tuple[VoteView, ...] = ()
    next: str | None = None


# --- turns -----------------------------------------------------------------------------------------------


class ImageView(Struct, frozen=True, kw_only=True):
    """An image in a block: its media type as the agent stated it, and its approximate bytes.

    Linked images have no type.
    """

    media_type: str
    size: Size


class BlockView(Struct, frozen=True, kw_only=True):
    """One block of a conversation. `text` and `arguments` are cut; their sizes are those of the whole.

    `ref` identifies the block for the route that reads the rest. A tool call's `arguments` are the JSON text that
    the model wrote.
    """

    ref: str
    role: str
    kind: Literal["text", "thinking", "tool_use", "tool_result", "other"]
    text: str = ""
    text_size: Size = 0
    id: str = ""
    name: str = ""
    arguments: str = ""
    arguments_size: Size = 0
    is_error: bool = False
    malformed: bool = False
    images: tuple[ImageView, ...] = ()


class TurnView(Struct, frozen=True, kw_only=True):
    """A call: what is new in its request (`asked`), and its answer (`answered`). `index` counts from 0.

    `superseded`: the same request was made again later. `alternative`: one of several samples requested at once,
    and not the one with which the conversation continued. `left_out` is how many of the first blocks of `asked`
    were left out to fit the page.
    """

    index: int
    call_id: str
    sequence: int
    branch: str
    role: str
    status: CallStatus
    requested_model: str
    model: str
    backend: str
    started_at: float
    ended_at: float
    asked: tuple[BlockView, ...]
    answered: tuple[BlockView, ...]
    left_out: int
    usage: Usage
    has_tokens: bool
    policy_versions: tuple[str, ...] = ()
    finish_reason: str | None = None
    cost_usd: float | None = None
    superseded: bool = False
    alternative: bool = False
    parent: str | None = None
    spawned_by: str | None = None
    continues: str | None = None
    error: ErrorInfo | None = None


class TurnPage(Struct, frozen=True, kw_only=True):
    """Turns from `start` on, of `total`. `next` is the index to continue with, None at the end."""

    turns: tuple[TurnView, ...]
    start: int
    total: int
    next: int | None


class CallLine(Struct, frozen=True, kw_only=True):
    """A call on one line, for the waterfall, the swimlanes and for jumping between turns."""

    index: int
    call_id: str
    branch: str
    role: str
    status: CallStatus
    started_at: float
    ended_at: float
    prompt_tokens: int
    completion_tokens: int
    tools: tuple[str, ...]
    superseded: bool = False


class CallPage(Struct, frozen=True, kw_only=True):
    """Calls from `start` on, of `total`."""

    calls: tuple[CallLine, ...]
    start: int
    total: int
    next: int | None


class TextRange(Struct, frozen=True, kw_only=True):
    """Part of a long text: `text` begins at `offset`; `size` is that of the whole, `next` the offset to
    continue with.
    """

    text: str
    offset: int
    size: int
    next: int | None


class PatchView(Struct, frozen=True, kw_only=True):
    """The patch of the shown attempt, as a range; None if no attempt got that far."""

    attempt_id: str | None
    patch: TextRange | None


# --- tokens ----------------------------------------------------------------------------------------------


class TrainerTokens(Struct, frozen=True, kw_only=True):
    """What an update computed for the tokens of the page: one value each, None for unmasked or unknown tokens."""

    step: int
    version: str
    logprobs: tuple[float | None, ...]
    ratios: tuple[float | None, ...]
    advantages: tuple[float | None, ...]


class TokenPage(Struct, frozen=True, kw_only=True):
    """The tokens of a call: what is new in its prompt, then what was sampled. Columns have one value per token.

    `start` is where the page begins among the `total` tokens of the call's segment, in which the call sampled the
    tokens from `call_start` to `call_end`. `mask` is 1 for sampled tokens. `texts` is empty if no tokenizer is
    known; `tokenizer` names the one used. `versions` are indexes into `policy_versions`, -1 for unknown. `segment`
    is None for a call without token ids.
    """

    call_id: str
    segment: SegmentView | None
    start: int
    total: int
    next: int | None
    call_start: int
    call_end: int
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    logprobs: tuple[float | None, ...]
    mask: tuple[int, ...]
    versions: tuple[int, ...]
    policy_versions: tuple[str, ...]
    tokenizer: str | None
    trainer: tuple[TrainerTokens, ...] = ()


# --- comparing -------------------------------------------------------------------------------------------


class GroupTurn(Struct, frozen=True, kw_only=True):
    """What a rollout did in one turn, on one line, and a digest of it for aligning rollouts."""

    call_id: str
    index: int
    action: str
    digest: str


class GroupMember(Struct, frozen=True, kw_only=True):
    """One of a task's rollouts that are shown side by side. `advantage` is its reward minus the group's mean."""

    row: RolloutRow
    advantage: float | None
    turns: tuple[GroupTurn, ...]


class TaskGroup(Struct, frozen=True, kw_only=True):
    """The first rollouts of a task by one agent, which has `total` of them. `parting` is the first turn in which
    solved and unsolved ones differ.

    Of long rollouts only the first turns are compared, which `cut` says.
    """

    task_id: str
    members: tuple[GroupMember, ...]
    total: int
    parting: int | None
    cut: bool
    next: str | None = None


class ComparedTask(Struct, frozen=True, kw_only=True):
    """A task in two runs."""

    task_id: str
    before_solved: int
    before_graded: int
    after_solved: int
    after_graded: int


class ComparedRuns(Struct, frozen=True, kw_only=True):
    """Two runs by task, those with the greatest change first. `difference` has a 95 % interval.

    `p_value` is two-sided, from exchanging the two results of every task. Both are None if no task is graded in
    both runs.
    """

    before: str
    after: str
    tasks: tuple[ComparedTask, ...]
    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None
    paired_tasks: int
    next: str | None = None
