"""The tree of an attempt's calls: each call's parent and branch, and which calls were superseded by a retry.

A call follows the earlier call of the same agent whose messages and own answer are the beginning of its
messages. Claude Code rewrites an assistant's turn when it sends it back (defaults filled in, keys reordered,
blank text dropped), so an assistant's tool calls are compared by id, its text without outer white space, and
its thinking not at all; all else must be equal, but for `cache_control`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Literal

from msgspec.structs import replace

from understudy.trajectory.roles import CONTINUED, QUOTED, Role, assign, continues_parent
from understudy.types import Call
from understudy.wire.arguments import comparable_arguments
from understudy.wire.decoding import canonical
from understudy.wire.model import Block, Conversation, Message, ToolCall
from understudy.wire.stored import read_request, read_response, sampled_calls, shown_messages

Origin = Literal["first call", "retry", "sibling", "compaction", "tools or system changed", "history rewritten"]
"""Why a call has no parent. "sibling": another sample of a request that was made several times at once."""

_MAX_UNSHORTENED_CALLS = 32
"""How many lines of calls, the most recently continued ones, are compared with the next call block by block."""

_SUMMARY_BLOCKS = 4
"""How many of the first blocks are searched for the summary from which a conversation continues."""

MAIN = "main"
"""The branch of the session itself. A subagent's branch is named after the agent's id."""


@dataclass(slots=True, eq=False)
class Node:
    """A call in its tree. A root has an `origin`, any other node a `parent`.

    `children` are in the order of their calls; `heir` is the one child that continues this node's branch.
    `inherited_blocks` is the number of blocks of the conversation that come from the parent and its answer.
    `superseded`: the same request was made again later, and nothing followed this one. `alternative`: the same
    request was made several times at once, and the conversation did not continue from this sample (if it continued
    from none: this is not the first). `role` is what the call was for, see `roles`. `verbatim`: the parent's
    answer was sent back exactly as it was. On the first call of a subagent or a helper, `spawned_by` is the call
    whose tool call started it. On the first call after a compaction, `continues` is the call that made the
    summary.
    """

    call: Call
    conversation: Conversation
    answer: tuple[Block, ...] | None
    origin: Origin | None = None
    parent: Node | None = None
    children: list[Node] = field(default_factory=list["Node"])
    heir: Node | None = None
    role: Role = "main"
    branch: str = ""
    inherited_blocks: int = 0
    superseded: bool = False
    alternative: bool = False
    verbatim: bool = True
    spawned_by: Node | None = None
    continues: Node | None = None
    sampled: Mapping[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    """The tool calls of the attempt's responses as the model wrote them, by id."""

    @property
    def messages(self) -> list[Message]:
        """The chat messages that the model was shown."""
        return shown_messages(self.conversation, self.sampled)

    def shorten(self) -> None:
        """Release the blocks that the parent has too, except the assistant's last one and what follows it.

        Roles and branches depend only on what is left; `messages` are incomplete after this, and the tools are
        gone.
        """
        blocks = self.conversation.blocks
        assistant_indexes = (
            index for index in range(self.inherited_blocks - 1, -1, -1) if blocks[index].role == "assistant"
        )
        start = next(assistant_indexes, 0)
        self.conversation = replace(self.conversation, blocks=blocks[start:], tools=[], tools_json=None)
        self.inherited_blocks -= start


@dataclass(frozen=True, slots=True)
class Trajectory:
    """All calls of one attempt as a tree. `nodes` are in the order of the calls."""

    nodes: tuple[Node, ...]

    @property
    def branches(self) -> dict[str, list[Node]]:
        """The nodes of each branch. Branches are in the order of their first calls."""
        branches: dict[str, list[Node]] = {}
        for node in self.nodes:
            branches.setdefault(node.branch, []).append(node)
        return branches


def build(calls: Iterable[Call]) -> Trajectory:
    """Return the tree of the calls of one attempt, given in any order; a call given twice counts once."""
    builder = TreeBuilder()
    for call in sorted({call.id: call for call in calls}.values(), key=_order):
        builder.add(call, read_request(call))
    return builder.trajectory()


