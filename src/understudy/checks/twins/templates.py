"""Templates of the versions of a task's deciding tests, from which the versions of each grading are drawn.

Writing a version reads the test files many times over, which takes up to a second. But the versions of one task
differ only in the statements whose expectations they change. So they are written once with the true expectations
and once with changed ones, and those of a grading are put together from the two, statement by statement: they are
what `write_versions` would write. Templates are cached, for later gradings and processes.
"""

from __future__ import annotations

import ast
import hashlib
import os
import platform
import random
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.base import GradingOptions
from understudy.checks.twins.other_inputs import input_versions
from understudy.checks.twins.run import WrittenVersion, emptied_functions, write_versions
from understudy.checks.twins.test_ids import DecidingTests
from understudy.checks.twins.versions import PAIR
from understudy.util.files import atomic_write
from understudy.util.python_syntax import parse_module

VERSIONS = "versions"
"""The directory of templates in the cache."""

_MANY_CHANGEABLE = 6
_SHARED = -1


class FilePart(Struct, frozen=True, array_like=True):
    """Lines of a file with the true expectation, and with the changed one of site `number`.

    The number is `_SHARED` for lines that all versions share.
    """

    number: int
    true: str
    changed: str = ""


class VersionTemplate(Struct, frozen=True):
    """Versions that differ only in which expectations are changed: one with none changed, and one with all.

    `parts` has the files that have changeable expectations. It is None if the two differ in more than the
    statements of these expectations; then each version is written by itself.
    """

    true: WrittenVersion
    changed: WrittenVersion
    parts: dict[str, list[FilePart]] | None


class VersionTemplates(Struct, frozen=True):
    """The templates of a task's versions, one for each part of a version that `twin_apart` makes of it.

    `changeable` are the sites whose expectations are in the process and can be changed. `inputs` are the versions
    with other inputs (see `twins.other_inputs`), which are the same in each grading.
    """

    changeable: tuple[int, ...]
    templates: tuple[VersionTemplate, ...]
    inputs: tuple[WrittenVersion, ...] = ()


def make_templates(tests: DecidingTests, options: GradingOptions) -> VersionTemplates:
    """Return the templates of the versions of these tests."""
    emptied_sets = emptied_functions(tests, options)
    true = [write_versions(tests, options, lambda _: False, emptied=emptied) for emptied in emptied_sets]
    observed = _observed(options)
    changeable = {number for number, site in true[0].sites.items() if site.changeable and number in observed}
    changeable -= set(options.twin_fixed)
    changed = [
        write_versions(tests, options, changeable.__contains__, emptied=emptied) if changeable else true[number]
        for number, emptied in enumerate(emptied_sets)
    ]
    templates = (VersionTemplate(a, b, _parts(a, b, changeable)) for a, b in zip(true, changed, strict=True))
    return VersionTemplates(tuple(sorted(changeable)), tuple(templates), tuple(input_versions(tests, options)))


def _observed(options: GradingOptions) -> set[int]:
    return {number for twin in options.twins.values() for number in twin.gold}


