"""The tokens of a call: ids, texts, logprobs, mask and versions, with the values that trainers computed for
them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import tokenizers

from understudy.errors import ConfigError
from understudy.model.directory import SCRIPTED, directory_of
from understudy.store import Store
from understudy.store.training import StepTokenValues
from understudy.trajectory.samples import Segment
from understudy.types import Call
from understudy.util.text import reason_of
from understudy.view.paging import MAX_ROW_BYTES, shortened, size_of
from understudy.view.routes import TokenQuery
from understudy.view.schema.rollouts import TokenPage, TrainerTokens
from understudy.view.transcripts import Transcript, segment_of, segment_view


class TokenTexts:
    """The texts of token ids, by a model's own tokenizer. Raises ConfigError if the directory has none."""

    def __init__(self, directory: Path, name: str | None = None) -> None:
        self.name = name or str(directory)
        file = directory / "tokenizer.json"
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # `tokenizers` raises no narrower class
            raise ConfigError(
                f"{file} cannot be read: {reason_of(error)}; give a model's directory with --tokenizer, or leave "
                "it out"
            ) from error
        self._texts: dict[int, str] = {}

    def decode(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Return the text of each id. Part of a character is shown as the replacement character."""
        return tuple(self._text(token_id) for token_id in ids)

    def _text(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            try:
                text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            except OverflowError:
                text = ""
            self._texts[token_id] = text
        return text


class TokenizerFinder:
    """Finds the tokenizers of runs: the chosen one, else the one that a run's configuration names."""

    def __init__(self, directory: Path | None) -> None:
        self._chosen = None if directory is None else TokenTexts(directory_of(directory))
        self._lock = threading.Lock()
        self._by_directory: dict[Path, TokenTexts | None] = {}
        self._scripted: TokenTexts | None = None

    def for_run(self, config: Mapping[str, Any]) -> TokenTexts | None:
        """Return the tokenizer of a run, or None if it is not on this machine. Nothing is downloaded."""
        if self._chosen is not None:
            return self._chosen
        high = _nested(config, "gateway", "models", "high")
        for name in (high.get("tokenizer"), config.get("weights")):
            if not isinstance(name, str) or not name:
                continue
            directory = directory_of(name)
            if (directory / "tokenizer.json").is_file() and (texts := self._load(directory)) is not None:
                return texts
        return (
            self._for_scripted_models()
            if high.get("backend") == "embedded" and not config.get("weights")
            else None
        )

    def _for_scripted_models(self) -> TokenTexts:
        """Return the tokenizer of the scripted models, which comes with the package."""
        with self._lock:
            self._scripted = self._scripted or TokenTexts(SCRIPTED, "the scripted models' tokenizer")
            return self._scripted

    def _load(self, directory: Path) -> TokenTexts | None:
        with self._lock:
            if directory not in self._by_directory:
                try:
                    self._by_directory[directory] = TokenTexts(directory)
                except ConfigError:
                    # Show the ids without texts, since the run's model may have changed meanwhile.
                    self._by_directory[directory] = None
            return self._by_directory[directory]


def _nested(value: Mapping[str, Any], *keys: str) -> Mapping[str, Any]:
    current: Any = value
    for key in keys:
        current = cast("Mapping[str, Any]", current).get(key) if isinstance(current, dict) else None
    return cast("Mapping[str, Any]", current) if isinstance(current, dict) else {}


def token_page(
    store: Store, transcript: Transcript, query: TokenQuery, texts: TokenTexts | None, room: int = MAX_ROW_BYTES
) -> TokenPage:
    """Return the tokens of a call, or of its whole segment, as many as take at most `room` bytes.

    Raises ViewRefused if there is no such call.
    """
    turn = transcript.turn(transcript.index(query.call))
    segments = transcript.outlined.segments
    index = next((n for n, segment in enumerate(segments) if query.call in segment.call_ids), None)
    if index is None:
        without_tokens = TokenPage(
            call_id=query.call,
            segment=None,
            start=0,
            total=0,
            next=None,
            call_start=0,
            call_end=0,
            ids=(),
            texts=(),
            logprobs=(),
            mask=(),
            versions=(),
            policy_versions=turn.policy_versions,
            tokenizer=None,
        )
        return shortened(without_tokens, room)
    outlined = segments[index]
    segment, calls = segment_of(store, outlined)
    number = segment.call_ids.index(query.call)
    first = segment.completions[number - 1][1] if number and query.scope == "call" else 0
    call_start, call_end = segment.completions[number]
    end = call_end if query.scope == "call" else len(segment.token_ids)
    start = first if query.start is None else query.start
    stop = min(end, start + query.limit)
    versions, policy_versions = _versions(calls, segment)
    versions = versions[start:stop]
    used = sorted({version for version in versions if version >= 0})
    ids = segment.token_ids[start:stop]
    page = TokenPage(
        call_id=query.call,
        segment=segment_view(index, outlined),
        start=start,
        total=len(segment.token_ids),
        next=stop if start < stop < end else None,
        call_start=call_start,
        call_end=call_end,
        ids=ids,
        texts=() if texts is None else texts.decode(ids),
        logprobs=tuple(
            value if mask else None
            for value, mask in zip(segment.logprobs[start:stop], segment.loss_mask[start:stop], strict=True)
        ),
        mask=segment.loss_mask[start:stop],
        versions=tuple(used.index(version) if version >= 0 else -1 for version in versions),
        policy_versions=tuple(policy_versions[version] for version in used),
        tokenizer=None if texts is None else texts.name,
        trainer=_trainer(store, segment, start, max(start, stop)),
    )
    if (size := size_of(page)) <= room:
        return page
    if len(ids) == 1:
        return shortened(page, room)
    fewer = max(1, len(ids) * room * 9 // (size * 10))
    return token_page(store, transcript, msgspec.structs.replace(query, limit=fewer), texts, room)


def _versions(calls: Sequence[Call], segment: Segment) -> tuple[list[int], tuple[str, ...]]:
    """Return for each token of a segment the index of the version that sampled it, -1 for unknown."""
    names: dict[str, int] = {}
    versions = [-1] * len(segment.token_ids)
    for call, (start, end) in zip(calls, segment.completions, strict=True):
        if call.policy_spans:
            for span in call.policy_spans:
                number = names.setdefault(span.version, len(names))
                if span.start is None or span.end is None:
                    # The weights changed during the call, and it is unknown at which token.
                    if len(call.policy_spans) == 1:
                        versions[start:end] = [number] * (end - start)
                    continue
                low, high = start + max(span.start, 0), min(start + span.end, end)
                versions[low:high] = [number] * max(0, high - low)
        elif call.policy_version is not None:
            number = names.setdefault(call.policy_version, len(names))
            versions[start:end] = [number] * (end - start)
    return versions, tuple(names)


def _trainer(store: Store, segment: Segment, start: int, stop: int) -> tuple[TrainerTokens, ...]:
    """Return what updates computed for the tokens in [start, stop) of a segment, by step."""
    by_step: dict[int, dict[str, StepTokenValues]] = {}
    for call_id, (low, high) in zip(segment.call_ids, segment.completions, strict=True):
        if low < stop and high > start:
            for values in store.training.of_call(call_id):
                by_step.setdefault(values.step, {})[call_id] = values
    pages: list[TrainerTokens] = []
    for step, by_call in sorted(by_step.items()):
        columns: dict[str, tuple[float | None, ...]] = {}
        for name in ("logprobs", "ratios", "advantages"):
            column: list[float | None] = [None] * (stop - start)
            for call_id, (low, high) in zip(segment.call_ids, segment.completions, strict=True):
                numbers = getattr(by_call[call_id], name) if call_id in by_call else ()
                for position, number in enumerate(numbers[: high - low], low):
                    if start <= position < stop:
                        column[position - start] = number
            columns[name] = tuple(column)
        version = next(iter(by_call.values())).version
        pages.append(TrainerTokens(step=step, version=version, **columns))
    return tuple(pages)
