"""ATIF 1.8: a JSON file for each rollout and each session, with the tokens, rewards and masks that it has.

What ATIF has no place for is in `extra`: of a trajectory `reward`, `resolved`, `task`, `policy_versions`; of a
step `loss_mask` (of its completion tokens), `policy_version`, `signals`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

from understudy.errors import ConfigError
from understudy.export.base import Exported, Report, Traits, exporter, silent
from understudy.export.corpus import Corpus, Tally
from understudy.export.files import JsonLines, Writing, json_bytes
from understudy.export.formats.atif_rollout import Document, documents
from understudy.export.formats.atif_session import callers, continuations, document, paths
from understudy.export.session_examples import group_of
from understudy.ingest.trace import Trace

_ABOUT = (
    "A JSON file holds a trajectory in ATIF 1.8: of a rollout, with its subagents in it, or of one path of a "
    "session. What goes on after a compaction is in a file of its own, which `continued_trajectory_ref` names; "
    "steps that stand in another file too are marked `is_copied_context`. `extra` of a trajectory has its "
    "`reward`, of a step the `loss_mask` of its tokens and the `policy_version`. Each row of `train.jsonl` and "
    "`test.jsonl` names a file of the split."
)
_LOAD = """import json
from atif import Trajectory

for line in open("{output}/train.jsonl"):
    Trajectory.model_validate_json(open("{output}/" + json.loads(line)["file"]).read())"""
_VERSION = re.compile(rb'"claude_code_version"\s*:\s*"([\w.+-]{1,40})"')
_BEGINNING = 1 << 16
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


@exporter(Traits())
def export(
    corpus: Corpus,
    output: Path,
    *,
    tokens: Annotated[bool, "With the token ids and logprobs of each call, which make the files large."] = True,
    report: Report = silent,
) -> Exported:
    """Trajectories in ATIF 1.8, a JSON file for each rollout and each session.

    Raises ConfigError when there is nothing to write, or it cannot be written.
    """
    agents = {run.id: {"name": str(run.config.get("agent") or "unknown")} for run in corpus.store.runs()}
    with Writing(corpus, output, "atif", JsonLines, report, suffix=JsonLines.suffix) as writing:
        started = _subagents(corpus)
        for trace in corpus.traces():
            for name, told in of_session(trace, started.get(trace.session_id, {})).items():
                _put(writing, group_of(trace), name, told)
        sessions = corpus.tally
        for graded in corpus.rollouts():
            agent = {**agents[graded.rollout.run_id], "version": version_of(corpus.store.logs(graded.attempt.id))}
            chosen = corpus.selection.roles
            made = documents(corpus.trajectory(graded), graded, chosen, agent, named(graded.rollout.id))
            for name, told in made.items():
                if not tokens:
                    without_tokens(told)
                _put(writing, graded.rollout.task_id, name, told)
        corpus.tally = _both(sessions, corpus.tally)
        return writing.finish(_ABOUT, _LOAD)


def of_session(trace: Trace, started: Mapping[str, str]) -> dict[str, Document]:
    """The trajectories of a trace by the name of their file."""
    found = paths(trace)
    base = named(trace.trace_id)
    names = [f"{base}.json", *(f"{base}.branch-{number}.json" for number in range(1, len(found)))]
    after = continuations(trace, found)
    return {
        names[at]: document(
            trace, path, names[at].removesuffix(".json"), started, names[after[at]] if at in after else None
        )
        for at, path in enumerate(found)
    }


def named(identity: str) -> str:
    """A file name for an id, without a suffix: the id itself where it can be one."""
    safe = _UNSAFE.sub("-", identity).lstrip(".-")[:100]
    if safe == identity:
        return safe
    return f"{safe}-{blake2b(identity.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


def without_tokens(told: Document) -> None:
    """Take the token ids out of a trajectory."""
    for step in told["steps"]:
        for name in ("prompt_token_ids", "completion_token_ids", "logprobs"):
            step.get("metrics", {}).pop(name, None)
        step.get("extra", {}).pop("loss_mask", None)
    for child in told.get("subagent_trajectories", ()):
        without_tokens(child)


def _subagents(corpus: Corpus) -> dict[str, dict[str, str]]:
    """The files of the agents that sessions started, by session and tool call."""
    found: dict[str, list[tuple[str | None, str]]] = {}
    for trace in corpus.traces():
        if trace.parent is not None:
            place = (trace.parent.tool_use_id, f"{named(trace.trace_id)}.json")
            found.setdefault(trace.parent.session_id, []).append(place)
    return {session: callers(places) for session, places in found.items()}


def version_of(logs: Mapping[str, bytes]) -> str:
    """The version of the agent, which Claude Code tells at the beginning of its stream; the format demands one."""
    found = (_VERSION.search(log, 0, _BEGINNING) for log in logs.values())
    return next((match[1].decode() for match in found if match), "unknown")


def _both(one: Tally, other: Tally) -> Tally:
    joined: dict[str, Any] = {}
    for name in Tally.__struct_fields__:
        joined[name] = getattr(one, name) + getattr(other, name)
    return Tally(**joined)


def _put(writing: Writing, group: str, name: str, told: Document) -> None:
    try:
        writing.path(name).write_bytes(json_bytes(told) + b"\n")
    except OSError as error:
        raise ConfigError(f"cannot write {name}: {error}; choose another --output") from error
    extra: dict[str, Any] = told["extra"]
    row = {"file": name, "group": group, "reward": extra.get("reward"), "steps": len(told["steps"])}
    writing.add(group, row)
