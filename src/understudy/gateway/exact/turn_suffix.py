"""Where one turn ends and the next begins: what a chat template writes between sampled tokens and new messages.

All that is known of a template is how it renders small dummy conversations. Its text for new messages is the
difference that they make to such a conversation; its end of an assistant's turn is the common end of two turns
with different texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.gateway.exact.codec import Codec
from understudy.gateway.exact.parsers import opens_thinking
from understudy.wire.model import ToolCall

Turn = Mapping[str, Any]
Calls = Sequence[ToolCall]

USER: dict[str, Any] = {"role": "user", "content": "0"}
"""The first message of every dummy conversation."""

_TOOL_NAME = "nothing_0f3c"
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": _TOOL_NAME, "description": "", "parameters": {"type": "object", "properties": {}}},
}


class TemplateSettings(Struct, frozen=True):
    """What a template depends on besides the messages: further variables, and whether there are tools."""

    args: Mapping[str, Any]
    tools: bool


class TemplateTraits(Struct, frozen=True):
    """How a template writes an assistant's turn. `opening` is the generation prompt, `close` what ends the turn.

    `markers` are tokens that end a turn because they begin the next one, as with GLM. `shows_thinking`: the last
    turn is written with its reasoning. `thinking_open`: the generation prompt opens a thinking block.
    `repeats_tools`: the tools are written again with each new message.
    """

    opening: tuple[int, ...]
    close: tuple[int, ...]
    markers: frozenset[int]
    shows_thinking: bool
    thinking_open: bool
    repeats_tools: bool


class TurnSuffix(Struct, frozen=True):
    """What follows sampled tokens: the last `dropped` of them are replaced by `suffix`.

    `ended` is how many of the last sampled tokens only end the turn; 0 if the turn was cut off.
    """

    suffix: list[int]
    ended: int
    dropped: int = 0


class HistoryRewritten(Exception):
    """The template writes earlier turns differently once there are new messages. The text is the mismatch."""


class TurnSuffixes:
    """Computes the turn suffixes of a template, which `codec` renders."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._traits: dict[bytes, asyncio.Future[TemplateTraits]] = {}

    async def traits(self, setting: TemplateSettings) -> TemplateTraits:
        """Return how the template writes turns, determined once. Raises BackendError if it cannot be rendered."""
        key = msgspec.json.encode(setting, order="deterministic")
        learning = self._traits.get(key)
        if learning is None or (learning.done() and (learning.cancelled() or learning.exception())):
            learning = self._traits[key] = asyncio.ensure_future(self._learn(setting))
        return await asyncio.shield(learning)

    async def after(
        self,
        ids: Sequence[int],
        tool_calls: Calls,
        new: Sequence[Turn],
        setting: TemplateSettings,
        *,
        thought: bool,
    ) -> TurnSuffix:
        """Return the suffix for `ids`, which end in a sampled turn with `tool_calls`, when the messages `new`
        follow.

        `thought`: there is thinking among `ids`. Raises HistoryRewritten if no suffix can work, because the
        template changes earlier turns (for example drops their thinking), and BackendError if it cannot be
        rendered.
        """
        traits = await self.traits(setting)
        if traits.repeats_tools:
            raise HistoryRewritten("template")
        if thought and not traits.shows_thinking and any(message["role"] == "user" for message in new):
            raise HistoryRewritten("thinking stripped")
        turn = _assistant("0", tool_calls) | {"reasoning": "0"}
        before, after = await asyncio.gather(
            self.render([USER, turn], setting, generation_prompt=False), self.render([USER, turn, *new], setting)
        )
        close = list(traits.close)
        if after[: len(before)] == before and before[len(before) - len(close) :] == close:
            return _suffix_after(ids, traits, after[len(before) :])
        if thought:
            raise HistoryRewritten("thinking stripped")
        return _suffix_after(ids, traits, await self._difference(tool_calls, new, close, setting))

    async def _difference(
        self, tool_calls: Calls, new: Sequence[Turn], close: list[int], setting: TemplateSettings
    ) -> list[int]:
        """Return what `new` adds, for templates that write the last turn differently from earlier ones."""
        turns = [_assistant(text, tool_calls) for text in "01"]
        without_new = [await self.render([USER, turn], setting, generation_prompt=False) for turn in turns]
        with_new = [await self.render([USER, turn, *new], setting) for turn in turns]
        ending, following = _common_end(*without_new), _common_end(*with_new)
        if following[: len(ending)] != ending or ending[len(ending) - len(close) :] != close:
            raise HistoryRewritten("template")
        return following[len(ending) :]

    async def _learn(self, setting: TemplateSettings) -> TemplateTraits:
        user, opened, first_answer, second_answer, thinking = await asyncio.gather(
            self.render([USER], setting, generation_prompt=False),
            self.render([USER], setting),
            self.render([USER, _assistant("0")], setting, generation_prompt=False),
            self.render([USER, _assistant("1")], setting, generation_prompt=False),
            self.render([USER, _assistant("0") | {"reasoning": "0"}], setting, generation_prompt=False),
        )
        opening = opened[len(user) :] if opened[: len(user)] == user else []
        close = _common_end(first_answer, second_answer)
        following = await self._following(close, setting)
        added = [await self._codec.decode(ids) for ids in following]
        return TemplateTraits(
            opening=tuple(opening),
            close=tuple(close),
            markers=frozenset() if close else frozenset(ids[0] for ids in following if ids),
            shows_thinking=first_answer != thinking,
            thinking_open=opens_thinking(await self._codec.decode(opening)),
            repeats_tools=any(_TOOL_NAME in text for text in added),
        )

    async def _following(self, close: list[int], setting: TemplateSettings) -> list[list[int]]:
        """Return what a user message adds, and what a tool result does, if the template accepts one."""
        call = ToolCall("call_0", "f", "{}")
        added: list[list[int]] = []
        for calls, new in (((), USER), ((call,), {"role": "tool", "tool_call_id": call.id, "content": "0"})):
            try:
                added.append(await self._difference(calls, [new], close, setting))
            except HistoryRewritten:
                continue
            except BackendError as error:
                if error.status != 400:
                    raise
        return added

    async def render(
        self, messages: Sequence[Turn], setting: TemplateSettings, *, generation_prompt: bool = True
    ) -> list[int]:
        """Return the tokens of a dummy conversation. Raises BackendError."""
        return await self._codec.render(
            [dict(message) for message in messages],
            [_TOOL] if setting.tools else [],
            generation_prompt=generation_prompt,
            template_args=setting.args,
        )


def _assistant(text: str, tool_calls: Calls = ()) -> dict[str, Any]:
    """Return a dummy turn.

    Calls keep their names and ids, because some templates repeat these with the results.
    """
    turn: dict[str, Any] = {"role": "assistant", "content": text}
    if tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "{}"}}
            for call in tool_calls
        ]
    return turn


def _suffix_after(ids: Sequence[int], traits: TemplateTraits, new: list[int]) -> TurnSuffix:
    close = traits.close
    if not close and ids and ids[-1] in traits.markers:
        # The model sampled the token that begins the next turn; the template may begin it with a different one.
        same = new[:1] == [ids[-1]]
        return TurnSuffix(new[1:] if same else new, ended=1, dropped=0 if same else 1)
    ended = next((size for size in range(len(close), 0, -1) if tuple(ids[-size:]) == close[:size]), 0)
    return TurnSuffix([*close[ended:], *new], ended)


def _common_end(first: Sequence[int], second: Sequence[int]) -> list[int]:
    pairs = zip(reversed(first), reversed(second), strict=False)
    common = [token for token, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return common[::-1]
