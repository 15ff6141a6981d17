"""The conversation model: what an agent asks, what a model is shown of it, and what the model generates.

Every dialect is read into a `Conversation`, a flat list of `Block`s. `layout` turns it into the chat messages that
a model is shown, for the gateway and for exports alike. The result is a `Generation`, or `Delta`s while it is
being sampled, which each dialect writes as a response of its own format.
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
    """Return the data URL or the address of an image; "" if it has none."""
    source = image.get("image_url")
    url = cast(dict[str, Any], source).get("url") if isinstance(source, dict) else None
    return url if isinstance(url, str) else ""


BlockKind = Literal["text", "thinking", "tool_use", "tool_result", "other"]

# --- requests --------------------------------------------------------------------------------------


class Block(Struct, frozen=True, gc=False):
    """One block of a conversation: a text, thinking, a tool call, a tool result, or anything else.

    `turn` is the number of the message that the block belongs to; `role` is `user`, `assistant` or `system`. Tool
    results have the role `user` in every dialect.

    `text` is what a model is shown of the block; for a block of another kind, which its dialect calls `name`, it
    is a description. `images` are shown too, and `text` has `[image]` in place of each. A `hidden` block is not
    shown at all.

    A tool call has `id`, `name` and `arguments`, which are JSON text: in a request the arguments that a model is
    shown, in a response those that the model wrote, which may be invalid. With `freeform` the tool takes plain
    text, passed as the single argument `input`. A tool result has the id of its call.

    `source` is the block as it was sent, where `text` and `images` do not tell it from others of its kind.
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
        """Return the arguments of a tool call by name; empty if they are not a valid JSON object."""
        try:
            value = msgspec.json.decode(self.arguments) if self.arguments else None
        except (msgspec.MsgspecError, RecursionError):
            value = None
        inputs = cast(dict[str, Any], value) if isinstance(value, dict) else {}
        return {} if UNPARSED_INPUT in inputs else inputs

    @property
    def is_malformed(self) -> bool:
        """Return whether this is a tool call whose arguments are not a JSON object, so that no tool can be run."""
        if self.kind != "tool_use":
            return False
        arguments = parse_object(self.arguments)
        return arguments is None or UNPARSED_INPUT in arguments

    @property
    def fingerprint(self) -> str:
        """Return a digest of what the other fields do not tell apart: images, and content no model is shown."""
        if not self.images and self.source is None:
            return ""
        return canonical((self.images, self.source)).decode()


class Conversation(Struct, frozen=True, gc=False):
    """What a request asks of a model.

    `instructions` are the system prompt, which a model is shown as one message; without any there is no such
    message. `tools` are the functions that the model may call, in the format of chat completions. They may be
    shared with other conversations, so never change them. `tools_json` is the same as JSON, if that is available.
    `unsupported` lists what no chat model can do: the gateway refuses such a request.

    The other fields are set for stored calls only. `prompt_digest` is a digest of the system prompt and the tools
    as they were sent. `has_tools` is true if there are tools that the agent itself runs, `tool_is_forced` if the
    model must call a certain tool, `has_output_schema` if the response must match a JSON schema.
    `cache_ends_early` is true if the prompt cache ends before the last message, as for a side question after which
    the conversation does not continue.
    """

    instructions: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    tools: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tools_json: Raw | None = None
    unsupported: tuple[str, ...] = ()
    prompt_digest: bytes = b""
    has_tools: bool = False
    tool_is_forced: bool = False
    has_output_schema: bool = False
    cache_ends_early: bool = False

    @property
    def system(self) -> str:
        """Return the system prompt as one text."""
        return SYSTEM_SEPARATOR.join(self.instructions)


class ReadingState(Struct, frozen=True, gc=False):
    """What the messages of a request that were read so far mean for the next message.

    `messages` is their number, `turn` the number of the last turn (-1 before the first). `stage` is for the
    dialect's own use: how far that turn has been read. `open_calls` are the calls without a result, as (id, name),
    for a dialect whose results may name only the tool. `instructions`, `unsupported` and `cache_ends_early` are
    what these messages add to a Conversation.
    """

    messages: int = 0
    turn: int = -1
    stage: int = 0
    open_calls: tuple[tuple[str, str], ...] = ()
    instructions: tuple[str, ...] = ()
    unsupported: tuple[str, ...] = ()
    cache_ends_early: bool = False


def as_stored(
    conversation: Conversation, tools: bytes, *, agent_tools: bool = True, **fields: bool
) -> Conversation:
    """Return the conversation of a stored request, with the fields that only stored calls have.

    `tools` are the JSON as sent, or empty. `agent_tools` says that the agent itself runs the tools, if there are
    any.
    """
    digest = blake2b(conversation.system.encode("utf-8", "surrogatepass"), digest_size=16)
    digest.update(b"\0" + tools)
    has_tools = agent_tools and tools not in (b"", b"[]", b"null")
    return msgspec.structs.replace(conversation, prompt_digest=digest.digest(), has_tools=has_tools, **fields)


SYSTEM_SEPARATOR = "\n\n"
TEXT_SEPARATOR = "\n"
"""Never change them: another separator is other tokens, and splits every conversation that began with this one."""


class ConversationHandle:
    """The handle by which a backend recognises the calls of one conversation: one branch of one attempt.

    A backend keeps what it remembers of a conversation in a `WeakKeyDictionary` under this object, which lives as
    long as the attempt's session. `key` is the same for all branches of an agent's session: calls with the same
    key go to the same endpoint, so that its prefix cache is used.
    """

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: str) -> None:
        self.key = key


class ChatRequest(Struct, frozen=True, kw_only=True):
    """A request to a chat model, in the format of OpenAI chat completions.

    `model` is the name that the agent asked for; the backend decides which model serves it. `sampling` has the
    parameters to send (`max_tokens`, `temperature`, `top_p`, `top_k`, `stop`, `seed`, …), where those of the
    attempt override the agent's. `conversation` identifies the branch. None means that the request does not say.
    `tools` may be shared with other requests, so never change them; `tools_json` is the same as JSON, if that is
    available.
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
    """A tool call as it was sampled: `arguments` is the raw text, which may be invalid JSON. `id` may be empty."""

    id: str
    name: str
    arguments: str


class Generation(Struct, frozen=True, kw_only=True):
    """One complete output of a model.

    `sampling` has the parameters that were really sent. What the server did not report is None. `logprobs[i]`
    belongs to `completion_token_ids[i]`. `stop` is the stop string that ended the output, if one did.
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

    `tool` starts the tool call number `index`, with its `name` and the server's `id` (which may be empty);
    `arguments` adds `text` to the arguments of that call.
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
    """Return why a generation ended: for its tool calls if it has some, whatever the server reports.

    Raises BackendError for a reason with which no response is complete: an aborted generation must not pass for a
    short one.
    """
    reason = _ENDINGS.get(generation.finish_reason)
    if reason is None:
        raise BackendError(
            f"invalid finish_reason {generation.finish_reason[:100]!r} from the backend, expected one of "
            f"{', '.join(_ENDINGS)}; the response may be incomplete: send the request again"
        )
    return "tool_calls" if reason == "stop" and generation.tool_calls else reason
