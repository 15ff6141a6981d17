"""One HTML file with the viewer's page and all responses that it needs: `understudy view --export`.

The page sends the same requests as to a server, and gets the responses from the file, by path
(`ui/src/api/embedded.ts`). The file loads nothing from elsewhere: its content security policy allows only the one
script with the given digest.
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.errors import ConfigError, StoreError
from understudy.redact.redactor import Redactor
from understudy.report.directories import store_id
from understudy.report.figures import ReportFigures
from understudy.report.read import is_loop
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.sqlite import FILE
from understudy.util.files import atomic_write
from understudy.view.api import ViewApi
from understudy.view.catalog import Catalog
from understudy.view.faults import ViewRefused, encode
from understudy.view.page import NOT_BUILT, Page
from understudy.view.reports import report_view
from understudy.view.routes import (
    AttemptQuery,
    GroupQuery,
    LogQuery,
    NoParameters,
    RolloutFilter,
    TaskGridQuery,
    TextQuery,
    TokenQuery,
    TurnQuery,
)
from understudy.view.schema.rollouts import RolloutHead, RolloutRow, TaskGridRow, TextRange, TokenPage, TurnPage
from understudy.view.schema.stores import StoreList, StoreSummary

DEFAULT_MAX_BYTES: Final = 50_000_000
"""The default limit for the responses in a file, in bytes, because a browser reads all of them at once."""
REDACTED_TOKEN: Final = -1
"""The id of a token that redaction removed. Its text is `█`."""

_NO_LIMIT: Final = 1 << 53
_NO_PARAMETERS: Final = NoParameters()


class ExportedPage(Struct, frozen=True, kw_only=True):
    """The contents of a file. `replaced` counts redactions by rule; `notes` say what the file lacks."""

    content: bytes
    rollouts: int
    redacted: bool
    replaced: dict[str, int]
    notes: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write the file atomically; an unredacted one is readable for the owner only. Raises ConfigError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, self.content, mode=None if self.redacted else 0o600)
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}; name a file in a directory that you can write"
            ) from error


class ResponseFile:
    """Responses of the API by path, up to `max_bytes` bytes of JSON."""

    def __init__(self, api: ViewApi, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.api = api
        self.rollouts = 0
        self._max_bytes = max_bytes
        self._bytes = 0
        self._responses: dict[str, Any] = {}
        self._tokens: dict[str, TokenPage] = {}
        self._stores: list[StoreSummary] = []

    # --- the responses in the file ---------------------------------------------------------------------

    def add(self, path: str, response: Struct) -> None:
        """Add a response to the file. Raises ConfigError if the file becomes too large."""
        self._count_bytes(len(encode(response)))
        self._responses[path] = msgspec.to_builtins(response)

    def _count_bytes(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._max_bytes:
            raise ConfigError(
                f"--export: the file would be larger than {self._max_bytes / 1e6:,.0f} MB, the limit, which "
                f"{self.rollouts} rollouts fit in; name fewer rollouts, or raise the limit with --max-mb"
            )

    def add_store(
        self, store: str, selected: Sequence[str] = (), *, with_rollouts: bool = True
    ) -> list[RolloutRow]:
        """Add the lists of a run: all its rollouts, or the chosen ones. Returns these rollouts."""
        api, parts, base = self.api, {"store": store}, f"/api/stores/{store}"
        self.add_summary(api.read_store(parts, _NO_PARAMETERS))
        self.add(f"{base}/health", api.read_health(parts, _NO_PARAMETERS))
        if not with_rollouts:
            return []
        rows = _all_rows(
            lambda cursor: api.list_rollouts(parts, RolloutFilter(cursor=cursor, limit=1_000)), "rollouts"
        )
        selected_ids = set(selected)
        selected_rows = [row for row in rows if not selected_ids or row.id in selected_ids]
        page = api.list_rollouts(parts, RolloutFilter(limit=1))
        self.add(
            f"{base}/rollouts",
            msgspec.structs.replace(
                page, rollouts=tuple(selected_rows), total=len(selected_rows), next=None, unsearched=0
            ),
        )
        grid = _all_rows(lambda cursor: api.list_tasks(parts, TaskGridQuery(cursor=cursor, limit=1_000)), "tasks")
        tasks = {row.task_id for row in selected_rows}
        lines = _one_row_per_task(row for row in grid if row.task_id in tasks)
        page = api.list_tasks(parts, TaskGridQuery(limit=1))
        self.add(f"{base}/tasks", msgspec.structs.replace(page, tasks=lines, total=len(lines), next=None))
        return selected_rows

    def add_summary(self, summary: StoreSummary) -> None:
        """Add a store to the list of stores, without its path on this machine."""
        plain = msgspec.structs.replace(summary, path=summary.name, live=False)
        self.add(f"/api/stores/{summary.id}", plain)
        self._stores.append(plain)

    def add_task(self, store: str, task_id: str) -> None:
        """Add a task's rollouts side by side."""
        group = self.api.read_group({"store": store}, GroupQuery(task=task_id))
        self.add(f"/api/stores/{store}/group?task={task_id}", group)

    def add_rollout(self, store: str, rollout: str) -> None:
        """Add all attempts of a rollout, with turns, calls, patch, logs and tokens."""
        parts = {"store": store, "rollout": rollout}
        head_view = self._head(parts, None)
        for attempt in (
            None,
            *(attempt.id for attempt in head_view.attempts if attempt.id != head_view.attempt_id),
        ):
            head = head_view if attempt is None else self._head(parts, attempt)
            self._add_attempt(parts, attempt, head)
        self.rollouts += 1

    def _head(self, parts: dict[str, str], attempt: str | None) -> RolloutHead:
        while (head := self.api.read_rollout(parts, AttemptQuery(attempt=attempt))).unread:
            pass  # each request reads more of the calls
        return head

    def _add_attempt(self, parts: dict[str, str], attempt: str | None, head: RolloutHead) -> None:
        api, base = self.api, f"/api/stores/{parts['store']}/rollouts/{parts['rollout']}"
        which = "" if attempt is None else f"?attempt={attempt}"

        def key(part: str, more: str = "") -> str:
            query = "&".join(filter(None, (which.removeprefix("?"), more)))
            return f"{base}/{part}" + (f"?{query}" if query else "")

        self.add(base + which, head)
        turns = api.complete_turns(parts, attempt)
        self.add(key("turns"), TurnPage(turns=turns, start=0, total=len(turns), next=None))
        calls = _all_rows(
            lambda start: api.list_calls(parts, TurnQuery(attempt=attempt, start=start or 0, limit=1_000)), "calls"
        )
        page = api.list_calls(parts, TurnQuery(attempt=attempt, limit=1))
        self.add(key("calls"), msgspec.structs.replace(page, calls=tuple(calls), next=None))
        patch = api.read_patch(parts, TextQuery(attempt=attempt))
        if patch.patch is not None:
            text = _complete_text(
                lambda at: api.read_patch(parts, TextQuery(attempt=attempt, offset=at, length=_NO_LIMIT)).patch
            )
            patch = msgspec.structs.replace(patch, patch=text)
        self.add(key("patch"), patch)
        for name in head.logs:
            query = LogQuery(name=name, attempt=attempt, length=_NO_LIMIT)
            log = _complete_text(
                lambda at, query=query: api.read_log(parts, msgspec.structs.replace(query, offset=at))
            )
            self.add(key("log", f"name={name}"), log)
        for call in head.segment_calls:
            tokens = api.list_tokens(
                parts, TokenQuery(call=call, attempt=attempt, limit=_NO_LIMIT), room=_NO_LIMIT
            )
            self._count_bytes(len(encode(tokens)))
            self._tokens[key("tokens", f"call={call}")] = tokens

    # --- the file --------------------------------------------------------------------------------------

    def page(self, start: str, title: str, redactor: Redactor | None) -> ExportedPage:
        """Return the whole file. The page opens at `start`. Raises ConfigError if the page is not built."""
        stores = StoreList(stores=tuple(self._stores), directories=(), may_write=False, version=__version__)
        self.add("/api/stores", stores)
        replaced = Counter[str]()
        notes: list[str] = []
        responses: dict[str, Any] = self._responses
        tokens = self._tokens
        if redactor is not None:
            responses, tokens, title = redact_responses(responses, tokens, title, redactor, notes)
            for _, rule, _, times in redactor.report.places():
                replaced[rule] += times
            replaced += redactor.report.more
        data = encode({"start": start, "answers": {**responses, **msgspec.to_builtins(tokens)}})
        return ExportedPage(
            content=_document(title, data),
            rollouts=self.rollouts,
            redacted=redactor is not None,
            replaced=dict(replaced),
            notes=tuple(notes),
        )


