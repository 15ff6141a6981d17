"""How many turns of real session logs a reader gets exactly as the model was sent them.

    python bench/fidelity.py [DIR] [--json FILE] [--misses N]

DIR, or UNDERSTUDY_FIDELITY, holds a directory for each version (`VERSION-MODE/projects/**.jsonl`) with an
`expected.jsonl`: for each turn its `message_id` and the `context`, what the CLI sent for it, normalised as in
`normal` below, or the `messages` of its request, as `scripts/record_claude_sessions.py` records them. Those are
compared with all their reminders, but for the context in front of each conversation. `logged` counts the turns
that are as sent but for reminders of which the log does not hold the text. Beside our reader stand two
simple ones: all messages in the order of the file, and a walk along `parentUuid`. Both join the lines of an answer
and keep what ours keeps, so that only the order of things counts.
"""

# pyright: basic
from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from understudy.ingest.claude_code.log_format import ClaudeCodeFormat
from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import TraceState, expand

TARGET = 0.97
_ELEMENTS = re.compile(
    r"<(system-reminder|available-deferred-tools|new-diagnostics|task-notification)>.*?</\1>", re.DOTALL
)
_CONTEXT = re.compile(
    r"<system-reminder>\s*As you answer the user's questions, you can use the following context:.*?"
    r"</system-reminder>",
    re.DOTALL,
)
_BEGIN, _END = "<system-reminder>", "</system-reminder>"
_FAILED = re.compile(r"\A(Error: )+")
_MARK = re.compile(f"{_BEGIN}|{_END}")
_QUOTED = re.compile(f"{_BEGIN}.*?{_END}", re.DOTALL)
Normal = list[dict[str, Any]]
Reader = Callable[[list[Path], re.Pattern[str]], dict[str, tuple[Normal, str]]]


# --- one form for all -------------------------------------------------------------------------------------


def words(text: str, left_out: re.Pattern[str]) -> str:
    return " ".join(left_out.sub("", text).split())


def pieces(content: Any, left_out: re.Pattern[str]) -> list[str]:
    """The parts of a tool result: its texts, and `[image]` for each image. A state's failed results begin with
    `Error: `, where a request has a flag: that is left out of both.
    """
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    texts = []
    for part in parts:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        kind = part.get("type")
        texts.append(
            part.get("text") or "" if kind == "text" else "[image]" if "image" in str(kind) else f"[{kind}]"
        )
    texts[:1] = [_FAILED.sub("", text, count=1) for text in texts[:1]]
    return [text for text in (left_out.sub("", piece).strip() for piece in texts) if text]


class Merged:
    """Collects messages; those of one role that follow each other are one."""

    def __init__(self, left_out: re.Pattern[str] = _ELEMENTS) -> None:
        self.messages: list[dict[str, Any]] = []
        self.left_out = left_out

    def add(self, role: str, texts: list[str], uses: list[Any], results: list[Any]) -> None:
        text = " ".join(filter(None, (words(text, self.left_out) for text in texts)))
        if not (text or uses or results):
            return
        if not self.messages or self.messages[-1]["role"] != role:
            self.messages.append({"role": role, "text": "", "tool_uses": [], "tool_results": []})
        last = self.messages[-1]
        last["text"] = f"{last['text']} {text}".strip()
        last["tool_uses"] += uses
        last["tool_results"] += results

    def done(self) -> Normal:
        for message in self.messages:
            message["tool_results"].sort(key=lambda result: result["tool_use_id"])
        return self.messages


def normal(messages: list[dict[str, Any]], left_out: re.Pattern[str] = _ELEMENTS) -> Normal:
    """Messages in OpenAI form, without the first one where that is the system prompt."""
    merged = Merged(left_out)
    for at, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if role == "system" and at == 0:
            continue
        if role == "tool":
            merged.add(
                "user", [], [], [{"tool_use_id": message["tool_call_id"], "content": pieces(content, left_out)}]
            )
            continue
        uses = [
            {
                "id": call["id"],
                "name": call["function"]["name"],
                "input": json.loads(call["function"]["arguments"]),
            }
            for call in message.get("tool_calls") or ()
        ]
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or ()]
        merged.add("assistant" if role == "assistant" else "user", parts, uses, [])
    return merged.done()


