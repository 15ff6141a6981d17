"""`understudy export`: writes what others can learn from out of a store; one command for each installed format."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

from understudy.cli.options import command_group
from understudy.cli.output import Json, counted, print_json
from understudy.cli.progress import ProgressLine
from understudy.cli.settings import roles_of, thinking_of
from understudy.errors import ConfigError
from understudy.types import Protection

if TYPE_CHECKING:
    from understudy.export.base import ExportSummary, FormatTraits
    from understudy.export.corpus import Origin
    from understudy.store import Store
    from understudy.trajectory.roles import Role

_CORPUS_PARAMETERS = ("corpus", "output", "report")
"""Parameters of an exporter that are not options of its command."""


_MAX_FILE_NAMES = 8
"""The number of file names in a summary."""


class _FormatCommands(TyperGroup):
    """The formats as commands. Each command is made when it is requested."""

    def list_commands(self, ctx: Any) -> list[str]:
        from understudy.plugins import names

        return names("exports")

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        from understudy.plugins import load, names

        return _command(cmd_name, load("exports", cmd_name)) if cmd_name in names("exports") else None


app = command_group("Write sessions and what a run gathered in a format that others read.", cls=_FormatCommands)


@app.callback()
def _formats() -> None:  # pyright: ignore[reportUnusedFunction]
    """Write sessions and rollouts in a format that other tools read."""


def _common_options(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="A directory that `run`, `train loop` or `ingest` wrote, or a database's URL."
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The directory to write to [default: DIR].")
    ] = None,
    from_: Annotated[
        str, typer.Option("--from", metavar="sessions|rollouts|all", help="What to export.", show_default=True)
    ] = "all",
    run: Annotated[
        str | None, typer.Option("--run", help="The run in the store to export, or all [default: the latest].")
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="Only export calls with these roles: main, subagent, compaction, auxiliary.")
    ] = None,
    where: Annotated[
        str | None,
        typer.Option(
            metavar="SQL",
            help="Only export session turns that match this SQL condition, such as \"tests = 'passed'\".",
        ),
    ] = None,
    test_share: Annotated[
        float,
        typer.Option(
            "--test-share", min=0.0, max=0.99, help="Share of projects and tasks that goes into the test split."
        ),
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed for the test split.")] = 0,
    solved_only: Annotated[
        bool,
        typer.Option(
            "--solved-only/--unsolved-too",
            help="Leave out rollouts that did not solve their task, or include them.",
        ),
    ] = False,
    include_suspicious: Annotated[
        bool, typer.Option("--include-suspicious", help="Also export rollouts whose patch may deceive the grader.")
    ] = False,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Do not redact the secrets, names and paths in sessions.")
    ] = False,
    json_: Json = False,
) -> None:
    """The options that every format has. The implementation is in `_export`."""


def _overlap_options(
    protection: Annotated[
        Protection,
        typer.Option(
            "--protection",
            help="Leave out rewards that rewritten tests (twins) confirm less than this.",
        ),
    ] = "none",
    drop_near_duplicates: Annotated[
        bool,
        typer.Option(
            "--drop-near-duplicates",
            help="Leave out all near duplicates of a session [default: only those in the other split].",
        ),
    ] = False,
    apart_from: Annotated[
        list[str] | None,
        typer.Option(
            "--apart-from",
            metavar="STORE",
            help="Treat the sessions of this store as already exported, to avoid duplicates; repeatable.",
        ),
    ] = None,
    exclude_tasks: Annotated[
        Path | None,
        typer.Option(
            "--exclude-tasks",
            metavar="FILE",
            help=(
                "Leave out sessions and rollouts of these tasks: a file of rows with instance_id, repo, patch, "
                "as in SWE-bench."
            ),
        ),
    ] = None,
) -> None:
    """More options that every format has: leaving out unconfirmed rewards, duplicates and unwanted tasks."""


def _client_options(
    key: Annotated[
        list[str] | None,
        typer.Option(
            "--key",
            metavar="NAME",
            help=(
                "Export the calls that a gateway answered for this key, instead of sessions and rollouts; "
                "repeatable. They are not redacted, so --unredacted is required."
            ),
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --key: only calls that began at or after this time (ISO 8601, UTC)."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="With --key: only calls that began before this time.")
    ] = None,
) -> None:
    """The options of formats that can export a gateway's calls."""


