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

from understudy.ingest.claude_code.records import FAULTS, UNREADABLE, WAITED, Block, Body, Record, parents_first
from understudy.ingest.claude_code.tree import (
    Answer,
    active,
    answered,
    blanked,
    cleared,
    doubled,
    only_prompt,
    preserved,
    reloaded,
    result_ids,
    reused,
    spread,
)
from understudy.ingest.claude_code.versions import NO_TOOL, Habits, continuation, is_context
from understudy.ingest.trace import TraceNode

_KEPT_SYSTEM = "local_command"


class Conversation(Struct):
    """What the records of one agent say. `notes` has, for nodes whose way is damaged, why.

    `active` are the keys of the answers on the way to the last one, `snapshot` is the system prompt where the log
    has it apart.
    """

    nodes: list[TraceNode]
    answers: list[Answer]
    notes: dict[int, tuple[str, ...]]
    active: set[str]
    snapshot: Raw | None
    losses: Counter[str]


class _Attachment(Struct):
    type: str = ""


_attachment = msgspec.json.Decoder(_Attachment).decode


def converse(records: Sequence[Record], habits: Habits, resumed: Collection[str | None] = ()) -> Conversation:
    """The conversation of one agent's records.

    `resumed` has the uuids of the first records after the session was ended and taken up again.
    """
    try:
        return _Walk(records, habits, resumed).done()
    except _OutOfOrder:
        losses: Counter[str] = Counter()
        arranged = parents_first(records, losses)
        walk = _Walk(arranged, habits, resumed, arranged=True)
        walk.losses = losses
        return walk.done()


class _OutOfOrder(Exception):
    """A record stands before its parent."""


