"""What every export format shares.

A format is a function `(corpus, output, *, report, **options) -> ExportSummary`, found by the entry points
`understudy.exports`. It writes a corpus to the directory `output`, and calls `report` with its progress. Its other
keyword-only parameters are its options: the command line makes an option `--name` of each, with its type and
default; `Annotated[type, "help"]` gives the help. The first sentence of its docstring describes the command.
`FormatTraits` (see `exporter`) says what it exports by default.
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
"""Called during writing with the rows written and their total, which is 0 if it is not known in advance."""


class ExportSummary(Struct, frozen=True, kw_only=True):
    """What an export wrote: `rows` in `files`, by split in `splits`.

    `left_out` counts what was not written, by reason.

    `origins`, `sources`, `licences`, `families` and `tools_sources` (where the tools come from) count rows;
    `lengths` describes their lengths, `mixture` the effect of weights. `redaction` counts replacements by rule;
    `unredacted`: it contains sessions that were not redacted. `notes` are remarks for the user; `load` is the code
    that loads it.

    For the format "hf" alone: `instances`, `rollouts` and `spans` were written; `left_out` counts rollouts without
    a verdict by status, and `suspicious` those left out because their patch may deceive the grader;
    `without_tokens` counts answered calls whose backend returned no token ids (they are in the stream, not in a
    dataset); `segments` counts the token sequences that the calls merge into, by the reason why each began
    (`trajectory.samples`); `roles` counts calls by role, including roles that were not requested.
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
    """What the command line needs to know about a format: the `origins` that it can write, and its defaults.

    `weights`: examples can be weighted. `cuts`: conversations can be cut at turns, and are measured. `into_run`:
    it is written to the run's own directory by default. `splits`: it has a train and a test split.
    `chooses_thinking`: thinking can be removed from its answers. `chooses_solved`: it can leave out unsolved
    rollouts, which is the default with `solved_only`. `clients`: it can export the calls of a gateway's clients.
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
    """Set the traits of an exporter."""

    def attach(function: _E) -> _E:
        function.__dict__["traits"] = traits
        return function

    return attach


def traits_of(function: Callable[..., ExportSummary]) -> FormatTraits:
    """Return the traits of an exporter, or default ones."""
    return getattr(function, "traits", FormatTraits())


def no_progress(written: int, total: int) -> None:
    """A `report` that does nothing."""
