"""Tracks prompts that were queued and sent in the middle of a turn, for logs that do not hold them as messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from understudy.ingest.claude_code.attachments import queued_text
from understudy.ingest.claude_code.records import ClaudeRecord, seconds_between
from understudy.ingest.claude_code.render import text


class QueuedPrompts:
    """Prompts that were taken from the queue, and are waiting until a later record shows where they were sent."""

    def __init__(self, records: Sequence[ClaudeRecord]) -> None:
        self._records = records
        self._logged: Counter[str] | None = None
        self.waiting: list[ClaudeRecord] = []

    def add(self, record: ClaudeRecord) -> None:
        """Add a prompt, unless the log also has it as an attachment. Each attachment matches one prompt only."""
        if self._logged is None:
            attachments = (logged.attachment for logged in self._records if logged.type == "attachment")
            self._logged = Counter(filter(None, map(queued_text, attachments)))
        prompt = text(record.content)
        if self._logged[prompt] > 0:
            self._logged[prompt] -= 1
        else:
            self.waiting.append(record)

    def take_sent_before(self, next_record: ClaudeRecord) -> list[str]:
        """Remove and return the queued prompts that were sent before a record was written.

        Queue operations are logged at once, other records a little later. A prompt may therefore stand in the file
        before tool results that were sent before it; it was sent with the next request, ahead of that request's
        response.
        """
        sent = [
            record
            for record in self.waiting
            if (elapsed_s := seconds_between(record.timestamp, next_record.timestamp)) is None or elapsed_s >= 0
        ]
        self.waiting = [record for record in self.waiting if record not in sent]
        return [text(record.content) for record in sent]
