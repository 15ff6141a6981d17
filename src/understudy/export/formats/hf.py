"""Hugging Face datasets, one per task instance, beside the stream of spans they were made from.

`dataset-<instance_id>/` loads with `datasets.load_from_disk`: one row a call that has token ids.
`stream_<instance_id>.json` has every call, one span a line, in the shape of agent-lightning 0.3: a span a call,
and one for the reward. Attribute values of spans that are no scalars are Python literals, as agent-lightning's
adapters read them (`ast.literal_eval`).
"""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from understudy import __version__
from understudy.errors import TaskError
from understudy.export.base import (
    ExportSummary,
    FormatTraits,
    ProgressCallback,
    exporter,
    no_progress,
)
from understudy.export.corpus import Corpus
from understudy.export.examples import textual
from understudy.export.files import CARD_NAME, ExportDescription, exclusive, fill_load, write_errors
from understudy.export.parquet import SavedDatasetWriter, schema
from understudy.ingest.model_families import model_family
from understudy.store.outcomes import GradedRollout
from understudy.trajectory.roles import ROLES
from understudy.trajectory.samples import NO_TOKENS, merge, usable
from understudy.trajectory.tree import Node
from understudy.types import Call, Task
from understudy.util.files import atomic_path
from understudy.wire.stored import as_plain_text, response_message

Decoder = Callable[[Sequence[int]], str]

_MESSAGE: dict[str, Any] = {
    "role": "string",
    "content": "string",
    "reasoning_content": "string",
    "tool_calls": [{"id": "string", "type": "string", "function": {"name": "string", "arguments": "string"}}],
    "tool_call_id": "string",
}
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
    "messages": [_MESSAGE],
    "rollout_id": "string",
    "attempt_id": "string",
    "branch": "string",
    "role": "string",
    "policy_version": "string",
    "integrity": "string",
}
"""The columns and their types.

`turn` counts the rows of a rollout from 0. `logprobs` belong to `gold_completion_ids` and are null where the
backend gave none. `prompt` is the text of `prompt_ids` where `prompt_source` is "tokens"; where it is
"messages" the tokenizer is not known here, and it is a rendering of the messages for people.
`messages` are in the chat-completion shape, the answer last; `arguments` is JSON text. `role` is what the call was
for (`trajectory.roles`). `integrity` is that of the rollout's patch: clean, or suspicious.
"""


_ABOUT = (
    "Each row is a call of a rollout with the exact tokens that it sent and sampled: `prompt_ids`, "
    "`gold_completion_ids` and their `logprobs`, `messages` in the chat-completion shape with the answer last, "
    "the `reward` of its rollout, and the `role` that the call had. `stream_*.json` have every call, also those "
    "without token ids, one span a line in the shape of agent-lightning."
)
_LOAD = """from datasets import load_dataset

dataset = load_dataset("{output}", split="train")"""


@exporter(FormatTraits(origins=("rollouts",), roles=ROLES, chooses_solved=False, into_run=True, splits=False))
def export(corpus: Corpus, output: Path, *, report: ProgressCallback = no_progress) -> ExportSummary:
    """Hugging Face datasets with exact tokens, and streams of spans, one of each per task instance.

    dataset-INSTANCE loads with datasets.load_from_disk; stream_INSTANCE.json has one span a line. An earlier
    export to the same place is replaced. Calls whose role is not chosen are in neither, nor are rollouts whose
    patch is suspicious, unless they are asked for; an instance that has no others loses what an earlier export
    wrote of it. A card and a manifest make of it a dataset that can be pushed.

    Raises ConfigError when `pyarrow` is missing, TaskError for an instance id that cannot be a file name; then
    nothing has been written. Raises ConfigError also when something cannot be written: what an instance had before
    is there still, unless its new file or dataset is.
    """
    store = corpus.store
    schema(COLUMNS)
    selection = store.outcomes.select_graded(
        corpus.selection.run, include_suspicious=corpus.selection.include_suspicious
    )
    chosen = selection.rollouts
    names = {
        instance: (file_name("stream_", instance, ".json"), file_name("dataset-", instance))
        for instance in (*chosen, *selection.suspicious)
    }
    counts = _HfCounts()
    with write_errors(output), exclusive(output):
        description = ExportDescription(corpus, output, "hf")
        for instance in selection.suspicious.keys() - chosen.keys():
            stream, dataset = names[instance]
            (output / stream).unlink(missing_ok=True)
            remove_dataset(output / dataset)
        for number, (instance, members) in enumerate(chosen.items()):
            report(number, len(chosen))
            _write(corpus, members, output, *names[instance], counts)
        report(len(chosen), len(chosen))
        exported = ExportSummary(
            output_dir=str(output),
            rows=counts.rows,
            instances=len(chosen),
            rollouts=sum(map(len, chosen.values())),
            spans=counts.spans,
            without_tokens=counts.without_tokens,
            segments={reason: count for reason, count in counts.segments.items() if reason != NO_TOKENS},
            roles=dict(counts.roles),
            left_out=selection.left_out,
            suspicious=sum(selection.suspicious.values()),
            splits={"train": counts.rows} if counts.rows else {},
            files=sorted([*counts.files, CARD_NAME]) if counts.files else [],
            origins={"rollout": counts.rows} if counts.rows else {},
            sources=dict(counts.sources),
            licences=dict(counts.licences),
            families=dict(counts.families),
            load=fill_load(_LOAD, output) if counts.rows else "",
        )
        description.write(exported, _ABOUT, _LOAD, {"train": counts.data})
    return exported


