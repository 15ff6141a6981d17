"""The instruction of a mutated task: what fails, as its tests show it, without where the fault is."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from msgspec import Struct

_MAX_EXAMPLES = 4
_CONTEXT_LINES = 10
_SAID_LINES = 12
_LINE_CHARS = 200


class FailedCheck(Struct, frozen=True):
    """One failing test: its node id and what pytest says of it, as seen from the test's own file."""

    node_id: str
    message: str


def compose(package: str, version: str, module: str, failures: Sequence[FailedCheck]) -> str:
    """The instruction for a package with a fault in `module` (a dotted name), from at least one failure.

    Test functions are shown once each, however many of their parameters fail.
    """
    by_function: dict[str, FailedCheck] = {}
    for failure in failures:
        by_function.setdefault(failure.node_id.partition("[")[0], failure)
    shown = list(by_function.values())[:_MAX_EXAMPLES]
    parts = [
        f"# {package}: `{module}` misbehaves",
        f"This is the source of {package} {version}. Code in `{module}` used to work and no longer does. "
        f"{_count(len(by_function))}:",
        *(_example(number, failure) for number, failure in enumerate(shown, start=1)),
    ]
    if rest := len(by_function) - len(shown):
        parts.append(f"{_things(rest, 'further check')} on the same code {'fails' if rest == 1 else 'fail'} too.")
    parts.append(
        "Find the cause in the package's source and correct it there, so that the checks hold again and all "
        "that works now goes on working. The checks themselves are not in this tree; tests and public interfaces "
        "are to stay as they are."
    )
    return "\n\n".join(parts) + "\n"


def leaks_fault(statement: str, lines: Sequence[str]) -> bool:
    """Whether a statement contains one of the source lines that hold the fault, in its right or wrong form.

    Lines of one word (`pass`, `else:`) say nothing and do not count.
    """
    flat = " ".join(statement.split())
    telling = [line for line in (" ".join(line.split()) for line in lines) if not re.fullmatch(r"\w*:?", line)]
    return any(line in flat for line in telling)


def normalise_message(message: str, workdir: str) -> str:
    """A failure's message without what differs from run to run: places on disk and in memory."""
    message = message.replace(workdir, ".")
    message = re.sub(r"\b0x[0-9a-f]{4,}\b", "0x…", message)
    return re.sub(r"/(?:tmp|home|root|mnt|media|srv|opt|run|var)/[^\s'\",)\]]*", "/…", message)


def _count(number: int) -> str:
    return "One check that passed before fails" if number == 1 else f"{number} checks that passed before fail"


def _things(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def _example(number: int, failure: FailedCheck) -> str:
    name = failure.node_id.split("::")[-1].partition("[")[0]
    source, error = _parts(failure.message)
    text = f"{number}. `{name}`"
    if source:
        text += " runs\n\n" + _fenced("python", source) + "\n\nand gets"
    else:
        text += " gets"
    return text + "\n\n" + _fenced("text", error or "an error without a message")


def _parts(message: str) -> tuple[str, str]:
    """The test's lines down to the statement that failed, and what pytest says of it."""
    source: list[str] = []
    error_lines: list[str] = []
    marked = False
    for line in message.splitlines():
        if re.match(r"E(?: |$)", line):
            error_lines.append(line[4:])
        elif not error_lines:
            marked = marked or line.startswith(">")
            source.append(" " + line[1:] if line.startswith(">") else line)
    if not marked:
        source = []
    code = textwrap.dedent("\n".join(source[-_CONTEXT_LINES:])).strip("\n")
    if len(error_lines) > _SAID_LINES:
        error_lines = [*error_lines[:_SAID_LINES], "…"]
    return code, textwrap.dedent("\n".join(_short(line) for line in error_lines)).strip("\n")


def _short(line: str) -> str:
    return line if len(line) <= _LINE_CHARS else line[:_LINE_CHARS] + "…"


def _fenced(language: str, text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
