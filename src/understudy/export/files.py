"""Writes the files of an export. Rows are written to temporary files as they come; at the end these, the manifest
and a dataset card are moved to the output directory.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import math
import os
import re
import shlex
import shutil
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from pathlib import Path, PurePath
from typing import Any, Self, cast

import msgspec

from understudy import __version__
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary, ProgressCallback
from understudy.export.corpus import SPLITS, Corpus, ExportSelection, Split, positive_counts
from understudy.export.lengths import CUT, PIECES, LengthFigures
from understudy.export.mixture import MixturePart
from understudy.export.parquet import ExportParquetWriter, JsonLinesWriter
from understudy.types import SCHEMA
from understudy.util.arrow import Columns
from understudy.util.files import atomic_write, write_remedy

CARD_NAME = "README.md"

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_SIZE_CATEGORIES = ((1_000, "n<1K"), (10_000, "1K<n<10K"), (100_000, "10K<n<100K"), (1_000_000, "100K<n<1M"))


def render_card(
    exported: ExportSummary,
    selection: ExportSelection,
    name: str,
    about: str,
    load: str,
    data: Mapping[str, Sequence[str]],
) -> str:
    """Return the dataset card: Markdown with a YAML header by which `datasets.load_dataset` finds the splits.

    `data` are the row files of each split; `load` is the code that loads them. The licence is that of all sources
    if they share one and all are known, else "unknown".
    """
    licences = set(exported.licences)
    licence = licences.pop().lower() if len(licences) == 1 else "unknown"
    size = next((word for limit, word in _SIZE_CATEGORIES if exported.rows < limit), "n>1M")
    header = [
        "---",
        f"license: {json.dumps(licence)}",
        f"size_categories:\n- {json.dumps(size)}",
        f"tags:\n- understudy\n- agent-traces\n- {json.dumps(name)}",
        *_configs(data),
        "---",
    ]
    parts = [
        "\n".join(header),
        f"# {exported.rows} rows in the format {name}",
        about,
        _table("split", "rows", exported.splits),
        "No project and no task is in more than one split: which one it is in follows from its name and the seed.",
        f"```python\n{load}\n```",
        "## Where it came from",
        _table("origin", "rows", exported.origins),
        _table("source", "rows", exported.sources),
        _table("model family that wrote it", "rows", exported.families),
        _table("where the tools are from", "rows", exported.tools_sources),
        _table("licence of the source", "rows", exported.licences),
        "A licence is `unknown` where its source does not name one; nothing is said of it then, and it is not a "
        "permission.",
        "## How it was made",
        _selection_table(selection, name),
    ]
    if exported.left_out:
        parts.append(_table("left out", "how many", exported.left_out))
    if exported.mixture:
        parts += ["## Mixture", _mixture(exported.mixture)]
    if exported.lengths is not None:
        parts += ["## Lengths", _lengths(exported.lengths)]
    parts += [f"- {note}" for note in exported.notes]
    parts += ["## Redaction", _redaction(exported, selection)]
    return "\n\n".join(part for part in parts if part) + "\n"


_CUT_SENTENCE = (
    "Longer conversations were cut to {limit:,} {unit} at turns: the system prompt and the first user message "
    "stay, and of the turns before the last answer the newest that fit, whole, each call with its results. "
    "Answers that this cuts off stand in rows of their own; what is too long even with one turn before it is left "
    "out."
)


def _lengths(figures: LengthFigures) -> str:
    summary = f"{figures.summary()[:1].upper()}{figures.summary()[1:]}."
    rule = "" if figures.limit is None else " " + _CUT_SENTENCE.format(limit=figures.limit, unit=figures.unit)
    return f"{_cell(summary)}{rule}\n\n" + _table(figures.unit, "rows", figures.histogram)


def _mixture(parts: Sequence[MixturePart]) -> str:
    lines = ["| weight | turns of sessions | answers | times learned |", "|---|---|---|---|"]
    lines += [f"| {part.weight:g} | {_cell(part.condition)} | {part.answers} | {part.learned} |" for part in parts]
    return (
        "Rows of the split train are drawn by the weights of the answers that they teach (their mean, where they "
        "are several): so many copies, the fraction by chance, which the seed decides.\n\n" + "\n".join(lines)
    )


def _configs(data: Mapping[str, Sequence[str]]) -> list[str]:
    splits = [
        f"  - split: {split}\n    path: [{', '.join(json.dumps(glob.escape(path)) for path in paths)}]"
        for split, paths in data.items()
        if paths
    ]
    return ["configs:\n- config_name: default\n  data_files:", *splits] if splits else []


def _selection_table(selection: ExportSelection, name: str) -> str:
    choices = {
        "from": ", ".join(selection.origins) or f"keys of a gateway: {', '.join(selection.clients)}",
        **{f"calls {name}": _time(seconds) for name, seconds in _time_bounds(selection) if math.isfinite(seconds)},
        "run": selection.run or "all",
        "roles": ", ".join(selection.roles),
        "where": selection.where or "all turns",
        "only solved": "yes" if selection.solved_only else "no",
        "suspicious patches": "included" if selection.include_suspicious else "left out",
        **(
            {"protection of rewards": f"at least {selection.protection}"} if selection.protection != "none" else {}
        ),
        "share for the test": str(selection.test_share),
        "seed": str(selection.seed),
        **({"lossy states": "included"} if selection.include_lossy else {}),
        **({"thinking": selection.thinking} if selection.thinking else {}),
    }
    if "sessions" in selection.origins or selection.exclude_tasks:
        near_duplicates = "left out" if selection.drop_near_duplicates else "left out where splits differ"
        near_duplicates += (
            f"; also those of {len(selection.apart_from)} other stores" if selection.apart_from else ""
        )
        choices["near-duplicate sessions"] = near_duplicates
        choices["excluded tasks"] = selection.exclude_tasks.name if selection.exclude_tasks else "none"
    return f"Made by `understudy export {name}` (Understudy {__version__}, schema {SCHEMA}).\n\n" + _table(
        "choice", "value", choices
    )


def _time_bounds(selection: ExportSelection) -> tuple[tuple[str, float], ...]:
    return (("since", selection.since), ("until", selection.until))


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _redaction(exported: ExportSummary, selection: ExportSelection) -> str:
    if exported.unredacted:
        return (
            "**NOT REDACTED.** The sessions in it are as they were logged, with any secrets, names and paths. Do "
            "not give it away."
        )
    if "sessions" not in selection.origins:
        return "There are no sessions of people in it, only rollouts in sandboxes: nothing was redacted."
    if not exported.redaction:
        return "The sessions were searched for secrets, e-mail addresses and home directories: none were found."
    return "The same secret has the same pseudonym everywhere.\n\n" + _table(
        "rule", "replaced", exported.redaction
    )


def _table(head: str, count: str, rows: Mapping[str, object]) -> str:
    if not rows:
        return ""
    lines = [f"| {head} | {count} |", "|---|---|", *(f"| {_cell(key)} | {_cell(rows[key])} |" for key in rows)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    """Escape a value for a table cell, because names of models and sources come from logs."""
    text = "".join(character if character.isprintable() else " " for character in str(value))
    for special in "\\|<>`[]*":
        text = text.replace(special, f"\\{special}")
    return text


MANIFEST = "understudy.json"
"""The manifest of an export: how it was made, and which files belong to it."""

REDACTION_REPORT = "redaction.json"
"""What was replaced where. It is never pushed."""

STAGING = ".understudy-export"
"""The directory in which an export is written until it is complete."""

_REPORT_EVERY = 64


class ExportWriter:
    """Writes an export of format `name` to the directory `output`. Use it as a context manager.

    Rows are Parquet with the typed `columns` if given, else JSON lines, written by `json_lines`. `add` writes a
    row to the file of its group's split; `path` returns a path for any other file. `finish` writes the card and
    the manifest and puts everything in place; files of an earlier export that this one lacks are removed, other
    files are left alone. Without `finish` nothing is changed.
    """

    def __init__(
        self,
        corpus: Corpus,
        output: Path,
        name: str,
        report: ProgressCallback,
        *,
        columns: Columns | None = None,
        json_lines: type[JsonLinesWriter] = JsonLinesWriter,
    ) -> None:
        self.corpus = corpus
        self.written: dict[Split, int] = {}
        """How many rows there are of each split."""
        self._output = output
        self._name = name
        self._new_file = json_lines if columns is None else partial(ExportParquetWriter, columns=columns)
        self._suffix = JsonLinesWriter.suffix if columns is None else ExportParquetWriter.suffix
        self._report = report
        self._staging = output / STAGING
        self._stack = ExitStack()
        self._open: dict[Split, JsonLinesWriter | ExportParquetWriter] = {}

    def __enter__(self) -> Self:
        with explain_write_errors(self._output):
            self._stack.enter_context(locked_output(self._output))
            self._description = ExportDescription(self.corpus, self._output, self._name)
            self._staging.mkdir(mode=0o700)
        return self

    def __exit__(self, *error: object) -> None:
        for rows in self._open.values():
            with suppress(OSError):
                rows.close()
        shutil.rmtree(self._staging, ignore_errors=True)
        self._stack.close()

    def add(self, group: str, row: Mapping[str, Any]) -> None:
        """Write a row of a group. Raises ConfigError if it cannot be written."""
        split = self.corpus.split(group)
        with explain_write_errors(self._output):
            if split not in self._open:
                self._open[split] = self._new_file(self._staging / f"{split}{self._suffix}")
            self._open[split].write(row)
        self.written[split] = self.written.get(split, 0) + 1
        written_rows = sum(self.written.values())
        if written_rows % _REPORT_EVERY == 0:
            self._report(written_rows, 0)

    def path(self, name: str) -> Path:
        """Return where to write a file that the export will contain as `name`."""
        return self._staging / name

    def finish(
        self,
        about: str,
        load: str,
        *,
        notes: tuple[str, ...] = (),
        check: Callable[[Path], None] | None = None,
        local_only: tuple[str, ...] = (),
        data: dict[Split, list[str]] | None = None,
    ) -> ExportSummary:
        """Put the export in place. `about` describes a row in Markdown; `load` is the code that loads the data.

        `check` is called with each file before, and may raise. `local_only` are files that are not pushed. `data`
        are the files of each split for the card, if they differ from those of `add`. Raises ConfigError if there
        are no rows, or if they cannot be written.
        """
        corpus, counts, written = self.corpus, self.corpus.counts, self.written
        if not written:
            reasons = ", ".join(f"{count} {reason}" for reason, count in counts.left_out.most_common())
            raise ConfigError(
                f"nothing to export as {self._name}; left out: "
                f"{reasons or 'nothing, the store has no such data'}; choose other data with --from, --where or "
                "--run, or another format"
            )
        all_notes = [
            *notes,
            *(f"{corpus.counts.notes[kind]} {kind}." for kind in (CUT, PIECES) if counts.notes[kind]),
        ]
        with explain_write_errors(self._output):
            while self._open:
                self._open.popitem()[1].close()
            if "train" not in written:
                self.path(f"test{self._suffix}").rename(self.path(f"train{self._suffix}"))
                written["train"] = written.pop("test")
                data = data and {"train": data["test"]}
                all_notes.append(
                    "all groups would have been in test: they are in train, and there is no test split"
                )
            for path in self._staging.iterdir():
                if check:
                    check(path)
            if corpus.redactor is not None:
                corpus.redactor.report.write(self.path(REDACTION_REPORT))
                local_only = (*local_only, REDACTION_REPORT)
            exported = ExportSummary(
                output_dir=str(self._output),
                rows=sum(written.values()),
                splits={split: written[split] for split in SPLITS if split in written},
                files=sorted([*(path.name for path in self._staging.iterdir()), CARD_NAME]),
                left_out=positive_counts(counts.left_out),
                **counts.tables(),
                redaction=corpus.redaction,
                lengths=corpus.lengths,
                mixture=corpus.mixture,
                unredacted=corpus.unredacted,
                notes=all_notes,
                load=fill_load(load, self._output),
            )
            rows = data or {split: [f"{split}{self._suffix}"] for split in SPLITS if split in written}
            self._description.write(exported, about, load, {**rows}, staged=self._staging, local_only=local_only)
        self._report(exported.rows, exported.rows)
        return exported


def fill_load(load: str, output: Path) -> str:
    """Fill in the code that loads an export: {output} is its directory, and {quoted} the same quoted for a
    shell.
    """
    return load.format(output=output, quoted=shlex.quote(str(output)))


def safe_file_name(identity: str) -> str:
    """Return a file name for an id, without a suffix: the id itself if it is a valid name."""
    safe = _UNSAFE.sub("-", identity).lstrip(".-")[:100]
    if safe == identity:
        return safe
    return f"{safe}-{blake2b(identity.encode(errors='surrogatepass'), digest_size=4).hexdigest()}"


class ExportDescription:
    """The card and the manifest of an export as format `name` in the directory `output`.

    Raises ConfigError if the manifest of an earlier export there is damaged.
    """

    def __init__(self, corpus: Corpus, output: Path, name: str) -> None:
        self._corpus = corpus
        self._output = output
        self._name = name
        self._earlier = _exported_files(read_manifest(output) or {})

    def write(
        self,
        exported: ExportSummary,
        about: str,
        load: str,
        data: Mapping[str, Sequence[str]],
        *,
        staged: Path | None = None,
        local_only: Collection[str] = (),
    ) -> None:
        """Write the card and the manifest, and move the files in place if they are `staged` elsewhere.

        `data` are the row files of each split. Files of an earlier export that this one lacks are removed. Raises
        OSError, and ConfigError if a file would replace one that no export wrote.
        """
        source = staged or self._output
        for name in exported.files if staged else (CARD_NAME,):
            if name not in self._earlier and (self._output / name).exists():
                raise ConfigError(
                    f"{self._output / name} already exists and was not written by an export; move it away, "
                    f"or choose another --output"
                )
        selection = self._corpus.selection
        if selection.where and self._corpus.redactor:  # the condition may name a project
            where = self._corpus.redactor.text(selection.where)
            selection = msgspec.structs.replace(selection, where=where)
        if selection.weights and self._corpus.redactor:
            rules = tuple(
                msgspec.structs.replace(rule, condition=self._corpus.redactor.text(rule.condition))
                for rule in selection.weights
            )
            selection = msgspec.structs.replace(selection, weights=rules)
        if exported.files:
            # Only the last part of the path, because the rest names a person's home directory.
            load_text = fill_load(load, Path(self._output.resolve().name))
            text = render_card(exported, selection, self._name, about, load_text, data)
            atomic_write(source / CARD_NAME, text.encode())
            manifest = _manifest(exported, selection, self._name, source, local_only)
            formatted = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
            atomic_write(self._output / MANIFEST, formatted, mode=0o600 if exported.unredacted else None)
        for name in exported.files if staged else ():
            if exported.unredacted:
                (source / name).chmod(0o600)
            (source / name).replace(self._output / name)
        for name in self._earlier - {*exported.files, MANIFEST}:
            (self._output / name).unlink(missing_ok=True)
            if "/" in name:
                with suppress(OSError):
                    (self._output / name).parent.rmdir()
        if not exported.files:
            (self._output / MANIFEST).unlink(missing_ok=True)


def _manifest(
    exported: ExportSummary, selection: ExportSelection, name: str, source: Path, local_only: Collection[str]
) -> dict[str, Any]:
    """Return the manifest of an export with the size and hash of each of its files, which are in `source`."""
    keys = ("rows", "splits", "origins", "sources", "licences", "families", "left_out", "redaction", "unredacted")
    # Keys that were added later are only written if they say something, so that other manifests stay as they were.
    optional = {name: getattr(selection, name) for name in ("include_lossy", "thinking", "apart_from")}
    optional |= {"protection": selection.protection if selection.protection != "none" else None}
    if "sessions" not in selection.origins:
        optional |= {
            "drop_near_duplicates": selection.drop_near_duplicates,
            "exclude_tasks": selection.exclude_tasks,
        }
    optional |= {name: getattr(selection, name) for name in ("cut_tokens", "cut_chars", "tokenizer", "weights")}
    bounds = dict(_time_bounds(selection))
    optional |= {"clients": selection.clients, **{name: math.isfinite(bounds[name]) for name in bounds}}
    options = {key: value for key, value in msgspec.structs.asdict(selection).items() if optional.get(key, True)}
    if selection.apart_from:
        options["apart_from"] = len(selection.apart_from)  # their paths are private
    if selection.exclude_tasks:
        options["exclude_tasks"] = selection.exclude_tasks.name
    return {
        "format": name,
        "schema": SCHEMA,
        "made_with": f"understudy {__version__}",
        **{key: getattr(exported, key) for key in keys},
        **({"tools_sources": exported.tools_sources} if exported.tools_sources else {}),
        **({"lengths": exported.lengths} if exported.lengths else {}),
        **({"mixture": exported.mixture} if exported.mixture else {}),
        "selection": options,
        "files": {
            file: {"bytes": (source / file).stat().st_size, "sha256": sha256_of(source / file)}
            | ({"kept": True} if file in local_only else {})
            for file in exported.files
        },
    }


def _exported_files(manifest: Mapping[str, Any]) -> set[str]:
    """Return the files named in a manifest that can belong to an export: none is outside its directory."""
    files: Any = manifest.get("files")
    names = cast(dict[str, Any], files) if isinstance(files, dict) else {}
    return {name for name in names if not PurePath(name).is_absolute() and ".." not in PurePath(name).parts}


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """Return the manifest of the export in a directory, or None.

    Raises ConfigError if it is damaged, or of a newer schema.
    """
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (msgspec.MsgspecError, OSError) as error:
        raise ConfigError(
            f"{path}: the manifest of an export cannot be read or is invalid: {error}; move it and the export's "
            "other files away, or choose another --output, then export again"
        ) from error
    schema = manifest.get("schema", SCHEMA)
    if not isinstance(schema, int) or schema > SCHEMA:
        raise ConfigError(
            f"{path}: expected a schema up to {SCHEMA}, got {schema!r}: a newer release wrote it; "
            "update understudy"
        )
    return manifest


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked_output(output: Path) -> Generator[None]:
    """Create a directory, lock it against other exports, and remove half-written files of a killed export.

    Raises OSError, and ConfigError if another export is being written there.
    """
    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(output / STAGING, ignore_errors=True)
        yield
    except BlockingIOError:
        raise ConfigError(
            f"another export is being written to {output}; wait for it, or choose another --output"
        ) from None
    finally:
        os.close(descriptor)


@contextmanager
def explain_write_errors(output: Path) -> Generator[None]:
    """Turn an OSError in the block into a ConfigError."""
    try:
        yield
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(
            f"--output {output}: {error.filename} is a file, expected a directory; choose another --output"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"cannot write the export to {output}: {error.filename or output}: {error.strerror or error}; "
            f"{write_remedy(error, 'choose another --output')}"
        ) from error