class _HfCounts(Struct, kw_only=True):
    """What an export has written so far; sources, licences and families count rows."""

    rows: int = 0
    spans: int = 0
    without_tokens: int = 0
    files: list[str] = field(default_factory=list[str])
    data: list[str] = field(default_factory=list[str])
    segments: Counter[str] = field(default_factory=Counter[str])
    roles: Counter[str] = field(default_factory=Counter[str])
    sources: Counter[str] = field(default_factory=Counter[str])
    licences: Counter[str] = field(default_factory=Counter[str])
    families: Counter[str] = field(default_factory=Counter[str])


def _write(
    corpus: Corpus, members: Sequence[GradedRollout], output: Path, stream: str, dataset: str, counts: _HfCounts
) -> None:
    """Write the stream and the dataset of an instance; without rows it has no dataset."""
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
            for row in rows_of(
                corpus.store.runs.task(member.rollout.run_id, member.rollout.task_id), member, nodes
            ):
                if saved is None:
                    saved = SavedDatasetWriter(stack.enter_context(atomic_path(output / dataset)), COLUMNS)
                saved.write(row)
                counts.rows += 1
                counts.sources[origin.source] += 1
                counts.licences[origin.licence or "unknown"] += 1
            counts.families.update(
                model_family(node.call.backend_model) or "unknown" for node in nodes if usable(node)
            )
        if saved is not None:
            saved.close()
    counts.files.append(stream)
    if saved is None:
        remove_dataset(output / dataset)
        return
    counts.files += [f"{dataset}/{name}" for name in SavedDatasetWriter.files]
    counts.data.append(f"{dataset}/{SavedDatasetWriter.data}")


def rows_of(task: Task, graded: GradedRollout, nodes: Sequence[Node]) -> Iterator[dict[str, Any]]:
    """The rows of one rollout, in the order of its calls."""
    answered = [node for node in nodes if usable(node)]
    for turn, node in enumerate(answered):
        call = node.call
        prompt_ids = list(call.prompt_token_ids or ())
        decode = _decoder(call)
        text = decode(prompt_ids) if decode else as_plain_text(node.messages)
        yield {
            "repo": task.repo,
            "instance_id": task.instance_id,
            "turn": turn,
            "prompt_ids": prompt_ids,
            "gold_completion_ids": list(call.completion_token_ids or ()),
            "logprobs": None if call.logprobs is None else list(call.logprobs),
            "reward": graded.verdict.reward,
            "prompt": text,
            "prompt_source": "tokens" if decode else "messages",
            "messages": [textual(message) for message in (*node.messages, response_message(node.answer or ()))],
            "rollout_id": graded.rollout.id,
            "attempt_id": graded.attempt.id,
            "branch": node.branch,
            "role": node.role,
            "policy_version": call.policy_version,
            "integrity": graded.verdict.integrity.status,
        }


def file_name(prefix: str, instance_id: str, suffix: str = "") -> str:
    """A file name for an instance. Raises TaskError for an id that cannot be part of one."""
    if (
        not instance_id
        or instance_id.startswith(".")
        or "/" in instance_id
        or "\\" in instance_id
        or not instance_id.isprintable()
        or len(os.fsencode(instance_id)) > 180
    ):
        raise TaskError(
            f"instance id {instance_id[:80]!r} cannot be part of a file name; give the task an id of printable "
            "characters without slashes, not beginning with a dot, of at most 180 bytes"
        )
    return f"{prefix}{instance_id}{suffix}"


def _decoder(call: Call) -> Decoder | None:
    """What turns the token ids of a call into text, where its tokenizer is known here."""
    if call.backend != "embedded":
        return None
    from understudy.model.scripted.tokenizer import scripted_tokenizer

    return scripted_tokenizer().decode


def dataset_saver() -> Callable[[Iterable[dict[str, Any]], Path], None]:
    """A function that saves rows as a dataset. Raises ConfigError when `pyarrow` is not installed."""
    schema(COLUMNS)

    def save(rows: Iterable[dict[str, Any]], path: Path) -> None:
        saved = SavedDatasetWriter(path, COLUMNS)
        for row in rows:
            saved.write(row)
        saved.close()

    return save


