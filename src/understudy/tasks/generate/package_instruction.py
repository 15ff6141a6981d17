"""The instruction of a generated task: which tests fail and how, without revealing where the fault is."""

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
    """A failing test: its node id, and pytest's failure message as seen from the test's own file."""

    node_id: str
    message: str


def one_per_function(failures: Sequence[FailedCheck]) -> list[FailedCheck]:
    """Return the first failure of each test function, in their order, however many of its parameters fail."""
    first: dict[str, FailedCheck] = {}
    for failure in failures:
        first.setdefault(failure.node_id.partition("[")[0], failure)
    return list(first.values())


def compose(package: str, version: str, module: str, failures: Sequence[FailedCheck]) -> str:
    """Return the instruction for a package with a fault in `module` (a dotted name), from at least one failure.

    Each test function is shown once, however many of its parameters fail.
    """
    functions = one_per_function(failures)
    examples, number = functions[:_MAX_EXAMPLES], len(functions)
    broken = "One check that passed before fails" if number == 1 else f"{number} checks that passed before fail"
    parts = [
        f"# {package}: `{module}` misbehaves",
        f"This is the source of {package} {version}. Code in `{module}` used to work and no longer does. "
        f"{broken}:",
        *(failing_example(number, failure) for number, failure in enumerate(examples, start=1)),
    ]
    if unshown := number - len(examples):
        checks = "check on the same code fails" if unshown == 1 else "checks on the same code fail"
        parts.append(f"{unshown} further {checks} too.")
    parts.append(
        "Find the cause in the package's source and correct it there, so that the checks hold again and all "
        "that works now goes on working. The checks themselves are not in this tree; tests and public interfaces "
        "are to stay as they are."
    )
    return "\n\n".join(parts) + "\n"


def leaks_fault(statement: str, lines: Sequence[str]) -> bool:
    """Return whether a text contains one of the source lines with the fault, in the wrong or the right form.

    Lines of one word (`pass`, `else:`) reveal nothing and are not searched.
    """
    flat = " ".join(statement.split())
    telling = [line for line in (" ".join(line.split()) for line in lines) if not re.fullmatch(r"\w*:?", line)]
    return any(line in flat for line in telling)


def normalise_message(message: str, workdir: str) -> str:
    """Return a failure message without what differs from run to run: paths and memory addresses."""
    message = message.replace(workdir, ".")
    message = re.sub(r"\b0x[0-9a-f]{4,}\b", "0x…", message)
    return re.sub(r"/(?:tmp|home|root|mnt|media|srv|opt|run|var)/[^\s'\",)\]]*", "/…", message)


def failing_example(number: int, failure: FailedCheck) -> str:
    """Return a numbered paragraph: the test's lines down to the statement that failed, and the error there."""
    name = failure.node_id.split("::")[-1].partition("[")[0]
    source, error = _parts(failure.message)
    runs = f" runs\n\n{_fenced('python', source)}\n\nand" if source else ""
    return f"{number}. `{name}`{runs} gets\n\n{_fenced('text', error or 'an error without a message')}"


def _parts(message: str) -> tuple[str, str]:
    """Return the test's lines down to the statement that failed, and pytest's explanation of the failure."""
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
    short = (line if len(line) <= _LINE_CHARS else line[:_LINE_CHARS] + "…" for line in error_lines)
    return code, textwrap.dedent("\n".join(short)).strip("\n")


def _fenced(language: str, text: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"
