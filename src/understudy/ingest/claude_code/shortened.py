"""Prompts that were shorter than the log explains, by the usage that the API reported.

Some versions (seen: 2.0.76 to 2.1.17) clear old tool results without a record of it, often most of the prompt, and
1.0.x replaces the whole conversation by a summary. A request repeats what was sent before, so its prompt is not
shorter than that of the response before it, but for

- the thinking of earlier responses, which some models are no longer shown once the user has written again;
- a little that the program adds to a request and does not log;
- other tools and instructions, where the program may have been ended and started again in between.

In some 18,500 requests of public sessions that followed tool results only, the prompt was either longer than the
one before, or shorter by more than 24,000 tokens, in versions that log no such clearing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.continuity import (
    ADDED_TOKENS,
    FEWEST_BYTES_PER_TOKEN,
    PromptUsage,
    response_of,
    usage_of,
)
from understudy.ingest.claude_code.records import ClaudeBlock
from understudy.ingest.claude_code.tree import ClaudeResponse
from understudy.ingest.claude_code.versions import VersionBehaviour
from understudy.ingest.trace import TraceNode

CLEARED_NOT_LOGGED = "cleared_not_logged"
"""The note on states with content that the model was no longer sent, such as old tool results."""
COMPACTION_NOT_LOGGED = "compaction_not_logged"
"""The note on states of which the model was sent less than half: a summary has replaced them."""

_THINKING = frozenset({"thinking", "redacted_thinking"})


class _Before(Struct, frozen=True):
    """What precedes a node on its path.

    `response`: the last response, or None if there is none, or if what was sent of it has changed since, which the
    log tells. `prompts`: the user wrote after it, `same_run`: in the same run of the program. `thinking`: the most
    tokens that the thinking of all responses can have; infinite where the log hides it.
    """

    response: ClaudeResponse | None = None
    prompts: bool = False
    same_run: bool = True
    thinking: float = 0.0


def shortened_prompts(nodes: Sequence[TraceNode], behaviour: VersionBehaviour) -> dict[int, str]:
    """Return the nodes of responses whose prompt was shorter than the log explains, each with its note."""
    notes: dict[int, str] = {}
    before: list[_Before] = []
    thinking: dict[str, float] = {}  # by key of a response
    for index, node in enumerate(nodes):
        above = before[node.parent] if node.parent >= 0 else _Before()
        response = response_of(node.body)
        if response is None:
            sent = tree.sent_record(node.body)
            if sent is not None and sent.cleared:
                above = _Before(thinking=above.thinking)
            elif sent is not None and not tree.result_ids(sent.record):
                same_run = above.same_run and bool(bytes(sent.record.todos))
                above = _Before(above.response, True, same_run, above.thinking)
        else:
            is_first = node.body is response and response.node == index
            if is_first and above.response is not None and _is_shorter(above, above.response, response):
                replaced = not behaviour.logs_compactions and _is_halved(above.response, response)
                notes[index] = COMPACTION_NOT_LOGGED if replaced else CLEARED_NOT_LOGGED
            if response.key not in thinking:
                thinking[response.key] = _thinking_tokens(response)
            above = _Before(response if is_first else None, thinking=above.thinking + thinking[response.key])
        before.append(above)
    return notes


def _is_shorter(before: _Before, previous: ClaudeResponse, response: ClaudeResponse) -> bool:
    """Return whether the prompt of a response after `previous` was shorter than expected."""
    tokens_before, tokens = _tokens(previous), _tokens(response)
    if tokens_before is None or tokens is None or _model(previous) != _model(response):
        return False
    explained = ADDED_TOKENS[before.same_run] + (before.thinking if before.prompts else 0)
    return tokens_before - tokens > explained


def _is_halved(previous: ClaudeResponse, response: ClaudeResponse) -> bool:
    tokens_before, tokens = _tokens(previous), _tokens(response)
    return tokens_before is not None and tokens is not None and tokens < tokens_before / 2


def _tokens(response: ClaudeResponse) -> int | None:
    """Return how long a response's prompt was, or None where the log does not say it.

    A server that reports no cache may count only what it had not cached, so that the figures cannot be compared.
    """
    usage: PromptUsage | None = usage_of(response)
    return usage.prompt_tokens() if usage is not None and usage.cached_tokens() else None


def _model(response: ClaudeResponse) -> str | None:
    message = response.records[0].message
    return message.model if message is not None else None


def _thinking_tokens(response: ClaudeResponse) -> float:
    """Return the most tokens that a response's thinking can have."""
    size = 0
    for record in response.records:
        for block in (record.message.content if record.message is not None else None) or ():
            if isinstance(block, ClaudeBlock) and block.type in _THINKING:
                if len(bytes(block.thinking)) <= len('""'):
                    return float("inf")
                size += len(bytes(block.thinking))
    return size / FEWEST_BYTES_PER_TOKEN
