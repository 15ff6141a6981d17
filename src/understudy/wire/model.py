"""The conversation model: what an agent asks, what a model is shown of it, and what the model generates.

Every dialect is read into a `Conversation`, a flat list of `Block`s. `layout` makes the chat messages of it that a
model is shown, for the gateway and for exports alike. What comes back is a `Generation`, or `Delta`s while it is
being sampled, which each dialect writes as its own kind of response.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, Literal, cast

import msgspec
from msgspec import Raw, Struct, field

from understudy.errors import BackendError
from understudy.types import PolicySpan, Usage
from understudy.wire.arguments import UNPARSED_INPUT, parse_object
from understudy.wire.decoding import canonical

Part = dict[str, Any]
"""A part of a message's content: `{"type": "text", "text": …}` or `{"type": "image_url", "image_url": {…}}`."""

Message = dict[str, Any]
"""A message of a chat completion."""


def image_url(image: Part) -> str:
    """The data URL or the address of an image; empty when it has none."""
    source = image.get("image_url")
    url = cast(dict[str, Any], source).get("url") if isinstance(source, dict) else None
    return url if isinstance(url, str) else ""


BlockKind = Literal["text", "thinking", "tool_use", "tool_result", "other"]

# --- requests --------------------------------------------------------------------------------------


class Block(Struct, frozen=True, gc=False):
    """One block of a conversation: a text, a thought, a tool call, a tool result, or anything else.

    `turn` is the number of its message; `role` is `user`, `assistant` or `system`. Tool results are a user's in
    every dialect. `text` is what a model is shown of the block, which for a block of another kind, named `name`
    by its dialect, is some description of it. `images` are shown too; in `text` stands `[image]` for each. A
    block that is `hidden` is not shown at all.

    A tool call has `id`, `name` and `arguments`, which are JSON text: in a request what a model is shown of them,
    in a response what the model wrote, which need not be valid. With `freeform` the tool takes plain text, which
    is the one argument `input`. A tool result has the call's `id`.

    `source` is the block as it was sent where `text` and `images` do not distinguish it from others of its kind.
    """

    turn: int
    role: str
    kind: BlockKind
    text: str = ""
    id: str = ""
    name: str = ""
    arguments: str = ""
    is_error: bool = False
    images: tuple[Part, ...] = ()
    hidden: bool = False
    freeform: bool = False
    source: Struct | None = None

    def inputs(self) -> dict[str, Any]:
        """The arguments of a tool call by name; empty when they are not a valid JSON object."""
        try:
            value = msgspec.json.decode(self.arguments) if self.arguments else None
        except (msgspec.MsgspecError, RecursionError):
            value = None
        inputs = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        return {} if UNPARSED_INPUT in inputs else inputs

    @property
    def is_malformed(self) -> bool:
        """Whether this is a tool call whose arguments are no JSON object: no tool could be run with them."""
        if self.kind != "tool_use":
            return False
        arguments = parse_object(self.arguments)
        return arguments is None or UNPARSED_INPUT in arguments

    @property
    def fingerprint(self) -> str:
        """Tells blocks apart whose other fields are equal: their images, and what no model is shown."""
        if not self.images and self.source is None:
            return ""
        return canonical((self.images, self.source)).decode()


class Conversation(Struct, frozen=True, gc=False):
    """What a request asks of a model.

    `instructions` are the system prompt, which a model is shown as one message; None of them, and there is no
    such message. `tools` are the functions that the model may call, in the form of chat completions; they may be
    shared with other conversations, so never change them. `tools_json` is the same as JSON, where that is at hand.
    `unsupported` lists what no chat model can do: the gateway refuses a request for it.

    The rest is known of stored calls only. `setting` is a digest of the system prompt and the tools as they were
    sent. `has_tools` when there are tools that the agent itself runs, `forced` when the model must call a certain
    one, `formatted` when the response must fit a JSON schema. `aside` when the prompt cache ends before the last
    message, as for a question that the conversation will not go on from.
    """

    instructions: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tools_json: Raw | None = None
    unsupported: tuple[str, ...] = ()
    setting: bytes = b""
    has_tools: bool = False
    forced: bool = False
    formatted: bool = False
    aside: bool = False

    @property
    def system(self) -> str:
        """The system prompt as one text."""
        return SYSTEM_SEPARATOR.join(self.instructions)


