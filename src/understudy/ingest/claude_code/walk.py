"""From records to conversations: the tree of what the model was sent, with every turn in it once.

Records name their parents, but a walk along them is not what was sent. The lines of one answer are one message,
results of parallel calls hang on different lines of it, a compaction begins anew, and the writer dropped some
links. Each record is put behind what the model had been sent when it came; the rules are with the code that
follows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Raw, Struct

from understudy.ingest.claude_code.records import (
    DECODE_ERRORS,
    QUEUED_PROMPT,
    UNREADABLE,
    ClaudeBlock,
    ClaudeMessage,
    ClaudeRecord,
    parents_first,
)
from understudy.ingest.claude_code.tree import (
    ClaudeResponse,
    active_responses,
    cleared_tool_calls,
    inherited_notes,
    is_reused_id,
    only_prompt,
    path_after_resume,
    path_with_cleared_results,
    path_without_pending_calls,
    preserved_messages,
    repeat_response,
    result_ids,
)
from understudy.ingest.claude_code.versions import NO_TOOL, VersionBehaviour, continuation, is_sent_hook_output
from understudy.ingest.trace import TraceNode

_KEPT_SYSTEM = "local_command"


class ClaudeConversation(Struct):
    """What the records of one agent say. `notes` has, for nodes whose way is damaged, why.

    `active` are the keys of the answers on the way to the last one, `snapshot` is the system prompt where the log
    has it apart.
    """

    nodes: list[TraceNode]
    responses: list[ClaudeResponse]
    notes: dict[int, tuple[str, ...]]
    active: set[str]
    snapshot: Raw | None
    losses: Counter[str]


class _Attachment(Struct):
    type: str = ""


_attachment = msgspec.json.Decoder(_Attachment).decode


def build_conversation(
    records: Sequence[ClaudeRecord], habits: VersionBehaviour, resumed: Collection[str | None] = ()
) -> ClaudeConversation:
    """The conversation of one agent's records.

    `resumed` has the uuids of the first records after the session was ended and taken up again.
    """
    try:
        return _Walk(records, habits, resumed).build()
    except _OutOfOrderError:
        losses: Counter[str] = Counter()
        arranged = parents_first(records, losses)
        walk = _Walk(arranged, habits, resumed, arranged=True)
        walk.losses = losses
        return walk.build()


class _OutOfOrderError(Exception):
    """A record stands before its parent."""


class _Walk:
    def __init__(
        self,
        records: Sequence[ClaudeRecord],
        behaviour: VersionBehaviour,
        resumed: Collection[str | None],
        *,
        arranged: bool = False,
    ) -> None:
        self.habits = behaviour
        self.resumed = resumed if behaviour.resumes_by_parent else ()
        self.arranged = arranged
        self.losses: Counter[str] = Counter()
        self.records = records
        self.nodes: list[TraceNode] = []
        self.position: dict[str | None, int] = {None: -1}  # behind which node the children of a record come
        self.responses: dict[str, ClaudeResponse] = {}
        self.calls: dict[str, ClaudeResponse] = {}  # by tool use id
        self.response_at: dict[int, ClaudeResponse] = {}  # of an answer's own node and those of its results
        self.first_reply: dict[str | None, ClaudeResponse] = {}  # by what it replied to
        self.damage: dict[int, str] = {}
        self.preserved_behind: dict[str, list[str]] = {}
        # How many nodes there were before each compaction, and the last on the way to it.
        self.boundaries: dict[str | None, tuple[int, int]] = {}
        self.snapshot: Raw | None = None
        self.last_error: ClaudeRecord | None = None  # the last that the CLI told of
        self.queued: list[ClaudeRecord] = []  # prompts that were sent, but it is not known yet where
        self.moved_up: set[str | None] = set()
        self._prompt_uuid: str | None = None
        self._parents: set[str | None] | None = None
        self._by_uuid: dict[str, ClaudeRecord] | None = None
        self._results_by_parent: dict[str | None, ClaudeRecord] | None = None

    def build(self) -> ClaudeConversation:
        position, moved_up, anchors, resumed = self.position, self.moved_up, self.preserved_behind, self.resumed
        user, assistant, nodes = self.place_user, self.place_assistant, self.nodes
        calls, owner = self.calls, self.response_at
        last = -1
        previous = None
        latest = ""
        answer: ClaudeResponse | None = None
        for record in self.records:
            uuid = record.uuid
            if uuid in position:
                self.losses["repeated-uuid"] += uuid not in moved_up
                continue
            parent = record.parentUuid
            at = last if parent == previous else position.get(parent)  # mostly the one before
            before = -1
            if at is None:
                if not self.arranged and parent in self.by_uuid():
                    raise _OutOfOrderError
                # Its parent was not written, or cannot be read: what came before it is the best guess.
                at = last
                before = len(nodes)
                self.losses["missing-parent"] += 1
            if resumed and uuid in resumed:
                at = position[parent] = self.resume_path(parent, at)
            kind = record.type
            if kind == "assistant":
                body = record.message
                if body is None or (record.isApiErrorMessage and not self.habits.sends_errors):
                    self.losses["no-message"] += body is None
                    self.last_error = record
                else:
                    key = body.id
                    if key == latest and owner.get(at) is answer and answer is not None:
                        answer.records.append(record)  # by far the most frequent case
                    else:
                        answer = assistant(record, body, at)
                        latest = key or ""
                    at = answer.node
                    content = body.content
                    if type(content) is list:
                        for block in content:
                            if type(block) is ClaudeBlock and block.type == "tool_use":
                                name = block.id
                                if name is not None and name not in calls:
                                    calls[name] = answer
                                    answer.pending.append(name)
            elif kind == "user":
                at = user(record, at)
            elif kind != "progress":
                at = self.place_other(record, at)
            if before >= 0 and len(nodes) > before:
                self.damage.setdefault(before, "missing-parent")
            position[uuid] = last = at
            previous = uuid
            if anchors and uuid in anchors:
                position[uuid] = last = self.add_preserved(anchors.pop(uuid), at)
        return ClaudeConversation(
            nodes,
            list(self.responses.values()),
            inherited_notes(nodes, self.damage),
            self.active(),
            self.snapshot,
            +self.losses,
        )

    # --- records by kind, each returning behind which node its children come -------------------------------

    def place_user(self, record: ClaudeRecord, at: int) -> int:
        body = record.message
        if body is None:
            self.losses["no-message"] += 1
            return at
        if record.isCompactSummary:
            # Old versions write no boundary before it.
            at = at if record.parentUuid in self.boundaries else -1
        elif record.isVisibleInTranscriptOnly and not is_sent_hook_output(body.content):
            return at
        content = body.content
        if type(content) is list:
            owner = None
            repeated = False
            for block in content:
                if type(block) is ClaudeBlock and (name := block.tool_use_id) is not None:
                    owner = self.calls.get(name)
                    if owner is None:
                        self.losses["result-without-call"] += 1
                    elif name in owner.pending:
                        owner.pending.remove(name)
                        if block.is_error and NO_TOOL in bytes(block.content)[:80]:
                            owner.hides_plans = False  # a call of a tool that is not sent is not rewritten
                    else:
                        repeated = True
            if owner is not None and not repeated:
                # A result goes behind the answer that asked and its results so far, whichever line it hangs on.
                nodes = self.nodes
                node = len(nodes)
                nodes.append(TraceNode(owner.tail, record))
                owner.tail = node
                self.response_at[node] = owner
                return node
            if repeated:
                self.nodes.append(TraceNode(at, record))
                return len(self.nodes) - 1
        return self.add_message(record, at)

    def place_assistant(self, record: ClaudeRecord, body: ClaudeMessage, at: int) -> ClaudeResponse:
        """The answer that a line belongs to."""
        key = body.id or record.requestId or record.uuid or ""
        answer = self.responses.get(key)
        if answer is not None and self.response_at.get(at) is not answer and is_reused_id(answer, record):
            key = f"{key}#{record.uuid}"
            answer = None
        if answer is None:
            return self.add_response(key, record, at)
        answer.records.append(record)
        return answer

    def add_response(self, key: str, record: ClaudeRecord, at: int) -> ClaudeResponse:
        """A new answer, behind `at`."""
        above = self.response_at.get(at)
        unlogged = False
        if above is not None:
            at = self.end_of_response(above)
            error = (
                self.last_error
                if self.last_error is not None and self.last_error.uuid == record.parentUuid
                else None
            )
            if at == above.node and (prompt := continuation(above.records[-1], error)) is not None:
                self.nodes.append(TraceNode(at, ClaudeRecord(type="user", message=ClaudeMessage(content=prompt))))
                at = len(self.nodes) - 1
                self.damage[at] = "continuation-not-logged"
            elif at == above.node and self.queued:
                at, unlogged = self.add_queued_prompts(at), True
            elif self.habits.doubles_first and self.nodes[above.node].parent == self.prompt_node():
                at = repeat_response(self.nodes, at, above)
        node = len(self.nodes)
        answer = ClaudeResponse(key, [record], node, node, [], self.habits.hides_plans)
        self.nodes.append(TraceNode(at, answer))
        self.responses[key] = self.response_at[node] = answer
        if above is not None and unlogged:
            # What was queued was sent once, and is not known of later.
            answer.tail = len(self.nodes)
            self.nodes.append(TraceNode(above.tail, answer))
            self.response_at[answer.tail] = answer
        if above is not None and above.pending:
            self.damage.setdefault(node, "missing-result")
        if record.parentUuid not in self.first_reply:
            self.first_reply[record.parentUuid] = answer
        return answer

    def place_other(self, record: ClaudeRecord, at: int) -> int:
        if record.type == "system":
            return self.place_system(record, at)
        if record.type == "attachment":
            return self.place_attachment(record, at)
        if record.type == UNREADABLE:
            return self.place_unreadable(record, at)
        if record.type == QUEUED_PROMPT:
            self.queued.append(record)
            return at
        self.losses[f"unknown-type:{record.type[:40]}"] += 1
        return at

    def place_system(self, record: ClaudeRecord, at: int) -> int:
        if record.subtype == "compact_boundary":
            self.boundaries[record.uuid] = len(self.nodes), self.position.get(record.logicalParentUuid, -1)
            # The model is sent nothing of what was before, but for what is behind the anchor.
            try:
                anchor, uuids = preserved_messages(record, self.by_uuid())
            except DECODE_ERRORS:
                self.losses["odd-compaction"] += 1
            else:
                if anchor is not None:
                    self.preserved_behind[anchor] = uuids
            return -1
        if record.subtype == "microcompact_boundary":
            try:
                return path_with_cleared_results(self.nodes, self.end(at), cleared_tool_calls(record))
            except DECODE_ERRORS:
                self.losses["odd-compaction"] += 1
                return at
        reply = self.first_reply.get(record.parentUuid)
        if reply is not None and reply.records[-1].uuid not in self.parents():
            # The link to the answer was lost: the conversation goes on from a system record beside it.
            at = reply.node
        return self.add_message(record, at) if record.subtype == _KEPT_SYSTEM else at

    def place_attachment(self, record: ClaudeRecord, at: int) -> int:
        try:
            kind = _attachment(record.attachment).type
        except DECODE_ERRORS:
            self.losses["odd-attachment"] += 1
            return at
        if kind == "prompt_snapshot" and self.snapshot is None:
            self.snapshot = record.attachment
        return self.add_message(record, at) if kind == "queued_command" else at

    def place_unreadable(self, record: ClaudeRecord, at: int) -> int:
        owner = self.response_at.get(at)
        node = len(self.nodes)
        self.nodes.append(TraceNode(owner.tail if owner else at, record))
        self.damage[node] = "unreadable-line"
        if owner is not None:
            owner.tail = node
            self.response_at[node] = owner
        return node

    # --- the tree ------------------------------------------------------------------------------------------

    def add_message(self, record: ClaudeRecord, at: int) -> int:
        owner = self.response_at.get(at)
        self.queued.clear()
        if owner is not None:
            at = self.end_of_response(owner)
            if owner.pending:
                # The program was killed at work: when it goes on, such calls are left out.
                self.damage.setdefault(len(self.nodes), "missing-result")
                at = path_without_pending_calls(self.nodes, at, owner)
        self.nodes.append(TraceNode(at, record))
        return len(self.nodes) - 1

    def add_queued_prompts(self, at: int) -> int:
        """The prompts that were queued behind an answer, where another comes right behind it."""
        for record in self.queued:
            self.nodes.append(TraceNode(at, record))
            at = len(self.nodes) - 1
        self.queued.clear()
        return at

    def prompt_node(self) -> int | None:
        """The node of the one prompt of a run in print mode, None where there is none yet."""
        if self._prompt_uuid is None:
            self._prompt_uuid = only_prompt(self.records) or ""
        return self.position.get(self._prompt_uuid)

    def end_of_response(self, answer: ClaudeResponse) -> int:
        """What comes behind an answer comes behind its results too."""
        if answer.pending:
            self.collect_late_results(answer)
        return answer.tail

    def end(self, at: int) -> int:
        """Behind which node the next message would come."""
        owner = self.response_at.get(at)
        return owner.tail if owner is not None else at

    def collect_late_results(self, answer: ClaudeResponse) -> None:
        """Give an answer the results that come only later in the file: they were sent before what followed."""
        if self._results_by_parent is None:
            self._results_by_parent = {
                record.parentUuid: record for record in self.records if record.type == "user"
            }
        for line in answer.records:
            record = self._results_by_parent.get(line.uuid)
            while record is not None and record.uuid not in self.position:
                if not set(result_ids(record)).intersection(answer.pending):
                    break
                self.position[record.uuid] = self.place_user(record, answer.node)
                self.moved_up.add(record.uuid)
                record = self._results_by_parent.get(record.uuid)

    def add_preserved(self, uuids: Sequence[str], at: int) -> int:
        """Copy messages that a compaction kept behind the summary. Returns the last of them."""
        done: set[str] = set()
        copied: dict[str, int] = {}
        for uuid in uuids:
            record = self.by_uuid().get(uuid)
            body = record.message if record is not None else None
            if record is None or uuid not in self.position:
                self.losses["preserved-missing"] += 1
                continue
            if record.type == "assistant" and body is not None:
                answer = self.responses.get(body.id or record.requestId or uuid)
                if answer is not None and answer.key not in done:
                    done.add(answer.key)
                    self.nodes.append(TraceNode(at, answer))
                    at = len(self.nodes) - 1
            elif record.type == "user" and body is not None and not record.isVisibleInTranscriptOnly:
                self.nodes.append(TraceNode(at, record))
                at = len(self.nodes) - 1
            copied[uuid] = at
        self.position.update(copied)
        return at

    def resume_path(self, uuid: str | None, at: int) -> int:
        """The way to `at` as it is when only the records that a walk along `parentUuid` meets are read again."""
        met: set[int] = set()
        while uuid is not None and (record := self.by_uuid().get(uuid)) is not None and id(record) not in met:
            met.add(id(record))
            uuid = record.parentUuid
        return path_after_resume(self.nodes, self.end(at), met)

    # --- the end -------------------------------------------------------------------------------------------

    def active(self) -> set[str]:
        last = self.position.get(self.records[-1].uuid, -1) if self.records else -1
        bounds = [(count, self.end(at)) for count, at in self.boundaries.values()]
        return active_responses(self.nodes, self.end(last), bounds)

    def parents(self) -> set[str | None]:
        if self._parents is None:
            self._parents = {record.parentUuid for record in self.records}
        return self._parents

    def by_uuid(self) -> dict[str, ClaudeRecord]:
        if self._by_uuid is None:
            self._by_uuid = {record.uuid: record for record in reversed(self.records) if record.uuid is not None}
        return self._by_uuid
