"""Reads plain-text transcripts, which are lossy: Aider's chat history, and what Claude Code shows in a terminal.

Aider's `.aider.chat.history.md`: lines after `#### ` are the user's, after `> ` the program's, all others the
model's. It lacks what the program added to a request (files, the repository map), and a level-four heading in a
response is mistaken for user input.

A terminal's text, copied or written by `/export`: `> ` or `❯ ` marks the user, `● ` or `⏺ ` the model's text or
`Tool(argument)`, `⎿ ` a shortened result, `✻ ` thinking. Parallel calls cannot be told from sequential ones, and
are read as sequential.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

from msgspec import Struct

from understudy.ingest.chat import response_message, result_message
from understudy.ingest.formats.base import LogFormat, TraceBuilder, fingerprint
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, outline, parent_directory, read_text
from understudy.ingest.trace import Message, Trace, tool_call

_AIDER_BEGIN = re.compile(r"^# aider chat started at ([^\n]{1,100})$", re.MULTILINE)
_AIDER_MODEL = re.compile(r"(?:Main model|Model|Models): (\S+?)(?: with |,|$)")
_AIDER_VERSION = re.compile(r"Aider v(\S+)")
# Commands whose text is sent to the model. The text of other commands is not.
_ASKING = re.compile(r"/(?:ask|code|architect|context|chat-mode)\s+", re.IGNORECASE)


class AiderFormat(LogFormat):
    """Reads chat histories of Aider."""

    name = "aider"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file has Aider's file name or begins like its history."""
        return file_name(path).endswith(".aider.chat.history.md") or b"# aider chat started at " in head[:200]

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """Yield one trace for each chat in a file."""
        losses: Counter[str] = Counter()
        _, *chats = _AIDER_BEGIN.split(content := read_text(file, losses))
        first_chat = content[: match.start()] if (match := _AIDER_BEGIN.search(content)) else content
        chats_of_file = [("", first_chat)] if first_chat.strip() else []
        chats_of_file += list(zip(chats[::2], chats[1::2], strict=True))
        chat_counts: Counter[str] = Counter()
        for started, text in chats_of_file:
            started = started.strip()
            chat_counts[started] += 1
            yield _aider_trace(file, started, text, chat_counts[started], losses)
            losses = Counter()
        if losses:
            yield _aider_trace(file, "", "", 1, losses)


def _aider_trace(file: LogFile, started: str, text: str, number: int, losses: Counter[str]) -> Trace:
    session = fingerprint(file.path, [started, number])
    builder = TraceBuilder("aider", file.path, session, losses=losses, fidelity="lossy", notes=("plain_text",))
    builder.trace.project = parent_directory(file.path) or None
    model: str | None = None
    for line, role, block in _aider_blocks(text):
        if role == "tool":
            if match := _AIDER_MODEL.search(block):
                model = match.group(1)
            if match := _AIDER_VERSION.search(block):
                builder.trace.version = match.group(1)
        elif role == "assistant":
            builder.add_turn(
                f"line-{line}", [{"role": role, "content": block}], model=model, timestamp=started or None
            )
        elif asking := _ASKING.match(block):
            builder.add({"role": role, "content": block[asking.end() :]})
        elif block.startswith(("/", "!")):
            losses["command_left_out"] += 1
        else:
            builder.add({"role": role, "content": block})
    return builder.finish()