class TreeBuilder:
    """Builds the tree of an attempt's calls, which are added in their order."""

    def __init__(self) -> None:
        self._sampled: dict[str, ToolCall] = {}
        self._answered: _AnsweredCalls = defaultdict(list)
        self._lines: dict[tuple[str | None, str | None], _AgentCalls] = defaultdict(_AgentCalls)
        self._entries: list[_Entry] = []
        self._unshortened: dict[tuple[str | None, str | None], _Entry] = {}

    def add(self, call: Call, conversation: Conversation) -> Node:
        """Add the next call, with the conversation that it sent. Returns its node.

        If the first blocks of several conversations are the same objects, they are compared only once.
        """
        name = (call.session_id, call.agent_id)
        line = self._lines[name]
        entry = _Entry.read(call, conversation, self._sampled, self._unshortened.pop(name, None))
        if not _attach(entry, self._answered):
            entry.origin = line.origin_of(entry)
            if line.last_entry is None or entry.origin == "tools or system changed":
                entry.spawned_by = _spawner(entry.node, self._entries)
        self._entries.append(entry)
        line.add(entry)
        self._unshortened[name] = entry
        if len(self._unshortened) > _MAX_UNSHORTENED_CALLS:
            self._unshortened.pop(next(iter(self._unshortened))).shorten()
        if entry.end:
            self._answered[call.agent_id, entry.end.loose].append(entry)
        return entry.node

    def trajectory(self) -> Trajectory:
        """Return the tree of the calls so far. It shares its nodes with earlier trees of this builder, which
        change too.
        """
        for entry in self._entries:
            node = entry.node
            node.origin, node.spawned_by, node.continues, node.branch = entry.origin, entry.spawned_by, None, ""
            node.alternative = False
        _mark_repeated(self._entries)
        nodes = tuple(entry.node for entry in self._entries)
        assign(nodes)
        _link_heads(nodes)
        _name_branches(nodes)
        return Trajectory(nodes)


def _order(call: Call) -> tuple[int, float, str]:
    return (call.sequence, call.started_at, call.id)


# --- fingerprints of conversations ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Fingerprint:
    """Digests of a conversation up to a block: `loose` ignores what the CLI rewrites, `strict` ignores nothing."""

    loose: bytes = b""
    strict: bytes = b""

    def with_block(self, block: Block) -> _Fingerprint:
        strict = _digest(self.strict, _strict_part(block))
        loose = _loose_part(block)
        return _Fingerprint(self.loose if loose is None else _digest(self.loose, loose), strict)


@dataclass(slots=True, eq=False)
class _Entry:
    """A node with its `fingerprints` after each of its `blocks`; `end` is the one after its answer."""

    node: Node
    blocks: tuple[Block, ...]
    fingerprints: list[_Fingerprint]
    end: _Fingerprint | None
    origin: Origin | None = None
    spawned_by: Node | None = None

    @classmethod
    def read(
        cls, call: Call, conversation: Conversation, sampled: dict[str, ToolCall], previous: _Entry | None
    ) -> _Entry:
        """Read a call, and add its tool calls to `sampled`.

        Fingerprints of blocks that it shares with the agent's `previous` call are taken from there, and that call
        is shortened.
        """
        answer = read_response(call)
        sampled |= sampled_calls(answer)
        shared = 0 if previous is None else _shared_count(previous.blocks, conversation.blocks)
        fingerprints = [] if previous is None else previous.fingerprints[:shared]
        if previous is not None:
            previous.shorten()
        fingerprints += _fingerprints_after(
            fingerprints[-1] if fingerprints else _EMPTY_FINGERPRINT, conversation.blocks[shared:]
        )
        last_fingerprint = fingerprints[-1] if fingerprints else None
        end = (
            _fingerprints_after(last_fingerprint, answer)[-1]
            if last_fingerprint and answer
            else last_fingerprint
            if answer is not None
            else None
        )
        return cls(Node(call, conversation, answer, sampled=sampled), conversation.blocks, fingerprints, end)

    def shorten(self) -> None:
        """Keep only the last fingerprint. Enough for calls that are not compared further, of which only the
        request is needed.
        """
        self.blocks, self.fingerprints = (), self.fingerprints[-1:]

    @property
    def request_key(self) -> tuple[object, ...]:
        """Return a key that is equal for two calls with the same request."""
        call = self.node.call
        request_fingerprint = self.fingerprints[-1].strict if self.fingerprints else b""
        return (call.session_id, call.agent_id, self.node.conversation.prompt_digest, request_fingerprint)


_AnsweredCalls = defaultdict[tuple[str | None, bytes], list[_Entry]]
"""Calls by agent and by the loose digest of their messages and answer."""


_EMPTY_FINGERPRINT = _Fingerprint()


def _fingerprints_after(fingerprint: _Fingerprint, blocks: Sequence[Block]) -> list[_Fingerprint]:
    """Return the fingerprints after each of the blocks."""
    fingerprints: list[_Fingerprint] = []
    for block in blocks:
        fingerprint = fingerprint.with_block(block)
        fingerprints.append(fingerprint)
    return fingerprints