def export_rollouts(
    api: ViewApi, location: StoreLocation, selected: Sequence[str], most_bytes: int
) -> tuple[ResponseFile, str]:
    """Return the file of a run with its rollouts, or the chosen ones, and the page to open.

    For a loop, the file has all lists, and the transcripts of chosen rollouts. Raises ConfigError if it is
    neither, if a rollout does not exist, or if the file would be too large.
    """
    file = ResponseFile(api, most_bytes)
    try:
        return file, _add_run_or_loop(file, location, selected)
    except ViewRefused as refused:
        raise ConfigError(f"{refused}; {refused.error.remedy}") from refused


def _add_run_or_loop(file: ResponseFile, location: StoreLocation, selected: Sequence[str]) -> str:
    api = file.api
    stores = api.list_stores({}, _NO_PARAMETERS).stores
    wanted_id = store_id(location)
    summary = next((store for store in stores if store.id == wanted_id), None)
    if summary is None or summary.kind not in ("run", "loop"):
        fault = "has no store" if summary is None else f"has a store of kind `{summary.kind}`"
        raise ConfigError(f"--export: {location} {fault}, expected a run or a loop; give the directory of one")
    if summary.state != "ok" and summary.error is not None:
        raise StoreError(summary.error.message)
    if summary.kind == "loop":
        add_loop(file, summary)
        runs = [store.id for store in stores if store.parent_id == wanted_id and store.state == "ok"]
    else:
        runs = [wanted_id]
    missing = set(selected)
    start = f"/s/{wanted_id}"
    for run in runs:
        rows = file.add_store(run, selected if summary.kind == "run" else ())
        selected_rows = (
            [row for row in rows if row.id in selected] if selected else rows if summary.kind == "run" else []
        )
        for row in selected_rows:
            file.add_rollout(run, row.id)
            missing.discard(row.id)
        for task in dict.fromkeys(row.task_id for row in selected_rows):
            file.add_task(run, task)
        if len(selected) == 1 and selected_rows:
            start = f"/s/{run}/r/{selected_rows[0].id}"
    if missing:
        names = ", ".join(repr(path[:100]) for path in sorted(missing)[:5])
        raise ConfigError(
            f"--export: {location} has no rollout {names}; give some that `understudy show --dir "
            f"'{location}'` lists"
        )
    return start


