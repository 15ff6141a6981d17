"""Detects prompts that were shorter than the log explains, by the usage that the API reported.

Some versions (seen: 2.0.76 to 2.1.17) clear old tool results without a record of it, often most of the prompt, and
1.0.x replaces the whole conversation by a summary. A request repeats what was sent before, so its prompt is not
shorter than that of the response before it, but for

- the thinking of earlier responses, which some models are no longer shown once the user has written again;
- a little that the program adds to a request and does not log;
- other tools and instructions, where the program may have been ended and started again in between.

In some 18,500 requests of public sessions that followed tool results only, the prompt was either longer than the
one before, or shorter by more than 24,000 tokens, in versions that log no such clearing.

A server that reports no cache gives no such figures. After so many results that the program may have cleared
some, its states are uncertain, unless its figures grow and are large enough for all of the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.continuity import (
    ADDED_TOKENS,
    MAX_BYTES_PER_TOKEN,
    MIN_BYTES_PER_TOKEN,
    PromptUsage,
    block_bytes,
    response_of,
    text_bytes,
    usage_of,
)
from understudy.ingest.claude_code.records import ClaudeBlock, ClaudeRecord
from understudy.ingest.claude_code.tree import ClaudeResponse, SentRecord
from understudy.ingest.claude_code.versions import VersionBehaviour
from understudy.ingest.trace import TraceNode

CLEARED_NOT_LOGGED = "cleared_not_logged"
"""The note on states with content that the model was no longer sent, such as old tool results."""
COMPACTION_NOT_LOGGED = "compaction_not_logged"
"""The note on states of which the model was sent less than half: a summary has replaced them."""

CLEARING_UNKNOWN = "clearing_unknown"
"""The note on states for which the log does not show whether old tool results were still sent."""
_CLEARABLE_BYTES = 60_000 * MIN_BYTES_PER_TOKEN
"""The fewest bytes of results of which some can be cleared: 40,000 tokens are kept, 20,000 or more are not."""

_MIN_ADDED_TOKENS = min(ADDED_TOKENS.values())
_THINKING = frozenset({"thinking", "redacted_thinking"})


class _Preceding(Struct, frozen=True, gc=False):
    """The last response before a node on its path, with its usage; what was sent of it has not changed since.

    `prompts`: the user wrote after it, `same_run`: in the same run of the program.
    """

    response: ClaudeResponse
    usage: PromptUsage | None
    prompts: bool = False
    same_run: bool = True


class _Results(Struct, frozen=True, gc=False):
    """The tool results on a path: their bytes, as far as they are still sent.

    `measured`: a response on the path reported a cache; results are counted until then. `tokens`: what the last
    response reported.
    """

    size: int = 0
    tokens: int = 0
    measured: bool = False


def shortened_prompts(
    nodes: Sequence[TraceNode], responses: Iterable[ClaudeResponse], behaviour: VersionBehaviour
) -> dict[int, str]:
    """Return a note for each node of a response whose prompt was, or may be, shorter than the log explains.

    `responses` are those of the nodes, in their order. Every session is checked, so a path is looked at only for a
    response whose own usage leaves a doubt.
    """
    notes: dict[int, str] = {}
    paths = _Paths(nodes)
    longest = 0  # the most tokens of a prompt so far, on any path
    may_be_cleared: bool | None = None
    for response in responses:
        usage = paths.usage(response)
        tokens = _tokens(usage)
        if tokens is None:
            if may_be_cleared is None:
                may_be_cleared = behaviour.clears_results and _most_result_bytes(nodes) >= _CLEARABLE_BYTES
            if may_be_cleared and _may_be_cleared(paths.results(nodes[response.node].parent), usage):
                notes[response.node] = CLEARING_UNKNOWN
        elif longest - tokens <= _MIN_ADDED_TOKENS:
            longest = max(longest, tokens)
        elif (preceding := paths.preceding(response)) is not None and paths.is_shorter(
            preceding, response, tokens
        ):
            replaced = not behaviour.logs_compactions and _is_halved(preceding.usage, usage)
            notes[response.node] = COMPACTION_NOT_LOGGED if replaced else CLEARED_NOT_LOGGED
    return notes


def _most_result_bytes(nodes: Sequence[TraceNode]) -> int:
    """Return a number of bytes that the tool results of no path exceed: those of all nodes, with prompts and
    images.
    """
    size = 0
    for node in nodes:
        body = node.body
        record = body if type(body) is ClaudeRecord else body.record if type(body) is SentRecord else None
        content = record.message.content if record is not None and record.message is not None else None
        for block in content if type(content) is list else ():
            size += len(block) if isinstance(block, str) else block_bytes(block)
    return size


def _may_be_cleared(results: _Results, usage: PromptUsage | None) -> bool:
    """Return whether results before a response that reports no cache may have been cleared."""
    if results.size < _CLEARABLE_BYTES or results.measured:
        return False
    tokens = usage.prompt_tokens() if usage is not None else 0
    return tokens < results.tokens or tokens * MAX_BYTES_PER_TOKEN < results.size


class _Paths:
    """Computes what precedes each response on its path. Results are cached by node, so that a session takes linear
    time.
    """

    def __init__(self, nodes: Sequence[TraceNode]) -> None:
        self._nodes = nodes
        self._usages: dict[str, PromptUsage | None] = {}  # by key of a response
        self._preceding: dict[int, _Preceding | None] = {-1: None}  # by node: what precedes the nodes after it
        self._results: dict[int, _Results] = {-1: _Results()}  # by the last node of a path
        self._thinking: dict[int, float] = {-1: 0.0}  # the same: the most tokens of the thinking of all responses

    def usage(self, response: ClaudeResponse) -> PromptUsage | None:
        """Return the usage that the API reported with a response."""
        key = response.key
        if key not in self._usages:
            self._usages[key] = usage_of(response)
        return self._usages[key]

    def preceding(self, response: ClaudeResponse) -> _Preceding | None:
        """Return what precedes a response; None if no response does, or if what was sent of it has changed since,
        which the log tells.
        """
        nodes, visited = self._nodes, self._preceding
        tip = nodes[response.node].parent
        unvisited: list[int] = []
        while tip not in visited and response_of(nodes[tip].body) is None:
            unvisited.append(tip)
            tip = nodes[tip].parent
        if tip not in visited:
            response_before = response_of(nodes[tip].body)
            is_first = (
                response_before is not None and nodes[tip].body is response_before and response_before.node == tip
            )
            visited[tip] = (
                _Preceding(response_before, self.usage(response_before))
                if response_before is not None and is_first
                else None
            )
        preceding = visited[tip]
        for node in reversed(unvisited):
            body = nodes[node].body
            if isinstance(body, SentRecord) and body.cleared:
                preceding = None
            elif preceding is not None and (sent := tree.sent_record(body)) and not tree.result_ids(sent.record):
                same_run = preceding.same_run and bool(len(sent.record.todos))
                preceding = _Preceding(preceding.response, preceding.usage, prompts=True, same_run=same_run)
            visited[node] = preceding
        return preceding

    def is_shorter(self, preceding: _Preceding, response: ClaudeResponse, tokens: int) -> bool:
        """Return whether the prompt of a response, of so many tokens, was shorter than expected."""
        tokens_before = _tokens(preceding.usage)
        if tokens_before is None or _model(preceding.response) != _model(response):
            return False
        unexplained = tokens_before - tokens - ADDED_TOKENS[preceding.same_run]
        if unexplained <= 0 or not preceding.prompts:
            return unexplained > 0
        return unexplained > self._thinking_before(response.node)

    def results(self, tip: int) -> _Results:
        """Return the tool results on the path to a node."""
        nodes, visited = self._nodes, self._results
        unvisited: list[int] = []
        while tip not in visited:
            unvisited.append(tip)
            tip = nodes[tip].parent
        results = visited[tip]
        for node in reversed(unvisited):
            results = visited[node] = self._with_results(results, nodes[node].body)
        return results

    def _with_results(self, results: _Results, body: object) -> _Results:
        if (response := response_of(body)) is not None:
            usage = self.usage(response)
            if usage is None:
                return results
            measured = results.measured or usage.cached_tokens() > 0
            return _Results(results.size, usage.prompt_tokens(), measured)
        if isinstance(body, SentRecord) and body.cleared:
            return _Results(0, results.tokens, results.measured)
        sent = tree.sent_record(body)
        if results.measured or sent is None or not tree.result_ids(sent.record):
            return results
        return _Results(results.size + text_bytes(sent.record), results.tokens, results.measured)

    def _thinking_before(self, node: int) -> float:
        """Return the most tokens that the thinking of all responses above a node can have.

        That is infinite where the log hides it.
        """
        nodes, totals = self._nodes, self._thinking
        unvisited: list[int] = []
        tip = nodes[node].parent
        while tip not in totals:
            unvisited.append(tip)
            tip = nodes[tip].parent
        total = totals[tip]
        for step in reversed(unvisited):
            if (response := response_of(nodes[step].body)) is not None:
                total += _thinking_tokens(response)
            totals[step] = total
        return total


def _is_halved(usage_before: PromptUsage | None, usage: PromptUsage | None) -> bool:
    tokens_before, tokens = _tokens(usage_before), _tokens(usage)
    return tokens_before is not None and tokens is not None and tokens < tokens_before / 2


def _tokens(usage: PromptUsage | None) -> int | None:
    """Return how long a response's prompt was, or None where the log does not say it.

    A server that reports no cache may count only what it had not cached, so that the figures cannot be compared.
    """
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
                if len(block.thinking) <= len('""'):
                    return float("inf")
                size += len(block.thinking)
    return size / MIN_BYTES_PER_TOKEN