def _aider_blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield consecutive lines of one role as (line number, role, text without the marks)."""
    marks = (("#### ", "user"), ("> ", "tool"))
    role, first_line, lines = "", 0, list[str]()
    for number, line in enumerate(text.split("\n")):
        mark, line_role = next((pair for pair in marks if line.startswith(pair[0])), ("", "assistant"))
        if line_role == "assistant" and not line.strip() and role != "assistant":
            continue
        if line_role != role:
            if block := "\n".join(lines).strip():
                yield first_line, role, block
            role, first_line, lines = line_role, number, []
        lines.append(line[len(mark) :].removesuffix("  "))
    if block := "\n".join(lines).strip():
        yield first_line, role, block


_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_BANNER = "╭╰│┃▐▝▘▛▜█"
_USER = re.compile(r"[>❯] ?(.*)")
_MODEL = re.compile(r"[●⏺] (.*)")
_RESULT = re.compile(r"\s{1,6}⎿ {0,2}(.*)")
_STATUS = re.compile(r"[✻✽✶✢✳·*∴] ")
_THINKING = re.compile(r"[✻✽✶✢✳·*∴] Thinking")
_RULE = re.compile(r"[─━═▔▁]{8,}")
_FOLDED = re.compile(r"\(ctrl\+[a-z] to (?:expand|see)|^\s*… \+\d+ lines?")
_VERSION = re.compile(r"Claude Code v?(\d[\w.]*)")
_NAMED = re.compile(r"\b(Opus|Sonnet|Haiku|Fable) (\d+(?:\.\d+)*)", re.IGNORECASE)
_DIRECTORIES = (re.compile(r"cwd: (~?/[^\s│]+)"), re.compile(r"^[^\w~/]*(~?/[^\s│]+)"))
_MCP = re.compile(r"([\w:-]+) - ([\w-]+) \(MCP\)")
# What the program shows below a command whose text it sends to the model.
_SENT = re.compile(r"/\S+ is (?:analyzing|running)")
_CALL = re.compile(r"(Web Search|[A-Z][\w:.-]*|[\w-]+(?::[\w-]+)* - [\w-]+ \(MCP\))\((.*)\)…?\s*", re.DOTALL)
_PAIRS = re.compile(r'([a-z_]+):\s+("(?:[^"\\]|\\.)*"|[^,]+)(?:,\s*|$)', re.DOTALL)
_WIDEST = 1_000
_MAX_CALL_CHARS = 5_000
# The input field that a tool displays, for tools that display only one.
_TOOL_NAMES = {
    **dict.fromkeys(("Read", "Write", "Edit", "MultiEdit"), "file_path"),
    **dict.fromkeys(("Task", "Agent"), "description"),
    "Bash": "command", "LS": "path", "NotebookEdit": "notebook_path", "WebFetch": "url", "Skill": "skill",
    "WebSearch": "query",
}  # fmt: skip
_RENAMED = {
    "Update": "Edit", "Web Search": "WebSearch", "Fetch": "WebFetch", "List": "LS", "Update Todos": "TodoWrite",
}  # fmt: skip


class ClaudeTextFormat(LogFormat):
    """Reads the text of terminal sessions."""

    name = "claude-text"

    def detect(self, path: str, head: bytes) -> bool:
        """Return whether the file is not JSON, and has a response of the model and a result or a prompt."""
        if outline(head).kind or b"# aider chat started at" in head[:200] or b"\0" in head[:1024]:
            return False
        lines = _ESCAPES.sub("", head.decode(errors="replace")).splitlines()
        has_answer = any(_MODEL.match(line) for line in lines)
        return has_answer and any(_RESULT.match(line) or _USER.match(line) for line in lines)

    def read_trace(self, file: LogFile, losses: Counter[str]) -> Trace:
        """Return the trace of a file."""
        lines = _ESCAPES.sub("", read_text(file, losses)).replace("\xa0", " ").splitlines()
        blocks = list(_blocks(lines, losses))
        session = fingerprint(file.path, [block.text() for block in blocks[:2]])
        builder = TraceBuilder(
            "claude-text", file.path, session, losses=losses, fidelity="lossy", notes=("plain_text",)
        )
        model = _banner(builder.trace, lines)
        answer: list[tuple[int, Message]] = []

        def flush() -> None:
            if answer:
                joined = _joined([message for _, message in answer])
                builder.add_turn(f"line-{answer[0][0]}", [joined], model=model)
                answer.clear()

        call_id: str | None = None
        for block, next_block in zip_longest(blocks, blocks[1:]):
            text = block.text()
            if block.kind in ("thinking", "answer") and any(message.get("tool_calls") for _, message in answer):
                flush()
            if block.kind == "user":
                flush()
                call_id = None
                if text.startswith("/") and not _is_sent(next_block):
                    losses["command_left_out"] += 1
                elif text:
                    builder.add({"role": "user", "content": text})
            elif block.kind == "thinking":
                if text:
                    answer.append((block.line, response_message(None, [], text)))
            elif block.kind == "answer":
                call = _call(text, block.line, next_block is not None and next_block.kind == "result")
                call_id = call["id"] if call else call_id
                answer.append((block.line, response_message(None, [call]) if call else response_message(text, [])))
            elif call_id is None:
                losses["result_without_call"] += 1
            else:
                flush()
                builder.add(result_message(call_id, text))
                call_id = None
        flush()
        return builder.finish()


def _is_sent(next_block: _TextBlock | None) -> bool:
    """Return whether a slash command was sent to the model, judged by the next block: other commands show a
    result.
    """
    if next_block is None or next_block.kind == "user":
        return False
    return next_block.kind != "result" or _SENT.match(next_block.text()) is not None


class _TextBlock(Struct):
    """Consecutive lines of one kind: user, answer, result or thinking. `line` is the number of the first line."""

    kind: str
    line: int
    lines: list[str]

    def text(self) -> str:
        """Return the text without the terminal's indentation."""
        indented = [line for line in self.lines[1:] if line.strip()]
        margin = min((len(line) - len(line.lstrip(" ")) for line in indented), default=0)
        return "\n".join([self.lines[0], *(line[margin:] for line in self.lines[1:])]).strip()


