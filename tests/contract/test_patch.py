"""Extraction: whatever the agent leaves in the tree comes back byte for byte, and nothing of it is ever run."""

from __future__ import annotations

import asyncio
import io
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy.grade.gate import gate
from understudy.plugins import load
from understudy.sandbox.base import Sandbox, Sandboxes, SandboxLimits
from understudy.sandbox.docker.container import DockerSandbox
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.patch import MAX_PATCH_BYTES, NO_PATCH, extract_patch
from understudy.tasks.prepare import GIT_MOUNT, PreparedTask, prepare, sandbox_spec
from understudy.types import Directory, PytestChecks, Task
from understudy.util.diffs import parse_diff

from support import require
from support.docker_engine import test_image

BASE: dict[bytes, tuple[bytes, int]] = {
    b"pkg/__init__.py": (b"", 0o644),
    b"pkg/core.py": (b"def f(x):\n    return x + 1\n", 0o644),
    b"pkg/crlf.txt": (b"one\r\ntwo\r\n", 0o644),
    b"pkg/logo.bin": (bytes(range(256)) * 4, 0o644),
    b"run.sh": (b"#!/bin/sh\necho hi\n", 0o755),
    b"no-newline": (b"last line", 0o644),
    b"docs/a b.txt": (b"spaces\n", 0o644),
    b".gitignore": (b"build/\n*.log\n!keep.log\n", 0o644),
    b"docs/.gitignore": (b"/out\nsecret-*\n", 0o644),
    b"tracked.log": (b"ignored, yet part of the task\n", 0o644),
    b".gitattributes": (b"*.txt text eol=lf\n*.py filter=evil\n*.bin -diff\n", 0o644),
}


def write(root: Path, files: dict[bytes, tuple[bytes, int]]) -> None:
    for name, (data, mode) in files.items():
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(mode)


DOCKER = pytest.param("docker", marks=pytest.mark.services)


@pytest.fixture(scope="module", params=["unsafe-local", "local", DOCKER])
def sandboxes(request: pytest.FixtureRequest) -> Iterator[Sandboxes]:
    options = {}
    if request.param == "docker":
        options = {"image": test_image(request.getfixturevalue("engine"))}
    kind: Sandboxes = load("sandboxes", request.param)(**options)
    require(kind.problems())
    yield kind
    asyncio.run(kind.aclose())


@pytest.fixture(scope="module")
def prepared(sandboxes: Sandboxes, tmp_path_factory: pytest.TempPathFactory) -> PreparedTask:
    room = tmp_path_factory.mktemp("patch")
    write(room / "source", BASE)
    task = Task("t", "t", "t", Directory(str(room / "source")), PytestChecks({}, ()), gold_patch="")
    return prepare(task, room / "cache", sandboxes)


@pytest.fixture
async def sandbox(sandboxes: Sandboxes, prepared: PreparedTask) -> AsyncIterator[Sandbox]:
    open_sandbox = await sandboxes.open(sandbox_spec(prepared, TaskEnvironment()))
    yield open_sandbox
    await open_sandbox.close()


async def sh(sandbox: Sandbox, script: str, *args: str) -> None:
    done = await sandbox.run(["/bin/sh", "-ec", script, "sh", *args], timeout_s=30)
    assert done.exit_code == 0, done.stderr


_TAR = (
    r"""find . -path ./.git -prune -o \( -type f -o -type l \) -print0 | tar -c -f - --no-recursion --null -T -"""
)


async def snapshot(sandbox: Sandbox) -> dict[bytes, tuple[bytes, bool]]:
    """Path → (content or link target, executable) of every file but `.git`."""
    done = await sandbox.run(["/bin/sh", "-ec", _TAR], timeout_s=30)
    assert done.exit_code == 0, done.stderr
    files: dict[bytes, tuple[bytes, bool]] = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout), encoding="utf-8", errors="surrogateescape") as tar:
        for member in tar:
            name = os.fsencode(member.name.removeprefix("./"))
            if member.issym():
                files[name] = (os.fsencode(member.linkname), False)
            else:
                source = member if not member.islnk() else tar.getmember(member.linkname)
                file = tar.extractfile(source)
                assert file is not None
                files[name] = (file.read(), bool(member.mode & stat.S_IXUSR))
    return files