MAX_LISTED_ROLLOUTS: Final = 2_000
"""A report's file includes the lists of rollouts for up to this many."""


def export_report(figures: ReportFigures, locations: Sequence[StoreLocation]) -> tuple[ResponseFile, str]:
    """Return the file of a report, with the loop's page or the runs' lists if there are stores, and the page to
    open.
    """
    with_store = [
        location
        for location in locations
        if isinstance(location, StoreUrl) or is_loop(location) or (location / FILE).is_file()
    ]
    file = ResponseFile(ViewApi(Catalog(with_store), may_write=False))
    stores = file.api.list_stores({}, _NO_PARAMETERS).stores
    file.add("/api/report", report_view(figures, {store.id for store in stores}))
    rollouts = sum(sum(store.rollouts.values()) for store in stores if store.kind != "loop")
    for summary in stores:
        if summary.kind == "loop":
            add_loop(file, summary)
        elif summary.state == "ok":
            file.add_store(summary.id, with_rollouts=rollouts <= MAX_LISTED_ROLLOUTS)
    alone = len(locations) == 1 and len(with_store) == 1
    return file, f"/s/{store_id(locations[0])}/report" if alone else "/report"


def add_loop(file: ResponseFile, summary: StoreSummary) -> None:
    """Add a loop's page to a file."""
    file.add_summary(summary)
    file.add(f"/api/stores/{summary.id}/loop", file.api.read_loop({"store": summary.id}, _NO_PARAMETERS))


def _all_rows(read: Callable[[Any], Any], field: str) -> list[Any]:
    """Return all rows of a paged list."""
    rows: list[Any] = []
    cursor: Any = None
    while True:
        page = read(cursor)
        rows += getattr(page, field)
        cursor = page.next
        if cursor is None:
            return rows


def _one_row_per_task(rows: Iterable[TaskGridRow]) -> tuple[TaskGridRow, ...]:
    """Return the rows of a grid in which each task has one row, with all its samples."""
    tasks: dict[str, TaskGridRow] = {}
    for row in rows:
        before = tasks.get(row.task_id)
        samples = row.samples if before is None else (*before.samples, *row.samples)
        tasks[row.task_id] = msgspec.structs.replace(row, samples=samples)
    return tuple(tasks.values())


