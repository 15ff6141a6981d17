"""What `understudy train` learns from, as its options choose it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, cast

from understudy.errors import ConfigError

if TYPE_CHECKING:
    from understudy.train.data.groups import Sequence
    from understudy.trajectory.roles import Role


def refuse_of_exports(sources: Many[Path], given: Mapping[str, object]) -> None:
    """Raise ConfigError when a source is an export and one of these options is given, which choose rollouts."""
    from understudy.train.data.load import is_export

    said = next((option for option, value in given.items() if value), None)
    if said is not None and (export := next(filter(is_export, sources), None)) is not None:
        raise ConfigError(
            f"{said} chooses among rollouts, and {export} is an export, of which all was chosen when it was "
            "written; leave the option out, or export anew with it"
        )


def imitated(
    model: Path,
    sources: Many[Path],
    run: str | None,
    roles: str | None,
    threshold: float,
    include_suspicious: bool,
    left_out: Counter[str],
) -> list[Sequence]:
    """The sequences to imitate, from stores and exports. Raises ConfigError when there are none."""
    from understudy.train.data.load import export_format, format_counts, groups
    from understudy.train.data.tokenizer_check import check_tokenizer_matches

    found: list[Sequence] = []
    exact: list[Path] = []
    for source in sources:
        if export_format(source) == "trl-sft":
            if threshold != 1.0:
                raise ConfigError(f"--threshold: conversations of an export, as in {source}, have no rewards")
            from understudy.train.data.render import sequences_from_export

            found += sequences_from_export(source, model, left_out)
        else:
            exact.append(source)
    check_tokenizer_matches(exact, model, run)
    read = groups(
        exact,
        run=run,
        roles=roles_of(roles),
        include_suspicious=include_suspicious,
        logprobs=False,
        left_out=left_out,
    )
    for group in read:
        for rollout in group.rollouts:
            if rollout.reward >= threshold:
                found += rollout.sequences
            else:
                left_out[f"rollouts with a reward below {threshold:g}"] += 1
    if not found:
        raise ConfigError(
            f"there is nothing to imitate in {', '.join(map(str, sources))}; left out: {format_counts(left_out)}"
        )
    return found


def roles_of(said: str | None) -> tuple[Role, ...]:
    """The roles that a person's word means. Raises ConfigError for one that is none."""
    from understudy.export.corpus import WORK
    from understudy.trajectory.roles import ROLES

    if said is None:
        return WORK
    names = tuple(part.strip() for part in said.split(",") if part.strip())
    if unknown := [name for name in names if name not in ROLES]:
        raise ConfigError(f"--roles: {unknown[0]!r} is none of {', '.join(ROLES)}")
    return cast("tuple[Role, ...]", names)
