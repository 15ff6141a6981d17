"""What every export format shares.

A format is a function `(corpus, output, *, report, **options) -> ExportSummary`, found by the entry points
`understudy.exports`. It writes a corpus to the directory `output`, calling `report` as it goes on. Its other
keyword-only parameters are its options: the command line makes one of each, `--name`, of its type and default;
`Annotated[type, "help"]` gives the help. The first sentence of its docstring is the command's. What it takes where
the user says nothing is in its `FormatTraits` (see `exporter`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct, field

from understudy.export.corpus import ORIGINS, Origin
from understudy.export.lengths import LengthFigures
from understudy.export.mixture import MixturePart
from understudy.trajectory.roles import Role
from understudy.types import WORK_ROLES

ProgressCallback = Callable[[int, int], None]
"""Called with `(done, of)` while something is written; `of` is 0 where it is not known beforehand."""


class ExportSummary(Struct, frozen=True, kw_only=True):
    """What an export wrote: `rows` in `files`, by split in `splits`; `left_out` counts by why what it did not.

    `origins`, `sources`, `licences`, `families` and `tools_sources` (where the tools are from) count rows,
    `lengths` tells how long they are, `mixture` what weights did. `redaction` counts by rule what was replaced;
    `unredacted`: there are sessions in it that were not redacted. `notes` are sentences for a person, `load` is
    how to load it.

    Of the format "hf" alone: `instances`, `rollouts` and `spans` written; in `left_out` are rollouts without a
    verdict by status, in `suspicious` those kept out because their patch may deceive the grader; `without_tokens`
    are answered calls whose backend gave no token ids (in the stream, not in a dataset); `segments` counts the
    token sequences that the calls merge into, by why each began (`trajectory.samples`); `roles` the calls by what
    they were for, also those that were not asked for.
    """

    output_dir: str
    rows: int
    instances: int = 0
    rollouts: int = 0
    spans: int = 0
    without_tokens: int = 0
    segments: dict[str, int] = field(default_factory=dict[str, int])
    roles: dict[str, int] = field(default_factory=dict[str, int])
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    suspicious: int = 0
    splits: dict[str, int] = field(default_factory=dict[str, int])
    files: list[str] = field(default_factory=list[str])
    origins: dict[str, int] = field(default_factory=dict[str, int])
    sources: dict[str, int] = field(default_factory=dict[str, int])
    licences: dict[str, int] = field(default_factory=dict[str, int])
    families: dict[str, int] = field(default_factory=dict[str, int])
    tools_sources: dict[str, int] = field(default_factory=dict[str, int])
    redaction: dict[str, int] = field(default_factory=dict[str, int])
    lengths: LengthFigures | None = None
    mixture: list[MixturePart] = field(default_factory=list[MixturePart])
    unredacted: bool = False
    notes: list[str] = field(default_factory=list[str])
    load: str = ""


class FormatTraits(Struct, frozen=True, kw_only=True):
    """What the command line does for a format: `origins` it can write, and what it takes unless told otherwise.

    `weights`: what it teaches can be weighted. `cuts`: its conversations can be cut at turns, and are measured.
    `into_run`: written to the run's own directory where no other is named. `splits`: it has a train and a test
    part. `chooses_thinking`: its answers can be without their thinking. `chooses_solved`: it can leave out what
    did not solve its task, which it does unless told otherwise where `solved_only`. `clients`: it can be of the
    calls of a gateway's clients.
    """

    origins: tuple[Origin, ...] = ORIGINS
    roles: tuple[Role, ...] = WORK_ROLES
    chooses_solved: bool = True
    chooses_thinking: bool = True
    solved_only: bool = False
    into_run: bool = False
    splits: bool = True
    clients: bool = False
    cuts: bool = False
    weights: bool = False


_E = TypeVar("_E", bound=Callable[..., ExportSummary])


def exporter(traits: FormatTraits) -> Callable[[_E], _E]:
    """Give an exporter its traits."""

    def attach(function: _E) -> _E:
        function.__dict__["traits"] = traits
        return function

    return attach


def traits_of(function: Callable[..., ExportSummary]) -> FormatTraits:
    """The traits that an exporter was given, else those that most have."""
    return getattr(function, "traits", FormatTraits())


def no_progress(done: int, of: int) -> None:
    """A `report` that does nothing."""
