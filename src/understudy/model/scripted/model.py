"""A scripted policy as a model that can be served: writes its action as the text and tokens of a completion."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.model.hermes import Vocabulary, parse_completion
from understudy.model.protocol import (
    GenerateRequest,
    InvalidRequestError,
    ModelChatRequest,
    ModelMessage,
    ModelTool,
    NamedToolChoice,
    check_chat,
)
from understudy.model.responses import ControlHandler, ModelCompletion
from understudy.model.scripted.oracle import Action, ActionCall, ChatTurn, Policy
from understudy.model.scripted.tokenizer import (
    TURN_END,
    ScriptedTokenizer,
    mark,
    parse_prompt,
    render,
    render_call,
)


class ScriptedModel:
    """A policy as a model (see ServedModel). Its tokens have probability 1."""

    controls: Mapping[str, Mapping[str, ControlHandler]] = {}

    def __init__(self, policy: Policy, tokenizer: ScriptedTokenizer) -> None:
        self._policy = policy
        self._tokenizer = tokenizer
        self.vocabulary: Vocabulary = tokenizer

    def models(self) -> Sequence[str]:
        """See ServedModel."""
        return ()

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> tuple[list[int], int]:
        """See ServedModel."""
        return self._tokenizer.encode_marked(render(messages, tools, add_generation_prompt=add_generation_prompt))

    async def chat(
        self, request: ModelChatRequest, prompt: list[int], cached: int, limit: int, model: str
    ) -> ModelCompletion:
        """See ServedModel."""
        # The last prompt token is never taken from a cache, because its logits are needed.
        return complete(self._policy, self._tokenizer, request, limit, cached=min(cached, len(prompt) - 1))

    async def generate(self, request: GenerateRequest, limit: int, model: str) -> ModelCompletion:
        """See ServedModel."""
        prompt = parse_prompt(self._tokenizer, request.token_ids)
        chat = request.chat(prompt.messages, prompt.tools)
        check_chat(chat, len(self.vocabulary.token_bytes))
        return complete(self._policy, self._tokenizer, chat, limit)

    async def prompt_logprobs(self, prompt: Sequence[int], model: str) -> list[float]:
        """See ServedModel. Raises InvalidRequestError: a script has no probabilities for other tokens than its
        own.
        """
        raise InvalidRequestError(
            "prompt_logprobs: unsupported by scripted policies; serve weights (--weights)", param="prompt_logprobs"
        )

    def close(self) -> None:
        """See ServedModel."""


def complete(
    policy: Policy, tokenizer: ScriptedTokenizer, request: ModelChatRequest, limit: int, *, cached: int = 0
) -> ModelCompletion:
    """Return the policy's response, of at most `limit` tokens. Raises BackendError."""
    tools = [] if request.tool_choice == "none" else request.tools or []
    action = policy.act(ChatTurn(request.messages, tools, request.seed))
    action = _constrained(action, request, tools)
    ids = encode_action(tokenizer, action)
    logprobs = [0.0] * len(ids) if action.logprobs is None else list(action.logprobs)
    if len(logprobs) != len(ids):
        raise BackendError(
            f"internal error: policy {policy.name!r} returned {len(logprobs)} logprobs for {len(ids)} "
            "tokens, expected one for each; please report it",
            status=500,
        )
    finish: Literal["stop", "length"] = "stop" if len(ids) <= limit else "length"
    ids = ids[:limit]
    stop, byte_limit = None, None
    if met := _first_stop(tokenizer, ids, request.stop_strings):
        stop, count, start = met
        finish, ids = "stop", ids[:count]
        byte_limit = start + (len(stop.encode()) if request.include_stop_str_in_output else 0)
    segments = parse_completion(tokenizer, ids, tools=bool(tools), byte_limit=byte_limit)
    return ModelCompletion(ids, logprobs[: len(ids)], segments, finish, stop, cached_tokens=cached)


def encode_action(tokenizer: ScriptedTokenizer, action: Action) -> list[int]:
    """Return the tokens of an action's text, with the end of the turn."""
    thought = f"<think>{mark(action.reasoning)}</think>" if action.reasoning is not None else ""
    calls = "\n".join(render_call(call.name, call.arguments) for call in action.tool_calls)
    return tokenizer.encode_marked(thought + mark(action.content) + calls + TURN_END)[0]


