"""Prompts that were queued and sent amid a turn, where the log does not hold them as messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from understudy.ingest.claude_code.attachments import queued_text
from understudy.ingest.claude_code.records import ClaudeRecord, seconds_between
from understudy.ingest.claude_code.render import text


class QueuedPrompts:
    """The prompts that were taken from the queue, until a record shows where they were sent."""

    def __init__(self, records: Sequence[ClaudeRecord]) -> None:
        self._records = records
        self._logged: Counter[str] | None = None
        self.waiting: list[ClaudeRecord] = []

    def add(self, record: ClaudeRecord) -> None:
        """Add a prompt, unless the log holds it as an attachment too; each attachment counts for one prompt."""
        if self._logged is None:
            attachments = (one.attachment for one in self._records if one.type == "attachment")
            self._logged = Counter(filter(None, map(queued_text, attachments)))
        prompt = text(record.content)
        if self._logged[prompt] > 0:
            self._logged[prompt] -= 1
        else:
            self.waiting.append(record)

    def take_sent_before(self, before: ClaudeRecord) -> list[str]:
        """Remove the queued prompts that were sent before a record was written, and return them.

        Operations on the queue are written at once, and records a little later. So such a prompt may stand in the
        file before results that it followed; it was sent with the next request, in front of the response to it.
        """
        sent = [
            record
            for record in self.waiting
            if (passed := seconds_between(record.timestamp, before.timestamp)) is None or passed >= 0
        ]
        self.waiting = [record for record in self.waiting if record not in sent]
        return [text(record.content) for record in sent]
