"""Rebuilds the conversation that the model was sent from a log's records, as a tree that has every turn once.

Each record names its parent (`parentUuid`), but following the parents does not give what was sent to the model:

- A response is logged in several records, one for each content block, all with one message id. It is one message.
- The results of parallel calls hang on different records of the response, so that a walk along the parents meets
  only some of them. All of them were sent, after the response.
- A compaction begins a new conversation with a summary, sometimes followed by messages that were preserved.
- Some links were never written, and some records precede their parents in the file.

So each record is appended to what the model had been sent when the record was written. The comments below explain
the rules; what only some versions of Claude Code do is in `versions.py`. The rules were found by comparing logs
with the requests that were really sent (`bench/fidelity.py`, `tests/data/claude_code_sent`).

Throughout, `tip` is the index of the node that the next node will follow, -1 for the beginning.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import cast

import msgspec
from msgspec import Raw

from understudy.ingest.claude_code import placement, tree
from understudy.ingest.claude_code.attachments import (
    HOOK_ORDER,
    NOT_LOGGED,
    SentAttachment,
    defers_plans,
    is_confirmed,
    reminder,
    sent_attachment,
)
from understudy.ingest.claude_code.continuity import RESUME_NOT_LOGGED, Continuity
from understudy.ingest.claude_code.links import leads_nowhere, path_by_logged_links, with_summaries_first
from understudy.ingest.claude_code.queued import QueuedPrompts
from understudy.ingest.claude_code.record_index import RecordIndex
from understudy.ingest.claude_code.records import (
    DECODE_ERRORS,
    QUEUED_PROMPT,
    UNREADABLE,
    ClaudeBlock,
    ClaudeMessage,
    ClaudeRecord,
    parents_first,
)
from understudy.ingest.claude_code.shortened import shortened_prompts
from understudy.ingest.claude_code.tree import ClaudeConversation, ClaudeResponse
from understudy.ingest.claude_code.versions import (
    NO_TOOL,
    NOT_RECORDED,
    VersionBehaviour,
    continuation,
    is_sent_hook_output,
)
from understudy.ingest.trace import TraceNode

_LOCAL_COMMAND = "local_command"
_RULES_OF_CALLS = {"ExitPlanMode": "hides_plans", "Task": "renames_starter"}
_RULES_OF_NOTIFICATIONS = ("notification", "wraps_notifications", "notifications_are_reminders")
_MENTION = re.compile(r"(?:^|\s)@(?:\"|[\w~./-]*[./])")
"""A mention of a file or directory in a prompt; its contents are sent with the prompt."""


def build_conversation(
    records: Sequence[ClaudeRecord],
    behaviour: VersionBehaviour,
    resumed: Collection[str | None] = (),
    *,
    logs_attachments: bool = False,
) -> ClaudeConversation:
    """Build the conversation of one agent's records.

    `resumed`: uuids of the first records after the session was ended and resumed. `logs_attachments`: records of
    the session are attachments, so its version logs what it sends besides messages.
    """
    records, links = with_summaries_first(records)
    try:
        return _Walk(records, behaviour, resumed, links, logs_attachments=logs_attachments).build()
    except _OutOfOrderError:
        # This is rare, so records are sorted only when it happens.
        losses: Counter[str] = Counter()
        arranged = parents_first(records, losses)
        walk = _Walk(arranged, behaviour, resumed, links, arranged=True, logs_attachments=logs_attachments)
        walk.losses = losses
        return walk.build()


class _OutOfOrderError(Exception):
    """A record precedes its parent in the file."""


class _Walk:
    """Visits the records once and appends each to the node that it followed when it was sent."""

    def __init__(
        self,
        records: Sequence[ClaudeRecord],
        behaviour: VersionBehaviour,
        resumed: Collection[str | None],
        links: dict[str | None, str | None],
        *,
        arranged: bool = False,
        logs_attachments: bool = False,
    ) -> None:
        models = (record.message.model for record in records if record.message is not None)
        model = next((model for model in models if model and model != "<synthetic>"), None)
        self.behaviour = behaviour = behaviour.for_model(model)
        self.records = records
        self.index = RecordIndex(records)
        self.logs_attachments = logs_attachments
        self.resumed = resumed
        self.links = links  # uuid → the logged parent, where what was sent before the record is not there
        self.arranged = arranged
        self.losses: Counter[str] = Counter()
        self.nodes: list[TraceNode] = []
        self.position: dict[str | None, int] = {None: -1}  # record uuid → the node that its children follow
        self.responses: dict[str, ClaudeResponse] = {}
        self.calls: dict[str, ClaudeResponse] = {}  # tool use id → the response that made the call
        self.response_at: dict[int, ClaudeResponse] = {}  # node of a response or a result → the response
        self.first_reply: dict[str | None, ClaudeResponse] = {}  # uuid of a response's parent → the response
        self.damage: dict[int, tuple[str, ...]] = {}  # node → notes on what is missing from there on
        self.preserved_behind: dict[str, list[str]] = {}  # uuid → uuids of the preserved messages that follow it
        # uuid of a compaction → the number of nodes before it, and the last node of the path before it
        self.boundaries: dict[str | None, tuple[int, int]] = {}
        self.snapshot: Raw | None = None
        self.last_error: ClaudeRecord | None = None  # the last error that the CLI reported
        self.queued = QueuedPrompts(records)
        self.queued_before: dict[str, list[str]] = {}  # response key → queued prompts sent just before it
        self.hurried_nodes: set[int] = set()  # messages that the user wrote before the last tool results arrived
        self.unlogged_nodes: set[int] = set()  # messages that the CLI sent only until the user's next prompt
        self.response_notes: dict[int, tuple[str, ...]] = {}  # notes on a response that later nodes do not inherit
        self.lacks_summary = False  # a compaction was seen, but its summary not yet
        self.hooked: set[str] = set()  # keys of responses with tool calls on which hooks ran
        self.hides_plans = behaviour.hides_plans
        self.unsure_calls = {name for name, rule in _RULES_OF_CALLS.items() if not behaviour.is_confirmed(rule)}
        self.is_unsure = not behaviour.is_confirmed(*VersionBehaviour.__struct_fields__[:-1])
        self.may_lose_results = behaviour.resumes_by_parent or not behaviour.is_confirmed("resumes_by_parent")
        self.continuity = Continuity()  # used for versions that may lose results on resume
        self.has_images = False  # a prompt with images is unanswered; once answered, this CLI sends it without
        self.bare_tails: dict[str, int] = {}  # key of a response → the node of its last result, before attachments
        self.moved_up: dict[str | None, None] = {}  # uuids of results placed before their turn, in order

    def build(self) -> ClaudeConversation:
        """Build the conversation from all records.

        This is the hot loop of ingestion, so the most frequent cases are handled inline, without a call.
        """
        position, moved_up = self.position, self.moved_up
        preserved_behind, resumed = self.preserved_behind, self.resumed
        user, assistant, nodes = self.place_user, self.place_assistant, self.nodes
        calls, response_at = self.calls, self.response_at
        last_tip = -1
        previous_uuid = None
        response_id = ""
        response: ClaudeResponse | None = None
        for record in self.records:
            uuid = record.uuid
            if uuid in position:
                self.losses["repeated-uuid"] += uuid not in moved_up
                continue
            parent = record.parentUuid
            tip = last_tip if parent == previous_uuid else position.get(parent)  # usually the record just before
            damaged_from = -1
            if tip is None:
                if not self.arranged and parent in self.index.by_uuid:
                    raise _OutOfOrderError
                # The parent was never written or is unreadable: assume that it was the record before this one.
                tip = last_tip
                damaged_from = len(nodes)
                self.losses["missing-parent"] += 1
                if uuid in resumed and leads_nowhere(record, self.index.by_uuid.get(previous_uuid or "")):
                    self.links[uuid] = None
            if resumed and uuid in resumed:
                tip = self.resumed_path(parent, tip)
                if damaged_from < 0:
                    position[parent] = tip
            kind = record.type
            if kind == "assistant":
                body = record.message
                # The CLI's own messages about API errors are displayed as the assistant's, but not sent.
                if body is None or (record.isApiErrorMessage and not self.behaviour.sends_errors):
                    self.losses["no-message"] += body is None
                    self.last_error = record
                    if tip >= 0:
                        self.mark_unless_confirmed(self.end(tip), "sends_errors")
                else:
                    key = body.id
                    if key == response_id and response_at.get(tip) is response and response is not None:
                        response.records.append(record)  # most frequent: another block of the same response
                    else:
                        response = assistant(record, body, tip)
                        response_id = key or ""
                    tip = response.node
                    content = body.content
                    if type(content) is list:
                        for block in content:
                            if type(block) is ClaudeBlock and block.type == "tool_use":
                                call_id = block.id
                                if call_id is not None and call_id not in calls:
                                    calls[call_id] = response
                                    response.pending.append(call_id)
                                    if block.name in self.unsure_calls:
                                        self.mark(response.tail, NOT_RECORDED)
                            elif type(block) is ClaudeBlock and block.type not in tree.KNOWN_BLOCKS:
                                self.mark(response.tail, "unknown_block")
            elif kind == "user":
                tip = user(record, tip)
            elif kind != "progress":
                tip = self.place_other(record, tip)
            elif bytes(record.data) and record.is_tool_hook() and tip in response_at:
                self.hooked.add(response_at[tip].key)
            if damaged_from >= 0 and len(nodes) > damaged_from:
                self.mark(damaged_from, "missing-parent")
            position[uuid] = last_tip = tip
            previous_uuid = uuid
            if preserved_behind and uuid in preserved_behind:
                position[uuid] = last_tip = self.add_preserved(preserved_behind.pop(uuid), tip)
        for node, note in shortened_prompts(nodes, self.responses.values(), self.behaviour).items():
            self.mark(node, note)
        last_tip = position.get(self.records[-1].uuid, -1) if self.records else -1
        compacted = [(count, self.end(tip)) for count, tip in self.boundaries.values()]
        return ClaudeConversation(
            nodes,
            list(self.responses.values()),
            tree.inherited_notes(nodes, self.damage) | self.response_notes,
            tree.active_responses(nodes, self.end(last_tip), compacted),
            self.snapshot,
            +self.losses,
        )

    # --- one method per kind of record; each returns the node that the record's children follow ---------------

    def place_user(self, record: ClaudeRecord, tip: int) -> int:
        """Place a prompt, a summary, or tool results. Returns the node that the record's children follow."""
        body = record.message
        if body is None:
            self.losses["no-message"] += 1
            return tip
        if record.isCompactSummary:
            self.lacks_summary = False
            # A summary begins a new conversation, unless a boundary that newer versions log first has begun it.
            ancestor = self.index.by_uuid.get(record.parentUuid or "")
            while ancestor is not None and ancestor.type == "attachment":  # sent before the summary
                ancestor = self.index.by_uuid.get(ancestor.parentUuid or "")
            tip = tip if ancestor is not None and ancestor.uuid in self.boundaries else -1
        elif record.isVisibleInTranscriptOnly and not is_sent_hook_output(body.content):
            return tip
        content = body.content
        if type(content) is list:
            response = None
            repeated = False
            for block in content:
                if type(block) is ClaudeBlock and (call_id := block.tool_use_id) is not None:
                    response = self.calls.get(call_id)
                    if response is None:
                        self.losses["result-without-call"] += 1
                    elif call_id in response.pending:
                        response.pending.remove(call_id)
                        if block.is_error and NO_TOOL in bytes(block.content)[:80]:
                            response.hides_plans = False  # the input of an unknown tool is sent back unchanged
                    else:
                        repeated = True
            if response is not None and not repeated:
                # Whichever record of the response a result hangs on, it was sent after the response and its
                # earlier results.
                nodes = self.nodes
                node = len(nodes)
                nodes.append(TraceNode(response.tail, record))
                response.tail = node
                self.response_at[node] = response
                if self.bare_tails:
                    self.bare_tails.pop(response.key, None)
                if self.may_lose_results:
                    self.continuity.add_result(record)
                return node
            if repeated:
                # A second result for the same call, for example after a rewind, belongs where its parent is.
                return placement.add_bodies(self.nodes, [record], tip)
        is_notification = isinstance(content, str) and content.startswith("<task-notification>")
        wrapped = is_notification and self.behaviour.wraps_notifications
        if wrapped:
            prompt = f"{self.behaviour.notification}{content}"
            prompt = reminder(prompt) if self.behaviour.notifications_are_reminders else prompt
            record = msgspec.structs.replace(record, message=ClaudeMessage(content=prompt))
        node = self.add_message(record, tip)
        if is_notification:
            self.mark_unless_confirmed(node, *_RULES_OF_NOTIFICATIONS)
        if self.may_lose_results:
            self.continuity.add_prompt(record, self.index.by_uuid, self.calls)
        if record.isCompactSummary and self.calls and not self.logs_attachments:
            self.mark(node, NOT_LOGGED)  # files that were read before are sent again together with the summary
        if type(content) is list:
            if tree.has_unknown_block(content):
                self.mark(node, "unknown_block")
        elif content and not self.logs_attachments and "@" in content and _MENTION.search(cast(str, content)):
            self.mark(node, "mention_not_logged")
        elif is_notification and not wrapped and self.logs_attachments:
            self.mark(node, NOT_LOGGED)  # the text around a notification exists only in the CLI program
        return node

    def place_assistant(self, record: ClaudeRecord, body: ClaudeMessage, tip: int) -> ClaudeResponse:
        """Add a record to the response with its message id, or to a new one (ids are used again); return it."""
        key = body.id or record.requestId or record.uuid or ""
        response = self.responses.get(key)
        if (
            response is not None
            and self.response_at.get(tip) is not response
            and tree.is_reused_id(response, record)
        ):
            key = f"{key}#{record.uuid}"
            response = None
        if response is None:
            return self.add_response(key, record, tip)
        response.records.append(record)
        return response

    def add_response(self, key: str, record: ClaudeRecord, tip: int) -> ClaudeResponse:
        """Add a new response after `tip`.

        If `tip` belongs to a response without results, the log lacks what made the model continue: a prompt to go
        on after the output limit, or a queued prompt that is sent a second time.
        """
        preceding = self.response_at.get(tip)
        if preceding is not None:
            tip = self.end_of_response(preceding)
            error = self.last_error
            error = error if error is not None and error.uuid == record.parentUuid else None
            if tip == preceding.node and (prompt := continuation(preceding.records[-1], error)) is not None:
                tip = self.add_unlogged(prompt, tip)
                self.mark(tip, "continuation-not-logged")
            elif tip == preceding.node and self.behaviour.resends_queued and preceding.key in self.queued_before:
                for prompt in self.queued_before[preceding.key]:
                    tip = self.add_unlogged(prompt, tip)
                self.mark_unless_confirmed(tip, "resends_queued")
            elif self.behaviour.doubles_first and self.nodes[preceding.node].parent == self.position.get(
                self.index.prompt_uuid
            ):
                tip = tree.repeat_response(self.nodes, tip, preceding)
                self.mark_unless_confirmed(tip, "doubles_first")
        if self.queued.waiting and (prompts := self.queued.take_sent_before(record)):
            tip = self.position[record.parentUuid] = self.add_queued_prompts(prompts, tip)
            self.queued_before[key] = prompts
        node = len(self.nodes)
        renames = self.behaviour.renames_starter
        response = ClaudeResponse(key, [record], node, node, [], self.hides_plans, renames)
        self.nodes.append(TraceNode(tip, response))
        self.responses[key] = self.response_at[node] = response
        if self.has_images:
            # The prompt is answered now, so whatever follows is sent without its images.
            response.tail = tree.path_without_images(self.nodes, node)
            self.response_at[response.tail] = response
            self.has_images = False
        if preceding is not None and preceding.pending:
            self.mark(node, "missing-result")
        if self.lacks_summary:
            self.mark(node, NOT_LOGGED)
        if self.may_lose_results and self.continuity.is_doubtful(self.nodes, node):
            self.mark(node, RESUME_NOT_LOGGED)
        if preceding is None and tip >= 0 and tree.is_older_than_summary(record, self.nodes[tip].body):
            self.response_notes[node] = ("preserved_without_context",)
        if tip in self.hurried_nodes:
            self.response_notes[node] = ("prompt_between_results",)  # perhaps sent without those results
        if record.parentUuid not in self.first_reply:
            self.first_reply[record.parentUuid] = response
        if record.isSidechain and preceding is not None and self.logs_attachments:
            self.mark(node, NOT_LOGGED)  # the logs of subagents lack what is sent to them along with tool results
        return response

    def place_other(self, record: ClaudeRecord, tip: int) -> int:
        if record.type == "system":
            return self.place_system(record, tip)
        if record.type == "attachment":
            return self.place_attachment(record, tip)
        if record.type == UNREADABLE:
            return self.place_unreadable(record, tip)
        if record.type == QUEUED_PROMPT:
            self.queued.add(record)
            return tip
        self.losses[f"unknown-type:{record.type[:40]}"] += 1
        return tip

    def place_system(self, record: ClaudeRecord, tip: int) -> int:
        if record.subtype == "compact_boundary":
            self.lacks_summary = True
            self.boundaries[record.uuid] = len(self.nodes), self.position.get(record.logicalParentUuid, -1)
            # Of earlier messages only preserved ones are still sent, copied after the record that they follow.
            try:
                anchor, uuids = tree.preserved_messages(record, self.index.by_uuid)
            except DECODE_ERRORS:
                self.losses["odd-compaction"] += 1
            else:
                if anchor is not None:
                    self.preserved_behind[anchor] = uuids
            return -1
        if record.subtype == "microcompact_boundary":
            # From here on, old tool results are sent as a placeholder.
            try:
                return tree.path_with_cleared_results(self.nodes, self.end(tip), tree.cleared_tool_calls(record))
            except DECODE_ERRORS:
                self.losses["odd-compaction"] += 1
                return tip
        response = self.first_reply.get(record.parentUuid)
        if response is not None and response.records[-1].uuid not in self.index.parents:
            # No record follows the response: the conversation continues from a system record with its parent.
            tip = response.node
        is_sent = record.subtype == _LOCAL_COMMAND and self.behaviour.sends_local_commands
        return self.add_message(record, tip) if is_sent else tip

    def place_attachment(self, record: ClaudeRecord, tip: int) -> int:
        head = bytes(record.attachment)[:80]
        if self.snapshot is None and b'"prompt_snapshot"' in head:
            self.snapshot = record.attachment
        if b'"deferred_tools_delta"' in head and defers_plans(record.attachment):
            self.hides_plans = False  # the call of ExitPlanMode, which is not offered then, is sent back as it was
        sent = sent_attachment(record.attachment, record.rendered, self.behaviour)
        if not sent.parts and sent.note is None:
            return tip
        tip_before = tip = self.end(tip)
        if (response := self.response_at.get(tip)) is not None:
            self.bare_tails.setdefault(response.key, tip)
        if not sent.is_queued or self.behaviour.wraps_notifications or not placement.is_added(self.nodes, tip):
            tip = self.add_parts(sent, tip) if sent.parts else tip
        else:
            # These versions send the prompt before the output of tool hooks, although they log it after that.
            hooked, tip_above = placement.added_after_tools(self.nodes, tip)
            tip = placement.add_bodies(self.nodes, hooked, self.add_parts(sent, tip_above))
            if (response := self.response_at.get(tip_before)) is not None:
                response.tail = tip
                self.response_at[tip] = response
            self.mark(tip, HOOK_ORDER)
        if sent.note is not None:
            self.mark(tip, sent.note)
        elif self.is_unsure and not is_confirmed(record.attachment, record.rendered, self.behaviour):
            self.mark(tip, NOT_RECORDED)
        return tip

    def place_unreadable(self, record: ClaudeRecord, tip: int) -> int:
        """Add an empty node for an unreadable line, so that everything after it is marked as damaged."""
        response = self.response_at.get(tip)
        node = len(self.nodes)
        self.nodes.append(TraceNode(response.tail if response else tip, record))
        self.mark(node, "unreadable-line")
        if response is not None:
            response.tail = node
            self.response_at[node] = response
        return node

    # --- the tree ------------------------------------------------------------------------------------------

    def add_message(self, record: ClaudeRecord, tip: int) -> int:
        """Add a user message after `tip`; if `tip` belongs to a response, after the results of that response."""
        response = self.response_at.get(tip)
        lacks_results = False
        late_uuids: Sequence[str | None] = ()
        if self.queued.waiting:
            prompts = self.queued.take_sent_before(record)
            tip = self.add_queued_prompts(prompts, self.end(tip)) if tip >= 0 and prompts else tip
        if response is not None:
            if response.pending:
                moved_count = len(self.moved_up)
                self.collect_late_results(response)
                late_uuids = [*islice(reversed(self.moved_up), len(self.moved_up) - moved_count)]
            tip = response.tail
            if self.bare_tails and response.key in self.bare_tails:
                parent = self.index.by_uuid.get(record.parentUuid or "")
                if tree.is_new_branch(self.nodes, response, self.responses.values(), parent):
                    tip = self.bare_tails[response.key]  # the attachments belong to another branch
            lacks_results = bool(response.pending)
            if lacks_results:
                # The program was killed while tools ran. A session that continues afterwards sends no calls
                # without results.
                tip = tree.path_without_pending_calls(self.nodes, tip, response)
        if self.unlogged_nodes and record.type == "user":
            tip = tree.path_without(self.nodes, tip, self.unlogged_nodes)
        # system messages are sent after everything that the user wrote
        reminders, tip = placement.system_messages_before(self.nodes, tip)
        node = len(self.nodes)
        self.nodes.append(TraceNode(tip, record))
        if tree.has_image(record):
            self.has_images = self.behaviour.forgets_images
            self.mark_unless_confirmed(node, "forgets_images")
        if late_uuids:
            # The log continues after those results, but what follows was sent with this message, which the user
            # wrote before the results arrived.
            self.position.update(dict.fromkeys(late_uuids, node))
            self.hurried_nodes.add(node)
        elif tip in self.hurried_nodes:
            self.hurried_nodes.add(node)
        if lacks_results:
            self.mark(node, "missing-result")
        return placement.add_bodies(self.nodes, reminders, node) if reminders else node

    def add_queued_prompts(self, prompts: Sequence[str], tip: int) -> int:
        """Add queued prompts after `tip`, inside the last tool result if there is one. Returns the last node."""
        response = self.response_at.get(tip)
        tip = self.add_parts(SentAttachment([prompt.join(self.behaviour.queued) for prompt in prompts]), tip)
        if response is not None and response.key in self.hooked:
            self.mark(tip, HOOK_ORDER)
        self.mark_unless_confirmed(tip, "queued", "has_system_messages")
        return tip

    def add_parts(self, sent: SentAttachment, tip: int) -> int:
        """Add content that was sent besides messages. Returns the last node."""
        response = self.response_at.get(tip)
        tip = placement.add_parts(self.nodes, self.damage, tip, sent, self.behaviour)
        if response is not None:
            response.tail = tip
            self.response_at[tip] = response
        return tip

    def mark(self, node: int, note: str) -> None:
        """Add a note on what is missing from this node on."""
        if note not in (notes := self.damage.get(node, ())):
            self.damage[node] = (*notes, note)

    def mark_unless_confirmed(self, node: int, *rules: str) -> None:
        """Add a note if this version applies a rule that recordings do not confirm."""
        if not self.behaviour.is_confirmed(*rules):
            self.mark(node, NOT_RECORDED)

    def add_unlogged(self, prompt: str, tip: int) -> int:
        """Add a user message that the log lacks. Returns its node.

        The CLI keeps such a message while it works on a prompt, but drops it when the next prompt continues the
        conversation.
        """
        self.unlogged_nodes.add(len(self.nodes))
        record = ClaudeRecord(type="user", message=ClaudeMessage(content=prompt))
        return placement.add_bodies(self.nodes, [record], tip)

    def end_of_response(self, response: ClaudeResponse) -> int:
        """Return the last node of a response and its results, including results that come later in the file."""
        if response.pending:
            self.collect_late_results(response)
        return response.tail

    def end(self, tip: int) -> int:
        """Return the node that the next message would follow."""
        response = self.response_at.get(tip)
        return response.tail if response is not None else tip

    def collect_late_results(self, response: ClaudeResponse) -> None:
        """Place results that come later in the file now, since they were sent before what follows the response."""
        for response_record in response.records:
            record = self.index.users_by_parent.get(response_record.uuid)
            while record is not None and record.uuid not in self.position:
                if not set(tree.result_ids(record)).intersection(response.pending):
                    break
                self.position[record.uuid] = self.place_user(record, response.node)
                self.moved_up[record.uuid] = None
                record = self.index.users_by_parent.get(record.uuid)

    def add_preserved(self, uuids: Sequence[str], tip: int) -> int:
        """Copy the messages that a compaction preserved to after `tip`. Returns the last node."""
        copied_keys: set[str] = set()
        position_of_copy: dict[str, int] = {}
        for uuid in uuids:
            record = self.index.by_uuid.get(uuid)
            body = record.message if record is not None else None
            if record is None or uuid not in self.position:
                self.losses["preserved-missing"] += 1
                continue
            if record.type == "assistant" and body is not None:
                response = self.responses.get(body.id or record.requestId or uuid)
                if response is not None and response.key not in copied_keys:
                    copied_keys.add(response.key)
                    self.nodes.append(TraceNode(tip, response))
                    tip = len(self.nodes) - 1
            elif record.type == "user" and body is not None and not record.isVisibleInTranscriptOnly:
                reminders, tip = placement.system_messages_before(self.nodes, tip)
                tip = placement.add_bodies(self.nodes, [record, *reminders], tip)
            elif record.type == "attachment":
                tip = self.place_attachment(record, tip)
            position_of_copy[uuid] = tip
        self.position.update(position_of_copy)
        return tip

    def resumed_path(self, uuid: str | None, tip: int) -> int:
        """Return the path to `tip` as a resumed session rebuilds it, without anything that was not logged.

        Some versions follow `parentUuid` only, and lose parallel calls whose results hang on other records.
        """
        ends = {child: self.end(self.position.get(parent, -1)) for child, parent in self.links.items()}
        end = path_by_logged_links(self.nodes, self.end(tip), ends) if ends else self.end(tip)
        if end != self.end(tip):
            self.mark(end, RESUME_NOT_LOGGED)  # of a large log, the program reads only what follows the boundary
        if self.logs_attachments and not self.behaviour.resumes_by_parent:
            return tip if end == self.end(tip) else end  # the log holds everything else
        self.continuity.resume()
        end = tree.path_without(self.nodes, end, self.unlogged_nodes, added=not self.logs_attachments)
        if not self.behaviour.resumes_by_parent:
            return tip if end == self.end(tip) else end
        return tree.path_after_resume(self.nodes, end, self.index.ids_above(uuid))