def draw_versions(
    tests: DecidingTests, options: GradingOptions, templates: VersionTemplates
) -> list[WrittenVersion]:
    """Return the versions that a patch has to pass: one if no expectation is in the process, otherwise two or
    four.

    With `twin_apart` each version is spread over two. Each expectation that is in the process is changed in half
    of the versions, chosen at random.
    """
    source = random.SystemRandom()
    changeable = templates.changeable
    count = 1 if not changeable else 2 if len(changeable) >= _MANY_CHANGEABLE else 4
    layout = {number: frozenset(source.sample(range(count), count // 2)) for number in changeable}
    return [
        version_of(template, tests, options, {number for number in changeable if version in layout[number]})
        for version in range(count)
        for template in templates.templates
    ]


def version_of(
    template: VersionTemplate, tests: DecidingTests, options: GradingOptions, changed: Collection[int]
) -> WrittenVersion:
    """Return the version in which the expectations of these sites are changed."""
    if template.parts is None:
        return write_versions(tests, options, changed.__contains__, emptied=template.true.emptied)
    files = dict(template.true.files)
    for name, parts in template.parts.items():
        files[name] = "".join(part.changed if part.number in changed else part.true for part in parts)
    sites = template.true.sites | {number: template.changed.sites[number] for number in changed}
    return replace(template.true, files=files, sites=sites)


def _parts(
    true: WrittenVersion, changed: WrittenVersion, changeable: Collection[int]
) -> dict[str, list[FilePart]] | None:
    unchanged = {number: replace(site, changed=False) for number, site in changed.sites.items()}
    if unchanged != true.sites or true.names != changed.names:
        return None
    parts: dict[str, list[FilePart]] = {}
    for name, text in true.files.items():
        if text != changed.files[name]:
            file_parts = _split_file(text, changed.files[name], changeable)
            if file_parts is None:
                return None
            parts[name] = file_parts
    return parts


def _split_file(true: str, changed: str, changeable: Collection[int]) -> list[FilePart] | None:
    """Return the parts of a file; None if the two texts differ in other lines than those of changeable sites."""
    # As the parser counts lines, which `splitlines` does not.
    lines, other_lines = (
        [f"{line}\n" for line in text.removesuffix("\n").split("\n")] for text in (true, changed)
    )
    site_lines = _site_lines(true, changeable), _site_lines(changed, changeable)
    parts: list[FilePart] = []
    line = other_line = 0
    if [number for number, _, _ in site_lines[0]] != [number for number, _, _ in site_lines[1]]:
        return None
    for (number, start, end), (_, other_start, other_end) in zip(*site_lines, strict=True):
        parts.append(FilePart(_SHARED, "".join(lines[line:start]), "".join(other_lines[other_line:other_start])))
        parts.append(FilePart(number, "".join(lines[start:end]), "".join(other_lines[other_start:other_end])))
        line, other_line = end, other_end
    parts.append(FilePart(_SHARED, "".join(lines[line:]), "".join(other_lines[other_line:])))
    if any(part.number == _SHARED and part.true != part.changed for part in parts):
        return None
    return [replace(part, changed="") if part.number == _SHARED else part for part in parts]


def _site_lines(source: str, changeable: Collection[int]) -> list[tuple[int, int, int]]:
    """Return the sites of a version's source in its order, with the lines of their statements, from and up to."""
    site_lines: list[tuple[int, int, int]] = []
    for node in ast.walk(parse_module(source)):
        match node:
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=int(number)), *_]),
                lineno=first,
                end_lineno=int(last),
            ) if name == PAIR and number in changeable:
                site_lines.append((number, first - 1, last))
            case _:
                continue
    return sorted(site_lines, key=lambda entry: entry[1])


def load_templates(tests: DecidingTests, options: GradingOptions, directory: Path, label: str) -> VersionTemplates:
    """Return the templates of these tests from `directory`, made now if they are not there.

    `label` is what they depend on besides: the version of the grader.
    """
    # Versions are written by Python's own `ast`, which differs from release to release.
    option_values = (
        options.twin_plain,
        options.twin_uncut,
        options.twin_named,
        options.twin_apart,
        options.twin_fixed,
    )
    inputs = [other_inputs.changes for other_inputs in options.twin_inputs]
    key_parts = [
        label,
        platform.python_version(),
        tests,
        *option_values,
        options.twin_seed,
        sorted(_observed(options)),
        inputs,
    ]
    path = directory / hashlib.sha256(msgspec.json.encode(key_parts, order="deterministic")).hexdigest()[:32]
    with suppress(OSError, msgspec.MsgspecError):
        os.utime(path)  # which says that it is in use
        return _read(path)
    templates = make_templates(tests, options)
    with suppress(OSError):  # if it cannot be written, they are made again the next time
        directory.mkdir(parents=True, exist_ok=True)
        atomic_write(path, msgspec.msgpack.encode(templates))
    return templates


@lru_cache(maxsize=64)
def _read(path: Path) -> VersionTemplates:
    return msgspec.msgpack.decode(path.read_bytes(), type=VersionTemplates)