def expected(context: Normal) -> Normal:
    merged = Merged()
    for message in context:
        results = [
            {"tool_use_id": result["tool_use_id"], "content": pieces(result["content"], _ELEMENTS)}
            for result in message.get("tool_results") or ()
        ]
        merged.add(message["role"], [message["text"]], message.get("tool_uses") or [], results)
    return merged.done()


def sent(messages: list[dict[str, Any]]) -> Normal:
    """The messages of a request, with its reminders."""
    merged = Merged(_CONTEXT)
    for message in messages:
        merged.add(
            "assistant" if message["role"] == "assistant" else "user", *parts_of(message["content"], _CONTEXT)
        )
    return merged.done()


def parts_of(content: Any, left_out: re.Pattern[str]) -> tuple[list[str], list[Any], list[Any]]:
    """The texts, tool uses and tool results of a message in Anthropic's form."""
    blocks = [content] if isinstance(content, str) else content or []
    blocks = [{"type": "text", "text": block} if isinstance(block, str) else block for block in blocks]
    texts = [block.get("text") or "" for block in blocks if block.get("type") == "text"]
    uses = [
        {"id": block["id"], "name": block["name"], "input": block["input"]}
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    results = [
        {"tool_use_id": block["tool_use_id"], "content": pieces(block.get("content"), left_out)}
        for block in blocks
        if block.get("type") == "tool_result"
    ]
    return texts, uses, results


# --- readers ----------------------------------------------------------------------------------------------


def ours(files: list[Path], left_out: re.Pattern[str] = _ELEMENTS) -> dict[str, tuple[Normal, str]]:
    """Every state that `understudy.ingest` makes: the context, and its fidelity with the notes on it."""
    reader, groups, answers = ClaudeCodeFormat(), defaultdict(list), {}
    for file in files:
        groups[reader.group(str(file))].append(LogFile.on_disk(file))
    for group in groups.values():
        for trace in reader.read(group):
            for state in expand(trace):
                answers[state.message_id] = (normal(state.messages, left_out), described(state))
    return answers


def described(state: TraceState) -> str:
    return " ".join([state.fidelity, *state.notes])


def records(file: Path) -> Iterator[dict[str, Any]]:
    for line in file.read_bytes().splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def message_of(record: dict[str, Any]) -> tuple[str, Any] | None:
    """The role and content of a record, None where the model is not sent it."""
    attachment = record.get("attachment") or {}
    if record.get("type") in ("user", "assistant"):
        if record.get("isApiErrorMessage"):
            return None
        if record.get("isVisibleInTranscriptOnly") and not record.get("isCompactSummary"):
            return None
        return record["type"], record["message"].get("content")
    if record.get("subtype") == "local_command":
        return "user", record.get("content")
    if attachment.get("type") == "queued_command":
        return "user", attachment.get("prompt")
    return None


def simple(way: list[dict[str, Any]], before: str | None, left_out: re.Pattern[str]) -> Normal:
    merged = Merged(left_out)
    for record in way:
        if (record.get("message") or {}).get("id") == before and before:
            continue
        if (message := message_of(record)) is not None:
            merged.add(message[0], *parts_of(message[1], left_out))
    return merged.done()


def by_file_order(files: list[Path], left_out: re.Pattern[str]) -> dict[str, tuple[Normal, str]]:
    answers: dict[str, tuple[Normal, str]] = {}
    for file in sorted(file for file in files if file.suffix == ".jsonl"):
        way: list[dict[str, Any]] = []
        for record in records(file):
            if record.get("type") == "assistant":
                key = record["message"].get("id")
                if key not in answers:
                    answers[key] = (simple(way, key, left_out), "")
            way.append(record)
    return answers


def by_parent(files: list[Path], left_out: re.Pattern[str]) -> dict[str, tuple[Normal, str]]:
    answers: dict[str, tuple[Normal, str]] = {}
    for file in sorted(file for file in files if file.suffix == ".jsonl"):
        by_uuid = {record["uuid"]: record for record in records(file) if record.get("uuid")}
        for record in by_uuid.values():
            if record.get("type") != "assistant":
                continue
            key = record["message"].get("id")
            if key in answers:
                continue
            way: list[dict[str, Any]] = []
            step, visited = record.get("parentUuid"), set()
            while step in by_uuid and step not in visited:
                visited.add(step)
                way.append(by_uuid[step])
                step = by_uuid[step].get("parentUuid")
            answers[key] = (simple(way[::-1], key, left_out), "")
    return answers


READERS: dict[str, Reader] = {
    "understudy": ours,
    "plain file order": by_file_order,
    "plain parent walk": by_parent,
}


# --- reminders whose text is not in the log ------------------------------------------------------------------


class LoggedText:
    """All strings of a session's logs."""

    def __init__(self, files: list[Path]) -> None:
        self.logged = folded(record for file in files for record in records(file))

    def reduced(self, messages: list[dict[str, Any]], state: Normal) -> list[dict[str, Any]]:
        """The messages of a request without the reminders that are neither in the logs nor in our state."""
        state_text = folded(state)
        return [{**message, "content": self._reduced(message["content"], state_text)} for message in messages]

    def _reduced(self, content: Any, state_text: str) -> Any:
        if isinstance(content, str):
            return self._without_others(content, state_text)
        if not isinstance(content, list):
            return content
        changed: list[Any] = []
        for block in content:
            key = (
                "text" if block.get("type") == "text" else "content" if block.get("type") == "tool_result" else ""
            )
            changed.append({**block, key: self._reduced(block.get(key), state_text)} if key else block)
        return changed

    def _without_others(self, text: str, state_text: str) -> str:
        remaining, at = "", 0
        while (begin := text.find(_BEGIN, at)) >= 0:
            end, depth = begin + len(_BEGIN), 1
            for mark in _MARK.finditer(text, end):  # a reminder may quote another one
                depth += 1 if mark[0] == _BEGIN else -1
                end = mark.end()
                if not depth:
                    break
            element = text[begin:end]
            own = _QUOTED.sub("", text[begin + len(_BEGIN) : end - len(_END)])
            longest = max((fold(line) for line in own.split("\n")), key=len)
            remaining += text[at:begin]
            if longest in self.logged or fold(element) in state_text:
                remaining += element
            elif remaining.endswith("\n\n") and text.startswith("\n\n", end):
                end += 2  # the blank lines around what is left out are one
            at = end
        return remaining + text[at:]


def fold(text: str) -> str:
    return " ".join(text.split())


def folded(value: Any) -> str:
    """All strings in a JSON value, or in several, with white space folded."""
    return " ".join({fold(text) for text in strings(value)})


def strings(value: Any) -> Iterator[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from strings(value.values())
    elif isinstance(value, Iterable):
        for item in value:
            yield from strings(item)


# --- the misses -------------------------------------------------------------------------------------------


def kind_of_miss(got: Normal | None, want: Normal) -> str:
    """What sort of difference it is, at the first message that differs."""
    if got is None:
        return "no such turn"
    for ours_, theirs in zip(got, want, strict=False):
        if ours_ == theirs:
            continue
        if ours_["role"] != theirs["role"]:
            return "other role"
        if ours_["tool_uses"] != theirs["tool_uses"]:
            ids = [[use["id"] for use in one["tool_uses"]] for one in (ours_, theirs)]
            if ids[0] != ids[1]:
                return "tool calls missing" if len(ids[0]) < len(ids[1]) else "other tool calls"
            names = sorted(
                {
                    mine["name"]
                    for mine, use in zip(ours_["tool_uses"], theirs["tool_uses"], strict=True)
                    if mine != use
                }
            )
            return f"input rewritten by the CLI: {', '.join(names)}"
        if ours_["tool_results"] != theirs["tool_results"]:
            counts = [len(one["tool_results"]) for one in (ours_, theirs)]
            return (
                "tool results missing"
                if counts[0] < counts[1]
                else ("tool results too many" if counts[0] > counts[1] else "other tool result")
            )
        return "text missing" if len(ours_["text"]) < len(theirs["text"]) else "other text"
    if len(got) == len(want):
        return ""
    return "messages missing at the end" if len(got) < len(want) else "messages too many at the end"


def measured(directory: Path, limit: int) -> dict[str, Any]:
    """The figures of each version: turns, and for each reader how many are exact; ours with its misses."""
    versions: dict[str, Any] = {}
    for version in sorted(path.parent for path in directory.glob("*/expected.jsonl")):
        rows = [json.loads(line) for line in (version / "expected.jsonl").read_text().splitlines()]
        files = sorted(path for path in (version / "projects").rglob("*") if path.is_file())
        left_out = _CONTEXT if "messages" in rows[0] else _ELEMENTS
        if "messages" in rows[0]:
            ids = {(record.get("message") or {}).get("id") for file in files for record in records(file)}
            rows = [row for row in rows if row["message_id"] in ids]
        expected_turns = {
            row["message_id"]: sent(row["messages"]) if "messages" in row else expected(row["context"])
            for row in rows
        }
        logged = LoggedText(files) if left_out is _CONTEXT else None
        figures: dict[str, Any] = {"turns": len(expected_turns), "exact": {}, "misses": {}, "fidelity": {}}
        for name, reader in READERS.items():
            turns = reader(files, left_out)
            hits = [key for key, want in expected_turns.items() if key in turns and turns[key][0] == want]
            figures["exact"][name] = len(hits)
            if reader is not ours:
                continue
            tags = {True: Counter(), False: Counter()}
            misses: Counter[str] = Counter()
            reduced = {
                row["message_id"]: sent(logged.reduced(row["messages"], turns[row["message_id"]][0]))
                for row in rows
                if logged and row["message_id"] in turns
            }
            figures["logged"] = sum(
                turns.get(key, (None,))[0] in (expected_turns[key], reduced.get(key)) for key in expected_turns
            )
            for key, want in expected_turns.items():
                got, tag = turns.get(key, (None, "none"))
                if got == reduced.get(key):
                    want = reduced[key]
                tags[got == want][tag] += 1
                if got != want:
                    kind = kind_of_miss(got, want)
                    misses[kind] += 1
                    if misses[kind] <= limit:
                        show(version.name, key, kind, got or [], want)
            figures["misses"] = dict(misses)
            figures["fidelity"] = {"exact": dict(tags[True]), "missed": dict(tags[False])}
            figures["not_expected"] = len(turns.keys() - expected_turns.keys())
        versions[version.name] = figures
    return versions


def show(version: str, key: str, kind: str, got: Normal, want: Normal) -> None:
    print(f"--- {version} {key}: {kind}")
    for at in range(max(len(got), len(want))):
        pair = (got[at] if at < len(got) else None, want[at] if at < len(want) else None)
        if pair[0] != pair[1]:
            print(f"    message {at} of {len(want)}")
            for who, message in zip(("ours", "sent"), pair, strict=True):
                print(f"    {who}  {json.dumps(message)[:900]}")
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=os.environ.get("UNDERSTUDY_FIDELITY"))
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--misses", type=int, default=0, metavar="N", help="show N misses of each kind")
    options = parser.parse_args()
    if options.directory is None or not Path(options.directory).is_dir():
        print("bench: skipped, no recorded sessions; name their directory, or set UNDERSTUDY_FIDELITY")
        return
    versions = measured(Path(options.directory), options.misses)
    if not versions:
        print(f"bench: skipped, {options.directory} has no VERSION/expected.jsonl")
        return
    total = sum(figures["turns"] for figures in versions.values())
    print(f"{'version':<24}{'turns':>7}" + "".join(f"{name:>20}" for name in READERS) + "  logged   misses")
    for version, figures in versions.items():
        rates = "".join(f"{figures['exact'][name] / figures['turns']:>20.1%}" for name in READERS)
        misses = ", ".join(f"{count} × {kind}" for kind, count in sorted(figures["misses"].items()))
        print(f"{version:<24}{figures['turns']:>7}{rates}{figures['logged']:>8}   {misses}")
    rate = {name: sum(figures["exact"][name] for figures in versions.values()) / total for name in READERS}
    print(f"{'all':<24}{total:>7}" + "".join(f"{rate[name]:>20.1%}" for name in READERS))
    met = rate["understudy"] >= TARGET
    print(f"target {TARGET:.0%} of turns exact: {'met' if met else 'MISSED'}")
    if options.json:
        options.json.write_text(
            json.dumps({"target": TARGET, "exact": rate, "versions": versions}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
