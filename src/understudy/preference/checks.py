"""A preference pair, and the checks that it must pass: its lengths, the order of its messages, and that it is no
duplicate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from understudy.ingest.tool_lists import ToolsSource
from understudy.ingest.trace import Message, TurnAction, text_of
from understudy.preference.equivalence import digest, effect_of, without_volatile_parts
from understudy.preference.normalise import UNKNOWN_DIRECTORY, WorkingDirectory, has_unreadable_call


class Pair(Struct, frozen=True, kw_only=True):
    """Two actions in the same state of a conversation, of which `chosen` is the better. `evidence` says why, in
    JSON types.

    `origin` is "replay" (teachers against the student's turn; `state_id` names it) or "rollouts" (a solved attempt
    against an unsolved one). `group` is the project or the task, which must not be divided between training and
    test rows. `model` and `family` are those of the rejected action. `tools_source` says where `tools` are from.
    """

    pair_id: str
    origin: Literal["replay", "rollouts"]
    group: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None
    chosen: TurnAction
    rejected: TurnAction
    state_id: str | None = None
    model: str | None = None
    family: str | None = None
    evidence: dict[str, Any] = field(default_factory=dict[str, Any])
    tools_source: ToolsSource | None = None


Thinking = Literal["as-logged", "both", "strip", "only-when-both"]
"""What is done with the thinking of a pair's two answers, or of all answers that a row teaches.

`as-logged`: it stays where the log has it. `both`: pairs and rows in which an answer has no thinking are left out.
`strip`: it is removed. `only-when-both`: it stays if every answer has some, otherwise it is removed from all.
"""

NO_THINKING = "an answer without thinking (--thinking both)"
LOSSY = "lossy states (--include-lossy takes them in)"
NO_CONSENSUS = "the teachers do not agree"
SAME = "the same in substance"
EMPTY = "an action that does nothing"
UNREADABLE = "a tool call whose arguments cannot be read"
UNKNOWN_TOOL = "a tool that was not offered"
LONG_PROMPT = "a prompt that is too long"
LONG_ANSWER = "an answer that is too long"
UNEVEN = "answers of too different length"
TEMPLATE = "messages that no chat template takes"
NOT_RENDERED = "not as the tokenizer's chat template wants it"
DUPLICATE = "duplicates"
NEAR_DUPLICATE = "near-duplicates"
VOTED_DOWN = "doubted by votes"

_LAST_MESSAGES = 2
"""How many messages at the end of a prompt make pairs with the same actions near-duplicates."""


class Limits(Struct, frozen=True, kw_only=True):
    """The maximum lengths of a pair, in characters; in tokens if a tokenizer is given.

    `prompt_chars` and `side_chars` are for the messages and for each answer, including thinking and tool calls;
    `chars` and `tokens` for the messages with the longer answer. An answer of more than `even_chars` characters
    may be at most `ratio` times as long as the other one.
    """

    prompt_chars: int = 1_000_000
    side_chars: int = 100_000
    chars: int | None = None
    tokens: int | None = None
    even_chars: int = 2_000
    ratio: float = 10.0


class Template(Protocol):
    """A tokenizer with its chat template."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> Sequence[int] | None:
        """Return the messages as tokens; None if the template rejects them."""
        ...


class PairCounts(Struct, kw_only=True):
    """Counts of comparisons: of states of replays, or of solved with unsolved rollouts.

    `compared` is the sum of `pairs` and of `left_out`, which counts by reason. `answers` counts teachers' answers
    that are not proposals, by reason; `notes` counts rollouts and tasks that were not compared, by reason.
    """

    compared: int = 0
    pairs: int = 0
    left_out: Counter[str] = field(default_factory=Counter[str])
    answers: Counter[str] = field(default_factory=Counter[str])
    notes: Counter[str] = field(default_factory=Counter[str])


