"""Tasks from a repository's history: which changes count, what the agent gets, and that nothing runs here."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.config import cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.sandbox.base import Sandboxes
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.sandbox.unsafe import UnsafeSandboxes
from understudy.tasks.environment import python_environment
from understudy.tasks.generate.git_history import History
from understudy.tasks.generate.history import HistoryTasks, _Candidate, _write_tree, make_from_history
from understudy.tasks.generate.requirements import declared_requirements, pin
from understudy.types import Directory, PytestChecks

PROJECT = '[project]\nname = "calc-kit"\n\n[tool.hatch.build.hooks.vcs]\nversion-file = "src/calc/_version.py"\n'
TEST = "from calc import add\n\n\ndef test_add():\n    assert add(1, 2) == 3\n"


class Repository:
    """A git repository that is written commit by commit."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self.git("init", "-q", "-b", "main")

    def git(self, *arguments: str) -> None:
        identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=self.path, check=True, capture_output=True)

    def commit(self, message: str, files: dict[str, str | None]) -> None:
        for name, text in files.items():
            path = self.path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if text is None:
                path.unlink()
            else:
                path.write_text(text, encoding="utf-8")
        self.git("add", "-A")
        self.git("commit", "-q", "-m", message)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    repository = Repository(tmp_path / "calc")
    start = {
        "pyproject.toml": PROJECT,
        "src/calc/__init__.py": "from calc._version import version\n\n\ndef add(a, b):\n    return a - b\n",
        "tests/test_calc.py": TEST.replace("== 3", "== -1"),
        ".gitattributes": "tests/** export-ignore\n*.py filter=evil\n",
    }
    repository.commit("Start", start)
    repository.git("tag", "v1.2")
    return repository


def sandboxes() -> Sandboxes:
    local = LocalSandboxes()
    return UnsafeSandboxes() if local.problems() else local


async def made(repository: Repository, count: int = 5, **more: Any) -> HistoryTasks:
    return await make_from_history(
        History(repository.path),
        "calc",
        count,
        trees=repository.path.parent / "trees",
        packages=(),
        sandboxes=sandboxes(),
        environment=python_environment(cache_dir()),
        cache=cache_dir(),
        progress=lambda tasks, commits: None,
        **{"jobs": 2, **more},
    )


async def test_a_commit_whose_tests_fail_before_and_pass_after_becomes_a_task(repository: Repository):
    right = "from calc._version import version\n\n\ndef add(a, b):\n    return a + b\n"
    message = "Add rather than subtract (#12)\n\nSums were wrong.\n\nSigned-off-by: A <a@example.org>"
    change = {"src/calc/__init__.py": right, "tests/test_calc.py": TEST, "CHANGELOG.md": "sums\n"}
    repository.commit(message, change)
    repository.commit("Documentation", {"README.md": "# calc\n"})
    repository.commit("Tests only", {"tests/test_more.py": TEST})
    repository.commit(
        "Both, but nothing new", {"src/calc/__init__.py": f"{right}\n", "tests/test_calc.py": f"{TEST}\n"}
    )
    result = await made(repository)
    (task,) = result.tasks
    assert result.refused == {
        "no test fails without the commit and passes with it; expected at least one": 1,
        "changes no code besides tests; expected at least one other .py file": 1,
        "changes no test file; expected at least one named test_*.py or *_test.py": 1,
    }
    assert isinstance(task.checks, PytestChecks) and isinstance(task.source, Directory)
    assert task.checks.fail_to_pass == ("tests/test_calc.py::test_add",)
    assert task.checks.files == {"tests/test_calc.py": TEST}
    assert "return a + b" in task.gold_patch and "CHANGELOG" not in task.gold_patch
    assert task.instruction.startswith("# calc: Add rather than subtract (#12)\n\nSums were wrong.\n")
    assert "assert -1 == 3" in task.instruction and "Signed-off-by" not in task.instruction
    tree = Path(task.source.path)
    assert (tree / "tests" / "test_calc.py").read_text() == TEST.replace("== 3", "== -1")
    assert "Version: 1.2\n" in (tree / "src" / "calc_kit.egg-info" / "PKG-INFO").read_text()
    assert [path.name for path in tree.parent.iterdir()] == [tree.name]


