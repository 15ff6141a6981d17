"""Prompts that were shorter than the log explains, by the usage that the API reported.

Some versions (seen: 2.0.76 to 2.1.17) clear old tool results without a record of it, often most of the prompt, and
1.0.x replaces the whole conversation by a summary. A request repeats what was sent before, so its prompt is not
shorter than that of the response before it, but for

- the thinking of earlier responses, which some models are no longer shown once the user has written again;
- a little that the program adds to a request and does not log;
- other tools and instructions, where the program may have been ended and started again in between.

In some 18,500 requests of public sessions that followed tool results only, the prompt was either longer than the
one before, or shorter by more than 24,000 tokens, in versions that log no such clearing.

A server that reports no cache gives no such figures. Behind so many results that the program may have cleared
some, its states are uncertain, unless its figures grow and are large enough for all of the results.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.continuity import (
    ADDED_TOKENS,
    FEWEST_BYTES_PER_TOKEN,
    MOST_BYTES_PER_TOKEN,
    PromptUsage,
    response_of,
    text_bytes,
    usage_of,
)
from understudy.ingest.claude_code.records import ClaudeBlock
from understudy.ingest.claude_code.tree import ClaudeResponse, SentRecord
from understudy.ingest.claude_code.versions import VersionBehaviour
from understudy.ingest.trace import TraceNode

CLEARED_NOT_LOGGED = "cleared_not_logged"
"""The note on states with content that the model was no longer sent, such as old tool results."""
COMPACTION_NOT_LOGGED = "compaction_not_logged"
"""The note on states of which the model was sent less than half: a summary has replaced them."""

CLEARING_UNKNOWN = "clearing_unknown"
"""The note on states of which nothing tells whether old tool results were still sent."""
_CLEARABLE_BYTES = 60_000 * FEWEST_BYTES_PER_TOKEN
"""The fewest bytes of results of which some can be cleared: 40,000 tokens are kept, 20,000 or more are not."""

_THINKING = frozenset({"thinking", "redacted_thinking"})


class _Before(Struct, frozen=True, gc=False):
    """What precedes a node on its path.

    `response`: the last response, or None if there is none, or if what was sent of it has changed since, which the
    log tells; `usage`: its usage. `prompts`: the user wrote after it, `same_run`: in the same run of the program.
    `measured`: a response reported a cache. Until then, `results` are the bytes of all tool results that are sent,
    and `tokens` what the last response reported.
    """

    response: ClaudeResponse | None = None
    usage: PromptUsage | None = None
    prompts: bool = False
    same_run: bool = True
    measured: bool = False
    results: int = 0
    tokens: int = 0


_ROOT = _Before()


def shortened_prompts(nodes: Sequence[TraceNode], behaviour: VersionBehaviour) -> dict[int, str]:
    """Return a note for each node of a response whose prompt was, or may be, shorter than the log explains.

    It looks at every node of every session, so what few of them need is found out only for these.
    """
    notes: dict[int, str] = {}
    before: list[_Before] = []
    usages: dict[str, PromptUsage | None] = {}  # by key of a response
    thinking: dict[int, float] = {}
    for index, node in enumerate(nodes):
        above = before[node.parent] if node.parent >= 0 else _ROOT
        body = node.body
        response = response_of(body)
        if response is None:
            if isinstance(body, SentRecord) and body.cleared:
                above = replace(above, response=None, usage=None, prompts=False, same_run=True, results=0)
            elif (sent := tree.sent_record(body)) is not None:
                if not tree.result_ids(sent.record):
                    same_run = above.same_run and bool(bytes(sent.record.todos))
                    above = replace(above, prompts=True, same_run=same_run)
                elif not above.measured:
                    above = replace(above, results=above.results + text_bytes(sent.record))
        else:
            if response.key not in usages:
                usages[response.key] = usage_of(response)
            usage = usages[response.key]
            is_first = body is response and response.node == index
            if (
                is_first
                and above.response is not None
                and _is_shorter(nodes, index, above, response, usage, thinking)
            ):
                replaced = not behaviour.logs_compactions and _is_halved(above.usage, usage)
                notes[index] = COMPACTION_NOT_LOGGED if replaced else CLEARED_NOT_LOGGED
            elif is_first and behaviour.clears_results and _may_be_cleared(above, usage):
                notes[index] = CLEARING_UNKNOWN
            above = _Before(
                response if is_first else None,
                usage if is_first else None,
                measured=above.measured or (usage is not None and usage.cached_tokens() > 0),
                results=above.results,
                tokens=usage.prompt_tokens() if usage is not None else above.tokens,
            )
        before.append(above)
    return notes


def _may_be_cleared(before: _Before, usage: PromptUsage | None) -> bool:
    """Return whether results before a response may have been cleared, of which no figure of a cache would tell."""
    if before.results < _CLEARABLE_BYTES or before.measured:
        return False
    if usage is not None and usage.cached_tokens():
        return False
    tokens = usage.prompt_tokens() if usage is not None else 0
    return tokens < before.tokens or tokens * MOST_BYTES_PER_TOKEN < before.results


def _is_shorter(
    nodes: Sequence[TraceNode],
    index: int,
    before: _Before,
    response: ClaudeResponse,
    usage: PromptUsage | None,
    thinking: dict[int, float],
) -> bool:
    """Return whether the prompt of the response at a node was shorter than expected.

    `thinking` is the cache of `_thinking_before`.
    """
    assert before.response is not None
    tokens_before, tokens = _tokens(before.usage), _tokens(usage)
    if tokens_before is None or tokens is None or _model(before.response) != _model(response):
        return False
    unexplained = tokens_before - tokens - ADDED_TOKENS[before.same_run]
    if unexplained <= 0 or not before.prompts:
        return unexplained > 0
    return unexplained > _thinking_before(nodes, index, thinking)


def _is_halved(before: PromptUsage | None, usage: PromptUsage | None) -> bool:
    tokens_before, tokens = _tokens(before), _tokens(usage)
    return tokens_before is not None and tokens is not None and tokens < tokens_before / 2


def _tokens(usage: PromptUsage | None) -> int | None:
    """Return how long a response's prompt was, or None where the log does not say it.

    A server that reports no cache may count only what it had not cached, so that the figures cannot be compared.
    """
    return usage.prompt_tokens() if usage is not None and usage.cached_tokens() else None


def _thinking_before(nodes: Sequence[TraceNode], index: int, sums: dict[int, float]) -> float:
    """Return the most tokens that the thinking of all responses above a node can have.

    That is infinite where the log hides it. `sums` are those up to and with a node, so that each is added up once.
    """
    above: list[int] = []
    at = nodes[index].parent
    while at >= 0 and at not in sums:
        above.append(at)
        at = nodes[at].parent
    total = sums[at] if at >= 0 else 0.0
    for node in reversed(above):
        if (response := response_of(nodes[node].body)) is not None:
            total += _thinking_tokens(response)
        sums[node] = total
    return total


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
