"""Predictions made elsewhere, in the format of SWE-bench's harness; read row by row, patches only on request.

A row is `{"instance_id": …, "model_name_or_path": …, "model_patch": …}`: in a `.jsonl` file one per line, in a
`.json` file a list of them, or an object with them as values. At most one row of a JSONL file is in memory, and
never a patch that the gate would refuse for its size.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError, TaskError
from understudy.grade.reports import UNNAMED_MODEL, name_part
from understudy.tasks.patch import MAX_PATCH_BYTES, NO_PATCH
from understudy.types import Task

GOLD = "gold"
MAX_ROW_BYTES = 256 << 20
MAX_JSON_BYTES = 512 << 20
_CHUNK = 1 << 20
_MAX_MESSAGES = 20


class Prediction(Struct, frozen=True):
    """One row: `where` is its location for messages, `start` and `size` its bytes in the file."""

    instance_id: str
    model: str
    where: str
    empty: bool
    start: int = 0
    size: int = 0


class PredictedPatch(Struct, frozen=True):
    """A patch for the gate, and the SHA-256 of the prediction. If it is too large, only that is recorded."""

    data: bytes
    digest: str

    @classmethod
    def of(cls, data: bytes) -> PredictedPatch:
        """Return the patch with these bytes."""
        return cls(data, hashlib.sha256(data).hexdigest())


class RejectedPredictions(Struct):
    """Invalid rows: their number, and messages with location and error of the first ones."""

    count: int = 0
    messages: list[str] = field(default_factory=list[str])

    def add(self, message: str) -> None:
        """Count one more invalid row."""
        self.count += 1
        if len(self.messages) < _MAX_MESSAGES:
            self.messages.append(message)


class _PredictionRow(Struct):
    instance_id: str
    model_patch: msgspec.Raw
    model_name_or_path: str | None = None


_decode_row = msgspec.json.Decoder(_PredictionRow).decode
_decode_text = msgspec.json.Decoder(str).decode
_Rows = list[msgspec.Raw] | dict[str, msgspec.Raw]
_decode_document: Callable[[bytes], _Rows] = msgspec.json.Decoder(_Rows).decode


def open_predictions(name: str, tasks: Iterable[Task], wanted: Collection[str] | None = None) -> Predictions:
    """Return the predictions that `name` stands for: those of a file, or for "gold" the gold patches of `tasks`.

    With `wanted`, only those of these instances. Invalid rows are counted and left out. Raises ConfigError for a
    file that cannot be read or has no prediction, and for two predictions of one instance.
    """
    if name == GOLD:
        return _GoldPredictions(task for task in tasks if wanted is None or task.instance_id in wanted)
    path = Path(name)
    kinds = {".jsonl": _JsonlPredictions, ".json": _JsonPredictions}
    if path.suffix not in kinds:
        raise ConfigError(
            f"{name}: unsupported file name; give a .jsonl or .json file of predictions, or {GOLD!r}"
        )
    try:
        predictions = kinds[path.suffix](path, wanted)
    except OSError as error:
        raise ConfigError(
            f"{path}: the predictions cannot be read: {error.strerror}; correct the path, or make the file "
            "readable (chmod)"
        ) from error
    if not predictions.rows and not predictions.rejected.count:
        if wanted is None:
            raise ConfigError(
                f"{path}: has no prediction, expected at least one; give a file of objects with instance_id, "
                "model_patch and model_name_or_path"
            )
        raise ConfigError(
            f"{path}: has no prediction of the instances that --instance-ids selects; expected at least one: "
            "correct the ids, or leave the option out to grade all"
        )
    return predictions


class Predictions:
    """The rows to grade, in order, and their patches. May be read from any thread.

    When it is opened, each row is read only far enough to know its instance; `_raw` reads its patch, as JSON, on
    request.
    """

    def __init__(self, wanted: Collection[str] | None = None) -> None:
        self.rows: dict[str, Prediction] = {}
        self.rejected = RejectedPredictions()
        self._wanted = wanted

    def patch(self, row: Prediction) -> PredictedPatch:
        """Return the patch of a row. Raises ConfigError when it can no longer be read."""
        raw = self._raw(row)
        digest = hashlib.sha256(raw).hexdigest()
        if _least_decoded_size(raw) > MAX_PATCH_BYTES:
            return PredictedPatch(NO_PATCH + b"the patch is larger than %d bytes" % MAX_PATCH_BYTES, digest)
        try:
            data = b"" if row.empty else _decode_text(raw).encode()
        except (msgspec.MsgspecError, UnicodeError) as error:
            return PredictedPatch(NO_PATCH + f"it is not valid text: {error}".encode(errors="replace"), digest)
        return PredictedPatch(data, digest)

    def _raw(self, row: Prediction) -> memoryview:
        raise NotImplementedError

    def _add(self, content: bytes | msgspec.Raw, where: str, start: int = 0) -> _PredictionRow | None:
        """Record the row in `content` and return it; None if it is invalid or its instance is not wanted."""
        try:
            row = _decode_row(content)
            model = row.model_name_or_path or UNNAMED_MODEL
            name_part(model)
            first = bytes(memoryview(row.model_patch)[:2])
            if first[:1] not in (b'"', b"n"):
                raise msgspec.ValidationError("Expected `str | null` - at `$.model_patch`")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TaskError) as error:
            self.rejected.add(
                f"{where}: not a prediction: {error}; expected instance_id, model_patch and model_name_or_path, "
                "as SWE-bench's harness does"
            )
            return None
        if self._wanted is not None and row.instance_id not in self._wanted:
            return None
        if earlier := self.rows.get(row.instance_id):
            raise ConfigError(
                f"{where}: {row.instance_id!r} has another prediction at {earlier.where}; remove one"
            )
        empty, size = first in (b'""', b"nu"), len(memoryview(content))
        self.rows[row.instance_id] = Prediction(row.instance_id, model, where, empty, start, size)
        return row


class _GoldPredictions(Predictions):
    """The gold patches of tasks, as predictions of a model called "gold"."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        super().__init__()
        self._patches = {task.instance_id: task.gold_patch for task in tasks}
        self.rows = {id: Prediction(id, GOLD, GOLD, not patch) for id, patch in self._patches.items()}

    def patch(self, row: Prediction) -> PredictedPatch:
        """Return the gold patch."""
        data = self._patches[row.instance_id].encode(errors="surrogateescape")
        return PredictedPatch.of(data)