def _answer_options(
    include_lossy: Annotated[
        bool,
        typer.Option("--include-lossy", help="Also export turns whose log lacks part of what the model saw."),
    ] = False,
    thinking: Annotated[
        str | None,
        typer.Option(
            metavar="as-logged|both|strip|only-when-both",
            help=(
                "The thinking in answers: keep as logged; require it; strip it; or keep it only if all answers "
                "of a row have it [default: only-when-both in pairs, else as-logged]."
            ),
        ),
    ] = None,
) -> None:
    """The options about which turns, and how much of each answer, are learned."""


def _length_options(
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-tokens",
            min=1,
            metavar="N",
            help=(
                "Shorten longer conversations to this many tokens: the system prompt, the first user message and "
                "the newest turns are kept; needs --tokenizer."
            ),
        ),
    ] = None,
    max_chars: Annotated[
        int | None, typer.Option("--max-chars", min=1, metavar="N", help="The same limit in characters.")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR", help="The model directory whose tokenizer and chat template count the tokens."
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W:SQL",
            help=(
                "Repeat session turns that match a condition, such as \"3: tests = 'passed'\"; 0 leaves them out. "
                "Repeatable; the first match counts, others have weight 1."
            ),
        ),
    ] = None,
) -> None:
    """The options about the length of rows, and how often they occur in the export."""


def _command(name: str, function: Callable[..., ExportSummary]) -> Any:
    """Make the command of a format: the common options that apply to it, then its own.

    Newer releases of Typer contain click and older ones depend on it, so click's types are not named here.
    """
    from understudy.export.base import traits_of

    traits = traits_of(function)

    def run(**options: Any) -> None:
        format_options = {option: options.pop(option) for option in own_options}
        _export(name, function, traits, options, format_options)

    own_options = _own_options(function)
    groups = (_common_options, _overlap_options, _client_options, _answer_options, _length_options)
    common = [
        parameter for group in groups for parameter in _parameters(group) if parameter.name not in own_options
    ]
    parameters = [_with_default(parameter, traits) for parameter in common if _applies(parameter.name, traits)]
    parameters += own_options.values()
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__doc__ = (inspect.getdoc(function) or "").partition("\n\nRaises ")[0]
    maker = typer.Typer(rich_markup_mode=None, add_completion=False)
    maker.command(name)(run)
    return typer.main.get_command(maker)


def _applies(name: str, traits: FormatTraits) -> bool:
    """Return whether a common option applies to a format."""
    needs = {
        "from_": len(traits.origins) > 1,
        "where": "sessions" in traits.origins,
        "drop_near_duplicates": "sessions" in traits.origins,
        "apart_from": "sessions" in traits.origins,
        "include_lossy": "sessions" in traits.origins,
        "thinking": traits.chooses_thinking,
        "weight": traits.weights,
        **dict.fromkeys(("max_tokens", "max_chars", "tokenizer"), traits.cuts),
        **dict.fromkeys(("key", "since", "until"), traits.clients),
        "unredacted": "sessions" in traits.origins or traits.clients,
        "test_share": traits.splits,
        "seed": traits.splits,
        "solved_only": traits.chooses_solved,
    }
    return needs.get(name, True)


def _with_default(parameter: inspect.Parameter, traits: FormatTraits) -> inspect.Parameter:
    """Return a common option with the default of a format."""
    from understudy.trajectory.roles import ROLES

    if parameter.name == "solved_only":
        return parameter.replace(default=traits.solved_only)
    if parameter.name == "output" and not traits.into_run:
        option = typer.Option(
            "--output", "-o", help="The directory to write to; an earlier export there is replaced."
        )
        return parameter.replace(default=inspect.Parameter.empty, annotation=Annotated[Path, option])
    if parameter.name == "roles":
        usual = "all" if set(traits.roles) == set(ROLES) else ", ".join(traits.roles)
        help_text = f"Only calls, or sessions, of these roles: {', '.join(ROLES)} [default: {usual}]."
        return parameter.replace(annotation=Annotated[str | None, typer.Option(help=help_text)])
    return parameter


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(function).parameters.values()
    ]