class Checks:
    """Checks pairs. It remembers the pairs that passed, so that a duplicate fails.

    `doubted` are the ids of pairs that people voted down, which fail unless `honours_votes` is false.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        template: Template | None = None,
        thinking: Thinking = "only-when-both",
        *,
        honours_votes: bool = True,
    ) -> None:
        self.honours_votes = honours_votes
        self.doubted = frozenset[str]()
        self.limits = limits or Limits()
        self.template = template
        self.thinking: Thinking = thinking
        self._seen: set[bytes] = set()

    def passed(self, pair: Pair, location: WorkingDirectory = UNKNOWN_DIRECTORY) -> Pair | str:
        """Return the pair, with or without thinking as configured, or the reason why it is left out."""
        keeps = keeps_thinking([bool(pair.chosen.thinking), bool(pair.rejected.thinking)], self.thinking)
        if keeps is None:
            return NO_THINKING
        if not keeps:
            chosen, rejected = (replace(action, thinking=None) for action in (pair.chosen, pair.rejected))
            pair = replace(pair, chosen=chosen, rejected=rejected)
        if self.honours_votes and pair.pair_id in self.doubted:
            return VOTED_DOWN
        return self._flaw(pair, location) or pair

    def _flaw(self, pair: Pair, location: WorkingDirectory) -> str | None:
        return (
            _content_flaw(pair)
            or _length_flaw(pair, self.limits)
            or (None if in_turns(pair.messages) else TEMPLATE)
            or self._template_flaw(pair)
            or self._duplicate_flaw(pair, location)
        )

    def _template_flaw(self, pair: Pair) -> str | None:
        if self.template is None:
            return None
        tools = pair.tools or ()
        prompt = self.template.render(pair.messages, tools, generation_prompt=True)
        if prompt is None:
            return NOT_RENDERED
        for action in (pair.chosen, pair.rejected):
            rendered = self.template.render([*pair.messages, message_of(action)], tools, generation_prompt=False)
            if rendered is None or len(rendered) <= len(prompt) or list(rendered[: len(prompt)]) != list(prompt):
                return NOT_RENDERED
            if self.limits.tokens is not None and len(rendered) > self.limits.tokens:
                return LONG_PROMPT
        return None

    def _duplicate_flaw(self, pair: Pair, location: WorkingDirectory) -> str | None:
        actions = [repr(effect_of(action, location).key) for action in (pair.chosen, pair.rejected)]
        exact_digest = digest(["whole", *map(_plain, pair.messages), *actions])
        near_digest = digest(
            [
                "near",
                *(without_volatile_parts(_plain(message)) for message in pair.messages[-_LAST_MESSAGES:]),
                *actions,
            ]
        )
        if exact_digest in self._seen:
            return DUPLICATE
        if near_digest in self._seen:
            return NEAR_DUPLICATE
        self._seen |= {exact_digest, near_digest}
        return None


def keeps_thinking(thoughts: Sequence[bool], choice: Thinking) -> bool | None:
    """Return whether the answers keep their thinking, depending on which of them have some; None if they must be
    left out.
    """
    if choice == "both":
        return True if all(thoughts) else None
    return choice == "as-logged" or (choice == "only-when-both" and all(thoughts))


def in_turns(messages: Sequence[Message]) -> bool:
    """Return whether messages are in an order that chat templates accept, up to the assistant's next turn.

    A system message may come first. Then the user begins, user and assistant alternate, and each tool call is
    followed by its only result. The last message is not the assistant's.
    """
    turns = list(messages[1:] if messages and messages[0].get("role") == "system" else messages)
    last_role, waiting = "", list[str]()
    for message in turns:
        role = message.get("role")
        if role == "tool":
            if message.get("tool_call_id") not in waiting:
                return False
            waiting.remove(str(message["tool_call_id"]))
        elif (
            waiting or role == last_role or role not in ("user", "assistant") or (not last_role and role != "user")
        ):
            return False
        elif role == "assistant":
            waiting = [str(call.get("id")) for call in message.get("tool_calls") or ()]
            if len(set(waiting)) < len(waiting) or not (waiting or text_of(message.get("content"))):
                return False
        last_role = str(role)
    return bool(turns) and last_role != "assistant" and not waiting


def message_of(action: TurnAction) -> Message:
    """Return an action as an assistant message, with thinking in `reasoning_content`."""
    message: Message = {"role": "assistant", "content": action.content or ""}
    if action.thinking:
        message["reasoning_content"] = action.thinking
    if action.tool_calls:
        message["tool_calls"] = action.tool_calls
    return message


def length_of(messages: Sequence[Mapping[str, Any]]) -> int:
    """Return the number of characters of messages: texts, thinking, names and arguments of tool calls."""
    total = 0
    for message in messages:
        total += len(text_of(message.get("content"))) + len(message.get("reasoning_content") or "")
        for call in message.get("tool_calls") or ():
            function: dict[str, Any] = call.get("function") or {}
            total += len(str(function.get("name"))) + len(str(function.get("arguments")))
    return total


def _content_flaw(pair: Pair) -> str | None:
    for action in (pair.chosen, pair.rejected):
        if not action.tool_calls and not (action.content or "").strip():
            return EMPTY
        if has_unreadable_call(action):
            return UNREADABLE
    return None


def _length_flaw(pair: Pair, limits: Limits) -> str | None:
    prompt = length_of(pair.messages)
    few, many = sorted(length_of([message_of(action)]) for action in (pair.chosen, pair.rejected))
    if prompt > limits.prompt_chars or (limits.chars is not None and prompt + many > limits.chars):
        return LONG_PROMPT
    if many > limits.side_chars:
        return LONG_ANSWER
    return UNEVEN if many > limits.even_chars and many > limits.ratio * few else None


def _plain(message: Message) -> str:
    """Return a message as text, without the ids of its tool calls."""
    fields = {key: value for key, value in message.items() if key not in ("tool_call_id", "tool_calls")}
    calls: list[Any] = [call.get("function") for call in message.get("tool_calls") or ()]
    try:
        return msgspec.json.encode((fields, calls), order="deterministic").decode()
    except (ValueError, TypeError, OverflowError):
        return repr((fields, calls))
