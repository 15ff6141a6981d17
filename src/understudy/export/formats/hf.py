"""Hugging Face datasets, one per task instance, with the stream of spans that they were made from.

`dataset-<instance_id>/` loads with `datasets.load_from_disk` and has one row for each call with token ids.
`stream_<instance_id>.json` has every call, one span a line, in the format of agent-lightning 0.3: a span per call,
and one for the reward. Attribute values that are not scalars are Python literals, since agent-lightning's adapters
read them with `ast.literal_eval`.
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import field

from understudy import __version__
from understudy.errors import ConfigError, TaskError
from understudy.export.base import (
    ExportSummary,
    FormatTraits,
    ProgressCallback,
    exporter,
    no_progress,
)
from understudy.export.corpus import CallSource, ClientSession, Corpus, CorpusCounts, Unit, origin_name
from understudy.export.examples import with_text_content
from understudy.export.files import (
    CARD_NAME,
    ExportDescription,
    explain_write_errors,
    fill_load,
    locked_output,
    safe_file_name,
)
from understudy.export.formats.hf_sessions import export_sessions
from understudy.export.parquet import CHAT_MESSAGE, SavedDatasetWriter, schema
from understudy.ingest.model_families import model_family
from understudy.store.outcomes import GradedSelection
from understudy.trajectory.roles import ROLES
from understudy.trajectory.samples import NO_TOKENS, merge, usable
from understudy.trajectory.tree import Node
from understudy.types import Call, Task
from understudy.util.files import atomic_path
from understudy.wire.stored import as_plain_text, response_message

Decoder = Callable[[Sequence[int]], str]

COLUMNS: dict[str, Any] = {
    "repo": "string",
    "instance_id": "string",
    "turn": "int64",
    "prompt_ids": ["int32"],
    "gold_completion_ids": ["int32"],
    "logprobs": ["float64"],
    "reward": "float64",
    "prompt": "string",
    "prompt_source": "string",
    "messages": [CHAT_MESSAGE],
    **dict.fromkeys(("rollout_id", "attempt_id", "branch", "role", "policy_version", "integrity"), "string"),
}
"""The columns and their types.

`turn` counts the rows of a rollout from 0. `logprobs` belong to `gold_completion_ids`, and are null if the backend
returned none. `prompt` is the text of `prompt_ids` if `prompt_source` is "tokens"; if it is "messages", the
tokenizer is not known here, and `prompt` is a readable rendering of the messages. `messages` are in the form of
chat completions, the answer last; `arguments` is JSON text. `role` is the role of the call (`trajectory.roles`).
`integrity` is that of the rollout's patch: clean or suspicious.
"""


_ABOUT = (
    "Each row is a call of a rollout with the exact tokens that it sent and sampled: `prompt_ids`, "
    "`gold_completion_ids` and their `logprobs`, `messages` in the chat-completion shape with the answer last, "
    "the `reward` of its rollout, and the `role` that the call had. `stream_*.json` have every call, also those "
    "without token ids, one span a line in the shape of agent-lightning."
)
_LOAD = """from datasets import load_dataset

