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
from understudy.view.schema.orders import VoteView

# --- rollouts --------------------------------------------------------------------------------------------


class RolloutRow(Struct, frozen=True, kw_only=True):
    """A rollout in a list. Reward, reason and integrity are of the attempt that decided, None where none did.

    Turns, tokens, cost and seconds are of that attempt, else of the last one. `reviewed` when a person has said
    whether its patch is clean.
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
    """A page of the rollouts that meet the filter; `total` is how many do. `matches` is the text around `q`.

    `unsearched` is how many rollouts the full-text index lacks yet: asked again, there are fewer.
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
    """A task with its rollouts, by agent and sample index."""

    task_id: str
    solved: int
    graded: int
    samples: tuple[TaskSample, ...]


class TaskGridPage(Struct, frozen=True, kw_only=True):
    """Tasks in the order of their ids."""

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
    """The task of a rollout. `gold_patch` is what the grader holds as the solution."""

    task_id: str
    repo: str
    instruction: str
    gold_patch: str


class GradedTest(Struct, frozen=True, kw_only=True):
    """A test that decides: its outcome with the patch, and without it, as validation of the task found.

    `unpatched` is None where the task does not say; `regraded` is the outcome in the verdict that this one took
    the place of, None where it is the first.
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
    """What the grader says of a patch's integrity, or a person after it (`review`)."""

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

    `above` is the branch that it hangs under; `spawned_by` and `continues` are ids of the calls that started it.
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
    """A token sequence of one or more calls, and why it begins where it does."""

    index: int
    reason: str
    branch: str
    role: str
    call_ids: tuple[str, ...]
    tokens: int
    sampled: int
    superseded: bool


class RolloutHead(Struct, frozen=True, kw_only=True):
    """All of a rollout but its turns, tokens, patch and raw bodies. `attempt_id` is the attempt that is shown.

    A client of a gateway that runs alone has neither row nor task nor verdict. `segments` are empty where the
    backend gave no token ids; `segment_reasons` counts why segments begin. Of a long rollout `unread` calls are
    not read yet, which branches and segments then lack: asked again, there are fewer.
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
    segment_reasons: dict[str, int]
    votes: tuple[VoteView, ...] = ()


# --- turns -----------------------------------------------------------------------------------------------


class ImageView(Struct, frozen=True, kw_only=True):
    """An image in a block: its type, as the agent said, and about how many bytes; those elsewhere have no type."""

    media_type: str
    size: Size


class BlockView(Struct, frozen=True, kw_only=True):
    """One block of a conversation. `text` and `arguments` are cut; their sizes are those of the whole.

    `ref` names the block for the route that reads the rest. `arguments` of a tool call are the JSON text that the
    model wrote.
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

    `superseded`: the same request was made again later. `alternative`: one of several samples asked for at once,
    and not the one that the conversation went on from. `left_out` is how many of the first blocks of `asked` are
    not in the page, as it would be too large.
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
    """Turns from `start` on, of `total`; `next` is the index to go on with, None at the end."""

    turns: tuple[TurnView, ...]
    start: int
    total: int
    next: int | None


class CallLine(Struct, frozen=True, kw_only=True):
    """A call on one line: for the waterfall, the swimlanes and for jumping from turn to turn."""

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
    """A part of a long text: `text` begins at `offset`; `size` is the whole, `next` where to go on."""

    text: str
    offset: int
    size: int
    next: int | None


class PatchView(Struct, frozen=True, kw_only=True):
    """The patch of the shown attempt, as a range; None where no attempt came so far."""

    attempt_id: str | None
    patch: TextRange | None


# --- tokens ----------------------------------------------------------------------------------------------


class TrainerTokens(Struct, frozen=True, kw_only=True):
    """What an update computed for the tokens of the page: one value each, None off the mask or where unknown."""

    step: int
    version: str
    logprobs: tuple[float | None, ...]
    ratios: tuple[float | None, ...]
    advantages: tuple[float | None, ...]


class TokenPage(Struct, frozen=True, kw_only=True):
    """Tokens of a call: what is new in its prompt, then what was sampled. Columns have one value for each token.

    `start` is where the page begins among the `total` tokens of the call's segment, and `call_start` to `call_end`
    the tokens that the call sampled there. `mask` is 1 on sampled tokens. `texts` are empty where no tokenizer is
    known, and `tokenizer` says which one it is. `versions` are indices into `policy_versions`, -1 where none is
    known. `segment` is None for a call without token ids.
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
    """What a rollout did in one turn, on one line, and a digest of it by which rollouts are aligned."""

    call_id: str
    index: int
    action: str
    digest: str


class GroupMember(Struct, frozen=True, kw_only=True):
    """A rollout of a task beside the others. `advantage` is its reward less the group's mean."""

    row: RolloutRow
    advantage: float | None
    turns: tuple[GroupTurn, ...]


class TaskGroup(Struct, frozen=True, kw_only=True):
    """All rollouts of a task by one agent. `parting` is the first turn in which solved and unsolved ones differ.

    Of long rollouts only the first turns are compared; `cut` says that.
    """

    task_id: str
    members: tuple[GroupMember, ...]
    parting: int | None
    cut: bool


class ComparedTask(Struct, frozen=True, kw_only=True):
    """A task in two runs."""

    task_id: str
    before_solved: int
    before_graded: int
    after_solved: int
    after_graded: int


class ComparedRuns(Struct, frozen=True, kw_only=True):
    """Two runs by task, those with the greatest change first. `difference` has a 95 % interval.

    `p_value` is two-sided, of exchanging the two results of every task. None where no task is graded in both.
    """

    before: str
    after: str
    tasks: tuple[ComparedTask, ...]
    difference: float | None
    low: float | None
    high: float | None
    p_value: float | None
    paired_tasks: int