def _first_stop(
    tokenizer: ScriptedTokenizer, ids: Sequence[int], stops: Sequence[str]
) -> tuple[str, int, int] | None:
    """Return the stop string that is completed first, the number of tokens until then, and the byte where it
    begins.
    """
    if not stops:
        return None
    body = ids[:-1] if ids and ids[-1] == tokenizer.end_id else ids
    data = b"".join(tokenizer.token_bytes[id_] for id_ in body)
    matches = [
        (start + len(stop.encode()), start, stop) for stop in stops if (start := data.find(stop.encode())) >= 0
    ]
    if not matches:
        return None
    end, start, stop = min(matches)
    size = 0
    for count, id_ in enumerate(body, 1):
        size += len(tokenizer.token_bytes[id_])
        if size >= end:
            return stop, count, start
    raise AssertionError(
        "internal error: the match is outside of the text in which it was found; please report it"
    )


def _constrained(action: Action, request: ModelChatRequest, tools: Sequence[ModelTool]) -> Action:
    """Return the action restricted to what the request allows, as guided decoding would do."""
    calls = action.tool_calls
    if isinstance(request.tool_choice, NamedToolChoice):
        name = request.tool_choice.function.name
        calls = tuple(call for call in calls if call.name == name) or (_minimal_call(tools, name),)
    elif request.tool_choice == "required":
        calls = calls or (_minimal_call(tools, tools[0].function.name),)
    if request.parallel_tool_calls is False:
        calls = calls[:1]
    content = action.content
    if request.response_format is not None and request.response_format.type != "text" and not calls:
        schema = request.response_format.json_schema
        content = json.dumps(
            _minimal_value(
                schema.schema if schema else {"type": "object"}, content, "response_format.json_schema.schema"
            ),
            ensure_ascii=False,
        )
    if calls == action.tool_calls and content == action.content:
        return action
    return Action(content=content, tool_calls=calls, reasoning=action.reasoning)


class _JsonSchemaPart(Struct):
    """The part of JSON Schema that is needed to find a smallest value."""

    type: str | list[str] | None = None
    const: Any = msgspec.UNSET
    default: Any = msgspec.UNSET
    enum: list[Any] = []
    options: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]], name="anyOf")
    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []
    minimum: float | int = 0


_MAX_SCHEMA_DEPTH = 20


def _minimal_call(tools: Sequence[ModelTool], name: str) -> ActionCall:
    parameters = next(tool.function.parameters for tool in tools if tool.function.name == name)
    value = _minimal_value(parameters or {"type": "object"}, "", f"function.parameters of the tool {name}")
    return ActionCall(name, json.dumps(value, ensure_ascii=False))


def _minimal_value(definition: dict[str, Any], text: str, where: str, depth: int = 0) -> Any:
    """Return a smallest value of the JSON schema at `where`, with `text` for strings."""
    if depth > _MAX_SCHEMA_DEPTH:
        raise InvalidRequestError(
            f"{where[:200]}…: a JSON schema nested more than {_MAX_SCHEMA_DEPTH} levels deep, the maximum for "
            "scripted policies; use a flatter one, or serve weights (--weights)"
        )
    try:
        schema = msgspec.convert(definition, _JsonSchemaPart)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"{where}: invalid JSON schema: {error}; correct this key") from None
    for value in (schema.const, schema.default, *schema.enum[:1]):
        if value is not msgspec.UNSET:
            return value
    if schema.options:
        return _minimal_value(schema.options[0], text, f"{where}.anyOf[0]", depth + 1)
    kind = schema.type[0] if isinstance(schema.type, list) and schema.type else schema.type
    if kind == "object" or (kind is None and schema.properties):
        required = [name for name in schema.required if name in schema.properties]
        return {
            name: _minimal_value(schema.properties[name], text, f"{where}.properties.{name}", depth + 1)
            for name in required
        }
    simple: dict[str, Any] = {"integer": schema.minimum, "number": schema.minimum, "boolean": False, "array": []}
    return simple.get(str(kind), None if kind == "null" else text)
