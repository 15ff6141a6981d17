"""Reads the logs of tests/data/ingest, and tells what was read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import walk_logs
from understudy.ingest.trace import Trace, TraceState, expand

DATA = Path(__file__).parents[1] / "data" / "ingest"

# What each log is, and which files are read together.
LOGS = {
    "aider/.aider.chat.history.md": "aider",
    "atif.json": "atif",
    "atif_1_5.json": "atif",
    "atif_1_6.json": "atif",
    "atif_1_7.json": "atif",
    "claude_code": "claude-code",
    "claude_export.txt": "claude-text",
    "claude_terminal.txt": "claude-text",
    "cline": "cline",
    "codex": "codex",
    "gemini.json": "gemini",
    "gemini.jsonl": "gemini",
    "miniswe_1.traj.json": "mini-swe-agent",
    "miniswe_1_1.traj.json": "mini-swe-agent",
    "miniswe_list.traj.json": "mini-swe-agent",
    "nebius_openhands.jsonl": "swe-rebench",
    "nebius_sweagent.jsonl": "swe-rebench",
    "openhands_v0.json": "openhands",
    "openhands_v0_output.jsonl": "openhands",
    "openhands_v0_store": "openhands",
    "openhands_v1": "openhands-v1",
    "pi.jsonl": "pi",
    "qwen_code.jsonl": "qwen-code",
    "sweagent.traj": "swe-agent",
    "swesmith.jsonl": "swe-smith",
}


def read(path: Path) -> list[Trace]:
    skipped: Counter[str] = Counter()
    traces = [
        trace
        for batch in group_batches(walk_logs([path], skipped), skipped)
        for trace in batch.format.read(batch.files)
    ]
    assert not skipped
    return traces


def only(path: Path) -> tuple[Trace, list[TraceState]]:
    (trace,) = read(path)
    return trace, list(expand(trace, system=None))


def golden(trace: Trace) -> dict[str, Any]:
    summary = {
        "trace_id": trace.trace_id,
        "session_id": trace.session_id,
        "format": trace.format,
        "agent": trace.agent,
        "version": trace.version,
        "parent": trace.parent,
        "system": trace.shape.system,
        "tools": trace.shape.tools,
        "losses": trace.losses,
        "outcome": trace.outcome,
        # A log's own directory is the project of some: not the same everywhere.
        "project": None if trace.format == "aider" else trace.project,
        "states": [
            {
                "message_id": state.message_id,
                "model": state.source_model,
                "family": state.source_family,
                "timestamp": state.timestamp,
                "branch": state.branch,
                "fidelity": state.fidelity,
                "notes": state.notes,
                "messages": state.messages,
                "action": state.student_action,
            }
            for state in expand(trace, system=None)
        ],
    }
    return json.loads(msgspec.json.encode(summary))