def remove_dataset(dataset: Path) -> None:
    """Remove what an earlier export left where there is nothing to write now."""
    if dataset.is_dir():
        shutil.rmtree(dataset)


PREFIX = "llm.hosted_vllm."


class SpanStatus(Struct, frozen=True):
    """OK or ERROR, and what went wrong."""

    status_code: str
    description: str | None = None


class HfSpanContext(Struct, frozen=True):
    """The identity of a span."""

    trace_id: str
    span_id: str
    is_remote: bool = False
    trace_state: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class Resource(Struct, frozen=True):
    """Who emitted a span."""

    attributes: dict[str, str]
    schema_url: str = ""


class Span(Struct, frozen=True, kw_only=True):
    """One line of a stream. Times are Unix seconds; `sequence_id` counts from 1 within the attempt."""

    rollout_id: str
    attempt_id: str
    sequence_id: int
    trace_id: str
    span_id: str
    parent_id: str | None = None
    name: str
    status: SpanStatus
    attributes: dict[str, str | int | float]
    events: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    links: list[dict[str, Any]] = msgspec.field(default_factory=list[dict[str, Any]])
    start_time: float | None
    end_time: float | None
    context: HfSpanContext
    parent: HfSpanContext | None = None
    resource: Resource


def spans(graded: GradedRollout, nodes: Sequence[Node]) -> Iterator[Span]:
    """The spans of the deciding attempt: its calls in order, then its reward."""
    for node in nodes:
        call = node.call
        failure = call.error.message if call.error else None
        status = SpanStatus("OK") if call.status == "ok" else SpanStatus("ERROR", failure or call.status)
        yield _span(
            graded,
            sequence=call.sequence + 1,
            key=call.id,
            name="raw_gen_ai_request",
            status=status,
            attributes=_attributes(node),
            times=(call.started_at, call.ended_at),
        )
    end = graded.attempt.ended_at or max((node.call.ended_at for node in nodes), default=None)
    yield _span(
        graded,
        sequence=max((node.call.sequence for node in nodes), default=-1) + 2,
        key="reward",
        name="agentlightning.annotation",
        status=SpanStatus("OK"),
        attributes={
            "agentlightning.reward.0.name": "primary",
            "agentlightning.reward.0.value": graded.verdict.reward,
            "understudy.integrity": graded.verdict.integrity.status,
        },
        times=(end, end),
    )


def _span(
    graded: GradedRollout,
    *,
    sequence: int,
    key: str,
    name: str,
    status: SpanStatus,
    attributes: dict[str, str | int | float],
    times: tuple[float | None, float | None],
) -> Span:
    rollout_id, attempt_id = graded.rollout.id, graded.attempt.id
    trace_id = _hex(32, attempt_id)
    span_id = _hex(16, attempt_id, key)
    return Span(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence,
        trace_id=trace_id,
        span_id=span_id,
        name=name,
        status=status,
        attributes=attributes,
        start_time=times[0],
        end_time=times[1],
        context=HfSpanContext(trace_id, span_id),
        resource=Resource(
            {
                "service.name": "understudy",
                "service.version": __version__,
                "agentlightning.rollout_id": rollout_id,
                "agentlightning.attempt_id": attempt_id,
            }
        ),
    )


def _attributes(node: Node) -> dict[str, str | int | float]:
    """The attributes of a call; what its backend did not give is not there."""
    call = node.call
    attributes: dict[str, str | int | float] = {
        f"{PREFIX}id": call.id,
        f"{PREFIX}model": call.backend_model,
        f"{PREFIX}messages": repr(node.messages),
        "gen_ai.usage.prompt_tokens": call.usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": call.usage.completion_tokens,
        "understudy.branch": node.branch,
        "understudy.role": node.role,
    }
    if call.policy_version is not None:
        attributes["understudy.policy_version"] = call.policy_version
    if call.prompt_token_ids is not None:
        attributes[f"{PREFIX}prompt_token_ids"] = repr(list(call.prompt_token_ids))
    if node.answer is not None:
        attributes[f"{PREFIX}choices"] = repr([_choice_fields(call, response_message(node.answer))])
    return attributes


def _choice_fields(call: Call, message: dict[str, Any]) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "finish_reason": call.finish_reason, "message": message}
    if call.completion_token_ids is not None:
        choice["token_ids"] = list(call.completion_token_ids)
    if call.logprobs is not None and all(map(math.isfinite, call.logprobs)):  # inf and nan are no literals
        choice["logprobs"] = {"content": [{"logprob": logprob} for logprob in call.logprobs]}
    return choice


def _hex(digits: int, *parts: str) -> str:
    """An identifier that follows from its parts, so that an export can be repeated."""
    return sha256("\0".join(parts).encode()).hexdigest()[:digits]
