"""Token-in-token-out: the prompt of a call is the tokens sampled before it, followed by the tokens of what is new.

An agent sends the whole conversation with every call, with changes. If it were rendered again, the model's turns
would become other tokens than were sampled, and could not be trained on. So the conversation is only looked up
here (see `tree`), and the tokens of what is new are appended to its stored tokens (see `turn_suffix`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct, structs

from understudy.errors import BackendError
from understudy.gateway.backends.fields import is_overflow, reported_context_length
from understudy.gateway.errors import streaming_excludes_exact
from understudy.gateway.exact.codec import Codec
from understudy.gateway.exact.parsers import CompletionFormat, ParsedOutput
from understudy.gateway.exact.token_servers import SampledTokens, TokenServer
from understudy.gateway.exact.tree import ConversationPath, TokenForest, TokenNode, TokenTree, conversation_path
from understudy.gateway.exact.turn_suffix import USER, HistoryRewritten, TemplateSettings, TurnSuffix, TurnSuffixes
from understudy.gateway.prices import Price
from understudy.types import Usage
from understudy.wire.errors import ContextOverflow
from understudy.wire.model import ChatRequest, Emit, Generation

Mismatch = Literal[
    "truncated turn", "tool arguments", "thinking stripped", "tokenization", "whitespace", "template", "refused"
]
"""Why the template would have made other tokens of a conversation; the first reason that applies.

"truncated turn": it was cut off before its end. "tool arguments": the agent sent other arguments back. "thinking
stripped": the agent or the template left the thinking out. "tokenization": the same text in other tokens.
"whitespace": the text differs only in white space. "template": anything else. "refused": the template cannot
render what the agent sent back.
"""


def _compares_whole_prompt(turns: int) -> bool:
    """Return whether the whole prompt is compared after this many turns.

    Only at powers of two, because it costs a rendering.
    """
    return turns > 0 and turns & (turns - 1) == 0


async def _turn_mismatch(
    codec: Codec,
    suffixes: TurnSuffixes,
    setting: TemplateSettings,
    node: TokenNode,
    echo: Mapping[str, Any],
    suffix: TurnSuffix,
) -> Mismatch | None:
    """Return how the last answer of `node`, sent back as `echo`, differs from the template's text for it; None if
    it does not.

    Raises BackendError if the template cannot render it.
    """
    traits = await suffixes.traits(setting)
    before = await suffixes.render([USER], setting, generation_prompt=False)
    after = await suffixes.render([USER, echo], setting, generation_prompt=False)
    rendered = after[len(before) :]
    sampled = [*traits.opening, *node.sampled[: len(node.sampled) - suffix.ended], *traits.close]
    if after[: len(before)] == before and rendered == sampled:
        return None
    if not suffix.ended:
        return "truncated turn"
    if [call.arguments for call in node.tool_calls] != _arguments(echo):
        return "tool arguments"
    if node.reasoned and not (traits.shows_thinking and echo.get("reasoning")):
        return "thinking stripped"
    return _textual(await codec.decode(sampled), await codec.decode(rendered))


def _textual(ours: str, written: str) -> Mismatch:
    if ours == written:
        return "tokenization"
    return "whitespace" if "".join(ours.split()) == "".join(written.split()) else "template"


def _arguments(message: Mapping[str, Any]) -> list[str]:
    return [call["function"]["arguments"] for call in message.get("tool_calls") or ()]


ANSWER_TOKENS = 32_768
"""The token limit of an answer if neither the agent nor the server sets one."""

_WHOLE = {"stop", "length"}
"""The finish reasons of answers that an agent receives, and may therefore send back."""


class _ExactCall(Struct, frozen=True):
    """A request, its rendering by the template, and the conversation's position in the tokens of its branch."""

    request: ChatRequest
    setting: TemplateSettings
    tree: TokenTree
    path: ConversationPath


class _ExactPrompt(Struct, frozen=True, kw_only=True):
    """The tokens of a call's prompt, and how they were made.

    `node` is the conversation that the call continues, if any, and `echo` its last answer as the agent sent it
    back. `suffix` is what follows the tokens of `node`; None if the prompt was rendered as a whole.
    """

    ids: list[int]
    origin: str
    reason: str | None = None
    node: TokenNode | None = None
    echo: Mapping[str, Any] | None = None
    suffix: TurnSuffix | None = None