class _Walk:
    def __init__(
        self, records: Sequence[Record], habits: Habits, resumed: Collection[str | None], *, arranged: bool = False
    ) -> None:
        self.habits = habits
        self.resumed = resumed if habits.resumes_by_parent else ()
        self.arranged = arranged
        self.losses: Counter[str] = Counter()
        self.records = records
        self.nodes: list[TraceNode] = []
        self.place: dict[str | None, int] = {None: -1}  # behind which node the children of a record come
        self.answers: dict[str, Answer] = {}
        self.calls: dict[str, Answer] = {}  # by tool use id
        self.owner: dict[int, Answer] = {}  # of an answer's own node and those of its results
        self.reply: dict[str | None, Answer] = {}  # by what it replied to
        self.damage: dict[int, str] = {}
        self.anchors: dict[str, list[str]] = {}
        # How many nodes there were before each compaction, and the last on the way to it.
        self.boundaries: dict[str | None, tuple[int, int]] = {}
        self.snapshot: Raw | None = None
        self.error: Record | None = None  # the last that the CLI told of
        self.queued: list[Record] = []  # prompts that were sent, but it is not known yet where
        self.early: set[str | None] = set()
        self._prompt: str | None = None
        self._parents: set[str | None] | None = None
        self._known: dict[str, Record] | None = None
        self._later: dict[str | None, Record] | None = None

    def done(self) -> Conversation:
        place, early, anchors, resumed = self.place, self.early, self.anchors, self.resumed
        user, assistant, nodes = self.user, self.assistant, self.nodes
        calls, owner = self.calls, self.owner
        last = -1
        previous = None
        latest = ""
        answer: Answer | None = None
        for record in self.records:
            uuid = record.uuid
            if uuid in place:
                self.losses["repeated-uuid"] += uuid not in early
                continue
            parent = record.parentUuid
            at = last if parent == previous else place.get(parent)  # mostly the one before
            before = -1
            if at is None:
                if not self.arranged and parent in self.known():
                    raise _OutOfOrder
                # Its parent was not written, or cannot be read: what came before it is the best guess.
                at = last
                before = len(nodes)
                self.losses["missing-parent"] += 1
            if resumed and uuid in resumed:
                at = place[parent] = self.reloaded(parent, at)
            kind = record.type
            if kind == "assistant":
                body = record.message
                if body is None or (record.isApiErrorMessage and not self.habits.sends_errors):
                    self.losses["no-message"] += body is None
                    self.error = record
                else:
                    key = body.id
                    if key == latest and owner.get(at) is answer and answer is not None:
                        answer.lines.append(record)  # by far the most frequent case
                    else:
                        answer = assistant(record, body, at)
                        latest = key or ""
                    at = answer.node
                    content = body.content
                    if type(content) is list:
                        for block in content:
                            if type(block) is Block and block.type == "tool_use":
                                name = block.id
                                if name is not None and name not in calls:
                                    calls[name] = answer
                                    answer.open.append(name)
            elif kind == "user":
                at = user(record, at)
            elif kind != "progress":
                at = self.other(record, at)
            if before >= 0 and len(nodes) > before:
                self.damage.setdefault(before, "missing-parent")
            place[uuid] = last = at
            previous = uuid
            if anchors and uuid in anchors:
                place[uuid] = last = self.preserved(anchors.pop(uuid), at)
        return Conversation(
            nodes,
            list(self.answers.values()),
            spread(nodes, self.damage),
            self.active(),
            self.snapshot,
            +self.losses,
        )

    # --- records by kind, each returning behind which node its children come -------------------------------

    def user(self, record: Record, at: int) -> int:
        body = record.message
        if body is None:
            self.losses["no-message"] += 1
            return at
        if record.isCompactSummary:
            # Old versions write no boundary before it.
            at = at if record.parentUuid in self.boundaries else -1
        elif record.isVisibleInTranscriptOnly and not is_context(body.content):
            return at
        content = body.content
        if type(content) is list:
            owner = None
            repeated = False
            for block in content:
                if type(block) is Block and (name := block.tool_use_id) is not None:
                    owner = self.calls.get(name)
                    if owner is None:
                        self.losses["result-without-call"] += 1
                    elif name in owner.open:
                        owner.open.remove(name)
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
                self.owner[node] = owner
                return node
            if repeated:
                self.nodes.append(TraceNode(at, record))
                return len(self.nodes) - 1
        return self.add(record, at)

    def assistant(self, record: Record, body: Body, at: int) -> Answer:
        """The answer that a line belongs to."""
        key = body.id or record.requestId or record.uuid or ""
        answer = self.answers.get(key)
        if answer is not None and self.owner.get(at) is not answer and reused(answer, record):
            key = f"{key}#{record.uuid}"
            answer = None
        if answer is None:
            return self.answer(key, record, at)
        answer.lines.append(record)
        return answer

    def answer(self, key: str, record: Record, at: int) -> Answer:
        """A new answer, behind `at`."""
        above = self.owner.get(at)
        unlogged = False
        if above is not None:
            at = self.behind(above)
            error = self.error if self.error is not None and self.error.uuid == record.parentUuid else None
            if at == above.node and (said := continuation(above.lines[-1], error)) is not None:
                self.nodes.append(TraceNode(at, Record(type="user", message=Body(content=said))))
                at = len(self.nodes) - 1
                self.damage[at] = "continuation-not-logged"
            elif at == above.node and self.queued:
                at, unlogged = self.unqueued(at), True
            elif self.habits.doubles_first and self.nodes[above.node].parent == self.live():
                at = doubled(self.nodes, at, above)
        node = len(self.nodes)
        answer = Answer(key, [record], node, node, [], self.habits.hides_plans)
        self.nodes.append(TraceNode(at, answer))
        self.answers[key] = self.owner[node] = answer
        if above is not None and unlogged:
            # What was queued was sent once, and is not known of later.
            answer.tail = len(self.nodes)
            self.nodes.append(TraceNode(above.tail, answer))
            self.owner[answer.tail] = answer
        if above is not None and above.open:
            self.damage.setdefault(node, "missing-result")
        if record.parentUuid not in self.reply:
            self.reply[record.parentUuid] = answer
        return answer

    def other(self, record: Record, at: int) -> int:
        if record.type == "system":
            return self.system(record, at)
        if record.type == "attachment":
            return self.attachment(record, at)
        if record.type == UNREADABLE:
            return self.unreadable(record, at)
        if record.type == WAITED:
            self.queued.append(record)
            return at
        self.losses[f"unknown-type:{record.type[:40]}"] += 1
        return at

    def system(self, record: Record, at: int) -> int:
        if record.subtype == "compact_boundary":
            self.boundaries[record.uuid] = len(self.nodes), self.place.get(record.logicalParentUuid, -1)
            # The model is sent nothing of what was before, but for what is behind the anchor.
            try:
                anchor, uuids = preserved(record, self.known())
            except FAULTS:
                self.losses["odd-compaction"] += 1
            else:
                if anchor is not None:
                    self.anchors[anchor] = uuids
            return -1
        if record.subtype == "microcompact_boundary":
            try:
                return blanked(self.nodes, self.end(at), cleared(record))
            except FAULTS:
                self.losses["odd-compaction"] += 1
                return at
        reply = self.reply.get(record.parentUuid)
        if reply is not None and reply.lines[-1].uuid not in self.parents():
            # The link to the answer was lost: the conversation goes on from a system record beside it.
            at = reply.node
        return self.add(record, at) if record.subtype == _KEPT_SYSTEM else at

    def attachment(self, record: Record, at: int) -> int:
        try:
            kind = _attachment(record.attachment).type
        except FAULTS:
            self.losses["odd-attachment"] += 1
            return at
        if kind == "prompt_snapshot" and self.snapshot is None:
            self.snapshot = record.attachment
        return self.add(record, at) if kind == "queued_command" else at

    def unreadable(self, record: Record, at: int) -> int:
        owner = self.owner.get(at)
        node = len(self.nodes)
        self.nodes.append(TraceNode(owner.tail if owner else at, record))
        self.damage[node] = "unreadable-line"
        if owner is not None:
            owner.tail = node
            self.owner[node] = owner
        return node

    # --- the tree ------------------------------------------------------------------------------------------

    def add(self, record: Record, at: int) -> int:
        owner = self.owner.get(at)
        self.queued.clear()
        if owner is not None:
            at = self.behind(owner)
            if owner.open:
                # The program was killed at work: when it goes on, such calls are left out.
                self.damage.setdefault(len(self.nodes), "missing-result")
                at = answered(self.nodes, at, owner)
        self.nodes.append(TraceNode(at, record))
        return len(self.nodes) - 1

    def unqueued(self, at: int) -> int:
        """The prompts that were queued behind an answer, where another comes right behind it."""
        for record in self.queued:
            self.nodes.append(TraceNode(at, record))
            at = len(self.nodes) - 1
        self.queued.clear()
        return at

    def live(self) -> int | None:
        """The node of the one prompt of a run in print mode, None where there is none yet."""
        if self._prompt is None:
            self._prompt = only_prompt(self.records) or ""
        return self.place.get(self._prompt)

    def behind(self, answer: Answer) -> int:
        """What comes behind an answer comes behind its results too."""
        if answer.open:
            self.settle(answer)
        return answer.tail

    def end(self, at: int) -> int:
        """Behind which node the next message would come."""
        owner = self.owner.get(at)
        return owner.tail if owner is not None else at

    def settle(self, answer: Answer) -> None:
        """Give an answer the results that come only later in the file: they were sent before what followed."""
        if self._later is None:
            self._later = {record.parentUuid: record for record in self.records if record.type == "user"}
        for line in answer.lines:
            record = self._later.get(line.uuid)
            while record is not None and record.uuid not in self.place:
                if not set(result_ids(record)).intersection(answer.open):
                    break
                self.place[record.uuid] = self.user(record, answer.node)
                self.early.add(record.uuid)
                record = self._later.get(record.uuid)

    def preserved(self, uuids: Sequence[str], at: int) -> int:
        """Copy messages that a compaction kept behind the summary. Returns the last of them."""
        done: set[str] = set()
        copied: dict[str, int] = {}
        for uuid in uuids:
            record = self.known().get(uuid)
            body = record.message if record is not None else None
            if record is None or uuid not in self.place:
                self.losses["preserved-missing"] += 1
                continue
            if record.type == "assistant" and body is not None:
                answer = self.answers.get(body.id or record.requestId or uuid)
                if answer is not None and answer.key not in done:
                    done.add(answer.key)
                    self.nodes.append(TraceNode(at, answer))
                    at = len(self.nodes) - 1
            elif record.type == "user" and body is not None and not record.isVisibleInTranscriptOnly:
                self.nodes.append(TraceNode(at, record))
                at = len(self.nodes) - 1
            copied[uuid] = at
        self.place.update(copied)
        return at

    def reloaded(self, uuid: str | None, at: int) -> int:
        """The way to `at` as it is when only the records that a walk along `parentUuid` meets are read again."""
        met: set[int] = set()
        while uuid is not None and (record := self.known().get(uuid)) is not None and id(record) not in met:
            met.add(id(record))
            uuid = record.parentUuid
        return reloaded(self.nodes, self.end(at), met)

    # --- the end -------------------------------------------------------------------------------------------

    def active(self) -> set[str]:
        last = self.place.get(self.records[-1].uuid, -1) if self.records else -1
        bounds = [(count, self.end(at)) for count, at in self.boundaries.values()]
        return active(self.nodes, self.end(last), bounds)

    def parents(self) -> set[str | None]:
        if self._parents is None:
            self._parents = {record.parentUuid for record in self.records}
        return self._parents

    def known(self) -> dict[str, Record]:
        if self._known is None:
            self._known = {record.uuid: record for record in reversed(self.records) if record.uuid is not None}
        return self._known