def _blocks(lines: Sequence[str], losses: Counter[str]) -> Iterator[_TextBlock]:
    block: _TextBlock | None = None
    for number, line in enumerate(lines):
        kind, text = _kind(line)
        if _FOLDED.search(line):
            losses["folded"] += 1
        if kind is None:
            if block is not None and not (block.kind != "user" and line[:1] not in (" ", "")):
                block.lines.append(line)
            elif line.strip():
                losses["line_left_out"] += 1
            continue
        if block is not None and block.kind == kind == "result":
            block.lines.append(text)  # what a subagent did, or hooks said, is shown below the same call
            continue
        if block is not None and kind != "more":
            yield block
            block = None
        if kind in ("user", "answer", "result", "thinking"):
            block = _TextBlock(kind, number, [text])
        elif kind == "more" and block is not None:
            block.lines.append(text)
    if block is not None:
        yield block


def _kind(line: str) -> tuple[str | None, str]:
    """Return the kind of block that a line begins, and its text. `rule` ends a block, None continues one."""
    if match := _MODEL.match(line):
        return "answer", match.group(1)
    if match := _RESULT.match(line):
        return "result", match.group(1)
    if match := _USER.match(line):
        return "user", match.group(1)
    if _THINKING.match(line):
        return "thinking", ""
    if (line and line[0] in _BANNER) or _STATUS.match(line) or _RULE.match(line):
        return "rule", ""
    return None, line


def _banner(trace: Trace, lines: Sequence[str]) -> str | None:
    """Set the trace's version and project from the lines before the first block.

    Returns the model that they name.
    """
    banner_lines: list[str] = []
    for line in lines[:40]:
        if _MODEL.match(line) or _USER.match(line):
            break
        banner_lines.append(line[:_WIDEST])
    banner = "\n".join(banner_lines)
    if match := _VERSION.search(banner):
        trace.version = match.group(1)
    # Try `cwd:` first, because lines of help above it may begin with a slash too.
    matches = (match for pattern in _DIRECTORIES for line in banner_lines if (match := pattern.search(line)))
    trace.project = next((match.group(1) for match in matches), None)
    if match := _NAMED.search(banner):
        return f"claude-{match.group(1).lower()}-{match.group(2).replace('.', '-')}"
    return None


def _call(text: str, line: int, has_result: bool) -> dict[str, Any] | None:
    """Return the tool call that a block shows, or None for plain text. `has_result`: the next block is its
    result.
    """
    call_id = f"line_{line}"
    match = _CALL.fullmatch(text) if len(text) <= _MAX_CALL_CHARS else None
    if match is None:
        # Some tools show no argument: a short title followed by a result is such a call.
        name_shown = text.strip()
        is_title = (
            has_result
            and "\n" not in name_shown
            and len(name_shown) <= 40
            and name_shown[:1].isupper()
            and name_shown[-1:].isalnum()
        )
        return tool_call(call_id, _RENAMED.get(name_shown, name_shown), {}) if is_title else None
    name_shown, arguments_text = match.groups()
    arguments_text = "\n".join(part.strip() for part in arguments_text.split("\n"))
    name = _RENAMED.get(name_shown, name_shown)
    if mcp := _MCP.fullmatch(name_shown):
        server, tool = (re.sub(r"[^\w-]", "_", part) for part in mcp.groups())
        name = f"mcp__{server}__{tool}"
    pairs = dict(_PAIRS.findall(arguments_text)) if _PAIRS.match(arguments_text) else {}
    if name in _TOOL_NAMES and _TOOL_NAMES[name] not in pairs:
        return tool_call(
            call_id,
            name,
            {_TOOL_NAMES[name]: arguments_text.strip('"') if name == "WebSearch" else arguments_text},
        )
    if pairs:
        return tool_call(call_id, name, {key: value.strip().strip('"') for key, value in pairs.items()})
    return tool_call(call_id, name, {"shown": arguments_text} if arguments_text else {})


def _joined(messages: Sequence[Message]) -> Message:
    texts = [text for message in messages if (text := message["content"])]
    thoughts = [thought for message in messages if (thought := message.get("reasoning_content"))]
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    return response_message("\n\n".join(texts) or None, calls, "\n\n".join(thoughts))
