"""Aider's `.aider.chat.history.md`: `#### ` the user, `> ` the program, all else the model. Lossy.

What the program added to a request (the files, the map of the repository) is not in it, and a heading of the
fourth level in an answer looks like the user.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from understudy.ingest.formats.base import SingleFileFormat
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, parent_directory, read_text
from understudy.ingest.trace import Trace
from understudy.ingest.trace_builder import TraceBuilder, fingerprint

_BEGIN = re.compile(r"^# aider chat started at ([^\n]{1,100})$", re.MULTILINE)
_MODEL = re.compile(r"(?:Main model|Model|Models): (\S+?)(?: with |,|$)")
_VERSION = re.compile(r"Aider v(\S+)")
# Commands whose words go to the model; those of the others do not.
_ASKING = re.compile(r"/(?:ask|code|architect|context|chat-mode)\s+", re.IGNORECASE)


class AiderFormat(SingleFileFormat):
    """Reads chat histories of Aider."""

    name = "aider"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether it is named as Aider names it, or begins as it begins."""
        return file_name(path).endswith(".aider.chat.history.md") or b"# aider chat started at " in head[:200]

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """One trace of each chat in a file."""
        losses: Counter[str] = Counter()
        _, *chats = _BEGIN.split(content := read_text(file, losses))
        first = content[: match.start()] if (match := _BEGIN.search(content)) else content
        chats_of_file = [("", first)] if first.strip() else []
        chats_of_file += list(zip(chats[::2], chats[1::2], strict=True))
        seen: Counter[str] = Counter()
        for started, text in chats_of_file:
            started = started.strip()
            seen[started] += 1
            yield _trace(file, started, text, seen[started], losses)
            losses = Counter()
        if losses:
            yield _trace(file, "", "", 1, losses)


def _trace(file: LogFile, started: str, text: str, nth: int, losses: Counter[str]) -> Trace:
    session = fingerprint(file.path, [started, nth])
    notes = ("plain_text",)
    builder = TraceBuilder("aider", file.path, session, losses=losses, fidelity="lossy", notes=notes)
    builder.trace.project = parent_directory(file.path) or None
    model: str | None = None
    for at, role, block in _blocks(text):
        if role == "tool":
            if match := _MODEL.search(block):
                model = match.group(1)
            if match := _VERSION.search(block):
                builder.trace.version = match.group(1)
        elif role == "assistant":
            builder.add_turn(
                f"line-{at}", [{"role": role, "content": block}], model=model, timestamp=started or None
            )
        elif asking := _ASKING.match(block):
            builder.add({"role": role, "content": block[asking.end() :]})
        elif block.startswith(("/", "!")):
            losses["command_left_out"] += 1
        else:
            builder.add({"role": role, "content": block})
    return builder.finish()


def _blocks(text: str) -> Iterator[tuple[int, str, str]]:
    """The runs of lines of one role: the number of the first, the role, the text without its marks."""
    marks = (("#### ", "user"), ("> ", "tool"))
    role, first, lines = "", 0, list[str]()
    for number, line in enumerate(text.split("\n")):
        mark, line_role = next((pair for pair in marks if line.startswith(pair[0])), ("", "assistant"))
        if line_role == "assistant" and not line.strip() and role != "assistant":
            continue
        if line_role != role:
            if block := "\n".join(lines).strip():
                yield first, role, block
            role, first, lines = line_role, number, []
        lines.append(line[len(mark) :].removesuffix("  "))
    if block := "\n".join(lines).strip():
        yield first, role, block