async def test_a_commit_that_adds_and_deletes_files_becomes_a_task(repository: Repository):
    repository.commit("Old place", {"src/calc/old.py": "WORD = 'minus'\n"})
    files: dict[str, str | None] = {
        "src/calc/__init__.py": "from calc._version import version\nfrom calc.sums import add\n",
        "src/calc/sums.py": "def add(a, b):\n    return a + b\n",
        "src/calc/old.py": None,
        "tests/test_calc.py": TEST,
    }
    repository.commit("Move it", files)
    tasks = await made(repository)
    assert len(tasks.tasks) == 1, tasks.refused
    assert "deleted file mode" in tasks.tasks[0].gold_patch and "new file mode" in tasks.tasks[0].gold_patch


async def test_submodules_pointers_and_other_encodings_in_a_tree_are_no_obstacle(repository: Repository):
    repository.git("update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},vendored")
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 9\n"
    (repository.path / "old.py").write_bytes(b"# -*- coding: latin-1 -*-\nNAME = '\xe9'\n")
    files: dict[str, str | None] = {
        "pyproject.toml": None,
        "setup.py": "from setuptools import setup\n\nsetup(name='calc')\n",
        "src/calc/_version.py": "version = '1'\n",
        "data.bin": pointer,
        ".gitattributes": "*.bin filter=lfs diff=lfs merge=lfs -text\n",
    }
    repository.commit("Odd files", files)
    right = "from calc._version import version\n\n\ndef add(a, b):\n    return a + b\n"
    repository.commit("Add rather than subtract", {"src/calc/__init__.py": right, "tests/test_calc.py": TEST})
    (repository.path / "old.py").write_bytes(b"# -*- coding: latin-1 -*-\nNAME = '\xe8'\n")
    repository.commit("Another letter", {"tests/test_calc.py": f"{TEST}\n"})
    for name in ("src/th\udce9.py", 'src/"quoted".py'):
        repository.commit("Another name", {name: "", "tests/test_calc.py": f"{TEST}# {len(name)}\n"})
    result = await made(repository)
    (task,) = result.tasks
    quoted_name = 'expected names of printable characters other than " and \\'
    assert result.refused[f"changes a file whose name a patch must quote; {quoted_name}"] == 2
    assert "changes a file that is not text; expected UTF-8 without NUL in all changed files" in result.refused
    assert isinstance(task.source, Directory)
    tree = Path(task.source.path)
    assert (tree / "data.bin").read_text() == pointer and b"\xe9" in (tree / "old.py").read_bytes()
    assert not (tree / "vendored").exists()


async def test_a_repository_without_tests_is_refused_and_leaves_no_directory(repository: Repository):
    repository.commit("Code alone", {"src/calc/__init__.py": "def add(a, b):\n    return a + b\n"})
    repository.commit(
        "Broken", {"src/calc/__init__.py": "import calc.absent\n", "tests/test_calc.py": f"{TEST}\n"}
    )
    with pytest.raises(TaskError, match=r"none of 2 commits can become a task .*changes no test file"):
        await made(repository)
    assert not (repository.path.parent / "trees").exists()


async def test_filters_and_hooks_of_the_repository_are_not_run(repository: Repository, tmp_path: Path):
    marker = tmp_path / "ran"
    for key in ("filter.evil.smudge", "diff.external", "core.fsmonitor", "core.pager", "core.sshCommand"):
        repository.git("config", key, f"touch {marker};cat")
    hook = repository.path / ".git" / "hooks" / "post-checkout"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text(f"#!/bin/sh\ntouch {marker}\n")
    hook.chmod(0o755)
    history = History(repository.path)
    history.write_tree("HEAD", tmp_path / "tree")
    assert (tmp_path / "tree" / "tests" / "test_calc.py").exists()  # export-ignore is for archives
    assert history.commits() == [] and not marker.exists()


