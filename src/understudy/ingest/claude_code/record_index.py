"""Look-ups among the records of a log, each made when it is first needed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.records import ClaudeRecord


class RecordIndex:
    """The records of one agent by what names them."""

    def __init__(self, records: Sequence[ClaudeRecord]) -> None:
        self._records = records

    @cached_property
    def by_uuid(self) -> dict[str, ClaudeRecord]:
        """The records by their uuid, the first of those that share one."""
        return {record.uuid: record for record in reversed(self._records) if record.uuid is not None}

    @cached_property
    def parents(self) -> set[str | None]:
        """The uuids of all records that have children."""
        return {record.parentUuid for record in self._records}

    @cached_property
    def users_by_parent(self) -> dict[str | None, ClaudeRecord]:
        """The last record of the user's side behind each record, by that record's uuid."""
        return {record.parentUuid: record for record in self._records if record.type == "user"}

    @cached_property
    def prompt_uuid(self) -> str:
        """The uuid of the one prompt of a run in print mode (`claude -p`), "" where there is none."""
        return tree.only_prompt(self._records) or ""

    @cached_property
    def has_attachments(self) -> bool:
        """Whether some records say what was sent beside messages."""
        return any(record.type == "attachment" for record in self._records)
