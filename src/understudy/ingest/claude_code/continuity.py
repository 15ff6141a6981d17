"""Detects where a session may have been ended and resumed without a record of it in the log.

Some versions follow `parentUuid` only when they resume, and so lose the parallel calls whose results hang on other
records (`VersionBehaviour.resumes_by_parent`). Many logs do not record a `/resume`. After such calls, states are
therefore uncertain from the next prompt on, unless the usage that the API reported for that prompt shows that the
calls were sent:

- The provider caches the beginnings of prompts. If the response read more tokens from the cache than the request
  after those calls had, the calls were part of the prompt: no other request had the same beginning.
- Or the prompt is longer than it would be without those calls, by more than what the program may add unlogged.
  Within one run of the program that is little: its prompts have a list of `todos`, which the prompts of a resumed
  session lack unless it was left and resumed in the same run. A new run may have other tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.records import DECODE_ERRORS, ClaudeBlock, ClaudeRecord
from understudy.ingest.claude_code.tree import ClaudeResponse, TrimmedResponse
from understudy.ingest.trace import TraceNode

RESUME_NOT_LOGGED = "resume_not_logged"
"""The note on states that follow parallel calls which a resume may have lost."""

_INTERRUPTED = b"[Request interrupted by user"
MIN_BYTES_PER_TOKEN = 2.5
MAX_BYTES_PER_TOKEN = 6
ADDED_TOKENS = {True: 2000, False: 15_000}
"""The most tokens by which a prompt may differ unlogged: in the same run of the program, or in another one."""


class PromptUsage(Struct):
    """The tokens of a prompt, as the API reported them with the response."""

    input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None

    def prompt_tokens(self) -> int:
        """Return how long the prompt was."""
        return (self.input_tokens or 0) + self.cached_tokens()

    def cached_tokens(self) -> int:
        """Return how many tokens of the request later requests may read from the cache."""
        return (self.cache_creation_input_tokens or 0) + (self.cache_read_input_tokens or 0)


class _LostOnPath(Struct, frozen=True):
    """What a resume would lose of a path: whether there are such calls and how many bytes they have, and the
    response after the first of them (None if the path ends with it).
    """

    has_calls: bool = False
    lost_bytes: int = 0
    next_response: ClaudeResponse | None = None

    def with_response(self, response: ClaudeResponse, lost_bytes: int | None) -> _LostOnPath:
        """Return the same for the path with one more response, of which so much would be lost (None: nothing)."""
        next_response = response if self.has_calls and self.next_response is None else self.next_response
        return _LostOnPath(
            self.has_calls or lost_bytes is not None, self.lost_bytes + (lost_bytes or 0), next_response
        )


_LOST_NOTHING = _LostOnPath()


_usage = msgspec.json.Decoder(PromptUsage).decode


class Continuity:
    """Follows the results of calls in the order of the log, for one conversation."""

    def __init__(self) -> None:
        self._results: list[ClaudeRecord] = []  # since the last prompt
        self._lost_bytes: dict[str, int] = {}  # by key of a response: what a resume would lose of it
        # A path is summed up once, so that a session takes linear time, and not its length for each prompt.
        self._lost_by_node: dict[int, _LostOnPath] = {}  # by the last node of the path
        self._summed_keys: set[str] = set()  # keys of the responses on these paths

    def add_result(self, record: ClaudeRecord) -> None:
        """Record a record with results of calls."""
        self._results.append(record)

    def resume(self) -> None:
        """Forget the calls before a logged resume, since what it lost is known."""
        self._results.clear()
        self._lost_bytes.clear()
        self._forget_paths()

    def _forget_paths(self) -> None:
        self._lost_by_node.clear()
        self._summed_keys.clear()

    def add_prompt(
        self,
        record: ClaudeRecord,
        by_uuid: Mapping[str, ClaudeRecord],
        calls: Mapping[str, ClaudeResponse],
    ) -> None:
        """Process a prompt: a resume loses those results since the last prompt that a walk from this one
        misses.
        """
        if self._results:
            for result in tree.results_beside(record, self._results, by_uuid):
                for call_id in tree.result_ids(result):
                    if (response := calls.get(call_id)) is not None:
                        lost_before = self._lost_bytes.get(response.key, 0)
                        self._lost_bytes[response.key] = lost_before + text_bytes(result)
                        if response.key in self._summed_keys:  # a result that came after a later prompt
                            self._forget_paths()
        self._results.clear()

    def is_doubtful(self, nodes: Sequence[TraceNode], node: int) -> bool:
        """Return whether a response at `node` may be the first one after a resume that is not logged."""
        response = response_of(nodes[node].body)
        if not self._lost_bytes or response is None or _is_synthetic(response.records[0]):
            return False
        ancestor = nodes[node].parent
        prompts: list[ClaudeRecord] = []
        while ancestor >= 0 and (sent := tree.sent_record(nodes[ancestor].body)) is not None:
            if tree.result_ids(sent.record):
                break
            if sent.record.type == "user" and sent.record.sourceToolUseID is None:
                prompts.append(sent.record)
            ancestor = nodes[ancestor].parent
        if not prompts:
            return False
        lost = self._lost_on_path(nodes, ancestor)
        if not lost.lost_bytes:
            return False  # a compaction or a rewind removed the calls that a resume would lose
        last_response, added_bytes = _end_of_path(nodes, ancestor)
        usage, usage_before, usage_after = map(usage_of, (response, last_response, lost.next_response))
        if usage is None or usage_before is None or usage_after is None:
            return True
        # An interrupted prompt may already have put the beginning of a resumed session into the cache.
        is_first = sum(not _is_program_text(prompt) for prompt in prompts) < 2
        if is_first and (usage.cache_read_input_tokens or 0) >= usage_after.cached_tokens() > 0:
            return False
        if any(map(tree.has_image, prompts)):
            return True
        added_bytes += sum(map(text_bytes, prompts))
        most_added_tokens = added_bytes / MIN_BYTES_PER_TOKEN + ADDED_TOKENS[bool(bytes(prompts[0].todos))]
        added_tokens = usage.prompt_tokens() - usage_before.prompt_tokens()
        return added_tokens <= most_added_tokens - lost.lost_bytes / MAX_BYTES_PER_TOKEN

    def _lost_on_path(self, nodes: Sequence[TraceNode], tip: int) -> _LostOnPath:
        """Return what a resume would lose of the path to `tip`."""
        unvisited: list[int] = []
        while tip >= 0 and tip not in self._lost_by_node:
            unvisited.append(tip)
            tip = nodes[tip].parent
        lost = self._lost_by_node[tip] if tip >= 0 else _LOST_NOTHING
        for node in reversed(unvisited):
            if (response := response_of(nodes[node].body)) is not None:
                lost = lost.with_response(response, self._lost_bytes.get(response.key))
                self._summed_keys.add(response.key)
            self._lost_by_node[node] = lost
        return lost


def _end_of_path(nodes: Sequence[TraceNode], tip: int) -> tuple[ClaudeResponse | None, int]:
    """Return the last response on the path to `tip`, and the bytes of its text and of everything after it."""
    added_bytes = 0
    while tip >= 0:
        if (response := response_of(nodes[tip].body)) is not None:
            return response, added_bytes + sum(map(text_bytes, response.records))
        if (sent := tree.sent_record(nodes[tip].body)) is not None:
            added_bytes += text_bytes(sent.record)
        tip = nodes[tip].parent
    return None, added_bytes


def response_of(body: object) -> ClaudeResponse | None:
    """Return the response of which a node's body is, or None if it is of the user's side."""
    return (
        body.response if isinstance(body, TrimmedResponse) else body if isinstance(body, ClaudeResponse) else None
    )


def _is_synthetic(record: ClaudeRecord) -> bool:
    """Return whether the program itself wrote a record of the assistant's side."""
    return record.message is not None and record.message.model == "<synthetic>"


