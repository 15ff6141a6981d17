"""Lazy indexes of a log's records."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from understudy.ingest.claude_code import tree
from understudy.ingest.claude_code.records import ClaudeRecord


class RecordIndex:
    """Indexes of one agent's records. Each is built when it is first used."""

    def __init__(self, records: Sequence[ClaudeRecord]) -> None:
        self._records = records

    @cached_property
    def by_uuid(self) -> dict[str, ClaudeRecord]:
        """Records by uuid. If several share a uuid, the first one counts."""
        return {record.uuid: record for record in reversed(self._records) if record.uuid is not None}

    @cached_property
    def parents(self) -> set[str | None]:
        """The uuids of all records that have a child."""
        return {record.parentUuid for record in self._records}

    @cached_property
    def users_by_parent(self) -> dict[str | None, ClaudeRecord]:
        """For each record (by uuid), the last user record whose parent it is."""
        return {record.parentUuid: record for record in self._records if record.type == "user"}

    @cached_property
    def prompt_uuid(self) -> str:
        """The uuid of the only prompt of a run in print mode (`claude -p`), or "" if this is not such a run."""
        return tree.only_prompt(self._records) or ""

    def ids_above(self, uuid: str | None) -> set[int]:
        """Return the `id()` of this record and of those that following `parentUuid` from it finds."""
        visited: set[int] = set()
        while uuid is not None and (record := self.by_uuid.get(uuid)) is not None and id(record) not in visited:
            visited.add(id(record))
            uuid = record.parentUuid
        return visited
