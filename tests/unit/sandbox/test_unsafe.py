"""Directories that pretend to be sandboxes: what is theirs alone."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from understudy.errors import SandboxError
from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.unsafe import UnsafeSandboxes


async def test_opening_that_is_called_off_leaves_no_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree, copies = tmp_path / "tree", tmp_path / "copies"
    tree.mkdir()
    copies.mkdir()
    for number in range(300):
        (tree / str(number)).write_text("x")
    monkeypatch.setattr(tempfile, "tempdir", str(copies))
    for pause_s in (0.0, 0.001, 0.005):
        opening = asyncio.ensure_future(UnsafeSandboxes().open(SandboxSpec(tree=tree)))
        await asyncio.sleep(pause_s)
        if opening.cancel():
            await asyncio.wait([opening])
        else:
            await opening.result().close()
        assert list(copies.iterdir()) == []


async def test_a_tree_that_cannot_be_copied_names_the_file_and_what_it_is(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    os.mkfifo(tree / "queue")
    with pytest.raises(SandboxError, match=rf"cannot copy {tree}/queue to .*named pipe.*; make all files"):
        await UnsafeSandboxes().open(SandboxSpec(tree=tree))


async def test_a_full_disk_is_recognised_by_its_number_in_any_language(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "large").write_text("x")

    def copy(source: str, target: str) -> str:
        raise OSError(errno.ENOSPC, "Auf dem Gerät ist kein Speicherplatz mehr verfügbar")

    monkeypatch.setattr(shutil, "copy2", copy)
    with pytest.raises(SandboxError, match=rf"cannot copy {tree}/large to .*; free some space in "):
        await UnsafeSandboxes().open(SandboxSpec(tree=tree))