def _own_options(function: Callable[..., ExportSummary]) -> dict[str, inspect.Parameter]:
    """Return the options that a format declares by its keyword-only parameters."""
    options: dict[str, inspect.Parameter] = {}
    for parameter in _parameters(function):
        if parameter.name in _CORPUS_PARAMETERS:
            continue
        type_, help_text = parameter.annotation, ""
        if get_origin(type_) is Annotated:
            type_, *extras = get_args(type_)
            help_text = next((extra for extra in extras if isinstance(extra, str)), "")
        flag = "--" + parameter.name.strip("_").replace("_", "-")
        if type_ is bool and parameter.default is True:
            flag += f"/--no-{flag.removeprefix('--')}"
        option = typer.Option(flag, help=help_text)
        options[parameter.name] = parameter.replace(annotation=Annotated[type_, option])
    return options


def _export(
    name: str,
    function: Callable[..., ExportSummary],
    traits: FormatTraits,
    options: Mapping[str, Any],
    format_options: Mapping[str, Any],
) -> None:
    from understudy.cli.templates import chat_template
    from understudy.export.corpus import Corpus, ExportSelection
    from understudy.export.mixture import parse_weight_rule
    from understudy.redact.redactor import Redactor
    from understudy.store import Store
    from understudy.store.address import StoreUrl, parse_location

    roles = roles_of(options["roles"], traits.roles)
    clients, since, until = _chosen_clients(options)
    tokenizer: Path | None = options.get("tokenizer")
    location = parse_location(options["directory"])
    if isinstance(location, StoreUrl) and options["output"] is None:
        raise ConfigError(
            f"{location} is a database, in which no export can be written; name a directory to write to with "
            "--output"
        )
    with Store.open(location, create=False) as store, chat_template(tokenizer) as template:
        origins = () if clients else _origins(options.get("from_", "all"), traits, store)
        unredacted: bool = options.get("unredacted", False)
        selection = ExportSelection(
            origins=origins,
            run=_run_to_export(options["run"], store, origins),
            roles=roles,
            include_suspicious=options["include_suspicious"],
            protection=options["protection"],
            include_lossy=options.get("include_lossy", False),
            thinking=thinking_of(options.get("thinking")),
            where=options.get("where"),
            solved_only=options.get("solved_only", False),
            test_share=options.get("test_share", 0.0),
            seed=options.get("seed", 0),
            drop_near_duplicates=options.get("drop_near_duplicates", False),
            apart_from=tuple(map(parse_location, options.get("apart_from") or ())),
            exclude_tasks=options.get("exclude_tasks"),
            cut_tokens=options.get("max_tokens"),
            cut_chars=options.get("max_chars"),
            tokenizer=tokenizer and tokenizer.resolve().name,
            weights=tuple(map(parse_weight_rule, options.get("weight") or ())),
            clients=clients,
            since=since,
            until=until,
        )
        redactor = Redactor.from_user_key() if "sessions" in origins and not unredacted else None
        corpus = Corpus(store, selection, redactor, unredacted=unredacted, template=template)
        exported = function(corpus, options["output"] or location, report=ExportProgress(), **format_options)
    if options["json_"]:
        print_json(exported)
    else:
        _summarise(name, exported, traits, roles)
    if exported.unredacted:
        typer.echo(
            f"warning: {exported.output_dir} is not redacted and may contain secrets; do not share it",
            err=True,
        )


_NOT_FOR_CLIENTS = (
    "run",
    "where",
    "solved_only",
    "include_suspicious",
    "include_lossy",
    "drop_near_duplicates",
    "apart_from",
    "weight",
)
"""Options that do not apply to a gateway's calls."""