def _shared_count(blocks: Sequence[Block], other_blocks: Sequence[Block]) -> int:
    """Return how many of the first blocks are the same objects in both. If a block is, all before it are, too."""
    return bisect_left(
        range(min(len(blocks), len(other_blocks))),
        True,
        key=lambda index: blocks[index] is not other_blocks[index],
    )


def _digest(previous: bytes, part: bytes) -> bytes:
    return blake2b(previous + part, digest_size=16).digest()


def _strict_part(block: Block) -> bytes:
    arguments = comparable_arguments(block.arguments) if block.kind == "tool_use" else ""
    fields = (block.role, block.kind, block.text, block.id, block.name, arguments, block.is_error)
    return canonical((*fields, block.fingerprint))


def _loose_part(block: Block) -> bytes | None:
    """Return the part of a block that an agent must send back unchanged; None if there is no such part."""
    if block.role != "assistant":
        return _strict_part(block)
    if block.kind == "tool_use":
        return canonical(("call", block.id))
    text = block.text.strip() if block.kind == "text" else ""
    return canonical(("said", text)) if text else None


# --- parents -------------------------------------------------------------------------------------------


def _attach(entry: _Entry, answered: _AnsweredCalls) -> bool:
    """Attach `entry` to its parent, if it has one: the longest match, then the same session, then the latest."""
    call, blocks = entry.node.call, entry.node.conversation.blocks
    for position in range(len(blocks) - 2, -1, -1):
        fingerprint = entry.fingerprints[position]
        candidates = answered.get((call.agent_id, fingerprint.loose))
        if candidates is None or blocks[position + 1].role == "assistant":
            continue
        parent = max(
            candidates,
            key=lambda candidate: (
                candidate.node.call.session_id == call.session_id,
                candidate.end == fingerprint,
                _order(candidate.node.call),
            ),
        )
        entry.node.parent = parent.node
        entry.node.inherited_blocks = position + 1
        entry.node.verbatim = parent.end == fingerprint
        parent.node.children.append(entry.node)
        return True
    return False


class _AgentCalls:
    """The calls of one agent in one session so far."""

    def __init__(self) -> None:
        self.last_entry: _Entry | None = None
        self._requests: set[tuple[object, ...]] = set()
        self._prompt_digests: set[bytes] = set()

    def add(self, entry: _Entry) -> None:
        self.last_entry = entry
        self._requests.add(entry.request_key)
        self._prompt_digests.add(entry.node.conversation.prompt_digest)

    def origin_of(self, entry: _Entry) -> Origin:
        """Return why a call continues none of those before it."""
        if self.last_entry is None:
            return "first call"
        if entry.request_key in self._requests:
            return "retry"
        conversation = entry.node.conversation
        if any(
            block.role == "user" and block.kind == "text" and CONTINUED.match(block.text)
            for block in conversation.blocks
        ):
            return "compaction"
        if conversation.prompt_digest not in self._prompt_digests:
            return "tools or system changed"
        if all(block.role != "assistant" for block in conversation.blocks):
            return "first call"  # of another conversation: there is no history that could have been rewritten
        return "history rewritten"


def _spawner(node: Node, earlier: list[_Entry]) -> Node | None:
    """Return the latest call with a tool call whose prompt `node` begins with; None if there is none.

    Claude Code's tools have the prompt in `prompt`, Codex's `spawn_agent` in `message`.
    """
    prompts = {block.text for block in node.conversation.blocks if block.kind == "text"}
    for entry in reversed(earlier):
        if any(
            block.kind == "tool_use" and not prompts.isdisjoint(_prompts(block.inputs()))
            for block in entry.node.answer or ()
        ):
            return entry.node
    return None


def _prompts(inputs: dict[str, Any]) -> list[str]:
    """Return what a tool call's arguments would tell a subagent to do."""
    texts = (inputs.get(name) for name in ("prompt", "message"))
    return [text for text in texts if isinstance(text, str) and text]


def _link_heads(nodes: Sequence[Node]) -> None:
    """Link first calls of branches to earlier calls: after a compaction to the summary, helpers to a tool call."""
    summaries: dict[tuple[str | None, str | None], Node] = {}
    earlier: list[Node] = []
    for node in nodes:
        agent = (node.call.session_id, node.call.agent_id)
        if node.role == "compaction" and node.answer is not None:
            summaries[agent] = node
        elif node.role == "auxiliary" and node.parent is None:
            node.spawned_by = next(
                (candidate for candidate in reversed(earlier) if _asks_for(candidate, node)), None
            )
        elif (
            node.origin not in (None, "retry", "sibling")
            and (summary := summaries.get(agent)) is not None
            and _may_continue(node, summary)
        ):
            node.origin, node.continues = "compaction", summaries.pop(agent)
        elif _forks_off(node) and (summary := summaries.get(agent)) is not None and _quotes(node, summary):
            node.continues = summaries.pop(agent)
        earlier.append(node)