def usage_of(response: ClaudeResponse | None) -> PromptUsage | None:
    """Return the usage that the API reported with a response, or None if it is not logged."""
    for record in response.records if response is not None else ():
        if record.message is not None and len(record.message.usage):
            try:
                usage = _usage(record.message.usage)
            except DECODE_ERRORS:
                return None
            return usage if usage.prompt_tokens() else None  # the program reports no usage for its own messages
    return None


def text_bytes(record: ClaudeRecord) -> int:
    """Return the bytes of a record's texts, thinking, calls and results, without images."""
    content = record.message.content if record.message is not None else None
    if isinstance(content, str):
        return len(content.encode(errors="replace"))
    size = 0
    for block in content or ():
        if isinstance(block, str):
            size += len(block)
        elif b'"image"' not in bytes(block.content):
            size += block_bytes(block)
    return size


def block_bytes(block: ClaudeBlock) -> int:
    """Return the bytes of a block's text, thinking, call and result."""
    return len(block.content) + len(block.text) + len(block.thinking) + len(block.input)


def _is_program_text(record: ClaudeRecord) -> bool:
    """Return whether the program wrote a record of the user's side: a command's output, or a note that the user
    stopped it.
    """
    content = record.message.content if record.message is not None else None
    if isinstance(content, str):
        return content.startswith("<")
    return any(
        isinstance(block, ClaudeBlock) and _INTERRUPTED in bytes(block.text)[:40] for block in content or ()
    )