def test_a_repository_that_lacks_objects_is_named(repository: Repository, tmp_path: Path) -> None:
    blob = hashlib.sha1(f"blob {len(PROJECT)}\0{PROJECT}".encode()).hexdigest()
    (repository.path / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(TaskError, match=f"{repository.path} lacks the object {blob}; .*git fetch --refetch"):
        History(repository.path).write_tree("HEAD", tmp_path / "tree")


async def test_links_out_of_the_tree_are_omitted_and_binary_changes_refused(
    repository: Repository, tmp_path: Path
):
    (repository.path / "outside").symlink_to("../../etc/passwd")
    (repository.path / "inside").symlink_to("pyproject.toml")
    (repository.path / "src" / "calc" / "data.bin").write_bytes(b"\0\1")
    repository.commit("Data", {"tests/test_calc.py": TEST, "src/calc/more.py": "x = 1\n"})
    History(repository.path).write_tree("HEAD", tmp_path / "tree")
    assert (tmp_path / "tree" / "inside").is_symlink() and not (tmp_path / "tree" / "outside").is_symlink()
    with pytest.raises(TaskError, match=r"none of 1 commits.*1 commits: changes a (file that is not text|link)"):
        await made(repository)


def test_nothing_is_written_outside_the_tree(repository: Repository, tmp_path: Path):
    """By links that only together lead out, or by what `pyproject.toml` names."""
    outside = tmp_path / "outside"
    outside.mkdir()
    deep = repository.path / "d"
    deep.mkdir()
    (deep / "up").symlink_to("..")
    (repository.path / "e").symlink_to("d/up/../../outside")
    (repository.path / "linked").symlink_to("d")
    project = f'[project]\nname = "{outside}/name"\n[tool.setuptools_scm]\nversion_file = "linked/up/_v.py"\n'
    repository.commit("Links", {"pyproject.toml": project})
    history = History(repository.path)
    (commit,) = history.commits()
    tree = tmp_path / "tree"
    _write_tree(history, _Candidate(replace(commit, parent=commit.id), {}, {}, {}), tree)
    assert not (tree / "e").is_symlink() and (tree / "linked").is_symlink() and list(outside.iterdir()) == []
    assert not (tree / "_v.py").exists()


def test_a_git_tree_with_a_duplicate_path_is_refused(repository: Repository, tmp_path: Path):
    """git itself makes no such tree, but it reads one."""

    def stored(*arguments: str, stdin: bytes) -> str:
        command = ["git", *arguments, "--stdin"]
        return (
            subprocess.run(command, cwd=repository.path, input=stdin, capture_output=True, check=True)
            .stdout.decode()
            .strip()
        )

    link = stored("hash-object", "-w", stdin=b"../outside")
    inner = stored("hash-object", "-w", "-t", "tree", "--literally", stdin=b"100644 x\0" + bytes.fromhex(link))
    both = b"120000 e\0" + bytes.fromhex(link) + b"40000 e\0" + bytes.fromhex(inner)
    tree = stored("hash-object", "-w", "-t", "tree", "--literally", stdin=both)
    with pytest.raises(TaskError, match="a path twice, or a path below a file"):
        History(repository.path).write_tree(tree, tmp_path / "tree")


def test_a_directory_that_is_not_a_git_repository_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="is not a git repository"):
        History(tmp_path)
    with pytest.raises(ConfigError, match="no such directory"):
        History(tmp_path / "missing")


def test_declared_requirements_are_read_and_only_package_names_are_resolved():
    text = (
        '[project]\nname = "a"\ndependencies = ["attrs>=20"]\n'
        '[project.optional-dependencies]\ntests = ["freezegun"]\ndocs = ["sphinx"]\n'
        '[dependency-groups]\ntest = ["pytest>=9", {include-group = "x"}]\n'
    )
    assert declared_requirements(text) == ["attrs>=20", "pytest>=9", "freezegun"]
    assert declared_requirements("not toml [") == []
    assert pin(["# nothing", "", "pytest>=9 ; python_version > '3'"], cache=cache_dir()) == ()
    injected = ("a>=1\n--index-url x", "a ; python_version<'2'\n/tmp/evil", "a\r--pre", "a>=1\x0b-e .")
    for line in (
        *injected,
        "-e .",
        "a @ git+https://example.org/a",
        "--index-url x",
        "./local",
        "git+https://example.org/a",
    ):
        with pytest.raises(ConfigError, match="expected a package by its name"):
            pin([line], cache=cache_dir())
