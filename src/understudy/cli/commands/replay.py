"""`understudy replay`: asks what teachers would have done at the turns of the sessions in a store."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from msgspec.structs import replace

from understudy.cli.interrupts import interrupted, run_stoppable
from understudy.cli.options import command
from understudy.cli.output import Json, counted, print_json
from understudy.cli.progress import LiveStatus, live, short, time_left
from understudy.errors import ConfigError
from understudy.replay.asker import AskCounts, AskProgress
from understudy.replay.plan import ReplaySettings, SelectionCounts, TeacherEstimate
from understudy.replay.replay import Replay, ReplaySummary
from understudy.replay.teachers import Teachers, read_teachers
from understudy.store import Store
from understudy.store.address import parse_location
from understudy.util.text import visible

_NAME = re.compile(r"[\w.-]{1,80}")
_LEFT_OUT_REASONS = {
    "unknown_family": "whose author's family is not known (--allow-unknown-family)",
    "no_teacher": "that no teacher may be asked about",
    "role": "of agents which the program started for itself (--all-roles)",
}
_NOT_ASKED_REASONS = {
    "same_family": "of its own family (--allow-same-family)",
    "unknown_family": "because its family is not known (family = … in the file, or --allow-unknown-family)",
}


@command
def replay(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The store that `understudy ingest` made: a directory, or postgresql://…/DATABASE."
        ),
    ],
    teachers: Annotated[
        Path,
        typer.Option(
            "--teachers", "-t", metavar="FILE.toml", help="A TOML file with the models to ask; see docs/replay.md."
        ),
    ],
    settings: ReplaySettings,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Maximum number of tokens in an answer [default: 4096, or the file's value]."),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The teacher that decides when teachers disagree [default: the one under [judge] in the "
            "--teachers file].",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the cost; send nothing.")] = False,
    json_: Json = False,
) -> None:
    """Ask other models (teachers) what they would have done at the turns of sessions, and store their answers.

    A teacher is not asked about turns of its own model family, and no teacher about turns of an unknown model.
    Sessions are redacted before they are sent. After Ctrl-C the requests in progress still finish; the same
    command continues.
    """
    if not _NAME.fullmatch(settings.name):
        raise ConfigError(
            f"--name: invalid name {settings.name!r}; give one of at most 80 letters, digits, dots and hyphens"
        )
    selected = _select_teachers(read_teachers(teachers), teachers, judge, max_tokens)
    location = parse_location(directory)
    if isinstance(location, Path) and not location.is_dir():
        if location.exists():
            raise ConfigError(f"{location} is not a directory; give a store that `understudy ingest --dir` wrote")
        raise ConfigError(f"{location} does not exist; create a store with `understudy ingest --dir {location}`")
    with Store.open(location, create=False) as store:
        work = Replay(store, selected, settings)
        if dry_run:
            states, shares = work.estimate()
            _print_estimate(states, shares, settings, json_)
            return
        _run(store, work, settings, json_)


def _select_teachers(teachers: Teachers, file: Path, judge: str | None, max_tokens: int | None) -> Teachers:
    if judge is not None:
        if (named := teachers.named(judge)) is None:
            names = ", ".join(teacher.name for teacher in teachers.teachers)
            raise ConfigError(f"--judge: unknown teacher {judge!r}; give one of those in {file}: {names}")
        teachers = Teachers(teachers.teachers, named)
    if max_tokens is None:
        return teachers
    changed = [
        replace(teacher, config=replace(teacher.config, max_tokens=max_tokens)) for teacher in teachers.teachers
    ]
    return Teachers(tuple(changed), teachers.judge)


def _run(store: Store, work: Replay, settings: ReplaySettings, as_json: bool) -> None:
    busy = f"another process is at work on the replay {settings.name!r} of {store.location}; wait for it to end"
    with store.hold(f".replay-{settings.name}.lock", busy=busy):

        def print_estimate(selected: SelectionCounts, shares: dict[str, TeacherEstimate]) -> None:
            if not as_json:
                _print_estimate(selected, shares, settings, as_json=False, err=True)

        with live(_ReplayProgress(work.progress), sys.stderr) as display:

            def stop() -> bool:
                display.changed.set()
                return work.stop()

            summary = run_stoppable(work.run(print_estimate), stop)
    _print_summary(summary, as_json)
    if summary.stopped:
        raise interrupted()
    if summary.left or any(tally.failed for tally in summary.teachers.values()):
        raise typer.Exit(1)


# --- output --------------------------------------------------------------------------------------------


def _print_estimate(
    selected: SelectionCounts,
    shares: dict[str, TeacherEstimate],
    settings: ReplaySettings,
    as_json: bool,
    err: bool = False,
) -> None:
    if as_json:
        print_json({"selected": selected, "estimate": shares, "max_cost_usd": settings.max_cost_usd})
        return
    families = counted(dict(selected.families.most_common()))
    typer.echo(f"{selected.states} states to ask about" + (f": {families}" if families else ""), err=err)
    for source, how in (
        ("version", "as that version of the agent offers them"),
        ("inferred", "inferred from calls"),
    ):
        if number := selected.tools[source]:
            typer.echo(f"tools of {number} states are not in their logs: {how}", err=err)
    if without_tools := selected.tools["none"]:
        typer.echo(f"{without_tools} states are without tools", err=err)
    for reason, n in selected.left_out.most_common():
        typer.echo(f"left out: {n} states {_LEFT_OUT_REASONS.get(reason, reason)}", err=err)
    for name, reasons in selected.not_asked.items():
        for reason, n in reasons.most_common():
            typer.echo(f"{name} is not asked about {n} states {_NOT_ASKED_REASONS.get(reason, reason)}", err=err)
    for name, share in shares.items():
        asks_left = share.asks - share.done
        done_note = f" ({share.done} of {share.asks} done)" if share.done else ""
        tokens = f"about {short(share.prompt_tokens)}+{short(share.completion_tokens)} tokens"
        usd = "no price" if share.likely_usd is None else f"about {_dollars(share.likely_usd)}"
        worst = "" if share.worst_usd is None else f", at the most {_dollars(share.worst_usd)}"
        cost = "" if asks_left == 0 else f", {tokens}, {usd}{worst}"
        typer.echo(f"{name}: {asks_left} asks{done_note}{cost}", err=err)
    priced = [share for share in shares.values() if share.likely_usd is not None]
    if len(priced) > 1:
        likely, worst_of_all = (
            sum(getattr(share, key) for share in priced) for key in ("likely_usd", "worst_usd")
        )
        typer.echo(f"together: about {_dollars(likely)}, at the most {_dollars(worst_of_all)}", err=err)
    if settings.max_cost_usd is not None:
        typer.echo(f"the cost budget is {_dollars(settings.max_cost_usd)}", err=err)


def _print_summary(summary: ReplaySummary, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        for name, tally in summary.teachers.items():
            typer.echo(f"{name}: {_tally_text(tally)}")
        if summary.judge is not None:
            verdicts = counted(dict(summary.judged.most_common()))
            typer.echo(f"judge: {_tally_text(summary.judge)}" + (f" ({verdicts})" if verdicts else ""))
        limit = "" if summary.max_cost_usd is None else f" of {_dollars(summary.max_cost_usd)}"
        typer.echo(f"cost of this replay so far: at most {_dollars(summary.cost_usd)}{limit}")
    for name, tally in [*summary.teachers.items(), *([("judge", summary.judge)] if summary.judge else [])]:
        _print_warnings(name, tally)
    if summary.left:
        typer.echo(f"{summary.left} asks are left", err=True)


def _tally_text(tally: AskCounts) -> str:
    before = {
        "noted only now": tally.recovered,
        "answered before": tally.answered_before,
        "refused before (--again asks again)": tally.refused_before,
        "under way when a process died (--again asks again)": tally.lost,
        "failed": tally.failed,
        "not sent, over the cost budget": tally.unaffordable,
    }
    return counted({"answered": tally.answered} | {what: n for what, n in before.items() if n})


def _print_warnings(name: str, tally: AskCounts) -> None:
    for message, n in Counter(tally.failure_messages).most_common(3):
        typer.echo(visible(f"{name}: {n} failed: {message}"), err=True)
    if tally.dismissed:
        typer.echo(visible(f"{name} was not asked further: {tally.dismissed[:500]}"), err=True)
    if tally.overruns:
        typer.echo(f"{name} billed {tally.overruns} answers for more tokens than it was asked for", err=True)


def _dollars(sum_: float) -> str:
    return f"${sum_:.2f}" if sum_ >= 1 or sum_ == 0 else f"${sum_:.4f}" if sum_ >= 0.0001 else f"${sum_:.2g}"


class _ReplayProgress(LiveStatus):
    """Shows how many asks have ended, and what they have cost."""

    def __init__(self, progress: AskProgress) -> None:
        super().__init__()
        self._progress = progress
        self._started = time.monotonic()

    def line(self) -> str:
        """Return the replay's status as a line; "" while its estimate is made and printed."""
        at = self._progress
        if not (at.total or at.stopping):
            return ""
        parts = [f"{at.ended}/{at.total} asks", f"{at.under_way} under way", f"${at.cost_usd:.4f}"]
        if at.held_usd:
            parts.append(f"${at.held_usd:.4f} held")
        if 0 < at.ended < at.total:
            parts.append(time_left((time.monotonic() - self._started) / at.ended * (at.total - at.ended)))
        if at.stopping:
            parts.append("finishing what is under way; Ctrl-C again stops at once")
        return " · ".join(parts)
