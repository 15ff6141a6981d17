"""Files that are written into a sandbox are what git would have made in it."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.grade.apply import apply_patch
from understudy.sandbox.base import Completed, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandbox, LocalSandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, prepare, sandbox_spec
from understudy.types import Directory, PytestChecks, SuiteChecks, Task

GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false", "-c", "core.fileMode=true"]
HIDDEN = {"tests/test_a.py": "assert True\n", "tests/deep/test_b.py": "assert 1\n", "run.sh": "#!/bin/sh\n"}
LISTING = (
    r"find . -path ./.git -prune -o -printf '%p %y %m %l\n' | LC_ALL=C sort; "
    "find . -path ./.git -prune -o -type f -exec sha256sum {} + | LC_ALL=C sort"
)


class CountingSandbox(LocalSandbox):
    """A sandbox that counts its runs."""

    runs = 0

    async def run(self, *arguments: Any, **options: Any) -> Completed:
        self.runs += 1
        return await super().run(*arguments, **options)


def make(root: Path) -> Path:
    root.mkdir()
    (root / "pkg" / "deep").mkdir(parents=True)
    (root / "tests").mkdir()
    (root / "a.py").write_bytes(b"".join(b"line %d\n" % number for number in range(40)))
    (root / "crlf.txt").write_bytes(b"one\r\ntwo\r\nthree\r\n")
    (root / "no-end.txt").write_bytes(b"first\nlast")
    (root / "data.bin").write_bytes(bytes(range(256)) * 4)
    (root / "tests" / "test_a.py").write_text("assert False\n")
    (root / "run.sh").write_text("#!/bin/sh\necho 1\n")
    (root / "run.sh").chmod(0o755)
    (root / "read-only.txt").write_text("1\n")
    (root / "linked").symlink_to("pkg")
    (root / "link.txt").symlink_to("a.py")
    return root


def change(tree: Path, script: str) -> bytes:
    """The patch of what a script does in a copy of the tree."""
    copy = tree.with_name("copy")
    subprocess.run(["cp", "-a", tree, copy], check=True)
    commit = (["init", "-q"], ["add", "-A", "-f"], ["commit", "-q", "-m", "1"])
    for arguments in (*commit, None, ["add", "-A", "-f"]):
        command = ["sh", "-ec", script] if arguments is None else [*GIT, *arguments]
        subprocess.run(command, cwd=copy, check=True, capture_output=True)
    diff = [*GIT, "diff", "--cached", "--binary", "--full-index", "-M", "HEAD"]
    return subprocess.run(diff, cwd=copy, check=True, capture_output=True).stdout


@pytest.fixture
async def kind() -> AsyncIterator[LocalSandboxes]:
    yield LocalSandboxes()


WRITTEN = {
    "nothing": "true",
    "changed": "sed -i 's/line 7$/seven/; s/line 30/thirty/' a.py",
    "new": "mkdir -p pkg/new/er; echo 1 >pkg/new/er/x.py; : >pkg/empty.py; echo 2 >b.py",
    "executable": "echo 3 >>run.sh; echo '#!/bin/sh' >new.sh; chmod 755 new.sh",
    "modes": "chmod 644 run.sh; chmod 755 a.py",
    "bytes": "printf 'one\\r\\n2\\r\\n' >crlf.txt; printf more >>no-end.txt; printf '\\0\\1' >>data.bin",
    "names": "echo 1 >'with space.py'; echo 2 >\"$(printf 'caf\\303\\251.py')\"",
}
BY_GIT = {
    "deleted": "rm a.py; echo 1 >b.py",
    "renamed": "mv a.py c.py",
    "a file for a directory": "rm -r pkg; echo 1 >pkg",
}


@pytest.mark.usefixtures("isolation")
@pytest.mark.parametrize("name", [*WRITTEN, *BY_GIT])
async def test_a_patch_gives_the_same_tree_with_and_without_git_in_the_sandbox(
    name: str, tmp_path: Path, environment: TaskEnvironment, kind: LocalSandboxes
) -> None:
    source = make(tmp_path / "source")
    patch = change(source, (WRITTEN | BY_GIT)[name])
    checks = PytestChecks(HIDDEN, ("tests/test_a.py::test",))
    task = Task("t", "r", "i", Directory(str(source)), checks, "")
    prepared = prepare(task, tmp_path / "cache", kind)
    # The hidden files of a suite come as a patch of its own, so git has to work in the sandbox.
    by_git = replace(task, checks=SuiteChecks("pytest", "pytest", ("a",)))
    listings: list[bytes] = []
    for each in (task, by_git):
        sandbox = await open_sandbox(kind, prepared, environment)
        try:
            assert await apply_patch(sandbox, each, patch, host_programs=True, tree=prepared.tree) == ""
            assert (sandbox.runs == 0) is (each is task and name in WRITTEN)
            if each is by_git:
                for path, text in HIDDEN.items():
                    await sandbox.run(["rm", "-f", path], timeout_s=60)
                    await sandbox.write(path, text.encode())
            listing = await sandbox.run(["sh", "-c", LISTING], timeout_s=60)
            assert listing.exit_code == 0
            listings.append(listing.stdout)
        finally:
            await sandbox.close()
    assert listings[0] == listings[1]


@pytest.mark.usefixtures("isolation")
async def test_what_git_refuses_is_not_written(
    tmp_path: Path, environment: TaskEnvironment, kind: LocalSandboxes
) -> None:
    source = make(tmp_path / "source")
    task = Task("t", "r", "i", Directory(str(source)), PytestChecks(HIDDEN, ("tests/test_a.py::test",)), "")
    prepared = prepare(task, tmp_path / "cache", kind)
    new = "diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n@@ -0,0 +1 @@\n+1\n"
    for path in ("linked/x.py", "a.py", "a.py/x.py", "link.txt"):
        sandbox = await open_sandbox(kind, prepared, environment)
        try:
            patch = (new % (path, path, path)).encode()
            refused = await apply_patch(sandbox, task, patch, host_programs=True, tree=prepared.tree)
            assert "does not apply" in refused or "read different files" in refused, path
        finally:
            await sandbox.close()


async def open_sandbox(
    kind: LocalSandboxes, prepared: PreparedTask, environment: TaskEnvironment
) -> CountingSandbox:
    spec: SandboxSpec = sandbox_spec(prepared, environment)
    return CountingSandbox(spec, kind, await kind.hold(spec))