def _forks_off(node: Node) -> bool:
    """Return whether a call goes on with the work from a call that another one went on from before."""
    return node.parent is not None and node.parent.children[0] is not node and continues_parent(node)


def _may_continue(node: Node, summary: Node) -> bool:
    """Return whether a root may continue from a summary. Without a session, it may also be another chat of the
    same key.
    """
    return node.call.session_id is not None or node.origin == "compaction" or _quotes(node, summary)


def _quotes(node: Node, summary: Node) -> bool:
    """Return whether a conversation begins with the text of a summary, or what it adds to another one does.

    OpenHands keeps the first of its events, and puts the summary in the place of those that it forgets.
    """
    text = "".join(block.text for block in summary.answer or () if block.kind == "text").strip()
    beginning = node.conversation.blocks[node.inherited_blocks :][:_SUMMARY_BLOCKS]
    return len(text) >= QUOTED and any(block.kind == "text" and text in block.text for block in beginning)


def _asks_for(node: Node, helper: Node) -> bool:
    """Return whether the question of `helper` contains the arguments of a tool call of `node`."""
    shortest = QUOTED if helper.call.session_id is None else 3
    if (node.call.session_id, node.call.agent_id) != (helper.call.session_id, helper.call.agent_id):
        return False
    question = "\n".join(block.text for block in helper.conversation.blocks)
    return any(
        isinstance(value, str) and len(value) >= shortest and value in question
        for block in node.answer or ()
        if block.kind == "tool_use"
        for value in block.inputs().values()
    )


# --- retries and branches ------------------------------------------------------------------------------


def _mark_repeated(entries: list[_Entry]) -> None:
    """Mark calls that made the same request: samples that an agent requested at once as alternatives, earlier
    tries as superseded.

    The store does not say which request was a retry. But the gateway answers a retry with the call in flight that
    it repeats, so two answered calls that overlap in time are never tries of one another.
    """
    groups: dict[tuple[object, ...], list[Node]] = defaultdict(list)
    for entry in entries:
        if entry.fingerprints:
            groups[entry.request_key].append(entry.node)
    for group in groups.values():
        retained = {node for node in group if node.children} or {
            max(group, key=lambda node: (node.call.status == "ok", _order(node.call)))
        }
        for concurrent in _concurrent(node for node in group if node.call.status == "ok"):
            if not retained.isdisjoint(concurrent):
                continued = [node for node in concurrent if node.children] or concurrent[:1]
                retained.update(concurrent)
                for node in concurrent:
                    node.alternative = node not in continued
                    if node.origin == "retry" and node is not concurrent[0]:
                        node.origin, node.spawned_by = "sibling", concurrent[0].spawned_by
        for node in group:
            node.superseded = node not in retained


def _concurrent(nodes: Iterable[Node]) -> list[list[Node]]:
    """Return the nodes grouped so that calls which overlap in time are together, each group in the order of its
    calls.
    """
    groups: list[list[Node]] = []
    end = -math.inf
    for node in sorted(nodes, key=lambda node: node.call.started_at):
        if node.call.started_at >= end:
            groups.append([])
        groups[-1].append(node)
        end = max(end, node.call.ended_at)
    return [sorted(group, key=lambda node: _order(node.call)) for group in groups]


def _name_branches(nodes: Sequence[Node]) -> None:
    """Name the branches: a node keeps its parent's branch if it is the heir, otherwise it begins one: main,
    main.1, …

    Alternatives, failed calls and superseded calls are named last, in this order, so that the line that continues
    has the plain name.
    """
    for node in nodes:
        node.heir = min(
            filter(continues_parent, node.children),
            key=lambda node: (node.superseded, node.call.status != "ok", not node.children, _order(node.call)),
            default=None,
        )
    heads = [node for node in nodes if node.parent is None or node.parent.heir is not node]
    used_names: set[str] = set()
    for head in sorted(
        heads, key=lambda node: (node.superseded, node.call.status != "ok" and not node.children, node.alternative)
    ):
        label = name = _label(head)
        count = 0
        while name in used_names:
            count += 1
            name = f"{label}.{count}"
        used_names.add(name)
        head.branch = name
    for node in nodes:
        if not node.branch and node.parent is not None:
            node.branch = node.parent.branch


def _label(head: Node) -> str:
    agent = head.call.agent_id
    if head.role in ("compaction", "auxiliary"):
        return f"{agent}.{head.role}" if agent else head.role
    return agent or MAIN
