"""How a conversation ended, of what logs say of it under many names."""

from __future__ import annotations

import math
from typing import Any

from understudy.ingest.log_reader import mapping, string
from understudy.ingest.trace import TraceOutcome
from understudy.ingest.trace_builder import repository

_RESOLVED = {"true": True, "resolved": True, "false": False, "unresolved": False}
_LONGEST = 200
_SCORES = ("reward", "score")


def outcome_from(
    *, resolved: Any = None, reward: Any = None, task: Any = None, exit_status: Any = None
) -> TraceOutcome | None:
    """The outcome that these values tell, None where none of them is one."""
    outcome = TraceOutcome(
        resolved=_truth(resolved),
        reward=_number(reward),
        task=string(task),
        exit_status=status[:_LONGEST] if (status := string(exit_status)) else None,
    )
    return None if outcome == TraceOutcome() else outcome


def instance_id(name: str) -> str | None:
    """The name where it is that of an instance of SWE-bench or its like, else None."""
    return name if repository(name) else None


def outcome_from_extra(*sources: Any) -> TraceOutcome | None:
    """The outcome in the free fields of an ATIF document; the first place that has a value has it."""
    values: dict[str, Any] = {}
    for source in sources:
        fields = mapping(source)
        scores = mapping(fields.get("rewards")) or mapping(mapping(fields.get("verifier_result")).get("rewards"))
        fields_of_source = {
            "resolved": fields.get("resolved"),
            "reward": next(
                (one for source in (fields, scores) for key in _SCORES if (one := source.get(key)) is not None),
                None,
            ),
            "task": string(fields.get("task")) or fields.get("task_id") or fields.get("instance_id"),
            "exit_status": fields.get("exit_status"),
        }
        for key, value in fields_of_source.items():
            values.setdefault(key, value) if value is not None else None
    return outcome_from(**values)


def _truth(value: Any) -> bool | None:
    if isinstance(value, str):
        return _RESOLVED.get(value.lower())
    return bool(value) if isinstance(value, bool) or value in (0, 1) else None


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
