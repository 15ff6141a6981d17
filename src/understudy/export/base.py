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
    """What an export wrote."""

    output_dir: str
    rows: int
    """The number of rows in `files`."""
    instances: int = 0
    """Format "hf": the number of written instances; `rollouts` and `spans` likewise."""
    rollouts: int = 0
    spans: int = 0
    without_tokens: int = 0
    """Format "hf": the answered calls whose backend returned no token ids; they are in the stream, not in a
    dataset.
    """
    segments: dict[str, int] = field(default_factory=dict[str, int])
    """Format "hf": the token sequences that the calls merge into, by the reason why each began
    (`trajectory.samples`).
    """
    roles: dict[str, int] = field(default_factory=dict[str, int])
    """Format "hf": the calls by role, including roles that were not requested."""
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    """How much was not written, by reason; in the format "hf" rollouts without a verdict, by status."""
    suspicious: int = 0
    """Format "hf": the rollouts left out because their patch may deceive the grader."""
    splits: dict[str, int] = field(default_factory=dict[str, int])
    """The number of rows by split. `origins`, `sources`, `licences` and `families` count rows too."""
    files: list[str] = field(default_factory=list[str])
    origins: dict[str, int] = field(default_factory=dict[str, int])
    sources: dict[str, int] = field(default_factory=dict[str, int])
    licences: dict[str, int] = field(default_factory=dict[str, int])
    families: dict[str, int] = field(default_factory=dict[str, int])
    tools_sources: dict[str, int] = field(default_factory=dict[str, int])
    """The number of rows by where their tools come from."""
    redaction: dict[str, int] = field(default_factory=dict[str, int])
    """The number of replacements by rule."""
    lengths: LengthFigures | None = None
    """The lengths of the rows."""
    mixture: list[MixturePart] = field(default_factory=list[MixturePart])
    """The effect of weights."""
    unredacted: bool = False
    """The export contains sessions that were not redacted."""
    notes: list[str] = field(default_factory=list[str])
    """Remarks for the user."""
    load: str = ""
    """Python code that loads the export."""


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