dataset = load_dataset("{output}", split="train")"""


@exporter(
    FormatTraits(
        roles=ROLES,
        chooses_solved=False,
        chooses_thinking=False,
        into_run=True,
        splits=False,
        cuts=True,
        weights=True,
        clients=True,
    )
)
def export(
    corpus: Corpus,
    output: Path,
    *,
    unit: Annotated[Unit, "Of sessions: a row a conversation, or a row a turn."] = "conversation",
    report: ProgressCallback = no_progress,
) -> ExportSummary:
    """Hugging Face datasets: exact tokens and span streams of rollouts, or conversations of sessions.

    Sessions are exported if they are the only selected origin, else rollouts. For sessions there is one dataset,
    whose rows have messages, tools, and what is known of the session. For rollouts there is a dataset and a stream
    per task instance: dataset-INSTANCE loads with datasets.load_from_disk; stream_INSTANCE.json has one span a
    line. An earlier export to the same place is replaced. Calls whose role is not selected are in neither, nor are
    rollouts with a suspicious patch unless requested, or with too little protection; if all rollouts of an
    instance are left out, its earlier files are removed. With its card and manifest, the export can be pushed as a
    dataset.

    Raises ConfigError if `pyarrow` is missing, and TaskError for an instance id that cannot be a file name;
    nothing is written then. Also raises ConfigError if something cannot be written: each file is then completely
    the old or the new one.
    """
    if corpus.selection.origins == ("sessions",):
        return export_sessions(corpus, output, unit, report)
    corpus.refuse_length_options("exact tokens of rollouts")
    schema(COLUMNS)
    members_by_instance: Mapping[str, Sequence[CallSource]]
    of_clients = bool(corpus.selection.clients)
    if of_clients:
        members_by_instance, selection = _by_client(corpus), GradedSelection({}, {}, {})
    else:
        selection = corpus.store.outcomes.select_graded(
            corpus.selection.run,
            include_suspicious=corpus.selection.include_suspicious,
            protection=corpus.selection.protection,
        )
        members_by_instance = selection.rollouts
    names = {
        instance: (file_name("stream_", instance, ".json"), file_name("dataset-", instance))
        for instance in (*members_by_instance, *selection.refused_tasks)
    }
    counts = _HfCounts()
    with explain_write_errors(output), locked_output(output):
        description = ExportDescription(corpus, output, "hf")
        for instance in selection.refused_tasks - members_by_instance.keys():
            stream, dataset = names[instance]
            (output / stream).unlink(missing_ok=True)
            remove_dataset(output / dataset)
        for number, (instance, members) in enumerate(members_by_instance.items()):
            report(number, len(members_by_instance))
            _write(corpus, members, output, *names[instance], counts)
        report(len(members_by_instance), len(members_by_instance))
        exported = ExportSummary(
            output_dir=str(output),
            rows=counts.total,
            instances=0 if of_clients else len(members_by_instance),
            rollouts=0 if of_clients else sum(map(len, members_by_instance.values())),
            spans=counts.spans,
            without_tokens=counts.without_tokens,
            segments={reason: count for reason, count in counts.segments.items() if reason != NO_TOKENS},
            roles=dict(counts.roles),
            left_out=selection.left_out,
            suspicious=sum(selection.suspicious.values()),
            splits={"train": counts.total} if counts.total else {},
            files=sorted([*counts.files, CARD_NAME]) if counts.files else [],
            load=fill_load(_LOAD, output) if counts.total else "",
            unredacted=corpus.unredacted,
            **counts.tables(),
        )
        for name in counts.files if exported.unredacted else ():
            (output / name).chmod(0o600)
        description.write(exported, _ABOUT, _LOAD, {"train": counts.data})
    return exported


def _by_client(corpus: Corpus) -> dict[str, list[ClientSession]]:
    """Return the sessions of the selected clients, by the names of their files.

    Raises ConfigError if there are none.
    """
    sessions_by_file: dict[str, list[ClientSession]] = {}
    for session in corpus.client_sessions():
        sessions_by_file.setdefault(safe_file_name(session.attempt.id), []).append(session)
    if not sessions_by_file:
        left_out = ", ".join(f"{count} {reason}" for reason, count in corpus.counts.left_out.most_common())
        raise ConfigError(
            f"no calls with these keys in the chosen time (left out: {left_out or 'none'}); check --key, "
            "--since and --until"
        )
    return sessions_by_file


class _HfCounts(CorpusCounts, kw_only=True):
    """What an export has written so far, with rows counted by origin."""

    spans: int = 0
    without_tokens: int = 0
    files: list[str] = field(default_factory=list[str])
    data: list[str] = field(default_factory=list[str])
    segments: Counter[str] = field(default_factory=Counter[str])
    roles: Counter[str] = field(default_factory=Counter[str])


def _write(
    corpus: Corpus,
    members: Sequence[CallSource],
    output: Path,
    stream: str,
    dataset: str,
    counts: _HfCounts,
) -> None:
    """Write the stream and the dataset of an instance. Without rows it has no dataset."""
    roles = corpus.selection.roles
    saved: SavedDatasetWriter | None = None
    with ExitStack() as stack:
        file = stack.enter_context(stack.enter_context(atomic_path(output / stream)).open("wb"))
        for member in members:
            trajectory = corpus.trajectory(member)
            nodes = [node for node in trajectory.nodes if node.role in roles]
            counts.roles.update(node.role for node in trajectory.nodes)
            counts.segments.update(merge(trajectory, roles).reasons)
            counts.without_tokens += sum(node.call.status == "ok" and not usable(node) for node in nodes)
            for span in spans(member, nodes):
                file.write(msgspec.json.encode(span) + b"\n")
                counts.spans += 1
            origin = corpus.task_origin(member)
            rollout = member.rollout
            task = rollout and corpus.store.runs.task(rollout.run_id, rollout.task_id)
            for row, node in zip(rows_of(task, member, nodes), filter(usable, nodes), strict=True):
                if saved is None:
                    columns = COLUMNS | ({"call_ids": ["string"]} if corpus.selection.clients else {})
                    saved = SavedDatasetWriter(stack.enter_context(atomic_path(output / dataset)), columns)
                saved.write(row)
                counts.count(
                    origin_name(member), origin.source, origin.licence, model_family(node.call.backend_model)
                )
        if saved is not None:
            saved.close()
    counts.files.append(stream)
    if saved is None:
        remove_dataset(output / dataset)
        return
    counts.files += [f"{dataset}/{name}" for name in SavedDatasetWriter.files]
    counts.data.append(f"{dataset}/{SavedDatasetWriter.data}")


def rows_of(task: Task | None, item: CallSource, nodes: Sequence[Node]) -> Iterator[dict[str, Any]]:
    """Return the rows of one rollout, or of a client's session, in the order of its calls.

    Only the latter have `call_ids`, with one call each, because their `turn` depends on the chosen time.
    """
    rollout, verdict = item.rollout, item.verdict
    for turn, node in enumerate(filter(usable, nodes)):
        call = node.call
        prompt_ids = list(call.prompt_token_ids or ())
        decode = _decoder(call)
        text = decode(prompt_ids) if decode else as_plain_text(node.messages)
        yield {
            "repo": task and task.repo,
            "instance_id": task and task.instance_id,
            "turn": turn,
            "prompt_ids": prompt_ids,
            "gold_completion_ids": list(call.completion_token_ids or ()),
            "logprobs": None if call.logprobs is None else list(call.logprobs),
            "reward": verdict and verdict.reward,
            "prompt": text,
            "prompt_source": "tokens" if decode else "messages",
            "messages": [
                with_text_content(message) for message in (*node.messages, response_message(node.answer or ()))
            ],
            "rollout_id": rollout and rollout.id,
            "attempt_id": item.attempt.id,
            "branch": node.branch,
            "role": node.role,
            "policy_version": call.policy_version,
            "integrity": verdict and verdict.integrity.status,
        } | ({"call_ids": [call.id]} if isinstance(item, ClientSession) else {})


def file_name(prefix: str, instance_id: str, suffix: str = "") -> str:
    """Return a file name for an instance. Raises TaskError if its id cannot be part of a file name."""
    if (
        not instance_id
        or instance_id.startswith(".")
        or "/" in instance_id
        or "\\" in instance_id
        or not instance_id.isprintable()
        or len(os.fsencode(instance_id)) > 180
    ):
        raise TaskError(
            f"instance id {instance_id[:80]!r} cannot be used in a file name; give the task an id of printable "
            "characters without slashes, not beginning with a dot, of at most 180 bytes"
        )
    return f"{prefix}{instance_id}{suffix}"


def _decoder(call: Call) -> Decoder | None:
    """Return a function that decodes a call's token ids to text, if a scripted policy sampled them; else None.

    The embedded server reports a policy version for weights, which have a tokenizer of their own, and none for
    policies.
    """
    if call.backend != "embedded" or call.policy_version is not None:
        return None
    from understudy.model.scripted.tokenizer import scripted_tokenizer

    return scripted_tokenizer().decode


def dataset_saver() -> Callable[[Iterable[dict[str, Any]], Path], None]:
    """Return a function that saves rows as a dataset. Raises ConfigError if `pyarrow` is not installed."""
    schema(COLUMNS)

    def save(rows: Iterable[dict[str, Any]], path: Path) -> None:
        with closing(SavedDatasetWriter(path, COLUMNS)) as saved:
            for row in rows:
                saved.write(row)

    return save


def remove_dataset(dataset: Path) -> None:
    """Remove what an earlier export left if there is nothing to write now."""
    if dataset.is_dir():
        shutil.rmtree(dataset)


SPAN_PREFIX = "llm.hosted_vllm."


def spans(graded: CallSource, nodes: Sequence[Node]) -> Iterator[dict[str, Any]]:
    """Yield the spans of the deciding attempt, or of a client's session: its calls in order, then the reward, if
    any.

    Times are Unix seconds; `sequence_id` counts from 1 within the attempt.
    """
    for node in nodes:
        call = node.call
        yield _span(
            graded,
            key=call.id,
            sequence_id=call.sequence + 1,
            name="raw_gen_ai_request",
            error=None if call.status == "ok" else (call.error and call.error.message) or call.status,
            attributes=_attributes(node),
            start_time=call.started_at,
            end_time=call.ended_at,
        )
    if graded.verdict is None:
        return
    end = graded.attempt.ended_at or max((node.call.ended_at for node in nodes), default=None)
    yield _span(
        graded,
        key="reward",
        sequence_id=max((node.call.sequence for node in nodes), default=-1) + 2,
        name="agentlightning.annotation",
        error=None,
        attributes={
            "agentlightning.reward.0.name": "primary",
            "agentlightning.reward.0.value": graded.verdict.reward,
            "understudy.integrity": graded.verdict.integrity.status,
        },
        start_time=end,
        end_time=end,
    )


def _span(graded: CallSource, *, key: str, error: str | None, **fields: Any) -> dict[str, Any]:
    """Return a line of a stream.

    Its ids are derived from the attempt and `key`, so that repeated exports are equal.
    """
    rollout_id, trace = (
        (graded.id, graded.id) if isinstance(graded, ClientSession) else (graded.rollout.id, graded.attempt.id)
    )
    attempt = {"rollout_id": rollout_id, "attempt_id": graded.attempt.id}
    ids = {"trace_id": _hex(32, trace), "span_id": _hex(16, graded.attempt.id, key)}
    service = {"service.name": "understudy", "service.version": __version__}
    named = {f"agentlightning.{name}": value for name, value in attempt.items()}
    return {
        **attempt,
        "sequence_id": fields["sequence_id"],
        **ids,
        "parent_id": None,
        "name": fields["name"],
        "status": {"status_code": "ERROR" if error else "OK", "description": error},
        "attributes": fields["attributes"],
        "events": [],
        "links": [],
        "start_time": fields["start_time"],
        "end_time": fields["end_time"],
        "context": {**ids, "is_remote": False, "trace_state": {}},
        "parent": None,
        "resource": {"attributes": service | named, "schema_url": ""},
    }


def _attributes(node: Node) -> dict[str, str | int | float]:
    """Return the attributes of a call. What its backend did not return is left out."""
    call = node.call
    attributes: dict[str, str | int | float] = {
        f"{SPAN_PREFIX}id": call.id,
        f"{SPAN_PREFIX}model": call.backend_model,
        f"{SPAN_PREFIX}messages": repr(node.messages),
        "gen_ai.usage.prompt_tokens": call.usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": call.usage.completion_tokens,
        "understudy.branch": node.branch,
        "understudy.role": node.role,
    }
    if call.policy_version is not None:
        attributes["understudy.policy_version"] = call.policy_version
    if call.prompt_token_ids is not None:
        attributes[f"{SPAN_PREFIX}prompt_token_ids"] = repr(list(call.prompt_token_ids))
    if node.answer is not None:
        attributes[f"{SPAN_PREFIX}choices"] = repr([_choice_fields(call, response_message(node.answer))])
    return attributes


def _choice_fields(call: Call, message: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": call.finish_reason, "message": message}
    if call.completion_token_ids is not None:
        choice["token_ids"] = list(call.completion_token_ids)
    if call.logprobs is not None and all(map(math.isfinite, call.logprobs)):  # inf and nan are not Python literals
        choice["logprobs"] = {"content": [{"logprob": logprob} for logprob in call.logprobs]}
    return choice


def _hex(digits: int, *parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()[:digits]