class _JsonlPredictions(Predictions):
    """A JSONL file. A row is read again when its patch is requested, one at a time."""

    def __init__(self, path: Path, wanted: Collection[str] | None) -> None:
        super().__init__(wanted)
        self._path = path
        self._read_lock = threading.Lock()
        for number, start, line in _lines(path):
            where = f"{path}:{number}"
            if line is None:
                self.rejected.add(
                    f"{where}: not a prediction: the line is longer than {MAX_ROW_BYTES} bytes, the maximum; "
                    "shorten its model_patch, or remove the line"
                )
            elif line.strip():
                self._add(line, where, start)

    def patch(self, row: Prediction) -> PredictedPatch:
        """Return the patch in a row of the file. Raises ConfigError if the row has changed since it was opened."""
        with self._read_lock:  # so that only one row at a time is in memory
            return super().patch(row)

    def _raw(self, row: Prediction) -> memoryview:
        try:
            with self._path.open("rb") as file:
                file.seek(row.start)
                reread_row = _decode_row(file.read(row.size))
                if reread_row.instance_id == row.instance_id:
                    return memoryview(reread_row.model_patch)
        except OSError as error:
            raise ConfigError(
                f"{row.where}: can no longer be read: {error.strerror}; restore the file, and run the "
                "same command again"
            ) from error
        except (msgspec.MsgspecError, UnicodeDecodeError):
            pass  # for example because another row is there now
        raise ConfigError(f"{row.where}: the file changed while it was graded; run the same command again")


class _JsonPredictions(Predictions):
    """A JSON file, whole in memory once: its rows are views of it as it was when it was opened."""

    def __init__(self, path: Path, wanted: Collection[str] | None) -> None:
        super().__init__(wanted)
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ConfigError(
                f"{path}: larger than {MAX_JSON_BYTES} bytes; convert it to a .jsonl file with one "
                f"prediction per line, which is read in parts: jq -c '.[]' {path} > {path.with_suffix('.jsonl')}"
            )
        self._patches: dict[str, msgspec.Raw] = {}
        for number, content in enumerate(_items(path), start=1):
            if row := self._add(content, f"{path}: prediction {number}"):
                self._patches[row.instance_id] = row.model_patch

    def _raw(self, row: Prediction) -> memoryview:
        return memoryview(self._patches[row.instance_id])


def _items(path: Path) -> Sequence[msgspec.Raw]:
    try:
        document = _decode_document(path.read_bytes())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{path}: expected a JSON list of predictions or an object of them: {error}; correct it, or give one "
            "prediction per line in a .jsonl file"
        ) from error
    return list(document.values()) if isinstance(document, dict) else document


def _lines(path: Path) -> Iterator[tuple[int, int, bytes | None]]:
    """Yield (number from 1, start, content) of each line of a file; the content is empty if it is too long for a
    row.
    """
    with path.open("rb") as file:
        start = 0
        for number in itertools.count(1):
            line = file.readline(MAX_ROW_BYTES + 1)
            if not line:
                return
            if len(line) <= MAX_ROW_BYTES:
                yield number, start, line
            else:
                while line and not line.endswith(b"\n"):
                    line = file.readline(_CHUNK)
                yield number, start, None
            start = file.tell()


def _least_decoded_size(raw: memoryview) -> int:
    """Return the fewest bytes that a JSON string can have after decoding: an escape may take six bytes for one."""
    size = len(raw) - 2
    if size <= MAX_PATCH_BYTES:
        return size
    for start in range(0, len(raw), _CHUNK):
        chunk = bytes(raw[start : start + _CHUNK])
        size -= chunk.count(b"\\") + 4 * chunk.count(b"\\u") + 5  # an escape that the chunk's end cuts
    return size
