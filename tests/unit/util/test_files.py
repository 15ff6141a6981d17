"""Replacing files and directories as a whole."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.util.files import atomic_path, atomic_write, locked, share_lock, sync_tree, write_remedy


def test_a_failed_write_leaves_the_old_file(tmp_path: Path):
    target = tmp_path / "stream.json"
    target.write_text("old")
    with pytest.raises(ValueError, match="gone"), atomic_path(target) as path:
        path.write_text("half")
        raise ValueError("gone")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("stream.json", "old")]


def test_a_directory_that_cannot_be_replaced_is_put_back(tmp_path: Path):
    target = tmp_path / "dataset"
    target.mkdir()
    (target / "old").touch()
    with pytest.raises(FileNotFoundError), atomic_path(target):
        pass  # nothing was written, so there is nothing to take its place
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    assert [path.name for path in target.iterdir()] == ["old"]


@pytest.mark.parametrize("fsync", [False, True])
def test_a_directory_is_replaced_with_all_that_is_in_it(tmp_path: Path, fsync: bool):
    target = tmp_path / "dataset"
    target.mkdir()
    (target / "old").touch()
    with atomic_path(target, fsync=fsync) as path:
        (path / "inner").mkdir(parents=True)
        (path / "inner" / "new").write_text("new")
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == [
        "dataset",
        "dataset/inner",
        "dataset/inner/new",
    ]


def test_a_reader_with_the_old_file_open_reads_it_to_its_end(tmp_path: Path):
    target = tmp_path / "state.json"
    atomic_write(target, b"old" * 100_000)
    with target.open("rb") as file:
        first = file.read(3)
        atomic_write(target, b"new", fsync=True)
        assert first + file.read() == b"old" * 100_000
    assert target.read_bytes() == b"new"


def test_a_mode_holds_whatever_the_umask_and_from_the_beginning(tmp_path: Path):
    modes: list[int] = []
    before = os.umask(0)
    try:
        atomic_write(tmp_path / "key", b"secret", mode=0o600)
        modes.append((tmp_path / "key").stat().st_mode)
        os.umask(0o077)
        atomic_write(tmp_path / "tasks", b"{}", mode=0o644)
        modes.append((tmp_path / "tasks").stat().st_mode)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in modes] == [0o600, 0o644]


def test_a_fixed_temporary_name_takes_up_what_a_kill_left(tmp_path: Path):
    temporary = tmp_path / ".state.json.new"
    temporary.write_text("half of something longer")
    atomic_write(tmp_path / "state.json", b"whole", temporary=temporary)
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("state.json", b"whole")]


def test_a_link_at_the_temporary_name_is_not_followed(tmp_path: Path):
    (tmp_path / "theirs").write_text("theirs")
    temporary = tmp_path / ".state.json.new"
    temporary.symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError):
        atomic_write(tmp_path / "state.json", b"ours", temporary=temporary)
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_syncing_what_is_not_there_fails(tmp_path: Path):
    with pytest.raises(FileNotFoundError):
        sync_tree(tmp_path / "absent")


def test_a_lock_that_another_user_made_is_shared():
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory) / "lock"
        path.touch()
        path.chmod(0o444)
        path.parent.chmod(0o555)
        user = os.geteuid()
        try:
            if user == 0:
                os.seteuid(65534)
            share_lock(path)
        finally:
            os.seteuid(user)
            path.chmod(0o644)
        with pytest.raises(ConfigError, match="in use"), locked(path, busy="in use"):
            pass


def test_a_file_in_the_place_of_a_directory_is_named(tmp_path: Path):
    (tmp_path / "results").touch()
    with (
        pytest.raises(ConfigError, match=r"results: is below a file or is one, expected a directory; choose"),
        locked(tmp_path / "results" / ".lock", busy="in use", remedy="choose another"),
    ):
        pass


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space there"),
        (errno.EDQUOT, "free some space there"),
        (errno.EACCES, "choose another"),
        (errno.ENOTDIR, "choose another"),
    ],
)
def test_space_is_the_remedy_only_where_it_is_used_up(number: int, remedy: str) -> None:
    assert write_remedy(OSError(number, os.strerror(number)), "choose another") == remedy
