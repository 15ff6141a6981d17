"""SWE-agent's `.traj`: its `history`, and for each step the `query` that was really sent, where it is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from understudy.ingest.chat import chat
from understudy.ingest.formats.base import SingleFileFormat
from understudy.ingest.formats.outcomes import instance_id as instance_of
from understudy.ingest.formats.outcomes import outcome_from
from understudy.ingest.log_files import LogFile
from understudy.ingest.log_reader import file_name, items, mapping, outline, parse_json, read_document, string
from understudy.ingest.trace import Message, Trace
from understudy.ingest.trace_builder import TraceBuilder, fingerprint, repository

_OWN = frozenset(("trajectory", "history", "environment", "replay_config", "info", "attempts"))
_NEAR = 64
"""How many steps further the one of an answer is looked for: those between were asked for again."""


class SweAgentFormat(SingleFileFormat):
    """Reads trajectories of SWE-agent."""

    name = "swe-agent"

    def detect(self, path: str, head: bytes) -> bool:
        """Whether it is an object with a `trajectory`, and of no data set's row."""
        keys = outline(head).keys
        return keys.get("trajectory") == "[" and not keys.keys() - _OWN and outline(head).kind == "{"

    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """One trace of each file."""
        yield _trace(file)


def _trace(file: LogFile) -> Trace:
    losses: Counter[str] = Counter()
    log = mapping(read_document(file, losses))
    history, steps = items(log.get("history")), [mapping(step) for step in items(log.get("trajectory"))]
    if not history:
        # A version that kept no history, or an answer that never came: the last query and what followed it.
        history = _asked(steps[-1]) if steps else []
        losses["no_history"] += 1
    instance = string(log.get("environment")) or file_name(file.path).removesuffix(".traj")
    builder = TraceBuilder(
        "swe-agent", file.path, f"{instance}-{fingerprint(file.path, history[:4])}", losses=losses
    )
    builder.trace.version = string(mapping(log.get("info")).get("swe_agent_version"))
    builder.trace.project = repository(instance)
    info = mapping(log.get("info"))
    builder.trace.outcome = outcome_from(
        resolved=info.get("resolved", log.get("resolved")),
        reward=info.get("reward"),
        task=instance_of(instance),
        exit_status=info.get("exit_status"),
    )
    model = _model(log)
    next_step = 0
    started = False
    for at, raw in enumerate(history):
        message = chat(raw, losses)
        if message is None:
            continue
        if message["role"] == "system" and not started and isinstance(message["content"], str):
            builder.add_system(message["content"])
            continue
        started = True
        if message["role"] != "assistant" or mapping(raw).get("is_demo"):
            builder.add(message)
            continue
        near = range(next_step, min(next_step + _NEAR, len(steps)))
        step_number = next((n for n in near if _answered(steps[n], mapping(raw))), None)
        query: list[Message] = []
        if step_number is not None:
            next_step = step_number + 1
            query = _query(steps[step_number], losses)
        if query:
            builder.add_turn(
                f"m{at}", [message], model=model, context=builder.shared_path(query), fidelity="ledger"
            )
        else:
            builder.add_turn(f"m{at}", [message], model=model)
    return builder.finish()


def _answered(step: dict[str, Any], answer: dict[str, Any]) -> bool:
    """Whether the answer in the history is that of the step."""
    return step.get("response") == answer.get("content") or (
        bool(step.get("action")) and step.get("action") == answer.get("action")
    )


def _asked(step: dict[str, Any]) -> list[Any]:
    return items(step.get("query")) or items(step.get("messages"))


def _query(step: dict[str, Any], losses: Counter[str]) -> list[Message]:
    """The messages of a step's request without the system prompt, none where it does not hold them."""
    asked = _asked(step)
    if len(asked) < 2:
        return []
    messages = [message for raw in asked if (message := chat(raw, losses)) is not None]
    for message in messages:
        for key in ("reasoning_content", "thinking_hidden"):
            message.pop(key, None)
    return messages[1:] if messages and messages[0]["role"] == "system" else messages


def _model(log: dict[str, Any]) -> str | None:
    """The model that the run was set up with; its settings are a JSON text in later versions."""
    settings = log.get("replay_config")
    if isinstance(settings, str):
        settings = parse_json(settings.encode(errors="replace"), Counter())
    agent = mapping(mapping(settings).get("agent"))
    own = string(mapping(agent.get("model")).get("name"))
    return own or string(mapping(mapping(log.get("info")).get("config")).get("model"))
