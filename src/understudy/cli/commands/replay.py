"""`understudy replay`: what teachers would have done at the turns of the sessions in a store."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from understudy.cli.display.formatting import short, time_left
from understudy.cli.display.output import print_json
from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.replay.asking import Progress
    from understudy.replay.plan import Options, Selected, Share
    from understudy.replay.replay import Replay, Summary
    from understudy.replay.seat import Tally
    from understudy.replay.teachers import Teachers
    from understudy.store import Store

_NAME = re.compile(r"[\w.-]{1,80}")
_PLAIN_S, _TERMINAL_S = 10.0, 0.25
_WHY = {
    "unknown_family": "whose author's family is not known (--allow-unknown-family)",
    "no_teacher": "that no teacher may be asked about",
    "role": "of agents which the program started for itself (--all-roles)",
}
_WHY_NOT = {
    "same_family": "of its own family (--allow-same-family)",
    "unknown_family": "because its family is not known (family = … in the file, or --allow-unknown-family)",
}


def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The store, as `understudy ingest` made it.")],
    teachers: Annotated[
        Path, typer.Option("--teachers", "-t", metavar="FILE.toml", help="Who is asked; see docs/replay.md.")
    ],
    where: Annotated[
        str | None, typer.Option(metavar="SQL", help="Only turns that this is true of, as \"tests = 'failed'\".")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many states.")] = None,
    max_cost: Annotated[
        float | None,
        typer.Option(metavar="USD", help="What this replay may cost in all; it is never passed."),
    ] = None,
    samples: Annotated[
        int, typer.Option("--samples", "-n", min=1, help="How often each teacher is asked about a state.")
    ] = 1,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-j", min=1, help="How many asks are under way at a time.")
    ] = 8,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens an answer may have [default: 4096, or as the file says].")
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The teacher that chooses where they do not agree [default: [judge]]."),
    ] = None,
    allow_same_family: Annotated[
        bool, typer.Option("--allow-same-family", help="Ask teachers about turns of their own family, too.")
    ] = False,
    allow_unknown_family: Annotated[
        bool, typer.Option("--allow-unknown-family", help="Also where the author's, or a teacher's, is not known.")
    ] = False,
    all_roles: Annotated[
        bool, typer.Option("--all-roles", help="Also what a program asked for itself: warm-ups, summaries.")
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Ask again what was refused, and what was under way when a process died."),
    ] = False,
    name: Annotated[
        str, typer.Option(help="The replay's name: the same one goes on with what was asked before.")
    ] = "replay",
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Send the sessions as they are, with their secrets and names.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate what it would cost; nothing is sent.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the summary.")] = False,
) -> None:
    """Ask teachers what they would have done at the turns of sessions, and keep their answers in the store.

    Teachers of the family that wrote a turn are left out, and so are turns whose author is not known. Sessions are
    redacted before they are sent. Ctrl-C lets what is under way end; the same command goes on.
    """
    from understudy.replay.plan import Options
    from understudy.replay.replay import Replay
    from understudy.replay.teachers import read_teachers
    from understudy.store import Store

    if not _NAME.fullmatch(name):
        raise ConfigError(f"--name: {name!r} is no name; expected letters, digits, dots, hyphens; at most 80")
    options = Options(
        name=name,
        where=where,
        limit=limit,
        max_cost_usd=max_cost,
        samples=samples,
        concurrency=concurrency,
        all_roles=all_roles,
        allow_same_family=allow_same_family,
        allow_unknown_family=allow_unknown_family,
        again=again,
        redacted=not unredacted,
    )
    asked = _chosen(read_teachers(teachers), teachers, judge, max_tokens)
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not there; make a store with `understudy ingest --dir {directory}`")
    with Store.open(directory, create=False) as store:
        work = Replay(store, asked, options)
        if dry_run:
            selected, shares = work.estimate()
            _tell_estimate(selected, shares, options, json_)
            return
        _run(store, work, options, json_)


def _chosen(teachers: Teachers, file: Path, judge: str | None, max_tokens: int | None) -> Teachers:
    from msgspec.structs import replace

    from understudy.replay.teachers import Teachers

    if judge is not None:
        if (named := teachers.named(judge)) is None:
            known = ", ".join(teacher.name for teacher in teachers.teachers)
            raise ConfigError(f"--judge: there is no {judge!r} in {file}; there are: {known}")
        teachers = Teachers(teachers.teachers, named)
    if max_tokens is None:
        return teachers
    changed = [
        replace(teacher, config=replace(teacher.config, max_tokens=max_tokens)) for teacher in teachers.teachers
    ]
    return Teachers(tuple(changed), teachers.judge)


def _run(store: Store, work: Replay, options: Options, as_json: bool) -> None:
    from understudy.cli.interrupts import interrupted, run_stoppable
    from understudy.util.locks import locked

    busy = f"another process is at work on the replay {options.name!r} of {store.directory}; wait for it to end"
    with locked(store.directory / f".replay-{options.name}.lock", busy=busy):
        shown = _Shown(work.progress)

        def told(selected: Selected, shares: dict[str, Share]) -> None:
            if not as_json:
                _tell_estimate(selected, shares, options, as_json=False, err=True)

        with shown:
            summary = run_stoppable(work.run(told), work.stop)
    _tell(summary, as_json)
    if summary.stopped:
        raise interrupted()
    if summary.left or any(tally.failed for tally in summary.teachers.values()):
        raise typer.Exit(1)


# --- what is told --------------------------------------------------------------------------------------


def _tell_estimate(
    selected: Selected, shares: dict[str, Share], options: Options, as_json: bool, err: bool = False
) -> None:
    if as_json:
        told = {"selected": selected, "estimate": shares, "max_cost_usd": options.max_cost_usd}
        print_json(told)
        return
    families = ", ".join(f"{n} {name}" for name, n in selected.families.most_common())
    typer.echo(f"{selected.states} states to ask about" + (f": {families}" if families else ""), err=err)
    if guessed := selected.tools["inferred"]:
        typer.echo(f"tools of {guessed} states are not in their logs; inferred from the calls", err=err)
    if bare := selected.tools["none"]:
        typer.echo(f"{bare} states are without tools", err=err)
    for why, n in selected.left_out.most_common():
        typer.echo(f"left out: {n} states {_WHY.get(why, why)}", err=err)
    for name, reasons in selected.not_asked.items():
        for why, n in reasons.most_common():
            typer.echo(f"{name} is not asked about {n} states {_WHY_NOT.get(why, why)}", err=err)
    for name, share in shares.items():
        left = share.asks - share.done
        done = f" ({share.done} of {share.asks} done)" if share.done else ""
        tokens = f"about {short(share.prompt_tokens)}+{short(share.completion_tokens)} tokens"
        usd = "no price" if share.likely_usd is None else f"about {_dollars(share.likely_usd)}"
        worst = "" if share.worst_usd is None else f", at the most {_dollars(share.worst_usd)}"
        cost = "" if left == 0 else f", {tokens}, {usd}{worst}"
        typer.echo(f"{name}: {left} asks{done}{cost}", err=err)
    priced = [share for share in shares.values() if share.likely_usd is not None]
    if len(priced) > 1:
        likely, worst_of_all = (
            sum(getattr(share, key) for share in priced) for key in ("likely_usd", "worst_usd")
        )
        typer.echo(f"together: about {_dollars(likely)}, at the most {_dollars(worst_of_all)}", err=err)
    if options.max_cost_usd is not None:
        typer.echo(f"the ceiling is {_dollars(options.max_cost_usd)}", err=err)


def _tell(summary: Summary, as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        for name, tally in summary.teachers.items():
            typer.echo(f"{name}: {_ended(tally)}")
        if summary.judge is not None:
            said = ", ".join(f"{n} {what}" for what, n in summary.judged.most_common())
            typer.echo(f"judge: {_ended(summary.judge)}" + (f" ({said})" if said else ""))
        ceiling = "" if summary.max_cost_usd is None else f" of {_dollars(summary.max_cost_usd)}"
        typer.echo(f"this replay has cost {_dollars(summary.cost_usd)}{ceiling} so far, at the most")
    for name, tally in [*summary.teachers.items(), *([("judge", summary.judge)] if summary.judge else [])]:
        _warn(name, tally)
    if summary.left:
        typer.echo(f"{summary.left} asks are left", err=True)


def _ended(tally: Tally) -> str:
    before = {
        "noted only now": tally.recovered,
        "answered before": tally.answered_before,
        "refused before (--again asks again)": tally.refused_before,
        "under way when a process died (--again asks again)": tally.lost,
        "failed": tally.failed,
        "not sent, for the ceiling": tally.unaffordable,
    }
    parts = [f"{tally.answered} answered", *(f"{n} {what}" for what, n in before.items() if n)]
    return ", ".join(parts)


def _warn(name: str, tally: Tally) -> None:
    from understudy.util.text import visible

    for why, n in Counter(tally.why).most_common(3):
        typer.echo(visible(f"{name}: {n} failed: {why}"), err=True)
    if tally.dismissed:
        typer.echo(visible(f"{name} was asked no more: {tally.dismissed[:500]}"), err=True)
    if tally.overruns:
        typer.echo(f"{name} billed {tally.overruns} answers for more tokens than it was asked for", err=True)


def _dollars(sum_: float) -> str:
    return f"${sum_:.2f}" if sum_ >= 1 or sum_ == 0 else f"${sum_:.4f}" if sum_ >= 0.0001 else f"${sum_:.2g}"


class _Shown:
    """The progress on stderr while it is open: a line kept up to date on a terminal, else one now and then."""

    def __init__(self, progress: Progress) -> None:
        import threading

        self._progress = progress
        self._terminal = sys.stderr.isatty()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)
        self._began = time.monotonic()

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            typer.echo("\r\x1b[K", err=True, nl=False)

    def _draw(self) -> None:
        stopping, then = False, self._began + _PLAIN_S
        while not self._ended.wait(_TERMINAL_S):
            now = time.monotonic()
            if not (self._progress.total or self._progress.stopping):
                continue  # the estimate is being made and printed
            if self._terminal:
                typer.echo(f"\r{self._line(now)}\x1b[K", err=True, nl=False)
            elif now >= then or self._progress.stopping != stopping:
                typer.echo(self._line(now), err=True)
                then = now + _PLAIN_S
            stopping = self._progress.stopping

    def _line(self, now: float) -> str:
        at = self._progress
        parts = [f"{at.ended}/{at.total} asks", f"{at.under_way} under way", f"${at.cost_usd:.4f}"]
        if at.held_usd:
            parts.append(f"${at.held_usd:.4f} held")
        if 0 < at.ended < at.total:
            parts.append(time_left((now - self._began) / at.ended * (at.total - at.ended)))
        if at.stopping:
            parts.append("finishing what is under way; Ctrl-C again stops at once")
        return " · ".join(parts)
