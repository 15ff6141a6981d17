"""Makes the outline of a task's gold patch (see `understudy.checks.outline`), and reads what names its values."""

from __future__ import annotations

from msgspec import Struct

from understudy.checks.outline import outline
from understudy.grade.changed_files import changed_files
from understudy.grade.gate import GatedPatch
from understudy.tasks.prepare import PreparedTask
from understudy.util.diffs import DiffError, unified
from understudy.util.python_syntax import decode_source


class PatchOutline(Struct, frozen=True):
    """The outline of a gold patch, as a patch: empty if it adds no names.

    `texts` are the task's instruction and the docstrings of what the gold patch changes, `sources` the Python
    files that it changes, as they were.
    """

    patch: GatedPatch
    texts: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


def outline_of(prepared: PreparedTask, gold: GatedPatch) -> PatchOutline:
    """Return the outline of a task's gold patch. Files that are not valid Python are left as they are."""
    old: dict[str, str] = {}
    new: dict[str, str] = {}
    texts = [prepared.task.instruction]
    try:
        files = changed_files(gold.patch, prepared.tree)
    except DiffError:  # it was applied by a less strict way
        files = []
    for file in files:
        if not file.path.endswith(".py") or file.after is None:
            continue
        before = decode_source(file.before)[0] if file.before is not None else ""
        try:
            outlined = outline(before, decode_source(file.after)[0])
        except ValueError:
            continue
        texts += outlined.docstrings
        new[file.path] = outlined.source
        if file.before is not None:
            old[file.path] = before
    patch = unified(old, new).encode(errors="surrogateescape")
    return PatchOutline(GatedPatch(patch), tuple(texts), tuple(old.values()))
