"""What Claude Code must do: a script for the model, a way to start the CLI, and what must come of it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fakes.turns import Step
from support.cli import MODEL, CliRun, Event, Rig
from support.trajectory import RECORDINGS

Check = Callable[[Rig, CliRun], None]


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One run of the CLI, and what must come of it.

    `error` is the status that the CLI reports when it fails, `result` the beginning of what it says, `code` its
    exit code where that does not follow. `request_count` is how many requests the model gets; None means one for
    each step. `retries` are the statuses that it tried again for. `check` holds what else must be. `like` names
    the recording whose outcome must be the same.
    """

    name: str
    script: Sequence[Step] = ()
    prompt: str | None = "go"
    flags: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])
    model: str | None = MODEL
    format: str | None = "stream-json"
    permissions: bool = False
    result: str = "Done."
    error: int | None = None
    code: int | None = None
    request_count: int | None = None
    retries: Sequence[int] = ()
    like: str | None = None
    check: Check | Sequence[Check] = ()

    def __str__(self) -> str:
        return self.name


async def play(rig: Rig, behaviour: Behaviour) -> CliRun:
    """Run a behaviour and hold it against what it states, and against the recording that it names."""
    b = behaviour
    rig.write(b.files)
    rig.script(*b.script)
    run = await rig.claude(
        b.prompt, *b.flags, model=b.model, format=b.format, permissions=b.permissions, env=b.env
    )
    assert len(run.model_requests) == (len(b.script) if b.request_count is None else b.request_count), run.events
    assert run.retries == list(b.retries)
    if b.format is not None:
        assert run.result.get("result", "").startswith(b.result), run.result
        assert run.result.get("api_error_status") == b.error, run.result
        assert run.code == (int(b.error is not None) if b.code is None else b.code)
    for check in [b.check] if callable(b.check) else b.check:
        check(rig, run)
    if b.like and RECORDINGS.exists():
        assert _facts(run.events, run.code, len(run.calls)) == _recorded(b.like)
    return run


def _recorded(name: str) -> Event:
    """What a recording says of its first run of the CLI."""
    rows = [json.loads(line) for line in (RECORDINGS / f"{name}.jsonl").read_text().splitlines()]
    posts = [row for row in rows if row["type"] == "exchange" and row["request"]["method"] == "POST"]
    (run,) = [row for row in rows if row["type"] == "cli"]
    return _facts(run["stdout"], run["exit_code"], len(posts))


_KINDS = ("assistant", "user", "api_retry", "compact_boundary", "task_notification", "model_fallback")


def _facts(events: Sequence[Event], code: int, requests: int) -> Event:
    """How a run ended, how many requests it took, and how many events of each kind told of it."""
    result = [event for event in events if event["type"] == "result"][-1]
    fields = ("subtype", "is_error", "api_error_status", "num_turns", "stop_reason", "terminal_reason")
    kinds = Counter(event.get("subtype") or event["type"] for event in events)
    facts = {name: result.get(name) for name in fields} | {kind: kinds[kind] for kind in _KINDS}
    return facts | {"code": code, "requests": requests}
