"""From a task to a tree and its pristine git directory: sources, set-up patches, ignore rules, the environment."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.sandbox.unsafe import UnsafeSandboxes
from understudy.tasks.environment import python_environment
from understudy.tasks.materialise import fetch, materialise
from understudy.tasks.prepare import GIT_MOUNT, ignore_rules, prepare, sandbox_spec
from understudy.types import Directory, Files, PytestChecks, ScriptChecks, Sdist, Source, Task

from support import example_count

ENV = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_NOSYSTEM": "1"}


def task(source: Source, setup_patch: str = "", **more: object) -> Task:
    return Task("t-1", "t", "t", source, PytestChecks({}, ()), gold_patch="", setup_patch=setup_patch, **more)  # type: ignore


def git(tree: Path, *args: str, git_dir: Path | None = None) -> str:
    git_variables = {"GIT_DIR": str(git_dir), "GIT_WORK_TREE": str(tree)} if git_dir else {}
    return subprocess.run(
        ["git", *args], cwd=tree, env=ENV | git_variables, capture_output=True, text=True, check=True
    ).stdout


def test_the_tree_is_one_root_commit_with_a_reproducible_hash(tmp_path: Path) -> None:
    source = Files({"a.txt": "a\n", "pkg/b.py": "b = 1\n", ".gitignore": "*.txt\n"})
    trees = [prepare(task(source), tmp_path / name, UnsafeSandboxes()).tree for name in ("one", "two")]
    heads = {git(tree, "rev-list", "--all", "--parents") for tree in trees}
    assert len(heads) == 1
    assert len(heads.pop().split()) == 1
    assert git(trees[0], "status", "--porcelain", "--ignored") == ""
    assert git(trees[0], "ls-files") == ".gitignore\na.txt\npkg/b.py\n"
    assert git(trees[0], "reflog") == ""


def test_files_are_packed_without_deltas_and_diffed_as_text(tmp_path: Path) -> None:
    text = "".join(f"line {n}\n" for n in range(500))
    prepared = prepare(task(Files({f"{n}.txt": f"{text}{n}\n" for n in range(9)})), tmp_path, UnsafeSandboxes())
    (pack,) = (prepared.tree / ".git" / "objects" / "pack").glob("*.idx")
    listed = [line.split() for line in git(prepared.tree, "verify-pack", "-v", str(pack)).splitlines()]
    assert [len(line) for line in listed if line[1:2] == ["blob"]] == [5] * 9  # a delta has two columns more
    (prepared.tree / "1.txt").write_text("other\n")
    assert "+other" in git(prepared.tree, "diff")


def test_the_pristine_directory_matches_the_tree_and_is_not_in_it(tmp_path: Path) -> None:
    prepared = prepare(task(Files({"a": "a\r\n", ".gitattributes": "* text\n"})), tmp_path, UnsafeSandboxes())
    assert not prepared.git.is_relative_to(prepared.tree)
    assert git(prepared.tree, "status", "--porcelain", git_dir=prepared.git) == ""
    assert (
        git(prepared.tree, "cat-file", "-p", "HEAD:a", git_dir=prepared.git) == "a\n"
    )  # text mode reads \r\n as \n
    spec = sandbox_spec(prepared, python_environment(cache_dir()), env={"X": "1"})
    assert [mount.private for mount in spec.mounts if mount.target == GIT_MOUNT] == [True]
    assert spec.env["X"] == "1" and spec.env["PYTHONHASHSEED"] == "0"


def test_a_setup_patch_is_part_of_the_commit(tmp_path: Path) -> None:
    patch = "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-a\n+b\n\\ No newline at end of file\n"
    patch += "--- /dev/null\n+++ b/n\n@@ -0,0 +1 @@\n+n\n"
    prepared = prepare(task(Files({"a": "a\n"}), patch), tmp_path, UnsafeSandboxes())
    assert (prepared.tree / "a").read_text() == "b"
    assert git(prepared.tree, "ls-files") == "a\nn\n"
    assert git(prepared.tree, "status", "--porcelain") == ""


@pytest.mark.parametrize(
    "patch",
    [
        "--- a/a\n+++ b/a\n@@ -1 +1 @@\n-x\n+b\n",
        "--- /dev/null\n+++ b/../../out\n@@ -0,0 +1 @@\n+n\n",
        "--- /dev/null\n+++ b/.git/hooks/x\n@@ -0,0 +1 @@\n+n\n",
        "--- /dev/null\n+++ b/link/x\n@@ -0,0 +1 @@\n+n\n",
        "no patch at all\n",
    ],
)
def test_a_setup_patch_that_does_not_apply_is_refused_and_leaves_nothing(tmp_path: Path, patch: str) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").write_text("a\n")
    (tmp_path / "source" / "link").symlink_to(tmp_path)
    with pytest.raises(TaskError, match=r"t-1: setup_patch does not apply to its source; expected a unified diff"):
        prepare(task(Directory(str(tmp_path / "source")), patch), tmp_path / "cache", UnsafeSandboxes())
    assert not list((tmp_path / "cache" / "trees").glob("*[!k]"))  # nothing but the lock
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "source"]


def test_concurrent_prepares_build_a_tree_once(tmp_path: Path) -> None:
    prepared_trees: list[Path] = []

    class Counting(UnsafeSandboxes):
        def prepare_tree(self, tree: Path) -> None:
            prepared_trees.append(tree)

    with ThreadPoolExecutor(8) as pool:
        trees = {
            prepared.tree
            for prepared in pool.map(lambda _: prepare(task(Files({"a": "1"})), tmp_path, Counting()), range(8))
        }
    assert len(trees) == len(prepared_trees) == 1


def test_a_partial_tree_of_a_killed_process_is_rebuilt(tmp_path: Path) -> None:
    prepared = prepare(task(Files({"a": "1"})), tmp_path, UnsafeSandboxes())
    home = prepared.tree.parent
    home.rename(home.with_suffix(".new"))
    (home.with_suffix(".new") / "tree" / "a").write_text("half")
    again = prepare(task(Files({"a": "1"})), tmp_path, UnsafeSandboxes())
    assert (again.tree / "a").read_text() == "1"
    assert not home.with_suffix(".new").exists()


def test_a_changed_directory_is_another_tree(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("1")
    first = prepare(task(Directory(str(source))), tmp_path / "cache", UnsafeSandboxes())
    (source / "a").chmod(0o755)
    second = prepare(task(Directory(str(source))), tmp_path / "cache", UnsafeSandboxes())
    assert first.tree != second.tree


def test_a_directory_is_copied_with_links_and_modes_but_without_git(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "sub" / ".git").mkdir(parents=True)
    (source / "sub" / "x").write_text("x")
    (source / "run").write_text("#!/bin/sh\n")
    (source / "run").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")
    (source / "dirlink").symlink_to("sub")
    materialise(Directory(str(source)), tmp_path / "into", tmp_path)
    assert sorted(path.name for path in (tmp_path / "into").rglob("*")) == ["dirlink", "link", "run", "sub", "x"]
    assert (tmp_path / "into" / "link").readlink() == Path("/etc/passwd")
    assert stat.S_IMODE((tmp_path / "into" / "run").stat().st_mode) == 0o755


def test_special_files_and_missing_directories_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match="pipe: is a special file"):
        materialise(Directory(str(tmp_path)), tmp_path.parent / (tmp_path.name + "-into"), tmp_path)
    with pytest.raises(TaskError, match="no such directory"):
        prepare(task(Directory(str(tmp_path / "gone"))), tmp_path / "cache", UnsafeSandboxes())


def test_files_readable_only_by_their_owner_are_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir(mode=0o755)
    (source / "id_ed25519").touch(mode=0o600)
    with pytest.raises(TaskError, match="id_ed25519: only its owner may read this file"):
        prepare(task(Directory(str(source))), tmp_path / "cache", UnsafeSandboxes())
    source.chmod(0o700)  # a whole tree made with a umask of 077
    materialise(Directory(str(source)), tmp_path / "into", tmp_path)


def test_a_source_that_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    with (tmp_path / "source" / "disk.img").open("wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(TaskError, match="too large: 3072 MiB in 1 files so far, expected at most 2048 MiB"):
        prepare(task(Directory(str(tmp_path / "source"))), tmp_path / "cache", UnsafeSandboxes())


def test_a_source_that_cannot_be_read_is_a_task_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "a").touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "source/a")

    monkeypatch.setattr("understudy.tasks.prepare.hashlib.file_digest", refuse)  # root may read everything
    with pytest.raises(TaskError, match="source/a: cannot be read: Permission denied"):
        prepare(task(Directory(str(tmp_path / "source"))), tmp_path / "cache", UnsafeSandboxes())


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", ".git/config", "a/.GIT/x", "", ".", "a\0b"])
def test_files_outside_the_tree_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(TaskError):
        prepare(task(Files({name: "x"})), tmp_path, UnsafeSandboxes())
    with pytest.raises(TaskError):
        checks = PytestChecks({name: "x"}, ())
        prepare(Task("t", "t", "t", Files({"a": "a"}), checks, gold_patch=""), tmp_path, UnsafeSandboxes())


def test_a_path_that_is_both_file_and_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="'a/b' cannot be written"):
        prepare(task(Files({"a": "1", "a/b": "2"})), tmp_path, UnsafeSandboxes())


def test_hidden_files_of_a_script_stay_out_of_the_tree(tmp_path: Path) -> None:
    checks = ScriptChecks(Files({"test.sh": "exit 0\n"}))
    prepared = prepare(Task("t", "t", "t", Files({"a": "a"}), checks, gold_patch=""), tmp_path, UnsafeSandboxes())
    assert prepared.hidden is not None
    assert (prepared.hidden / "test.sh").read_text() == "exit 0\n"
    assert not any(
        prepared.hidden == mount.source for mount in sandbox_spec(prepared, python_environment(cache_dir())).mounts
    )


# --- sdists ------------------------------------------------------------------------------------------------


def planted(cache: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Sdist:
    """An sdist that is in the cache already."""
    import hashlib

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member, data in members:
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    (cache / "sdists" / digest).mkdir(parents=True)
    (cache / "sdists" / digest / "file").write_bytes(buffer.getvalue())
    return Sdist("x", "1", digest)


def member(name: str, **changes: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in changes.items():
        setattr(info, key, value)
    return info


def test_an_sdist_is_unpacked_without_its_top_directory(tmp_path: Path) -> None:
    sdist = planted(
        tmp_path,
        [
            (member("x-1/setup.py", mode=0o644), b"raise SystemExit\n"),
            (member("x-1/run", mode=0o755), b"#!/bin/sh\n"),
            (member("x-1/.git/config"), b"[core]\n"),
            (member("x-1/link", type=tarfile.SYMTYPE, linkname="run"), b""),
            (member("x-1/hard", type=tarfile.LNKTYPE, linkname="x-1/run"), b""),
        ],
    )
    materialise(sdist, tmp_path / "into", tmp_path)
    assert sorted(path.name for path in (tmp_path / "into").iterdir()) == ["hard", "link", "run", "setup.py"]
    assert (tmp_path / "into" / "hard").read_bytes() == b"#!/bin/sh\n"


@pytest.mark.parametrize(
    "bad",
    [
        member("x-1/../../out"),
        member("x-1/link", type=tarfile.SYMTYPE, linkname="../../etc/passwd"),
        member("x-1/link", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
        member("x-1/pipe", type=tarfile.FIFOTYPE),
        member("x-1/device", type=tarfile.CHRTYPE),
    ],
    ids=lambda info: f"{info.name}-{info.linkname}",
)
def test_a_hostile_archive_is_refused(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    sdist = planted(tmp_path, [(bad, b"")])
    with pytest.raises(TaskError, match="Pin a release in the task whose archive has no such entry"):
        materialise(sdist, tmp_path / "into" / "tree", tmp_path)
    assert not (tmp_path / "out").exists()


def test_an_invalid_archive_is_refused(tmp_path: Path) -> None:
    sdist = planted(tmp_path, [])
    (tmp_path / "sdists" / sdist.sha256 / "file").write_bytes(b"rubbish")
    with pytest.raises(TaskError, match="cannot be unpacked"):
        materialise(sdist, tmp_path / "into", tmp_path)


def local_index(directory: Path) -> tuple[dict[str, str], str]:
    """pip settings for a directory with one sdist whose set-up code leaves a mark, and the sdist's hash."""
    import hashlib

    directory.mkdir()
    archive = directory / "leaves_mark-1.0.tar.gz"
    mark = f"open({str(directory / 'mark')!r}, 'w').close()\n"
    pyproject = "[build-system]\nrequires=[]\nbuild-backend='backend'\nbackend-path=['.']\n"
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in (("setup.py", mark), ("backend.py", mark), ("pyproject.toml", pyproject)):
            info = tarfile.TarInfo(f"leaves_mark-1.0/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    env = {"PIP_FIND_LINKS": str(directory), "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    return env, hashlib.sha256(archive.read_bytes()).hexdigest()


def test_fetching_an_sdist_never_runs_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python_environment(cache_dir())
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "envs").symlink_to(cache_dir() / "envs")
    env, digest = local_index(tmp_path / "index")
    for key, value in env.items():
        monkeypatch.setenv(key, value)
    archive = fetch(Sdist("leaves-mark", "1.0", digest), cache)
    assert tarfile.is_tarfile(archive)
    assert not (tmp_path / "index" / "mark").exists()
    assert [path.name for path in archive.parent.iterdir()] == ["file"]
    with pytest.raises(TaskError, match=r"set source\.sha256 in the task"):
        fetch(Sdist("leaves-mark", "1.0", "0" * 64), cache)
    with pytest.raises(ConfigError, match="no-such-thing==3"):
        fetch(Sdist("no-such-thing", "3", "1" * 64), cache)
    with pytest.raises(TaskError, match="64 lower-case hex"):
        fetch(Sdist("leaves-mark", "1.0", "../../x"), cache)
    with pytest.raises(TaskError, match="expected a name of"):
        fetch(Sdist("--index-url=x leaves-mark", "1.0", digest[::-1]), cache)


