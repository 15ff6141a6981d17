"""Finding logs in trees and archives, friendly and hostile."""

from __future__ import annotations

import errno
import gzip
import os
import pickle
import stat
import struct
import zipfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.ingest import log_files
from understudy.ingest.formats.registry import group_batches
from understudy.ingest.log_files import OversizedLog, add_error, log_file_at, read_head, walk_logs
from understudy.ingest.trace import expand

from support import example_count

DATA = Path(__file__).parents[2] / "data" / "ingest"
CODEX = DATA / "codex/sessions/2026/10/03/rollout-2026-10-03T09-00-00-019a-codex.jsonl"


def found(*paths: Path) -> tuple[dict[str, bytes], Counter[str]]:
    skipped: Counter[str] = Counter()
    contents: dict[str, bytes] = {}
    for file in walk_logs(paths, skipped):
        with file.open() as stream:
            contents[file.path] = stream.read()
    return contents, skipped


def test_a_tree_is_walked_in_order_without_links_and_special_files(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a/z.json", "a/y.json", ".git/x.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "secret").symlink_to("/etc/hostname")
    (tmp_path / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    contents, skipped = found(tmp_path, tmp_path / "a", tmp_path / "b.jsonl")
    assert list(contents) == [str(tmp_path / name) for name in ("b.jsonl", "a/y.json", "a/z.json")]
    assert skipped == {"link": 2, "special_file": 1}


def test_a_path_that_is_given_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.json").write_text("{}")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert list(found(tmp_path / "link")[0]) == [str(tmp_path / "link/a.json")]


def test_a_missing_path_or_special_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*no-such"):
        list(walk_logs([tmp_path / "no-such"], Counter()))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is a special file"):
        list(walk_logs([tmp_path / "pipe"], Counter()))


def test_an_error_of_reading_says_what_to_do_about_its_cause() -> None:
    causes = {PermissionError: "check its permissions", FileNotFoundError: "left out", OSError: "check the disk"}
    for kind, remedy in causes.items():
        errors: list[str] = []
        add_error(errors, kind(errno.EIO if kind is OSError else None, "why", "/logs/a.jsonl"))
        assert errors[0].startswith("/logs/a.jsonl cannot be read: why; ") and remedy in errors[0]


def test_logs_in_a_zip_and_in_gzip_are_read_as_those_on_the_disk(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "logs.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(DATA.rglob("*")):
            if path.is_file():
                archive.write(path, f"ingest/{path.relative_to(DATA)}")
        archive.writestr("ingest/more/codex.jsonl.gz", gzip.compress(CODEX.read_bytes()))
    (tmp_path / "codex.jsonl.gz").write_bytes(gzip.compress(CODEX.read_bytes()))

    def turns(*paths: Path) -> dict[str, int]:
        skipped: Counter[str] = Counter()
        read = [
            trace
            for batch in group_batches(walk_logs(paths, skipped), skipped)
            for trace in batch.format.read(batch.files)
        ]
        assert not skipped
        return Counter({trace.trace_id: sum(1 for _ in expand(trace)) for trace in read})

    on_disk = turns(DATA)
    in_zip = turns(tmp_path / "logs.zip")
    assert turns(tmp_path / "codex.jsonl.gz") == {"codex:019a-codex": on_disk["codex:019a-codex"]}
    assert in_zip == on_disk


def test_a_log_can_be_sent_to_another_process_and_found_by_its_path(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x/y.jsonl", "hello")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b"hello"))
    (tmp_path / "c.jsonl").write_bytes(b"hello")
    for file in walk_logs([tmp_path], Counter()):
        for same in (pickle.loads(pickle.dumps(file)), log_file_at(file.path)):
            assert (same.path, same.size) == (file.path, file.size)
            with same.open() as stream:
                assert stream.read() == b"hello"
            assert read_head(same) == b"hello"
    with pytest.raises(FileNotFoundError, match=r"has no member 'x/z.jsonl'"):
        log_file_at(f"{tmp_path}/a.zip!/x/z.jsonl")


def test_paths_and_links_in_a_zip_cannot_leave_the_archive(tmp_path: Path) -> None:
    (tmp_path / "victim.json").write_text("not yours")
    with zipfile.ZipFile(tmp_path / "in.zip", "w") as archive:
        archive.writestr("../victim.json", "mine")
        archive.writestr("/etc/passwd", "mine")
        link = zipfile.ZipInfo("link.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("deeper.zip", b"PK")
    contents, skipped = found(tmp_path / "in.zip")
    assert set(contents.values()) == {b"mine"} and len(contents) == 2
    assert skipped == {"link": 1, "nested_archive": 1}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.zip", "victim.json"]


def test_decompression_bombs_are_skipped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "_MIN_BOMB_BYTES", 1_000_000)
    zeros = bytes(4_000_000)
    with zipfile.ZipFile(tmp_path / "told.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros.jsonl", zeros)
        archive.writestr("zeros.jsonl.gz", gzip.compress(zeros))
    (tmp_path / "zeros.jsonl.gz").write_bytes(gzip.compress(zeros))
    skipped: Counter[str] = Counter()
    logs = list(walk_logs([tmp_path], skipped))
    assert skipped == {"oversized_member": 1}
    assert sorted(Path(log.path).name for log in logs) == ["zeros.jsonl.gz", "zeros.jsonl.gz"]
    with pytest.raises(OversizedLog, match="unpacks to far more"), logs[-1].open() as stream:
        stream.read()
    # One that lies about its size is cut at what it told, and its checksum is wrong then.
    lying = bytearray((tmp_path / "told.zip").read_bytes())
    for mark, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = lying.find(mark)
        lying[at + offset : at + offset + 4] = struct.pack("<I", 1000)
    (tmp_path / "lying.zip").write_bytes(bytes(lying))
    (log, *_) = walk_logs([tmp_path / "lying.zip"], Counter())
    with pytest.raises(OSError, match="cannot be unpacked"), log.open() as stream:
        stream.read()


def test_a_directory_of_an_archive_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "many.zip", "w") as archive:
        for n in range(200):
            archive.writestr(f"{n}.json", "")
    monkeypatch.setattr(log_files, "_MAX_DIRECTORY_BYTES", 5_000)
    assert found(tmp_path / "many.zip") == ({}, {"oversized_archive": 1})
    monkeypatch.undo()
    monkeypatch.setattr(log_files, "_MAX_MEMBERS", 100)
    (tmp_path / "again.zip").write_bytes((tmp_path / "many.zip").read_bytes())
    assert found(tmp_path / "again.zip") == ({}, {"oversized_archive": 1})


def test_a_truncated_gzip_is_read_up_to_the_cut(tmp_path: Path) -> None:
    data = CODEX.read_bytes()
    noisy = data + b"".join(b'{"timestamp":"%d","type":"event_msg","payload":{}}\n' % n for n in range(9000))
    whole = gzip.compress(noisy)
    path = tmp_path / "rollout.jsonl.gz"
    path.write_bytes(whole[:-200])
    skipped: Counter[str] = Counter()
    (batch,) = group_batches(walk_logs([path], skipped), skipped)
    (trace,) = batch.format.read(batch.files)
    assert len(trace.turns) == 5 and trace.losses["unreadable_rest"] == 1


@settings(max_examples=example_count(60), deadline=None)
@given(data=st.data())
def test_a_broken_archive_is_counted(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    top = tmp_path_factory.mktemp("broken")
    with zipfile.ZipFile(top / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(CODEX, "rollout-1.jsonl")
        archive.write(DATA / "atif.json", "atif.json")
    broken = bytearray((top / "a.zip").read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(broken) - 1))
        broken[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(broken)))
    (top / "b.zip").write_bytes(bytes(broken[: cut if data.draw(st.booleans()) else len(broken)]))
    (top / "c.jsonl.gz").write_bytes(gzip.compress(bytes(broken))[: max(cut, 1)])
    skipped: Counter[str] = Counter()
    for batch in group_batches(walk_logs([top / "b.zip", top / "c.jsonl.gz"], skipped), skipped):
        try:
            for trace in batch.format.read(batch.files):
                list(expand(trace))
        except OSError:
            skipped["unreadable_file"] += 1