_APPLY = """
export GIT_DIR="$1" GIT_WORK_TREE="$PWD" GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
git apply --whitespace=nowarn --allow-empty -
"""


async def apply(sandbox: Sandbox, patch: bytes) -> None:
    done = await sandbox.run(
        ["/bin/sh", "-ec", _APPLY, "sh", sandbox.locate(GIT_MOUNT)], timeout_s=30, stdin=patch, reveal=True
    )
    assert done.exit_code == 0, done.stderr


async def check_round_trip(
    sandbox: Sandbox, prepared: PreparedTask, expected: dict[bytes, tuple[bytes, bool]] | None = None
) -> bytes:
    """Extract, apply to a fresh tree, compare; returns the patch."""
    if expected is None:
        expected = await snapshot(sandbox)
    patch = await extract_patch(sandbox, prepared.git)
    assert not patch.startswith(NO_PATCH), patch
    assert b"".join(file.text for file in parse_diff(patch)) == patch
    await sandbox.reset()
    await apply(sandbox, patch)
    assert await snapshot(sandbox) == expected
    return patch


async def test_an_untouched_tree_gives_the_empty_patch(sandbox: Sandbox, prepared: PreparedTask) -> None:
    assert await extract_patch(sandbox, prepared.git) == b""


async def test_touched_and_rewritten_files_are_no_change(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(sandbox, "touch pkg/core.py; cp run.sh x; cat x > run.sh; rm x")
    assert await extract_patch(sandbox, prepared.git) == b""


EDITS = {
    "edit": "echo 'y = 1' >> pkg/core.py",
    "same size and time": "touch -r pkg/core.py t; sed -i 's/1/2/' pkg/core.py; touch -r t pkg/core.py; rm t",
    "new file": "mkdir -p a/b; echo new > a/b/c.txt",
    "new empty file": ": > empty",
    "delete": "rm pkg/core.py",
    "delete a directory": "rm -r pkg",
    "delete everything": "rm -r pkg docs run.sh no-newline tracked.log .gitattributes .gitignore",
    "rename": "mv pkg/core.py pkg/renamed.py",
    "mode": "chmod +x pkg/core.py; chmod -x run.sh",
    "binary": r"printf '\000\001\002' >> pkg/logo.bin; printf '\000\377' > new.bin",
    "crlf": r"printf 'three\r\n' >> pkg/crlf.txt; printf 'a\r\nb\rc\n' > mixed.txt",
    "no newline": "printf more >> no-newline; printf x > other",
    "newline added": "echo >> no-newline",
    "odd names": r"""printf 1 > 'a "quoted" b'; printf 2 > 'tab	x'; printf 3 > 'back\slash'; printf 4 > "new
        line"; printf 5 > "$(printf 'latin-\351')"; printf 6 > ' lead'; printf 7 > 'trail '; printf 8 > '-dash'
        printf 9 > '*'; printf 0 > 'a b b'; mkdir 'd b'; printf 1 > 'd b/c b'; : > 'empty b'; : > '"'""",
    "git-like names": "mkdir 'git~1' .gitx; echo 1 > 'git~1/x'; echo 2 > .gitx/config; echo 3 > .gitmodules",
    "file to directory": "rm no-newline; mkdir no-newline; echo 1 > no-newline/x",
    "directory to file": "rm -r pkg; echo 1 > pkg",
    "directory to link": "mv pkg real; ln -s real pkg",
    "file to link": "rm run.sh; ln -s pkg/core.py run.sh",
    "committed": "git config user.name a; git config user.email b; echo 1 > n; git add -A; git commit -qm x",
    "deleted .git": "rm -rf .git; echo 1 > n",
    ".git is a file": "rm -rf .git; echo 'gitdir: /nowhere' > .git; echo 1 > n",
    ".git is a link": "rm -rf .git; ln -s /etc .git; echo 1 > n",
    "another .git": "rm -rf .git; git init -q; echo 1 > n",
    "ignore rules": "echo '*' > .gitignore; echo '*' > docs/.gitignore; echo 1 > n; echo 2 > docs/n",
    "info/exclude": "mkdir -p .git/info; echo '*' > .git/info/exclude; echo 1 > n",
    "attributes": r"""
        printf '* text eol=crlf ident filter=x working-tree-encoding=UTF-16 export-subst -diff binary\n' \
        > .gitattributes; cp .gitattributes pkg/; printf '$Id$\na\r\n\n' > n.txt; printf 'x\r\n' >> pkg/core.py""",
    "macro attributes": r"printf '[attr]x filter=evil text eol=crlf\n* x\n' > .gitattributes; printf 'a\r\n' > n",
    "bad attributes": r"printf '[attr\n\377\377 =\n' > .gitattributes; echo 1 > n",
    "bad .gitmodules": r"printf '[submodule \"x\"\n path = ../..\n url = -u./x\n bad' > .gitmodules; echo 1 > n",
    "base file that is ignored": "echo changed > tracked.log",
    "hard links": "ln pkg/core.py hard; ln run.sh hard.sh",
    "dangling links": "ln -s /nowhere dangling; ln -s . loop",
    "read-only files": "chmod 444 pkg/core.py; echo 1 > n; chmod 444 n",
}


@pytest.mark.parametrize("name", EDITS)
async def test_an_edit_survives_byte_for_byte(sandbox: Sandbox, prepared: PreparedTask, name: str) -> None:
    if name == "same size and time" and isinstance(sandbox, DockerSandbox):
        pytest.xfail("Docker lists what changed by size and time")
    await sh(sandbox, EDITS[name])
    patch = await check_round_trip(sandbox, prepared)
    assert patch


async def test_nested_repositories_are_files_like_all_others(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(
        sandbox,
        """
        git init -q sub; echo 1 > sub/file
        git init -q done; cd done; git config user.name a; git config user.email b
        echo 2 > file; git add -A; git commit -qm x; cd ..
        mkdir pkg/inner; echo 'gitdir: /nowhere' > pkg/inner/.git; echo 3 > pkg/inner/file
        mkdir case; mkdir case/.GIT; echo 4 > case/.GIT/HEAD; echo 5 > case/file; chmod 0 case/.GIT
        """,
    )
    patch = await extract_patch(sandbox, prepared.git)
    assert {path for file in parse_diff(patch) for path in file.paths} == {
        b"sub/file",
        b"done/file",
        b"pkg/inner/file",
        b"case/file",
    }


async def test_caches_and_what_the_task_ignores_stay_out(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(
        sandbox,
        """
        mkdir -p build pkg/__pycache__ .pytest_cache docs/out docs/deep/out out
        echo 1 > build/x; echo 1 > pkg/__pycache__/core.cpython-311.pyc; echo 1 > .pytest_cache/x; echo 1 > a.log
        echo 1 > docs/out/x; echo 1 > docs/deep/secret-1; echo 1 > stray.pyc
        echo 1 > keep.log; echo 1 > docs/deep/out/x; echo 1 > out/x; echo 1 > secret-1
        rm .gitignore
        """,
    )
    patch = await extract_patch(sandbox, prepared.git)
    assert {path for file in parse_diff(patch) for path in file.paths} == {
        b".gitignore",
        b"keep.log",
        b"docs/deep/out/x",
        b"out/x",
        b"secret-1",
    }


async def test_nothing_the_agent_wrote_is_run(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(
        sandbox,
        """
        mark="$HOME/ran"
        printf '#!/bin/sh\\necho "$0" >> %s\\ncat\\n' "$mark" > "$HOME/evil"; chmod +x "$HOME/evil"
        for key in core.fsmonitor core.hooksPath core.pager core.editor core.sshCommand diff.external \
            filter.evil.clean filter.evil.smudge filter.evil.process diff.evil.textconv diff.evil.command \
            core.attributesFile core.excludesFile alias.add alias.diff; do
          git config "$key" "$HOME/evil"; git config --global "$key" "$HOME/evil"
        done
        git config core.hooksPath "$PWD/hooks"; mkdir hooks
        for hook in pre-commit post-index-change fsmonitor-watchman; do cp "$HOME/evil" hooks/$hook; done
        mkdir -p .git/hooks; cp hooks/* .git/hooks
        printf '* filter=evil diff=evil\\n' > .gitattributes; printf '* filter=evil\\n' > pkg/.gitattributes
        mkdir -p .git/info; printf '* filter=evil diff=evil\\n' > .git/info/attributes
        for tool in git find cp rm; do cp "$HOME/evil" $tool; done
        echo 1 > n; echo 2 >> pkg/core.py
        """,
    )
    patch = await extract_patch(sandbox, prepared.git)
    assert b"diff --git a/n b/n" in patch
    with pytest.raises(FileNotFoundError):
        await sandbox.read(f"{sandbox.home}/ran")


async def test_special_and_unreadable_files_have_a_clear_outcome(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(
        sandbox,
        """
        mkfifo pipe; rm run.sh; mkfifo run.sh; rm .gitattributes; mkfifo .gitattributes
        echo secret > unreadable; chmod 0 unreadable; mkdir locked; echo 1 > locked/x; chmod 0 locked
        chmod 0 pkg/core.py; chmod 500 docs
        """,
    )
    patch = await extract_patch(sandbox, prepared.git)
    changed = {path for file in parse_diff(patch) for path in file.paths}
    assert changed == {b"run.sh", b".gitattributes", b"unreadable", b"locked/x"}
    assert b"deleted file mode 100755" in patch


async def test_a_workdir_that_nobody_may_enter_is_read_all_the_same(
    sandbox: Sandbox, prepared: PreparedTask
) -> None:
    await sh(sandbox, "echo 1 > n; chmod 0 .")
    assert b"diff --git a/n b/n" in await extract_patch(sandbox, prepared.git)


async def test_a_huge_file_becomes_a_patch_that_says_so(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(sandbox, f"truncate -s {MAX_PATCH_BYTES + 1} huge; echo 1 > n")
    patch = await extract_patch(sandbox, prepared.git)
    assert patch.startswith(NO_PATCH + b"'huge' is larger than")
    assert gate(patch, prepared.task, prepared.tree).refused.startswith("'huge' is larger than")


async def test_a_huge_file_that_is_ignored_does_not_matter(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(sandbox, f"mkdir build; truncate -s {MAX_PATCH_BYTES + 1} build/huge; echo 1 > n")
    assert b"diff --git a/n b/n" in await extract_patch(sandbox, prepared.git)


async def test_many_large_files_are_refused_together(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(sandbox, "for i in 1 2 3; do head -c 8000000 /dev/urandom > f$i; done")
    assert (await extract_patch(sandbox, prepared.git)).startswith(NO_PATCH + b"the patch is larger than")


async def test_a_full_disk_becomes_a_patch_that_says_so(sandboxes: Sandboxes, prepared: PreparedTask) -> None:
    if sandboxes.name != "local":
        pytest.skip("only where the disk is bounded by a file system")
    spec = replace(sandbox_spec(prepared, TaskEnvironment()), limits=SandboxLimits(disk_bytes=32 << 20))
    sandbox = await sandboxes.open(spec)
    try:
        await sandbox.run(["/bin/sh", "-c", "cat /dev/zero > /tmp/full; cat /dev/zero > fill"], timeout_s=30)
        patch = await extract_patch(sandbox, prepared.git)
    finally:
        await sandbox.close()
    assert patch == NO_PATCH + b"the changes fill the sandbox's disk\n"


NAME = st.one_of(
    st.sampled_from([b"a", b"b", b"pkg", b"x.py", b"run.sh", b"no-newline", b"core.py", b"docs"]),
    st.binary(min_size=1, max_size=6).filter(
        lambda name: (
            not set(name) & set(b"/\0")
            and name not in (b".", b"..")
            and name.lower() not in (b".git", b"build", b"out")
            and not name.endswith((b".log", b".pyc"))
            and not name.startswith(b"secret-")
        )
    ),
)
PATH = st.lists(NAME, min_size=1, max_size=3).map(b"/".join)
LINES = st.lists(st.sampled_from([b"a\n", b"b\r\n", b"\n", b"c", b"\x00\xff", b"diff --git a/x b/x\n", b"-- \n"]))
CONTENT = st.one_of(LINES.map(b"".join), st.binary(max_size=64))
EDIT = st.one_of(
    st.tuples(st.just("write"), PATH, CONTENT),
    st.tuples(st.just("append"), st.sampled_from(sorted(BASE)), CONTENT),
    st.tuples(st.just("mode"), st.sampled_from(sorted(BASE)), st.just(b"")),
    st.tuples(st.just("delete"), st.one_of(PATH, st.sampled_from(sorted(BASE))), st.just(b"")),
    st.tuples(st.just("link"), PATH, st.just(b"target")),
)


def edit_script(edits: list[tuple[str, bytes, bytes]]) -> bytes:
    """The edits as a shell script: bytes of any kind pass as octal escapes."""

    def quoted(data: bytes) -> bytes:
        return b"".join(b"\\%03o" % byte for byte in data)

    commands: dict[str, Callable[[bytes, bytes], bytes]] = {
        "write": lambda name, data: b'mkdir -p -- "$d"; printf \'' + quoted(data) + b'\' > "$n"',
        "append": lambda name, data: b"printf '" + quoted(data) + b'\' >> "$n"',
        "mode": lambda name, data: b'chmod u+x -- "$n"',
        "delete": lambda name, data: b'rm -rf -- "$n"',
        "link": lambda name, data: b'mkdir -p -- "$d"; ln -sfn -- ' + data + b' "$n"',
    }
    lines: list[bytes] = []
    for kind, name, data in edits:
        # The trailing dot keeps newlines that the shell would cut from the end of a name.
        lines.append(b"n=$(printf './" + quoted(name) + b".'); n=${n%.}; d=${n%/*}")
        lines.append(b"( " + commands[kind](name, data) + b" ) 2>/dev/null || true")
    return b"\n".join(lines) + b"\n"


EDITINGS = st.lists(EDIT, max_size=8)
LAW: dict[str, object] = {
    "deadline": None,
    "derandomize": True,
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
}


@settings(max_examples=25, **LAW)
@given(edits=EDITINGS)
def test_law_apply_of_extract_is_the_edit(
    sandboxes: Sandboxes, prepared: PreparedTask, edits: list[tuple[str, bytes, bytes]]
) -> None:
    if sandboxes.name == "docker":
        pytest.skip("below, with fewer examples")
    check_law(sandboxes, prepared, edits)


@settings(max_examples=8, **LAW)
@given(edits=EDITINGS)
def test_the_law_in_a_container(
    sandboxes: Sandboxes, prepared: PreparedTask, edits: list[tuple[str, bytes, bytes]]
) -> None:
    if sandboxes.name != "docker":
        pytest.skip("above, with more examples")
    check_law(sandboxes, prepared, edits)


def check_law(sandboxes: Sandboxes, prepared: PreparedTask, edits: list[tuple[str, bytes, bytes]]) -> None:
    async def law() -> None:
        sandbox = await sandboxes.open(sandbox_spec(prepared, TaskEnvironment()))
        try:
            done = await sandbox.run(["/bin/sh"], timeout_s=30, stdin=edit_script(edits))
            assert done.exit_code == 0, done.stderr
            await check_round_trip(sandbox, prepared)
        finally:
            await sandbox.close()

    asyncio.run(law())
