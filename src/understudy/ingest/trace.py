"""The model of a trace: what every log format is read into, and how it expands into states.

A trace is a tree of nodes, each stored once; a turn names the last node that the model saw and the nodes of its
response. A conversation of n turns with all its branches therefore costs O(n), although each state repeats
everything before it. `expand` makes the states one at a time, with messages in the order that chat templates
require.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import chain
from typing import Any, Literal, Protocol, cast

import msgspec
from msgspec import Struct, field

from understudy.ingest.model_families import model_family
from understudy.ingest.tool_lists import ToolList, ToolsSource, tool_list
from understudy.wire.layout import result_text
from understudy.wire.stored import text_content

CLAUDE_CODE_FORMATS = ("claude-code", "claude-text")
"""The formats of Claude Code's logs, whose `version` is a version of Claude Code."""

MISSING_RESULT = "[Tool result missing due to internal error]"
"""Stands for a tool result that the log lacks. Claude Code sends this text itself when it has no result."""


_MARKING_FORMATS = frozenset((*CLAUDE_CODE_FORMATS, "cline", "gemini"))
"""Formats of agents whose requests mark a failed result. For the others `is_error` is known from the log only, and
their models are not shown it.
"""


def messages_shown(trace: Trace, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of a trace's renderer as a model is shown them (see `normalise_messages`)."""
    return normalise_messages(messages, marks_errors=trace.format in _MARKING_FORMATS)


def shown_result(trace: Trace, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a trace's renderer with the content that a model is shown; a failed result has its mark
    in the text.
    """
    if trace.format not in _MARKING_FORMATS or not message.get("is_error"):
        return message
    text, images = _failed_result(message.get("content"))
    return {**message, "content": [{"type": "text", "text": text}, *images] if images else text}


def _failed_result(content: Any) -> tuple[str, list[Any]]:
    """Return the text that a model is shown of a failed result, and the images of the result."""
    parts = cast("list[dict[str, Any]]", content) if isinstance(content, list) else []
    images = [part for part in parts if "image_url" in part]
    return result_text(text_content(content), is_error=True), images


def normalise_messages(messages: Sequence[dict[str, Any]], *, marks_errors: bool = False) -> list[dict[str, Any]]:
    """Return the messages with neighbours of one role joined, and tool results before the user's text.

    Every tool call then has exactly one result: a missing one becomes `MISSING_RESULT`, and a result without a
    call becomes user text. Empty messages and the `is_error` flags are dropped; with `marks_errors` a result with
    that flag is shown as the gateway shows it, and its images follow it in a user message. The messages passed in
    are not changed.
    """
    result: list[dict[str, Any]] = []
    user_messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for message in messages:
        role = message["role"]
        if role == "user":
            user_messages.append(message)
        elif role == "tool":
            if message.get("tool_call_id") in open_calls:
                # A late result goes before what the user wrote since the response.
                open_calls.remove(message["tool_call_id"])
                tool_message, images = _without_mark(message, marks_errors)
                result.append(tool_message)
                if images:
                    user_messages.append({"role": "user", "content": images})
            else:
                user_messages.append({"role": "user", "content": message.get("content")})
        elif message.get("content") or message.get("tool_calls"):
            follows_assistant = bool(result) and result[-1]["role"] == "assistant"
            joins = role == "assistant" and not user_messages and follows_assistant
            if not joins or (open_calls and message.get("content")):
                # The calls of one response may come in several messages. Text after a call begins another
                # response, which was sent with that call's result.
                _flush(result, user_messages, open_calls)
            if role == "assistant" and result and result[-1]["role"] == "assistant":
                result[-1] = _joined(result[-1], message)
            else:
                result.append(message)
            open_calls += [call["id"] for call in message.get("tool_calls") or ()]
    _flush(result, user_messages, open_calls)
    return result


def _without_mark(message: dict[str, Any], marks_errors: bool) -> tuple[dict[str, Any], list[Any]]:
    """Return a tool message without the flag `is_error`, and images to show after it.

    With `marks_errors` a failed result becomes the text that `result_text` makes of it.
    """
    plain = {key: value for key, value in message.items() if key != "is_error"}
    if not (marks_errors and message.get("is_error")):
        return plain, []
    text, images = _failed_result(message.get("content"))
    return {**plain, "content": text}, images


def _flush(result: list[dict[str, Any]], user_messages: list[dict[str, Any]], open_calls: list[str]) -> None:
    """Move what is open to `result`: a missing result for each open call, and the user's messages as one."""
    result += [{"role": "tool", "tool_call_id": call, "content": MISSING_RESULT} for call in open_calls]
    open_calls.clear()
    nonempty = [message for message in user_messages if message.get("content")]
    user_messages.clear()
    if not nonempty:
        return
    joined = nonempty[0]
    for message in nonempty[1:]:
        joined = _joined(joined, message)
    result.append(joined)


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    joined = {**first, "content": _joined_content(first.get("content"), second.get("content"))}
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    if calls:
        joined["tool_calls"] = calls
    return joined


def _joined_content(first: Any, second: Any) -> Any:
    if not first or not second:
        return first or second
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return _parts(first) + _parts(second)


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)


Message = dict[str, Any]
"""A message as in OpenAI's chat completions.

`role` is system, user, assistant or tool; `content` a string, a list of parts (`text`, `image_url`) or None;
`tool_calls` are `{id, type: "function", function: {name, arguments: JSON text}}`; a `tool` message has its
`tool_call_id`. A renderer may also give `is_error: True` in a tool message; the messages of a state never have it:
they are what `messages_shown` makes of it.
"""

Fidelity = Literal["ledger", "exact", "repaired", "lossy"]
"""How certain it is that the messages are what the model saw.

`ledger`: the log itself holds the request. `exact`: rebuilt from a complete log. `repaired`: rebuilt, but
something is missing or is known to differ from what was sent. `lossy`: the format does not hold everything.
"""

SYSTEM_PROMPT = (
    "You are a coding agent working in a user's project from a terminal. Use the tools you are given to read, "
    "search, edit and run code. Look before you change anything, keep to what was asked, check your work by "
    "running it, and say briefly and plainly what you did."
)
"""Stands for the system prompt of states whose log does not contain it."""


class TraceParent(Struct, frozen=True):
    """What started a subagent: the session, the tool call (None if unknown), and the nesting depth from 1."""

    session_id: str
    tool_use_id: str | None = None
    depth: int = 1


class RequestShape(Struct, frozen=True):
    """The real system prompt and tools (in OpenAI's form) of a request; each is None if the log does not hold
    it.
    """

    system: str | None = None
    tools: list[dict[str, Any]] | None = None


class TraceNode(Struct, frozen=True, gc=False):
    """A part of a conversation that follows the node with index `parent` (-1 for the first).

    `body` is whatever the trace's renderer turns into messages.
    """

    parent: int
    body: Any


class TurnSignals(Struct, kw_only=True, gc=False, frozen=True):
    """What became of a turn, as far as the log shows. States can be selected by these columns.

    `tool_errors` and `denied` count the `tool_calls` that failed or that the user refused. `interrupted`: the user
    stopped the turn or one of its calls. `tests`: the result of the tests that it ran; None if none ran or the
    result is unknown. `edits_survived` counts the `edits` that nothing undid later; None if this is unknown for
    one of them. `commits` counts git commits. `feedback`: how the user's next message judges the turn.
    """

    tool_calls: int = 0
    tool_errors: int = 0
    denied: int = 0
    interrupted: bool = False
    tests: Literal["passed", "failed"] | None = None
    edits: int = 0
    edits_survived: int | None = None
    commits: int = 0
    feedback: Literal["positive", "negative"] | None = None


class TraceOutcome(Struct, frozen=True, kw_only=True):
    """How a conversation ended, if its log says so: whether its task was solved, and the reward.

    `task` is the id of the task or instance; `exit_status` is copied from the harness.
    """

    resolved: bool | None = None
    reward: float | None = None
    task: str | None = None
    exit_status: str | None = None


class TraceTurn(Struct, kw_only=True, gc=False):
    """One response of the model.

    `context`: the last node it was sent (-1: none). `action`: the nodes of the response.

    `message_id` is unique in the trace. `branch` is "active" on the path to the trace's last turn, and "branch"
    for turns that were rewound. `notes` are the reasons why the fidelity is less than exact. `shape` is set if it
    differs from the trace's, `signals` once `signals.annotate` ran.
    """

    message_id: str
    context: int
    action: tuple[int, ...]
    model: str | None = None
    timestamp: str | None = None
    branch: Literal["active", "branch"] = "active"
    fidelity: Fidelity = "exact"
    notes: tuple[str, ...] = ()
    shape: RequestShape | None = None
    signals: TurnSignals | None = None


class TurnAction(Struct, kw_only=True, omit_defaults=True):
    """What the model did in one turn. `thinking_hidden`: it thought, but the log does not hold the text."""

    content: str | None = None
    thinking: str | None = None
    thinking_hidden: bool = False
    tool_calls: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


class TraceRenderer(Protocol):
    """Turns the node bodies of a format into messages. It is called only for nodes that are needed."""

    def history(self, body: Any) -> list[Message]:
        """Return the messages of a node as later turns see them, without thinking."""
        ...

    def action(self, bodies: Sequence[Any]) -> TurnAction:
        """Return what the model did; `bodies` are those of the turn's action nodes."""
        ...


class Trace(Struct, kw_only=True, eq=False):
    """One conversation of one agent, with all its branches. `source` is the path of the log.

    `project` is the agent's working directory, `agent` a subagent's type if the log names it, `version` the
    program's version. `role` is main, subagent, or the purpose of an agent that the program started for itself
    (warmup, compact, prompt_suggestion), which is not worth learning from. `losses` counts by kind what was
    unreadable, unknown or left out. `former_ids` are ids that earlier releases gave this trace.
    """

    trace_id: str
    session_id: str
    format: str
    source: str
    renderer: TraceRenderer
    nodes: list[TraceNode] = field(default_factory=list[TraceNode])
    turns: list[TraceTurn] = field(default_factory=list[TraceTurn])
    project: str | None = None
    parent: TraceParent | None = None
    role: str = "main"
    agent: str | None = None
    version: str | None = None
    shape: RequestShape = RequestShape()
    outcome: TraceOutcome | None = None
    losses: Counter[str] = field(default_factory=Counter[str])
    former_ids: tuple[str, ...] = ()


class TraceState(Struct, kw_only=True):
    """What the model saw at one turn (`messages`) and what it did then (`student_action`).

    Files of states have these fields, so their names are a format. `tools_source`, `tools_version` and
    `tools_inferred` are explained in `tool_lists.ToolList`.
    """

    state_id: str
    trace_id: str
    session_id: str
    message_id: str
    messages: list[Message]
    student_action: TurnAction
    tools: list[dict[str, Any]] | None
    source_model: str | None
    source_family: str | None
    fidelity: Fidelity
    notes: tuple[str, ...]
    timestamp: str | None
    project: str | None
    branch: Literal["active", "branch"]
    role: str
    parent: TraceParent | None
    signals: TurnSignals | None = None
    outcome: TraceOutcome | None = None
    tools_source: ToolsSource | None = None
    tools_version: str | None = None
    tools_inferred: tuple[str, ...] = ()


class PlainRenderer:
    """The renderer of formats whose node bodies are messages, with thinking in `reasoning_content`."""

    def history(self, body: Message) -> list[Message]:
        """Return the message without its thinking."""
        return [{key: value for key, value in body.items() if key not in ("reasoning_content", "thinking_hidden")}]

    def action(self, bodies: Sequence[Message]) -> TurnAction:
        """Return the messages as one action."""
        texts = [text for body in bodies if (text := text_of(body.get("content")))]
        thoughts = [thought for body in bodies if (thought := body.get("reasoning_content"))]
        return TurnAction(
            content="\n".join(texts) if texts else None,
            thinking="\n".join(thoughts) if thoughts else None,
            thinking_hidden=not thoughts and any(body.get("thinking_hidden") for body in bodies),
            tool_calls=[call for body in bodies for call in body.get("tool_calls") or ()],
        )


def text_of(content: Any) -> str:
    """Return the text in a message's content, with parts joined by line breaks; "" if there is none."""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in cast(list[Any], content) if isinstance(content, list) else []:
        if isinstance(part, dict) and "text" in part:
            texts.append(str(cast(dict[str, Any], part)["text"] or ""))
    return "\n".join(texts)


def tool_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Build a tool call in OpenAI's form. Arguments that are not a string are encoded as JSON.

    Unpaired surrogates, which UTF-8 cannot encode, become question marks.
    """
    text = arguments if isinstance(arguments, str) else _json(arguments)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


def _json(value: Any) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace").decode()


def state_id(trace_id: str, message_id: str) -> str:
    """Return the id of a state: 32 hex digits, which stay the same when the log grows."""
    return state_ids_of(trace_id)(message_id).hex()


def state_ids_of(trace_id: str) -> Callable[[str], bytes]:
    """Return a function that returns the 16 bytes of the id of a trace's state for the state's message id."""
    prefix = blake2b(f"{trace_id}\0".encode("utf-8", "surrogatepass"), digest_size=16)

    def of_message(message_id: str) -> bytes:
        digest = prefix.copy()
        digest.update(message_id.encode("utf-8", "surrogatepass"))
        return digest.digest()

    return of_message


def expand(trace: Trace, *, system: str | None = SYSTEM_PROMPT) -> Iterator[TraceState]:
    """Yield the states of a trace, one for each turn, in order.

    The first message is the logged system prompt, or `system` if the log holds none; with None there is no system
    message then. States share messages, so do not change them.
    """
    rendered: dict[int, list[Message]] = {}
    conversation = _PathMessages(trace, rendered)
    offered = OfferedTools(trace, rendered)
    identity_of = state_ids_of(trace.trace_id)
    for turn in trace.turns:
        messages = conversation.messages(turn.context)
        shape = turn.shape or trace.shape
        tools = offered.tools_of(turn)
        prompt = shape.system if shape.system is not None else system
        first: list[Message] = [] if prompt is None else [{"role": "system", "content": prompt}]
        yield TraceState(
            state_id=identity_of(turn.message_id).hex(),
            trace_id=trace.trace_id,
            session_id=trace.session_id,
            message_id=turn.message_id,
            messages=first + messages,
            student_action=offered.action_of(turn),
            tools=tools.tools,
            source_model=turn.model,
            source_family=model_family(turn.model),
            timestamp=turn.timestamp,
            project=trace.project,
            role=trace.role,
            branch=turn.branch,
            parent=trace.parent,
            fidelity=turn.fidelity,
            notes=turn.notes,
            signals=turn.signals,
            outcome=trace.outcome,
            tools_source=tools.source,
            tools_version=tools.version,
            tools_inferred=tools.inferred,
        )


class _PathMessages:
    """Computes the normalised messages up to one node of a trace after another, in linear total time.

    When an answer follows a user message or tool result, all earlier messages are final. So only the messages
    after the last such place that the new path shares with the previous one are computed again.
    """

    def __init__(self, trace: Trace, rendered: dict[int, list[Message]]) -> None:
        self._trace = trace
        self._rendered = rendered
        self._path: list[int] = []
        self._messages: list[Message] = []
        self._final: list[tuple[int, int]] = []
        """How many nodes of the path, and messages of them, are final if an answer follows; ascending."""

    def messages(self, end: int) -> list[Message]:
        """Return the messages from the root to the node `end` (-1: none).

        The next call changes the returned list.
        """
        shared, steps = _path_difference(self._trace.nodes, end, self._path)
        self._path[shared:] = steps
        while self._final and self._final[-1][0] > shared:
            self._final.pop()
        while True:
            first_step, message_count = self._final[-1] if self._final else (0, 0)
            new_messages = [
                message
                for index in self._path[first_step:]
                for message in rendered_node(self._trace, index, self._rendered)
            ]
            if not first_step or not new_messages or _is_answer(new_messages[0]):
                break
            self._final.pop()
        self._messages[message_count:] = messages_shown(self._trace, new_messages)
        if new_messages and all(
            message_list and message_list[-1]["role"] in ("user", "tool")
            for message_list in (new_messages, self._messages)
        ):
            self._final.append((len(self._path), len(self._messages)))
        return self._messages


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant" and bool(message.get("content") or message.get("tool_calls"))


def rendered_node(trace: Trace, index: int, rendered: dict[int, list[Message]]) -> list[Message]:
    """Return the messages of a node, rendering and caching them in `rendered` if needed."""
    messages = rendered.get(index)
    if messages is None:
        messages = rendered[index] = trace.renderer.history(trace.nodes[index].body)
    return messages


class OfferedTools:
    """The tools that each turn of a trace was offered.

    `rendered` caches the messages of nodes by index.
    """

    def __init__(self, trace: Trace, rendered: dict[int, list[Message]] | None = None) -> None:
        self._trace = trace
        self._rendered = {} if rendered is None else rendered
        self._actions: dict[int, TurnAction] = {}

    def action_of(self, turn: TraceTurn) -> TurnAction:
        """Return what a turn of the trace did. If `unlogged` already rendered the action, it is reused."""
        return self._actions.pop(id(turn), None) or self._render_action(turn)

    def _render_action(self, turn: TraceTurn) -> TurnAction:
        nodes = self._trace.nodes
        return self._trace.renderer.action([nodes[index].body for index in turn.action])

    def tools_of(self, turn: TraceTurn) -> ToolList:
        """Return the tools of a turn: the logged ones, else `unlogged`."""
        tools = (turn.shape or self._trace.shape).tools
        return self.inferred_tools if tools is None else ToolList(tools=tools, source="logged")

    @cached_property
    def inferred_tools(self) -> ToolList:
        """The tools of turns whose log holds none, derived from everything that all turns saw and did."""
        trace, nodes = self._trace, self._trace.nodes
        visited: set[int] = set()
        for turn in trace.turns:
            node = turn.context
            while node >= 0 and node not in visited:
                visited.add(node)
                node = nodes[node].parent
        messages = (message for node in visited for message in rendered_node(trace, node, self._rendered))
        for turn in trace.turns:
            self._actions[id(turn)] = self._render_action(turn)
        actions = self._actions.values()
        return tool_list(
            chain(messages, ({"tool_calls": action.tool_calls} for action in actions)),
            version=trace.version if trace.format in CLAUDE_CODE_FORMATS else None,
            subagent=trace.role == "subagent",
            date=next((turn.timestamp for turn in trace.turns if turn.timestamp), None),
        )


_LAST_NODES_SEARCHED = 64


def path_to(nodes: Sequence[TraceNode], end: int, previous_path: list[int]) -> list[int]:
    """Return the nodes from the root to `end`. `previous_path` is that of the turn before.

    Usually the new path continues it. Only the difference is walked, which keeps expansion linear.
    """
    shared, steps = _path_difference(nodes, end, previous_path)
    return previous_path[:shared] + steps


def _path_difference(nodes: Sequence[TraceNode], node: int, previous_path: list[int]) -> tuple[int, list[int]]:
    """Return how many nodes the path to `node` shares with the previous one, and the nodes after them."""
    steps: list[int] = []
    # Only the end of the previous path is searched, because a table of all of it would cost time with every turn.
    # A path that leaves it earlier is walked to the root instead.
    window = _LAST_NODES_SEARCHED
    position = {
        node: index for index, node in enumerate(previous_path[-window:], max(len(previous_path) - window, 0))
    }
    while node >= 0 and node not in position:
        steps.append(node)
        node = nodes[node].parent
    steps.reverse()
    return (position[node] + 1 if node >= 0 else 0), steps