class ReadingState(Struct, frozen=True, gc=False):
    """What the messages of a request that were read so far mean for the next one.

    `messages` is how many there were, `turn` the number of the last turn, -1 before the first. `stage` is the
    dialect's own: how far that turn has come. `open_calls` are the calls without a result, as id and name, in a
    dialect whose results may name nothing but the tool. `instructions`, `unsupported` and `aside` are what these
    messages add to a Conversation.
    """

    messages: int = 0
    turn: int = -1
    stage: int = 0
    open_calls: tuple[tuple[str, str], ...] = ()
    instructions: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    aside: bool = False


def as_stored(
    conversation: Conversation, tools: bytes, *, agent_tools: bool = True, **fields: bool
) -> Conversation:
    """The conversation of a stored request, with what is known of that only; `tools` are JSON as sent, or nothing.

    `agent_tools`: the agent itself runs the tools, if there are any.
    """
    digest = blake2b(conversation.system.encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(b"\0" + tools)
    has_tools = agent_tools and tools not in (b"", b"[]", b"null")
    return msgspec.structs.replace(conversation, setting=digest.digest(), has_tools=has_tools, **fields)


SYSTEM_SEPARATOR = "\n\n"
TEXT_SEPARATOR = "\n"
"""Never change them: another separator is other tokens, and splits every conversation that began with this one."""


class ConversationHandle:
    """A line of calls as a backend may remember it: one branch of one attempt.

    What a backend remembers of a conversation, it keeps in a `WeakKeyDictionary` by this object, which dies with
    the attempt's session. `key` is the same for all branches of one agent session: calls with the same key go to
    the same endpoint, for its prefix cache.
    """

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: str) -> None:
        self.key = key


class ChatRequest(Struct, frozen=True, kw_only=True):
    """What a model is asked, in the shapes of OpenAI chat completions.

    `model` is the name that the agent asked for; the backend decides what serves it. `sampling` holds the
    parameters to send (`max_tokens`, `temperature`, `top_p`, `top_k`, `stop`, `seed`, …), the attempt's own
    already laid over the agent's. `conversation` is the branch it belongs to. None means that the request does not
    say. `tools` may be shared with other requests, so never change them; `tools_json` is the same as JSON, where
    that is at hand.
    """

    model: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tools_json: Raw | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    conversation: ConversationHandle | None = None


# --- generations ----------------------------------------------------------------------------------


class ToolCall(Struct, frozen=True):
    """A tool call as it was sampled: `arguments` is the raw string, which need not be JSON. `id` may be empty."""

    id: str
    name: str
    arguments: str


class Generation(Struct, frozen=True, kw_only=True):
    """One complete output of a model. `sampling` is what was really sent; what the server did not give is None.

    `logprobs[i]` belongs to `completion_token_ids[i]`. `stop` is the stop string that ended it, if one did.
    `policy_spans` are the versions of the weights as the server reports them. For `audit` see Call.
    """

    model: str
    text: str
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str
    stop: str | None = None
    usage: Usage = Usage()
    prompt_token_ids: Sequence[int] | None = None
    completion_token_ids: Sequence[int] | None = None
    logprobs: tuple[float, ...] | None = None
    policy_spans: tuple[PolicySpan, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    audit: dict[str, Any] = field(default_factory=dict[str, Any])


class Delta(Struct, frozen=True, gc=False):
    """A piece of a generation while it is being sampled.

    `tool` opens the tool call number `index` with its `name` and the server's `id` (which may be empty), and
    `arguments` adds `text` to the argument string of that call.
    """

    kind: Literal["reasoning", "text", "tool", "arguments"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


Emit = Callable[[Delta], None]
"""Receives the pieces of a generation as they come."""


Ending = Literal["stop", "length", "tool_calls", "content_filter"]

_ENDINGS: dict[str, Ending] = {
    "stop": "stop",
    "length": "length",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
    "content_filter": "content_filter",
}


def ending(generation: Generation) -> Ending:
    """How a generation ended; one with tool calls ended for them, whatever its server reports.

    Raises BackendError for an end that no response can have: an aborted generation must not pass for a short one.
    """
    reason = _ENDINGS.get(generation.finish_reason)
    if reason is None:
        raise BackendError(
            f"invalid finish_reason {generation.finish_reason[:100]!r} from the backend, expected one of "
            f"{', '.join(_ENDINGS)}; the response is incomplete"
        )
    return "tool_calls" if reason == "stop" and generation.tool_calls else reason