# --- ignore rules --------------------------------------------------------------------------------------------

PATTERN = st.lists(
    st.sampled_from(["a", "b", "*", "/", "!", "**", "?", "[ab]", "\\", " ", "x.log", "#"]), min_size=1, max_size=5
).map("".join)


@settings(max_examples=example_count(60), deadline=None, derandomize=True)
@given(
    rules=st.dictionaries(st.sampled_from(["", "a/", "a/b/", "[x]/"]), st.lists(PATTERN, max_size=4), max_size=3)
)
def test_the_merged_ignore_list_equals_all_gitignore_files(
    tmp_path_factory: pytest.TempPathFactory, rules: dict[str, list[str]]
) -> None:
    tree = tmp_path_factory.mktemp("ignore")
    git(tree, "init", "-q")
    for directory in ("", "a/", "a/b/", "[x]/", "b/"):
        for name in ("a1", "b1", "x.log", "c/a", "c/x.log", "!", "#"):
            path = tree / directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    for directory, lines in rules.items():
        (tree / f"{directory}.gitignore").write_text("".join(line + "\n" for line in lines))
    listing = "\0".join(f"{directory}.gitignore" for directory in rules).encode()
    (tree / ".git" / "one-list").write_bytes(ignore_rules(tree, listing))
    git_untracked = git(tree, "ls-files", "-oz", "--exclude-per-directory=.gitignore")
    ours = git(tree, "ls-files", "-oz", f"--exclude-from={tree / '.git' / 'one-list'}")
    assert ours == git_untracked


# --- the environment -----------------------------------------------------------------------------------------


def test_the_environment_has_the_pinned_pytest_and_is_made_once() -> None:
    environment = python_environment(cache_dir())
    python = Path(environment.path_prefixes[0], "python")
    ask = [python, "-P", "-c", "import pytest; print(pytest.__version__)"]
    assert subprocess.run(ask, capture_output=True, text=True, check=True).stdout == "8.4.2\n"
    assert python_environment(cache_dir()) == environment
    for mount in environment.mounts:
        assert str(mount.source) == mount.target
    assert any(
        Path(sys.base_prefix).resolve().is_relative_to(directory)
        for directory in ["/usr", *(m.target for m in environment.mounts)]
    )


def test_a_failed_environment_build_is_reported_and_not_marked_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    with pytest.raises(ConfigError, match="check the network"):
        python_environment(tmp_path)
    assert not list(tmp_path.glob("envs/*/ready"))