class ExactBackend:
    """A token server as a backend (see Backend). `name` is its kind, `format` the syntax of the model's answers.

    Module `token_servers` explains what its logprobs mean. Several servers of one model share one `memory`, so
    that a conversation that moves between them keeps its tokens.
    """

    def __init__(
        self,
        name: str,
        server: TokenServer,
        codec: Codec,
        format: CompletionFormat,
        *,
        price: Price | None = None,
        memory: TokenForest | None = None,
    ) -> None:
        self.name = name
        self.model = server.model
        self.price = price
        self._server = server
        self._codec = codec
        self._format = format
        self._suffixes = TurnSuffixes(codec)
        self._forest = TokenForest() if memory is None else memory

    async def generate(self, request: ChatRequest, emit: Emit | None = None) -> Generation:
        """See Backend. If the prompt and `max_tokens` together exceed the context, `max_tokens` is reduced.

        `audit` of the generation has: `mode` ("exact"); `prompt` ("root": a conversation that is new here,
        "extended", or "rendered anew") with its `reason`; `mismatch` (see Mismatch) of the turn that the prompt
        continues; `canonical`, if the whole prompt was compared with a new rendering; and `left_out`, requested
        features that are unavailable. Raises ConfigError with `emit`.
        """
        if emit is not None:
            raise streaming_excludes_exact()
        call = self._call(request)
        prompt = await self._prompt(call)
        sampling, left_out = await self._sampling(request, len(prompt.ids))
        sampled, audit = await asyncio.gather(
            self._sample(prompt.ids, sampling, _schema(request)), self._audit(call, prompt)
        )
        generation = await self._generation(call, prompt, sampled)
        generation = structs.replace(generation, audit=audit | ({"left_out": left_out} if left_out else {}))
        if sampled.finish_reason in _WHOLE:
            self._remember(call, generation, prompt.node, clean=audit["mismatch"] is None)
        return generation

    def restore(self, request: ChatRequest, generation: Generation) -> None:
        """Restore a call that was answered before this process began, so that its branch continues from it.

        `request` belongs to a conversation. The text, tool calls (with the ids that the agent knows) and tokens of
        `generation` are used. Calls may come in any order; those without tokens are skipped.
        """
        if generation.prompt_token_ids is not None and generation.completion_token_ids is not None:
            call = self._call(request)
            match = call.tree.find(call.path)
            self._remember(call, generation, match[0] if match else None, clean=True)

    def _call(self, request: ChatRequest) -> _ExactCall:
        setting = _setting(request)
        path = conversation_path(request.messages, request.tools, setting.args)
        return _ExactCall(request, setting, self._forest.tree(request.conversation), path)

    async def count_tokens(self, request: ChatRequest) -> int:
        """See Backend."""
        return len(await self._render(request))

    async def models(self) -> list[str]:
        """See Backend."""
        client = self._server.client
        return await client.models(f"{client.base.removesuffix('/v1')}/v1/models")

    async def close(self) -> None:
        """See Backend."""
        await self._server.client.close()

    # --- the prompt -------------------------------------------------------------------------------------

    async def _prompt(self, call: _ExactCall) -> _ExactPrompt:
        request = call.request
        match = call.tree.find(call.path)
        if match is None:
            return _ExactPrompt(ids=await self._render(request), origin="root", reason=_root_reason(call))
        node, depth = match
        before = node.ids
        new = request.messages[depth:]
        try:
            suffix = await self._suffixes.after(before, node.tool_calls, new, call.setting, thought=node.thought)
        except (HistoryRewritten, BackendError) as error:
            if isinstance(error, BackendError) and error.status != 400:
                raise
            reason = str(error) if isinstance(error, HistoryRewritten) else "refused"
            return _ExactPrompt(ids=await self._render(request), origin="rendered anew", reason=reason, node=node)
        ids = before[: len(before) - suffix.dropped] + suffix.suffix
        return _ExactPrompt(ids=ids, origin="extended", node=node, echo=request.messages[depth - 1], suffix=suffix)

    async def _render(self, request: ChatRequest) -> list[int]:
        args = _setting(request).args
        return await self._codec.render(request.messages, request.tools, template_args=args)

    async def _audit(self, call: _ExactCall, prompt: _ExactPrompt) -> dict[str, Any]:
        audit: dict[str, Any] = {
            "mode": "exact",
            "prompt": prompt.origin,
            "reason": prompt.reason,
            "mismatch": None,
        }
        node, echo, suffix = prompt.node, prompt.echo, prompt.suffix
        if node is None:
            return audit
        if echo is None or suffix is None:
            return audit | {"mismatch": prompt.reason}
        try:
            audit["mismatch"] = await _turn_mismatch(self._codec, self._suffixes, call.setting, node, echo, suffix)
            if _compares_whole_prompt(node.turns + 1):
                audit["canonical"] = await self._render(call.request) == prompt.ids
        except BackendError:
            return audit | {"mismatch": "refused"}
        if audit.get("canonical") is False and node.canonical and audit["mismatch"] is None:
            audit["mismatch"] = "template"
        return audit

    # --- sampling ---------------------------------------------------------------------------------------

    async def _sampling(self, request: ChatRequest, prompt: int) -> tuple[dict[str, Any], list[str]]:
        """Return the parameters to send, and the names of those that the server does not support.

        Raises ContextOverflow.
        """
        parameters = dict(request.sampling)
        if (length := parameters.pop("max_completion_tokens", None)) is not None:
            parameters["max_tokens"] = length
        limit = await self._codec.context_length()
        max_tokens = parameters.get("max_tokens")
        if limit is None:
            parameters["max_tokens"] = ANSWER_TOKENS if max_tokens is None else max_tokens
        elif prompt >= limit:
            raise ContextOverflow(prompt, limit)
        else:
            parameters["max_tokens"] = limit - prompt if max_tokens is None else min(max_tokens, limit - prompt)
        left_out = sorted(parameters.keys() - self._server.parameters.keys())
        if request.tool_choice not in (None, "auto", "none"):
            left_out.append("tool_choice")
        return {name: value for name, value in parameters.items() if name not in left_out}, left_out

    async def _sample(
        self, prompt: list[int], sampling: dict[str, Any], schema: dict[str, Any] | None
    ) -> SampledTokens:
        try:
            return await self._server.generate(prompt, sampling, schema)
        except BackendError as error:
            # The server may use a shorter context than the model has.
            refused = error.status == 400 and is_overflow(str(error))
            if not refused or (limit := reported_context_length(str(error))) is None:
                raise
        room = limit - len(prompt)
        if not 0 < room < sampling["max_tokens"]:
            raise ContextOverflow(len(prompt), limit)
        return await self._server.generate(prompt, sampling | {"max_tokens": room}, schema)

    async def _generation(self, call: _ExactCall, prompt: _ExactPrompt, sampled: SampledTokens) -> Generation:
        parsed = await self._parse(call, sampled)
        calls = parsed.tool_calls[:1] if call.request.parallel_tool_calls is False else parsed.tool_calls
        calls = tuple(structs.replace(call, id=f"toolu_{secrets.token_hex(12)}") for call in calls)
        called = bool(calls) and sampled.finish_reason == "stop"
        return Generation(
            model=self.model,
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if called else sampled.finish_reason,
            stop=sampled.stop,
            usage=Usage(
                prompt_tokens=len(prompt.ids),
                completion_tokens=len(sampled.ids),
                cached_tokens=min(sampled.cached_tokens, len(prompt.ids)),
            ),
            prompt_token_ids=tuple(prompt.ids),
            completion_token_ids=tuple(sampled.ids),
            logprobs=None if sampled.logprobs is None else tuple(sampled.logprobs),
            policy_spans=sampled.policy_spans,
            sampling=sampled.sent,
        )

    async def _parse(self, call: _ExactCall, sampled: SampledTokens) -> ParsedOutput:
        text = await self._codec.decode(sampled.ids)
        if sampled.stop is not None and sampled.stop in text:
            text = text[: text.rindex(sampled.stop)]
        traits = await self._suffixes.traits(call.setting)
        tools = () if call.request.tool_choice == "none" else call.request.tools
        return self._format.parse(text, tools, thinking_open=traits.thinking_open)

    # --- memory -----------------------------------------------------------------------------------------

    def _remember(
        self, call: _ExactCall, generation: Generation, parent: TokenNode | None, *, clean: bool
    ) -> None:
        answer = call.path.then(_message(generation))
        prompt, completion = generation.prompt_token_ids or (), generation.completion_token_ids or ()
        node = call.tree.add(call.path, answer, prompt, completion, parent=parent)
        # A prompt that was rendered as a whole continues no stored tokens, so its thinking is what its messages
        # have.
        past = parent if node.turns else None
        thought = past.thought if past else any(message.get("reasoning") for message in call.request.messages)
        node.tool_calls = generation.tool_calls
        node.reasoned = bool(generation.reasoning)
        node.thought = node.reasoned or thought
        node.canonical = clean and (past is None or past.canonical)
        self._forest.shrink()


def _setting(request: ChatRequest) -> TemplateSettings:
    thinking = request.enable_thinking
    return TemplateSettings({} if thinking is None else {"enable_thinking": thinking}, bool(request.tools))


def _root_reason(call: _ExactCall) -> str:
    """Return why the call continues no conversation whose tokens are stored here."""
    if call.tree.setting is None:
        return "first call"
    if call.tree.setting != call.path.setting:
        return "tools or system changed"
    has_assistant_turn = any(message.get("role") == "assistant" for message in call.request.messages)
    return "history rewritten" if has_assistant_turn else "new conversation"


def _schema(request: ChatRequest) -> dict[str, Any] | None:
    """Return the JSON schema that the answer must satisfy, or None."""
    response_format: Mapping[str, Any] = request.response_format or {}
    if response_format.get("type") == "json_object":
        return {"type": "object"}
    described: Mapping[str, Any] = response_format.get("json_schema") or {}
    return described.get("schema")


def _message(generation: Generation) -> dict[str, Any]:
    """Return an answer as a chat message."""
    return {
        "role": "assistant",
        "content": generation.text,
        "tool_calls": [{"id": call.id} for call in generation.tool_calls],
    }
