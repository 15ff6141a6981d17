"""Makes outlines of a task's gold patch (see `understudy.checks.outline`), and reads what names its values."""

from __future__ import annotations

from msgspec import Struct

from understudy.checks.outline import RETURNS, outline
from understudy.grade.changed_files import changed_files
from understudy.grade.gate import GatedPatch
from understudy.tasks.prepare import PreparedTask
from understudy.util.diffs import DiffError, unified
from understudy.util.python_syntax import decode_source


class GoldOutlines(Struct, frozen=True):
    """The outlines of a gold patch, as patches: one is empty if it adds no names.

    `texts` are the task's instruction and the docstrings of what the gold patch changes, `sources` the Python
    files that it changes, as they were; `code` are these files with the gold patch.
    """

    patches: tuple[GatedPatch, ...]
    texts: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    code: tuple[str, ...] = ()


def outlines_of_gold(prepared: PreparedTask, gold: GatedPatch) -> GoldOutlines:
    """Return the outlines of a task's gold patch. Files that are not valid Python are left as they are."""
    old: dict[str, str] = {}
    new: dict[str, list[str]] = {}
    texts = [prepared.task.instruction]
    code: list[str] = []
    try:
        files = changed_files(gold.patch, prepared.tree).files
    except DiffError:  # it was applied by a less strict way
        files = ()
    for file in files:
        if not file.path.endswith(".py") or file.after is None:
            continue
        before = decode_source(file.before)[0] if file.before is not None else ""
        after = decode_source(file.after)[0]
        try:
            outlines = [outline(before, after, returns) for returns in RETURNS]
        except ValueError:
            continue
        texts += outlines[0].docstrings
        code.append(after)
        new[file.path] = [file_outline.source for file_outline in outlines]
        if file.before is not None:
            old[file.path] = before
    variants = [{path: sources[number] for path, sources in new.items()} for number in range(len(RETURNS))]
    patches = dict.fromkeys(unified(old, variant).encode(errors="surrogateescape") for variant in variants)
    return GoldOutlines(tuple(map(GatedPatch, patches)), tuple(texts), tuple(old.values()), tuple(code))
