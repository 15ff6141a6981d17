"""Checks states against their logs alone: is anything missing or out of order?

A finding suggests that a state lacks something that the model was sent, or that a log is damaged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct, field

from understudy.ingest.batch_reader import RenderCache
from understudy.ingest.claude_code.log_format import FORMAT_NAME, SYNTHETIC_MODEL
from understudy.ingest.claude_code.records import QUEUED_PROMPT, read_log
from understudy.ingest.claude_code.render import text
from understudy.ingest.formats.base import timestamp_seconds
from understudy.ingest.formats.registry import LogBatch
from understudy.ingest.log_files import LogFile, add_error, readable_files
from understudy.ingest.trace import Trace, path_to, text_of

CHECKS = {
    "unseen_citation": "the model quotes what the user wrote, and the state does not have it",
    "queued_prompt_missing": "a prompt was queued and sent while the model worked, and no state has it",
    "result_without_call": "a tool's result whose call is not in the state",
    "time_backwards": "a response is older than the response before it",
    "message_missing": "the log has a response of the model that is no state",
}
"""The checks, with what a finding of each means."""

_MAX_FINDINGS = 1000
_MIN_QUOTATION_CHARS = (
    12  # shortest quotation, in letters and digits, that is checked: shorter ones may occur anywhere
)
_QUOTED = re.compile(
    r"\b[Tt]he user(?:'s)?\b(?! might| may| could| would)[^\"“\n.]{0,80}"
    r"\b(?:sa(?:ys|id)|ask(?:s|ed|ing)|wr(?:ites|ote)|mention(?:s|ed)|message|request|prompt|question)\b"
    r"[^\"“\n.]{0,20}[\"“]([^\"”\n]{12,300})[\"”]"
)
_LEFT_OUT = re.compile(r"\.\.\.|…|\[[^\]]{0,40}\]")


class StateFinding(Struct, frozen=True):
    """One problem: which check found it, and where. `message_id` is None if it does not concern a turn."""

    check: str
    source: str
    trace_id: str | None = None
    message_id: str | None = None


class VerifyReport(Struct):
    """What was checked and found. `counts` counts all findings; `findings` holds only the first ones.

    `errors` has the texts of the first errors about files that could not be read.
    """

    files: int = 0
    conversations: int = 0
    states: int = 0
    counts: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(CHECKS, 0)))
    findings: list[StateFinding] = field(default_factory=list[StateFinding])
    errors: list[str] = field(default_factory=list[str])

    def add(self, finding: StateFinding) -> None:
        """Count a finding, and keep it if there are not too many."""
        self.counts[finding.check] += 1
        if len(self.findings) < _MAX_FINDINGS:
            self.findings.append(finding)


def verify(batches: Iterable[LogBatch], tick: Callable[[int], None]) -> VerifyReport:
    """Read all logs and check their states. `tick` is called with the number of files read so far.

    A file that cannot be read is skipped, as when ingesting.
    """
    report = VerifyReport()
    for batch in batches:
        files = readable_files(batch.files, Counter(), Counter(), report.errors)
        traces: list[_CheckedTrace] = []
        try:
            for trace in batch.format.read(files):
                traces.append(_check_trace(trace, report))
        except OSError as error:  # such as a database that is damaged
            add_error(report.errors, error)
            continue
        if batch.format.name == FORMAT_NAME:
            _check_logged(files, traces, report)
        report.files += len(files)
        tick(report.files)
    return report


class _CheckedTrace(Struct):
    """What is kept of a trace for the checks of its batch: the ids and times of its turns, and all text that was
    sent.
    """

    message_ids: set[str]
    times: list[float]
    sent: str


def _check_trace(trace: Trace, report: VerifyReport) -> _CheckedTrace:
    renderer = RenderCache(trace.renderer)
    letters_of_node: dict[int, str] = {}
    turn_at = {node: turn for turn in trace.turns for node in turn.action}
    path: list[int] = []
    report.conversations += 1
    report.states += len(trace.turns)
    for _ in range(trace.losses["result-without-call"]):
        report.add(StateFinding("result_without_call", trace.source, trace.trace_id))
    for turn in trace.turns:
        path = path_to(trace.nodes, turn.context, path)
        for node in path:
            if node not in letters_of_node:
                messages = renderer.history(trace.nodes[node].body)
                letters_of_node[node] = _letters(" ".join(text_of(message.get("content")) for message in messages))
        previous_turn = next((turn_at[node] for node in reversed(path) if node in turn_at), None)
        previous_time, time_s = (
            timestamp_seconds(previous_turn.timestamp if previous_turn else None),
            timestamp_seconds(turn.timestamp),
        )
        if previous_time is not None and time_s is not None and time_s < previous_time:
            report.add(StateFinding("time_backwards", trace.source, trace.trace_id, turn.message_id))
        thinking = trace.renderer.action([trace.nodes[node].body for node in turn.action]).thinking
        quotations = list(_quotations(thinking or ""))
        if quotations:
            context_letters = "".join(letters_of_node[node] for node in path)
            if any(quotation not in context_letters for quotation in quotations):
                report.add(StateFinding("unseen_citation", trace.source, trace.trace_id, turn.message_id))
    times = (timestamp_seconds(turn.timestamp) for turn in trace.turns)
    return _CheckedTrace(
        {turn.message_id.partition("#")[0] for turn in trace.turns},
        [time_s for time_s in times if time_s is not None],
        "".join(letters_of_node.values()),
    )


def _quotations(thinking: str) -> Iterator[str]:
    """Yield what the thinking quotes of the user, reduced to letters and digits; of a quotation with gaps, the
    longest part.
    """
    for quoted in _QUOTED.finditer(thinking):
        longest = max(map(_letters, _LEFT_OUT.split(quoted[1])), key=len)
        if len(longest) >= _MIN_QUOTATION_CHARS:
            yield longest


def _letters(content: str) -> str:
    return "".join(filter(str.isalnum, content.lower()))


def _check_logged(files: Sequence[LogFile], traces: Sequence[_CheckedTrace], report: VerifyReport) -> None:
    """Check that Claude Code's records all occur in the traces of a batch."""
    message_ids = {message_id for trace in traces for message_id in trace.message_ids}
    times = [time_s for trace in traces for time_s in trace.times]
    missing: dict[str, str] = {}
    for file in files:
        if not file.path.removesuffix(".gz").endswith(".jsonl"):
            continue
        for record in read_log(file).records:
            body = record.message
            if record.type == "assistant" and body is not None and body.model != SYNTHETIC_MODEL:
                key = body.id or record.requestId or record.uuid or ""
                if key not in message_ids and not record.isApiErrorMessage:
                    missing.setdefault(key, file.path)
            elif record.type == QUEUED_PROMPT:
                prompt, time_s = _letters(text(record.content)), timestamp_seconds(record.timestamp)
                answered = time_s is None or any(turn_time > time_s for turn_time in times)
                if prompt and answered and not any(prompt in trace.sent for trace in traces):
                    report.add(StateFinding("queued_prompt_missing", file.path))
    for key, path in missing.items():
        report.add(StateFinding("message_missing", path, None, key))