def _complete_text(read: Callable[[int], TextRange | None]) -> TextRange:
    """Return the whole of a text that is sent in ranges."""
    parts: list[str] = []
    at: int | None = 0
    while at is not None and (part := read(at)) is not None:
        parts.append(part.text)
        at = part.next
    text = "".join(parts)
    return TextRange(text=text, offset=0, size=len(text), next=None)


# --- redaction -----------------------------------------------------------------------------------------


def redact_responses(
    responses: dict[str, Any], tokens: dict[str, TokenPage], title: str, redactor: Redactor, notes: list[str]
) -> tuple[dict[str, Any], dict[str, TokenPage], str]:
    """Return the responses, token pages and title without secrets, and with voters' names replaced by numbers.

    A secret found in one place is replaced in all, paths included. Adds to `notes` which tokens were left out.
    """
    segments = list(_pages_by_segment(tokens))
    joined = ["".join(text for _, page in pages for text in page.texts) for pages in segments]
    scope = redactor.scoped_to([*responses.values(), *joined, title])
    voters: dict[str, str] = {}
    cleaned = {
        scope.name(path): _with_numbered_voters(scope.value(response, path), voters)
        for path, response in responses.items()
    }
    token_pages: dict[str, TokenPage] = {}
    for pages, text in zip(segments, joined, strict=True):
        if not text:
            continue
        at, spans = 0, iter([*scope.spans(text), (len(text), len(text))])
        start, end = next(spans)
        for path, page in pages:
            ids, texts = list(page.ids), list(page.texts)
            for index, token_text in enumerate(page.texts):
                while end <= at and end < len(text):
                    start, end = next(spans)
                if token_text and start < at + len(token_text):
                    ids[index], texts[index] = REDACTED_TOKEN, "█"
                at += len(token_text)
            token_pages[scope.name(path)] = msgspec.structs.replace(
                page,
                ids=tuple(ids),
                texts=tuple(texts),
                tokenizer=None if page.tokenizer is None else scope.text(page.tokenizer),
            )
    if len(token_pages) < len(tokens):
        notes.append(
            "tokens are left out where no tokenizer is on this machine: their texts cannot be searched for "
            "secrets (--tokenizer MODEL_DIR names one, --unredacted takes them as they are)"
        )
    return cleaned, token_pages, scope.text(title)


def _pages_by_segment(tokens: dict[str, TokenPage]) -> Iterator[list[tuple[str, TokenPage]]]:
    """Return the token pages by segment: one page for each call, in the order of the calls."""
    segments: dict[tuple[str, int], list[tuple[str, TokenPage]]] = {}
    for path, page in tokens.items():
        if page.segment is not None:
            attempt = path.rpartition("call=")[0]
            segments.setdefault((attempt, page.segment.index), []).append((path, page))
    yield from segments.values()


def _with_numbered_voters(response: Any, voters: dict[str, str]) -> Any:
    """Return a response in which people who voted are replaced by numbers."""
    for vote in response.get("votes") or ():
        vote["voter"] = voters.setdefault(vote["voter"], f"voter {len(voters) + 1}")
    return response


# --- the document --------------------------------------------------------------------------------------


def _document(title: str, data: bytes) -> bytes:
    """Return the page as one document. Raises ConfigError if it is not built."""
    page = Page()
    if not page.is_built:
        raise ConfigError(f"--export: {NOT_BUILT.splitlines()[0]} Build it with `make view`.")
    script = page.files["/assets/viewer.js"].content
    # In a string, a template or a regular expression, `\x3c` is `<`. The HTML parser must not see these tags.
    for ending in (b"</script", b"<script", b"<!--"):
        script = script.replace(ending, b"\\x3c" + ending[1:])
    style = page.files["/assets/viewer.css"].content
    policy = f"default-src 'none'; img-src data:; script-src {_digest(script)}; style-src {_digest(style)}"
    # In JSON, `<` occurs only inside strings, where it can be escaped, so the text cannot end its element.
    data = data.replace(b"<", b"\\u003c")
    return b"".join(
        (
            b'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode(),
            b'<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            b'<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n',
            f"<title>{escape(title)}</title>\n".encode(errors="replace"),
            b"<style>", style, b'</style>\n</head>\n<body>\n<div id="root"></div>\n',
            b"<noscript>This page needs JavaScript.</noscript>\n",
            b'<script type="application/json" id="understudy-data">', data, b"</script>\n",
            b'<script type="module">', script, b"</script>\n</body>\n</html>\n",
        )
    )  # fmt: skip


def _digest(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"