def _chosen_clients(options: Mapping[str, Any]) -> tuple[tuple[str, ...], float, float]:
    """Return the keys whose calls are exported, and the bounds of the calls' start times in Unix seconds.

    Raises ConfigError for options that exclude each other, and for invalid times.
    """
    clients = tuple(options.get("key") or ())
    times = {name: text for name in ("since", "until") if (text := options.get(name)) is not None}
    if not clients:
        if times:
            raise ConfigError(
                f"--{next(iter(times))} only applies with --key; name the key of a gateway's client, or leave "
                "the option out"
            )
        return (), -math.inf, math.inf
    for name in _NOT_FOR_CLIENTS:
        if options.get(name):
            flag = name.replace("_", "-")
            raise ConfigError(
                f"--{flag} applies to sessions and rollouts only, and --key exports calls of a gateway's clients; "
                "leave out one of them"
            )
    if options.get("from_", "all") != "all":
        raise ConfigError(
            "--from chooses sessions or rollouts, and --key exports calls of a gateway's clients; leave out one "
            "of them"
        )
    since, until = (_seconds(f"--{name}", times[name]) if name in times else None for name in ("since", "until"))
    return clients, -math.inf if since is None else since, math.inf if until is None else until


def _seconds(option: str, text: str) -> float:
    """Parse an ISO 8601 time into Unix seconds. Without an offset it is UTC. Raises ConfigError."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(
            f"{option}: invalid time {text[:100]!r}; give one in ISO 8601, such as 2026-05-01 or "
            "2026-05-01T08:00:00+02:00 (without an offset it is UTC)"
        ) from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def _origins(requested: str, traits: FormatTraits, store: Store) -> tuple[Origin, ...]:
    """Return what to export: what was requested, or by default all that the format writes and the store has.

    Raises ConfigError for an unknown value.
    """
    from understudy.export.corpus import ORIGINS

    if requested == "all":
        if len(traits.origins) == 1:
            return traits.origins
        has_any = {"sessions": store.sessions.count()[0] > 0, "rollouts": bool(store.runs.all())}
        # For an empty store choose rollouts, so that the error about what is missing speaks of rollouts.
        chosen: tuple[Origin, ...] = tuple(origin for origin in traits.origins if has_any[origin]) or ("rollouts",)
        if traits.into_run and len(chosen) > 1:
            raise ConfigError(
                "the store has sessions and rollouts, which this format writes to different files; choose one: "
                "--from sessions or --from rollouts"
            )
        return chosen
    for origin in ORIGINS:
        if requested == origin:
            return (origin,)
    raise ConfigError(f"--from: unknown value {requested[:100]!r}; give one of {', '.join((*ORIGINS, 'all'))}")


def _run_to_export(requested: str | None, store: Store, origins: tuple[Origin, ...]) -> str | None:
    """Return the id of the run to export; None for all."""
    if requested is not None or "rollouts" not in origins:
        return None if requested == "all" else requested
    runs = sorted(store.runs.all(), key=lambda run: run.created_at)
    if len(runs) > 1:
        typer.echo(f"exporting run {runs[-1].id}, the latest of {len(runs)}; --run chooses another", err=True)
    return runs[-1].id if runs else None


def _summarise(name: str, exported: ExportSummary, traits: FormatTraits, roles: tuple[Role, ...]) -> None:
    if traits.into_run and "session" not in exported.origins:
        _summarise_run(exported, roles)
        return
    typer.echo(
        f"{exported.rows} rows as {name} in {exported.output_dir}: {counted(exported.splits)}"
        f" ({shortened_list(exported.files)})"
    )
    for title, counts in (
        ("from", exported.origins),
        ("sources", exported.sources),
        ("model families", exported.families),
        ("tools", exported.tools_sources),
        ("licences", exported.licences),
        ("redacted", exported.redaction),
    ):
        if counts:
            typer.echo(f"{title}: {counted(counts)}")
    for note in exported.notes:
        typer.echo(note)
    for part in exported.mixture:
        typer.echo(
            f"weight {part.weight:g} ({part.condition}): {part.answers} answers, learned {part.learned} times"
        )
    if exported.lengths is not None:
        typer.echo(exported.lengths.summary() + "\n" + "\n".join(exported.lengths.bars()))
    if exported.left_out:
        typer.echo(f"left out: {counted(exported.left_out)}", err=True)
    if exported.load:
        typer.echo("load it with:\n" + "\n".join(f"  {line}" for line in exported.load.splitlines()))
    if not exported.unredacted:
        typer.echo(f"publish it with: understudy push {exported.output_dir} NAME/DATASET")


def _summarise_run(exported: ExportSummary, roles: tuple[Role, ...]) -> None:
    items = f"{exported.instances} instances, {exported.rollouts} rollouts"
    if exported.unredacted:
        items = "calls of a gateway's clients"
    typer.echo(f"{items}, {exported.rows} rows and {exported.spans} spans in {exported.output_dir}")
    if exported.segments:
        number = sum(exported.segments.values())
        typer.echo(f"the calls merge into {number} token sequences: {counted(exported.segments)}")
    if exported.roles:
        by_role = {f"{role}{'' if role in roles else ' (left out)'}": n for role, n in exported.roles.items()}
        typer.echo(f"the calls by role: {counted(by_role)}")
    if exported.without_tokens:
        typer.echo(
            f"{exported.without_tokens} answered calls have no token ids, because their backend gives none: "
            "they are in the streams, not in the datasets",
            err=True,
        )
    if exported.suspicious:
        typer.echo(
            f"left out: {exported.suspicious} rollouts with a suspicious patch; see why with `understudy show`; "
            "--include-suspicious includes them",
            err=True,
        )
    for status, count in exported.left_out.items():
        typer.echo(f"left out: {count} rollouts without a verdict, {status}", err=True)
    if exported.rows and not exported.unredacted:
        typer.echo(f"publish it with: understudy push {exported.output_dir} NAME/DATASET")


def shortened_list(names: Sequence[str]) -> str:
    """Return file names as a list that is short enough to read."""
    more = len(names) - _MAX_FILE_NAMES
    return ", ".join(names) if more <= 0 else f"{', '.join(names[:_MAX_FILE_NAMES])} and {more} more"


class ExportProgress:
    """Shows the progress of an export on a terminal."""

    def __init__(self) -> None:
        self._line = ProgressLine()

    def __call__(self, done: int, total: int) -> None:
        if sys.stderr.isatty():
            self._line.show(
                f"exporting {done} of {total}" if total else f"exported {done} rows", at_once=done == total
            )
        if done == total:
            self._line.end()


def push(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="The directory of the export to push.")],
    repo: Annotated[str, typer.Argument(metavar="REPO", help="The dataset on the hub: NAME/DATASET.")],
    private: Annotated[
        bool, typer.Option("--private/--public", help="Whether the dataset is private or public.")
    ] = True,
    unredacted: Annotated[
        bool, typer.Option("--unredacted", help="Push sessions even if they were not redacted.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be pushed.")] = False,
    json_: Json = False,
) -> None:
    """Push an export to the Hugging Face Hub as a dataset, with its card.

    The hub's own library authenticates you: use `hf auth login` or HF_TOKEN. After an interruption the same
    command continues: what the hub has already is not sent again.
    """
    from understudy.export import push as pushing

    pushed = pushing.plan_push(output, repo, private=private, unredacted=unredacted)
    if not dry_run:
        pushed = pushing.push(output, pushed, lambda text: typer.echo(text, err=True))
    if json_:
        print_json(pushed)
        return
    size = sum(pushed.files.values())
    verb = "would be pushed" if dry_run else "are"
    where = f"{'private' if pushed.private else 'PUBLIC'} dataset {pushed.repo}"
    typer.echo(
        f"{len(pushed.files)} files, {size / 1e6:.1f} MB, {verb} in the {where}: "
        f"{shortened_list(list(pushed.files))}"
    )
    if pushed.url:
        typer.echo(pushed.url)
